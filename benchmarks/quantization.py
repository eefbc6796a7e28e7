"""How far quantized weights move the logits of a checkpoint, random ones included.

    python -m benchmarks.quantization --model FOLDER [--tokens 128]

One prompt of random tokens; relative error is |logits - reference| / |reference| (L2 over all tokens), the reference
being the same checkpoint with `--quantization none`. Writes benchmarks/results/quantization.json.
"""

import argparse
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import table, write
from nanoserve.core.config import EngineArgs
from nanoserve.model.attention.base import ForwardBatch
from nanoserve.model.build import build
from nanoserve.model.quant import LINEAR_METHODS

_BLOCK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder, hub id or demo")
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    exact = logits_of(args.model, "none", args.tokens)
    rows = {}
    for name in LINEAR_METHODS:
        got = logits_of(args.model, name, args.tokens)
        rows[name] = {
            "relative_logit_error": float((got - exact).norm() / exact.norm()),
            "same_best_token": float((got.argmax(1) == exact.argmax(1)).float().mean()),
        }
    print(table(rows))
    print(f"written: {write('quantization', {'model': args.model, 'tokens': args.tokens, 'methods': rows}).name}")


@torch.inference_mode()
def logits_of(model: str, quantization: str, num_tokens: int) -> Tensor:
    """[num_tokens, vocab_size], after each token of one prompt."""
    loaded = build(EngineArgs(model=model, quantization=quantization, kv_cache_memory="512MiB", block_size=_BLOCK))
    runner: Any = loaded.runner
    places = torch.arange(num_tokens)
    ids = torch.randint(0, loaded.info.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    batch = ForwardBatch(
        token_ids=ids,
        positions=places,
        slot_blocks=places // _BLOCK,
        slot_offsets=places % _BLOCK,
        query_lens=np.array([num_tokens]),
        kv_lens=np.array([num_tokens]),
        block_tables=np.arange(-(-num_tokens // _BLOCK))[None],
    )
    # The runner hands logits to nobody but its sampler, so this goes past it.
    hidden = runner._network.forward(ids, places, runner._pool.layers, runner._backend.prepare(batch))
    return runner._network.logits(hidden).float()


if __name__ == "__main__":
    main()
