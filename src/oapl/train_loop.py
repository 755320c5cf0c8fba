"""The trainer's loop: L optimizer steps on each round, a checkpoint, the next policy. It never sees an engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from oapl.config import OAPLConfig, Recipe
from oapl.errors import CollapseError, StoreError
from oapl.guard import WARNING, Guard, collapse_error, good_beta2
from oapl.model import encode_prompt
from oapl.paths import poll_s
from oapl.plan import shard_of_step
from oapl.processes import wait_until
from oapl.sharding import ALONE, Ranks
from oapl.store import RoundFolder, RunFolder
from oapl.store.files import move_aside, write_json
from oapl.store.run import sampler_path
from oapl.tasks import make_task
from oapl.trainer import Trainer

NUM_PROBE_SEQUENCES = 4


def start_or_resume(recipe: Recipe, run: RunFolder, ranks: Ranks = ALONE) -> Trainer:
    """The trainer at the newest checkpoint; without one, at the model itself, which becomes checkpoint 0.

    All ranks call it together, and all but the first are to follow it from then on.
    """
    steps = ranks.agree(run.checkpoint_steps())
    trainer = Trainer(recipe, ranks.agree(source_of(recipe, run)) if steps else recipe.model.name_or_path, ranks)
    if steps:
        trainer.read_checkpoint(run.local_checkpoint(steps[-1]))
    elif ranks.is_first:
        run.write_checkpoint(0, partial(ranks.lead, write_checkpoint, trainer, run))
    return trainer


def follow(recipe: Recipe, run: RunFolder, should_stop: Callable[[], bool], ranks: Ranks) -> None:
    """What a rank does that is not the first."""
    trainer = start_or_resume(recipe, run, ranks)
    ranks.follow(trainer, run, should_stop)


def source_of(recipe: Recipe, run: RunFolder) -> str:
    """Where a resumed run takes from what no checkpoint holds: the model itself if part of it is frozen, else, for its
    architecture alone, its own policy 0, if that is whole."""
    if recipe.model.use_peft:
        return recipe.model.name_or_path
    try:
        policy = run.policy(0)
        return str(run.verified_policy_path(policy)) if policy is not None else recipe.model.name_or_path
    except StoreError:
        return recipe.model.name_or_path


def publish(trainer: Trainer, run: RunFolder) -> None:
    """Seals the trainer's weights as the policy of the round that starts at its step.

    Where that was made before, and came out otherwise, a round that it sampled then is moved out of the way.
    """
    version = trainer.step // trainer.config.weight_sync_steps
    policy = run.publish_policy(version, trainer.step, partial(fill_policy, trainer, run))
    for index in run.round_indices(version):  # no earlier one is of this policy
        if trainer.recipe.policy_of_round(index) == version and not run.round(index).is_of(policy):
            move_aside(run.round(index).path)


def fill_policy(trainer: Trainer, run: RunFolder, folder: Path) -> None:
    """Fills a policy's or a snapshot's folder with the trainer's weights and their probe."""
    trainer.ranks.lead(write_policy, trainer, run, folder, probe_sequences(trainer, run))


# What all ranks do together


def write_policy(trainer: Trainer, run: RunFolder, folder: Path, probe: list[list[int]]) -> None:
    trainer.write_policy(folder, probe)


def write_checkpoint(trainer: Trainer, run: RunFolder, folder: Path) -> None:
    trainer.write_checkpoint(folder)


def probe_sequences(trainer: Trainer, run: RunFolder) -> list[list[int]]:
    """What the weights' probe is scored on: completions of the last shard they learned from, or else a few prompts."""
    index, number = divmod(trainer.step - 1, trainer.config.weight_sync_steps)
    try:
        shard = run.round(index).read_shard(shard_of_step(trainer.recipe, index, number)) if trainer.step > 0 else None
    except StoreError:  # lost since it was trained on
        shard = None
    if shard is None:
        task = make_task(trainer.recipe.task)
        prompts = [
            task.prompt("train", index % (task.num_prompts("train") or 2**31)) for index in range(NUM_PROBE_SEQUENCES)
        ]
        encoded = [encode_prompt(trainer.tokenizer, prompt.text, trainer.recipe.task) for prompt in prompts]
        return [prompt_ids for prompt_ids in encoded if len(prompt_ids) > 1]
    return [
        [*group.prompt_ids.tolist(), *group.completions[0].token_ids.tolist()]
        for group in shard.groups[:NUM_PROBE_SEQUENCES]
    ]


