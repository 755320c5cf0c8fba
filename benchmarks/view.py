"""What `oapl view` costs on a run of 1,000,000 completions: first paint, index, filters, memory, weight of the page.

    make .venv/installed-dev
    .venv/bin/python benchmarks/view.py --output benchmarks/results/view.json

Makes the run folder through the store, as a sampler would but for fsync, unless it is there: 15,625 shards of 8 prompts
x 8 completions of random length, log-probs and rewards, and a model of random weights as its policy. Then serves it by
the command itself, asks as the page does, over HTTP, and opens the page in Chromium: with nothing indexed yet, while
the index is made, and once it is there. A file's first read is from the disk or from the system's cache, as it happens.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oapl.config import dump_recipe, load_recipe
from oapl.store import RunFolder
from oapl.types import Completion, FailedGroup, Group, PolicyRef, Round, SamplingParams, Shard, Verdict

RECIPE = Path(__file__).parents[1] / "recipes" / "countdown.toml"
STEPS_PER_ROUND = 50
PROMPTS_PER_STEP = 8
NUM_GENERATIONS = 8
LENGTH = 200
"""Tokens at which a completion is cut."""
RARE_TEXT = "a needle"
"""Stands in one completion of the oldest shard."""


# The run


def make_run(folder: Path, num_completions: int) -> None:
    """A run of so many completions, whose last round is half sampled and a quarter trained."""
    os.fsync = lambda _: None
    num_shards = num_completions // (PROMPTS_PER_STEP * NUM_GENERATIONS)
    num_rounds = -(-num_shards // STEPS_PER_ROUND)
    sizes = {
        "num_steps": num_rounds * STEPS_PER_ROUND,
        "weight_sync_steps": STEPS_PER_ROUND,
        "prompts_per_step": PROMPTS_PER_STEP,
    }
    sampling = {"num_generations": NUM_GENERATIONS, "max_completion_length": LENGTH}
    recipe = load_recipe(RECIPE, {"trainer": sizes, "sampling": sampling})
    run, rng = RunFolder(folder), np.random.default_rng(0)
    folder.mkdir(parents=True)
    run.config_path.write_text(dump_recipe(recipe))
    pool = "".join(f"{a}*{b}+{c}={a * b + c}\n" for a, b, c in rng.integers(1, 99, (40_000, 3)))
    for index in range(num_rounds):
        policy = PolicyRef(index, index * STEPS_PER_ROUND, f"{index:064x}")
        first = index * STEPS_PER_ROUND * PROMPTS_PER_STEP
        round = Round(
            index=index,
            policy=policy,
            sampling=SamplingParams(1.0, LENGTH, NUM_GENERATIONS),
            seed=index,
            prompt_ids=tuple(f"train/{first + i}" for i in range(STEPS_PER_ROUND * PROMPTS_PER_STEP)),
            prompts_per_shard=PROMPTS_PER_STEP,
            verifier="random/1",
        )
        run.round(index).open(round)
        left = min(STEPS_PER_ROUND, num_shards - index * STEPS_PER_ROUND)
        for number in range(left):
            groups = [
                make_group(rng, pool, position, round.prompt_ids[position]) for position in round.positions(number)
            ]
            failed: tuple[FailedGroup, ...] = ()
            if index == number == 0:
                groups[0] = replace(groups[0], texts=(RARE_TEXT, *groups[0].texts[1:]))
            if number == 7:
                failed = (FailedGroup(groups[-1].position, groups[-1].prompt_id, "no answer in 10 s", groups.pop()),)
            run.round(index).write_shard(round, number, Shard(tuple(groups), failed, 1.5, 0.25, 1e-5))
            step = index * STEPS_PER_ROUND + number + 1
            if index < num_rounds - 1 or number < left // 2:
                run.append_metrics(metrics_line(rng, step, index, num_shards))
        if left == STEPS_PER_ROUND:
            run.round(index).seal(round)
        if index % 20 == 0:
            print(f"round {index} of {num_rounds} is made", flush=True)


def make_group(rng: np.random.Generator, pool: str, position: int, prompt_id: str) -> Group:
    lengths = np.minimum(LENGTH, 10 + rng.exponential(50, NUM_GENERATIONS).astype(int))
    starts = rng.integers(0, len(pool) - 2 * LENGTH, NUM_GENERATIONS)
    rewards = rng.random(NUM_GENERATIONS) < 0.4
    completions = tuple(
        Completion(
            rng.integers(3, 40, length).astype(np.int32),
            -rng.exponential(scale, length).astype(np.float32),
            "length" if length == LENGTH else "stop",
        )
        for length, scale in zip(lengths.tolist(), rng.uniform(0.05, 1.0, NUM_GENERATIONS), strict=True)
    )
    return Group(
        position=position,
        prompt_id=prompt_id,
        prompt="use 3 5 7 9 make 24\n",
        prompt_ids=np.arange(3, 20, dtype=np.int32),
        completions=completions,
        texts=tuple(
            pool[start : start + 2 * length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ),
        verdicts=tuple(Verdict(float(reward), reason="equal" if reward else "not equal") for reward in rewards),
    )


def metrics_line(rng: np.random.Generator, step: int, index: int, num_steps: int) -> dict[str, Any]:
    reward, noise = 0.1 + 0.6 * step / num_steps, rng.normal(0, 0.05, 8)
    return {
        "step": step,
        "round": index,
        "epoch": 0,
        "lag": (step - 1) % STEPS_PER_ROUND,
        "time": 1.8e9 + step,
        "reward": reward + noise[0],
        "success": reward + noise[0],
        "uniform_share": 0.3 + noise[1],
        "num_completions": PROMPTS_PER_STEP * NUM_GENERATIONS,
        "num_tokens": 60 * PROMPTS_PER_STEP * NUM_GENERATIONS,
        "completion_length": 60 + 40 * noise[2],
        "truncated_share": 0.02,
        "surprise": 20 + noise[3],
        "hold": 2 + noise[3],
        "mismatch": 1e-5,
        "loss": 0.2 + noise[4],
        "log_ratio": noise[5],
        "log_ratio_right": abs(noise[5]),
        "log_ratio_wrong": -abs(noise[6]),
        "ratio_right": 1.0 + noise[5],
        "effective_share": 0.9,
        "token_gap": 1e-3,
        "entropy": 0.5 + noise[7],
        "residual": noise[1],
        "residual_std": 0.3,
        "r2": 0.1,
        "grad_norm": 1 + noise[2],
        "sampling_s": 1.5,
        "grading_s": 0.25,
        "wait_s": 0.5,
        "step_s": 1.0,
        "save_s": 0.01,
    }
