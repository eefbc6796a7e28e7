"""The one doorway from the floors above into tensors: settings in, a loaded model out."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanoserve.core.config import EngineArgs, SchedulerConfig
from nanoserve.core.errors import ConfigError
from nanoserve.core.request import Grammar
from nanoserve.model.architectures import ARCHITECTURES, as_stored, network_class, tasks_of
from nanoserve.model.attention import choose_backend
from nanoserve.model.attention.base import AttentionBackend, AttentionSpec
from nanoserve.model.config import ModelConfig, load_config
from nanoserve.model.cuda import decode_graphs, free_bytes, refuse_on_cuda
from nanoserve.model.folder import resolve_model
from nanoserve.model.grammar import GrammarTable, GrammarTokenizer
from nanoserve.model.info import ModelInfo
from nanoserve.model.input_batch import InputBatch
from nanoserve.model.kernels import choose_kernels
from nanoserve.model.kernels.base import Kernels
from nanoserve.model.kernels.native import library, why_not
from nanoserve.model.kernels.native.fused import NativeKernels
from nanoserve.model.kv_cache import KVPool, count_blocks
from nanoserve.model.loader import load_weights, tensor_names
from nanoserve.model.quant import linear_method
from nanoserve.model.runner import ModelRunner
from nanoserve.model.threads import default_threads

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to execute plans. ``scheduler`` holds the counts that its memory allows.

    ``compile_grammar`` may be called from any thread, ahead of the request that needs the grammar.
    """

    runner: ModelRunner
    scheduler: SchedulerConfig
    info: ModelInfo
    compile_grammar: Callable[[Grammar], object]


def build(args: EngineArgs) -> LoadedModel:
    """Loads ``args.model`` and allocates its KV pool.

    Raises:
        ConfigError: a setting cannot be met here. All settings are checked before weights are read.
        CheckpointError: the weights are incomplete or broken.
    """
    _refuse_unbuilt(args)
    _set_threads(args.num_threads or default_threads())
    folder = resolve_model(args.model)
    config = load_config(folder, tuple(ARCHITECTURES))
    dtype = _dtype(args.dtype, config.dtype)
    max_model_len = _max_model_len(args.max_model_len, config)
    method = linear_method(args.quantization)
    device = _device(args.device)
    backend, rejected = choose_backend(args.attention_backend, _attention_spec(args, config, dtype, device))
    kernels = choose_kernels(*config.row_sizes, device=device)
    if device.type == "cuda":
        refuse_on_cuda(args)
    if args.deterministic:
        _require_deterministic(backend.name, kernels, args.quantization)
    architecture = as_stored(config.architecture, tensor_names(folder))
    with device:  # tensors of the network are made there
        network = network_class(architecture)(
            config,
            dtype=dtype,
            method=method,
            backend=backend,
            kernels=kernels,
            max_positions=max_model_len,
        )
    num_parameters, weights_bytes = _load(network, folder)
    free = None
    generates = "generate" in tasks_of(architecture)
    if device.type == "cuda":
        free = free_bytes(network, backend, config, args, device, generates=generates)
    pool, scheduler = _allocate(args, backend, config, max_model_len=max_model_len, device=device, free=free)
    info = ModelInfo(
        name=args.model,
        architecture=architecture,
        tasks=tasks_of(architecture),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_model_len=scheduler.max_model_len,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        weights_bytes=weights_bytes,
        kv_bytes_per_token=_token_bytes(backend, config, args.block_size),
        attention_backend=backend.name,
        attention_rejected=rejected,
    )
    logger.info("model loaded %s num_blocks=%d block_size=%d", info, scheduler.num_blocks, scheduler.block_size)
    max_blocks = -(-scheduler.max_model_len // args.block_size)
    grammars = GrammarTokenizer(folder, config.vocab_size)
    runner = ModelRunner(
        network,
        backend,
        pool,
        batch=InputBatch(
            max_num_seqs=args.max_num_seqs,
            max_blocks_per_request=max_blocks,
            block_size=args.block_size,
        ),
        grammars=GrammarTable(grammars),
        max_num_seqs=args.max_num_seqs,
        graphs=decode_graphs(args, network, backend, pool, max_blocks=max_blocks) if generates else None,
    )
    return LoadedModel(runner=runner, scheduler=scheduler, info=info, compile_grammar=grammars.compiled)


def _set_threads(count: int) -> None:
    torch.set_num_threads(count)
    if (kernels := library()) is not None:
        kernels.set_threads(count)


def _require_deterministic(backend_name: str, kernels: Kernels, quantization: str) -> None:
    """Native kernels give each row the same bits in any company; torch's products and attention do not."""
    reason = None
    if library() is None:
        reason = why_not()
    elif backend_name != "native":
        reason = f"the attention backend is {backend_name}"
    elif quantization == "fp8":
        reason = "8-bit floats are multiplied by torch"
    elif not isinstance(kernels, NativeKernels):
        reason = "the sizes of this model's rows are no multiples of 16"
    if reason is not None:
        raise ConfigError(f"`deterministic` needs the native kernels throughout: {reason}.", param="deterministic")


def _attention_spec(args: EngineArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> AttentionSpec:
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=args.block_size,
        dtype=dtype,
        device=device,
        kv_cache_dtype=args.kv_cache_dtype,
    )


def _load(network: Any, folder: Path) -> tuple[int, int]:
    """Fills the network and gives its weights their final form; returns how many parameters, and their bytes."""
    slots: dict[str, torch.Tensor] = network.slots()
    load_weights(folder, slots)
    counts = sum(slot.numel() for slot in slots.values()), sum(slot.nbytes for slot in slots.values())
    slots.clear()  # the views would keep every weight alive beside its packed form
    network.prepare()
    return counts


def _refuse_unbuilt(args: EngineArgs) -> None:
    if args.tensor_parallel_size != 1:
        raise ConfigError(
            f"`tensor_parallel_size` must be 1; more is not built yet. Given: {args.tensor_parallel_size}.",
            param="tensor_parallel_size",
        )
    if args.kv_cache_dtype not in ("auto", "int8"):
        raise ConfigError(
            f"`kv_cache_dtype` must be auto or int8. Given: {args.kv_cache_dtype!r}.", param="kv_cache_dtype"
        )
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "num_threads", "max_model_len"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"`{name}` must be >= 1. Given: {value}.", param=name)