def run_trainer(
    recipe: Recipe,
    run: RunFolder,
    should_stop: Callable[[], bool],
    on_step: Callable[[Mapping[str, Any]], None] = lambda _: None,
    fill_round: Callable[[int], None] = lambda _: None,
    ranks: Ranks = ALONE,
) -> None:
    """Trains every round of the run, from wherever its last checkpoint left it, until done or told to stop.

    This is the first of the ranks, and leads the others. `fill_round` is called at each round's start, for a run whose
    sampler is this same process. Of each step's record, `save_s` is what checkpoint, policy and snapshot took before
    the step, `wait_s` the wait for its groups, `step_s` the step; a round's wall time is the sum of the three over its
    steps.
    """
    trainer = start_or_resume(recipe, run, ranks)
    with ranks.leading():
        train_rounds(trainer, run, ranks.stops(should_stop), on_step, fill_round)


def train_rounds(
    trainer: Trainer,
    run: RunFolder,
    should_stop: Callable[[], bool],
    on_step: Callable[[Mapping[str, Any]], None],
    fill_round: Callable[[int], None],
) -> None:
    """See `run_trainer`."""
    recipe, config, poll = trainer.recipe, trainer.config, poll_s(run.path)
    if trainer.step > 0:
        ensure_first_policy(recipe, run)
    guard = Guard()
    for record in run.metrics():
        if record["step"] <= trainer.step:
            guard.observe(record)
    clock = Clock()
    first = True
    while not should_stop():
        index, number = divmod(trainer.step, config.weight_sync_steps)
        if number == 0:
            publish(trainer, run)
        if trainer.step in recipe.snapshot_steps:
            run.publish_snapshot(trainer.step, partial(fill_policy, trainer, run))
        if trainer.step >= config.num_steps:
            return
        save_s = clock.lap()
        if number == 0 or first:
            fill_round(index)
        folder = run.round(index)
        if (number == 0 or first) and not wait_until(partial(is_ready, run, recipe, index), should_stop, poll):
            break
        if first:
            clock, save_s, first = Clock(), 0.0, False  # what came before the round was no part of it
        if not wait_until(partial(is_stored, folder, shard_of_step(recipe, index, number)), should_stop, poll):
            break
        wait_s = clock.lap()
        record = {
            **trainer.ranks.lead(train_on, trainer, run, index, number),
            "save_s": save_s,
            "wait_s": wait_s,
            "step_s": clock.lap(),
            "time": time.time(),
        }
        run.append_metrics(record)  # before the checkpoint, so that no step it holds lacks its record
        sign = guard.observe(record) if config.on_collapse != "off" else None
        on_step(record if sign is None else {**record, WARNING: sign})
        if sign is not None and config.on_collapse == "stop":
            raise collapse(recipe, run, record, sign)
        if is_save_step(recipe, trainer.step):
            save(trainer, run)
    if trainer.step not in run.checkpoint_steps():
        save(trainer, run)


def is_save_step(recipe: Recipe, step: int) -> bool:
    """Whether a checkpoint is due: at each policy and each snapshot, so that both can be made again, and as asked."""
    sync_steps, save_steps = recipe.trainer.weight_sync_steps, recipe.trainer.save_steps
    return (
        step % sync_steps == 0 or step in recipe.snapshot_steps or (save_steps is not None and step % save_steps == 0)
    )


