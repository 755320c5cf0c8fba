"""`oapl plan`: layouts of a run, each simulated; the best of them, a table, a picture, and all of it as JSON."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from oapl.config import PlanConfig, Recipe, load_recipe, merge
from oapl.errors import ConfigError
from oapl.paths import StorePath
from oapl.plan import shards_per_block
from oapl.rates import rates_of
from oapl.simulation import Layout, Outcome, Rates, simulate
from oapl.store import RunFolder
from oapl.store.files import write_bytes, write_json

MAX_SPLITS = 32
"""Splits of a budget that are tried where none are named."""
MAX_SHOWN = 12
"""Rows of the table."""
TABLE_WIDTH = 100
"""Columns that it has, even where the terminal is narrower."""


@dataclass(frozen=True)
class Split:
    num_samplers: int
    trainer_gpus: int
    gpus: int
    """All that are paid for; where they do not divide, some have nothing to do."""


@dataclass(frozen=True)
class Candidate:
    """A layout that was tried, and what came out."""

    split: Split
    weight_sync_steps: int
    rounds_ahead: int
    blocks_per_round: int
    outcome: Outcome

    @property
    def gpu_hours(self) -> float:
        return self.split.gpus * self.outcome.wall_s / 3600

    def cost(self, best_by: str) -> tuple[float, float, float]:
        """What it is ranked by, to three digits; of equals the one with fewer GPU hours, then less lag."""
        first, second = (self.outcome.wall_s, self.gpu_hours)[:: 1 if best_by == "wall" else -1]
        return float(f"{first:.3g}"), float(f"{second:.3g}"), self.outcome.lag_mean

    def as_json(self) -> dict[str, Any]:
        """Its settings and its outcome, with the shares that follow from it."""
        outcome = self.outcome
        return {
            **asdict(self.split),
            "weight_sync_steps": self.weight_sync_steps,
            "rounds_ahead": self.rounds_ahead,
            "blocks_per_round": self.blocks_per_round,
            "gpu_hours": self.gpu_hours,
            **{name: value for name, value in asdict(outcome).items() if name != "num_samplers"},
            "trainer_idle_share": outcome.trainer_idle_share,
            "sampler_idle_share": outcome.sampler_idle_share,
            "sampler_load_share": outcome.sampler_load_share,
            "network_bytes_per_s": outcome.network_bytes_per_s,
        }


def make_plan(
    recipe_path: Path,
    overrides: Mapping[str, Any],
    plan: PlanConfig,
    from_run: StorePath | None,
    output: Path,
    console: Console,
) -> list[Candidate]:
    """Simulates every layout that is asked for, prints the best of them and writes `output`.json and .png.

    Returns them, best first. Raises ConfigError where rates are missing or a layout cannot be.
    """
    recipe = load_recipe(recipe_path, overrides)
    rates, told = rates_of(recipe, plan, RunFolder(from_run) if from_run is not None else None)
    variants = [
        load_recipe(recipe_path, merge(overrides, variant)) for variant in grid_of(recipe, plan)
    ]  # before anything is simulated, so that one that cannot be is told of at once
    candidates = [
        try_split(rates, variant, split, plan)
        for variant in variants
        for split in splits_of(plan, recipe.engine.tensor_parallel_size)
    ]
    candidates.sort(key=lambda candidate: candidate.cost(plan.best_by))
    for line in told:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(plan_table(candidates, plan.best_by))
    for line in advice(candidates[0], rates, recipe):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    path = output.with_name(f"{output.name}.json")
    write_json(
        path,
        {
            "recipe": str(recipe_path),
            "rates": rates_as_json(rates),
            "sources": told,
            "best_by": plan.best_by,
            "layouts": [candidate.as_json() for candidate in candidates],
        },
    )
    draw_plan(
        candidates, f"{recipe_path.stem}: {recipe.trainer.num_steps:,} steps", output.with_name(f"{output.name}.png")
    )
    console.print(f"picture: {output}.png   all layouts: {path}", highlight=False, markup=False, soft_wrap=True)
    return candidates


# What is tried


def grid_of(recipe: Recipe, plan: PlanConfig) -> Iterator[dict[str, Any]]:
    """The settings of each variant of the recipe."""
    for steps in plan.weight_sync_steps or (recipe.trainer.weight_sync_steps,):
        for ahead in plan.rounds_ahead or (recipe.launch.rounds_ahead,):
            yield {"trainer": {"weight_sync_steps": steps}, "launch": {"rounds_ahead": ahead}}


def splits_of(plan: PlanConfig, tensor_parallel_size: int) -> list[Split]:
    """Samplers and the trainer's GPUs: all pairs of those named, or, with a budget, what fills it.

    With a budget and nothing named the trainer gets multiples of a sampler's GPUs, at most MAX_SPLITS of them, evenly
    spread. Raises ConfigError where a side is left without GPUs.
    """
    each = plan.gpus_per_sampler or tensor_parallel_size
    if plan.gpus is None:
        return [
            Split(samplers, trainer, samplers * each + trainer)
            for samplers in plan.samplers or (1,)
            for trainer in plan.trainer_gpus or (plan.measured_gpus,)
        ]
    if plan.samplers:
        pairs = [(samplers, plan.gpus - samplers * each) for samplers in plan.samplers]
    elif plan.trainer_gpus:
        pairs = [((plan.gpus - trainer) // each, trainer) for trainer in plan.trainer_gpus]
    else:
        most = max(1, (plan.gpus - 1) // each)
        counts = np.unique(np.linspace(1, most, min(most, MAX_SPLITS)).round().astype(int))
        pairs = [(int(samplers), plan.gpus - int(samplers) * each) for samplers in counts]
    for samplers, trainer in pairs:
        if samplers < 1 or trainer < 1:
            raise ConfigError(
                f"--gpus {plan.gpus} does not do for {max(samplers, 1)} samplers of {each} and a trainer of "
                f"{max(trainer, 1)}. Give more GPUs, or smaller numbers."
            )
    return [Split(samplers, trainer, plan.gpus) for samplers, trainer in pairs]


def try_split(rates: Rates, recipe: Recipe, split: Split, plan: PlanConfig) -> Candidate:
    layout = layout_of(recipe, split.num_samplers, trainer_speed(split.trainer_gpus, plan))
    return Candidate(
        split,
        recipe.trainer.weight_sync_steps,
        recipe.launch.rounds_ahead,
        layout.blocks_per_round,
        simulate(rates, layout, recipe.seed),
    )


def trainer_speed(gpus: int, plan: PlanConfig) -> float:
    """Times that of the measured trainer: each doubling of its GPUs gives a factor of 2 * scaling_efficiency."""
    return float((gpus / plan.measured_gpus) ** (1 + math.log2(plan.scaling_efficiency)))


def layout_of(recipe: Recipe, num_samplers: int = 1, speed: float = 1.0) -> Layout:
    trainer = recipe.trainer
    rows_per_shard = trainer.prompts_per_step * recipe.sampling.num_generations
    return Layout(
        num_rounds=trainer.num_rounds,
        steps_per_round=trainer.weight_sync_steps,
        shards_per_round=trainer.shards_per_round,
        shards_per_block=shards_per_block(trainer.shards_per_round, rows_per_shard, recipe.engine.max_num_seqs),
        rows_per_shard=rows_per_shard,
        max_num_seqs=recipe.engine.max_num_seqs,
        rounds_ahead=recipe.launch.rounds_ahead,
        num_samplers=num_samplers,
        trainer_speed=speed,
        checkpoints_kept=trainer.save_total_limit,
    )


# What is shown


def plan_table(candidates: Sequence[Candidate], best_by: str) -> Table:
    """The best split for each L and rounds_ahead, or, with one of each, the best splits; best first."""
    shown, what = best_of_each(candidates), "the best split for each L and rounds_ahead"
    if len(shown) == 1:
        shown, what = list(candidates), "the best splits"
    table = Table(
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=f"{len(candidates)} layouts simulated; {what}, by {'wall time' if best_by == 'wall' else 'GPU hours'}",
        title_justify="left",
        caption="Idle samplers wait for policies, or load them. Moved: to and from the storage. Lag is free here.",
        caption_justify="left",
    )
    for name in (
        "trainer\nGPUs",
        "samplers",
        "L",
        "ahead",
        "wall",
        "GPU h",
        "trainer\nidle",
        "samplers\nidle",
        "lag\nmean",
        "lag\nmost",
        "stored",
        "moved",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for candidate in shown[:MAX_SHOWN]:
        outcome, split = candidate.outcome, candidate.split
        table.add_row(
            f"{split.trainer_gpus:,}",
            f"{split.num_samplers:,}",
            str(candidate.weight_sync_steps),
            str(candidate.rounds_ahead),
            readable_time(outcome.wall_s),
            f"{candidate.gpu_hours:,.3g}" if candidate.gpu_hours < 100 else f"{candidate.gpu_hours:,.0f}",
            f"{outcome.trainer_idle_share:.0%}",
            f"{outcome.sampler_idle_share + outcome.sampler_load_share:.0%}",
            f"{outcome.lag_mean:.0f}",
            str(outcome.lag_max),
            readable(outcome.groups_bytes + outcome.policies_bytes + outcome.checkpoints_bytes),
            readable(outcome.network_bytes),
        )
    return table


def best_of_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first candidate of each L and rounds_ahead."""
    firsts: dict[tuple[int, int], Candidate] = {}
    for candidate in candidates:
        firsts.setdefault((candidate.weight_sync_steps, candidate.rounds_ahead), candidate)
    return list(firsts.values())


