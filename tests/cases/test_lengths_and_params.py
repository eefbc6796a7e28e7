"""Parameters at and beyond their edges: never a 500, never a silent change, and the engine lives on."""

from typing import Any

import pytest

from tests.cases.conftest import Serve
from tests.cases.rig import Rig, set_generation_config
from tests.cases.service import CHAT, NO_THINKING, TEXT, content, finish, num_completion_tokens
from tests.serving.replies import refused


async def test_values_that_are_no_numbers_or_no_text(rig: Rig, serve: Serve) -> None:
    """sglang#28153: NaN passed the range checks and reached the sampler."""
    head = '{"model": "team/case", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, '
    async with serve(rig.sens()) as service:
        for param in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"):
            for literal in ("NaN", "Infinity", "-Infinity"):
                raw = head + f'"{param}": {literal}}}'
                refused(await service.client.post(CHAT, content=raw), 400, param)
        refused(await service.client.post(CHAT, content=head + '"logit_bias": {"5": NaN}}'), 400, "logit_bias")
        raw = '{"model": "team/case", "prompt": "bad \\udc00", "stream": true}'
        refused(await service.client.post(TEXT, content=raw), 400, "prompt")
        raw = '{"model": "team/case", "prompt": "good \\ud83e\\uddf5", "max_tokens": 2}'
        assert (await service.client.post(TEXT, content=raw)).status_code == 200


@pytest.mark.parametrize(
    "param, value",
    [
        ("temperature", -0.1), ("temperature", 9), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.01),
        ("presence_penalty", 2.5), ("repetition_penalty", 0), ("n", 0), ("n", 1000), ("seed", 2**64), ("seed", 1.5),
        ("top_k", -2), ("max_tokens", -3), ("max_tokens", 0), ("top_logprobs", 3), ("messages", []),
        ("response_format", {"type": "yaml"}), ("chat_template_kwargs", "no"),
        ("chat_template", "{{ 1 }}"), ("use_beam_search", True), ("functions", [{"name": "f"}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]),
    ],
)  # fmt: skip
async def test_values_out_of_range_are_named(rig: Rig, serve: Serve, param: str, value: Any) -> None:
    async with serve(rig.sens()) as service:
        await service.refuses(**{param: value}, param=param)


async def test_ids_outside_the_vocabulary(rig: Rig, serve: Serve) -> None:
    """vllm#16529, #5963: one id too high in logit_bias or in a prompt stopped the engine."""
    size = rig.vocab_size
    async with serve(rig.sens()) as service:
        for bias in ({str(size): 5}, {"AI": -100}, {"-1": 1}, {"42": 250}):
            await service.refuses(logit_bias=bias, max_tokens=2, param="logit_bias")
        for prompt in ([97, size], [97, -5], [1.5], [5279552648203111001], [True], [97, "x"], [[97], [size]]):
            await service.refuses(TEXT, prompt=prompt, max_tokens=2, param="prompt")
        await service.refuses(stop_token_ids=[size], max_tokens=2, param="stop_token_ids")
        await service.refuses(TEXT, prompt="x", prompt_embeds="AAAA", param="prompt_embeds")
        await service.text([97, size - 1], max_tokens=2)
        padded = await service.same(logit_bias={str(rig.padding_id): 100}, max_tokens=3, temperature=0)
        assert (content(padded), num_completion_tokens(padded)) == ("", 3)
        banned = {str(token_id): -100 for token_id in range(300)}
        ids = await service.text("x", logit_bias=banned, max_tokens=20, temperature=1, return_token_ids=True)
        assert min(ids["choices"][0]["token_ids"]) >= 300


