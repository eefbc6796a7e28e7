"""What a model will need and how fast a device can be with it, from counts alone: no weights, no device.

Memory is what the engine allocates; speed is the roofline (Williams, Waterman and Patterson 2009), which nothing can
beat: every step reads the weights it uses and the KV of all its requests once, and multiplies. Real engines reach a
part of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nanoserve.core.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Per device: memory in bytes, memory bandwidth in bytes/s, dense bf16 operations/s, and what is taken beforehand.

    ``usable``: the share of the memory that an engine takes. ``fixed_bytes``: the driver's context and its libraries,
    ``graph_bytes``: captured CUDA graphs; both are estimates.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    usable: float = 0.9
    fixed_bytes: int = GIB
    graph_bytes: int = GIB // 2


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        # NVIDIA's data sheets (SXM where there is a choice, without sparsity).
        Device(name="h200", memory_bytes=141 * 10**9, bandwidth=4.8e12, flops=989e12),
        Device(name="h100", memory_bytes=80 * 10**9, bandwidth=3.35e12, flops=989e12),
        Device(name="a100", memory_bytes=80 * 10**9, bandwidth=2.039e12, flops=312e12),
        Device(name="l40s", memory_bytes=48 * 10**9, bandwidth=0.864e12, flops=362e12),
        # Measured on two AVX-512 cores (see scheduler/drafts.py); the memory is the caller's to fill in.
        Device(
            name="cpu", memory_bytes=16 * GIB, bandwidth=37e9, flops=470e9, usable=0.4, fixed_bytes=0, graph_bytes=0
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Counts of a decoder. ``attention_weights`` and ``dense_weights`` are of all layers together.

    ``expert_weights``: one expert of one layer; ``num_experts`` of them stand in each of ``num_moe_layers`` and
    ``num_active_experts`` compute a token. ``weight_bytes`` a linear weight, ``dtype_bytes`` any other and activations,
    ``kv_head_bytes``: one head's key or value of one token.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_weights: int
    dense_weights: int
    norm_weights: int
    is_tied: bool
    weight_bytes: float
    dtype_bytes: int
    kv_head_bytes: int
    widest_row: int
    expert_weights: int = 0
    num_experts: int = 0
    num_active_experts: int = 0
    num_moe_layers: int = 0

    @property
    def num_parameters(self) -> int:
        experts = self.num_moe_layers * self.num_experts * self.expert_weights
        embeddings = self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)
        return self.attention_weights + self.dense_weights + self.norm_weights + experts + embeddings

    def linear_weights_read(self, num_tokens: int) -> float:
        """Weights, output layer included, that a step of so many tokens reads; each chooses its experts evenly."""
        fixed = self.attention_weights + self.dense_weights + self.vocab_size * self.hidden_size
        if not self.num_moe_layers:
            return fixed
        missed = (1 - self.num_active_experts / self.num_experts) ** num_tokens
        return fixed + self.num_moe_layers * self.num_experts * (1 - missed) * self.expert_weights

    @property
    def weights_a_token(self) -> int:
        """Weights that each token is multiplied by, output layer left out."""
        experts = self.num_moe_layers * self.num_active_experts * self.expert_weights
        return self.attention_weights + self.dense_weights + experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the engine is asked to hold: the flags of ``serve`` of these names."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on each device, and what they hold together."""

    weights_bytes: int
    activation_bytes: int
    graph_bytes: int
    fixed_bytes: int
    kv_bytes: int
    kv_bytes_a_token: int

    @property
    def num_kv_tokens(self) -> int:
        return self.kv_bytes // self.kv_bytes_a_token


