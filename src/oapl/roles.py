"""What each process of a run does, written once for all launch kinds: train, sample, evaluate.

A role takes a recipe and a run folder, tells what happens through `Events`, and stops when asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from oapl.config import Recipe
from oapl.errors import StoreError
from oapl.judging import Judge, grade_again
from oapl.model import resolve
from oapl.paths import StorePath, poll_s
from oapl.plan import Work, plan_evaluation, plan_round, plan_validation
from oapl.processes import pause, wait_until
from oapl.sampler import Sampler
from oapl.sharding import Place, Ranks, joined
from oapl.store import RoundFolder, RunFolder
from oapl.store.files import digest_file
from oapl.store.run import joint_digest
from oapl.tasks import make_task
from oapl.train_loop import follow, run_trainer
from oapl.types import Events, PolicyRef, Round

IDLE_S = 0.05
"""Seconds between two looks for work on a disk: what a sync, once its policy is sealed, may cost a sampler."""
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
"""Those of the first kind that a model's folder has are its weights."""


def use_threads(count: int) -> None:
    torch.set_num_threads(count)


def train(recipe: Recipe, run: RunFolder, events: Events, *, rank: int = 0, meeting: str | None = None) -> None:
    """The trainer, or one of its ranks, which meet on this machine."""
    size = recipe.trainer.num_ranks
    with joined(None if meeting is None else Place(rank, size, rank, size, meeting), recipe.trainer.device) as ranks:
        train_as(ranks, recipe, run, events)


def train_as(ranks: Ranks, recipe: Recipe, run: RunFolder, events: Events, patience_s: float = 5.0) -> None:
    """What this one of the trainer's ranks does, once those of a trainer before are gone: so long it waits for them."""
    use_threads(recipe.trainer.num_threads)
    if ranks.is_first:
        with run.lock("trainer", patience_s):
            run_trainer(recipe, run, events.should_stop, events.on_step, ranks=ranks)
    else:
        with run.lock(f"trainer-{ranks.rank}", patience_s):
            follow(recipe, run, events.should_stop, ranks)


def sample(
    recipe: Recipe,
    run: RunFolder,
    events: Events,
    find_work: Callable[[], Iterator[Work]],
    is_over: Callable[[], bool],
    on_wait: Callable[[bool], None] = lambda _: None,
) -> None:
    """Samples what `find_work` finds, again and again, until it `is_over` or this is told to stop; `on_wait` hears
    whether there is nothing to do."""
    use_threads(recipe.engine.num_threads)
    with closing(Sampler(recipe, run.verified_policy_path, events.should_stop, events.on_shard)) as sampler:
        plans: dict[tuple[StorePath, PolicyRef], Round] = {}
        while not events.should_stop() and not is_over():
            before, known, plans = sampler.num_stored, plans, {}
            for folder, policy, plan in find_work():
                key = (folder.path, policy)
                plans[key] = known.get(key) or plan(task=sampler.task)
                sampler.work_on(folder, plans[key])
                if events.should_stop():
                    return
            on_wait(sampler.num_stored == before)
            pause(max(IDLE_S, poll_s(run.path)), events.should_stop)


def evaluate(
    recipe: Recipe,
    run: RunFolder,
    events: Events,
    *,
    folder: RoundFolder,
    find: Callable[[], PolicyRef | None],
    alone: bool = False,
) -> None:
    """Samples an evaluation of the weights that `find` gives, as soon as there are some, or its part beside others that
    do. One that stands `alone` is no part of its run's work."""
    wait_until(lambda: find() is not None, events.should_stop, poll_s(run.path))
    if (policy := find()) is not None:
        sampler = Sampler(recipe, run.verified_policy_path, events.should_stop, events.on_shard, alone=alone)
        fill_evaluation(sampler, policy, folder)


def validate(
    recipe: Recipe,
    run: RunFolder,
    events: Events,
    *,
    steps: Sequence[int],
) -> None:
    """Samples the validation of each of these snapshots, all of which are there, or its part beside others that do."""
    use_threads(recipe.engine.num_threads)

    def on_shard(event: Mapping[str, Any]) -> None:
        events.on_shard({**event, "num_shards": event["num_shards"] * len(steps)})

    sampler = Sampler(recipe, run.verified_policy_path, events.should_stop, on_shard)
    try:
        for step in steps:
            snapshot = run.snapshot(step)
            assert snapshot is not None
            round = plan_validation(recipe, sampler.task, snapshot)
            sampler.fill(run.validation(step), round)
            if events.should_stop():
                return
    finally:
        sampler.close()


def model_ref(name_or_path: str) -> PolicyRef:
    """The weights of a model that is no run's policy. A hub model's name stands for its digest."""
    path = Path(resolve(name_or_path))
    found = (sorted(path.glob(pattern)) for pattern in WEIGHT_FILES)
    files = next((files for files in found if files), [])
    return PolicyRef(0, 0, joint_digest({file.name: digest_file(file) for file in files}) if files else name_or_path)


def evaluate_model(recipe: Recipe, name_or_path: str, policy: PolicyRef, events: Events, folder: RoundFolder) -> None:
    """Samples an evaluation of a model that is no run's policy."""
    path = Path(resolve(name_or_path))
    sampler = Sampler(recipe, lambda _: path, events.should_stop, events.on_shard, alone=True)
    fill_evaluation(sampler, policy, folder)


def regrade(recipe: Recipe, events: Events, folder: RoundFolder) -> None:
    """Grades a complete evaluation again, by the recipe's task as it is now.

    Raises StoreError where there is none, or where the recipe's would be of other problems or sampled otherwise.
    """
    if not folder.is_sealed():
        raise StoreError(
            f"{folder.path} holds no complete evaluation, so there is nothing to grade again. Run the same command "
            f"without --regrade first."
        )
    task = make_task(recipe.task)
    try:
        round = plan_evaluation(recipe, task, folder.load().policy)
        grade_again(Judge(task, events.should_stop), folder, round, events)
    finally:
        task.close()


def fill_evaluation(sampler: Sampler, policy: PolicyRef, folder: RoundFolder) -> None:
    use_threads(sampler.recipe.engine.num_threads)
    try:
        round = plan_evaluation(sampler.recipe, sampler.task, policy)
        sampler.fill(folder, round)
    finally:
        sampler.close()


def train_inline(recipe: Recipe, run: RunFolder, events: Events) -> None:
    """Trainer and sampler in one process, in turn: each round is sampled whole, then trained."""
    use_threads(recipe.trainer.num_threads)
    sampler = Sampler(recipe, run.verified_policy_path, events.should_stop, events.on_shard)

    def fill_round(index: int) -> None:
        policy = run.policy(recipe.policy_of_round(index))
        if policy is not None and not run.round(index).is_imported():  # else its round is complete
            sampler.fill(run.round(index), plan_round(recipe, sampler.task, policy, index))

    try:
        with run.lock("trainer"):
            run_trainer(recipe, run, events.should_stop, events.on_step, fill_round)
    finally:
        sampler.close()
