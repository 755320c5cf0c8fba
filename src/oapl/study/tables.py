"""What a study shows for its runs: `results.csv`, a row a run, and `table.csv`, a row a setting over all its seeds.

Shapes: K values of k, S seeds, Q problems.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.table import Table

from oapl.evaluation import Interval, Scores, bootstrap_over_seeds, read_scores
from oapl.report import format_interval
from oapl.store import RunFolder
from oapl.store.files import read_json, write_bytes
from oapl.store.run import num_sampled
from oapl.study.matrix import Cell
from oapl.study.states import Outcome

RECENT = 10
"""Steps at the end of a run that its `last_` columns are means over."""

PLACES = ("step", "round", "time")
"""Numbers in a record of metrics that say where it stands, not how the run goes."""

Row = dict[str, Any]


def result_row(cell: Cell, run: RunFolder, outcome: Outcome, study_dir: Path) -> Row:
    """A run's row of results.csv, as far as the run came."""
    row = {
        **identity(cell),
        "seed": cell.seed,
        "status": outcome.status,
        "reason": outcome.reason,
        "run": run.path.relative_to(study_dir).as_posix(),
        "num_steps": cell.recipe.trainer.num_steps,
    }
    if outcome.status == "failed":
        return row
    metrics = run.metrics()
    row |= {
        "num_completions": num_sampled(metrics),
        "training_s": sum(record["save_s"] + record["wait_s"] + record["step_s"] for record in metrics),
    }
    if run.summary_path.exists():
        row |= summary_columns(read_json(run.summary_path, "final"), cell)
    elif run.evaluation(0).is_sealed():
        row |= {
            f"base_pass@{k}": mean for k, mean in means_of(read_scores(run.evaluation(0), cell.recipe.task)).items()
        }
    if outcome.step is not None:
        row["step"] = outcome.step
    return row | recent_means(metrics)


def summary_columns(summary: Mapping[str, Any], cell: Cell) -> Row:
    """What results.csv takes from summary.json."""
    facts = ("num_completions", "wall_s", "training_s")
    row = {
        "step": summary["final"].get("step", cell.recipe.trainer.num_steps),
        **{name: summary[name] for name in facts},
    }
    if "selection" in summary:
        row["validation_pass@1"] = summary["selection"]["pass@1"][str(row["step"])]
    base, differences = summary.get("base"), summary.get("difference", {})  # none without `eval_on_start`
    for k, final in summary["final"]["pass_at_k"].items():
        if base is not None:
            row[f"base_pass@{k}"] = base["pass_at_k"][k][0]
        row |= interval_columns(f"final_pass@{k}", final)
        if k in differences:
            row |= interval_columns(f"difference_pass@{k}", differences[k])
    return row


def interval_columns(name: str, interval: Sequence[float]) -> Row:
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


def means_of(scores: Scores) -> dict[int, float]:
    return {k: float(scores.pass_at(k).mean()) for k in scores.ks()}


def recent_means(metrics: Sequence[Mapping[str, Any]]) -> Row:
    """The mean of each metric over the last steps, those that have it."""
    recent = metrics[-RECENT:]
    names = dict.fromkeys(name for record in recent for name in record if name not in PLACES)
    values = {name: [record[name] for record in recent if is_number(record.get(name))] for name in names}
    return {f"last_{name}": sum(given) / len(given) for name, given in values.items() if given}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def identity(cell: Cell) -> Row:
    """What a setting is called in both tables."""
    return {"method": cell.method, **{key: as_text(value) for key, value in cell.grid.items()}}


def as_text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def setting_row(cells: Sequence[Cell], outcomes: Sequence[Outcome | None], runs: Sequence[RunFolder]) -> Row | None:
    """A setting's row of table.csv, or None where none of its runs has ended."""
    ended = [outcome for outcome in outcomes if outcome is not None]
    if not ended:
        return None
    scored = [
        scores_of(cell, run)
        for cell, run, outcome in zip(cells, runs, outcomes, strict=True)
        if outcome is not None and outcome.status != "failed" and run.summary_path.exists()
    ]
    row = {
        **identity(cells[0]),
        "num_seeds": len(scored),
        "num_collapsed": sum(outcome.status == "collapsed" for outcome in ended),
        "num_failed": sum(outcome.status == "failed" for outcome in ended),
    }
    return row | score_columns(scored) if scored else row


