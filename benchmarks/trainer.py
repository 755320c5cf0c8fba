"""An optimizer step on the same completions: oapl against TRL's GRPOTrainer, and both against the matmul rate.

    make .venv/installed-dev runs/smollm2
    .venv/bin/python benchmarks/trainer.py --output trainer.json

64 completions of 32 to 512 random tokens, 8 to a prompt of 16 to 64. Each contender has a process of its own, which
measures its peak memory; they take turns, so that other work on the machine hits all alike. TRL gets the settings named
in `TRL_FORMS`, and its best counts. The rate of useful work is 6 FLOPs a weight and token, with attention, for each
prompt once and each completion, padding and repeated prompts not counted; its share is of the matmul rate that the same
process measured before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from contenders import run_once
from machine import matmul_rate, write_results

MODEL = "runs/smollm2"
TRL_FORMS = {
    "trl": {},  # its defaults: gradient checkpointing, 8 completions a backward
    "trl, no checkpointing": {"gradient_checkpointing": False},
    "trl, no checkpointing, batch 4": {"gradient_checkpointing": False, "per_device_train_batch_size": 4},
    "trl, eager": {"attn_implementation": "eager"},
    "trl, eager, no checkpointing, batch 4": {
        "attn_implementation": "eager",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
    },
    "trl, compiled": {"torch_compile": True},
    "trl, compiled, no checkpointing, batch 4": {
        "torch_compile": True,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
    },
}
OAPL_FORMS = {
    "oapl, compiled": {"torch_compile": True},
    "oapl, compiled, 1024 tokens": {"torch_compile": True, "max_tokens_per_microbatch": 1024},
    "oapl": {},
    "oapl, sdpa, 4096 tokens": {"attn_implementation": "sdpa", "max_tokens_per_microbatch": 4096},
}


def completions(args: argparse.Namespace) -> list[tuple[list[int], list[list[int]]]]:
    """Prompts, each with its completions: random tokens, lengths spread evenly and shuffled."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.linspace(args.shortest, args.longest, args.prompts * args.generations).astype(int))
    groups = []
    for group in np.split(lengths, args.prompts):
        prompt = rng.integers(100, args.vocabulary, int(rng.integers(16, 65))).tolist()
        groups.append((prompt, [rng.integers(100, args.vocabulary, length).tolist() for length in group]))
    return groups


def useful_flops(groups: list[tuple[list[int], list[list[int]]]], config: Any) -> float:
    """Forward and backward, 2 + 4 FLOPs for each weight that a token meets; causal attention by the tokens it sees."""
    head_dim = config.head_dim
    attention = config.hidden_size * 2 * head_dim * (config.num_attention_heads + config.num_key_value_heads)
    body = config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    per_seen = 2 * config.num_hidden_layers * config.num_attention_heads * head_dim
    total = 0.0
    for prompt, answers in groups:
        p = len(prompt)
        total += body * p + per_seen * p * (p + 1) / 2
        for answer in answers:
            n = len(answer)
            total += (body + head) * n + per_seen * (n * p + n * (n + 1) / 2)
    return 6 * total


# Contenders, each in a process of its own


def oapl_steps(args: argparse.Namespace, form: dict[str, Any]) -> Iterator[None]:
    from oapl.config import Recipe
    from oapl.trainer import Trainer
    from oapl.types import Completion, Group, Shard

    form = dict(form)
    recipe = Recipe(
        model={"name_or_path": args.model, "attn_implementation": form.pop("attn_implementation", None)},
        task={"name": "countdown"},
        sampling={"num_generations": args.generations, "max_completion_length": args.longest},
        loss={"beta2": 0.1},
        trainer={"num_steps": 50, "bf16": True, "num_threads": args.threads, "max_tokens_per_microbatch": 2048, **form},
    )
    trainer = Trainer(recipe, args.model)
    rng = np.random.default_rng(0)
    groups = []
    for position, (prompt, answers) in enumerate(completions(args)):
        made = tuple(
            Completion(np.array(ids, np.int32), -3 * rng.random(len(ids), dtype=np.float32), "stop") for ids in answers
        )
        rewards = rng.integers(0, 2, len(made)).astype(np.float32)
        groups.append(Group(position, str(position), "", np.array(prompt, np.int32), made, ("",) * len(made), rewards))
    shard = Shard(tuple(groups), (), 0.0, 0.0, 0.0)
    while True:
        trainer.train_step(shard, "digest")
        yield


