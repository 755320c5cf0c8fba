"""Evaluations of the same problems side by side: a table, a picture, and a paired test of two: `oapl compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from oapl.config import TaskConfig, load_recipe
from oapl.errors import ConfigError
from oapl.evaluation import Interval, Scores, bootstrap_interval, paired_differences, paired_test, read_scores
from oapl.report import draw_pass_at_k, format_interval, summarize
from oapl.store import RoundFolder
from oapl.store.files import read_json, write_json
from oapl.types import Round


@dataclass(frozen=True)
class Evaluated:
    """A complete evaluation, as it lies in its folder."""

    path: Path
    name: str
    problems: str
    scores: Scores
    round: Round
    task: TaskConfig

    @property
    def table_rows(self) -> dict[str, Interval | float]:
        n = self.scores.num_generations
        rows: dict[str, Interval | float] = {f"pass@{k}": each for k, each in self.scores.pass_at_k().items()}
        if (voted := self.scores.cons_at_n()) is not None:
            rows[f"cons@{n}"] = voted
        return {
            **rows,
            "tokens a sample": self.scores.mean_length,
            "cut at the limit": self.scores.truncated_share,
            "problems not graded": self.scores.num_failed,
        }


def read_evaluated(path: Path) -> Evaluated:
    """Raises ConfigError where the folder is not a complete evaluation, and StoreError where it is damaged."""
    folder = RoundFolder(path)
    if not ((path / "summary.json").exists() and folder.is_sealed() and (path / "config.toml").exists()):
        raise ConfigError(
            f"{path} is not a complete evaluation. Make one with `oapl eval MODEL_OR_RUN`, which names its folder."
        )
    summary = read_json(path / "summary.json", "model", "problems")
    task = load_recipe(path / "config.toml").task
    return Evaluated(path, summary["model"], summary["problems"], read_scores(folder, task), folder.load(), task)


def compare(paths: Sequence[Path], output: Path, console: Console) -> dict[str, Any]:
    """Prints the table, and of two evaluations the paired differences; writes `output`.png and `output`.json."""
    evaluated = [read_evaluated(path) for path in paths]
    first = evaluated[0]
    for other in evaluated[1:]:
        if (other.round.problems, other.round.prompt_ids) != (first.round.problems, first.round.prompt_ids):
            raise ConfigError(
                f"{other.path} is of {other.round.num_prompts} problems of {other.problems}, and {first.path} of "
                f"{first.round.num_prompts} of {first.problems}, other ones or posed otherwise: only answers to the "
                f"same prompts can be compared."
            )
    names = unique_names(evaluated)
    console.print(side_by_side(evaluated, names))
    for what, values in (
        ("graded by", graders(evaluated)),
        ("sampled by", [str(each.round.sampling) for each in evaluated]),
        (
            "right by",
            [f"{each.task.judged_by or 'reward'} at least {each.task.success_threshold}" for each in evaluated],
        ),
    ):
        if len(set(values)) > 1:
            listed = "; ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
            console.print(f"not {what} the same: {listed}", style="bold", highlight=False, soft_wrap=True)
    result: dict[str, Any] = {
        "problems": first.problems,
        "evaluations": [
            {"name": name, "folder": str(each.path), **summarize(each.scores)}
            for name, each in zip(names, evaluated, strict=True)
        ],
    }
    if len(evaluated) == 2:
        result["difference"] = paired(evaluated[0].scores, evaluated[1].scores)
        console.print(difference_table(result["difference"], *names))
    curves = {name: each.scores.pass_at_k() for name, each in zip(names, evaluated, strict=True)}
    draw_pass_at_k(curves, first.problems, output.with_name(f"{output.name}.png"))
    write_json(output.with_name(f"{output.name}.json"), result)
    return result


def graders(evaluated: Sequence[Evaluated]) -> list[str]:
    """Who judged, and by which answers where these are not the same; earlier versions did not note them."""
    found = [each.round.verifier for each in evaluated]
    golds = [each.round.gold for each in evaluated]
    if len(set(golds) - {""}) < 2:
        return found
    return [f"{name}, answers {gold[:12]}" for name, gold in zip(found, golds, strict=True)]


def unique_names(evaluated: Sequence[Evaluated]) -> list[str]:
    """The models' names, or the folders' where two evaluations are of one model."""
    names = [each.name for each in evaluated]
    return names if len(set(names)) == len(names) else [str(each.path) for each in evaluated]


def side_by_side(evaluated: Sequence[Evaluated], names: Sequence[str]) -> Table:
    table = Table(box=SIMPLE, title=f"{evaluated[0].problems}: {evaluated[0].round.num_prompts} problems")
    table.title_justify = table.caption_justify = "left"
    table.caption = "95 % intervals over problems"
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    rows = [each.table_rows for each in evaluated]
    for label in dict.fromkeys(label for each in rows for label in each):
        table.add_row(label, *(shown(label, each.get(label)) for each in rows))
    return table


def shown(label: str, value: Interval | float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return format_interval(value, signed=False)
    return f"{100 * value:.1f} %" if label.startswith("cut") else f"{value:.0f}"


def paired(first: Scores, second: Scores) -> dict[str, Any]:
    """second - first by problem: its interval, and the chance of one as large where the two were alike."""
    found = paired_differences(first, second)
    return {
        "num_problems": len(found[1]),
        "pass_at_k": {
            str(k): {"difference": list(bootstrap_interval(values)), "p": paired_test(values)}
            for k, values in found.items()
        },
    }


def difference_table(found: dict[str, Any], first: str, second: str) -> Table:
    table = Table(box=SIMPLE, title=f"{second} - {first}, paired over {found['num_problems']} problems")
    table.title_justify = table.caption_justify = "left"
    table.caption = "p: two-sided permutation test, signs of the problems' differences flipped at random"
    for name in ("k", "difference in pass@k", "p"):
        table.add_column(name, justify="right")
    for k, each in found["pass_at_k"].items():
        table.add_row(k, format_interval(tuple(each["difference"]), signed=True), f"{each['p']:.4f}")
    return table
