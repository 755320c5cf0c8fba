r"""How the mathematics grader judges answers known to be right or wrong, beside math-verify, and how fast.

    .venv/bin/python benchmarks/grading_math.py --data DIR --output grading_math.json

From each gold answer of the files of problems in DIR, rules make rewritings that say the same and near misses that do
not (`math_rules.py`). A line of the table is a rule: how many answers it made, and the share that each grader judged
rightly. math-verify is called plainly, `verify(parse(gold), parse(answer))`, both in a box.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from machine import write_results
from math_rules import NEAR_MISSES, REWRITINGS
from oapl.grading.math.grader import MathGrader
from oapl.grading.math.verdicts import grade_answer, plain_gold

FILES = ("matharena_aime_2025.jsonl", "matharena_hmmt_feb_2025.jsonl", "math_500.json", "gsm8k_test.jsonl")

Judge = Callable[[str, str], bool]


class Case(NamedTuple):
    file: str
    rule: str
    gold: str
    answer: str
    is_right: bool


def gold_answers(path: Path) -> list[str]:
    text = path.read_text()
    rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    return [str(row["answer"]) for row in rows]


def cases_of(path: Path) -> list[Case]:
    """Each different gold answer once: GSM8K has few numbers and many problems."""
    golds = dict.fromkeys(plain_gold(gold) for gold in gold_answers(path))
    return [
        Case(path.name, name, gold, answer, is_right)
        for gold in golds
        for is_right, rules in ((True, REWRITINGS), (False, NEAR_MISSES))
        for name, rule in rules.items()
        for answer in rule(gold)
    ]


def own(gold: str, answer: str) -> bool:
    return grade_answer(rf"\boxed{{{answer}}}", gold).reward == 1.0


def math_verify(gold: str, answer: str) -> bool:
    from math_verify import parse, verify

    @lru_cache(maxsize=1)
    def parsed_gold(text: str) -> Any:
        return parse(rf"\boxed{{{text}}}")

    return bool(verify(parsed_gold(gold), parse(rf"\boxed{{{answer}}}")))


def judged_rightly(judge: Judge, cases: list[Case]) -> tuple[list[bool], float]:
    start = time.perf_counter()
    return [judge(case.gold, case.answer) == case.is_right for case in cases], time.perf_counter() - start


def verdicts_per_second(cases: list[Case], num_workers: int) -> float:
    """Of the grader as a run uses it: in processes, the answers to one gold answer at a time."""
    texts: dict[str, list[str]] = {}
    for case in cases:
        texts.setdefault(case.gold, []).append(rf"So it is \boxed{{{case.answer}}}.")
    grader = MathGrader(num_workers)
    grader.start()
    start = time.perf_counter()
    for gold, answers in texts.items():
        grader.grade(answers, gold)
    rate = len(cases) / (time.perf_counter() - start)
    grader.close()
    return rate


def table(cases: list[Case], by_own: list[bool], by_peer: list[bool]) -> list[dict[str, Any]]:
    rows = []
    for file, is_right, rule in dict.fromkeys((case.file, case.is_right, case.rule) for case in cases):
        places = [i for i, case in enumerate(cases) if (case.file, case.rule) == (file, rule)]
        row = {"file": file, "kind": "rewriting" if is_right else "near miss", "rule": rule, "answers": len(places)}
        rows.append(row | {"oapl": share(by_own, places), "math_verify": share(by_peer, places)})
    return rows


def share(rightly: list[bool], places: list[int]) -> float:
    return sum(rightly[i] for i in places) / len(places)


def print_table(rows: list[dict[str, Any]]) -> None:
    file = None
    for row in sorted(rows, key=lambda row: (FILES.index(row["file"]), row["kind"] == "near miss")):
        if row["file"] != file:
            file = row["file"]
            print(f"\n{file}\n{'':10} {'rule':24} {'answers':>7} {'oapl':>7} {'math-verify':>12}")
        print(f"{row['kind']:10} {row['rule']:24} {row['answers']:7} {row['oapl']:7.1%} {row['math_verify']:12.1%}")


def summary(cases: list[Case], rightly: list[bool]) -> dict[str, float]:
    kinds = {"rewritings accepted": True, "near misses rejected": False}
    return {
        name: share(rightly, [i for i, case in enumerate(cases) if case.is_right == kind])
        for name, kind in kinds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the files of problems")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # math-verify tells of every answer that it cannot parse

    cases = [case for file in FILES for case in cases_of(args.data / file)]
    by_own, own_s = judged_rightly(own, cases)
    by_peer, peer_s = judged_rightly(math_verify, cases)
    rows = table(cases, by_own, by_peer)
    print_table(rows)

    rates = {f"oapl, workers: {n}": verdicts_per_second(cases, n) for n in (1, 2)}
    rates |= {"oapl, in this process": len(cases) / own_s, "math-verify, in this process": len(cases) / peer_s}
    totals = {"oapl": summary(cases, by_own), "math-verify": summary(cases, by_peer)}
    print(f"\n{len(cases)} answers")
    for name, shares in totals.items():
        print(f"{name:12} " + ", ".join(f"{what} {value:.2%}" for what, value in shares.items()))
    for name, rate in rates.items():
        print(f"{name:30} {rate:8.0f} verdicts/s")
    mistakes = [case._asdict() for case, rightly in zip(cases, by_own, strict=True) if not rightly]
    for case in mistakes:
        print(case)
    write_results(
        args, ("sympy", "math-verify"), totals=totals, verdicts_per_s=rates, mistakes_of_oapl=mistakes, table=rows
    )


if __name__ == "__main__":
    main()
