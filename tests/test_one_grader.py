"""One grader judges all that is compared: a run's evaluations and validations, whatever was mended meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oapl.cli import main
from oapl.engines.embedded import EmbeddedEngine
from oapl.store import RoundFolder, RunFolder
from oapl.store.files import read_json

ALL_WRONG = "def judge(prompts, completions, **columns):\n    return [0.0] * len(completions)\n"
ALL_RIGHT = "def judge(prompts, completions, **columns):\n    return [1.0] * len(completions)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user works: rows that the tiny model reads, and a judge that finds every answer wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("rows", "held_out", "chosen_by"):
        rows = [{"prompt": f"use {i} {i + 1} make 9\n"} for i in range(1, 9)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judges.py").write_text(ALL_WRONG)
    return tmp_path


@pytest.fixture
def recipe(folder: Path, write_recipe: Any) -> Path:
    return write_recipe(
        task={
            "name": "dataset",
            "dataset": "rows.jsonl",
            "eval_dataset": "held_out.jsonl",
            "validation_dataset": "chosen_by.jsonl",
            "reward_funcs": "judges:judge",
        },
        trainer={"num_steps": 4},
        evaluation={"num_prompts": 4, "num_generations": 2},
    )


@pytest.fixture
def run(folder: Path) -> RunFolder:
    return RunFolder(folder / "run")


def train(recipe: Path, *options: str) -> int:
    return main(["train", str(recipe), "--run_dir", "run", *options])


def graders(*folders: RoundFolder) -> set[str]:
    """All who have a say in these rounds: by their description, the shards' seals and the rows."""
    found = {folder.load().verifier for folder in folders}
    for folder in folders:
        found |= {folder.shard_seal(number)["verifier"] for number in folder.stored_shards()}
    return found


def pass_at_1(run: RunFolder) -> tuple[float, float, float]:
    """Before, after, and the difference."""
    summary = read_json(run.summary_path)
    curves = (summary["base"]["pass_at_k"], summary["final"]["pass_at_k"], summary["difference"])
    return tuple(curve["1"][0] for curve in curves)


def texts(folder: RoundFolder) -> list[tuple[str, ...]]:
    return [group.texts for number in folder.stored_shards() for group in folder.read_shard(number).groups]


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_a_reward_mended_before_a_run_goes_on_judges_what_it_was_compared_with(
    recipe: Path, run: RunFolder, folder: Path, capsys: Any, kind: str
):
    """Both judges find all answers alike, so that there is no difference, whatever was trained."""
    assert train(recipe) == 0
    assert pass_at_1(run) == (0.0, 0.0, 0.0)
    before = texts(run.evaluation(0))
    (folder / "judges.py").write_text(ALL_RIGHT)
    assert train(recipe, "--trainer.num_steps", "8", "--launch.kind", kind) == 0
    assert pass_at_1(run) == (1.0, 1.0, 0.0)
    assert len(graders(run.evaluation(0), run.evaluation(2))) == 1
    assert texts(run.evaluation(0)) == before  # nothing was sampled for it
    assert list(run.evaluation(0).path.glob("groups-00000.parquet.aside-1"))
    assert "evaluations/000000 was graded otherwise than the task is now" in capsys.readouterr().out.replace("\n", "")