def _dtype(wanted: str, stored: str) -> torch.dtype:
    """The checkpoint's own dtype for "auto"; float16, which this CPU path does not compute in, becomes bfloat16."""
    name = wanted
    if wanted == "auto":
        name = "bfloat16" if stored == "float16" else stored
    if name not in _DTYPES:
        raise ConfigError(f"`dtype` must be auto or one of: {', '.join(_DTYPES)}. Given: {name!r}.", param="dtype")
    return _DTYPES[name]


def _device(wanted: str) -> torch.device:
    """A GPU for "auto" where there is one."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"`device` must be auto, cpu or cuda. Given: {wanted!r}.", param="device")
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("`device` cuda cannot be used: there is no CUDA device here.", param="device")
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda and wanted != "cpu" else torch.device("cpu")


def _max_model_len(wanted: int | None, config: ModelConfig) -> int:
    if wanted is not None and wanted > config.max_positions:
        raise ConfigError(
            f"`max_model_len` must be at most the model's context of {config.max_positions} tokens. Given: {wanted}.",
            param="max_model_len",
        )
    return wanted or config.max_positions


def _token_bytes(backend: AttentionBackend, config: ModelConfig, block_size: int) -> int:
    elements = torch.Size(backend.kv_shape(num_layers=config.num_layers, num_blocks=1)).numel()
    return elements * backend.kv_dtype.itemsize // block_size


def _allocate(
    args: EngineArgs,
    backend: AttentionBackend,
    config: ModelConfig,
    *,
    max_model_len: int,
    device: torch.device,
    free: int | None,
) -> tuple[KVPool, SchedulerConfig]:
    """The pool that the memory settings buy; ``max_model_len`` is cut to what it holds."""
    blocks_per_request = -(-max_model_len // args.block_size)
    num_blocks = count_blocks(
        args,
        block_bytes=_token_bytes(backend, config, args.block_size) * args.block_size,
        max_useful_blocks=blocks_per_request * args.max_num_seqs,
        free_on_device=free,
    )
    capacity = num_blocks * args.block_size
    if capacity < max_model_len:
        logger.warning("max_model_len is cut to what the KV cache holds from=%d to=%d", max_model_len, capacity)
    pool = KVPool(backend, num_layers=config.num_layers, num_blocks=num_blocks, device=device)
    scheduler = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=min(max_model_len, capacity),
        enable_prefix_caching=args.enable_prefix_caching,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        num_speculative_tokens=args.max_drafts,
    )
    return pool, scheduler
