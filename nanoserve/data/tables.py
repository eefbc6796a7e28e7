"""Batch files as parquet: requests in the columns custom_id, method, url and body, answers in ``ANSWER_COLUMNS``.

``body``, ``response`` and ``error`` are JSON texts (a body may also be a struct): one column cannot hold objects of
different shapes.
"""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from nanoserve.core.errors import ConfigError

ANSWER_COLUMNS = ("id", "custom_id", "response", "error")
_REQUEST_COLUMNS = ("custom_id", "method", "url", "body")
_ROWS_AT_ONCE = 4096


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def read_requests(path: Path) -> Iterator[bytes]:
    """Each row as a line of a batch file; what cannot be one is left for the judgement of lines.

    Raises:
        ConfigError: it is no parquet file, or lacks a column.
    """
    for row in _rows(path, _REQUEST_COLUMNS):
        if isinstance(row["body"], str | bytes):
            row["body"] = _loaded(row["body"])
        yield orjson.dumps(row, default=str)


def _loaded(text: str | bytes) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def read_answers(path: Path) -> Iterator[bytes]:
    """The lines of an output that ``write_answers`` wrote."""
    for row in _rows(path, ANSWER_COLUMNS):
        members = {name: None if row[name] is None else orjson.Fragment(row[name]) for name in ("response", "error")}
        yield orjson.dumps(row | members)


def write_answers(journal: Path, target: Path) -> None:
    """The lines of a journal as parquet, whole or not at all."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([(name, pa.string()) for name in ANSWER_COLUMNS])
    unfinished = target.with_name(f"{target.name}.writing")
    with journal.open("rb") as file, parquet.ParquetWriter(unfinished, schema) as writer:
        while lines := list(islice(file, _ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist([_answer_row(line) for line in lines], schema=schema))
    os.replace(unfinished, target)


def _answer_row(line: bytes) -> dict[str, Any]:
    row = orjson.loads(line)
    for name in ("response", "error"):
        row[name] = None if row[name] is None else orjson.dumps(row[name]).decode()
    return {name: row[name] for name in ANSWER_COLUMNS}


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path} is no parquet file: {str(error).splitlines()[0]}") from None
    if missing := [name for name in columns if name not in file.schema_arrow.names]:
        raise ConfigError(f"{path} has no column `{missing[0]}`; it needs {', '.join(columns)}.")
    for batch in file.iter_batches(_ROWS_AT_ONCE, columns=list(columns)):
        yield from batch.to_pylist()
