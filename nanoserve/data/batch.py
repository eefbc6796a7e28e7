"""OpenAI batch files through Ray Data, resumable: what the output holds already is not asked again.

Only this process writes the output, a line at a time, so a killed run leaves at most one torn line, which the next one
drops. Parquet cannot grow, so its lines are kept in a journal beside it until all are there.
"""

import fcntl
import io
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from nanoserve.core.errors import ConfigError
from nanoserve.data import tables
from nanoserve.data.config import EngineConfig
from nanoserve.data.lines import LineError, LineWorker, error_line, line_id, parse
from nanoserve.data.processor import through_engines
from nanoserve.serving.replica import EngineFactory, load_engine

_BYTES_AT_ONCE = 1 << 20
_LINE_START = b'{"id":"batch_req_'


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """``num_known``: answered by an earlier run. ``num_errors`` and ``num_tokens`` are of this run."""

    num_lines: int = 0
    num_known: int = 0
    num_errors: int = 0
    num_tokens: int = 0


def run_batch(
    source: Path, target: Path, config: EngineConfig, *, make_engine: EngineFactory = load_engine, bar: bool = True
) -> Summary:
    """Answers every line of ``source`` in ``target``. Ray must be running on this machine.

    Raises:
        ConfigError: a file cannot be used, or ``target`` holds answers to something else.
    """
    with _Requests(source, target) as requests, _Answers(target) as answers:
        plan = _plan(requests.path, _model_of(config), answers.known())
        answers.write(plan.refused)
        progress = _Progress(plan, shown=bar)
        try:
            for batch in _answered(requests.path, plan, config, make_engine):
                answers.write(batch["line"])
                progress.add(batch)
        finally:
            progress.close()
        answers.finish()
    return progress.summary()


def _model_of(config: EngineConfig) -> str:
    return config.serving_args().name


def _answered(path: Path, plan: "_Plan", config: EngineConfig, make_engine: EngineFactory) -> Iterator[dict[str, Any]]:
    if not plan.todo:
        return
    import ray

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    lines = ray.data.from_items(plan.todo)
    answered = through_engines(lines, LineWorker, config, make_engine, path=str(path))
    yield from answered.iter_batches(batch_size=None, batch_format="numpy")


# What is to be done


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """``todo``: where in the input the open requests are. ``refused``: output lines for what is no request."""

    num_lines: int
    num_known: int
    todo: list[dict[str, Any]]
    refused: list[bytes]


def _plan(path: Path, model: str, known: set[str]) -> _Plan:
    """
    Raises:
        ConfigError: ``known`` holds a line that this input and model cannot have brought.
    """
    todo: list[dict[str, Any]] = []
    refused: list[bytes] = []
    seen: set[str] = set()
    copies: Counter[bytes] = Counter()
    num_lines, foreign = 0, set(known)
    for offset, line in _lines(path):
        num_lines += 1
        id_ = line_id(line, model, copies[line])
        copies[line] += 1
        foreign.discard(id_)
        error = _refusal(line, seen)
        if id_ in known:
            continue
        if error is None:
            todo.append({"id": id_, "offset": offset, "length": len(line)})
        else:
            refused.append(error_line(id_, error))
    if foreign:
        raise ConfigError(
            f"The output holds {len(foreign)} answers to other requests or of another model; choose another --output."
        )
    return _Plan(num_lines=num_lines, num_known=len(known), todo=todo, refused=refused)


def _refusal(line: bytes, seen: set[str]) -> LineError | None:
    """Why a line is not asked. The first line of a ``custom_id`` that is a request owns it."""
    try:
        request = parse(line)
    except LineError as error:
        return error
    if request.custom_id in seen:
        message = "An earlier line of this file has the same `custom_id`."
        return LineError("duplicate_custom_id", message, request.custom_id)
    seen.add(request.custom_id)
    return None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, line without its end) of every line that is not blank."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if stripped := line.strip():
                yield offset + line.index(stripped[:1]), stripped
            offset += len(line)


# Files


class _Requests:
    """The input as lines. Parquet is written out as such beside the output, for the time of the run."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source = source
        self._is_table = tables.is_parquet(source)
        self.path = target.with_name(f"{target.name}.requests") if self._is_table else source

    def __enter__(self) -> Self:
        if not self._source.is_file():
            raise ConfigError(f"{self._source} is no file.", param="input")
        if self._is_table:
            with _opened(self.path, "wb") as file:
                for line in tables.read_requests(self._source):
                    file.write(line + b"\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_table:
            self.path.unlink(missing_ok=True)


class _Answers:
    """The output, or its journal where the output is parquet. Held by one run at a time."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._is_table = tables.is_parquet(target)
        self._path = target.with_name(f"{target.name}.partial") if self._is_table else target

    def __enter__(self) -> Self:
        self._file = _opened(self._path, "ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"Another run writes {self._target}.", param="output") from None
        if self._is_table and self._target.exists() and not self._path.stat().st_size:
            self.write(tables.read_answers(self._target))
        return self

    def known(self) -> set[str]:
        """The ids of the lines that are there; a torn last line is cut off.

        Raises:
            ConfigError: it is no output of a batch.
        """
        ids, end = set(), 0
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n") and line[: len(_LINE_START)] == _LINE_START[: len(line)]:
                break
            end += len(line)
            try:
                ids.add(str(orjson.loads(line)["id"]))
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{self._target} exists and is no output of a batch.", param="output") from None
        self._file.truncate(end)
        return ids

    def write(self, lines: Any) -> None:
        for line in lines:
            self._file.write(bytes(line) + b"\n")
        self._file.flush()

    def finish(self) -> None:
        os.fsync(self._file.fileno())
        if self._is_table:
            tables.write_answers(self._path, self._target)
            self._path.unlink()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _opened(path: Path, mode: str) -> io.BufferedRandom:
    try:
        return path.open(mode, buffering=_BYTES_AT_ONCE)  # type: ignore[return-value]
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.", param="output") from None


class _Progress:
    """A bar with tokens a second, and the counts of the run."""

    def __init__(self, plan: _Plan, *, shown: bool) -> None:
        from tqdm import tqdm

        self._plan = plan
        self._num_errors = len(plan.refused)
        self._num_tokens = 0
        done = plan.num_lines - len(plan.todo)
        self._bar = tqdm(
            total=plan.num_lines, initial=done, desc="Requests", unit="req", disable=not shown, dynamic_ncols=True
        )

    def add(self, batch: dict[str, Any]) -> None:
        self._num_tokens += int(batch["num_tokens"].sum())
        self._num_errors += int((~batch["ok"]).sum())
        self._bar.update(len(batch["line"]))
        elapsed_s = self._bar.format_dict["elapsed"] or 1.0
        self._bar.set_postfix_str(f"{self._num_tokens / elapsed_s:.0f} tok/s, {self._num_errors} errors")

    def close(self) -> None:
        self._bar.close()

    def summary(self) -> Summary:
        return Summary(
            num_lines=self._plan.num_lines,
            num_known=self._plan.num_known,
            num_errors=self._num_errors,
            num_tokens=self._num_tokens,
        )
