"""What the outer floors may know about a loaded model. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about a loaded model, for logs, ``/health`` and metrics.

    ``name`` is what the user asked for. ``tasks``: of "generate", "embed" and "score", those that the network can do.
    ``weights_bytes``: in their final form, packed and quantized. ``vocab_size`` counts embedding rows.
    ``attention_rejected`` holds (backend, reason) for each backend that was considered before ``attention_backend`` and
    refused. Over several ranks, ``weights_bytes`` and ``kv_bytes_per_token`` are of all of them, and ``collective``
    says how they sum.
    """

    name: str
    architecture: str
    tasks: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    max_model_len: int
    dtype: str
    num_parameters: int
    weights_bytes: int
    kv_bytes_per_token: int
    attention_backend: str
    attention_rejected: tuple[tuple[str, str], ...] = ()
    tensor_parallel_size: int = 1
    collective: str = "none"
