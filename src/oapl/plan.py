"""What a round consists of, before anything is sampled: its prompts and seeds follow from the recipe alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from oapl.config import Recipe
from oapl.errors import TaskError
from oapl.store import RoundFolder
from oapl.tasks import Task
from oapl.types import PolicyRef, Prompt, Round, SamplingParams, Split

Work = tuple[RoundFolder, PolicyRef, Callable[..., Round]]
"""A round to be sampled, its policy, and what plans it when given the `task`."""
SEED_STRIDE = 10**7
"""Endless tasks: run seed s trains on the problems from index s * SEED_STRIDE on."""

EVALUATION_SHARDS = 16
"""About how many pieces an evaluation is stored in, each sampled and resumed on its own."""


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part: neighbours share nothing."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "little") >> 1


def training_params(recipe: Recipe) -> SamplingParams:
    sampling = recipe.sampling
    return SamplingParams(sampling.temperature, sampling.max_completion_length, sampling.num_generations, sampling.stop)


def scoring_params(recipe: Recipe, num_generations: int) -> SamplingParams:
    """Of evaluations, and of validation, which is sampled in the same way."""
    sampling, evaluation = recipe.sampling, recipe.evaluation
    length = evaluation.max_completion_length or sampling.max_completion_length
    return SamplingParams(
        evaluation.temperature, length, num_generations, sampling.stop, evaluation.top_p, evaluation.top_k
    )


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


def shards_per_block(num_shards: int, rows_per_shard: int, max_num_seqs: int) -> int:
    """The shards of a round that are sampled together: as many as fit in the engine, and at most a quarter of the
    round, so that training may start and workers share."""
    return min(max(1, max_num_seqs // rows_per_shard), -(-num_shards // 4))


def shard_of_step(recipe: Recipe, index: int, number: int) -> int:
    """The shard that step `number` of round `index` trains on: in order as they land, then shuffled anew each epoch."""
    epoch, place = divmod(number, recipe.trainer.shards_per_round)
    if epoch == 0:
        return place
    return int(np.random.default_rng([recipe.seed, index, epoch]).permutation(recipe.trainer.shards_per_round)[place])


def plan_evaluation(recipe: Recipe, task: Task, policy: PolicyRef) -> Round:
    """A round of the problems that are reported, the same ones and the same random streams for every policy."""
    evaluation = recipe.evaluation
    return _plan_scoring(recipe, task, policy, "evaluation", evaluation.num_prompts, evaluation.num_generations)


def plan_validation(recipe: Recipe, task: Task, policy: PolicyRef) -> Round:
    """A round of the problems to choose by, sampled as an evaluation is, and the same for every snapshot."""
    assert recipe.selection is not None
    selection = recipe.selection
    return _plan_scoring(recipe, task, policy, "validation", selection.num_prompts, selection.num_generations)


def _plan_scoring(
    recipe: Recipe, task: Task, policy: PolicyRef, split: Split, num_prompts: int, num_generations: int
) -> Round:
    num_prompts = min(num_prompts, task.num_prompts(split) or num_prompts)
    problems, gold = digests(recipe, task, split, num_prompts)
    return Round(
        index=policy.step if policy.version is None else policy.version,
        policy=policy,
        sampling=scoring_params(recipe, num_generations),
        seed=derive_seed(recipe.seed, split),
        prompt_ids=tuple(f"{split}/{i}" for i in range(num_prompts)),
        prompts_per_shard=-(-num_prompts // EVALUATION_SHARDS),
        verifier=task.verifier,
        problems=problems,
        gold=gold,
    )


def digests(recipe: Recipe, task: Task, split: Split, num_prompts: int) -> tuple[str, str]:
    """Tells problems, and ways to pose them, apart that have the same numbers: SHA-256 of the prompts, and of what else
    grading reads of them."""
    config = recipe.task
    posed, gold = hashlib.sha256(), hashlib.sha256()
    posed.update(as_bytes([config.chat, config.system_prompt, config.chat_template_kwargs]))
    for index in range(num_prompts):
        try:
            prompt = task.prompt(split, index)
        except TaskError as error:  # which is told when it is to be sampled
            prompt = Prompt(f"{split}/{index}", str(error))
        posed.update(as_bytes(prompt.text))
        gold.update(as_bytes(dict(prompt.columns)))
    return posed.hexdigest(), gold.hexdigest()


def as_bytes(value: Any) -> bytes:
    """The same for the same value in every process."""
    return json.dumps(value, default=as_text).encode()


def as_text(value: Any) -> str:
    """What JSON has no form for. The text of other objects may tell where in memory they lie."""
    return str(value) if isinstance(value, bytes | date | time | timedelta | Decimal) else type(value).__name__
