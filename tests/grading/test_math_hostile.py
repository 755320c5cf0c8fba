r"""Answers that would hang, fill or crash what grades them: in real processes, with others of their batch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oapl.errors import GradingError
from oapl.grading.math.grader import MathGrader
from oapl.grading.pool import WorkerPool

TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    grader = MathGrader(num_workers=2, timeout_s=TIMEOUT_S)
    grader.start()
    yield grader
    grader.close()


def boxed(answer: str) -> str:
    return rf"\boxed{{{answer}}}"


CHEAP = {
    "tower of powers": "9^{9^{9^9}}",
    "power of a power": "((x^{2999})^{2999})^{2999}",
    "large power": "10^{10^{10}}",
    "factorial": "(10^{10})!",
    "factorials of factorials": "((((5!)!)!)!)!",
    "exponentials": "e^{e^{e^{e^{10}}}}",
    "binomial": r"\binom{10^9}{10^8}",
    "root of a large number": r"\sqrt{10^{14000}+1}",
    "nested braces": "{1+" * 400 + "5" + "}" * 400,
    "100 kB of nested braces": "{" * 50_000 + "5" + "}" * 50_000,
    "nested brackets": "(" * 900 + "5" + ")" * 900,
    "nested sets": r"\{" * 300 + "1" + r"\}" * 300,
    "nested sines": r"\sin " * 390 + "x",
    "nested logarithms": r"\ln(" * 39 + "x" + ")" * 39,
    "nested hyperbolic sines": r"\sinh(" * 6 + "2" + ")" * 6,
    "nested roots": r"\sqrt{2+" * 39 + "x" + "}" * 39,
    "many values of a maximum": r"\max(" + ",".join(f"x+{n}" for n in range(200)) + ")",
    "gcd of large powers": r"\gcd(n^{2999}-1, n^{2998}-1)",
    "floors of floors": r"\lfloor 10^{300}\pi" * 10 + r"\rfloor" * 10,
    "powers of floors": r"2^{2^{2^{\lfloor n/2\rfloor}}}",
    "root of many digits": r"\sqrt{" + "9" * 1800 + "7}",
    "sine of a large number": r"\arcsin(\sin(10^{200}))",
    "many bars": "|" * 900,
    "many commas": "1," * 900,
    "many signs": r"\pm " * 500 + "1",
    "many equations": "x=" * 900 + "5",
    "many terms": "+".join(rf"\sqrt{{{n}}}" for n in range(2, 150)),
    "many digits": "9" * 1900,
    "undefined": r"\infty - \infty",
    "NUL": "5\x00",
    "half a sign of UTF-16": "\ud800 5",
    "10 MB": "5" * 10_000_000,
    "10 MB of boxes": r"\boxed{" * 1_400_000,
}


@pytest.mark.parametrize("name", CHEAP)
@pytest.mark.parametrize("gold", ["5", "x+1", r"\sqrt2+\sqrt3"])
def test_a_hostile_answer_is_wrong_at_once(grader: MathGrader, name: str, gold: str):
    start = time.monotonic()
    (verdict,) = grader.grade([boxed(CHEAP[name])], gold)
    assert verdict.reward == 0.0
    assert verdict.reason
    assert time.monotonic() - start < TIMEOUT_S  # it was not the kill that ended it


SLOW = "(x^{2999}+1)^{2999}"
"""Two thousand digits to the power of three thousand at every point where it is compared."""


def test_an_answer_that_outlasts_its_limit_costs_itself_alone():
    grader = MathGrader(num_workers=2, timeout_s=0.5)
    try:
        grader.start()
        texts = [boxed("x+1"), boxed(SLOW), boxed("1+x"), boxed("x"), "no box", boxed("x+1")]
        start = time.monotonic()
        verdicts = grader.grade(texts, "x+1")
        assert time.monotonic() - start < 30
        assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
        assert verdicts[1].answer == SLOW
        assert "took longer than timeout_s = 0.5 s and its process was killed" in verdicts[1].reason
        assert [verdict.reward for verdict in grader.grade(texts[:1], "x+1")] == [1.0]  # the worker was replaced
    finally:
        grader.close()


def test_a_gold_answer_that_cannot_be_handled_is_an_error_of_the_problem(grader: MathGrader):
    with pytest.raises(GradingError, match="took longer than timeout_s = 3 s"):
        grader.grade([boxed("5")], SLOW)
    with pytest.raises(GradingError, match=r"gold answer .* is not understood: a power too large"):
        grader.grade([boxed("5")], "9^{9^{9^9}}")
    with pytest.raises(GradingError, match="gold answer"):
        grader.grade([boxed("5")], "")
    assert [verdict.reward for verdict in grader.grade([boxed("5")], "5")] == [1.0]


def test_verdicts_come_in_the_order_of_the_completions(grader: MathGrader):
    texts = [boxed(str(n)) for n in range(40)]
    assert [verdict.reward for verdict in grader.grade(texts, "17")] == [float(n == 17) for n in range(40)]
    assert [verdict.answer for verdict in grader.grade(texts, "17")] == [str(n) for n in range(40)]


def test_several_threads_may_grade_at_once(grader: MathGrader):
    with ThreadPoolExecutor(8) as threads:
        batches = threads.map(lambda n: grader.grade([boxed(str(n)), boxed("x")], str(n)), range(40))
        assert [[verdict.reward for verdict in batch] for batch in batches] == [[1.0, 0.0]] * 40


def test_the_verifier_names_what_rewards_depend_on(grader: MathGrader):
    assert grader.verifier.startswith("math/3+sympy-")


# The pool itself, with functions that misbehave

FUNCTIONS = """
import os, time

def behave(word):
    if word == "hang":
        time.sleep(600)
    if word == "eat":
        return len(bytearray(4 * 2**30))
    if word == "crash":
        os.abort()
    if word == "raise":
        raise ValueError("no")
    time.sleep(0.05)
    return os.getpid()
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "misbehaving.py").write_text(FUNCTIONS)
    pool = WorkerPool("misbehaving:behave", 2, timeout_s=1.0, memory_bytes=2**30, timeout_setting="timeout_s")
    yield pool
    pool.close()


def test_a_call_that_misbehaves_leaves_its_neighbours_alone(pool: WorkerPool):
    words = ["fine", "hang", "eat", "crash", "raise", "fine", "fine", "fine"]
    results: list[Any] = pool.map({"word": word} for word in words)
    told = {word: str(result) for word, result in zip(words, results, strict=True)}
    assert "took longer than timeout_s = 1 s and its process was killed" in told["hang"]
    assert "raised MemoryError" in told["eat"]
    assert "ended its process (exit code -6)" in told["crash"]
    assert "raised ValueError: no" in told["raise"]
    workers = {result for word, result in zip(words, results, strict=True) if word == "fine"}
    assert all(isinstance(worker, int) and worker != os.getpid() for worker in workers)


def test_a_pool_has_no_more_processes_than_it_was_given(pool: WorkerPool):
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(lambda _: pool.call(word="fine"), range(16)))) == 2


def test_a_closed_pool_leaves_no_process_behind(pool: WorkerPool):
    workers = set(pool.map({"word": "fine"} for _ in range(8)))
    pool.close()
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]
