"""Which weights a run reports: the last, or those that did best on validation problems."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from helpers import flip_a_bit
from oapl.cli import main
from oapl.config import TaskConfig
from oapl.evaluation import read_scores
from oapl.progress import Progress
from oapl.store import RunFolder
from oapl.store.files import read_json

RECIPE = """
[model]
name_or_path = "builtin:countdown"
[task]
name = "countdown"
[sampling]
num_generations = 4
max_completion_length = 32
[loss]
beta2 = 0.1
[trainer]
num_steps = 12
weight_sync_steps = 4
prompts_per_step = 2
learning_rate = 1e-3
[launch]
kind = "inline"
[evaluation]
num_prompts = 8
num_generations = 4
num_workers = 2
[selection]
eval_steps = 3
num_prompts = 8
num_generations = 8
"""
"""Snapshots after steps 3, 6, 9 and 12, between and at the weight syncs, of a model that is right now and then."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selection") / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def straight(recipe: Path) -> RunFolder:
    """A finished run that nothing happened to."""
    run = RunFolder(recipe.with_name("straight"))
    assert train(recipe, run) == 0
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def finished(straight: RunFolder, run: RunFolder) -> RunFolder:
    """A copy of the finished run."""
    shutil.copytree(straight.path, run.path)
    return run


def train(recipe: Path, run: RunFolder, *options: str) -> int:
    return main(["train", str(recipe), "--run_dir", str(run.path), *options])


def stored_scores(run: RunFolder) -> dict[int, float]:
    """pass@1 by step, counted anew from the stored validations."""
    scores = {}
    for path in sorted((run.path / "validations").iterdir()):
        round = run.validation(int(path.name)).load()
        rewards = [
            reward
            for number in range(round.num_shards)
            for group in run.validation(int(path.name)).read_shard(number).groups
            for reward in group.rewards.tolist()
        ]
        assert all(prompt_id.startswith("validation/") for prompt_id in round.prompt_ids)
        scores[int(path.name)] = sum(reward == 1 for reward in rewards) / len(rewards)
    return scores


def assert_best_is_reported(run: RunFolder) -> None:
    scores = stored_scores(run)
    assert list(scores) == [0, 3, 6, 9, 12]
    assert len(set(scores.values())) > 1
    best = min(step for step in scores if scores[step] == max(scores.values()))
    summary = read_json(run.summary_path)
    assert summary["selection"] == {
        "step": best,
        "pass@1": {str(step): scores[step] for step in scores},
        "num_prompts": 8,
    }
    assert summary["final"]["step"] == best
    final = run.selected(best)
    assert final.load().policy == run.snapshot(best)
    assert final.load().prompt_ids == tuple(f"evaluation/{i}" for i in range(8))
    assert summary["final"]["pass_at_k"]["1"][0] == pytest.approx(
        read_scores(final, TaskConfig(name="countdown")).pass_at(1).mean()
    )
    assert not run.evaluation(3).is_open()  # the last policy is not reported
    evaluated = [path.name for path in (run.path / "selected").glob("*")]
    assert evaluated == ([f"{best:06d}"] if best else [])


def test_the_weights_that_are_reported_did_best_on_the_validation_problems(straight: RunFolder):
    assert_best_is_reported(straight)
    assert {"base", "difference"} < read_json(straight.summary_path).keys()


def test_processes_report_the_best_as_well_and_need_no_base_evaluation_for_it(recipe: Path, run: RunFolder):
    assert train(recipe, run, "--launch.kind", "processes", "--evaluation.eval_on_start", "false") == 0
    assert_best_is_reported(run)
    assert not {"base", "difference"} & read_json(run.summary_path).keys()


def test_a_snapshot_is_a_plain_model_and_that_of_a_sync_is_the_policy(finished: RunFolder):
    AutoModelForCausalLM.from_pretrained(finished.snapshot_path(3))
    snapshot, policy = finished.snapshot(12), finished.policy(3)
    assert snapshot is not None
    assert policy is not None
    assert snapshot.digest == policy.digest
    assert finished.checkpoint_steps()[-1] == 12


