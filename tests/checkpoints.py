"""Small Qwen3 checkpoints whose behaviour is known, made on the fly.

SENS: random weights, untied and spread widely, so that changing any prompt token changes the greedy continuation; a
wrong KV cache, position or batch shows at once. (A tiny model with std 0.02 and tied embeddings repeats its last prompt
token whatever came before: every such fault passes on it.)

SCRIPT: hand-made weights; the next token is a function of the last two, so greedy decoding after a prompt that ends
with a trigger token puts out exactly a chosen list of ids, then EOS.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SMALL_VOCAB = 512
FULL_VOCAB = 151936


class ScriptClash(Exception):
    """The wanted output cannot be scripted: a pair of tokens has two successors, or two tokens look alike."""


def sens_config(vocab_size: int = SMALL_VOCAB, **overrides: Any) -> Any:
    """A two-layer Qwen3Config whose ends of text are the last ids of the vocabulary."""
    return Qwen3Config(**(_sens_settings(vocab_size) | overrides))


def _sens_settings(vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": eos_token_id(vocab_size),
    }


def eos_token_id(vocab_size: int) -> int:
    """Qwen3's own end of turn in the full vocabulary, the last id in a small one."""
    return 151645 if vocab_size == FULL_VOCAB else vocab_size - 1


def sens_model(vocab_size: int = SMALL_VOCAB, *, seed: int = 0, **overrides: Any) -> Any:
    """A float32 SENS model."""
    return _spread(Qwen3ForCausalLM(sens_config(vocab_size, **overrides)).float().eval(), seed)


def sens_moe_model(*, seed: int = 0, **overrides: Any) -> Any:
    """A float32 SENS model whose middle layer is dense and whose other two are mixtures of 8 experts."""
    settings: dict[str, Any] = {
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    }
    config = Qwen3MoeConfig(**(_sens_settings(SMALL_VOCAB) | settings | overrides))
    return _spread(Qwen3MoeForCausalLM(config).float().eval(), seed)


def _spread(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _sens_std(name), generator=generator)
    return model


def _sens_std(name: str) -> float:
    """Sharp embeddings; attention that is flat enough to look at every token and loud enough to be heard."""
    if "embed" in name or "lm_head" in name:
        return 1.0
    if "o_proj" in name or "v_proj" in name:
        return 0.5
    return 0.25 / 8 if "q_proj" in name or "k_proj" in name else 0.25


