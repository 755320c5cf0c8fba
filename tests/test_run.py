"""Whole runs from the command line: what they leave behind, what they refuse, and what they mend."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import flip_a_bit
from oapl.cli import main
from oapl.processes import stop_on_signal
from oapl.progress import Progress
from oapl.store import RunFolder
from oapl.store.files import read_json
from oapl.types import PolicyRef


def train(recipe: Path, run: RunFolder, *options: str) -> int:
    return main(["train", str(recipe), "--run_dir", str(run.path), *options])


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def finished(write_recipe, run: RunFolder, capsys) -> RunFolder:
    assert train(write_recipe(), run) == 0
    capsys.readouterr()
    return run


def test_a_run_ends_with_a_summary_a_picture_and_a_table(write_recipe, run: RunFolder, capsys):
    assert train(write_recipe(), run) == 0
    summary = read_json(run.summary_path)
    for name in ("base", "final", "difference"):
        curve = summary["difference"] if name == "difference" else summary[name]["pass_at_k"]
        assert list(curve) == ["1", "2", "4"]
        assert all(low <= mean <= high for mean, low, high in curve.values())
    assert summary["num_completions"] == 12 * 2 * 4
    assert summary["seed"] == 0
    assert summary["wall_s"] > 0
    assert (run.path / "pass_at_k.png").read_bytes().startswith(b"\x89PNG")
    assert "pass@k" in capsys.readouterr().out


def test_the_same_command_on_a_finished_run_shows_its_result_again(finished: RunFolder, write_recipe, capsys):
    before = finished.summary_path.read_bytes()
    assert train(write_recipe(), finished) == 0
    assert finished.summary_path.read_bytes() == before
    assert "pass@k" in capsys.readouterr().out


def test_a_policy_is_a_plain_hugging_face_model(finished: RunFolder):
    path = finished.policy_path(3)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    ids = tokenizer("use 4 9 2 make 30\n", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_groups_are_readable_with_pandas_alone(finished: RunFolder):
    rows = pd.concat(pd.read_parquet(path) for path in sorted((finished.path / "rounds").glob("*/*.parquet")))
    assert len(rows) == 12 * 2 * 4
    assert rows.groupby(["round", "position"]).size().eq(4).all()
    assert (rows["token_ids"].map(len) == rows["logprobs"].map(len)).all()
    assert set(rows["policy_version"]) == {0, 1, 2}


def test_each_round_is_sampled_from_the_policy_before_it_and_the_lag_stays_below_l(finished: RunFolder):
    assert [finished.round(index).load().policy.version for index in finished.round_indices()] == [0, 1, 2]
    assert [record["lag"] for record in finished.metrics()] == [0, 1, 2, 3] * 3


def test_one_round_ahead_lags_up_to_twice_as_much(write_recipe, run: RunFolder):
    assert train(write_recipe(launch={"rounds_ahead": 1}), run) == 0
    assert [run.round(index).load().policy.version for index in run.round_indices()] == [0, 0, 1]
    assert [record["lag"] for record in run.metrics()] == [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]


def test_the_first_step_of_a_round_has_log_ratios_of_zero(finished: RunFolder):
    """The engine's log-probs are the trainer's, and every weight came over at the sync."""
    firsts = [record for record in finished.metrics() if record["lag"] == 0]
    assert [record["log_ratio"] for record in firsts] == pytest.approx([0, 0, 0], abs=1e-3)
    assert all(record["mismatch"] < 1e-4 for record in finished.metrics())


def test_seeds_train_on_different_problems_and_are_evaluated_on_the_same(write_recipe, tmp_path: Path):
    runs = [RunFolder(tmp_path / f"seed{seed}") for seed in (0, 1)]
    for seed, run in enumerate(runs):
        assert train(write_recipe(), run, "--seed", str(seed)) == 0
    trained = [set(run.round(0).load().prompt_ids) for run in runs]
    assert not trained[0] & trained[1]
    assert runs[0].evaluation(0).load().prompt_ids == runs[1].evaluation(0).load().prompt_ids


def test_a_finished_run_can_be_made_longer(finished: RunFolder, write_recipe):
    assert train(write_recipe(), finished, "--trainer.num_steps", "16") == 0
    assert finished.policy_versions() == [0, 1, 2, 3, 4]
    summary = read_json(finished.summary_path)
    assert summary["num_steps"] == 16
    assert summary["final"]["policy_version"] == 4


def test_a_run_cannot_be_made_shorter_than_it_is(finished: RunFolder, write_recipe, capsys):
    message = refusal(write_recipe(), finished, capsys, "--trainer.num_steps", "8")
    assert "has been trained for 12 steps, more than trainer.num_steps = 8. Give at least 12" in message


def test_dry_run_prints_the_resolved_recipe_and_makes_nothing(write_recipe, run: RunFolder, capsys):
    assert train(write_recipe(), run, "--dry_run", "--loss.beta2", "0.25") == 0
    assert "beta2 = 0.25" in capsys.readouterr().out
    assert not run.path.exists()


# Your own data


REWARD = """
def length(prompts, completions, wanted, **columns):
    return [-abs(len(completion) - w) / 10 for completion, w in zip(completions, wanted)]

