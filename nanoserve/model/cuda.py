"""What building a model on a GPU takes beyond a CPU: refusals, the memory that is left for KV, decode graphs."""

import logging

import numpy as np
import torch

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import ConfigError
from nanoserve.model.attention.base import AttentionBackend, ForwardBatch
from nanoserve.model.config import ModelConfig
from nanoserve.model.kernels.triton import why_not
from nanoserve.model.kv_cache import KVPool
from nanoserve.model.quant import fp8
from nanoserve.model.runner import GraphsFactory, Network
from nanoserve.model.sampling_table import SamplingTable

logger = logging.getLogger(__name__)

_ON_CUDA = ("none", "fp8")  # ways to store weights that a GPU multiplies in


def refuse_on_cuda(args: EngineArgs) -> None:
    """Settings that only the CPU path meets.

    Raises:
        ConfigError: one of them is on.
    """
    if args.quantization not in _ON_CUDA:
        raise ConfigError(
            f"`quantization` {args.quantization} is not built for CUDA; choose from: {', '.join(_ON_CUDA)}.",
            param="quantization",
        )
    if args.quantization == "fp8" and (reason := fp8.why_not(torch.device("cuda"))) is not None:
        raise ConfigError(f"`quantization` fp8 cannot be used here: {reason}.", param="quantization")
    if (reason := why_not(torch.device("cuda"))) is not None:
        raise ConfigError(f"`device` cuda needs Triton's kernels: {reason}.", param="device")


@torch.inference_mode()
def free_bytes(
    network: Network,
    backend: AttentionBackend,
    config: ModelConfig,
    args: EngineArgs,
    device: torch.device,
    *,
    generates: bool,
) -> int:
    """Bytes that the GPU has left beside the weights and the largest step, which is run once to see what it takes.

    ``generates``: the network has a vocabulary head.
    """
    num_tokens = args.max_num_batched_tokens
    num_blocks = -(-num_tokens // args.block_size)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    pool = KVPool(backend, num_layers=config.num_layers, num_blocks=num_blocks, device=device)
    pool_bytes = torch.cuda.memory_allocated(device) - weights
    lens = np.array([num_tokens])
    batch = ForwardBatch.trial(lens, lens, np.arange(num_blocks)[None], args.block_size)
    # The positions need not be the request's own: there may be fewer of them than tokens in a step.
    token_ids, where = batch.token_ids.to(device), (batch.positions % args.block_size).to(device)
    hidden = network.forward(token_ids, where, pool.layers, backend.prepare(batch))
    if generates:
        network.logits(hidden[: args.max_num_seqs]).float()
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - weights - pool_bytes
    del pool, hidden
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    logger.info("memory on the GPU total=%d weights=%d largest_step=%d free=%d", total, weights, step, free)
    return max(0, free - step)


def decode_graphs(
    args: EngineArgs, network: Network, backend: AttentionBackend, pool: KVPool, *, max_blocks: int
) -> GraphsFactory | None:
    """What runs steps of single tokens whole; None where the kernels for that do not run, as on a usual CPU.

    With ``enforce_eager``, and where Triton interprets, the same steps are computed without being captured.
    """
    device = pool.layers[0].device
    if why_not(device) is not None:
        return None
    from nanoserve.model.cuda_graph import DecodeBackend, DecodeGraphs, cuda_capture

    if not isinstance(backend, DecodeBackend):
        return None

    def factory(table: SamplingTable) -> DecodeGraphs:
        captures = device.type == "cuda" and not args.enforce_eager
        graphs = DecodeGraphs(
            network, backend, pool.layers, table, max_num_seqs=args.max_num_seqs, max_blocks=max_blocks,
            capture=cuda_capture() if captures else None,
        )  # fmt: skip
        with torch.inference_mode():
            graphs.warm_up()
        return graphs

    return factory