def save(model: Any, folder: Path, *, max_shard_size: str = "5GB") -> Path:
    """Writes weights, config and a generation config that names the end of text; gives the folder back."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    eos = model.config.eos_token_id
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "pad_token_id": eos}))
    return folder


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes ``config.json`` of a saved checkpoint by ``edit``."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


_CODE = 62  # dimensions of a token's code; one head of 31 copies each half of it
_HIDDEN = 128
_HALF = 64  # the current token's code lies below, the previous token's above
_ALWAYS_ON = 127
_NORM = 6.5  # sharpens attention until the head looks at one token only
_LOGIT_SCALE = 4.0
_MIN_MARGIN = 0.45
_FAST_FREQUENCIES = 4


def script_model(
    token_ids: Sequence[int], *, trigger: int, loop: bool = False, vocab_size: int = SMALL_VOCAB, seed: int = 0
) -> Any:
    """A model that answers ``trigger`` with ``token_ids``, then EOS (``loop``: the ids again, for ever).

    Each token has a code in 62 dimensions, orthonormal as long as there are few of them. One attention head looks
    exactly one position back and copies that token's code beside the current one's; the output row of a token sums the
    codes of the pairs that it follows.

    Raises:
        ScriptClash: this list cannot be scripted; cut the text into other tokens.
    """
    eos = eos_token_id(vocab_size)
    steps = _steps(token_ids, trigger, eos, loop)
    codes, other = _codes(steps, eos, seed)
    rows = _output_rows(steps, codes, other, eos)
    _check_margins(steps, codes, other, rows)
    model = Qwen3ForCausalLM(sens_config(vocab_size, hidden_size=_HIDDEN)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        _write_embeddings(model.model.embed_tokens.weight, codes, other)
        _write_look_back(model.model.layers[0].self_attn)
        for token_id, row in rows.items():
            model.lm_head.weight[token_id] = row * _LOGIT_SCALE
    return model


_Step = tuple[int | None, int, int]  # previous (None: anything), current, next


def _steps(token_ids: Sequence[int], trigger: int, eos: int, loop: bool) -> set[_Step]:
    chain: list[int | None] = [None, trigger, *token_ids]
    chain += token_ids[:2] if loop else [eos]
    steps = set()
    for previous, current, following in zip(chain, chain[1:], chain[2:], strict=False):
        assert current is not None
        assert following is not None
        steps.add((previous, current, following))
    if len({step[:2] for step in steps}) != len(steps):
        raise ScriptClash("one pair of tokens has two successors")
    return steps


def _codes(steps: set[_Step], eos: int, seed: int) -> tuple[dict[int, Tensor], Tensor]:
    """A unit vector for each scripted token, and one that all other tokens share."""
    tokens = sorted({token for _, *pair in steps for token in pair} | {eos})
    generator = torch.Generator().manual_seed(seed)
    if len(tokens) < _CODE:
        vectors = torch.linalg.qr(torch.randn(_CODE, _CODE, generator=generator))[0][: len(tokens) + 1]
    else:
        vectors = torch.nn.functional.normalize(torch.randn(len(tokens) + 1, _CODE, generator=generator), dim=-1)
    return dict(zip(tokens, vectors, strict=False)), vectors[-1]


def _state(previous: Tensor, current: Tensor) -> Tensor:
    state = torch.zeros(_HIDDEN)
    state[:_CODE], state[_HALF : _HALF + _CODE] = current, previous
    return state


def _output_rows(steps: set[_Step], codes: dict[int, Tensor], other: Tensor, eos: int) -> dict[int, Tensor]:
    rows: dict[int, Tensor] = {}
    for previous, current, following in sorted(steps, key=str):
        pair = _state(other if previous is None else codes[previous], codes[current])
        rows[following] = rows.get(following, torch.zeros(_HIDDEN)) + pair
    rows.setdefault(eos, torch.zeros(_HIDDEN))[:_CODE] += 1.6 * other  # whatever is off the script ends the text
    return rows


def _check_margins(steps: set[_Step], codes: dict[int, Tensor], other: Tensor, rows: dict[int, Tensor]) -> None:
    names, matrix = list(rows), torch.stack(list(rows.values()))
    for previous, current, following in steps:
        scores = matrix @ _state(other if previous is None else codes[previous], codes[current])
        right = scores[names.index(following)].item()
        scores[names.index(following)] = -math.inf
        if right - scores.max().item() < _MIN_MARGIN:
            raise ScriptClash("the scripted tokens are too many to be told apart")


def _write_embeddings(weight: Tensor, codes: dict[int, Tensor], other: Tensor) -> None:
    weight[:, :_CODE] = other
    weight[:, _ALWAYS_ON] = 1.0
    for token_id, code in codes.items():
        weight[token_id, :_CODE] = code


def _write_look_back(attention: Any) -> None:
    """Queries and keys are constants turned by rope; the key is turned one position further, so they meet there."""
    frequencies = [1e6 ** (-2 * i / 32) for i in range(_FAST_FREQUENCIES)]
    for i, frequency in enumerate(frequencies):
        for head in range(4):
            attention.q_proj.weight[head * 32 + i, _ALWAYS_ON] = 1.0
        for head in range(2):
            attention.k_proj.weight[head * 32 + i, _ALWAYS_ON] = math.cos(frequency)
            attention.k_proj.weight[head * 32 + 16 + i, _ALWAYS_ON] = math.sin(frequency)
    for head in range(2):
        for i in range(31):
            attention.v_proj.weight[head * 32 + i, head * 31 + i] = 1.0
            attention.o_proj.weight[_HALF + head * 31 + i, head * 64 + i] = 1 / 8
    attention.q_norm.weight.fill_(_NORM)
    attention.k_norm.weight.fill_(_NORM)