def plan_memory(shape: ModelShape, device: Device, load: Load) -> MemoryPlan:
    """How the memory of each device is divided.

    Raises:
        ConfigError: heads cannot be shared out evenly, or nothing is left for KV.
    """
    ranks = load.tensor_parallel_size
    if shape.num_heads % ranks or (shape.num_kv_heads % ranks and ranks % shape.num_kv_heads):
        raise ConfigError(
            f"`tensor_parallel_size` must divide {shape.num_heads} heads and fit {shape.num_kv_heads} KV heads."
            f" Given: {ranks}.",
            param="tensor_parallel_size",
        )
    heads_a_rank = max(1, shape.num_kv_heads // ranks)
    weights_bytes, activation_bytes = _weights(shape, ranks), _activations(shape, load)
    budget = int(device.memory_bytes * device.usable)
    left = budget - weights_bytes - activation_bytes - device.graph_bytes - device.fixed_bytes
    kv_bytes_a_token = 2 * shape.num_layers * heads_a_rank * shape.kv_head_bytes
    if left < kv_bytes_a_token:
        raise ConfigError(
            f"The model needs {weights_bytes / GIB:.1f} GiB for weights and {activation_bytes / GIB:.1f} GiB for"
            f" activations on each device; {device.name} gives {budget / GIB:.1f} GiB.",
            param="device",
        )
    return MemoryPlan(
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        graph_bytes=device.graph_bytes,
        fixed_bytes=device.fixed_bytes,
        kv_bytes=left,
        kv_bytes_a_token=kv_bytes_a_token,
    )


def _weights(shape: ModelShape, ranks: int) -> int:
    """Linear weights are sharded, norms are not; an untied embedding keeps its dtype."""
    embedding = shape.vocab_size * shape.hidden_size
    plain = shape.norm_weights + (0 if shape.is_tied else embedding / ranks)
    linear = (shape.num_parameters - shape.norm_weights - (0 if shape.is_tied else embedding)) / ranks
    return int(linear * shape.weight_bytes + plain * shape.dtype_bytes)


def _activations(shape: ModelShape, load: Load) -> int:
    """The largest moment of a step: residual stream, its norm and the widest row; logits in dtype and in float32."""
    rows = load.max_num_batched_tokens * (2 * shape.hidden_size + 2 * shape.widest_row // load.tensor_parallel_size)
    logits = load.max_num_seqs * shape.vocab_size * (shape.dtype_bytes + 4)
    return rows * shape.dtype_bytes + logits


def decode_seconds(shape: ModelShape, device: Device, *, batch: int, context: int, ranks: int = 1) -> float:
    """The least time of a step that gives each of ``batch`` requests with ``context`` tokens one more."""
    kv_bytes = batch * context * 2 * shape.num_layers * max(shape.num_kv_heads, ranks) * shape.kv_head_bytes
    num_bytes = shape.linear_weights_read(batch) * shape.weight_bytes + kv_bytes
    flops = batch * (_matmul_flops(shape) + _attention_flops(shape, context))
    return max(num_bytes / device.bandwidth, flops / device.flops) / ranks


def prefill_tokens_a_second(shape: ModelShape, device: Device, *, num_tokens: int, ranks: int = 1) -> float:
    """The most prompt tokens a second, of prompts of ``num_tokens``."""
    flops = 2.0 * shape.weights_a_token + _attention_flops(shape, num_tokens / 2)
    return ranks * device.flops / flops


def _matmul_flops(shape: ModelShape) -> float:
    return 2.0 * (shape.weights_a_token + shape.vocab_size * shape.hidden_size)


def _attention_flops(shape: ModelShape, context: float) -> float:
    return 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * context


def lines(shape: ModelShape, device: Device, load: Load) -> Iterator[str]:
    """The plan for a reader.

    Raises:
        ConfigError: see :func:`plan_memory`.
    """
    memory, ranks = plan_memory(shape, device, load), load.tensor_parallel_size
    yield f"{shape.num_parameters / 1e9:.2f} billion parameters on {ranks} x {device.name}"
    yield ""
    yield "memory on each device"
    for name, num_bytes in (
        ("weights", memory.weights_bytes),
        ("activations", memory.activation_bytes),
        ("graphs (estimate)", memory.graph_bytes),
        ("driver (estimate)", memory.fixed_bytes),
        ("KV cache", memory.kv_bytes),
    ):
        yield f"  {name:<20}{num_bytes / GIB:>9.2f} GiB"
    num_tokens = memory.num_kv_tokens
    yield f"  {'KV tokens':<20}{num_tokens:>9,}     {memory.kv_bytes_a_token / 1024:.1f} KiB a token and device"
    yield ""
    yield "requests at once"
    for context in sorted({min(1024, load.max_model_len), load.max_model_len}):
        yield f"  of {context:>7,} tokens   {min(load.max_num_seqs, num_tokens // context):>6,}"
    yield ""
    yield "roofline (no engine is faster)"
    context = min(1024, load.max_model_len)
    for batch in sorted({1, min(16, load.max_num_seqs), load.max_num_seqs}):
        seconds = decode_seconds(shape, device, batch=batch, context=context, ranks=ranks)
        yield f"  decode {batch:>4} x {context:,}   {seconds * 1e3:>9.2f} ms a step {batch / seconds:>12,.0f} tok/s"
    rate = prefill_tokens_a_second(shape, device, num_tokens=context, ranks=ranks)
    yield f"  prefill of {context:,}   {rate:>33,.0f} tok/s"
