"""The learning curves of a report: which there are, what each shows and what a bad value looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 2000
"""Points of a curve; of a longer run, neighbouring steps are averaged."""

AXES = ("step", "samples", "wall_s")
"""What curves can be drawn against."""

Column = list[float | None]
"""One value a point; None where the metric was absent or not finite."""


@dataclass(frozen=True)
class Line:
    metric: str
    """Its key in metrics.jsonl."""
    label: str


@dataclass(frozen=True)
class Chart:
    id: str
    section: str
    title: str
    axis: str
    lines: tuple[Line, ...]
    shows: str
    bad: str
    log: bool = False
    stepped: bool = False
    resets: bool = False
    """Whether it starts anew with each round, so that nothing may be averaged across rounds."""
    share: bool = False
    """Whether its values lie between 0 and 1."""


CHARTS = (
    Chart(
        "reward",
        "learning",
        "Reward",
        "mean reward",
        (Line("reward", "reward"), Line("success", "share that succeeds")),
        "The mean reward of the completions that each step trained on, before the step.",
        "It falls from one round to the next: look at the log-ratios below.",
    ),
    Chart(
        "entropy",
        "policy",
        "Entropy",
        "nats a token",
        (Line("entropy", "entropy"),),
        "How undecided the trained policy is, on average, about the next token of a completion.",
        "Near 0: the policy has become deterministic, and the answers to a problem all alike.",
    ),
    Chart(
        "log_ratio",
        "policy",
        "Log-ratio by outcome",
        "nats a completion",
        (Line("log_ratio_right", "right"), Line("log_ratio_wrong", "wrong")),
        "How far training moved the log-probability of whole completions since they were sampled, "
        "right answers and wrong ones apart.",
        "Right answers clearly below 0 are being unlearnt, and the run is collapsing. Hundreds of nats below 0 for "
        "wrong ones.",
        resets=True,
    ),
    Chart(
        "ratio_right",
        "policy",
        "Chance of right answers",
        "times the sampler's",
        (Line("ratio_right", "ratio"),),
        "By how much the trained policy's chance of a right answer is that of the policy that sampled: 1 is no change.",
        "Below 1: right answers are being unlearnt.",
        resets=True,
    ),
    Chart(
        "residual",
        "policy",
        "Residual of the fit",
        "reward",
        (Line("residual", "mean"), Line("residual_std", "spread")),
        "What the loss squares: beta2 times the log-ratio, less the advantage. Its mean, and its standard deviation.",
        "A mean that drifts away from 0, or a spread that grows from round to round.",
        resets=True,
    ),
    Chart(
        "r2",
        "policy",
        "R² of the fit",
        "R²",
        (Line("r2", "R²"),),
        "The share of the advantages' variance that the log-ratios explain: 1 is a perfect fit, 0 is none.",
        "It stays at 0 or below at the end of every round: the policy does not follow the advantages.",
        resets=True,
    ),
    Chart(
        "grad_norm",
        "policy",
        "Gradient norm",
        "norm (log scale)",
        (Line("grad_norm", "norm"),),
        "The norm of each step's gradient before it is clipped.",
        "Above trainer.max_grad_norm at most steps, so that every step is cut short, or rising without end.",
        log=True,
    ),
    Chart(
        "hold",
        "policy",
        "Hold: beta2 times an answer's surprise",
        "reward",
        (Line("hold", "hold"),),
        "What an answer would have to lose in reward to vanish: how firmly beta2 holds the policy to its sampler.",
        "Below 0.05: right answers may be unlearnt within one round. Above 2: the policy hardly moves.",
        log=True,
    ),
    Chart(
        "lag",
        "policy",
        "Lag",
        "steps",
        (Line("lag", "lag"),),
        "Optimizer steps between the weights that sampled a step's completions and the weights that trained on them.",
        "More than L - 1, or 2 L - 1 with launch.rounds_ahead = 1, never happens; a long lag makes old data.",
        stepped=True,
    ),
    Chart(
        "shares",
        "data",
        "Uniform groups and cut completions",
        "share",
        (Line("uniform_share", "uniform groups"), Line("truncated_share", "cut completions")),
        "The share of groups whose rewards are all equal, which teach nothing, and of completions cut at the limit.",
        "Uniform near 1: hardly a group teaches anything. Many cut: raise the limit, or answers never end.",
        share=True,
    ),
    Chart(
        "completion_length",
        "data",
        "Completion length",
        "tokens",
        (Line("completion_length", "length"),),
        "Mean number of tokens of a completion.",
        "At the limit max_completion_length, or a jump: answers ramble, or shrink to nothing.",
    ),
    Chart(
        "effective_share",
        "data",
        "Effective sample share",
        "share",
        (Line("effective_share", "effective share"),),
        "How much of the data would count if each completion were weighted by how much likelier it has become.",
        "Near 0: a handful of completions would carry all the weight, the data is far from the policy.",
        share=True,
        resets=True,
    ),
)


def charts_for(metrics: set[str]) -> list[dict[str, Any]]:
    """The charts that these metrics can fill, each with only the lines there are."""
    charts = []
    for chart in CHARTS:
        lines = [asdict(line) for line in chart.lines if line.metric in metrics]
        if lines:
            charts.append({**asdict(chart), "lines": lines})
    return charts


class Columns(Protocol):
    """A metric of every step as f64[steps]; `absent` where a step lacks it or it is no number."""

    def __call__(self, name: str, absent: float = ...) -> NDArray[np.float64]: ...


def curves(records: Sequence[Mapping[str, Any]], max_points: int = MAX_POINTS) -> dict[str, Column]:
    """See `curves_of`."""
    return curves_of(partial(column, records), max_points)


def curves_of(columns_of: Columns, max_points: int = MAX_POINTS) -> dict[str, Column]:
    """The x axes (`step`, `samples`, `wall_s`), `round` and the charts' metrics as columns, at most `max_points` long.

    `samples` counts completions so far; `wall_s` adds up what the trainer's clock says of each step: saving,
    waiting for the shard, and the step itself.
    """
    counts = np.where(columns_of("epoch", 0.0) > 0, 0.0, columns_of("num_completions", 0.0))
    seconds = sum(columns_of(name, 0.0) for name in ("save_s", "wait_s", "step_s"))
    columns = {
        "step": columns_of("step"),
        "round": columns_of("round"),
        "samples": np.cumsum(counts),
        "wall_s": np.cumsum(seconds),
    }
    names = dict.fromkeys(line.metric for chart in CHARTS for line in chart.lines)
    found = {name: columns_of(name) for name in names}
    columns |= {name: values for name, values in found.items() if np.isfinite(values).any()}
    if "success" in columns and np.array_equal(columns["success"], columns.get("reward", columns["success"])):
        del columns["success"]  # with rewards of 0 and 1 the two are the same curve
    return {name: plain(thin(values, max_points)) for name, values in columns.items()}


def column(records: Sequence[Mapping[str, Any]], name: str, absent: float = float("nan")) -> NDArray[np.float64]:
    """A metric of every step; `absent` where a step lacks it or it is no number."""
    values = (record.get(name) for record in records)
    return np.array([v if isinstance(v, int | float) and np.isfinite(v) else absent for v in values], np.float64)


def thin(values: NDArray[np.float64], max_points: int = MAX_POINTS) -> NDArray[np.float64]:
    """Means of runs of equally many neighbours, so that at most `max_points` are left."""
    width = -(-len(values) // max_points)
    if width <= 1:
        return values
    padded = np.pad(values, (0, -len(values) % width), constant_values=np.nan).reshape(-1, width)
    known = np.isfinite(padded)
    counts = known.sum(1)
    sums = np.where(known, padded, 0.0).sum(1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def plain(values: NDArray[np.float64]) -> Column:
    """Numbers for JSON, to six digits."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def seconds_by_round(records: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """See `seconds_of`."""
    return seconds_of(partial(column, records))


def seconds_of(columns_of: Columns) -> dict[str, Column]:
    """Where each round's time went: the trainer's seconds, and the sampler's less what it spent on rewards."""
    rounds = columns_of("round")
    indices = np.unique(rounds[np.isfinite(rounds)])
    names = ("save_s", "wait_s", "step_s", "sampling_s", "grading_s")
    by_step = {name: columns_of(name, 0.0) for name in names}
    sums = {name: np.array([by_step[name][rounds == index].sum() for index in indices]) for name in names}
    sums["sampling_s"] = np.maximum(0.0, sums["sampling_s"] - sums["grading_s"])
    return {"round": plain(indices), **{name: plain(values) for name, values in sums.items()}}