def trl_steps(args: argparse.Namespace, form: dict[str, Any]) -> Iterator[None]:
    import warnings

    warnings.simplefilter("ignore")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    form, groups = dict(form), completions(args)
    total = args.prompts * args.generations

    class Given(GRPOTrainer):
        def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
            ids = [answer for _, answers in groups for answer in answers]
            prompt_ids = [prompt for prompt, answers in groups for _ in answers]
            return prompt_ids, ids, None, [""] * total, None, {}, None, None

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    batch = form.get("per_device_train_batch_size", 8)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Given(
            AutoModelForCausalLM.from_pretrained(
                args.model, dtype=torch.float32, attn_implementation=form.pop("attn_implementation", None)
            ),
            lambda completions, **_: rng.integers(0, 2, len(completions)).astype(float).tolist(),
            GRPOConfig(
                **{
                    "output_dir": folder,
                    "use_cpu": True,
                    "bf16": True,
                    "report_to": "none",
                    "per_device_train_batch_size": batch,
                    "gradient_accumulation_steps": total // batch,
                    "num_generations": args.generations,
                    "max_completion_length": args.longest,
                    "max_steps": args.steps + 1,
                    "save_strategy": "no",
                    "disable_tqdm": True,
                    **form,
                }
            ),
            Dataset.from_dict({"prompt": [str(i) for i in range(64)]}),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            callbacks=[Clock()],
        )
        trainer.train()
    args.times = np.diff(times).tolist()
    yield


def child(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(args.threads)
    before = matmul_rate()
    if args.child in OAPL_FORMS:
        steps = oapl_steps(args, OAPL_FORMS[args.child])
        next(steps)
        times = []
        for _ in range(args.steps):
            start = time.perf_counter()
            next(steps)
            times.append(time.perf_counter() - start)
    else:
        next(trl_steps(args, TRL_FORMS[args.child]))
        times = args.times
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"seconds": times, "peak_gib": int(peak.split()[1]) / 2**20, "matmul": [before, matmul_rate()]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--shortest", type=int, default=32)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each contender in each turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--forms", nargs="*", default=[*OAPL_FORMS, *TRL_FORMS])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(args.model)
    args.vocabulary = config.vocab_size
    if args.child:
        child(args)
        return
    results: dict[str, dict[str, Any]] = {}
    for _ in range(args.turns):
        for form in args.forms:
            found = run_once(__file__, form, args.threads)
            print(f"{form}: {found}", file=sys.stderr)
            if "failed" in found:
                continue
            kept = results.setdefault(form, {"seconds": [], "peak_gib": 0.0, "matmul": []})
            kept["seconds"] += found["seconds"]
            kept["peak_gib"] = max(kept["peak_gib"], found["peak_gib"])
            kept["matmul"] += found["matmul"]
            write_results(args, ("oapl", "torch", "transformers", "trl"), results=results)  # what is cut short is kept
    flops = useful_flops(completions(args), config)
    rates = [rate for result in results.values() for rate in result["matmul"]]
    ours = min(np.median(r["seconds"]) for form, r in results.items() if form in OAPL_FORMS)
    print(
        f"bf16 matmul {min(rates) / 1e9:.0f} to {max(rates) / 1e9:.0f} GFLOP/s, {args.threads} threads, "
        f"{flops / 1e12:.1f} useful TFLOP a step"
    )
    print("| contender | s a step | times oapl's best | share of the matmul rate | peak GiB |\n|---|---|---|---|---|")
    for form, result in results.items():
        seconds = float(np.median(result["seconds"]))
        result |= {
            "median_s": seconds,
            "ratio": seconds / ours,
            "share": flops / seconds / float(np.mean(result["matmul"])),
        }
        print(f"| {form} | {seconds:.1f} | {seconds / ours:.2f} | {result['share']:.2f} | {result['peak_gib']:.1f} |")
    write_results(args, ("oapl", "torch", "transformers", "trl"), results=results)


if __name__ == "__main__":
    main()
