r"""Every rewriting of a gold answer is right and every near miss wrong, on examples here and on files of problems.

The rules are those of `benchmarks/grading_math.py`. The files are not part of the repository: the environment variable
OAPL_DATA names their folder, or they lie in `../shared/data` beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grading_math import FILES, gold_answers
from math_rules import NEAR_MISSES, REWRITINGS
from oapl.grading.math.verdicts import grade_answer, plain_gold

DATA = Path(os.environ.get("OAPL_DATA", Path(__file__).parents[3] / "shared" / "data"))

EXAMPLES = [
    "12",
    "-7",
    "48,250",
    "51240",
    "2.75",
    r"\frac{3}{8}",
    r"-\frac{11}{6}",
    r"\frac57",
    r"\dfrac{22}{9}",
    r"6\sqrt{7}",
    r"\sqrt{26}",
    r"\frac{\pi}{7}",
    r"4 - \frac{3}{\pi}",
    "3^{12} \\cdot 8!",
    "7 - 3i",
    "6x^3 - x + 4",
    r"\tan y",
    "(4, -9)",
    r"\left( \frac{2}{7}, 5 \right)",
    "(-3, 8]",
    r"\left[\frac14, \sqrt{3}\right)",
    r"(-\infty, 4) \cup (6, 9)",
    "4, -1, 9",
    r"2 \pm \sqrt{11}",
    r"\{2\pm\sqrt{3}, 7\}",
    "y = 5x - 2",
    r"x \in [1, 6)",
    r"\begin{pmatrix} 4 \\ -1/3 \end{pmatrix}",
    r"\begin{pmatrix} 2 & 1 \\ 0 & 5 \end{pmatrix}",
    r"\text{(B)}",
    r"\text{Nora}",
    "3102_5",
    r"72^\circ",
    r"\$6,\!450",
    r"45\%",
    r"21 \text{ cm}^3",
]


def mistakes(golds: list[str]) -> list[str]:
    found = []
    for gold in dict.fromkeys(plain_gold(gold) for gold in golds):
        for wanted, rules in ((1.0, REWRITINGS), (0.0, NEAR_MISSES)):
            for name, rule in rules.items():
                for answer in rule(gold):
                    verdict = grade_answer(rf"\boxed{{{answer}}}", gold)
                    if verdict.reward != wanted:
                        found.append(f"{name}: {answer} for {gold}: {verdict.reason}")
    return found


@pytest.mark.parametrize("gold", EXAMPLES)
def test_rewritings_are_right_and_near_misses_wrong(gold: str):
    assert mistakes([gold]) == []


def test_every_rule_has_an_example():
    for name, rule in (REWRITINGS | NEAR_MISSES).items():
        assert any(rule(gold) for gold in EXAMPLES), name


@pytest.mark.parametrize("file", FILES)
def test_rewritings_are_right_and_near_misses_wrong_on_a_file_of_problems(file: str):
    path = DATA / file
    if not path.is_file():
        pytest.skip(f"no {file} in {DATA}")
    assert mistakes(gold_answers(path)) == []
