"""Rows: what each may ask, and that a bad one costs only itself."""

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest

from nanoserve.core.errors import ConfigError
from nanoserve.data import EngineConfig
from nanoserve.data.config import TaskType
from nanoserve.data.rows import ERROR, RowWorker, packing, plain, unpacking
from nanoserve.llm import LLM
from nanoserve.serving.replica import load_engine
from tests.data.engines import KILLER, answer_to, counting_engine
from tests.pooling_checkpoints import write

Row = dict[str, Any]


def worker(**settings: Any) -> RowWorker:
    return RowWorker(EngineConfig(engine_kwargs={"max_num_seqs": 8}, **settings), counting_engine)


async def answers(rows: list[Row], own: RowWorker | None = None) -> list[Row]:
    """The rows as they leave the engine stage."""
    pack = packing(None)
    packed = [pack(row) for row in rows]
    batch = {name: [row[name] for row in packed] for name in packed[0]}
    out = await (own or worker())(batch)
    return [pickle.loads(row) for row in next(iter(out.values()))]


def ids(*token_ids: int, max_tokens: int = 5, **params: Any) -> Row:
    return {"prompt": list(token_ids), "sampling_params": {"max_tokens": max_tokens, "ignore_eos": True} | params}


async def test_a_prompt_of_ids_is_continued() -> None:
    (row,) = await answers([{"key": 7} | ids(1, 2, 3)])
    assert row[ERROR] == ""
    assert row["key"] == 7
    assert row["generated_tokens"] == answer_to(3, 5)
    assert (row["num_input_tokens"], row["num_generated_tokens"], row["finish_reason"]) == (3, 5, "length")
    assert row["time_taken_llm"] > 0


async def test_a_conversation_is_answered_through_the_template() -> None:
    messages = [{"role": "user", "content": "hi", "tool_calls": None}]
    row, plain_row = await answers([{"messages": np.array(messages)}, {"messages": messages}])
    assert row[ERROR] == ""
    assert row["prompt"] == plain_row["prompt"]
    assert "<|im_start|>user\nhi<|im_end|>" in row["prompt"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "either `messages` or `prompt`"),
        ({"messages": [], "prompt": "x"}, "either `messages` or `prompt`"),
        ({"messages": "hello"}, "must be a list of messages"),
        ({"messages": 7}, "must be a list of messages"),
        ({"messages": [7]}, "Given: [7]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"prompt": 7.5}, "`prompt`"),
        ({"prompt": ""}, "must not be empty"),
        ({"prompt": [1, "x"]}, "`prompt`"),
        ({"prompt": [10**9]}, "token ids in [0, 2047]"),
        ({"prompt": list(range(1, 1500))}, "1024 tokens"),
        ({"prompt": "hi", "sampling_params": {"temprature": 1}}, "'temprature'"),
        ({"prompt": "hi", "sampling_params": {"temperature": "hot"}}, "`temperature`"),
        ({"prompt": "hi", "sampling_params": {"stop": 3}}, "sampling_params"),
        ({"prompt": "hi", "sampling_params": {"n": 2}}, "`n` must be 1"),
        ({"prompt": "hi", "sampling_params": [1]}, "must be a mapping"),
        ({"prompt": "hi", "sampling_params": {"structured_outputs": {"regex": "("}}}, ""),
        ({"prompt": "hi", "sampling_params": {"structured_outputs": {"rgx": "a"}}}, "rgx"),
    ],
)
async def test_a_row_that_cannot_be_answered_says_why_and_spoils_nothing(row: Row, said: str) -> None:
    bad, good = await answers([row, ids(1, 2)])
    assert bad[ERROR]
    assert said in bad[ERROR]
    assert "Traceback" not in bad[ERROR]
    assert {name: bad[name] for name in row} == row
    assert good[ERROR] == ""
    assert good["generated_tokens"] == answer_to(2, 5)


async def test_a_row_that_kills_its_engine_is_the_only_one_to_suffer() -> None:
    rows = [ids(index, 2, max_tokens=40) for index in range(1, 21)]
    rows.insert(6, ids(KILLER, 1))
    out = await asyncio.wait_for(answers(rows), 60)
    bad = out.pop(6)
    assert "engine" in bad[ERROR]
    assert "a deadly prompt" in bad[ERROR]
    assert [row[ERROR] for row in out] == [""] * 20
    assert [row["generated_tokens"] for row in out] == [answer_to(2, 40)] * 20


async def test_batches_run_beside_each_other() -> None:
    own = worker()
    slow = asyncio.create_task(answers([ids(1, max_tokens=900)], own))
    (quick,) = await answers([ids(1, 2, max_tokens=2)], own)
    assert quick[ERROR] == ""
    assert not slow.done()
    assert (await slow)[0]["num_generated_tokens"] == 900