def flaky(prompts, completions, wanted, **columns):
    if prompts[0].startswith("use 2"):
        raise RuntimeError("no verdict on twos")
    return length(prompts, completions, wanted)

def broken(prompts, completions, **columns):
    raise RuntimeError("always")

def nan(prompts, completions, **columns):
    return [float("nan")] * len(completions)

def short(prompts, completions, **columns):
    return [1.0]

def hang(prompts, completions, **columns):
    import time
    time.sleep(600)
"""


@pytest.fixture
def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A JSONL of 12 prompts and a file of reward functions in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    rows = [{"prompt": f"use {i} {i + 1} make 9\n", "wanted": 4 + i % 3} for i in range(1, 13)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def task(function: str, **settings: object) -> dict[str, object]:
        return {
            "name": "dataset",
            "dataset": "rows.jsonl",
            "eval_dataset": "rows.jsonl",
            "reward_funcs": f"my_rewards:{function}",
            **settings,
        }

    return task


def test_own_rows_and_real_valued_rewards_train(write_recipe, run: RunFolder, own_task):
    recipe = write_recipe(task=own_task("length", success_threshold=-0.2))
    assert train(recipe, run) == 0
    rewards = {g.rewards.tobytes() for n in range(4) for g in run.round(0).read_shard(n).groups}
    assert len(rewards) > 1
    visited = [i for index in run.round_indices() for i in run.round(index).load().prompt_ids]
    assert len(visited) == 24
    assert set(visited[:12]) == set(visited[12:]) == {f"train/{i}" for i in range(12)}  # two whole epochs


def test_groups_that_cannot_be_graded_are_recorded_and_left_out(write_recipe, run: RunFolder, own_task, capsys):
    recipe = write_recipe(
        task=own_task("flaky"), trainer={"prompts_per_step": 12, "num_steps": 4, "weight_sync_steps": 2}
    )
    assert train(recipe, run) == 0
    seal = run.round(0).shard_seal(0)
    (failed,) = seal["failed"]
    assert "RuntimeError: no verdict on twos (my_rewards.py, line 7)" in failed["cause"]
    assert seal["num_groups"] == 11
    assert {record["num_completions"] for record in run.metrics()} == {44}
    assert "1 groups failed grading" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", "8 groups in a row could not be graded, the last (evaluation/7) because my_rewards:broken raised"),
        ("nan", "because my_rewards:nan returned nan for completion 0: not finite"),
        ("short", "my_rewards:short returned 1 rewards for 4 completions; it must return one for each"),
        ("hang", "because my_rewards:hang took longer than task.reward_timeout_s = 0.2 s and its process was killed"),
        ("absent", "reward function my_rewards:absent cannot be imported: AttributeError"),
    ],
)
def test_a_reward_function_that_never_works_stops_the_run_at_once(
    write_recipe, run: RunFolder, own_task, capsys, function: str, message: str
):
    recipe = write_recipe(task=own_task(function, reward_timeout_s=0.2), evaluation={"num_prompts": 12})
    assert train(recipe, run) == 1
    assert message in capsys.readouterr().err


def test_a_failed_reward_function_loses_nothing_once_mended(write_recipe, run: RunFolder, own_task, tmp_path: Path):
    """It begins to fail after the first shards of round 0."""
    trap = "    if open('calls', 'a').write('.') and len(open('calls').read()) > 8: raise OSError('worn out')\n"
    limited = REWARD.replace("    return [-abs", trap + "    return [-abs")
    recipe = write_recipe(task=own_task("length"))
    (tmp_path / "my_rewards.py").write_text(limited)
    assert train(recipe, run) == 1
    stored = {number: run.round(0).shard_seal(number)["digest"] for number in run.round(0).stored_shards()}
    assert stored
    (tmp_path / "my_rewards.py").write_text(REWARD)
    assert train(recipe, run) == 0
    assert stored.items() <= {n: run.round(0).shard_seal(n)["digest"] for n in range(4)}.items()
    rows = pd.concat(pd.read_parquet(path) for path in (run.path / "rounds").glob("*/*.parquet"))
    assert rows["verifier"].nunique() == 2  # the mended function is another version


def test_an_evaluation_stopped_by_a_broken_reward_is_whole_once_mended(
    write_recipe, run: RunFolder, own_task, tmp_path
):
    """Single problems fail before the run gives up; none of them is to be missing afterwards."""
    recipe = write_recipe(task=own_task("length"), evaluation={"num_prompts": 12})
    (tmp_path / "my_rewards.py").write_text(REWARD.replace("/ 10 for", "/ 0 for"))
    assert train(recipe, run) == 1
    (tmp_path / "my_rewards.py").write_text(REWARD)
    assert train(recipe, run) == 0
    assert read_json(run.summary_path)["base"]["num_failed"] == 0


def test_a_child_process_ends_the_run_with_its_own_error(write_recipe, run: RunFolder, own_task, capsys):
    recipe = write_recipe(task=own_task("short"), launch={"kind": "processes"})
    assert train(recipe, run) == 1
    assert "TaskError: my_rewards:short returned 1 rewards for 4 completions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("beta2", "warning"),
    [(1e-3, "so little hardly holds the policy"), (0.1, "loss.beta2 times"), (1.0, "so much lets the policy learn")],
)
def test_a_beta2_that_does_not_fit_the_answers_is_warned_of(
    write_recipe, run: RunFolder, capsys, beta2: float, warning: str
):
    """Answers of about 20 nats: 1e-3 x 20 = 0.02 is little, 0.1 x 20 = 2 is well, 1 x 20 is much."""
    assert train(write_recipe(loss={"beta2": beta2}), run) == 0
    output = capsys.readouterr().out
    assert (warning in output) == (beta2 != 0.1)


# What is refused


def refusal(recipe: Path, run: RunFolder, capsys, *options: str) -> str:
    assert train(recipe, run, *options) in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", ["sdap", "flash_attention_2"])
def test_an_attention_that_is_not_there_is_named(write_recipe, run: RunFolder, capsys, kind: str):
    message = refusal(write_recipe(model={"attn_implementation": kind}), run, capsys)
    assert f"model.attn_implementation = '{kind}' cannot be used here: " in message


def test_a_missing_model_is_named(write_recipe, run: RunFolder, capsys):
    message = refusal(write_recipe(model={"name_or_path": "./no/such/model"}), run, capsys)
    assert "model.name_or_path = './no/such/model': its model cannot be loaded. Give a folder, a name" in message


def test_a_folder_that_holds_other_things_is_no_place_for_a_run(write_recipe, run: RunFolder, capsys):
    run.path.mkdir()
    for name in ("train.log", "recipe.toml", "thesis.tex"):
        (run.path / name).touch()
    assert main(["train", str(write_recipe()), "--run_dir", str(run.path)]) == 2
    assert (
        "run is no run, and holds more than notes and logs: thesis.tex. Name a new folder as --run_dir."
        in capsys.readouterr().err
    )
    (run.path / "thesis.tex").unlink()
    assert main(["train", str(write_recipe()), "--run_dir", str(run.path)]) == 0


def test_a_file_is_no_run_folder(write_recipe, run: RunFolder, capsys):
    run.path.touch()
    assert main(["train", str(write_recipe()), "--run_dir", str(run.path)]) == 1
    assert f"{run.path} is a file, and not a folder. Choose another run_dir." in capsys.readouterr().err


def test_the_last_step_is_told_however_short_the_run(write_recipe, run: RunFolder, capsys):
    assert main(["train", str(write_recipe()), "--run_dir", str(run.path)]) == 0
    assert "step 12/12" in capsys.readouterr().out


def test_a_folder_that_is_no_model_is_named(write_recipe, run: RunFolder, capsys, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    message = refusal(write_recipe(model={"name_or_path": str(tmp_path / "empty")}), run, capsys)
    assert "The folder must hold a Hugging Face model" in message


def test_a_prompt_longer_than_the_context_is_named_before_sampling(
    write_recipe, run: RunFolder, own_task, capsys, tmp_path: Path
):
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "1" * 60, "wanted": 1}) + "\n")
    message = refusal(write_recipe(task=own_task("length")), run, capsys)
    assert "prompt train/12 has 60 tokens, which with max_completion_length = 10 passes the model's context" in message
    assert not run.round_indices()


def test_prompts_that_the_model_cannot_read_are_refused(write_recipe, run: RunFolder, capsys):
    recipe = write_recipe(task={"name": "reasoning_gym:chain_sum", "args": {"max_terms": 2, "max_digits": 1}})
    recipe.write_text(recipe.read_text().replace("max_completion_length = 10", "max_completion_length = 1"))
    assert "tokens are unknown to its tokenizer (<unk>)" in refusal(recipe, run, capsys)


def test_a_first_try_that_made_nothing_does_not_bind_the_next(write_recipe, run: RunFolder, capsys):
    refusal(write_recipe(model={"name_or_path": "./no/such/model"}), run, capsys)
    assert train(write_recipe(), run) == 0


def test_settings_of_every_kind_can_be_given_on_the_command_line(write_recipe, run: RunFolder, capsys):
    assert train(write_recipe(), run, "--dry_run", "--launch.rounds_ahead", "1", "--trainer.bf16", "true") == 0
    out = capsys.readouterr().out
    assert "rounds_ahead = 1" in out
    assert "bf16 = true" in out


def test_a_damaged_summary_is_made_again(finished: RunFolder, write_recipe, capsys):
    curve = read_json(finished.summary_path)["final"]
    cut_short(finished.summary_path)
    assert main(["inspect", str(finished.path)]) == 0
    assert "cannot be read as JSON" in capsys.readouterr().out
    assert train(write_recipe(), finished) == 0
    assert read_json(finished.summary_path)["final"] == curve


def test_a_run_folder_of_another_recipe_is_refused(finished: RunFolder, write_recipe, capsys):
    message = refusal(write_recipe(), finished, capsys, "--loss.beta2", "0.2")
    assert "holds a run with other settings (loss.beta2: 0.1 -> 0.2)" in message
    assert "Restore the settings to continue it" in message


def test_a_folder_in_which_nothing_was_sampled_may_be_removed(write_recipe, run: RunFolder, capsys):
    """A setting that could not work is mended, and would be refused as another run's."""
    recipe = write_recipe()
    assert "passes the model's context" in refusal(recipe, run, capsys, "--evaluation.max_completion_length", "1000")
    message = refusal(recipe, run, capsys)
    assert "(evaluation.max_completion_length: 1000 -> None)" in message
    assert "Nothing was sampled in it yet: remove the folder, or choose another run_dir." in message


