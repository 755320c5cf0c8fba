"""What a round consists of, before anything is sampled: its prompts and seeds follow from the recipe alone."""

from __future__ import annotations

import hashlib

import numpy as np

from oapl.config import Recipe
from oapl.tasks import Task
from oapl.types import PolicyRef, Round, SamplingParams

SEED_STRIDE = 10**7
"""Endless tasks: run seed s trains on the problems from index s * SEED_STRIDE on."""

EVALUATION_SHARDS = 16
"""About how many pieces an evaluation is stored in, each sampled and resumed on its own."""


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part: neighbours share nothing."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "little") >> 1


def training_params(recipe: Recipe) -> SamplingParams:
    sampling = recipe.sampling
    return SamplingParams(sampling.temperature, sampling.max_completion_length, sampling.num_generations)


def plan_round(recipe: Recipe, task: Task, policy: PolicyRef, index: int) -> Round:
    """The training round `index`: its prompts follow from the recipe alone.

    A finite dataset is gone through in a new random order each time; an endless one from the seed's own start.
    """
    per_round = recipe.trainer.prompts_per_round
    places = range(index * per_round, (index + 1) * per_round)
    num_prompts = task.num_prompts("train")
    if num_prompts is None:
        indices = [recipe.seed * SEED_STRIDE + place for place in places]
    else:
        orders = {
            epoch: np.random.default_rng([recipe.seed, epoch]).permutation(num_prompts)
            for epoch in range(places.start // num_prompts, (places.stop - 1) // num_prompts + 1)
        }
        indices = [int(orders[place // num_prompts][place % num_prompts]) for place in places]
    return Round(
        index=index,
        policy=policy,
        sampling=training_params(recipe),
        seed=derive_seed(recipe.seed, "round", index),
        prompt_ids=tuple(f"train/{i}" for i in indices),
        prompts_per_shard=recipe.trainer.prompts_per_step,
        verifier=task.verifier,
    )


def shard_of_step(recipe: Recipe, index: int, number: int) -> int:
    """The shard that step `number` of round `index` trains on: in order as they land, then shuffled anew each epoch."""
    epoch, place = divmod(number, recipe.trainer.shards_per_round)
    if epoch == 0:
        return place
    return int(np.random.default_rng([recipe.seed, index, epoch]).permutation(recipe.trainer.shards_per_round)[place])


def plan_evaluation(recipe: Recipe, task: Task, policy: PolicyRef) -> Round:
    """A round of held-out prompts, the same ones and the same random streams for every policy."""
    available = task.num_prompts("evaluation")
    num_prompts = recipe.evaluation.num_prompts if available is None else min(available, recipe.evaluation.num_prompts)
    return Round(
        index=policy.version,
        policy=policy,
        sampling=SamplingParams(
            recipe.evaluation.temperature,
            recipe.evaluation.max_completion_length or recipe.sampling.max_completion_length,
            recipe.evaluation.num_generations,
        ),
        seed=derive_seed(recipe.seed, "evaluation"),
        prompt_ids=tuple(f"evaluation/{i}" for i in range(num_prompts)),
        prompts_per_shard=-(-num_prompts // EVALUATION_SHARDS),
        verifier=task.verifier,
    )
