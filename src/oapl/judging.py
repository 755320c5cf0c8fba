"""Groups get their verdicts: several at once, and again where a reward was mended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace
from time import monotonic
from typing import Any

from oapl.errors import GradingError, StoreError, TaskError
from oapl.store import RoundFolder
from oapl.store.rounds import draft_of
from oapl.tasks import Task
from oapl.types import Draft, Events, FailedGroup, Group, Round, SampledGroup, Shard, split_and_index

MAX_FAILED_IN_A_ROW = 8
"""So many ungraded groups without one success between them mean that grading itself is broken."""
LOOK_S = 0.2


class Judge:
    """A task's verdicts, and how many groups in a row it could not grade."""

    def __init__(self, task: Task, should_stop: Callable[[], bool] = lambda: False) -> None:
        self.task, self._should_stop = task, should_stop
        self.failed_in_a_row = 0

    def grade(self, draft: Draft, patience: int) -> Shard | None:
        """The shard that a draft becomes by its verdicts; None where it was told to stop first.

        Raises TaskError where `patience` groups in a row could not be graded: better to end there than to go on without
        rewards.
        """
        start = monotonic()
        groups, failed = [], []
        pool = ThreadPoolExecutor(self.task.num_workers)
        try:
            for future in [pool.submit(self._grade, group) for group in draft.sampled]:
                if (result := self._wait(future)) is None:
                    return None
                if isinstance(result, Group):
                    groups.append(result)
                    self.failed_in_a_row = 0
                else:
                    failed.append(result)
                    self._note_failure(patience, result)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        grading_s = monotonic() - start
        return Shard(
            tuple(groups), (*failed, *draft.unsampled), draft.sampling_s + grading_s, grading_s, draft.mismatch
        )

    def _wait(self, future: Future[Group | FailedGroup]) -> Group | FailedGroup | None:
        while not self._should_stop():
            try:
                return future.result(LOOK_S)
            except NotYet:
                if future.done():  # the task's own timeout
                    raise
        return None

    def _grade(self, sampled: SampledGroup) -> Group | FailedGroup:
        prompt = self.task.prompt(*split_and_index(sampled.prompt_id))
        try:
            return Group.of(sampled, self.task.grade(prompt, sampled.texts))
        except GradingError as error:
            return FailedGroup(sampled.position, sampled.prompt_id, str(error), sampled)

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
    """Grades what a complete round holds by the task as it is now, with nothing sampled.

    New verdicts lie beside the old until all are there, so that a kill, a stop or a broken reward leaves the old ones
    as they were, and the same call goes on. Then the old are moved aside. Raises StoreError where the round is
    incomplete or damaged, TaskError where grading is broken.
    """
    folder.finish_adopting()
    if not folder.is_sealed():
        raise StoreError(
            f"{folder.path} holds no complete evaluation, so there is nothing to grade again. Run the same command "
            f"without --regrade first."
        )
    round = replace(folder.load(), verifier=judge.task.verifier)
    if folder.regraded_by() not in (None, judge.task.verifier):
        folder.set_regraded_aside()
    judge.task.start()
    patience = min(MAX_FAILED_IN_A_ROW, round.num_prompts)
    for number in range(round.num_shards):
        if folder.has_regraded(number):
            continue
        new = judge.grade(draft_of(folder.read_shard(number)), patience)
        if new is None:
            return
        folder.write_regraded(round, number, new)
        events.on_shard(shard_event(round, number, new))
    folder.adopt_regraded(round)