def test_cuda_without_a_gpu_is_refused(write_recipe, run: RunFolder, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "sees no CUDA device here" in refusal(write_recipe(trainer={"device": "cuda"}), run, capsys)


def signalled(number: int, done: list[int]) -> None:
    """Works under `stop_on_signal`, and notes that it ends, when a SIGTERM comes and then another signal."""
    with stop_on_signal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set()
        os.kill(os.getpid(), number)
        done.append(number)


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_second_sigterm_lets_the_work_at_hand_end_and_a_ctrl_c_does_not(number: int, ends: bool):
    """A batch system signals every process of a job, and torchrun passes on to its ranks what it gets."""
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        signalled(number, done)
    assert bool(done) == ends


# What is mended: each damage below happens to a run that was stopped in the middle of its second round


@pytest.fixture
def stopped(write_recipe, run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys) -> RunFolder:
    """A run told to stop after 6 of 12 steps: two shards of round 1 are trained, all four are sampled."""
    show = Progress.step

    def stop_at_six(self: Progress, record: Mapping[str, Any]) -> None:
        show(self, record)
        if record["step"] == 6:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "step", stop_at_six)
    assert train(write_recipe(), run) == 130
    monkeypatch.undo()
    assert run.checkpoint_steps()[-1] == 6
    capsys.readouterr()
    return run