def scores_of(cell: Cell, run: RunFolder) -> tuple[Scores | None, Scores]:
    """A run's scores before, where it has them, and after."""
    summary = read_json(run.summary_path, "final")
    if "selection" in summary:
        final = run.selected(summary["selection"]["step"])
    else:
        final = run.evaluation(summary["final"]["policy_version"])
    base = read_scores(run.evaluation(0), cell.recipe.task) if "base" in summary else None
    return base, read_scores(final, cell.recipe.task)


def score_columns(scored: Sequence[tuple[Scores | None, Scores]]) -> Row:
    """pass@k after training, and its paired difference to before, over seeds and the problems that all runs graded."""
    bases, finals = [base for base, _ in scored if base is not None], [final for _, final in scored]
    positions = sorted(set.intersection(*(set(scores.num_correct) for scores in [*bases, *finals])))
    if not positions:
        return {}
    ks = finals[0].ks()  # the same for all: of one recipe
    final_KSQ = values(finals, ks, positions)
    shown = {"pass": final_KSQ}
    if len(bases) == len(finals):
        shown["difference_pass"] = final_KSQ - values(bases, ks, positions)
    row: Row = {}
    for name, values_KSQ in shown.items():
        intervals, seeds_KS = bootstrap_over_seeds(values_KSQ), values_KSQ.mean(-1)
        for k, interval, seeds in zip(ks, intervals, seeds_KS, strict=True):
            row |= interval_columns(f"{name}@{k}", interval)
            row |= {f"{name}@{k}_min": float(seeds.min()), f"{name}@{k}_max": float(seeds.max())}
    return row


def values(scores: Sequence[Scores], ks: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """pass@k of each problem in each run, shape [K, S, Q]."""
    return np.array([[one.pass_at(k, positions) for one in scores] for k in ks])


# What is written and shown


def write_table(path: Path, rows: Sequence[Row], first: Sequence[str]) -> None:
    """A CSV whose columns are `first`, then those of the rows: k by k, and `last_` ones at the end."""
    found = dict.fromkeys(name for row in rows for name in row)
    rest = sorted((name for name in found if name not in first), key=column_order)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*first, *rest], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())


def column_order(name: str) -> tuple[bool, int]:
    """Sorts columns by k, in the order they have among themselves, and metrics after them."""
    k = name.partition("@")[2].partition("_")[0]
    return name.startswith("last_"), int(k) if k else 0


def result_columns(grid_keys: Sequence[str]) -> list[str]:
    facts = ["seed", "status", "reason", "run", "step", "num_steps", "num_completions", "wall_s", "training_s"]
    return ["method", *grid_keys, *facts]


def setting_columns(grid_keys: Sequence[str]) -> list[str]:
    return ["method", *grid_keys, "num_seeds", "num_collapsed", "num_failed"]


def rich_table(rows: Sequence[Row], grid_keys: Sequence[str]) -> Table:
    """A row a setting, with pass@1 and pass@k for the largest k."""
    ks = sorted({int(name.removeprefix("pass@")) for row in rows for name in row if name[5:].isdigit()})
    table = Table(
        box=SIMPLE,
        title="pass@k on held-out problems, after training",
        title_justify="left",
        caption="mean over seeds [95 % interval over seeds and problems], and below it the least and largest seed",
        caption_justify="left",
    )
    shown = [f"pass@{k}" for k in dict.fromkeys([ks[0], ks[-1]])] if ks else []
    for name in setting_columns(grid_keys):
        table.add_column(name.rpartition(".")[2].removeprefix("num_"), justify="right", overflow="fold")
    for name in shown:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in setting_columns(grid_keys)), *(format_scores(row, name) for name in shown)
        )
    return table


def format_scores(row: Row, name: str) -> str:
    if name not in row:
        return "-"
    interval: Interval = (row[name], row[f"{name}_low"], row[f"{name}_high"])
    return f"{format_interval(interval, signed=False)}\n{row[f'{name}_min']:.3f} to {row[f'{name}_max']:.3f}"
