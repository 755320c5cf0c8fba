"""Grades completions in worker processes that may be killed: a hostile answer costs its own verdict alone."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from oapl.errors import GradingError
from oapl.grading.math.answers import final_answer
from oapl.grading.pool import WorkerPool
from oapl.types import Verdict

GRADER_VERSION = 3
"""Goes up with every change that gives some answer another reward."""


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
        self._pool = WorkerPool(
            "oapl.grading.math.verdicts:judge", num_workers, timeout_s, memory_bytes, timeout_setting
        )
        self._known_golds: set[str] = set()

    @property
    def verifier(self) -> str:
        """`math/3+sympy-1.14.0`: what the rewards depend on."""
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
                if str(error).startswith("the gold answer"):  # unless it is of a limit
                    raise
                raise GradingError(f"the gold answer {gold[-80:]!r} cannot be graded with: {error}") from error
            self._known_golds.add(gold)

    def close(self) -> None:
        self._pool.close()
