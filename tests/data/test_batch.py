"""Batch files: what is asked, what is known already, and that nothing is answered twice."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoserve.core.errors import ConfigError
from nanoserve.data import EngineConfig, batch, tables
from nanoserve.data.batch import Summary, run_batch
from tests.data.test_lines import line


class Answering:
    """Stands in for Ray Data: answers what it is asked, in blocks of two, and stops after ``limit`` blocks."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.asked: list[bytes] = []

    def __call__(self, path: Path, plan: Any, config: Any, make_engine: Any) -> Iterator[dict[str, Any]]:
        import numpy as np

        raw = path.read_bytes()
        for start in range(0, len(plan.todo), 2):
            if start // 2 == self.limit:
                raise KeyboardInterrupt
            lines = []
            for item in plan.todo[start : start + 2]:
                text = raw[item["offset"] : item["offset"] + item["length"]]
                self.asked.append(text)
                custom_id = json.loads(text)["custom_id"]
                reply = {"id": item["id"], "custom_id": custom_id, "response": {"status_code": 200}, "error": None}
                lines.append(json.dumps(reply).encode())
            count = len(lines)
            yield {"line": lines, "num_tokens": np.full(count, 3), "ok": np.full(count, True)}


def run(folder: Path, answering: Answering, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Summary:
    monkeypatch.setattr(batch, "_answered", answering)
    config = EngineConfig(engine_kwargs=settings)
    source = next(path for path in folder.iterdir() if path.stem == "in")
    return run_batch(source, source.with_stem("out"), config, bar=False)


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_bytes().splitlines()]


def test_good_and_bad_lines_each_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        line("a"),
        b"",
        line("b"),
        b"{broken",
        line("a", url="/v1/completions"),
        line("c", url="/x"),
        b"   ",
        b"{broken",
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines) + b"\r\n" + line("d"))
    summary = run(tmp_path, Answering(), monkeypatch)
    found = answers(tmp_path / "out.jsonl")
    codes = {(reply["custom_id"], (reply["error"] or {}).get("code")) for reply in found}
    assert codes == {
        ("a", None), ("b", None), ("d", None), ("a", "duplicate_custom_id"), ("c", "invalid_url"),
        (None, "invalid_json_line"),
    }  # fmt: skip
    assert len({reply["id"] for reply in found}) == len(found) == 7
    assert summary == Summary(num_lines=7, num_known=0, num_errors=4, num_tokens=9)


def test_the_first_valid_line_owns_its_custom_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([line("a", url="/x"), line("a"), line("a")]))
    run(tmp_path, Answering(), monkeypatch)
    codes = sorted(str((reply["error"] or {}).get("code")) for reply in answers(tmp_path / "out.jsonl"))
    assert codes == ["None", "duplicate_custom_id", "invalid_url"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("torn", [False, True])
def test_a_run_goes_on_where_another_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, torn: bool
) -> None:
    source = tmp_path / f"in{suffix}"
    _write_requests(source, [f"c{index}" for index in range(9)])
    first = Answering(limit=2)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, first, monkeypatch)
    growing = tmp_path / ("out.jsonl" if suffix == ".jsonl" else "out.parquet.partial")
    if torn:
        growing.write_bytes(growing.read_bytes() + b'{"id":"batch_req_12')
    second = Answering()
    summary = run(tmp_path, second, monkeypatch)
    assert len(first.asked) == 4
    assert len(second.asked) == 5
    assert (summary.num_lines, summary.num_known) == (9, 4)
    target = tmp_path / f"out{suffix}"
    found = answers(target) if suffix == ".jsonl" else [json.loads(text) for text in tables.read_answers(target)]
    assert sorted(reply["custom_id"] for reply in found) == [f"c{index}" for index in range(9)]
    assert run(tmp_path, Answering(), monkeypatch).num_known == 9
    assert {path.name for path in tmp_path.iterdir()} == {source.name, target.name}


def _write_requests(path: Path, custom_ids: list[str]) -> None:
    lines = [line(custom_id) for custom_id in custom_ids]
    if path.suffix == ".jsonl":
        path.write_bytes(b"\n".join(lines))
        return
    import pyarrow as pa
    from pyarrow import parquet

    rows = [json.loads(text) for text in lines]
    for row in rows:
        row["body"] = json.dumps(row["body"])
    parquet.write_table(pa.Table.from_pylist(rows), path)


def test_a_body_may_be_a_struct(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [json.loads(line("a")), json.loads(line("b", body={"model": "demo", "prompt": [1], "n": 2}))]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    first, second = [json.loads(text) for text in tables.read_requests(tmp_path / "in.parquet")]
    assert first["body"]["prompt"] == [1, 2]
    assert second["body"]["n"] == 2


def test_an_output_of_something_else_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_bytes(line("a"))
    out = tmp_path / "out.jsonl"
    run(tmp_path, Answering(), monkeypatch)
    kept = out.read_bytes()
    with pytest.raises(ConfigError, match="other requests or of another model"):
        run(tmp_path, Answering(), monkeypatch, served_model_name="other")
    (tmp_path / "in.jsonl").write_bytes(line("b"))
    with pytest.raises(ConfigError, match="other requests"):
        run(tmp_path, Answering(), monkeypatch)
    assert out.read_bytes() == kept
    out.write_text("a letter to my mother\n")
    with pytest.raises(ConfigError, match="no output of a batch"):
        run(tmp_path, Answering(), monkeypatch)
    assert out.read_text() == "a letter to my mother\n"
    out.write_text("a short one")
    with pytest.raises(ConfigError, match="no output of a batch"):
        run(tmp_path, Answering(), monkeypatch)
    assert out.read_text() == "a short one"


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    config = EngineConfig()
    with pytest.raises(ConfigError, match="is no file"):
        run_batch(tmp_path / "none.jsonl", tmp_path / "out.jsonl", config)
    (tmp_path / "in.jsonl").write_bytes(line("a"))
    with pytest.raises(ConfigError, match="cannot be written"):
        run_batch(tmp_path / "in.jsonl", tmp_path / "no" / "out.jsonl", config)
    (tmp_path / "in.parquet").write_bytes(b"PAR1 it is not")
    with pytest.raises(ConfigError, match="no parquet file"):
        run_batch(tmp_path / "in.parquet", tmp_path / "out.jsonl", config)


def test_two_runs_do_not_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_bytes(line("a"))

    class Meanwhile(Answering):
        def __call__(self, path: Path, plan: Any, config: Any, make_engine: Any) -> Iterator[dict[str, Any]]:
            with pytest.raises(ConfigError, match="Another run"):
                run(tmp_path, Answering(), monkeypatch)
            return super().__call__(path, plan, config, make_engine)

    assert run(tmp_path, Meanwhile(), monkeypatch).num_lines == 1