def test_the_users_functions_may_fail_on_a_row() -> None:
    def preprocess(row: Row) -> Row:
        return {"prompt": row["text"] * 2}

    packed = packing(preprocess)
    assert pickle.loads(next(iter(packed({"text": "ab", "k": 1}).values()))) == {"text": "ab", "k": 1, "prompt": "abab"}
    broken = pickle.loads(next(iter(packed({"k": 1}).values())))
    assert broken == {"k": 1, ERROR: "preprocess: KeyError: 'text'"}
    (name,) = packed({"k": 1})
    unpack = unpacking(lambda row: {"resp": row["generated_text"]})
    assert unpack({name: pickle.dumps({"generated_text": "x", "k": 1, ERROR: ""})}) == {"resp": "x", ERROR: ""}
    failed = unpack({name: pickle.dumps({"k": 1, ERROR: ""})})
    assert failed == {"k": 1, ERROR: "postprocess: KeyError: 'generated_text'"}
    assert unpack({name: pickle.dumps(broken)}) == broken


def test_numpy_leaves_no_trace() -> None:
    given = {"a": np.int64(3), "b": np.array([{"c": np.float32(0.5)}, None], dtype=object), "d": (1, "x")}
    assert plain(given) == {"a": 3, "b": [{"c": 0.5}, None], "d": [1, "x"]}
    assert type(plain(given)["a"]) is int


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"concurrency": (3, 2)}, "concurrency"),
        ({"concurrency": 0}, "concurrency"),
        ({"max_concurrent_batches": True}, "max_concurrent_batches"),
        ({"engine_kwargs": {"modle": "x"}}, "modle"),
        ({"engine_kwargs": {"model": "x"}}, "model_source"),
        ({"task_type": "embedding"}, "task_type"),
    ],
)
def test_settings_that_cannot_work(settings: Row, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**settings)


# Embeddings and scores, as the offline engine makes them


SMALL: dict[str, Any] = {"kv_cache_memory": "4MiB", "num_threads": 1, "max_model_len": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("pool"), "causal", seed=5).folder)


def pooling_worker(task: TaskType, model: str) -> RowWorker:
    return RowWorker(EngineConfig(model_source=model, task_type=task, engine_kwargs=SMALL), load_engine)


async def test_rows_are_embedded(model: str) -> None:
    rows: list[Row] = [
        {"prompt": "hello world"},
        {"prompt": np.array([5, 6, 7])},
        {"prompt": "fox", "pooling_params": {"dimensions": 8, "instruction": "Find it", "prompt_name": None}},
        {"prompt": None},
        {"prompt": "x", "pooling_params": {"dimensions": "many"}},
        {"prompt": "x", "pooling_params": {"dimension": 8}},
        {"prompt": "x", "pooling_params": {"dimensions": 10**6}},
    ]
    out = await answers(rows, pooling_worker("embed", model))
    said = ("`prompt`", "`dimensions` must be of type int", "'dimension'", "[1, 64]")
    assert [row[ERROR] for row in out[:3]] == [""] * 3
    assert all(text in row[ERROR] for row, text in zip(out[3:], said, strict=True))
    with LLM(model, **SMALL) as llm:
        expected = llm.embed("hello world", use_tqdm=False) + llm.embed([5, 6, 7], use_tqdm=False)
        expected += llm.embed("fox", dimensions=8, instruction="Find it", use_tqdm=False)
    for row, own in zip(out[:3], expected, strict=True):
        assert row["embeddings"] == pytest.approx(own.outputs.embedding, abs=1e-5)
        assert row["num_input_tokens"] == len(own.prompt_token_ids)


async def test_pairs_are_scored(model: str) -> None:
    rows: list[Row] = [
        {"query": "hello", "document": "hello world"},
        {"query": "hello"},
        {"query": "hello", "document": "x", "pooling_params": {"dimensions": 3}},
    ]
    good, lacking, wrong = await answers(rows, pooling_worker("score", model))
    assert "`document`" in lacking[ERROR]
    assert "'dimensions'" in wrong[ERROR]
    assert good[ERROR] == ""
    with LLM(model, **SMALL) as llm:
        (expected,) = llm.score("hello", "hello world", use_tqdm=False)
    assert good["score"] == pytest.approx(expected.outputs.score, abs=1e-5)


async def test_a_model_that_only_generates_says_so() -> None:
    config = EngineConfig(task_type="embed", engine_kwargs={"max_num_seqs": 8})
    (row,) = await answers([{"prompt": "x"}], RowWorker(config, counting_engine))
    assert "makes no embeddings" in row[ERROR]
