"""Tables of rows as files: Parquet, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from oapl.errors import ExchangeError
from oapl.store.files import write_bytes

SUFFIXES = (".parquet", ".jsonl", ".json")


def check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ExchangeError(f"{path}: the name must end in .parquet or .jsonl, which says how the rows are stored.")


def read_rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a file, each with its place for messages; what is null is left out. Raises ExchangeError where the
    file cannot be read, or has no rows."""
    check_suffix(path)
    try:
        found = list(parquet_rows(path) if path.suffix == ".parquet" else json_rows(path))
    except OSError as error:
        raise ExchangeError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ExchangeError(f"{path} is no JSON lines, which are UTF-8: {error}.") from error
    if not found:
        raise ExchangeError(f"{path} has no rows.")
    return found


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise ExchangeError(f"{path} is no Parquet file: {error}.") from error
    for number, row in enumerate(table.to_pylist(maps_as_pydicts="strict"), start=1):
        yield f"{path}, row {number}", without_nulls(row)


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ExchangeError(f"{place} is no JSON: {error}. Each line holds one row.") from error
            if not isinstance(row, dict):
                raise ExchangeError(f"{place} is a {type(row).__name__} and no JSON object of columns.")
            yield place, without_nulls(row)


def without_nulls(value: Any) -> Any:
    """What a table adds to a row, or to a message in it, so that all have the same columns."""
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [without_nulls(inner) for inner in value]
    return value


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises ExchangeError where Parquet has no form for the rows, StoreError where the file cannot be written."""
    check_suffix(path)
    if path.suffix != ".parquet":
        write_bytes(path, b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    sink = pa.BufferOutputStream()
    try:
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        pq.write_table(table, sink, compression="zstd")
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise ExchangeError(
            f"{path}: a column holds values of several kinds, as messages beside texts, which Parquet cannot. "
            f"Write .jsonl. ({error})"
        ) from error
    write_bytes(path, sink.getvalue().to_pybytes())
