"""What a finished study says: `python studies/compare.py STUDY.toml STUDY_DIR --reference METHOD [--output FILE.json]`.

Two tables, printed and written as JSON:

- each method less the reference method at the same grid point, paired by seed and problem;
- the completions and seconds that each setting needed to bring validation pass@1 to base + 0.15, where the study has a
  selection.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from oapl.evaluation import bootstrap_over_seeds
from oapl.store import RunFolder
from oapl.store.files import read_json
from oapl.store.run import num_sampled
from oapl.study.matrix import Cell, load_study
from oapl.study.tables import scores_of

GAIN = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("study_dir", type=Path)
    parser.add_argument("--reference", required=True, help="the method that the others are compared with")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    settings = load_study(args.study).settings()
    runs = {cell.name: RunFolder(args.study_dir / "runs" / cell.name) for cells in settings for cell in cells}
    done = [tuple(cell for cell in cells if runs[cell.name].summary_path.exists()) for cells in settings]
    done = [cells for cells in done if cells]
    if not done:
        parser.error(f"{args.study_dir} holds no finished run of {args.study}. Give the folder of `oapl study`.")
    if args.reference not in (methods := {cells[0].method for cells in done}):
        parser.error(f"--reference {args.reference}: has no finished run; there are {', '.join(sorted(methods))}.")
    result = {
        "study": args.study.name,
        "reference": args.reference,
        "versions": {name: version(name) for name in ("oapl", "torch", "transformers")},
        "platform": platform.platform(),
        "differences": differences(done, runs, args.reference),
        "to_gain": [to_gain(cells, runs) for cells in done if cells[0].recipe.selection is not None],
    }
    show(result)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


def point(cell: Cell) -> tuple[tuple[str, Any], ...]:
    return tuple(cell.grid.items())


def differences(
    settings: Sequence[tuple[Cell, ...]], runs: Mapping[str, RunFolder], reference: str
) -> list[dict[str, Any]]:
    """Each method less the reference at the same grid point, over the seeds that both have."""
    scores = {(c.method, point(c), c.seed): scores_of(c, runs[c.name])[1] for cells in settings for c in cells}
    rows = []
    for cells in settings:
        method, grid = cells[0].method, point(cells[0])
        seeds = [cell.seed for cell in cells if (reference, grid, cell.seed) in scores]
        if method == reference or not seeds:
            continue
        pairs = [(scores[method, grid, seed], scores[reference, grid, seed]) for seed in seeds]
        positions = sorted(set.intersection(*(set(s.num_correct) for pair in pairs for s in pair)))
        ks = pairs[0][0].ks()
        values_KSQ = np.array(
            [[ours.pass_at(k, positions) - theirs.pass_at(k, positions) for ours, theirs in pairs] for k in ks]
        )
        intervals = dict(zip(map(str, ks), bootstrap_over_seeds(values_KSQ), strict=True))
        rows.append({"method": method, **dict(grid), "num_seeds": len(seeds), "difference": intervals})
    return rows


def to_gain(cells: Sequence[Cell], runs: Mapping[str, RunFolder]) -> dict[str, Any]:
    """Completions and seconds until validation pass@1 first passed base + GAIN, a seed each; None where it did not."""
    reached = [first_gain(cell, runs[cell.name]) for cell in cells]
    return {
        "method": cells[0].method,
        **cells[0].grid,
        "completions": [place and place[0] for place in reached],
        "seconds": [place and place[1] for place in reached],
    }


def first_gain(cell: Cell, run: RunFolder) -> tuple[int, float] | None:
    """By linear interpolation between snapshots."""
    curve = [(int(step), score) for step, score in read_json(run.summary_path)["selection"]["pass@1"].items()]
    goal = curve[0][1] + GAIN
    for (before, low), (after, high) in pairwise(curve):
        if high >= goal:
            step = round(before + (after - before) * (goal - low) / (high - low))
            records = [record for record in run.metrics() if record["step"] <= step]
            seconds = sum(record[name] for record in records for name in ("save_s", "wait_s", "step_s"))
            return num_sampled(records), seconds
    return None


def show(result: Mapping[str, Any]) -> None:
    print("| method | setting | seeds | difference in pass@1 | in pass@max |\n|---|---|---|---|---|")
    for row in result["differences"]:
        shown = list(row["difference"].values())
        print(
            f"| {row['method']} | {grid_of(row)} | {row['num_seeds']} | {interval(shown[0])} | {interval(shown[-1])} |"
        )
    print(f"\n| method | setting | completions to base + {GAIN} | seconds |\n|---|---|---|---|")
    for row in result["to_gain"]:
        seconds = [value and round(value) for value in row["seconds"]]
        print(f"| {row['method']} | {grid_of(row)} | {row['completions']} | {seconds} |")


def grid_of(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in row.items() if "." in key)


def interval(values: Sequence[float]) -> str:
    mean, low, high = values
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


if __name__ == "__main__":
    main()
