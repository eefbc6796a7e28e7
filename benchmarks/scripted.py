"""A Qwen3 of any shape that writes chosen texts at the full cost of its size: what it says is no matter of chance.

After a trigger each next token is a function of the last two. Layer 0's attention looks one position back and lays
that token's code beside the current one's; a token's output row is the sum of the two codes that come before it. All
other layers compute as much as ever and add nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.make_checkpoint import Shape, random_weights

_THETA = 1e6
_NORM = 5.0  # sharpens attention until it looks at one position
_NUM_FREQUENCIES = 4


def scripted(shape: Shape, scripts: Mapping[int, Sequence[int]], *, seed: int = 0) -> tuple[Shape, dict[str, Tensor]]:
    """The shape (its embeddings untied) and weights that answer each trigger with its script, over and over.

    Triggers and scripted tokens must all differ, and be fewer than half of the hidden size.
    """
    shape = replace(shape, tie_word_embeddings=False)
    half = shape.hidden_size // 2
    ids = [token_id for trigger, script in scripts.items() for token_id in (trigger, *script)]
    assert len(set(ids)) == len(ids) < half - 1, "the tokens cannot be told apart"
    generator = torch.Generator().manual_seed(seed)
    codes = torch.linalg.qr(torch.randn(half - 1, half - 1, generator=generator))[0].bfloat16()
    code_of = dict(zip(ids, codes, strict=False))
    weights = random_weights(shape, seed)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) or name in _WRITTEN:
            weight.zero_()
    weights["model.embed_tokens.weight"][:, -1] = 1.0
    weights["model.embed_tokens.weight"][ids, : half - 1] = codes[: len(ids)]
    for trigger, script in scripts.items():
        _write_successors(weights["lm_head.weight"], trigger, script, code_of)
    _write_look_back(weights, shape)
    return shape, weights


_WRITTEN = frozenset(
    ["model.embed_tokens.weight", "lm_head.weight", *(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")]
)


def _write_successors(lm_head: Tensor, trigger: int, script: Sequence[int], code_of: Mapping[int, Tensor]) -> None:
    size, half = len(code_of[trigger]), lm_head.shape[1] // 2
    for place, token_id in enumerate(script):
        lm_head[token_id, :size] += code_of[script[place - 1]]
        lm_head[token_id, half : half + size] += code_of[script[place - 2]]
    # Before the trigger anything may stand, so its two successors rest on what is the same.
    lm_head[script[0], :size] += 2 * code_of[trigger]
    lm_head[script[1], half : half + size] += code_of[trigger]


def _write_look_back(weights: dict[str, Tensor], shape: Shape) -> None:
    """Queries and keys are constants that rope turns; the key is turned one position further, so they meet there."""
    prefix, size, half = "model.layers.0.self_attn.", shape.head_dim, shape.hidden_size // 2
    query, key, value, out = (weights[f"{prefix}{part}_proj.weight"] for part in "qkvo")
    for i in range(_NUM_FREQUENCIES):
        place = i * size // 32
        frequency = _THETA ** (-2 * place / size)
        query[place::size, -1] = 1.0
        key[place::size, -1] = math.cos(frequency)
        key[place + size // 2 :: size, -1] = math.sin(frequency)
    share = half // shape.num_key_value_heads
    group = shape.num_attention_heads // shape.num_key_value_heads
    normed = math.sqrt(2 / shape.hidden_size)  # the length of an embedding is sqrt(2)
    for head in range(shape.num_key_value_heads):
        for i in range(share):
            value[head * size + i, head * share + i] = 1.0
            out[half + head * share + i, head * group * size + i] = normed
    for part in "qk":
        weights[f"{prefix}{part}_norm.weight"].fill_(_NORM)
