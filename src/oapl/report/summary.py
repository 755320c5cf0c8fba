"""What a finished run shows: `summary.json`, a table and a picture of pass@k before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from oapl.evaluation import Interval, Scores, differences
from oapl.paths import StorePath
from oapl.store.files import write_bytes


def summarize(scores: Scores) -> dict[str, Any]:
    """One policy's part of summary.json."""
    return {
        "policy_version": scores.policy_version,
        "step": scores.step,
        "num_prompts": len(scores.num_correct),
        "num_generations": scores.num_generations,
        "num_failed": scores.num_failed,
        "completion_length": scores.mean_length,
        "truncated_share": scores.truncated_share,
        "pass_at_k": {str(k): list(interval) for k, interval in scores.pass_at_k().items()},
        **({} if (voted := scores.cons_at_n()) is None else {"cons_at_n": list(voted)}),
    }


def summarize_run(base: Scores | None, final: Scores) -> dict[str, Any]:
    """`base`, `final` and their paired `difference`, each interval as [mean, low, high]; without a base, `final`."""
    if base is None:
        return {"final": summarize(final)}
    return {
        "base": summarize(base),
        "final": summarize(final),
        "difference": {str(k): list(interval) for k, interval in differences(base, final).items()},
    }


def scores_table(title: str, columns: Mapping[str, Mapping[str, Interval]]) -> Table:
    """One row a k, one column a set of intervals."""
    table = Table(
        box=SIMPLE, title=title, title_justify="left", caption="95 % intervals over problems", caption_justify="left"
    )
    table.add_column("k", justify="right")
    for name in columns:
        table.add_column(name, justify="right")
    first = next(iter(columns.values()))
    for k in first:
        table.add_row(
            k, *(format_interval(intervals[k], signed=name == "difference") for name, intervals in columns.items())
        )
    return table


def evaluation_table(title: str, summary: Mapping[str, Any]) -> Table:
    """What an evaluation found: pass@k, the vote of all samples, their length, and what may spoil it."""
    n = summary["num_generations"]
    table = Table(
        title,
        f"{summary['num_prompts']} problems, {n} samples each",
        box=SIMPLE,
        pad_edge=False,
        caption="95 % intervals over problems",
        caption_justify="left",
    )
    for k, interval in summary["pass_at_k"].items():
        name = f"pass@1, mean@{n}" if k == "1" else f"pass@{k}"
        table.add_row(name, format_interval(interval, signed=False))
    if "cons_at_n" in summary:
        table.add_row(f"cons@{n}", format_interval(summary["cons_at_n"], signed=False))
    table.add_row("tokens a sample", f"{summary['completion_length']:.0f}")
    table.add_row("cut at the limit", f"{100 * summary['truncated_share']:.1f} %")
    if summary["num_failed"]:
        table.add_row("could not be graded", f"{summary['num_failed']} problems, left out")
    return table


def summary_table(summary: Mapping[str, Any]) -> Table:
    parts = {"before": summary.get("base"), "after": summary["final"]}
    failed = max(part["num_failed"] for part in parts.values() if part)
    columns = {name: part["pass_at_k"] for name, part in parts.items() if part}
    if "difference" in summary:
        columns["difference"] = summary["difference"]
    return scores_table(
        f"pass@k on {summary['final']['num_prompts']} held-out problems, "
        f"{summary['final']['num_generations']} samples each" + (f"; {failed} could not be graded" if failed else ""),
        columns,
    )


def format_interval(interval: Interval, *, signed: bool) -> str:
    mean, low, high = interval
    form = "+.3f" if signed else ".3f"
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def plot_pass_at_k(summary: Mapping[str, Any], path: StorePath) -> None:
    """Writes a PNG of pass@k against k, before (if it was evaluated) and after."""
    drawn = [part for part in (("base", "before", "#8a8a8a"), ("final", "after", "#1f6feb")) if part[0] in summary]
    when = " and ".join(label for _, label, _ in drawn)
    draw_pass_at_k(
        {label: summary[name]["pass_at_k"] for name, label, _ in drawn},
        f"Held-out problems {when} {summary['final']['step']} steps",
        path,
        colors=[color for _, _, color in drawn],
    )


def draw_pass_at_k(
    curves: Mapping[str, Mapping[Any, Interval]],
    title: str,
    path: StorePath,
    *,
    colors: Sequence[str | None] | None = None,
) -> None:
    """Writes a PNG with one curve of pass@k against k for each name, and the intervals as bands."""
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for (label, curve), color in zip(curves.items(), colors or [None] * len(curves), strict=True):
        ks = [int(k) for k in curve]
        means, lows, highs = zip(*curve.values(), strict=True)
        axes.plot(ks, means, marker="o", markersize=4, color=color, label=label)
        axes.fill_between(ks, lows, highs, color=color, alpha=0.2, linewidth=0)
    every_k = sorted({int(k) for curve in curves.values() for k in curve})
    axes.set_xscale("log", base=2)
    axes.set_xticks(every_k, [str(k) for k in every_k])
    axes.set_ylim(0, 1)
    axes.set_xlabel("k (samples per problem)")
    axes.set_ylabel("pass@k")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    write_bytes(path, image.getvalue())