async def test_seeds(rig: Rig, serve: Serve) -> None:
    sampled: dict[str, Any] = {"temperature": 1, "max_tokens": 24, "ignore_eos": True}
    async with serve(rig.sens()) as service:
        for seed in (-1, 2**63 - 1, 2**64 - 1):
            await service.chat(seed=seed, temperature=1, max_tokens=2)
        first = await service.same(**sampled, seed=11, n=4)
        texts = [content(first, index) for index in range(4)]
        assert len(set(texts)) == 4
        again = await service.chat(**sampled, seed=11, n=4)
        assert [content(again, index) for index in range(4)] == texts
        assert content(await service.chat(**sampled, seed=11)) == texts[0]
        free = [await service.chat(**sampled, n=4) for _ in range(2)]
        assert len({content(reply, index) for reply in free for index in range(4)}) == 8
        repeated = await service.chat(**sampled, seed=free[0]["choices"][0]["seed"])
        assert content(repeated) == content(free[0])
        greedy = await service.chat(temperature=0, max_tokens=8, n=2)
        assert content(greedy, 0) == content(greedy, 1)


async def test_lengths(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens(), max_model_len=64) as service:
        long: list[tuple[Any, int]] = [([97] * 64, 4), ([97] * 65, 1), ("word " * 40_000, 1)]
        for prompt, max_tokens in long:
            error = await service.refuses(TEXT, prompt=prompt, max_tokens=max_tokens)
            assert error["code"] == "context_length_exceeded"
            assert "64" in error["message"]
        full = await service.same(TEXT, prompt=[97] * 63, max_tokens=4, ignore_eos=True, temperature=0)
        assert (num_completion_tokens(full), finish(full)) == (1, "length")
        for prompt in ("", [], [""], [[]], None, 3, {}):
            await service.refuses(TEXT, prompt=prompt, max_tokens=2, param="prompt")
        open_end = await service.chat(max_tokens=None, ignore_eos=True)
        assert open_end["usage"]["total_tokens"] == 64
        assert (await service.chat(max_tokens=1_000_000, ignore_eos=True))["usage"]["total_tokens"] == 64
        assert num_completion_tokens(await service.chat(max_tokens=3, max_completion_tokens=5, ignore_eos=True)) <= 5
        assert num_completion_tokens(await service.text("x", ignore_eos=True)) == 16


async def test_a_request_larger_than_the_pool_is_refused_at_once(rig: Rig, serve: Serve) -> None:
    folder = rig.sens()
    async with serve(folder, max_model_len=2048, kv_cache_memory=8 * 16 * 1024) as service:
        room = service.served.limits.max_tokens
        assert room < 2048
        await service.refuses(TEXT, prompt=[97] * (room + 1), max_tokens=1)
        assert num_completion_tokens(await service.text("x", max_tokens=4, ignore_eos=True)) == 4
        filled = await service.text([97] * (room - 40), max_tokens=10_000, ignore_eos=True)
        assert (finish(filled), filled["usage"]["total_tokens"]) == ("length", room)


async def test_sampling_defaults_come_from_the_model_and_the_request_wins(rig: Rig, serve: Serve) -> None:
    folder = rig.copy(rig.sens(), "top-k-1")
    set_generation_config(folder, top_k=1, temperature=1.0, eos_token_id=rig.eos)
    fields: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    async with serve(folder) as service:
        greedy = content(await service.chat(**fields, temperature=0))
        assert content(await service.chat(**fields)) == greedy
        assert content(await service.chat(**fields, temperature=1, top_k=-1, top_p=1)) != greedy


async def test_a_chosen_default_keeps_to_its_best_tokens(rig: Rig, serve: Serve) -> None:
    folder = rig.copy(rig.sens(), "top-k-5")
    set_generation_config(folder, do_sample=True, temperature=0.9, top_k=5, top_p=0.95, eos_token_id=rig.eos)
    async with serve(folder) as service:
        replies = [await service.chat(max_tokens=30, ignore_eos=True, logprobs=True, top_logprobs=5) for _ in range(2)]
        assert content(replies[0]) != content(replies[1])
        for entry in replies[0]["choices"][0]["logprobs"]["content"]:
            assert len(entry["top_logprobs"]) == 5, "the chosen token is among the best five"


