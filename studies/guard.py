"""What the guard says of recorded runs: `python studies/guard.py STUDY_DIR ... [--output FILE.json]`.

Every run's metrics.jsonl is read as the guard would have read it, beside how the run ended: the validation pass@1 of
its first, best and last weights. Printed are the runs that it fires on or that collapsed, and what other thresholds
of `LEAST_KEPT` would have done.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from oapl import guard
from oapl.store import RunFolder
from oapl.store.files import read_json

THRESHOLDS = (0.6, 0.5, 0.4, 0.3, 0.2)
COLLAPSED_BELOW = 0.5
"""A run counts as collapsed where its last weights' validation pass@1 is under this share of the base model's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study_dir", type=Path, nargs="+")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    rows = []
    for folder in args.study_dir:
        found = list(guard_rows(folder)) if (folder / "runs").is_dir() else []
        if not found:
            parser.error(f"{folder} is not the folder of a study with finished runs that have a [selection].")
        rows += found
    rows.sort(key=lambda row: row["last"] / row["base"])
    result = {
        "least_kept": guard.LEAST_KEPT,
        "runs": rows,
        "ended": totals(rows),
        "thresholds": [
            {"least_kept": kept, **totals([row for row in rows if row["fired_at"][str(kept)] is not None])}
            for kept in THRESHOLDS
        ],
    }
    show(result)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


def guard_rows(study_dir: Path) -> Iterator[dict[str, Any]]:
    """When the guard would have stopped each run that has validation scores, and what became of it."""
    for path in sorted((study_dir / "runs").iterdir()):
        run = RunFolder(path)
        if not run.summary_path.exists() or "selection" not in (summary := read_json(run.summary_path)):
            continue
        curve = list(summary["selection"]["pass@1"].values())
        metrics = run.metrics()
        yield {
            "study": study_dir.name,
            "run": path.name,
            "base": curve[0],
            "best": max(curve),
            "last": curve[-1],
            "collapsed": curve[-1] < COLLAPSED_BELOW * curve[0],
            "fired_at": {str(kept): fired_at(metrics, kept) for kept in THRESHOLDS},
        }


def fired_at(metrics: Sequence[Mapping[str, Any]], least_kept: float) -> int | None:
    with patch.object(guard, "LEAST_KEPT", least_kept):
        sign = guard.first_sign(metrics)
    return sign and sign[0]


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many of the runs ended how."""
    return {
        "collapsed": sum(row["collapsed"] for row in rows),
        "ended_below_base": sum(not row["collapsed"] and row["last"] < row["base"] for row in rows),
        "ended_at_base_or_above": sum(row["last"] >= row["base"] for row in rows),
    }


def show(result: Mapping[str, Any]) -> None:
    rows = result["runs"]
    used = str(result["least_kept"])
    print(
        f"| study | run | guard at step (LEAST_KEPT {used}) | validation pass@1: base, best, last |\n|---|---|---|---|"
    )
    for row in rows:
        if row["collapsed"] or row["fired_at"][used] is not None:
            scores = ", ".join(f"{row[name]:.3f}" for name in ("base", "best", "last"))
            print(f"| {row['study']} | {row['run']} | {row['fired_at'][used]} | {scores} |")
    names = [f"{name.replace('_', ' ')}: stopped of {number}" for name, number in result["ended"].items()]
    print(f"\n| LEAST_KEPT | {' | '.join(names)} |")
    print("|---|---|---|---|")
    for line in result["thresholds"]:
        print("| " + " | ".join(str(value) for value in line.values()) + " |")


if __name__ == "__main__":
    main()
