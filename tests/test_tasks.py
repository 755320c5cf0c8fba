"""Tasks over a user's own rows and reward function, and reasoning-gym's: what is passed, and how failures are told."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oapl.config import TaskConfig
from oapl.errors import GradingError, TaskError
from oapl.grading.worker import FunctionWorker
from oapl.tasks import Task, make_task
from oapl.tasks.rewards import checked_rewards
from oapl.types import Prompt

REWARDS = '''\
"""A user's reward functions."""
import enum, multiprocessing, os, time

def length(prompts, completions, answer, weight, **columns):
    assert isinstance(answer, list) and isinstance(weight, list), "columns must come as lists"
    assert len(prompts) == len(completions) == len(answer) == len(weight)
    return [w * (a in c) + 0.25 * (p in c) for p, c, a, w in zip(prompts, completions, answer, weight)]

def chat(prompts, completions, **columns):
    assert columns == {}, columns
    right = [message["content"] == "4" and message["role"] == "assistant" for (message,) in completions]
    asked = [messages[-1] == {"role": "user", "content": "2+2?"} for messages in prompts]
    return [float(r and a) for r, a in zip(right, asked)]

def behave(prompts, completions, **columns):
    """Does what the first completion says."""
    word = completions[0]
    if word == "raise":
        raise KeyError("no answer given")
    if word == "exit":
        os._exit(9)
    if word == "hang":
        time.sleep(3600)
    if word == "child":
        return [float(multiprocessing.Pool(1).apply(abs, [-1])), 0.0]
    if word == "wait":
        open("waiting", "w").close()
        time.sleep(1)
        return [1.0, 0.0]
    if word == "unknown":
        return [Verdict.RIGHT for _ in completions]
    return {"none": [1.0, None], "few": [1.0], "number": 1.0, "fine": [1.0, 0.0]}[word]

class Verdict(enum.Enum):
    RIGHT = 1