def test_a_reward_mended_in_the_middle_of_an_evaluation_judges_all_of_it(
    recipe: Path, run: RunFolder, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    write = RoundFolder.write_shard

    def stopped_at_the_third(self: RoundFolder, round: Any, number: int, shard: Any) -> bool:
        if self.path.resolve() == run.evaluation(1).path and number == 2:
            raise KeyboardInterrupt
        return write(self, round, number, shard)

    with monkeypatch.context() as patch:
        patch.setattr(RoundFolder, "write_shard", stopped_at_the_third)
        assert train(recipe) == 130
    assert run.evaluation(1).stored_shards() == [0, 1]
    (folder / "judges.py").write_text(ALL_RIGHT)
    assert train(recipe) == 0
    assert pass_at_1(run) == (1.0, 1.0, 0.0)
    assert len(graders(run.evaluation(0), run.evaluation(1))) == 1


def test_weights_are_chosen_by_one_grader(recipe: Path, run: RunFolder, folder: Path):
    """Were the longer part judged by the new one alone, its first snapshot would be the best."""
    selection = ["--selection.eval_steps", "4", "--selection.num_prompts", "4", "--selection.num_generations", "2"]
    assert train(recipe, *selection) == 0
    (folder / "judges.py").write_text(ALL_RIGHT)
    assert train(recipe, *selection, "--trainer.num_steps", "8") == 0
    assert len(graders(*map(run.validation, (0, 4, 8)), run.evaluation(0))) == 1
    assert read_json(run.summary_path)["selection"] == {
        "step": 0,
        "pass@1": {"0": 1.0, "4": 1.0, "8": 1.0},
        "num_prompts": 4,
    }
    assert pass_at_1(run) == (1.0, 1.0, 0.0)


def test_after_one_of_a_runs_evaluations_was_graded_again_the_run_grades_the_others(
    recipe: Path, run: RunFolder, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    assert train(recipe) == 0
    (folder / "judges.py").write_text(ALL_RIGHT)
    assert main(["eval", "run"]) == 1  # not without being asked to
    assert main(["eval", "run", "--regrade"]) == 0
    assert len(graders(run.evaluation(0), run.evaluation(1))) == 2

    def load(*_: Any) -> None:
        raise AssertionError("grading loads no model")

    monkeypatch.setattr(EmbeddedEngine, "load", load)
    assert train(recipe) == 0
    assert pass_at_1(run) == (1.0, 1.0, 0.0)
    assert len(graders(run.evaluation(0), run.evaluation(1))) == 1


def test_a_finished_run_is_shown_as_it_was_judged(recipe: Path, run: RunFolder, folder: Path):
    assert train(recipe) == 0
    (folder / "judges.py").write_text(ALL_RIGHT)
    assert train(recipe) == 0
    assert pass_at_1(run) == (0.0, 0.0, 0.0)


# A run and an evaluation of it


def test_a_run_at_work_keeps_its_own_evaluations_to_itself(recipe: Path, run: RunFolder, capsys: Any):
    assert train(recipe) == 0
    with run.lock("run"):
        assert main(["eval", "run"]) == 1
        assert "run already has a run at work" in capsys.readouterr().err
        assert main(["eval", "run", "--output_dir", "other"]) == 0  # which is none of its own


def test_an_evaluation_is_not_put_where_something_else_lies(recipe: Path, run: RunFolder, folder: Path, capsys: Any):
    assert train(recipe) == 0
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert main(["eval", "run", "--output_dir", "run"]) == 2
    assert "run is no evaluation, and holds more than notes and logs: checkpoints, " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    (folder / "empty").mkdir()
    assert main(["eval", "run", "--output_dir", "empty"]) == 0


def test_the_answers_of_another_model_do_not_give_way(recipe: Path, run: RunFolder, folder: Path, capsys: Any):
    assert train(recipe) == 0
    assert main(["eval", "run", "--policy", "0", "--output_dir", "out"]) == 0
    seal = (folder / "out" / "sealed.json").read_bytes()
    assert main(["eval", "run", "--policy", "1", "--output_dir", "out"]) == 1
    assert "out holds answers of other weights" in capsys.readouterr().err
    assert (folder / "out" / "sealed.json").read_bytes() == seal


def test_weights_that_a_run_made_anew_are_evaluated_anew(recipe: Path, run: RunFolder, capsys: Any):
    """In the run's own folder, where nothing has the weights of before any more."""
    assert train(recipe) == 0
    described = run.evaluation(1).path / "round.json"
    value = json.loads(described.read_text())
    described.write_text(json.dumps({**value, "policy": {**value["policy"], "digest": "ab" * 32}}))
    assert main(["eval", "run"]) == 0
    assert "holds answers of other weights. Moved to 000001.aside-1" in capsys.readouterr().out
    assert run.evaluation(1).is_complete_of(run.policy(1))


def test_a_damaged_shard_is_answered_again_by_the_same_command(recipe: Path, run: RunFolder, folder: Path, capsys: Any):
    assert train(recipe) == 0
    assert main(["eval", "run", "--output_dir", "out"]) == 0
    out = RoundFolder(folder / "out")
    before, seal = texts(out), read_json(out.path / "sealed.json")
    out.parquet_path(1).write_bytes(b"PAR1")
    (out.path / "round.json").write_text("{")
    capsys.readouterr()
    assert main(["eval", "run", "--output_dir", "out"]) == 0
    shown = capsys.readouterr().out
    assert "does not match its seal" in shown
    assert "round.json cannot be read as JSON" in shown
    assert texts(out) == before
    assert read_json(out.path / "sealed.json")["num_completions"] == seal["num_completions"]


# What the grader reads


def test_corrected_answers_are_another_judgement(folder: Path, tiny_model: Path, capsys: Any):
    """The judge is the same function, and the corrected row is posed as before."""
    (folder / "judges.py").write_text(
        "def judge(prompts, completions, answer, **columns):\n    return [float(a == 'yes') for a in answer]\n"
    )

    def evaluate(output: str, *more: str) -> int:
        own = ["--task.name", "dataset", "--task.eval_dataset", "rows.jsonl", "--task.reward_funcs", "judges:judge"]
        length = ["--evaluation.max_completion_length", "8"]
        return main(["eval", str(tiny_model), *own, *length, "--output_dir", output, *more])

    def write(answers: list[str]) -> None:
        rows = [{"prompt": f"use {i} 2 make 9\n", "answer": answer} for i, answer in enumerate(answers)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(["yes", "no"])
    assert evaluate("before") == 0
    write(["yes", "yes"])
    assert evaluate("before") == 1
    assert "--regrade" in capsys.readouterr().err
    assert evaluate("after") == 0
    assert main(["compare", "before", "after"]) == 0
    assert "not graded by the same" in capsys.readouterr().out
    assert evaluate("before", "--regrade") == 0
    capsys.readouterr()
    assert main(["compare", "before", "after"]) == 0
    assert "not graded by the same" not in capsys.readouterr().out
    assert read_json(folder / "before" / "summary.json")["pass_at_k"]["1"][0] == 1.0
