"""On a real Ray: every row exactly once, whatever happens to rows and engines."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoserve.data import EngineConfig
from nanoserve.data.processor import Processor
from nanoserve.data.rows import ERROR
from nanoserve.serving.private_ray import PrivateRay
from tests.data.engines import KILLER, STEPS_VARIABLE, answer_to, logging_engine
from tests.serving.service import command, left_over

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(280)]

NUM_ROWS = 5000
MAX_NUM_SEQS = 32
RAMP_S = 2.0


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    folder = tmp_path / "steps"
    folder.mkdir()
    return folder


@pytest.fixture
def cluster(steps: Path) -> Iterator[PrivateRay]:
    own = PrivateRay()
    try:
        own.start(object_store_bytes=256 * 2**20, environment={STEPS_VARIABLE: str(steps)})
        yield own
    finally:
        own.end()


def ask(row: dict[str, Any]) -> dict[str, Any]:
    """Prompts of a few lengths, and now and then one that no engine can answer."""
    number = row["id"]
    if number % 500 == 13:
        return {"messages": 7}
    if number % 500 == 14:
        return {"prompt": [1] * 5000}
    if number % 500 == 15:
        raise ValueError("this row is empty")
    params = {"max_tokens": 10 + number % 50, "ignore_eos": True, "temperature": 0.0}
    return {"prompt": [1 + number % 7] * (1 + number % 11), "sampling_params": params}


def keep(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "tokens": row["generated_tokens"]}


def processor(**settings: Any) -> Processor:
    config = EngineConfig(engine_kwargs={"max_num_seqs": MAX_NUM_SEQS}, batch_size=16, **settings)
    return Processor(config=config, preprocess=ask, postprocess=keep, make_engine=logging_engine)


def kill_the_engine_twice(steps: Path) -> list[int]:
    """Kills the process that steps now, when it has stepped for a while; then the one that took its place."""
    killed: list[int] = []
    while len(killed) < 2:
        time.sleep(0.2)
        for file in steps.glob("*.jsonl"):
            pid = int(file.stem)
            if pid not in killed and file.read_text().count("\n") > 600:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return killed


def occupancy(steps: Path) -> dict[int, float]:
    """Per engine the mean share of its places in use, from ``RAMP_S`` after its start on, while others waited.

    The last steps of the job, when nothing waits any more, say nothing about how full an engine is kept.
    """
    found = {}
    for file in steps.glob("*.jsonl"):
        taken = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("]")]
        last = max(index for index, (_, _, waiting) in enumerate(taken) if waiting)
        counted = [running for now_s, running, _ in taken[: last + 1] if now_s > taken[0][0] + RAMP_S]
        found[int(file.stem)] = sum(counted) / len(counted) / MAX_NUM_SEQS
    return found


def test_five_thousand_rows_with_poison_and_an_engine_that_is_killed_twice(cluster: PrivateRay, steps: Path) -> None:
    import ray.data

    killed: list[int] = []
    killer = threading.Thread(target=lambda: killed.extend(kill_the_engine_twice(steps)), daemon=True)
    killer.start()
    rows = processor()(ray.data.range(NUM_ROWS)).take_all()
    assert len(killed) == 2
    assert sorted(row["id"] for row in rows) == list(range(NUM_ROWS))
    for row in rows:
        if row["id"] % 500 in (13, 14, 15):
            assert row[ERROR]
        else:
            assert row[ERROR] == ""
            assert list(row["tokens"]) == answer_to(1 + row["id"] % 11, 10 + row["id"] % 50)
    shares = occupancy(steps)
    print(f"mean occupancy by engine: {shares}")
    assert len(shares) == 3
    assert min(shares.values()) > 0.9


def test_order_is_kept_where_it_is_asked_for(cluster: PrivateRay, tmp_path: Path) -> None:
    import ray.data

    rows = processor(preserve_order=True, concurrency=2)(ray.data.range(400)).take_all()
    assert [row["id"] for row in rows] == list(range(400))
    target = tmp_path / "table"
    processor()(ray.data.range(100)).write_parquet(str(target))
    assert ray.data.read_parquet(str(target)).count() == 100


def test_a_row_that_kills_every_engine_ends_as_a_row(cluster: PrivateRay) -> None:
    import ray.data

    def deadly(row: dict[str, Any]) -> dict[str, Any]:
        return ask(row) if row["id"] != 40 else {"prompt": [KILLER, 2], "sampling_params": {"max_tokens": 4}}

    config = EngineConfig(engine_kwargs={"max_num_seqs": MAX_NUM_SEQS}, batch_size=16)
    whole = Processor(config=config, preprocess=deadly, make_engine=logging_engine)
    rows = whole(ray.data.range(100)).take_all()
    bad = {row["id"]: row[ERROR] for row in rows if row[ERROR]}
    assert sorted(bad) == [13, 14, 15, 40]
    assert "deadly" in bad[40]
    assert len(rows) == 100


def requests_file(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            body = {"model": "demo", "prompt": f"Once upon {number}", "max_tokens": 8, "ignore_eos": True}
            whole = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(whole) + "\n")


def test_a_batch_that_is_killed_and_started_again_answers_each_request_once(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests_file(source, 400)
    words = ("batch", "-i", str(source), "-o", str(target), "demo", "--max-num-seqs", "8", "--batch-size", "4")
    marks = {"TMPDIR": "/tmp"}
    run = subprocess.Popen(command(*words), env=os.environ | marks, start_new_session=True, stderr=subprocess.DEVNULL)
    give_up_s = time.monotonic() + 120
    while not (target.exists() and target.read_bytes().count(b"\n") > 20):
        assert run.poll() is None
        assert time.monotonic() < give_up_s
        time.sleep(0.02)
    run.kill()
    run.wait()
    num_answered = target.read_bytes().count(b"\n")
    assert num_answered < 400
    done = subprocess.run(command(*words), env=os.environ | marks, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"400 lines: {num_answered} were answered before, 0 errors" in done.stdout
    assert "Traceback" not in done.stderr
    answers = [json.loads(text) for text in target.read_bytes().splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"c{number}" for number in range(400))
    assert {answer["response"]["status_code"] for answer in answers} == {200}


def test_nothing_of_a_batch_is_left(tmp_path: Path) -> None:
    source, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    import pyarrow as pa
    from pyarrow import parquet

    requests_file(tmp_path / "in.jsonl", 10)
    rows = [json.loads(text) for text in (tmp_path / "in.jsonl").read_text().splitlines()]
    parquet.write_table(pa.Table.from_pylist(rows), source)
    before = set(Path("/tmp").glob("nanoserve-*"))
    words = command("batch", "-i", str(source), "-o", str(target), "demo", "--served-model-name", "demo")
    done = subprocess.run(words, env=os.environ | {"TMPDIR": "/tmp"}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "100%" in done.stderr
    table = parquet.read_table(target).to_pylist()
    assert sorted(row["custom_id"] for row in table) == sorted(f"c{number}" for number in range(10))
    assert all(json.loads(row["response"])["status_code"] == 200 and row["error"] is None for row in table)
    for folder in set(Path("/tmp").glob("nanoserve-*")) - before:
        assert left_over(folder) == []
