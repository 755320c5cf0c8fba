"""The problems of the miniatures are what their script makes, and can be solved; the miniatures learn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from helpers import NEEDS_SANDBOX
from make_miniature_data import code_problems, code_row, files, math_problems
from oapl.cli import main
from oapl.grading.code.grader import CodeGrader
from oapl.grading.code.problem_tests import parse_tests
from oapl.grading.math.grader import MathGrader
from oapl.store.files import read_json

ROOT = Path(__file__).parents[1]
MINIATURE = ROOT / "recipes" / "miniature"


def test_the_files_are_what_the_script_makes():
    made = files()
    assert {path.name for path in MINIATURE.glob("*.jsonl")} == set(made)
    for name, text in made.items():
        assert (MINIATURE / name).read_text() == text, f"{name}: run scripts/make_miniature_data.py"


def test_no_problem_is_in_two_splits():
    of_rules = [(p.rule, p.numbers) for problems in math_problems().values() for p in problems]
    assert max(Counter(of_rules).values()) == 1
    programs = [(p.problem, p.starter_code) for problems in code_problems().values() for p in problems]
    assert max(Counter(programs).values()) == 1


def test_the_grader_reads_every_answer():
    grader = MathGrader(num_workers=1, timeout_s=30.0)
    grader.start()
    try:
        for problems in math_problems().values():
            for problem in problems:
                right, wrong = grader.grade([f"\\boxed{{{problem.answer}}}", "\\boxed{1000}"], problem.answer)
                assert (right.reward, wrong.reward) == (1, 0), problem
    finally:
        grader.close()


@NEEDS_SANDBOX
def test_every_solution_passes_its_tests_and_what_it_begins_with_does_not():
    grader = CodeGrader(num_workers=2)
    try:
        for problems in code_problems().values():
            for problem in problems:
                blocks = [f"```python\n{code}\n```" for code in (problem.solution, problem.starter_code)]
                right, wrong = grader.grade(blocks, parse_tests(code_row(problem)))
                assert right.reward == 1, (problem.problem, right.reason)
                assert wrong.reward == 0, (problem.problem, wrong.reason)
    finally:
        grader.close()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("task", ["math", "code"])
def test_the_miniature_learns(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The claim of docs/findings.md: pass@1 on the held-out problems rises, for certain."""
    if not (ROOT / "runs" / "smollm2").exists():
        pytest.skip("make runs/smollm2 first")
    monkeypatch.chdir(ROOT)
    assert main(["train", f"recipes/miniature/{task}.toml", "--run_dir", str(tmp_path)]) == 0
    summary = read_json(tmp_path / "summary.json")
    assert 0.05 <= summary["base"]["pass_at_k"]["1"][0] <= 0.5
    assert summary["difference"]["1"][1] > 0
