"""A fleet in virtual time, and the logs of arrivals that it is given."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nanoserve.cli import main
from nanoserve.core.config import SchedulerConfig
from nanoserve.core.errors import ConfigError
from nanoserve.observe.simulate import CostModel, Fleet, reachable, report
from nanoserve.observe.trace import Arrival, Chats, make_request, parse_log

CONFIG = SchedulerConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_model_len=128)
COST = CostModel(step_s=1.0, prefill_token_s=0.1, decode_s=0.0)


def arrival(at_s: float, number: int, prompt: tuple[int, ...], num_output: int = 2) -> Arrival:
    return Arrival(at_s, make_request(number, prompt, num_output))


def test_time_is_that_of_the_cost_model() -> None:
    """A prompt of 10 is one step of 1 + 9 x 0.1 s, which samples a token; each of the next two tokens takes 1 s."""
    fleet = Fleet(1, CONFIG, COST)
    record = fleet.play([arrival(5.0, 0, tuple(range(10)), 3)])
    assert record.ttft_s == [pytest.approx(1.9)]
    assert record.e2e_s == [pytest.approx(3.9)]
    assert record.end_s == pytest.approx(8.9)
    assert fleet.replicas["replica-0"].busy_s == pytest.approx(3.9)


def test_a_prompt_that_comes_again_is_found_where_it_was() -> None:
    prompt = tuple(range(20))
    fleet = Fleet(3, CONFIG, COST)
    fleet.play([arrival(100.0 * n, n, prompt) for n in range(4)])
    assert report(fleet)["hit_tokens"] == 3 * 16
    assert reachable([arrival(0, n, prompt) for n in range(4)], 4) == 3 * 16


def test_a_replica_that_is_full_is_passed_over_and_when_all_are_requests_are_refused() -> None:
    fleet = Fleet(2, replace(CONFIG, max_num_seqs=1, max_queued_requests=1), COST)
    fleet.play([arrival(0.0, n, (n, 1, 2)) for n in range(9)])
    figures = report(fleet)
    assert (figures["requests"], figures["refused"]) == (4, 5)


def test_the_same_trace_gives_the_same_run() -> None:
    trace = Chats(num_requests=60, seed=3, num_sessions=6, num_systems=2)
    config = replace(CONFIG, num_blocks=4000, block_size=16, max_model_len=4096)
    records = [Fleet(2, config, COST).play(trace.arrivals()) for _ in range(2)]
    assert records[0].e2e_s == records[1].e2e_s


# Logs


def test_prompts_share_what_their_log_says() -> None:
    lines = [
        {"at_s": 0, "input_tokens": 10, "output_tokens": 3, "prefix": "p", "prefix_tokens": 6, "tenant": "a"},
        {"at_s": 1.5, "input_tokens": 8, "output_tokens": 1, "prefix": "p", "prefix_tokens": 6, "session": 7},
        {"at_s": 2, "input_tokens": 4, "output_tokens": 1, "priority": 5},
    ]
    first, second, third = parse_log(json.dumps(line) for line in lines)
    assert [len(each.request.prompt_token_ids) for each in (first, second, third)] == [10, 8, 4]
    assert first.request.prompt_token_ids[:6] == second.request.prompt_token_ids[:6]
    assert first.request.prompt_token_ids[6:8] != second.request.prompt_token_ids[6:8]
    assert (first.request.tenant, second.request.session_id, third.request.priority) == ("a", "7", 5)
    assert (second.at_s, first.request.sampling.max_tokens) == (1.5, 3)


def test_mooncakes_form_is_read() -> None:
    lines = [
        '{"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]}',
        '{"timestamp": 2500, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 9]}',
    ]
    first, second = parse_log(lines)
    assert second.at_s == 2.5
    assert (len(first.request.prompt_token_ids), len(second.request.prompt_token_ids)) == (1200, 1100)
    assert first.request.prompt_token_ids[:1024] == second.request.prompt_token_ids[:1024]
    assert first.request.prompt_token_ids[1024:1100] != second.request.prompt_token_ids[1024:1100]


@pytest.mark.parametrize(
    "line",
    ["[]", "{", "5", '{"at_s": 1}', '{"at_s": -1, "input_tokens": 1, "output_tokens": 1}',
     '{"at_s": 1, "input_tokens": 0, "output_tokens": 1}', '{"at_s": 1, "input_tokens": 1e12, "output_tokens": 1}',
     '{"at_s": "x", "input_tokens": 1, "output_tokens": 1}', '{"timestamp": 1, "input_length": 2}',
     '{"at_s": 0.5, "input_tokens": 1, "output_tokens": 1}'],
)  # fmt: skip
def test_a_line_that_is_no_arrival_is_named(line: str) -> None:
    """The last one goes back in time."""
    with pytest.raises(ConfigError, match="Line 2"):
        list(parse_log(['{"at_s": 1, "input_tokens": 3, "output_tokens": 1}', line]))


# The command


def test_simulate_prints_and_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, figures = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    lines = [
        {"at_s": n / 10, "input_tokens": 40, "output_tokens": 4, "prefix": "p", "prefix_tokens": 32} for n in range(9)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert main(["simulate", str(trace), "--replicas", "2", "--output", str(figures)]) == 0
    assert "hit_rate" in capsys.readouterr().out
    assert json.loads(figures.read_text())["requests"] == 9


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["nowhere.jsonl"], "cannot be read"), (["chats", "--replicas", "0"], "--replicas"),
     (["chats", "--rate", "nan"], "--rate"), (["chats", "--step-ms", "0", "--decode-us", "0"], "--step-ms"),
     (["chats", "--requests", "5", "--max-model-len", "16"], "max-model-len")],
)  # fmt: skip
def test_a_mistake_is_one_sentence(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 2
    assert named in capsys.readouterr().err