@pytest.fixture
def undisturbed(write_recipe, tmp_path: Path) -> PolicyRef:
    """The last policy of a run that nothing happened to."""
    run = RunFolder(tmp_path / "undisturbed")
    assert train(write_recipe(), run) == 0
    policy = run.policy(3)
    assert policy is not None
    return policy


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def contents(run: RunFolder) -> set[bytes]:
    """Of every file among the rounds, policies and evaluations, whatever its name."""
    folders = (run.path / "rounds", run.path / "policies", run.path / "evaluations")
    return {path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


DAMAGES = {
    "a flipped bit in a shard still to be trained": (
        ["rounds/000001/groups-00003.parquet"],
        flip_a_bit,
        "sampled again",
    ),
    "a shard cut short": (["rounds/000001/groups-00002.parquet"], cut_short, "sampled again"),
    "a shard's seal cut short": (["rounds/000001/groups-00002.json"], cut_short, "sampled again"),
    "a round's description cut short": (["rounds/000001/round.json"], cut_short, "round.json.aside-1"),
    "a flipped bit in the newest checkpoint": (["checkpoints/000006/model.safetensors"], flip_a_bit, "000006.aside-1"),
    "a checkpoint cut short": (["checkpoints/000006/optimizer.safetensors"], cut_short, "000006.aside-1"),
    "a checkpoint's seal cut short": (["checkpoints/000006/sealed.json"], cut_short, "000006.aside-1"),
    "a flipped bit in an evaluation": (["evaluations/000000/groups-00001.parquet"], flip_a_bit, "sampled again"),
    "the base policy's seal cut short": (["policies/000000/sealed.json"], cut_short, "000000.aside-1"),
    "a trained round's description cut short": (["rounds/000000/round.json"], cut_short, ""),
    "a trained shard cut short": (["rounds/000001/groups-00001.parquet"], cut_short, ""),
    "a policy and a shard it must sample again": (
        ["policies/000001/model.safetensors", "rounds/000001/groups-00003.parquet"],
        flip_a_bit,
        "Policy 1 is made again from step 4",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_set_aside_and_made_good(
    stopped: RunFolder, undisturbed: PolicyRef, write_recipe, capsys, damage: str
):
    names, harm, message = DAMAGES[damage]
    for name in names:
        harm(stopped.path / name)
    damaged = contents(stopped)
    assert train(write_recipe(), stopped) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert message in out
    assert stopped.policy(3) == undisturbed
    for name in (name for name in names if name.startswith("rounds/") and message):
        assert (stopped.path / name).with_name(f"{Path(name).name}.aside-1").exists()
    assert damaged <= contents(stopped)  # moved, never deleted


def test_shards_that_are_gone_from_a_sealed_round_are_sampled_again(
    stopped: RunFolder, undisturbed: PolicyRef, write_recipe
):
    """As after a kill between the steps that set a damaged shard aside."""
    stopped.round(1).seal_path(3).unlink()
    assert train(write_recipe(), stopped) == 0
    assert stopped.policy(3) == undisturbed
    assert stopped.round(1).is_sealed()


def test_the_base_policy_is_made_again_where_it_is_gone(stopped: RunFolder, undisturbed: PolicyRef, write_recipe):
    digest = stopped.policy(0)
    shutil.rmtree(stopped.policy_path(0))
    assert train(write_recipe(), stopped) == 0
    assert stopped.policy(0) == digest
    assert stopped.policy(3) == undisturbed


def test_a_last_policy_damaged_before_its_evaluation_is_made_again(finished: RunFolder, write_recipe):
    policy = finished.policy(3)
    shutil.rmtree(finished.evaluation(3).path)
    flip_a_bit(finished.policy_path(3) / "model.safetensors")
    assert train(write_recipe(), finished) == 0
    assert finished.policy(3) == policy
    assert finished.evaluation(3).is_complete_of(finished.policy(3))


def test_a_policy_that_cannot_be_made_again_is_an_error_that_says_so(stopped: RunFolder, write_recipe, capsys):
    flip_a_bit(stopped.path / "policies/000001/model.safetensors")
    flip_a_bit(stopped.path / "rounds/000001/groups-00003.parquet")
    stopped.remove_checkpoint(4)
    assert train(write_recipe(), stopped) == 1
    message = capsys.readouterr().err
    assert "policies/000001/model.safetensors does not match its seal" in message
    assert "there is no checkpoint of step 4 to make it from again" in message


def test_a_damaged_policy_that_no_round_needs_is_left_alone(stopped: RunFolder, undisturbed: PolicyRef, write_recipe):
    flip_a_bit(stopped.path / "policies/000001/model.safetensors")
    assert train(write_recipe(), stopped) == 0
    assert stopped.policy(3) == undisturbed


# The other commands


def test_inspect_tells_what_is_there(finished: RunFolder, capsys):
    assert main(["inspect", str(finished.path)]) == 0
    out = capsys.readouterr().out
    assert "step 12 of 12" in out
    assert "policies sealed: [0, 1, 2, 3]" in out
    for word in ("wall s", "sample s", "train s", "overlap", "completion", "reward"):
        assert word in out


def test_inspect_refuses_what_is_no_run(tmp_path: Path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert "is not a run folder" in capsys.readouterr().err


def test_sample_alone_fills_what_it_can_and_train_uses_it(write_recipe, run: RunFolder, capsys):
    recipe = write_recipe()
    assert main(["sample", str(recipe), "--run_dir", str(run.path)]) == 0
    assert f"round 1 waits for policy 1: `oapl train {recipe} --run_dir {run.path}` makes it" in capsys.readouterr().out
    assert run.round(0).is_sealed()
    digests = read_json(run.round(0).path / "sealed.json")["digests"]
    assert train(recipe, run) == 0
    assert read_json(run.round(0).path / "sealed.json")["digests"] == digests


def test_eval_of_a_run_scores_its_newest_policy_as_the_run_did(finished: RunFolder, capsys):
    assert main(["eval", str(finished.path)]) == 0
    scored = read_json(finished.path / "evaluations" / "000003" / "summary.json")
    assert scored["pass_at_k"] == read_json(finished.summary_path)["final"]["pass_at_k"]
    assert main(["eval", str(finished.path), "--policy", "9"]) == 2
    assert "policy 9 is not among them" in capsys.readouterr().err


def test_eval_of_a_model_needs_a_recipe_and_scores_it_as_a_runs_base(
    finished: RunFolder, write_recipe, tiny_model: Path, tmp_path: Path, capsys
):
    assert main(["eval", str(tiny_model)]) == 2
    assert "say on what: a recipe, --benchmark NAME" in capsys.readouterr().err
    output = tmp_path / "evaluation"
    assert main(["eval", str(tiny_model), str(write_recipe()), "--output_dir", str(output)]) == 0
    base = read_json(finished.summary_path)["base"]["pass_at_k"]
    assert read_json(output / "summary.json")["pass_at_k"] == base


def test_doctor_finds_the_embedded_engine_in_agreement(tiny_model: Path, capsys):
    assert main(["doctor", str(tiny_model)]) == 0
    out = capsys.readouterr().out
    assert "torch" in out
    assert "(good)" in out


def test_tensorboard_gets_the_metrics(write_recipe, run: RunFolder):
    assert train(write_recipe(tracking={"report_to": ["tensorboard"]}), run) == 0
    assert list((run.path / "tensorboard").glob("events.out.tfevents.*"))


def test_a_tracker_that_is_not_installed_is_refused_first(
    write_recipe, run: RunFolder, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)  # whether or not it is installed here
    message = refusal(write_recipe(tracking={"report_to": ["wandb"]}), run, capsys)
    assert "pip install 'oapl[wandb]'" in message
    assert not run.policy_versions()


def test_float32_engines_hold_the_trained_weights_exactly(finished: RunFolder):
    """The probe's gap of every round, in nats a token."""
    gaps = [finished.round(i).shard_seal(0)["mismatch"] for i in finished.round_indices()]
    assert np.max(gaps) < 1e-5
