"""OAPL inside TRL beside `oapl train`: seconds of training, sampling included, for as many completions of Countdown.

    make .venv/installed-dev
    .venv/bin/python benchmarks/inside_trl.py --output benchmarks/results/inside_trl.json

Both take the 1 M-parameter model that ships, 32 prompts x 8 completions a step, whole rounds, no evaluation, and the
machine's two cores as they like: `oapl train` a sampler and a trainer of one thread each, TRL one process of two. They
take turns. Seconds are each one's own: the trainer's clock of the run, and `train_runtime`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import write_results

ROOT = Path(__file__).parents[1]


def of_oapl(args: argparse.Namespace, folder: Path) -> float:
    from oapl.store import RunFolder

    words = ["train", str(ROOT / "recipes" / "countdown.toml"), "--run_dir", str(folder)]
    settings = {
        "trainer.num_steps": args.steps,
        "trainer.weight_sync_steps": args.weight_sync_steps,
        "evaluation.eval_on_start": "false",
        "evaluation.num_prompts": 1,
        "evaluation.num_generations": 1,
    }
    words += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-m", "oapl", *words], check=True, stdout=subprocess.DEVNULL)
    return sum(each["save_s"] + each["wait_s"] + each["step_s"] for each in RunFolder(folder).metrics())


def of_trl(args: argparse.Namespace, folder: Path) -> float:
    words = [str(ROOT / "examples" / "trl_countdown.py"), "--output_dir", str(folder)]
    words += ["--max_steps", str(args.steps), "--weight_sync_steps", str(args.weight_sync_steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    told = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True, env=environment)
    return float(re.findall(r"'train_runtime': '([\d.]+)'", told.stdout + told.stderr)[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--weight_sync_steps", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results: list[dict[str, float]] = []
    print("| turn | oapl train, s | inside TRL, s | ratio |\n|---|---|---|---|")
    for turn in range(args.turns):
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = of_oapl(args, Path(folder) / "oapl"), of_trl(args, Path(folder) / "trl")
        results.append({"oapl_s": ours, "trl_s": theirs, "ratio": theirs / ours, "load": os.getloadavg()[0]})
        print(f"| {turn} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} |", flush=True)
        write_results(args, ("oapl", "torch", "transformers", "trl"), results=results)


if __name__ == "__main__":
    main()
