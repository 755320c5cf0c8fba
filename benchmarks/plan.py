"""What `oapl plan` predicts of real runs, beside what they then took: wall time, and how long each side idles.

    .venv/bin/python benchmarks/plan.py --output benchmarks/results/plan.json

Runs of recipes/countdown.toml on this machine, sampler and trainer side by side, without evaluations. Rates come from
short runs of the recipe, three rounds of 5 steps, one before and one after each run, never from what is predicted:

- `before`: from the short run before it alone, as one would who plans.
- `both`: from the two, seconds for the same work averaged. What this mends is a machine that others slow down.
- `own`: from the run itself. No prediction: what is wrong then is the model, and not the rates.

Wall time is the trainer's clock from the first round's opening, the first step's warm-up included. A side's idle share
is what it does not spend on steps and saves, or on sampling, grading and storing, of that time. The load is how many
processes wanted the machine's cores at the end of the run, those of the run included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from machine import write_results

RECIPE = Path(__file__).parents[1] / "recipes" / "countdown.toml"
CALIBRATION = {"trainer.num_steps": 15, "trainer.weight_sync_steps": 5}
RUNS: dict[str, dict[str, Any]] = {
    "L = 5": {"trainer.weight_sync_steps": 5},
    "L = 5, rounds_ahead = 1": {"trainer.weight_sync_steps": 5, "launch.rounds_ahead": 1},
    "L = 20, 2 epochs": {"trainer.weight_sync_steps": 20, "trainer.num_epochs": 2},
}
MEASURED = ("wall_s", "trainer_idle_share", "sampler_idle_share")


def train(folder: Path, settings: dict[str, Any]) -> float:
    """Runs the recipe with these settings into a folder, if it is not there yet; returns the load at its end."""
    always = {"evaluation.eval_on_start": False, "evaluation.num_prompts": 1, "evaluation.num_generations": 1}
    command = [sys.executable, "-m", "oapl", "train", str(RECIPE), "--run_dir", str(folder)]
    for name, value in {**always, **settings}.items():
        command += [f"--{name}", str(value).lower()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return os.getloadavg()[0]


def measure(folder: Path) -> dict[str, float]:
    """What a run took, by its own records."""
    from oapl.rates import Measurement, total
    from oapl.store import RunFolder

    found = Measurement(RunFolder(folder))
    wall_s = sum(total(found.records, name) for name in ("save_s", "wait_s", "step_s"))
    return {
        "wall_s": wall_s,
        "trainer_idle_share": total(found.records, "wait_s") / wall_s,
        "sampler_idle_share": 1 - found.sampling_seconds() / wall_s,
    }


def predict(folders: list[Path], settings: dict[str, Any]) -> dict[str, float]:
    """The same three numbers, from the mean rates of other runs."""
    from oapl.config import PlanConfig, load_recipe
    from oapl.planning import layout_of
    from oapl.rates import rates_of
    from oapl.simulation import simulate
    from oapl.store import RunFolder

    nested: dict[str, Any] = {}
    for name, value in settings.items():
        section, key = name.split(".")
        nested.setdefault(section, {})[key] = value
    recipe = load_recipe(RECIPE, nested)
    found = [rates_of(recipe, PlanConfig(), RunFolder(folder))[0] for folder in folders]

    def mean(name: str) -> float:
        return float(np.mean([getattr(rates, name) for rates in found]))

    rates = replace(
        found[0],
        **{name: mean(name) for name in ("grading_s", "sync_s", "save_s", "shared_slowdown")},
        **{
            name: 1 / float(np.mean([1 / getattr(rates, name) for rates in found]))
            for name in ("sampler_tokens_per_s", "trainer_tokens_per_s")
        },
        lengths=tuple(length for rates in found for length in rates.lengths),
    )
    outcome = simulate(rates, layout_of(recipe))
    wall_s = outcome.wall_s - rates.save_s  # the last one is on no step's record
    return {
        "wall_s": wall_s,
        "trainer_idle_share": outcome.wait_s / wall_s,
        "sampler_idle_share": 1 - outcome.sampling_s / wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", default=list(RUNS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, help="where the runs stay; a temporary folder by default")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        before = folder / "calibration-0"
        load = train(before, CALIBRATION)
        print("| run | | before | both | own | measured | error of both | load |", flush=True)
        print("|---|---|---|---|---|---|---|---|")
        for number, name in enumerate(args.runs):
            settings = {"trainer.num_steps": args.steps, **RUNS[name]}
            run, after = folder / f"run-{number}", folder / f"calibration-{number + 1}"
            loads = [load, train(run, settings), load := train(after, CALIBRATION)]
            sources = {"before": [before], "both": [before, after], "own": [run]}
            found: dict[str, Any] = {kind: predict(folders, settings) for kind, folders in sources.items()}
            results[name] = found = {**found, "measured": measure(run), "loads": loads}
            for key in MEASURED:
                values = [found[kind][key] for kind in (*sources, "measured")]
                cells = [f"{value:.1f} s" if key == "wall_s" else f"{value:.1%}" for value in values]
                error = found["both"][key] / found["measured"][key] - 1
                print(f"| {name} | {key} | {' | '.join(cells)} | {error:+.0%} | {loads[1]:.1f} |", flush=True)
            before = after
            write_results(args, ("oapl", "torch", "transformers", "simpy"), results=results)


if __name__ == "__main__":
    main()
