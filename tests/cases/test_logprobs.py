"""Log probabilities against a full forward pass of transformers (lm-evaluation-harness#1411, vllm#4795)."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from tests.cases.conftest import Serve
from tests.cases.rig import Rig
from tests.cases.service import CHAT, TEXT, content, num_completion_tokens


def reference_logprobs(folder: Path, token_ids: list[int]) -> list[float]:
    """log P(token i | tokens before), for i from 1."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        rows = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return [rows[i, token_id].item() for i, token_id in enumerate(token_ids[1:])]


async def test_echoed_logprobs_are_those_of_a_full_pass(rig: Rig, serve: Serve) -> None:
    prompt = rig.ids("Hello, world say it")
    folder = rig.sens()
    async with serve(folder) as service:
        fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        reply = await service.same(TEXT, prompt=prompt, **fields, return_token_ids=True)
    choice = reply["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(prompt) + 1}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    expected = reference_logprobs(folder, prompt + choice["token_ids"])
    for value, right in zip(logprobs["token_logprobs"][1:], expected, strict=True):
        assert math.isclose(value, right, abs_tol=1e-3)
    for token, value, tops in zip(
        *(logprobs[key][1:] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert tops[token] == value
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token or not token.isascii()


async def test_several_prompts_of_ids_keep_their_order_and_lengths(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens()) as service:
        prompts = [rig.ids("alpha"), rig.ids("beta gamma delta")]
        fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        reply = await service.same(TEXT, prompt=prompts, **fields)
        for choice, prompt in zip(reply["choices"], prompts, strict=True):
            assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1
            assert choice["text"].startswith(rig.tokenizer.decode(prompt))


async def test_a_prompt_can_be_scored_without_generating(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens()) as service:
        reply = await service.same(TEXT, prompt="Hello, world", echo=True, logprobs=2, max_tokens=0, temperature=0)
        choice = reply["choices"][0]
        assert choice["text"] == "Hello, world"
        assert num_completion_tokens(reply) == 0
        assert len(choice["logprobs"]["tokens"]) == reply["usage"]["prompt_tokens"]
        scored = await service.text("Hello, world", prompt_logprobs=2, max_tokens=0)
        assert [entry is None for entry in scored["choices"][0]["prompt_logprobs"]][:2] == [True, False]
        await service.refuses(TEXT, prompt="x", max_tokens=0, param="max_tokens")
        streamed = await service.same(TEXT, prompt="Hello, world", echo=True, max_tokens=3, temperature=0)
        assert streamed["choices"][0]["text"].startswith("Hello, world")


async def test_chat_logprobs_have_their_own_shape(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens()) as service:
        tops: list[dict[str, Any]] = [{}, {"top_logprobs": 0}]
        for top in tops:
            reply = await service.same(logprobs=True, **top, max_tokens=5, temperature=0, ignore_eos=True)
            entries = reply["choices"][0]["logprobs"]["content"]
            assert len(entries) == num_completion_tokens(reply) == 5
            assert all(entry["top_logprobs"] == [] for entry in entries)
            spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
            assert spelled.decode("utf-8", "replace") == content(reply)
        await service.refuses(top_logprobs=3, max_tokens=5)
        await service.refuses(logprobs=True, top_logprobs=9999, max_tokens=5, param="top_logprobs")


async def test_top_logprobs_hold_the_chosen_token(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens()) as service:
        fields: dict[str, Any] = {"temperature": 0.7, "top_k": 1, "seed": 1, "max_tokens": 5, "ignore_eos": True}
        reply = await service.same(logprobs=True, top_logprobs=4, **fields)
        for entry in reply["choices"][0]["logprobs"]["content"]:
            assert len(entry["top_logprobs"]) in (4, 5)
            assert entry["token"] in [top["token"] for top in entry["top_logprobs"]]
            assert all(top["logprob"] <= 0 for top in [entry, *entry["top_logprobs"]])


async def test_impossible_tokens_have_finite_logprobs(rig: Rig, serve: Serve) -> None:
    """A biased-away or masked token is at minus infinity; JSON has no word for that. ``Service`` reads strict JSON."""
    folder, _ = rig.script("alpha beta", split=1)
    banned = {str(token_id): -100 for token_id in range(rig.vocab_size - 3)}
    async with serve(folder) as service:
        for path, fields in (
            (CHAT, {"logprobs": True, "top_logprobs": 20}),
            (TEXT, {"prompt": "x y z", "echo": True, "logprobs": 20}),
        ):
            await service.same(path, **fields, max_tokens=4, temperature=0, logit_bias=banned, min_tokens=4)


async def test_logprobs_of_split_characters_spell_the_text(rig: Rig, serve: Serve) -> None:
    text = "Zürich \U0001f9f5 日本語"
    folder, _ = rig.script(text, split=1)
    async with serve(folder) as service:
        reply = await service.same(logprobs=True, top_logprobs=1, max_tokens=64, temperature=0)
        entries = reply["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text == content(reply)
        plain = await service.same(TEXT, prompt="go\n", logprobs=1, max_tokens=64, temperature=0)
        offsets = plain["choices"][0]["logprobs"]["text_offset"]
        assert offsets == sorted(offsets)
        assert max(offsets) <= len(text)