def test_a_finished_choice_is_shown_again_and_inspected(recipe: Path, finished: RunFolder, capsys):
    before = finished.summary_path.read_bytes()
    assert train(recipe, finished) == 0
    assert finished.summary_path.read_bytes() == before
    assert main(["inspect", str(finished.path), "--groups", "0"]) == 0
    out = capsys.readouterr().out
    assert "snapshots sealed: [3, 6, 9, 12]" in out
    step = read_json(finished.summary_path)["selection"]["step"]
    assert f"chosen: {f'step {step}' if step else 'the model as it came'}, by pass@1" in out


def test_what_is_lost_of_a_choice_is_made_again_to_the_same(recipe: Path, finished: RunFolder, capsys):
    """A shard of a validation, and with it the snapshot that it must be sampled from again."""
    summary = read_json(finished.summary_path)
    flip_a_bit(finished.validation(12).parquet_path(0))
    flip_a_bit(finished.snapshot_path(12) / "model.safetensors")
    assert train(recipe, finished) == 0
    assert read_json(finished.summary_path)["selection"] == summary["selection"]
    assert read_json(finished.summary_path)["final"] == summary["final"]
    assert "000012.aside-1" in capsys.readouterr().out


def test_a_longer_run_chooses_again_among_more(recipe: Path, finished: RunFolder):
    digests = {step: read_json(finished.validation(step).path / "sealed.json") for step in (0, 3, 6, 9, 12)}
    assert train(recipe, finished, "--trainer.num_steps", "24") == 0
    assert list(read_json(finished.summary_path)["selection"]["pass@1"]) == [str(3 * i) for i in range(9)]
    assert digests == {step: read_json(finished.validation(step).path / "sealed.json") for step in digests}


def test_a_stopped_run_makes_the_same_snapshots_and_the_same_choice(
    recipe: Path, straight: RunFolder, run: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    show = Progress.step

    def stop(self: Progress, record: Mapping[str, Any]) -> None:
        show(self, record)
        if record["step"] == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "step", stop)
        assert train(recipe, run) == 130
    assert train(recipe, run) == 0
    assert [run.snapshot(step) for step in (3, 6, 9, 12)] == [straight.snapshot(step) for step in (3, 6, 9, 12)]
    mine, theirs = read_json(run.summary_path), read_json(straight.summary_path)
    assert (mine["selection"], mine["final"]) == (theirs["selection"], theirs["final"])
    assert not list(run.path.rglob("*.aside-*"))


# Without an evaluation of the model as it came


def test_without_the_base_evaluation_there_is_a_result_and_no_difference(write_recipe, run: RunFolder, capsys):
    recipe = write_recipe(evaluation={"eval_on_start": False})
    assert train(recipe, run) == 0
    summary = read_json(run.summary_path)
    assert summary["final"]["step"] == 12
    assert not {"base", "difference", "selection"} & summary.keys()
    assert not run.evaluation(0).is_open()
    out = capsys.readouterr().out
    assert "after" in out
    assert "before" not in out
    assert (run.path / "pass_at_k.png").read_bytes().startswith(b"\x89PNG")
    assert main(["inspect", str(run.path)]) == 0
    assert main(["eval", str(run.path), "--policy", "0"]) == 0
    assert run.evaluation(0).is_complete_of(run.policy(0))


def test_the_model_as_it_came_is_reported_where_it_did_best(write_recipe, run: RunFolder):
    """No answer of a model of random weights is right, so that all steps are equal and the earliest is chosen."""
    selection = {"eval_steps": 6, "num_prompts": 4, "num_generations": 4}
    assert train(write_recipe(selection=selection, evaluation={"eval_on_start": False}), run) == 0
    summary = read_json(run.summary_path)
    assert summary["selection"]["step"] == summary["final"]["step"] == 0
    assert run.evaluation(0).is_complete_of(run.policy(0))
    assert not (run.path / "selected").exists()


def test_validation_problems_that_cannot_be_sampled_are_told_before_anything_is(
    recipe: Path, run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name, prompt in (("rows", "use 1 2 make 3\n"), ("long", "1" * 200)):
        Path(f"{name}.jsonl").write_text(f"{json.dumps({'prompt': prompt})}\n" * 2)
    Path("rewards.py").write_text("def one(prompts, completions, **columns):\n    return [1.0] * len(completions)\n")
    words = "--task.name dataset --task.dataset rows.jsonl --task.reward_funcs rewards:one"
    assert train(recipe, run, *words.split(), "--task.validation_dataset", "long.jsonl") == 1
    assert "prompt validation/0 has 200 tokens" in capsys.readouterr().err
    assert not run.evaluation(0).stored_shards()
