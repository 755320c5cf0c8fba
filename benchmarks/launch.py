"""What a launch costs: plain processes, a Ray cluster, and plain processes with a round sampled ahead, on one recipe.

    make .venv/installed-dev && .venv/bin/pip install --constraint constraints-cpu.txt 'oapl[ray]'
    .venv/bin/python benchmarks/launch.py --output benchmarks/results/launch.json

Whole runs of recipes/countdown.toml on this machine, one sampler and one trainer, seed by seed in turn, so that all
forms meet the machine alike. The cluster is begun before and is at hand for all runs.

- `command`: seconds from the command to its end, start of processes and final evaluation included.
- `training`: seconds of the trainer's clock, from the first round's opening to the last step.
- a side's idle share: what of `training` it does not spend on steps and saves, or on sampling, grading and storing.
- `reward`: mean of the completions that the trainer met in each round, and pass@1 of the last policy with its interval.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from machine import write_results
from plan import measure

RECIPE = Path(__file__).parents[1] / "recipes" / "countdown.toml"
ALWAYS = {"evaluation.eval_on_start": "false", "evaluation.num_generations": "16"}
PORT = 6398
FORMS: dict[str, dict[str, str]] = {
    "processes": {},
    "ray": {"launch.kind": "ray", "launch.ray_address": f"127.0.0.1:{PORT}"},
    "processes, rounds_ahead = 1": {"launch.rounds_ahead": "1"},
}
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def run(folder: Path, seed: int, settings: dict[str, str]) -> dict[str, Any]:
    from oapl.store import RunFolder
    from oapl.store.files import read_json

    command = [sys.executable, "-m", "oapl", "train", str(RECIPE), "--run_dir", str(folder), "--seed", str(seed)]
    for name, value in {**ALWAYS, **settings}.items():
        command += [f"--{name}", value]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    found = RunFolder(folder)
    rewards: dict[int, list[float]] = {}
    for record in found.metrics():
        rewards.setdefault(record["round"], []).append(record["reward"])
    measured = measure(folder)
    return {
        "command_s": time.perf_counter() - start,
        "training_s": measured["wall_s"],
        "trainer_idle_share": measured["trainer_idle_share"],
        "sampler_idle_share": measured["sampler_idle_share"],
        "reward": [float(np.mean(rewards[index])) for index in sorted(rewards)],
        "pass@1": read_json(found.summary_path)["final"]["pass_at_k"]["1"],
        "load": os.getloadavg()[0],
    }


def print_table(results: dict[str, list[dict[str, Any]]]) -> None:
    first = next(iter(results))
    print("| form | seed | command | training | trainer idle | sampler idle | reward by round | pass@1 |")
    print("|---|---|---|---|---|---|---|---|")
    for form, runs in results.items():
        for seed, each in enumerate(runs):
            ratios = [each[name] / results[first][seed][name] for name in ("command_s", "training_s")]
            shown = [f"{ratio:.2f}" for ratio in ratios]
            shown += [f"{each[name]:.0%}" for name in ("trainer_idle_share", "sampler_idle_share")]
            value, low, high = each["pass@1"]
            curve = " ".join(f"{reward:.3f}" for reward in each["reward"])
            print(f"| {form} | {seed} | {' | '.join(shown)} | {curve} | {value:.3f} [{low:.3f}, {high:.3f}] |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {form: [] for form in args.forms}
    ray = [str(Path(sys.executable).with_name("ray"))]
    if "ray" in args.forms:
        words = ["start", "--head", f"--port={PORT}", "--num-cpus=4", "--include-dashboard=false"]
        subprocess.run([*ray, *words], check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(args.seeds):
                for number, form in enumerate(args.forms):
                    results[form].append(run(Path(folder) / f"{seed}-{number}", seed, FORMS[form]))
                    print(f"seed {seed}, {form}: {results[form][-1]}", file=sys.stderr, flush=True)
                write_results(args, ("oapl", "torch", "ray"), results=results)
    finally:
        if "ray" in args.forms:
            subprocess.run([*ray, "stop", "--force"], check=True, stdout=subprocess.DEVNULL)
    print_table(results)


if __name__ == "__main__":
    main()
