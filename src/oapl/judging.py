"""Groups get their verdicts: several at once, and again where a reward was mended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import monotonic
from typing import Any

from oapl.errors import GradingError, TaskError
from oapl.store import RoundFolder
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
            wait([future], LOOK_S)
            if future.done():
                return future.result()
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

    def worth_keeping(self, shards: Iterable[tuple[int, Shard]]) -> Iterator[tuple[int, Shard]]:
        """The shards as they are graded, but those that failed whole only once something was graded after them, or all
        have come: before that, grading may be broken."""
        held: list[tuple[int, Shard]] = []
        for number, shard in shards:
            held.append((number, shard))
            if self.failed_in_a_row < shard.num_prompts:
                yield from held
                held.clear()
        if not self._should_stop():
            yield from held


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


def grade_again(judge: Judge, folder: RoundFolder, round: Round, events: Events) -> None:
    """Grades what a complete round holds as `round` says, which is the same but for its grader, with nothing sampled.

    New verdicts lie beside the old until all are there, so that a kill, a stop or a broken reward leaves the old ones
    as they were, and the same call goes on. Then the old are moved aside. Raises StoreError where the stored round is
    incomplete, damaged or another one, TaskError where grading is broken.
    """
    folder.check_planned(round)
    folder.set_regraded_aside(round)
    judge.task.start()
    patience = min(MAX_FAILED_IN_A_ROW, round.num_prompts)

    def graded() -> Iterator[tuple[int, Shard]]:
        for number in range(round.num_shards):
            if not folder.has_regraded(number):
                if (shard := judge.grade(folder.read_shard(number).without_verdicts(), patience)) is None:
                    return
                yield number, shard

    for number, shard in judge.worth_keeping(graded()):
        folder.write_regraded(round, number, shard)
        events.on_shard(shard_event(round, number, shard))
    if all(map(folder.has_regraded, range(round.num_shards))):
        folder.adopt_regraded(round)
