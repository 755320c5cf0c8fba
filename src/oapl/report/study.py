"""What a report says of a study: its table of methods and settings, and curves averaged over seeds."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oapl.errors import ConfigError
from oapl.report.figures import AXES, curves, plain
from oapl.store import RunFolder

RESULTS = "results.csv"
TABLE = "table.csv"
Row = Mapping[str, str]
Point = tuple[str, ...]
"""A method, and its value of each grid key."""


def is_study(path: Path) -> bool:
    return (path / RESULTS).is_file() and not (path / "config.toml").exists()


def study_record(folder: Path) -> dict[str, Any]:
    """The study as JSON values. Raises ConfigError where results.csv is not one of a study."""
    results = read_rows(folder / RESULTS)
    keys = grid_keys(folder / RESULTS, results)
    ks = whole_ks(results, "final_pass@")
    table = folder / TABLE
    cells = table_cells(read_rows(table), keys, ks) if table.exists() else averaged_cells(results, keys, ks)
    notes = [] if table.exists() else [f"{TABLE} is missing: means over seeds, without intervals."]
    points = by_point(results, keys)
    return {
        "name": folder.resolve().name,
        "keys": keys,
        "ks": ks,
        "methods": list(dict.fromkeys(row["method"] for row in results)),
        "cells": cells,
        "base": {str(k): mean(number(row.get(f"base_pass@{k}")) for row in results) for k in ks},
        "curves": [point_curves(folder, point, rows, keys) for point, rows in points.items()],
        "runs": [run_row(row, keys, ks) for row in results],
        "notes": notes,
    }


def read_rows(path: Path) -> list[Row]:
    with open(path, newline="", encoding="utf-8") as file:
        return [{key: value or "" for key, value in row.items() if key} for row in csv.DictReader(file)]


def grid_keys(path: Path, rows: Sequence[Row]) -> list[str]:
    """The settings that vary: the columns between `method` and `seed`."""
    columns = list(rows[0]) if rows else []
    if missing := [name for name in ("method", "seed", "status", "run") if name not in columns]:
        raise ConfigError(
            f"{path} has {'no rows' if not rows else f'no column {missing[0]!r}'}: it is no list of a study's runs. "
            f"Run `oapl study` on its folder again, or give another folder."
        )
    return columns[columns.index("method") + 1 : columns.index("seed")]


def whole_ks(rows: Sequence[Row], prefix: str) -> list[int]:
    names = rows[0] if rows else ()
    return sorted(int(name.removeprefix(prefix)) for name in names if name.removeprefix(prefix).isdigit())


def number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def point_of(row: Row, keys: Sequence[str]) -> Point:
    return (row["method"], *(row.get(key, "") for key in keys))


def by_point(rows: Sequence[Row], keys: Sequence[str]) -> dict[Point, list[Row]]:
    points: dict[Point, list[Row]] = {}
    for row in rows:
        points.setdefault(point_of(row, keys), []).append(row)
    return points


def cell(point: Point, keys: Sequence[str], seeds: int, collapsed: int, failed: int = 0) -> dict[str, Any]:
    return {
        "method": point[0],
        "grid": dict(zip(keys, point[1:], strict=True)),
        "num_seeds": seeds,
        "num_collapsed": collapsed,
        "num_failed": failed,
    }


def table_cells(rows: Sequence[Row], keys: Sequence[str], ks: Sequence[int]) -> list[dict[str, Any]]:
    """Each line of table.csv, with pass@k as [mean, low, high, least, most]."""
    suffixes = ("", "_low", "_high", "_min", "_max")
    return [
        {
            **cell(
                point_of(row, keys),
                keys,
                *(int(number(row.get(f"num_{name}")) or 0) for name in ("seeds", "collapsed", "failed")),
            ),
            "pass": {str(k): [number(row.get(f"pass@{k}{suffix}")) for suffix in suffixes] for k in ks},
        }
        for row in rows
    ]


def averaged_cells(results: Sequence[Row], keys: Sequence[str], ks: Sequence[int]) -> list[dict[str, Any]]:
    """The same from results.csv alone, without intervals."""
    cells = []
    for point, rows in by_point(results, keys).items():
        scores = {}
        for k in ks:
            values = [v for row in rows if (v := number(row.get(f"final_pass@{k}"))) is not None]
            scores[str(k)] = [mean(values), None, None, min(values, default=None), max(values, default=None)]
        collapsed, failed = (sum(row["status"] == ended for row in rows) for ended in ("collapsed", "failed"))
        cells.append({**cell(point, keys, len(rows), collapsed, failed), "pass": scores})
    return cells


def run_row(row: Row, keys: Sequence[str], ks: Sequence[int]) -> dict[str, Any]:
    """One run of the study, as its list shows it."""
    shown = [k for k in (min(ks, default=0), max(ks, default=0)) if k in ks]
    return {
        **cell(point_of(row, keys), keys, 1, int(row["status"] == "collapsed"), int(row["status"] == "failed")),
        "seed": row["seed"],
        "status": row["status"],
        "reason": row.get("reason", ""),
        "run": row["run"],
        "step": row.get("step", ""),
        "num_steps": row.get("num_steps", ""),
        "pass": {
            str(k): {
                "base": number(row.get(f"base_pass@{k}")),
                "final": [number(row.get(f"final_pass@{k}{suffix}")) for suffix in ("", "_low", "_high")],
                "difference": [number(row.get(f"difference_pass@{k}{suffix}")) for suffix in ("", "_low", "_high")],
            }
            for k in dict.fromkeys(shown)
        },
    }


def point_curves(folder: Path, point: Point, rows: Sequence[Row], keys: Sequence[str]) -> dict[str, Any]:
    """Curves of one method at one grid point: at each step the mean over seeds, the least and the most.

    A collapsed run counts on with its last value: left out, the mean would recover when the worst run ends.
    """
    runs = []
    ends = []
    for row in rows:
        metrics = read_metrics(folder / row["run"])
        if row["status"] == "collapsed":
            ends.append({"seed": row["seed"], "step": number(row.get("step")), "reason": row.get("reason", "")})
        if metrics:
            runs.append((curves(metrics), row["status"] == "collapsed"))
    names = dict.fromkeys(name for columns, _ in runs for name in columns)
    return {
        **cell(point, keys, len(runs), len(ends)),
        "columns": {
            name: across(
                [(columns[name], ended and name not in (*AXES, "round")) for columns, ended in runs if name in columns]
            )
            for name in names
        },
        "ends": ends,
    }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """A run's metrics, or none where its folder is gone or its metrics cannot be read."""
    try:
        return RunFolder(path).metrics()
    except (OSError, KeyError, TypeError, json.JSONDecodeError):
        return []


def across(columns: Sequence[tuple[Sequence[float | None], bool]]) -> dict[str, list[float | None]]:
    """`mean`, `low` and `high` over several runs' columns, which may be of different lengths.

    Each comes with whether its last value stands for what it lacks.
    """
    values = np.full((len(columns), max(len(column) for column, _ in columns)), np.nan)
    for row, (column, goes_on) in enumerate(columns):
        values[row, : len(column)] = [np.nan if value is None else value for value in column]
        known = [value for value in column if value is not None]
        if goes_on and known:
            values[row, len(column) :] = known[-1]
    there = np.isfinite(values)
    counts = there.sum(0)
    results = {
        "mean": np.where(there, values, 0.0).sum(0) / np.maximum(counts, 1),
        "low": np.where(there, values, np.inf).min(0),
        "high": np.where(there, values, -np.inf).max(0),
    }
    return {name: plain(np.where(counts > 0, found, np.nan)) for name, found in results.items()}
