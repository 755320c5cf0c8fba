"""`oapl eval` on files and benchmarks, killed and resumed, graded again; `oapl compare`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import make_completion, make_group, make_round, make_shard
from oapl.cli import main
from oapl.config import Recipe, TaskConfig, load_recipe
from oapl.diagnostics import shard_metrics
from oapl.evaluation import majority, paired_test, read_scores, score_shards
from oapl.roles import model_ref
from oapl.sampler import Sampler
from oapl.store import RoundFolder
from oapl.tasks.countdown import Countdown
from oapl.types import FailedGroup, Group, PolicyRef, Round, Verdict

JUDGES = '''\
import os, time

def echo(prompts, completions, **columns):
    """1 for completions of an even length."""
    time.sleep(float(os.environ.get("GRADING_S", "0")))
    return [float(len(completion) % 2 == 0) for completion in completions]

def broken(prompts, completions, **columns):
    raise RuntimeError("the judge is ill")

def sick(prompts, completions, **columns):
    if os.path.exists("ill"):
        raise RuntimeError("the judge is ill")
    return echo(prompts, completions)

def odd(prompts, completions, **columns):
    return [float(len(completion) % 2) for completion in completions]
'''
LENGTH = ["--evaluation.max_completion_length", "8"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder a user works in: problems the tiny model can read, and judges."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "judges.py").write_text(JUDGES)
    rows = [{"problem": f"use {i} 2 make 9\n", "answer": str(i)} for i in range(6)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def eval_arguments(model: Path, *more: str, judge: str = "echo") -> list[str]:
    own = ["--task.prompt_template", "{problem}", "--task.reward_funcs", f"judges:{judge}"]
    return ["eval", str(model), "--data", "problems.jsonl", *own, *LENGTH, *more]


def texts(folder: RoundFolder) -> dict[int, tuple[str, ...]]:
    shards = [folder.read_shard(number) for number in folder.stored_shards()]
    found = {group.position: group.texts for shard in shards for group in shard.groups}
    return found | {f.position: f.sampled.texts for shard in shards for f in shard.failed if f.sampled is not None}


# Evaluations without a recipe


def test_a_file_is_evaluated_without_a_recipe(folder: Path, tiny_model: Path, capsys: Any):
    assert main(eval_arguments(tiny_model, "--output_dir", "out")) == 0
    output = RoundFolder(folder / "out")
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert (summary["num_prompts"], summary["num_generations"]) == (6, 4)  # all rows, four samples by default
    assert summary["problems"] == "problems.jsonl"
    lengths = [len(text) for group in texts(output).values() for text in group]
    assert summary["pass_at_k"]["1"][0] == pytest.approx(np.mean([length % 2 == 0 for length in lengths]))
    assert "mean@4" in capsys.readouterr().out


def test_a_benchmark_takes_its_rows_from_a_file(folder: Path, tiny_model: Path, capsys: Any):
    arguments = ["--task.prompt_template", "{problem}", *LENGTH]
    assert main(["eval", str(tiny_model), "--benchmark", "aime_2025", "--data", "problems.jsonl", *arguments]) == 0
    (made,) = (folder / "evaluations").glob("*-aime_2025")
    summary = json.loads((made / "summary.json").read_text())
    assert summary["verifier"].startswith("math/")
    assert summary["cons_at_n"][0] == 0.0  # nothing boxed, so nobody voted
    assert "cons@4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say on what: a recipe, --benchmark NAME, --data FILE"),
        (["--benchmark", "aime_1999"], "no benchmark has that name. There are aime_2024"),
        (["--benchmark", "livecodebench@v9"], "releases v1 to v6"),
        (["--benchmark", "aime_2025", "--benchmark", "amc", "--data", "x.jsonl"], "are for one benchmark"),
    ],
)
def test_what_cannot_be_evaluated_is_told(
    folder: Path, tiny_model: Path, capsys: Any, arguments: list[str], message: str
):
    assert main(["eval", str(tiny_model), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_is_evaluated_on_other_problems_and_not_on_those_its_weights_were_chosen_by(
    folder: Path, write_recipe: Any, capsys: Any
):
    (folder / "chosen.jsonl").write_text((folder / "problems.jsonl").read_text())
    (folder / "held_out.jsonl").write_text((folder / "problems.jsonl").read_text())
    (folder / "others.jsonl").write_text((folder / "problems.jsonl").read_text())
    recipe = write_recipe(
        task={
            "name": "math",
            "dataset": "problems.jsonl",
            "eval_dataset": "held_out.jsonl",
            "validation_dataset": "chosen.jsonl",
            "prompt_template": "{problem}",
            "reward_funcs": ["judges:echo"],
        },
        trainer={"num_steps": 2, "weight_sync_steps": 2},
        selection={"eval_steps": 2, "num_prompts": 2, "num_generations": 2},
    )
    assert main(["train", str(recipe), "--run_dir", "run"]) == 0
    arguments = ["--task.prompt_template", "{problem}"]
    assert main(["eval", "run", "--benchmark", "amc", "--data", "others.jsonl", *arguments]) == 0
    (made,) = (folder / "run" / "benchmarks" / "amc").glob("step-*")
    chosen = json.loads((folder / "run" / "summary.json").read_text())["selection"]["step"]
    assert json.loads((made / "summary.json").read_text())["model"] == f"run, step {chosen} (chosen)"
    assert main(["eval", "run", "--policy", "1", "--benchmark", "amc", "--data", "others.jsonl", *arguments]) == 0
    assert (folder / "run" / "benchmarks" / "amc" / "policy-1" / "summary.json").exists()
    for name in ("run", "run/policies/000001"):
        for seen, how in (("chosen.jsonl", "chosen by"), ("problems.jsonl", "trained on")):
            for asked in (["--data", seen], ["--benchmark", "amc", "--data", seen]):
                capsys.readouterr()
                assert main(["eval", name, *asked]) == 2
                assert f"weights were {how} these problems" in capsys.readouterr().err
    assert main(["eval", "run", "--task.eval_dataset", "problems.jsonl"]) == 2
    assert "weights were trained on these problems" in capsys.readouterr().err


# Nothing is sampled twice


def fill_noting(recipe: Recipe, model: Path, stored: RoundFolder, round: Round, sampled: list[int]) -> None:
    """Fills the round, and notes for each call of the engine how many prompts it was asked."""
    sampler = Sampler(recipe, lambda _: model)
    generate = sampler.engine.generate
    sampler.engine.generate = lambda r, p: sampled.append(len(r)) or generate(r, p)
    try:
        sampler.fill(stored, round)
    finally:
        sampler.close()


def test_what_was_sampled_is_graded_after_a_failure_and_not_sampled_again(
    folder: Path, write_recipe: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = load_recipe(write_recipe(trainer={"weight_sync_steps": 4}, engine={"max_num_seqs": 16}))
    round = make_round(0, PolicyRef(0, 0, "digest"), num_shards=4, num_generations=4)
    stored = RoundFolder(folder / "round")
    sampled: list[int] = []
    grade = Countdown.grade

    def fill() -> None:
        fill_noting(recipe, tiny_model, stored, round, sampled)

    def fail_at_the_third(self: Countdown, prompt: Any, completions: Any) -> Any:
        if prompt.id == "train/2":
            raise KeyboardInterrupt
        return grade(self, prompt, completions)

    monkeypatch.setattr(Countdown, "grade", fail_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        fill()
    assert stored.stored_shards() == [0, 1]
    assert sampled == [1, 1, 1]
    monkeypatch.setattr(Countdown, "grade", grade)
    fill()
    assert sampled == [1, 1, 1, 1]  # the third was not sampled again, only the fourth
    assert stored.is_sealed()
    assert not list(stored.path.glob("draft-*"))


def test_an_evaluation_killed_at_any_moment_goes_on_and_keeps_what_it_had(folder: Path, tiny_model: Path):
    """SIGKILL after ever longer times, until it ends by itself; grading is slow enough to be hit."""
    more = ["--output_dir", "out", "--engine.max_num_seqs", "8"]
    command = [sys.executable, "-m", "oapl", *eval_arguments(tiny_model, *more)]
    environment = {**os.environ, "GRADING_S": "0.4", "OMP_NUM_THREADS": "1"}
    output = RoundFolder(folder / "out")
    kept: dict[str, bytes] = {}
    patience, code = 4.0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()
        code = process.returncode
        for path, data in kept.items():
            assert Path(path).read_bytes() == data  # what was stored once is what it stays
        kept = {str(path): path.read_bytes() for path in output.path.glob("groups-*")}
        patience += 1.0
    assert code == 0
    assert patience > 6.0  # it was killed several times
    assert output.is_sealed()
    assert sorted(texts(output)) == list(range(6))


def test_two_evaluations_do_not_share_a_folder(folder: Path, tiny_model: Path, capsys: Any):
    command = [sys.executable, "-m", "oapl", *eval_arguments(tiny_model, "--output_dir", "out")]
    environment = {**os.environ, "GRADING_S": "3", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while not (folder / "out" / "round.json").exists():
            time.sleep(0.05)
        assert main(eval_arguments(tiny_model, "--output_dir", "out")) == 1
        process.kill()
    assert "out already has a sampler at work" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        ["--task.prompt_template", "now {problem}"],
        ["--task.system_prompt", "Be brief."],
        ["--evaluation.temperature", "0.5"],
        ["--seed", "1"],
    ],
)
def test_a_folder_is_not_taken_for_an_evaluation_with_other_settings(
    folder: Path, tiny_model: Path, capsys: Any, change: list[str]
):
    assert main(eval_arguments(tiny_model, "--output_dir", "out")) == 0
    before = (folder / "out" / "config.toml").read_text()
    arguments = ["eval", str(tiny_model), "--data", "problems.jsonl", *LENGTH, "--output_dir", "out"]
    own = {"--task.prompt_template": "{problem}", "--task.reward_funcs": "judges:echo", change[0]: change[1]}
    assert main([*arguments, *(word for pair in own.items() for word in pair)]) == 1
    assert "than asked for now" in capsys.readouterr().err
    assert (folder / "out" / "config.toml").read_text() == before  # a refused command leaves no trace


def test_one_grader_judges_all_of_an_evaluation(folder: Path, tiny_model: Path, capsys: Any):
    assert main(eval_arguments(tiny_model, "--output_dir", "out")) == 0
    assert main(eval_arguments(tiny_model, "--output_dir", "out", judge="odd")) == 1
    assert "was graded by judges:echo/" in capsys.readouterr().err


def test_a_mended_judge_grades_all_of_what_was_begun(
    folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """Killed after two shards; then another grader goes on."""
    output, write = RoundFolder(folder / "out"), RoundFolder.write_shard

    def killed_at_the_third(self: RoundFolder, round: Any, number: int, shard: Any) -> None:
        if number == 2:
            raise KeyboardInterrupt
        write(self, round, number, shard)

    with monkeypatch.context() as patch:
        patch.setattr(RoundFolder, "write_shard", killed_at_the_third)
        assert main(eval_arguments(tiny_model, "--output_dir", "out")) == 130
    begun = texts(output)
    assert sorted(begun) == [0, 1]
    assert main(eval_arguments(tiny_model, "--output_dir", "out", judge="odd")) == 0
    odd = {p: sum(len(text) % 2 for text in group) for p, group in texts(output).items()}
    assert dict(read_scores(output, TaskConfig(name="countdown")).num_correct) == odd
    assert {p: group for p, group in texts(output).items() if p in begun} == begun


def test_fewer_completions_at_once_take_up_what_more_had_sampled(
    folder: Path, write_recipe: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    """A block of two shards, stopped in its grading; then blocks of one."""
    round = make_round(0, PolicyRef(0, 0, "digest"), num_shards=8, num_generations=4)
    stored = RoundFolder(folder / "round")
    grade, sampled = Countdown.grade, []

    def fill(max_num_seqs: int) -> None:
        recipe = load_recipe(write_recipe(trainer={"weight_sync_steps": 4}, engine={"max_num_seqs": max_num_seqs}))
        fill_noting(recipe, tiny_model, stored, round, sampled)

    def interrupted(self: Countdown, prompt: Any, completions: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Countdown, "grade", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(8)
    monkeypatch.setattr(Countdown, "grade", grade)
    fill(4)
    assert sampled == [2, 1, 1, 1, 1, 1, 1]  # two at once, then the six that were left
    assert sorted(texts(stored)) == list(range(8))
    assert not list(stored.path.glob("draft-*"))


def test_a_bad_row_among_very_many_fails_alone(folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("oapl.sampler.MAX_CHECKED", 1)
    rows = (folder / "problems.jsonl").read_text().splitlines()
    rows[3] = json.dumps({"problem": "use 1 2 make 3\n", "answer": None})
    (folder / "problems.jsonl").write_text("\n".join(rows))
    arguments = ["--task.prompt_template", "{problem}", *LENGTH, "--output_dir", "out"]
    assert main(["eval", str(tiny_model), "--data", "problems.jsonl", *arguments]) == 0
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert (summary["num_prompts"], summary["num_failed"]) == (5, 1)


def test_a_second_ctrl_c_ends_a_long_grading_at_once(folder: Path, tiny_model: Path):
    command = [sys.executable, "-m", "oapl", *eval_arguments(tiny_model, "--output_dir", "out")]
    environment = {**os.environ, "GRADING_S": "600", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while not list((folder / "out").glob("draft-*.json")):
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(signal.SIGINT)  # the one at hand is not waited for either: its samples are kept
        assert process.wait(30) == 130
    assert list((folder / "out").glob("draft-*.json"))


# Grading again


def test_what_could_not_be_graded_is_kept_and_graded_once_the_judge_is_well(
    folder: Path, tiny_model: Path, capsys: Any
):
    ill = eval_arguments(tiny_model, "--output_dir", "out", judge="broken")
    assert main(ill) == 1
    assert "the judge is ill" in capsys.readouterr().err
    assert main(eval_arguments(tiny_model, "--output_dir", "out")) == 0
    assert sorted(texts(RoundFolder(folder / "out"))) == list(range(6))


def test_samples_are_graded_again_by_another_reward_with_nothing_sampled(
    folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    output = RoundFolder(folder / "out")
    assert main(eval_arguments(tiny_model, "--output_dir", "out")) == 0
    before, even = texts(output), read_scores(output, TaskConfig(name="countdown"))

    def load(*_: Any) -> None:
        raise AssertionError("grading loads no model")

    monkeypatch.setattr("oapl.engines.embedded.EmbeddedEngine.load", load)
    again = eval_arguments(tiny_model, "--output_dir", "out", "--regrade", judge="odd")
    assert main(again) == 0
    odd = read_scores(output, TaskConfig(name="countdown"))
    assert texts(output) == before
    assert {p: 4 - count for p, count in even.num_correct.items()} == dict(odd.num_correct)  # every verdict turned over
    assert json.loads((output.path / "summary.json").read_text())["verifier"].startswith("judges:odd/")
    assert list(output.path.glob("groups-00000.parquet.aside-1"))  # what it said before
    assert output.load().verifier.startswith("judges:odd/")
    assert output.is_sealed()


@pytest.mark.parametrize("kill_at", ["write_regraded", "adopt", "seal"])
def test_a_regrade_killed_anywhere_leaves_old_verdicts_or_new_and_never_both(
    folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, kill_at: str
):
    output = RoundFolder(folder / "out")
    assert main(eval_arguments(tiny_model, "--output_dir", "out")) == 0
    before, even = texts(output), read_scores(output, TaskConfig(name="countdown"))
    again = eval_arguments(tiny_model, "--output_dir", "out", "--regrade", judge="odd")
    count = 0

    def killed(*_: Any, **__: Any) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if kill_at == "write_regraded":
            write = RoundFolder.write_regraded
            patch.setattr(RoundFolder, "write_regraded", lambda *a: killed() or write(*a))
        elif kill_at == "adopt":
            aside = RoundFolder.set_shard_aside
            patch.setattr(RoundFolder, "set_shard_aside", lambda *a: aside(*a) or killed())
        else:
            count = 2
            patch.setattr(RoundFolder, "seal", killed)
        assert main(again) == 130
    # Plain commands go on from there: one judge's verdicts stand, and the other is told so.
    codes = {judge: main(eval_arguments(tiny_model, "--output_dir", "out", judge=judge)) for judge in ("echo", "odd")}
    assert codes == ({"echo": 0, "odd": 1} if kill_at == "write_regraded" else {"echo": 1, "odd": 0})
    found = dict(read_scores(output, TaskConfig(name="countdown")).num_correct)
    turned = {p: 4 - count for p, count in even.num_correct.items()}
    assert found == (dict(even.num_correct) if kill_at == "write_regraded" else turned)
    assert texts(output) == before
    assert main(again) == 0
    odd = read_scores(output, TaskConfig(name="countdown"))
    assert {p: 4 - count for p, count in even.num_correct.items()} == dict(odd.num_correct)
    assert texts(output) == before
    seal = json.loads((output.path / "sealed.json").read_text())
    assert (seal["num_groups"], seal["num_completions"]) == (6, 24)


def test_a_broken_judge_leaves_the_old_verdicts(folder: Path, tiny_model: Path, capsys: Any):
    output = RoundFolder(folder / "out")
    assert main(eval_arguments(tiny_model, "--output_dir", "out")) == 0
    even = read_scores(output, TaskConfig(name="countdown"))
    assert main(eval_arguments(tiny_model, "--output_dir", "out", "--regrade", judge="broken")) == 1
    assert "the judge is ill" in capsys.readouterr().err
    assert output.is_sealed()
    assert read_scores(output, TaskConfig(name="countdown")) == even


def test_what_an_ill_judge_failed_is_not_kept_for_the_next_time(folder: Path, tiny_model: Path):
    """Each of the six shards is one problem, so each fails whole, until the judge is given up."""
    arguments = eval_arguments(tiny_model, "--output_dir", "out", judge="sick")
    assert main(arguments) == 0
    (folder / "ill").touch()
    assert main([*arguments, "--regrade"]) == 1
    assert not list((folder / "out").glob("regraded-*"))
    (folder / "ill").unlink()
    assert main([*arguments, "--regrade"]) == 0
    assert json.loads((folder / "out" / "summary.json").read_text())["num_failed"] == 0


@pytest.mark.parametrize("change", ["fewer rows", "other problems", "another temperature"])
def test_answers_are_graded_again_by_the_problems_that_they_answer(
    folder: Path, tiny_model: Path, capsys: Any, change: str
):
    assert main(eval_arguments(tiny_model, "--output_dir", "out")) == 0
    before = {path: path.read_bytes() for path in (folder / "out").iterdir() if path.is_file()}
    rows = (folder / "problems.jsonl").read_text()
    more = ["--evaluation.temperature", "0.5"] if change == "another temperature" else []
    if change == "fewer rows":
        rows = "".join(rows.splitlines(keepends=True)[:4])
    elif change == "other problems":
        rows = rows.replace("make 9", "make 8")
    (folder / "problems.jsonl").write_text(rows)
    assert main(eval_arguments(tiny_model, "--output_dir", "out", "--regrade", *more, judge="odd")) == 1
    assert "planned with other" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (folder / "out").iterdir() if path.is_file()} == before


def test_grading_again_needs_a_complete_evaluation(folder: Path, tiny_model: Path, capsys: Any):
    assert main(eval_arguments(tiny_model, "--output_dir", "out", "--regrade")) == 1
    assert "out" in capsys.readouterr().err


# Scores


def vote(*answers: tuple[str | None, bool]) -> float:
    group = make_group(0, [float(is_right) for _, is_right in answers])
    verdicts = [Verdict(float(is_right), answer) for answer, is_right in answers]
    return majority(Group.of(group.without_verdicts(), verdicts), [is_right for _, is_right in answers])


def test_the_majority_is_right_where_the_most_frequent_answer_is():
    assert vote(("7", True), ("8", False), ("7", True)) == 1.0
    assert vote(("7", True), ("8", False), ("8", False)) == 0.0


def test_right_answers_are_one_answer_however_written_and_wrong_ones_are_told_apart():
    # 1/2 and 0.5 together have two votes, 2 and 3 one each.
    assert vote(("1/2", True), ("0.5", True), ("2", False), ("3", False)) == 1.0
    assert vote(("1/2", True), ("0.5", True), ("2 ", False), ("2", False), ("2", False)) == 0.0


def test_a_tie_is_broken_by_lot_and_who_has_no_answer_does_not_vote():
    assert vote(("7", True), ("8", False)) == 0.5
    assert vote((None, False), (None, False), ("7", True)) == 1.0
    assert vote((None, False), (None, False)) == 0.0


def test_with_rewards_added_to_it_the_grader_says_what_is_right():
    """Two right answers, of which one is long and so earns less than the wrong one that is brief."""
    group = make_group(0, [0.4, 1.0, 0.5])
    scores = ({"math": 1.0, "r:brief": -0.6}, {"math": 1.0, "r:brief": 0.0}, {"math": 0.0, "r:brief": 0.5})
    verdicts = [Verdict(reward, scores=score) for reward, score in zip(group.rewards.tolist(), scores, strict=True)]
    shard = make_shard([Group.of(group.without_verdicts(), verdicts)])
    task = TaskConfig(name="math", dataset="x.jsonl", reward_funcs=["math", "r:brief"])
    assert task.judged_by == "math"
    assert dict(score_shards([shard], PolicyRef(0, 0, "d"), 3, task).num_correct) == {0: 2}
    assert shard_metrics(shard, task.success_threshold, task.judged_by)["success"] == pytest.approx(2 / 3)
    assert TaskConfig(name="math", dataset="x.jsonl").judged_by is None  # then the reward is the grader's own


def test_the_paired_test_counts_sign_flips_at_least_as_far_from_zero():
    # Of the 2^4 sign flips of (1, 1, 1, 1) / 4 only two have a mean of size 1: p = 2 / 16.
    assert paired_test(np.ones(4)) == pytest.approx(2 / 16, abs=0.01)
    # Any flip of (1, -1) has a mean of size 0 or 1, and all are at least 0 away.
    assert paired_test(np.array([1.0, -1.0])) == 1.0
    # Forty problems all better by 1/4: 2 in 2^40.
    assert paired_test(np.full(40, 0.25)) < 0.001


# Side by side


@pytest.fixture
def two_evaluations(folder: Path, tiny_model: Path) -> list[str]:
    for seed in ("0", "1"):
        assert main(eval_arguments(tiny_model, "--output_dir", f"out{seed}", "--seed", seed)) == 0
    return ["out0", "out1"]


def test_evaluations_are_compared_with_a_paired_test_a_table_and_a_picture(
    folder: Path, two_evaluations: list[str], capsys: Any
):
    assert main(["compare", *two_evaluations, "--output", "seeds-0.1"]) == 0
    printed = capsys.readouterr().out
    assert "pass@4" in printed
    assert "paired over 6 problems" in printed
    result = json.loads((folder / "seeds-0.1.json").read_text())
    first, second = (read_scores(RoundFolder(folder / name), TaskConfig(name="countdown")) for name in two_evaluations)
    assert result["difference"]["pass_at_k"]["1"]["difference"][0] == pytest.approx(
        second.pass_at(1).mean() - first.pass_at(1).mean()
    )
    assert [each["name"] for each in result["evaluations"]] == two_evaluations  # one model, so the folders tell
    assert (folder / "seeds-0.1.png").read_bytes().startswith(b"\x89PNG")


def test_another_threshold_of_what_is_right_is_told(folder: Path, tiny_model: Path, capsys: Any):
    for threshold in ("0.5", "1"):
        arguments = eval_arguments(tiny_model, "--output_dir", f"above{threshold}")
        assert main([*arguments, "--task.success_threshold", threshold]) == 0
    capsys.readouterr()
    assert main(["compare", "above0.5", "above1"]) == 0
    told = "not right by the same: above0.5: reward at least 0.5; above1: reward at least 1.0"
    assert told in capsys.readouterr().out


def test_weights_of_every_kind_of_file_tell_models_apart(tmp_path: Path):
    refs = set()
    for name, text in (("model.safetensors", "a"), ("pytorch_model.bin", "b"), ("pytorch_model.bin", "c")):
        path = tmp_path / text
        path.mkdir()
        (path / name).write_text(text)
        refs.add(model_ref(str(path)).digest)
    assert refs == {hashlib.sha256(text.encode()).hexdigest() for text in "abc"}  # of one file, its own


def test_answers_to_other_problems_are_not_compared(
    folder: Path, tiny_model: Path, two_evaluations: list[str], capsys: Any
):
    lines = (folder / "problems.jsonl").read_text().replace("make 9", "make 8")
    (folder / "problems.jsonl").write_text(lines)  # the same name and number, other problems
    assert main(eval_arguments(tiny_model, "--output_dir", "out2")) == 0
    assert main(["compare", two_evaluations[0], "out2"]) == 2
    assert "only answers to the same prompts can be compared" in capsys.readouterr().err


def test_what_is_no_evaluation_is_told(folder: Path, capsys: Any):
    assert main(["compare", "nowhere"]) == 2
    assert "nowhere is not a complete evaluation" in capsys.readouterr().err


def test_failed_groups_keep_their_samples_in_the_store(folder: Path):
    round = make_round(0, PolicyRef(0, 0, "d"), num_shards=1, prompts_per_shard=2)
    stored = RoundFolder(folder / "round")
    stored.open(round)
    group = make_group(1, [0.0, 1.0], completions=[make_completion([5, 6]), make_completion([7])])
    failed = FailedGroup(1, "train/1", "it hung", group.without_verdicts())
    stored.write_shard(round, 0, make_shard([make_group(0, [1.0, 0.0])], [failed]))
    shard = stored.read_shard(0)
    (failed,) = shard.failed
    assert failed.cause == "it hung"
    assert failed.sampled is not None
    assert [c.token_ids.tolist() for c in failed.sampled.completions] == [[5, 6], [7]]
    assert [group.position for group in shard.groups] == [0]
    assert shard.num_completions == 2  # of those that count
