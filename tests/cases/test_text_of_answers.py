"""Characters and stop strings that lie across tokens (vllm#8627, #3574, sglang#38712), min_tokens and end ids."""

import pytest

from tests.cases.conftest import Serve
from tests.cases.rig import Rig, set_generation_config
from tests.cases.service import CHAT, TEXT, content, counts, finish, num_completion_tokens
from tests.serving.replies import events, refused

WORDS = "Zürich \U0001f9f5 日本語 — naïve café ✅"


@pytest.mark.parametrize("split", [1, 2])
async def test_a_character_cut_in_two_comes_out_whole(rig: Rig, serve: Serve, split: int) -> None:
    folder, ids = rig.script(WORDS, split=split)
    assert any("\ufffd" in rig.tokenizer.decode([token_id]) for token_id in ids)
    async with serve(folder) as service:
        assert content(await service.same(temperature=0, max_tokens=64)) == WORDS
        for chunk in (await service.stream(temperature=0, max_tokens=64))[:-1]:
            assert "\ufffd" not in chunk["choices"][0]["delta"].get("content", "")


async def test_a_padding_id_is_no_text(rig: Rig, serve: Serve) -> None:
    first, last = rig.ids("alpha")[-1], rig.ids(" beta")[-1]
    folder = rig.script_ids([first, rig.padding_id, last], trigger=rig.trigger(thinking=True))
    async with serve(folder) as service:
        reply = await service.same(TEXT, prompt="go\n", temperature=0, max_tokens=8)
        assert reply["choices"][0]["text"] == rig.tokenizer.decode([first, last])
        assert num_completion_tokens(reply) == 4


async def test_random_tokens_decode_as_at_once(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens()) as service:
        for seed in range(3):
            fields = {"temperature": 1.5, "seed": seed, "max_tokens": 120, "ignore_eos": True, "return_token_ids": True}
            choice = (await service.same(TEXT, prompt="x", **fields))["choices"][0]
            assert len(choice["token_ids"]) == 120
            assert choice["text"] == rig.tokenizer.decode(choice["token_ids"])


STOPPED = "alpha beta gamma STOP-HERE tail words follow"


@pytest.mark.parametrize("split", [1, 2, 3, 4, 5])
async def test_a_stop_string_is_found_across_tokens_and_never_leaks(rig: Rig, serve: Serve, split: int) -> None:
    folder, _ = rig.script(STOPPED, split=split)
    async with serve(folder) as service:
        reply = await service.same(temperature=0, max_tokens=64, stop=["STOP-HERE"])
        assert (content(reply), finish(reply)) == ("alpha beta gamma ", "stop")
        assert content(await service.same(temperature=0, max_tokens=64, stop=["mma S", "STOP"])) == "alpha beta ga"
        kept = await service.same(temperature=0, max_tokens=64, stop="STOP-HERE", include_stop_str_in_output=True)
        assert content(kept) == "alpha beta gamma STOP-HERE"


@pytest.mark.parametrize("stop", ["", ["ok", ""], [1, 2]])
async def test_an_empty_stop_string_is_refused(rig: Rig, serve: Serve, stop: object) -> None:
    async with serve(rig.sens()) as service:
        await service.refuses(stop=stop, max_tokens=4, param="stop")


@pytest.mark.parametrize("stop", [None, [], "zzz", ["a", "b", "c", "d"]])
async def test_no_stop_string_and_four_are_fine(rig: Rig, serve: Serve, stop: object) -> None:
    async with serve(rig.sens()) as service:
        reply = await service.same(stop=stop, max_tokens=4, seed=1)
        assert num_completion_tokens(reply) == 4 or finish(reply) == "stop"


async def test_min_tokens_holds_off_stop_strings(rig: Rig, serve: Serve) -> None:
    folder, ids = rig.script(" one two three four", loop=True)
    async with serve(folder) as service:
        reply = await service.same(temperature=0, min_tokens=9, max_tokens=40, stop=[" two"])
        assert num_completion_tokens(reply) >= 9
        answer = " one two three four" * 10
        taken = rig.tokenizer.decode((ids * 10)[: num_completion_tokens(reply)])
        assert answer.startswith(taken)
        assert content(reply) == taken[: taken.rindex(" two")]
        assert finish(reply) == "stop"


async def test_every_end_id_of_the_model_ends_and_ignore_eos_ignores_all(rig: Rig, serve: Serve) -> None:
    """vllm#4589: the second id of generation_config's list was forgotten."""
    second = rig.id_of("<|endoftext|>")
    words = rig.ids("alpha beta gamma delta")[:6]
    folder = rig.script_ids([words[0], words[1], second, *words[2:]], trigger=rig.trigger(thinking=True))
    folder = rig.copy(folder, "two-ends")
    set_generation_config(folder, eos_token_id=[rig.eos, second])
    async with serve(folder) as service:
        reply = await service.same(TEXT, prompt="go\n", temperature=0, max_tokens=12)
        assert (finish(reply), num_completion_tokens(reply)) == ("stop", 3)
        assert reply["choices"][0]["text"] == rig.tokenizer.decode(words[:2])
        longer = await service.same(TEXT, prompt="go\n", temperature=0, max_tokens=12, ignore_eos=True)
        assert (finish(longer), num_completion_tokens(longer)) == ("length", 12)
        asked = await service.same(
            TEXT, prompt="go\n", temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[second]
        )
        assert (finish(asked), asked["choices"][0]["stop_reason"]) == ("stop", second)
        await service.refuses(TEXT, prompt="go\n", max_tokens=3, min_tokens=9, param="min_tokens")


async def test_usage_only_when_asked_and_equal_to_the_plain_reply(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens()) as service:
        for path, extra in ((CHAT, {}), (TEXT, {"prompt": "x"})):
            fields = {"max_tokens": 6, "temperature": 0} | extra
            plain = await service.same(path, **fields)
            assert all("usage" not in chunk for chunk in (await service.stream(path, **fields))[:-1])
            options = {"include_usage": True, "continuous_usage_stats": True}
            *chunks, _ = await service.stream(path, **fields, stream_options=options)
            numbers = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert numbers == sorted(numbers)
            assert counts(chunks[-1]["usage"]) == counts(plain["usage"])
            response = await service.post(path, **fields, stream_options={"include_usage": True})
            refused(response, 400, "stream_options")


@pytest.mark.parametrize("min_outputs", [1, 2, 3, 7])
async def test_the_answer_does_not_depend_on_how_many_tokens_share_a_chunk(
    rig: Rig, serve: Serve, min_outputs: int
) -> None:
    folder, _ = rig.script(WORDS + " STOP", split=3)
    async with serve(folder) as service:
        service.door.min_outputs = min_outputs
        reply = await service.same(temperature=0, max_tokens=80, stop=" STOP", logprobs=True, top_logprobs=2)
        assert content(reply) == WORDS


async def test_every_event_is_valid_by_itself(rig: Rig, serve: Serve) -> None:
    folder, _ = rig.script(WORDS, split=2)
    async with serve(folder) as service:
        response = await service.post(CHAT, temperature=0, max_tokens=64, stream=True, n=2)
        assert len(events(response.content)) > 4