def collapse(recipe: Recipe, run: RunFolder, record: Mapping[str, Any], reason: str) -> CollapseError:
    """Records that the guard stopped the run after this step, none of which is saved, and what to do about it."""
    successes: dict[int, list[float]] = {}
    for earlier in run.metrics():
        if "success" in earlier and earlier["step"] <= record["step"]:
            successes.setdefault(earlier["round"], []).append(earlier["success"])
    of_own_policy = (index for index in successes if is_of_own_policy(run, recipe, index))
    best_round = max(of_own_policy, key=lambda index: mean(successes[index]), default=0)
    best_policy = recipe.policy_of_round(best_round)
    changes = [f"trainer.learning_rate below {recipe.trainer.learning_rate:g}"]
    if isinstance(recipe.loss, OAPLConfig):
        enough = max(2 * recipe.loss.beta2, good_beta2(record.get("surprise", math.inf)))
        changes.insert(0, f"loss.beta2 = {enough:.1g} or more")
    if recipe.trainer.weight_sync_steps > 1:
        changes.append(f"trainer.weight_sync_steps below {recipe.trainer.weight_sync_steps}")
    if best_policy == 0:
        start = "The best policy is the model it began with. Begin a new run_dir"
    else:
        start = (
            f"Policy {best_policy} is good: {run.policy_path(best_policy)}. To go on from it, give it as "
            f"model.name_or_path of a new run_dir"
        )
    advice = f"{start}, with {', or '.join(changes)}; or set trainer.on_collapse = 'warn' and run the same command."
    run.sync_metrics()
    write_json(
        run.collapse_path,
        {"step": record["step"], "reason": reason, "best_policy": best_policy, "advice": advice},
    )
    return collapse_error(run)


def is_ready(run: RunFolder, recipe: Recipe, index: int) -> bool:
    """Whether the round is open, and of the policy it should be sampled from."""
    return run.round(index).is_open() and run.round(index).is_of(run.policy(recipe.policy_of_round(index)))


def is_stored(folder: RoundFolder, number: int) -> bool:
    """Whether a round's shard is there; one that a late sampler stored for other weights is moved out of the way."""
    if not folder.has_shard(number):
        return False
    if folder.is_shard_of(folder.load(), number):
        return True
    folder.set_shard_aside(number)
    return False


def train_on(trainer: Trainer, run: RunFolder, index: int, number: int) -> dict[str, float]:
    """Step `number` of round `index`: its metrics, and where in the run it stands."""
    recipe, folder = trainer.recipe, run.round(index)
    shard_number = shard_of_step(recipe, index, number)
    try:
        shard = folder.read_shard(shard_number)
    except StoreError as error:
        raise StoreError(f"{error}. Run the same command again: the shard is moved aside and sampled again.") from error
    if trainer.anchor is not None and not trainer.anchor.holds(policy := folder.load().policy):
        trainer.anchor.load(policy, sampler_path(folder), trainer.lm)
    metrics = trainer.train_step(shard, folder.shard_seal(shard_number)["digest"])
    epoch = number // recipe.trainer.shards_per_round
    if epoch > 0 or folder.is_imported():
        metrics |= {"sampling_s": 0.0, "grading_s": 0.0}  # spent before, or by another run
    if is_of_own_policy(run, recipe, index):
        metrics["lag"] = trainer.step - 1 - recipe.policy_of_round(index) * recipe.trainer.weight_sync_steps
    return {"step": trainer.step, "round": index, "epoch": epoch, **metrics}


def is_of_own_policy(run: RunFolder, recipe: Recipe, index: int) -> bool:
    """Whether a round's log-probs are those of the policy that this run would have sampled it from."""
    folder = run.round(index)
    return not folder.is_imported() or folder.load().policy == run.policy(recipe.policy_of_round(index))


def save(trainer: Trainer, run: RunFolder) -> None:
    """Writes a checkpoint and removes the oldest, but for those that a round in work may start from again."""
    run.sync_metrics()
    run.write_checkpoint(trainer.step, partial(trainer.ranks.lead, write_checkpoint, trainer, run))
    config, ahead = trainer.config, trainer.recipe.launch.rounds_ahead
    steps = run.checkpoint_steps()
    oldest_start = (trainer.step // config.weight_sync_steps - 1 - ahead) * config.weight_sync_steps
    for step in steps[: -config.save_total_limit]:
        if not (step >= oldest_start and step % config.weight_sync_steps == 0):
            run.remove_checkpoint(step)


class Clock:
    """Seconds since the last lap."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        last, self._last = self._last, time.monotonic()
        return self._last - last


def ensure_first_policy(recipe: Recipe, run: RunFolder) -> None:
    """Seals the model itself as policy 0, where a run has none, or has it no longer."""
    if run.policy(0) is None:
        publish(Trainer(on_host(recipe), recipe.model.name_or_path), run)


def on_host(recipe: Recipe) -> Recipe:
    """The recipe for one process, which holds on the CPU what is too large for its device."""
    if recipe.trainer.num_ranks == 1:
        return recipe
    return recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"num_ranks": 1, "device": "cpu"})})
