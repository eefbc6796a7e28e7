"""The one doorway from the floors above into tensors: settings in, a loaded model out."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanoserve.core.config import EngineArgs, SchedulerConfig, parse_bytes
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
from nanoserve.model.kv_tiers import KVTiers
from nanoserve.model.loader import load_weights, tensor_names
from nanoserve.model.memory_table import MemoryTable, explained
from nanoserve.model.parallel import ALONE, Collective
from nanoserve.model.parallel.group import RankZero, Runner, ShardGroup
from nanoserve.model.parallel.launcher import ChildProcesses, Launcher
from nanoserve.model.quant import linear_method
from nanoserve.model.quant.measured import MeasuredMethod
from nanoserve.model.runner import ModelRunner
from nanoserve.model.shard_runner import ShardRunner
from nanoserve.model.slots import Slots
from nanoserve.model.threads import default_threads

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to execute plans. ``scheduler`` holds the counts that its memory allows.

    ``compile_grammar`` may be called from any thread, ahead of the request that needs the grammar.
    """

    runner: Runner
    scheduler: SchedulerConfig
    info: ModelInfo
    shards: ShardGroup | None = None
    compile_grammar: Callable[[Grammar], object]

    def fault(self) -> str | None:
        """Why the model can execute no more plans, where that is known; any thread may ask."""
        return self.shards.fault if self.shards else None


Agree = Callable[[int, int], tuple[int, int]]
"""From the KV blocks that a rank has room for, and the bytes of its weights, to what counts for all ranks together."""


def build(args: EngineArgs, launcher: Launcher | None = None) -> LoadedModel:
    """Loads ``args.model`` and allocates its KV pool; over several ranks with ``args.tensor_parallel_size``.

    ``launcher`` starts the processes of the other ranks; None: children of this one.

    Raises:
        ConfigError: a setting cannot be met here. All settings are checked before weights are read.
        CheckpointError: the weights are incomplete or broken.
        ShardLostError: another rank could not be started.
    """
    _refuse_unbuilt(args)
    if args.tensor_parallel_size == 1:
        return build_rank(args, ALONE, lambda num_blocks, weights_bytes: (num_blocks, weights_bytes))
    config = load_config(resolve_model(args.model), tuple(ARCHITECTURES))
    config.of_rank(0, args.tensor_parallel_size)  # a mistake is told before anything is started
    group = ShardGroup(args, launcher or ChildProcesses(), on_gpus=_device(args.device).type == "cuda")
    try:
        return _build_rank_zero(args, group)
    except BaseException:
        group.close()
        raise


def _build_rank_zero(args: EngineArgs, group: ShardGroup) -> LoadedModel:
    def agree(num_blocks: int, weights_bytes: int) -> tuple[int, int]:
        others = group.loaded()
        num_blocks = min(num_blocks, *(other.num_blocks for other in others))
        group.allocate(num_blocks)
        return num_blocks, weights_bytes + sum(other.weights_bytes for other in others)

    loaded = build_rank(args, group.collective, agree)
    return replace(loaded, runner=RankZero(loaded.runner, group), shards=group)