async def test_tools_and_choices_that_mean_nothing_are_fine(rig: Rig, serve: Serve) -> None:
    tool = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}
    async with serve(rig.sens()) as service:
        harmless: list[dict[str, Any]] = [
            {"tools": []},
            {"tools": None, "tool_choice": "auto"},
            {"tool_choice": "none"},
        ]
        for fields in harmless:
            await service.same(**fields, max_tokens=1, temperature=0)
        await service.refuses(tools=[], tool_choice="required")
        await service.refuses(tools=[tool], tool_choice={"type": "function", "function": {"name": "nope"}})
        await service.refuses(tools=[{"type": "function", "function": {"name": "bad name!", "parameters": "x"}}])


CLIENT_BODIES: dict[str, dict[str, Any]] = {
    "openai-python": {
        "messages": [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 16, "parallel_tool_calls": True, "store": False, "metadata": {"job": "t1"},
        "service_tier": "auto", "reasoning_effort": "low", "verbosity": "low", "prompt_cache_key": "k",
        "safety_identifier": "u1", "modalities": ["text"], "logit_bias": {}, "seed": None, "stop": None, "n": 1,
        "prediction": None, "response_format": {"type": "text"},
    },
    "llama-index": {
        "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "temperature": 0.1, "max_tokens": None, "tool_choice": "auto", "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": {
            "name": "ping", "description": "d", "strict": False,
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}],
    },
    "open-webui": {"temperature": 0.8, "top_k": 40, "min_p": 0.0, "repeat_penalty": 1.1, "num_ctx": 4096,
                   "user": {"name": "kim", "id": "u1"}},
    "guidellm": {"max_completion_tokens": 16, "stop": None, "ignore_eos": True},
    "lm-eval chat": {"max_tokens": 8, "temperature": 0, "stop": ["\n\n", "Q:"], "seed": 1234},
    "litellm": {"temperature": 0.0, "max_tokens": 16, "top_p": 1, "user": "end-user", "metadata": {"trace": "1"},
                "thinking": {"type": "enabled", "budget_tokens": 1024}, "extra_body": {}, "tools": None,
                "tool_choice": "auto"},
    "vllm extras": {"chat_template_kwargs": {"enable_thinking": False, "thinking": False, "unknown": 1}, "top_k": 20,
                    "min_p": 0, "repetition_penalty": 1.05, "skip_special_tokens": True},
    "the future": {"some_future_field": {"x": 1}},
    "curl": {},
}  # fmt: skip


@pytest.mark.parametrize("client", CLIENT_BODIES)
async def test_bodies_of_real_clients(rig: Rig, serve: Serve, client: str) -> None:
    async with serve(rig.sens(), max_model_len=256) as service:
        await service.same(**(CLIENT_BODIES[client] | {"seed": 1}))


async def test_lm_eval_scores_prompts_of_ids(rig: Rig, serve: Serve) -> None:
    body = {"prompt": [[97, 11, 79], [97, 11, 58, 79]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    async with serve(rig.sens()) as service:
        reply = await service.same(TEXT, **body, seed=1234, suffix=None, best_of=1, user="u")
        assert [len(choice["logprobs"]["tokens"]) for choice in reply["choices"]] == [4, 5]


async def test_an_unknown_field_changes_nothing(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens()) as service:
        plain = await service.chat(temperature=0, max_tokens=8)
        known = await service.chat(temperature=0, max_tokens=8, some_future_field={"x": 1}, repeat_penalty=2)
        assert content(plain) == content(known)
        thinking = await service.chat(temperature=0, max_tokens=1, reasoning_effort="high")
        without = await service.chat(temperature=0, max_tokens=1, **NO_THINKING)
        assert without["usage"]["prompt_tokens"] == thinking["usage"]["prompt_tokens"] + 4
