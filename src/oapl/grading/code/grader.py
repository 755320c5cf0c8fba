"""Grades programs by running them on their problem's tests, each program in a sandbox of its own."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import TypeVar

from oapl.errors import GradingError
from oapl.grading.code.outputs import same_output, same_result
from oapl.grading.code.problem_tests import Tests
from oapl.grading.code.programs import last_program
from oapl.grading.code.sandbox import Limits, Outcome, Sandbox, check
from oapl.types import Verdict

SHOWN_CHARS = 80
FREE_OUTPUT_BYTES = 1 << 20
Result = TypeVar("Result")
DEFINES_CHECK = """
names = {{**globals(), "__name__": "checks"}}
exec(compile({!r}, "checks.py", "exec"), names)
if not callable(names.get("check")): raise NameError("there is no function check")
"""


class CodeGrader:
    """Reward 1 for a program that passes all tests of its problem, else 0.

    Example: `grader.grade(["```python\\nprint(int(input()) + 1)\\n```"], Tests("stdin", (("4", "5"),)))` is
    `[Verdict(1.0, "print(int(input()) + 1)", "passed 1 test")]`.
    """

    def __init__(
        self,
        num_workers: int,
        limits: Limits | None = None,
        max_tests: int | None = None,
        answer_after: str | None = None,
    ) -> None:
        """`max_tests`: only so many, those with the longest inputs. `answer_after`: see `last_program`."""
        self.limits = limits or Limits()
        self.max_tests, self.answer_after = max_tests, answer_after
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="sandbox")
        self._closed = threading.Event()
        self._verifier = ""

    def start(self) -> None:
        """Raises TaskError, with what to do, where this machine cannot run a sandbox."""
        self._verifier = self._verifier or f"code/3+python-{check()}"

    def close(self) -> None:
        """Ends the programs at hand and drops those that wait. Whoever waits for them gets a GradingError."""
        self._closed.set()
        self._workers.shutdown(cancel_futures=True)

    @property
    def verifier(self) -> str:
        """Name and version of what gives the rewards."""
        self.start()
        return self._verifier

    def grade(self, texts: Sequence[str], tests: Tests) -> list[Verdict]:
        """One verdict a completion, in their order. Raises GradingError where the machinery fails, not a program."""
        self._refuse_if_closed()
        self.start()
        if not tests.cases:
            raise GradingError("a problem without tests: nothing can be said of its completions")
        tests = tests.longest(self.max_tests)
        found = [last_program(text, self.answer_after) for text in texts]
        programs = dict.fromkeys(program for program, _ in found if program is not None)
        waiting: dict[str, Future[Verdict]] = {}
        try:
            if tests.kind == "check" and programs:
                for checks, _ in tests.cases:
                    self._submit(prove_checks, checks).result()
            for program in programs:
                waiting[program] = self._submit(judge, program, tests)
            verdicts = {program: future.result() for program, future in waiting.items()}
        except CancelledError:
            self._refuse_if_closed()
            raise
        finally:
            for future in waiting.values():
                future.cancel()
        return [Verdict(0.0, None, reason) if program is None else verdicts[program] for program, reason in found]

    def _submit(self, act: Callable[..., Result], *arguments: object) -> Future[Result]:
        try:
            return self._workers.submit(act, *arguments, self.limits, self._closed)
        except RuntimeError:  # between two submissions another thread may have closed it
            self._refuse_if_closed()
            raise

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise GradingError("the grader was closed")


def judge(program: str, tests: Tests, limits: Limits, stop: threading.Event | None = None) -> Verdict:
    """Runs the tests in turn, up to the first that fails."""
    num_tests = len(tests.cases)
    with Sandbox(program, tests.kind, tests.fn_name, limits, stop) as sandbox:
        deadline = time.monotonic() + limits.total_timeout_s
        for number, (given, expected) in enumerate(tests.cases, 1):
            data = given.encode("utf-8", "surrogatepass")  # which JSON may hold
            inputs = (b"", data) if tests.kind == "check" else (data,)
            timeout_s = min(limits.timeout_s, deadline - time.monotonic())
            output_limit = 2 * len(expected) + FREE_OUTPUT_BYTES
            outcome = sandbox.run(*inputs, output_limit=output_limit, timeout_s=timeout_s)
            fault = how_it_ended(outcome, limits, timeout_s) or compare(outcome, expected, tests)
            if fault:
                return Verdict(0.0, program, f"test {number} of {num_tests}: {fault}")
    return Verdict(1.0, program, f"passed {num_tests} test{'s' * (num_tests > 1)}")


@lru_cache(maxsize=4096)
def prove_checks(checks: str, limits: Limits, stop: threading.Event | None) -> None:
    """Raises GradingError where a problem's checks fail without any program: that is no program's fault."""
    with Sandbox(DEFINES_CHECK.format(checks), "stdin", "", limits, stop) as sandbox:
        outcome = sandbox.run(b"", output_limit=FREE_OUTPUT_BYTES, timeout_s=limits.timeout_s)
    if fault := how_it_ended(outcome, limits, limits.timeout_s):
        raise GradingError(f"the problem's checks do not define `check`, whatever the program: {fault}")


def how_it_ended(outcome: Outcome, limits: Limits, timeout_s: float) -> str:
    """Nothing where the program ended in peace."""
    match outcome.end:
        case "time" if timeout_s < limits.timeout_s:
            return f"all tests so far took longer than {limits.total_timeout_s:g} s"
        case "time":
            return f"took longer than {limits.timeout_s:g} s"
        case "memory":
            return f"used more than {limits.memory_mb} MB of memory"
        case "cpu":
            return "used more than one core"
        case "processes":
            return f"had more than {limits.num_processes} processes and threads"
        case "output":
            return "printed without end"
        case "died":
            return "broke its sandbox"
    if outcome.exit_code < 0:
        name = f"signal {-outcome.exit_code}"
        with suppress(ValueError):
            name = signal.Signals(-outcome.exit_code).name
        return f"was ended by {name}"
    return f"ended with {shown(outcome.error) or f'exit code {outcome.exit_code}'}" if outcome.exit_code else ""


def compare(outcome: Outcome, expected: str, tests: Tests) -> str:
    """Nothing where the output is what the test expects."""
    output = outcome.output.decode("utf-8", "replace")
    match tests.kind:
        case "check":
            return ""  # whose exit code says all
        case "call":
            same = same_result(output, expected, tests.wrapped)
        case "stdin":
            same = same_output(output, expected)
    return "" if same else f"wrong output: got {shown(output)!r}, expected {shown(expected)!r}"


def shown(text: str) -> str:
    """Its beginning, without what would do something to a terminal."""
    text = "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text[: 4 * SHOWN_CHARS].strip())
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
