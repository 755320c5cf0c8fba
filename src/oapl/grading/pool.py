"""Grading in worker processes: whatever an answer does to its worker, it costs that answer alone."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from oapl.errors import GradingError
from oapl.grading.answers import final_answer
from oapl.grading.worker import FunctionWorker
from oapl.types import Verdict

GRADER_VERSION = 1
"""Goes up with every change that gives some answer another reward."""


class WorkerPool:
    """Calls `module:function` in `num_workers` processes. A call that outlasts its limits ends its own process only.

    Any number of threads may call at once; those that find no worker free wait for one.
    """

    def __init__(
        self, function: str, num_workers: int, timeout_s: float, memory_bytes: int, timeout_setting: str
    ) -> None:
        self._workers = [FunctionWorker(function, timeout_s, memory_bytes, timeout_setting) for _ in range(num_workers)]
        self._free: queue.LifoQueue[FunctionWorker] = queue.LifoQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grading")

    def start(self) -> None:
        """Starts every worker at once. Raises TaskError where the function cannot be imported."""
        for _ in self._threads.map(FunctionWorker.start, self._workers):
            pass

    def call(self, **arguments: Any) -> Any:
        """The function's result. Raises GradingError where it raises, outlasts its limits or ends its process."""
        with self._worker() as worker:
            return worker.call(**arguments)

    def map(self, calls: Iterable[Mapping[str, Any]]) -> list[Any]:
        """The results in the order of `calls`; a GradingError in place of the result of a call that raised it."""
        return list(self._threads.map(self._result, calls))

    def _result(self, arguments: Mapping[str, Any]) -> Any:
        try:
            return self.call(**arguments)
        except GradingError as error:
            return error

    @contextmanager
    def _worker(self) -> Iterator[FunctionWorker]:
        worker = self._free.get()
        try:
            yield worker
        finally:
            self._free.put(worker)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()


class MathGrader:
    """Grades completions by their last box, in processes of its own; `comparison` says what counts as the same."""

    def __init__(
        self,
        num_workers: int = 2,
        timeout_s: float = 5.0,
        memory_bytes: int = 2 * 2**30,
        *,
        answer_after: str | None = None,
        timeout_setting: str = "timeout_s",
    ) -> None:
        """`timeout_s` bounds one answer, `memory_bytes` one worker; messages call the first `timeout_setting`."""
        self._answer_after = answer_after
        self._pool = WorkerPool("oapl.grading.math:judge", num_workers, timeout_s, memory_bytes, timeout_setting)
        self._known_golds: set[str] = set()

    @property
    def verifier(self) -> str:
        """`math/1+sympy-1.14.0`: what the rewards depend on."""
        return f"math/{GRADER_VERSION}+sympy-{version('sympy')}"

    def start(self) -> None:
        self._pool.start()

    def grade(self, texts: Sequence[str], gold: str) -> list[Verdict]:
        """One verdict a completion, in order. Raises GradingError where the gold answer alone cannot be handled."""
        self._check(gold)
        found = [final_answer(text, answer_after=self._answer_after) for text in texts]
        answers = list(dict.fromkeys(one.answer for one in found if one.answer is not None))
        results = self._pool.map({"answer": answer, "gold": gold} for answer in answers)
        verdicts = {
            answer: Verdict(0.0, answer, f"not graded: {result}") if isinstance(result, GradingError) else result
            for answer, result in zip(answers, results, strict=True)
        }
        return [Verdict(0.0, None, one.reason) if one.answer is None else verdicts[one.answer] for one in found]

    def _check(self, gold: str) -> None:
        """No answer is blamed for its problem: the gold answer is tried first, with an empty answer."""
        if gold not in self._known_golds:
            try:
                self._pool.call(answer="", gold=gold)
            except GradingError as error:
                raise GradingError(f"the gold answer {gold[-80:]!r} cannot be graded with: {error}") from error
            self._known_golds.add(gold)

    def close(self) -> None:
        self._pool.close()