def build_rank(args: EngineArgs, collective: Collective, agree: Agree) -> LoadedModel:
    """One rank's share of :func:`build`."""
    _set_threads(max(1, (args.num_threads or default_threads()) // collective.size))
    folder = resolve_model(args.model)
    config = load_config(folder, tuple(ARCHITECTURES)).of_rank(collective.rank, collective.size)
    dtype = _dtype(args.dtype, config.dtype)
    max_model_len = _max_model_len(args.max_model_len, config)
    method = MeasuredMethod(linear_method(args.quantization))
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
            collective=collective,
        )
    num_parameters, loaded_bytes = _load(network, folder)
    own_bytes = loaded_bytes - method.saved_bytes
    free = None
    generates = "generate" in tasks_of(architecture)
    if device.type == "cuda":
        free = free_bytes(network, backend, config, args, device, generates=generates)
    num_blocks = _count_blocks(args, backend, config, max_model_len=max_model_len, free=free)
    num_blocks, weights_bytes = agree(num_blocks, own_bytes)
    pool, tiers, scheduler, memory = _allocate(
        args, backend, config, device, max_model_len=max_model_len, num_blocks=num_blocks, weights_bytes=own_bytes
    )
    token_bytes = _token_bytes(backend, config, args.block_size)
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
        kv_bytes_per_token=token_bytes * collective.size,
        attention_backend=backend.name,
        attention_rejected=rejected,
        tensor_parallel_size=collective.size,
        collective=collective.name,
    )
    logger.info("model loaded %s num_blocks=%d block_size=%d", info, scheduler.num_blocks, scheduler.block_size)
    logger.info("memory: %s", memory)
    max_blocks = -(-scheduler.max_model_len // args.block_size)
    batch = InputBatch(max_num_seqs=args.max_num_seqs, max_blocks_per_request=max_blocks, block_size=args.block_size)
    if collective.rank:
        shard = ShardRunner(network, backend, pool, batch=batch, tiers=tiers)
        return LoadedModel(runner=shard, scheduler=scheduler, info=info, compile_grammar=lambda _: None)
    graphs = None
    if collective.size == 1 and generates:  # a capture runs steps that the shards know nothing of
        graphs = decode_graphs(args, network, backend, pool, max_blocks=max_blocks)
    grammars = GrammarTokenizer(folder, config.vocab_size)
    runner = ModelRunner(
        network,
        backend,
        pool,
        batch=batch,
        grammars=GrammarTable(grammars),
        max_num_seqs=args.max_num_seqs,
        tiers=tiers,
        memory=memory,
        graphs=graphs,
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
    """Fills the network and gives its weights their final form.

    Returns how many parameters the whole model has, and the bytes of those that are here, as loaded.
    """
    slots: Slots = network.slots()
    load_weights(folder, slots)
    num_parameters = sum(math.prod(slot.shape) for slot in slots.values())
    counts = num_parameters, sum(slot.memory.nbytes for slot in slots.values())
    slots.clear()  # the views would keep every weight alive beside its packed form
    network.prepare()
    return counts


def _refuse_unbuilt(args: EngineArgs) -> None:
    if args.kv_disk_path is not None and args.tensor_parallel_size > 1:
        raise ConfigError(
            "`kv_disk_path` is not built for several ranks; use `kv_host_memory` alone.", param="kv_disk_path"
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


def _count_blocks(
    args: EngineArgs, backend: AttentionBackend, config: ModelConfig, *, max_model_len: int, free: int | None
) -> int:
    """The KV blocks that the memory settings buy on this rank; ``free``: bytes that its GPU has left for them."""
    return count_blocks(
        args,
        block_bytes=_token_bytes(backend, config, args.block_size) * args.block_size,
        max_useful_blocks=-(-max_model_len // args.block_size) * args.max_num_seqs,
        free_on_device=free,
    )


def _allocate(
    args: EngineArgs,
    backend: AttentionBackend,
    config: ModelConfig,
    device: torch.device,
    *,
    max_model_len: int,
    num_blocks: int,
    weights_bytes: int,
) -> tuple[KVPool, KVTiers, SchedulerConfig, MemoryTable]:
    """The pool and the tiers of this rank; ``max_model_len`` is cut to what the pool holds."""
    block_bytes = _token_bytes(backend, config, args.block_size) * args.block_size
    if args.kv_host_memory is not None:
        args = replace(args, kv_host_memory=parse_bytes(args.kv_host_memory) // args.tensor_parallel_size)
    capacity = num_blocks * args.block_size
    if capacity < max_model_len:
        logger.warning("max_model_len is cut to what the KV cache holds from=%d to=%d", max_model_len, capacity)
    memory = MemoryTable(
        weights_bytes=weights_bytes,
        kv_bytes=num_blocks * block_bytes,
        host_tier_bytes=parse_bytes(args.kv_host_memory) if args.kv_host_memory is not None else 0,
        disk_tier_bytes=parse_bytes(args.kv_disk_memory) if args.kv_disk_memory is not None else 0,
    )
    with explained(memory, at_start=True):
        pool = KVPool(backend, num_layers=config.num_layers, num_blocks=num_blocks, device=device)
        tiers, num_host_blocks, num_disk_blocks = KVTiers.allocate(args, pool.blocks)
    scheduler = SchedulerConfig(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        num_disk_blocks=num_disk_blocks,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=min(max_model_len, capacity),
        enable_prefix_caching=args.enable_prefix_caching,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        num_speculative_tokens=args.max_drafts,
    )
    return pool, tiers, scheduler, memory