'''
RAISING_LINE = REWARDS.splitlines().index('        raise KeyError("no answer given")') + 1

MakeTask = Callable[..., Task]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder a user works in: it holds `my_rewards.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    return tmp_path


@pytest.fixture
def make(folder: Path) -> Iterator[MakeTask]:
    tasks: list[Task] = []

    def make_from(**settings: Any) -> Task:
        settings = {"name": "dataset", "reward_funcs": "my_rewards:behave", **settings}
        tasks.append(make_task(TaskConfig(**settings)))
        return tasks[-1]

    yield make_from
    for task in tasks:
        task.close()


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path.name


def write_csv(path: Path, rows: list[dict[str, Any]]) -> str:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path.name


def rewards(task: Task, prompt: Prompt, completions: list[str]) -> list[float]:
    return [verdict.reward for verdict in task.grade(prompt, completions)]


ROWS = [{"prompt": f"question {i}", "answer": f"answer {i}", "weight": i / 2} for i in range(20)]


# Rows and rewards


@pytest.mark.parametrize(
    ("write", "suffix"), [(write_jsonl, ".jsonl"), (write_parquet, ".parquet"), (write_csv, ".csv")]
)
def test_rows_of_a_file_are_prompts_and_their_columns_reach_the_reward_as_lists(
    folder: Path, make: MakeTask, write: Callable[..., str], suffix: str
):
    train = write(folder / f"train{suffix}", ROWS)
    held_out = write(folder / f"held_out{suffix}", ROWS[:3])
    task = make(dataset=train, eval_dataset=held_out, reward_funcs="my_rewards:length")
    assert (task.num_prompts("train"), task.num_prompts("evaluation")) == (20, 3)
    assert task.verifier == f"my_rewards:length/{hashlib.sha256(REWARDS.encode()).hexdigest()[:12]}"
    prompt = task.prompt("train", 3)
    assert (prompt.id, prompt.text) == ("train/3", "question 3")
    assert prompt.columns == {"answer": "answer 3", "weight": 1.5}
    # weight 1.5 where the answer is in it, and 0.25 where the prompt is: any real number is a reward.
    assert rewards(task, prompt, ["answer 3", "nothing", "question 3: answer 3"]) == [1.5, 0.0, 1.75]


def test_without_a_held_out_file_every_tenth_row_is_held_out(folder: Path, make: MakeTask):
    task = make(dataset=write_jsonl(folder / "rows.jsonl", ROWS))
    assert (task.num_prompts("train"), task.num_prompts("evaluation")) == (18, 2)
    held_out = {task.prompt("evaluation", i).text for i in range(2)}
    assert held_out == {"question 0", "question 10"}
    assert held_out.isdisjoint(task.prompt("train", i).text for i in range(18))


def test_validation_rows_have_a_file_of_their_own(folder: Path, make: MakeTask):
    task = make(
        dataset=write_jsonl(folder / "rows.jsonl", ROWS),
        validation_dataset=write_jsonl(folder / "other.jsonl", [{"prompt": "another question"}]),
    )
    assert task.num_prompts("validation") == 1
    assert task.prompt("validation", 0).text == "another question"


def test_chat_prompts_give_the_reward_lists_of_messages(folder: Path, make: MakeTask):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    task = make(dataset=write_jsonl(folder / "chat.jsonl", [{"prompt": messages}] * 20), reward_funcs="my_rewards:chat")
    prompt = task.prompt("train", 0)
    assert prompt.text == messages
    assert rewards(task, prompt, ["4", "5"]) == [1.0, 0.0]


# A reward function that misbehaves


@pytest.fixture
def misbehave(folder: Path, make: MakeTask) -> Callable[[str], list[float]]:
    """Grades two completions, the first of which tells the function what to do."""
    task = make(dataset=write_jsonl(folder / "rows.jsonl", ROWS), reward_timeout_s=1.0)
    return lambda word: rewards(task, task.prompt("train", 0), [word, ""])


def test_a_function_that_raises_is_told_with_its_words_and_its_line(misbehave: Callable[[str], list[float]]):
    with pytest.raises(GradingError) as caught:
        misbehave("raise")
    assert str(caught.value) == (
        f"my_rewards:behave raised KeyError: 'no answer given' (my_rewards.py, line {RAISING_LINE})"
    )
    assert misbehave("fine") == [1.0, 0.0]  # the same process serves on


def test_a_function_that_hangs_is_killed_and_the_next_call_works(misbehave: Callable[[str], list[float]]):
    with pytest.raises(
        GradingError, match=r"my_rewards:behave took longer than task\.reward_timeout_s = 1 s and .*kil"
    ):
        misbehave("hang")
    assert misbehave("fine") == [1.0, 0.0]


def test_a_function_that_ends_its_process_is_told_and_the_next_call_works(misbehave: Callable[[str], list[float]]):
    with pytest.raises(GradingError, match=r"my_rewards:behave ended its process \(exit code 9\)"):
        misbehave("exit")
    assert misbehave("fine") == [1.0, 0.0]


@pytest.fixture
def call_patiently(folder: Path) -> Iterator[Callable[[str], list[float]]]:
    """Calls the function as `misbehave` does, with a minute to answer."""
    worker = FunctionWorker("my_rewards:behave", 60)
    yield lambda word: worker.call(prompts=["q", "q"], completions=[word, ""])
    worker.close()


def test_a_function_may_start_processes_of_its_own(call_patiently: Callable[[str], list[float]]):
    assert call_patiently("child") == [1.0, 0.0]


def test_ctrl_c_lets_a_call_end(folder: Path, call_patiently: Callable[[str], list[float]]):
    """A terminal sends SIGINT to every process of the run; the one that grades is not to fail its group for it."""

    def interrupt() -> None:
        while not (folder / "waiting").exists():
            time.sleep(0.01)
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert call_patiently("wait") == [1.0, 0.0]
    thread.join()


def test_a_worker_does_not_outlive_its_killed_parent(folder: Path):
    """The parent dies by SIGKILL while its worker hangs in a call."""
    script = (
        "from oapl.grading.worker import FunctionWorker\n"
        "if __name__ == '__main__':\n"
        "    worker = FunctionWorker('my_rewards:behave', 600)\n"
        "    worker.start()\n"
        "    print(worker._process.pid, flush=True)\n"
        "    worker.call(prompts=['q'], completions=['hang'])\n"
    )
    (folder / "parent.py").write_text(script)
    with subprocess.Popen([sys.executable, "parent.py"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    give_up = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_a_function_s_odd_results_are_told(misbehave: Callable[[str], list[float]]):
    with pytest.raises(GradingError, match="my_rewards:behave returned None for completion 1: it gave no verdict"):
        misbehave("none")
    with pytest.raises(TaskError, match="my_rewards:behave returned 1 rewards for 2 completions"):
        misbehave("few")
    with pytest.raises(TaskError, match=r"my_rewards:behave must return a list of 2 numbers.* returned 1\.0"):
        misbehave("number")
    with pytest.raises(GradingError, match="my_rewards:behave returned what only its own process can read"):
        misbehave("unknown")
    assert misbehave("fine") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "f returned nan for completion 2: not finite"),
        (-math.inf, "f returned -inf for completion 2: not finite"),
        (1e39, r"f returned 1e\+39 for completion 2: not finite in float32"),
        ("good", "f returned 'good' for completion 2: not a number"),
        ("0.5", "f returned '0.5' for completion 2: not a number"),
        ([1.0], r"f returned \[1\.0\] for completion 2: not a number"),
    ],
)
def test_a_value_that_is_no_reward_fails_its_group_by_name(value: Any, message: str):
    with pytest.raises(GradingError, match=message):
        checked_rewards([0.5, 1.0, value, 0.0], 4, "f")


@pytest.mark.parametrize("values", [[1.0], [1.0, 0.0, 1.0], []])
def test_a_wrong_count_is_an_error_of_the_function(values: list[float]):
    with pytest.raises(TaskError, match=rf"f returned {len(values)} rewards for 2 completions; .* one for each"):
        checked_rewards(values, 2, "f")


@pytest.mark.parametrize("values", [None, 1.0, "10", {"a": 1.0, "b": 0.0}, {1.0, 0.0}])
def test_what_is_no_list_is_an_error_of_the_function(values: Any):
    with pytest.raises(TaskError, match="f must return a list of 2 numbers"):
        checked_rewards(values, 2, "f")


def test_whole_numbers_and_truth_values_are_rewards():
    assert checked_rewards([True, 0, -2, 0.125], 4, "f") == [1.0, 0.0, -2.0, 0.125]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:reward", r"reward function no_such_module:reward cannot be imported: ModuleNotFoundError"),
        ("my_rewards:reward", "reward function my_rewards:reward cannot be imported: AttributeError.*'reward'"),
        ("broken:reward", r"reward function broken:reward cannot be imported: ZeroDivision.*\(broken\.py, line 1\)"),
        ("ends:reward", r"reward function ends:reward: its import failed: .*\(exit code 3\)"),
    ],
)
def test_a_function_that_cannot_be_imported_is_told_before_anything_is_sampled(
    folder: Path, function: str, message: str
):
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "ends.py").write_text("import os\nos._exit(3)\n")
    worker = FunctionWorker(function, timeout_s=1.0)
    try:
        with pytest.raises(TaskError, match=message):
            worker.start()
    finally:
        worker.close()


# A dataset that does not fit


def test_a_dataset_without_prompts_lists_its_columns(folder: Path, make: MakeTask):
    rows = [{"question": "2+2", "answer": "4"}] * 20
    with pytest.raises(TaskError, match=r"has no `prompt` column; it has question, answer\. Rename one to `prompt`"):
        make(dataset=write_jsonl(folder / "rows.jsonl", rows))


def test_a_dataset_with_a_reserved_column_is_refused(folder: Path, make: MakeTask):
    rows = [{"prompt": "2+2", "completions": "4"}] * 20
    with pytest.raises(TaskError, match=r"has a column `completions`, the name of an argument .* Rename it"):
        make(dataset=write_jsonl(folder / "rows.jsonl", rows))


def test_a_missing_file_is_named(make: MakeTask):
    with pytest.raises(TaskError, match=r"task\.dataset = 'nowhere\.jsonl': there is no such file"):
        make(dataset="nowhere.jsonl")


def test_the_setting_of_a_missing_held_out_file_is_named(folder: Path, make: MakeTask):
    with pytest.raises(TaskError, match=r"task\.eval_dataset = 'nowhere\.parquet': there is no such file"):
        make(dataset=write_jsonl(folder / "rows.jsonl", ROWS), eval_dataset="nowhere.parquet")


def test_an_empty_file_has_no_rows(folder: Path, make: MakeTask):
    with pytest.raises(TaskError, match=r"task\.dataset = 'empty\.jsonl' has no rows"):
        make(dataset=write_jsonl(folder / "empty.jsonl", []))


def test_one_row_is_too_few_to_train_and_to_evaluate_on(folder: Path, make: MakeTask):
    with pytest.raises(TaskError, match=r"'one\.jsonl' has a single row.*name a held-out file as task.eval_dataset"):
        make(dataset=write_jsonl(folder / "one.jsonl", ROWS[:1]))


def test_a_file_that_cannot_be_parsed_is_told_with_the_cause(folder: Path, make: MakeTask):
    (folder / "cut.jsonl").write_text('{"prompt": "2+2"}\n{"prompt": "2+\n')
    with pytest.raises(TaskError, match=r"task\.dataset = 'cut\.jsonl' cannot be read\..*JSON parse error"):
        make(dataset="cut.jsonl")


def test_a_prompt_that_is_neither_text_nor_chat_is_told_with_its_row(folder: Path, make: MakeTask):
    task = make(dataset=write_jsonl(folder / "rows.jsonl", [{"prompt": i} for i in range(20)]))
    with pytest.raises(TaskError, match=r"prompt train/4: the problem must be text or chat messages.*found 5"):
        task.prompt("train", 4)


# reasoning-gym


@pytest.fixture
def make_gym() -> Iterator[MakeTask]:
    tasks: list[Task] = []

    def make_from(dataset: str, **args: Any) -> Task:
        tasks.append(make_task(TaskConfig(name=f"reasoning_gym:{dataset}", args=args)))
        return tasks[-1]

    yield make_from
    for task in tasks:
        task.close()


def sum_in(question: str) -> int:
    """The answer to `… problem: 4 + 3 - 2 =`."""
    terms = question.partition(":")[2].replace("=", " ").replace("- ", "-").replace("+ ", "+").split()
    return sum(int(term) for term in terms)


def test_a_reasoning_gym_dataset_rewards_right_answers_and_not_wrong_ones(make_gym: MakeTask):
    task = make_gym("chain_sum", min_terms=2, max_terms=3)
    assert task.num_prompts("train") == 10_000
    for split in ("train", "validation", "evaluation"):
        prompt = task.prompt(split, 5)
        answer = sum_in(str(prompt.text))
        right, padded, wrong, empty = rewards(task, prompt, [str(answer), f" {answer}\n", str(answer + 1), ""])
        assert right == padded == 1.0
        assert wrong < 1.0
        assert empty < 1.0


def test_arguments_that_are_lists_reach_reasoning_gym(make_gym: MakeTask):
    task = make_gym("basic_arithmetic", operators=["+"], min_digits=1, max_digits=1)
    prompt = task.prompt("train", 0)
    assert len(rewards(task, prompt, ["1", "2"])) == 2


def test_reasoning_gym_splits_share_no_problem_and_are_the_same_each_time(make_gym: MakeTask):
    task, again = make_gym("chain_sum"), make_gym("chain_sum")
    seen: set[object] = set()
    for split in ("train", "validation", "evaluation"):
        texts = [task.prompt(split, i).text for i in range(50)]
        assert texts == [again.prompt(split, i).text for i in range(50)]
        assert seen.isdisjoint(texts)
        seen.update(texts)


@pytest.mark.parametrize(
    ("dataset", "args", "message"),
    [
        ("no_such_dataset", {}, "'reasoning_gym:no_such_dataset' .* cannot be made: .*not registered"),
        ("chain_sum", {"max_term": 3}, "'reasoning_gym:chain_sum' with task.args = {'max_term': 3} .*'max_term'"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "cannot be made: max_terms must be >= min_terms"),
        ("chain_sum", {"size": 0}, "task.args: size = 0 must be between 1 and 1,000,000"),
        ("chain_sum", {"min_terms": "two"}, "'reasoning_gym:chain_sum' .* cannot be made"),
    ],
)
def test_what_reasoning_gym_cannot_make_is_told(make_gym: MakeTask, dataset: str, args: dict[str, Any], message: str):
    with pytest.raises(TaskError, match=message):
        make_gym(dataset, **args)


# Names


def test_countdown_needs_nothing_but_its_name():
    task = make_task(TaskConfig(name="countdown"))
    assert task.verifier == "countdown/1"
    assert task.num_prompts("evaluation") is None
