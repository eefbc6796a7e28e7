"""A budget ends the thoughts at an exact token, and the answer goes on, whatever else happens to the request."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import InvalidRequestError
from nanoserve.core.request import GenerateRequest, ThinkingBudget
from nanoserve.core.sampling import SamplingParams
from nanoserve.engine.core import EngineCore
from nanoserve.llm import LLM
from nanoserve.model.build import build
from tests.cases.conftest import Serve
from tests.cases.rig import Rig

ASK: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "seed": 5, "temperature": 1.0, "return_token_ids": True}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture
def thinker(rig: Rig) -> Path:
    """A random model whose template opens the thoughts."""
    folder = rig.copy(rig.sens(), "thinker")
    template = (rig.tokenizer_folder / "chat_template.jinja").read_text()
    opens = "{% if add_generation_prompt and enable_thinking is not defined %}<think>\n{% endif %}"
    (folder / "chat_template.jinja").write_text(template + opens)
    return folder


def ids_of(reply: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in reply["choices"]]


@pytest.mark.parametrize("budget", [1, 7, 39])
async def test_thoughts_end_after_exactly_so_many_tokens(rig: Rig, thinker: Path, serve: Serve, budget: int) -> None:
    close_id = rig.id_of("</think>")
    bias: dict[str, Any] = {"logit_bias": {str(close_id): -100}}  # the model itself never ends them
    async with serve(thinker) as service:
        free = await service.chat(**ASK, n=2, **bias)
        bound = await service.same(**ASK, n=2, **bias, thinking_token_budget=budget)
        for before, after in zip(ids_of(free), ids_of(bound), strict=True):
            assert close_id not in before
            assert after[:budget] == before[:budget]
            assert after[budget] == close_id
            assert len(after) == 40
        for choice in bound["choices"]:
            assert choice["message"]["reasoning_content"]
            assert budget == 39 or choice["message"]["content"]


async def test_company_and_preemption_do_not_move_the_end(rig: Rig, thinker: Path, serve: Serve) -> None:

    bodies = [ASK | {"seed": seed, "thinking_token_budget": 3 * seed, "max_tokens": 60} for seed in range(1, 7)]
    async with serve(thinker) as service:
        alone = [ids_of(await service.chat(**body)) for body in bodies]
    async with serve(thinker, kv_cache_memory="96KiB", block_size=4) as service:
        together = await asyncio.gather(*[service.chat(**body) for body in bodies])
        assert service.door.stats.num_preemptions_total > 0
    assert [ids_of(reply) for reply in together] == alone


def test_another_engine_goes_on_counting_where_the_first_one_died(rig: Rig) -> None:
    loaded = build(EngineArgs(model=str(rig.sens()), dtype="float32", kv_cache_memory="8MiB", max_model_len=256))
    core = EngineCore(loaded.runner, loaded.scheduler)
    sampling = SamplingParams(max_tokens=24, seed=3, temperature=1.0, logit_bias={7: -100})
    request = GenerateRequest(
        request_id="whole", prompt_token_ids=(5, 6, 8), sampling=sampling, thinking=ThinkingBudget(9, close_id=7)
    )

    def answer(request: GenerateRequest) -> tuple[int, ...]:
        core.add(request)
        outputs = [output for _ in range(60) if core.has_work for output in core.step().outputs]
        return tuple(token_id for output in outputs for token_id in output.new_token_ids)

    whole = answer(request)
    assert whole.index(7) == 9
    for num_done in (1, 8, 9, 10, 15):
        moved = replace(
            request,
            request_id=f"moved-{num_done}",
            prompt_token_ids=(5, 6, 8, *whole[:num_done]),
            num_prior_output_tokens=num_done,
        )
        assert answer(moved) == whole[num_done:]


async def test_a_form_is_kept_after_thoughts_that_were_cut(rig: Rig, thinker: Path, serve: Serve) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    async with serve(thinker) as service:
        for seed in range(6):
            body = ASK | {"seed": seed, "ignore_eos": False, "max_tokens": 200, "response_format": form}
            reply = await service.chat(**body, thinking_token_budget=9)
            (choice,) = reply["choices"]
            close_at = choice["token_ids"].index(rig.id_of("</think>"))
            assert close_at <= 9 + 3  # at most the rest of a character later
            if choice["finish_reason"] == "stop":
                assert json.loads(choice["message"]["content"]).keys() == {"n"}


@pytest.mark.parametrize(
    ("fields", "num_thoughts"),
    [
        ({"thinking_token_budget": 0}, 0),
        ({"reasoning_effort": "none"}, 0),
        ({"thinking": {"type": "disabled"}}, 0),
        ({"thinking": {"type": "enabled", "budget_tokens": 6}}, 6),
        ({"reasoning_effort": "minimal", "max_tokens": 300}, 256),
        ({"reasoning_effort": "low", "thinking_token_budget": 5}, 5),
    ],
)
async def test_every_way_to_say_it(
    rig: Rig, thinker: Path, serve: Serve, fields: dict[str, Any], num_thoughts: int
) -> None:
    close_id = rig.id_of("</think>")
    async with serve(thinker) as service:
        reply = await service.chat(**(ASK | fields), logit_bias={str(close_id): -100})
    (ids,) = ids_of(reply)
    assert ids.index(close_id) == num_thoughts if num_thoughts else close_id not in ids
    assert ("reasoning_content" in reply["choices"][0]["message"]) == bool(num_thoughts)


def test_it_is_a_sampling_parameter_of_the_offline_engine(rig: Rig, thinker: Path) -> None:
    close_id = rig.id_of("</think>")
    params = SamplingParams(
        max_tokens=12, ignore_eos=True, seed=5, logit_bias={close_id: -100}, thinking_token_budget=4
    )
    with LLM(str(thinker), dtype="float32", kv_cache_memory="1MiB", max_model_len=256) as llm:
        ask: list[Any] = [{"role": "user", "content": "say it"}]
        (chat,) = llm.chat(ask, params, use_tqdm=False)
        (off,) = llm.chat(ask, replace(params, thinking_token_budget=0), use_tqdm=False)
    assert list(chat.outputs[0].token_ids).index(close_id) == 4
    assert close_id not in off.outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=-1)


async def test_a_wrong_budget_is_refused(thinker: Path, serve: Serve) -> None:
    async with serve(thinker) as service:
        await service.refuses(thinking_token_budget=-1, param="thinking_token_budget")
        await service.refuses(thinking={"type": "enabled", "budget_tokens": "many"}, param="thinking")
        await service.refuses(reasoning_effort="heroic", param="reasoning_effort")
