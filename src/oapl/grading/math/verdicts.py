r"""Grades answers to mathematics: the last \boxed{…} of a completion against the gold answer.

This module reads and compares in the process that it is called in, without a limit of time. `MathGrader` does the same
in worker processes that may be killed.
"""

from __future__ import annotations

from functools import lru_cache

from oapl.errors import GradingError
from oapl.grading.math.answers import LONGEST_ANSWER, final_answer
from oapl.grading.math.comparison import is_same
from oapl.grading.math.latex import Unreadable
from oapl.grading.math.reading import Answer, read
from oapl.types import Verdict


def grade_answer(text: str, gold: str, *, answer_after: str | None = None) -> Verdict:
    """1 where the last box says what `gold` says, else 0. Raises GradingError for a gold that is not understood."""
    check_gold(gold)
    found = final_answer(text, answer_after=answer_after)
    return Verdict(0.0, None, found.reason) if found.answer is None else judge(found.answer, gold)


def check_gold(gold: str) -> None:
    """Raises GradingError where the gold answer cannot be understood: an error of the problem, not of a completion."""
    _read_gold(gold)


def judge(answer: str, gold: str) -> Verdict:
    """Compares what stood in the box with the gold answer."""
    plain = plain_gold(gold)
    expected = _read_gold(gold)
    if answer == plain:
        return Verdict(1.0, answer, "the gold answer itself")
    try:
        right = is_same(expected, read(answer))
    except (Unreadable, RecursionError) as error:
        return Verdict(0.0, answer, f"not understood: {error}")
    except MemoryError:
        raise  # of the worker, which is replaced
    except Exception as error:  # sympy raises what it likes, and an answer must not end what grades it
        return Verdict(0.0, answer, f"not understood: {type(error).__name__} while computing")
    return Verdict(1.0, answer, f"equal to {plain}") if right else Verdict(0.0, answer, f"not equal to {plain}")


def plain_gold(gold: str) -> str:
    r"""The answer itself: what follows `####`, as in GSM8K, and what stands in a box, where it is written so."""
    if "####" in gold:
        gold = gold.rpartition("####")[2]
    return (final_answer(gold).answer or "") if r"\boxed" in gold else gold.strip()


@lru_cache(maxsize=4096)
def _read_gold(gold: str) -> Answer:
    plain = plain_gold(gold)
    if not plain or len(plain) > LONGEST_ANSWER:
        raise GradingError(f"the gold answer is empty or longer than {LONGEST_ANSWER:,} characters: {gold[:80]!r}")
    try:
        answer = read(plain)
        is_same(answer, read("0"))  # what cannot be compared at all shows here, not when a completion would pay for it
    except MemoryError:
        raise
    except Exception as error:  # of this package or of sympy
        raise GradingError(f"the gold answer {plain!r} is not understood: {error}") from error
    return answer
