"""A picture of a finished study: `python studies/plot.py STUDY_DIR --grid trainer.weight_sync_steps --output FILE.png`.

pass@1 and pass@k for the largest k against one setting of the grid, a line a method, from the study's table.csv.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from matplotlib.figure import Figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study_dir", type=Path)
    parser.add_argument("--grid", required=True, help="the setting on the x axis")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    rows = list(csv.DictReader((args.study_dir / "table.csv").read_text().splitlines()))
    ks = sorted(int(name.removeprefix("pass@")) for name in rows[0] if name.removeprefix("pass@").isdigit())
    methods = list(dict.fromkeys(row["method"] for row in rows))
    points = sorted({float(row[args.grid]) for row in rows})
    figure = Figure(figsize=(10, 4.2), dpi=130, layout="constrained")
    both = figure.subplots(1, 2)
    for axes, k in zip(both, (ks[0], ks[-1]), strict=True):
        for number, method in enumerate(methods):
            own = [row for row in rows if row["method"] == method and row.get(f"pass@{k}")]
            shift = 1.04 ** (number - (len(methods) - 1) / 2)  # beside each other, not on top of each other
            means, lows, highs = ([float(row[f"pass@{k}{end}"]) for row in own] for end in ("", "_low", "_high"))
            axes.errorbar(
                [float(row[args.grid]) * shift for row in own],
                means,
                yerr=[
                    [m - low for m, low in zip(means, lows, strict=True)],
                    [h - m for h, m in zip(highs, means, strict=True)],
                ],
                marker="o",
                markersize=4,
                linewidth=1.2,
                capsize=2,
                label=method,
            )
        axes.set_xscale("log")
        axes.set_xticks(points, [f"{point:g}" for point in points])
        axes.minorticks_off()
        axes.set_xlabel(args.grid)
        axes.set_title(f"pass@{k}", fontsize=11)
        axes.grid(alpha=0.25)
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(args.output, metadata={"Software": None})


if __name__ == "__main__":
    main()