def readable(num_bytes: float) -> str:
    size, units = num_bytes, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}"


def readable_time(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def advice(best: Candidate, rates: Rates, recipe: Recipe) -> Iterator[str]:
    """What the numbers of the best layout mean, in words."""
    split, outcome = best.split, best.outcome
    yield (
        f"best: {split.num_samplers:,} sampler(s), {split.trainer_gpus:,} GPU(s) for the trainer, "
        f"L = {best.weight_sync_steps}, rounds_ahead = {best.rounds_ahead}: {readable_time(outcome.wall_s)}"
    )
    if split.num_samplers > best.blocks_per_round:
        yield (
            f"  a round has {best.blocks_per_round} blocks to sample, so no more than so many samplers have work at "
            f"once; a larger weight_sync_steps, or fewer prompts_per_step, makes more blocks"
        )
    if outcome.sampler_load_share > 0.1:
        yield (
            f"  {outcome.sampler_load_share:.0%} of the samplers' time goes into loading policies, which a faster "
            f"storage or a larger weight_sync_steps gives back"
        )
    evaluation = recipe.evaluation
    times = 1 + evaluation.eval_on_start
    tokens = times * evaluation.num_prompts * evaluation.num_generations * float(np.mean(rates.lengths))
    seconds = tokens / (rates.sampler_tokens_per_s * evaluation.num_workers)
    yield (
        f"  without starting up, and without {times} evaluation(s), which take about {readable_time(seconds)} in all "
        f"on evaluation.num_workers = {evaluation.num_workers}"
    )


def rates_as_json(rates: Rates) -> dict[str, Any]:
    """The rates, with the lengths as quantiles, and no number where the storage has no limit."""
    lengths = np.array(rates.lengths)
    values = {name: value for name, value in asdict(rates).items() if name != "lengths"}
    if math.isinf(rates.storage_bytes_per_s):
        values["storage_bytes_per_s"] = None
    return {
        **values,
        "completion_tokens": float(lengths.mean()),
        "length_quantiles": {str(q): float(np.quantile(lengths, q)) for q in (0.01, 0.1, 0.5, 0.9, 0.99, 1.0)},
    }


def draw_plan(candidates: Sequence[Candidate], title: str, path: Path) -> None:
    """Writes a PNG: wall time against samplers for each L and rounds_ahead, and who idles in the best of these."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    curves: dict[tuple[int, int], list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda each: (each.weight_sync_steps, each.rounds_ahead)):
        curves.setdefault((candidate.weight_sync_steps, candidate.rounds_ahead), []).append(candidate)
    best = candidates[0]
    unit, name = (3600, "hours") if max(each.outcome.wall_s for each in candidates) >= 7200 else (60, "minutes")
    for (steps, ahead), curve in curves.items():
        points = fastest_by_samplers(curve)
        left.plot(
            [each.split.num_samplers for each in points],
            [each.outcome.wall_s / unit for each in points],
            marker="o",
            markersize=3,
            linestyle="--" if ahead == 0 else "-",
            label=f"L = {steps}, rounds_ahead = {ahead}",
        )
    left.plot(best.split.num_samplers, best.outcome.wall_s / unit, "k*", markersize=12, label="best")
    left.set_ylabel(f"wall time, {name}")
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    left.set_title(title, fontsize=11)
    points = fastest_by_samplers(curves[best.weight_sync_steps, best.rounds_ahead])
    numbers = [each.split.num_samplers for each in points]
    for label, color, shares in (
        ("trainer waits for groups", "#1f6feb", [each.outcome.trainer_idle_share for each in points]),
        ("samplers wait", "#d1782b", [each.outcome.sampler_idle_share for each in points]),
        ("samplers load policies", "#8a8a8a", [each.outcome.sampler_load_share for each in points]),
    ):
        right.plot(numbers, shares, marker="o", markersize=3, color=color, label=label)
    right.set_ylim(0, 1)
    right.yaxis.set_major_formatter(PercentFormatter(1))
    right.set_ylabel("share of the time")
    right.set_title(f"L = {best.weight_sync_steps}, rounds_ahead = {best.rounds_ahead}", fontsize=11)
    for axes in (left, right):
        axes.set_xlabel("samplers")
        axes.grid(alpha=0.25, which="both")
        axes.legend(frameon=False, fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    write_bytes(path, image.getvalue())


def fastest_by_samplers(candidates: Sequence[Candidate]) -> list[Candidate]:
    """For each number of samplers the fastest layout, by that number."""
    fastest: dict[int, Candidate] = {}
    for each in candidates:
        held = fastest.setdefault(each.split.num_samplers, each)
        if each.outcome.wall_s < held.outcome.wall_s:
            fastest[each.split.num_samplers] = each
    return [fastest[number] for number in sorted(fastest)]
