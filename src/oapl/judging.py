"""Groups that wait for their verdicts get them: several at once, and again where a reward was mended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import monotonic
from typing import Any

from oapl.errors import GradingError, TaskError
from oapl.store import RoundFolder
from oapl.tasks import Task
from oapl.types import Events, FailedGroup, Group, Round, Shard, split_and_index

MAX_FAILED_IN_A_ROW = 8
"""So many ungraded groups without one success between them mean that grading itself is broken."""
NOT_GRADED = "it was not graded yet"
Waiting = FailedGroup
"""A group that has no verdicts yet is kept as one that could not be graded so far."""


class Judge:
    """A task's verdicts, and how many groups in a row it could not grade."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.failed_in_a_row = 0

    def grade(
        self, waiting: Sequence[Waiting], patience: int = MAX_FAILED_IN_A_ROW
    ) -> tuple[tuple[Group, ...], tuple[FailedGroup, ...]]:
        """The groups that could be graded, and those that could not.

        Raises TaskError where `patience` groups in a row could not be: better to end there than to go on without
        rewards.
        """
        groups, failed = [], []
        pool = ThreadPoolExecutor(self.task.num_workers)
        try:
            for result in pool.map(self._grade, waiting):
                if isinstance(result, Group):
                    groups.append(result)
                    self.failed_in_a_row = 0
                else:
                    failed.append(result)
                    if result.sampled is not None:
                        self._note_failure(patience, result)
        finally:
            pool.shutdown(cancel_futures=True)
        return tuple(groups), tuple(failed)

    def _grade(self, waiting: Waiting) -> Group | FailedGroup:
        if waiting.sampled is None:
            return waiting
        prompt = self.task.prompt(*split_and_index(waiting.prompt_id))
        try:
            return Group.of(waiting.sampled, self.task.grade(prompt, waiting.sampled.texts))
        except GradingError as error:
            return replace(waiting, cause=str(error))

    def _note_failure(self, patience: int, failed: FailedGroup) -> None:
        self.failed_in_a_row += 1
        if self.failed_in_a_row >= patience:
            raise TaskError(
                f"{self.failed_in_a_row} groups in a row could not be graded, the last ({failed.prompt_id}) because "
                f"{failed.cause}. Mend it and run the same command again."
            )


def shard_event(round: Round, number: int, shard: Shard) -> Mapping[str, Any]:
    """What is told of a shard once it is stored."""
    return {
        "round": round.index,
        "shard": number,
        "num_shards": round.num_shards,
        "num_completions": shard.num_completions,
        "num_tokens": shard.num_tokens,
        "sampling_s": shard.sampling_s,
        "num_failed_groups": len(shard.failed),
    }


def grade_again(judge: Judge, folder: RoundFolder, events: Events) -> None:
    """Grades what a complete round holds by the task as it is now, with nothing sampled; old shards are moved aside.

    Raises StoreError where a shard is missing or damaged.
    """
    round = replace(folder.load(), verifier=judge.task.verifier)
    judge.task.start()
    for number in range(round.num_shards):
        if events.should_stop():
            return
        old = folder.read_draft(number) or folder.read_shard(number)  # a draft is what a kill in these lines left
        waiting = [
            *old.failed,
            *(FailedGroup(g.position, g.prompt_id, NOT_GRADED, g.without_verdicts()) for g in old.groups),
        ]
        waiting.sort(key=lambda each: each.position)
        start = monotonic()
        groups, failed = judge.grade(waiting, round.num_prompts)
        grading_s = monotonic() - start
        folder.write_draft(round, number, replace(old, groups=(), failed=tuple(waiting)))
        folder.set_shard_aside(number)
        sampling_s = old.sampling_s - old.grading_s + grading_s
        new = Shard(groups, failed, sampling_s, grading_s, old.mismatch)
        folder.write_shard(round, number, new)
        folder.remove_draft(number)
        events.on_shard(shard_event(round, number, new))
    folder.open(round)
    folder.seal(round)
