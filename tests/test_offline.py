"""Recorded rounds: sampled once, trained on for several epochs, by another run, with another loss."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers import flip_a_bit
from oapl.cli import main
from oapl.config import load_recipe
from oapl.plan import shard_of_step
from oapl.store import RunFolder


def command(name: str, recipe: Path, run: RunFolder, *options: str) -> int:
    return main([name, str(recipe), "--run_dir", str(run.path), *options])


def weights(run: RunFolder, version: int) -> dict[str, object]:
    return load_file(run.policy_path(version) / "model.safetensors")


def assert_equal_weights(a: RunFolder, b: RunFolder, version: int) -> None:
    left, right = weights(a, version), weights(b, version)
    assert left.keys() == right.keys()
    assert all((left[name] == right[name]).all() for name in left)


@pytest.fixture
def recorded(tmp_path: Path, write_recipe) -> RunFolder:
    """One round of 4 shards, sampled from the model itself and not trained on."""
    run = RunFolder(tmp_path / "recorded")
    assert command("sample", write_recipe(trainer={"num_steps": 4}), run) == 0
    assert run.round(0).is_sealed()
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_every_epoch_goes_through_every_shard_once_and_in_another_order(write_recipe):
    recipe = load_recipe(write_recipe(trainer={"num_steps": 60, "weight_sync_steps": 30, "num_epochs": 3}))
    orders = [[shard_of_step(recipe, 1, epoch * 10 + place) for place in range(10)] for epoch in range(3)]
    assert orders[0] == list(range(10))  # as they land
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_epochs_train_each_group_that_often(write_recipe, run: RunFolder):
    recipe = write_recipe(trainer={"num_steps": 12, "weight_sync_steps": 6, "num_epochs": 3})
    assert command("train", recipe, run) == 0
    for index in range(2):
        assert run.round(index).load().num_shards == 2
    steps = Counter(record["round"] for record in run.metrics())
    assert steps == {0: 6, 1: 6}


def test_training_on_recorded_rounds_is_training_on_ones_own(
    write_recipe, recorded: RunFolder, run: RunFolder, tmp_path, capsys
):
    """Round 0 copied from a run of the same policy, the others sampled: the weights agree to the last bit."""
    own, recipe = RunFolder(tmp_path / "own"), write_recipe()
    assert command("train", recipe, own) == 0
    assert command("train", recipe, run, "--launch.rounds_from", str(recorded.path)) == 0
    assert run.round(0).is_imported()
    assert not run.round(1).is_imported()
    assert_equal_weights(own, run, 3)
    capsys.readouterr()
    assert main(["inspect", str(run.path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:3] for row in rows if row[:2] in (["0", "other"], ["1", "1"])] == [
        ["0", "other", "run's"],
        ["1", "1", "4/4"],
    ]


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_another_loss_trains_on_the_same_rounds(write_recipe, recorded: RunFolder, run: RunFolder, kind: str):
    recipe = write_recipe(trainer={"num_steps": 8, "weight_sync_steps": 8, "num_epochs": 2}, loss={"kind": "grpo"})
    assert command("train", recipe, run, "--launch.rounds_from", str(recorded.path), "--launch.kind", kind) == 0
    assert len(run.metrics()) == 8
    assert all("clip_share" in record for record in run.metrics())


def test_a_run_on_recorded_rounds_resumes(write_recipe, recorded: RunFolder, run: RunFolder, tmp_path):
    """Also where a checkpoint is lost, and the first epoch's shards are needed again."""
    options = ("--launch.rounds_from", str(recorded.path))
    recipe = write_recipe(trainer={"num_steps": 8, "weight_sync_steps": 8, "num_epochs": 2, "save_steps": 3})
    whole = RunFolder(tmp_path / "whole")
    assert command("train", recipe, whole, *options) == 0
    assert command("train", recipe, run, *options) == 0
    run.summary_path.unlink()
    run.remove_checkpoint(8)
    flip_a_bit(run.round(0).parquet_path(1))
    assert command("train", recipe, run, *options) == 0
    assert_equal_weights(whole, run, 1)


def test_recorded_rounds_heal_once_more_where_all_checkpoints_are_damaged_too(
    write_recipe, recorded: RunFolder, run: RunFolder, tmp_path
):
    """Then training begins again with the first round, of which the run's own copy has lost a shard."""
    options, recipe = ("--launch.rounds_from", str(recorded.path)), write_recipe(trainer={"num_steps": 8})
    whole = RunFolder(tmp_path / "whole")
    for each in (whole, run):
        assert command("train", recipe, each, *options) == 0
    run.summary_path.unlink()
    for step in run.checkpoint_steps():
        flip_a_bit(next(path for path in run.checkpoint_path(step).iterdir() if path.suffix == ".safetensors"))
    flip_a_bit(run.round(0).parquet_path(1))
    assert command("train", recipe, run, *options) == 0
    assert_equal_weights(whole, run, 2)


def test_recorded_rounds_are_copied_not_shared(write_recipe, recorded: RunFolder, run: RunFolder):
    before = {path: path.read_bytes() for path in recorded.path.rglob("*") if path.is_file()}
    recipe = write_recipe(trainer={"num_steps": 4})
    assert command("train", recipe, run, "--launch.rounds_from", str(recorded.path)) == 0
    assert {path: path.read_bytes() for path in recorded.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sampling": {"temperature": 0.5}}, "recorded with sampling.temperature = 1.0, the recipe asks for 0.5"),
        ({"trainer": {"prompts_per_step": 4}}, "recorded with trainer.prompts_per_step = 2, the recipe asks for 4"),
        ({"trainer": {"num_epochs": 2}}, "trainer.num_epochs = 4, the recipe asks for 2"),
    ],
)
def test_rounds_that_do_not_fit_are_refused(
    write_recipe, recorded: RunFolder, run: RunFolder, capsys, sections, message
):
    assert command("train", write_recipe(**sections), run, "--launch.rounds_from", str(recorded.path)) == 2
    assert message in capsys.readouterr().err


def test_the_other_run_may_go_once_its_rounds_are_copied(write_recipe, recorded: RunFolder, run: RunFolder, capsys):
    recipe, options = write_recipe(trainer={"num_steps": 4}), ("--launch.rounds_from", str(recorded.path))
    assert command("train", recipe, run, *options) == 0
    shutil.rmtree(recorded.path)
    assert command("train", recipe, run, *options) == 0  # shows its summary
    run.summary_path.unlink()
    run.remove_checkpoint(4)
    assert command("train", recipe, run, *options) == 0  # trains again
    run.summary_path.unlink()
    run.remove_checkpoint(4)
    flip_a_bit(run.round(0).parquet_path(2))
    capsys.readouterr()
    assert command("train", recipe, run, *options) == 1
    assert "launch.rounds_from no longer has that round" in capsys.readouterr().err


def test_a_round_that_was_begun_here_is_not_replaced(write_recipe, run: RunFolder, tmp_path: Path):
    """The other run gains its own round 1 while this one has sampled part of its."""
    recipe, other = write_recipe(trainer={"num_steps": 8}), RunFolder(tmp_path / "other")
    assert command("sample", recipe, other, "--loss.beta2", "0.5") == 0
    options = ("--launch.rounds_from", str(other.path))
    assert command("train", recipe, run, *options) == 0
    own = run.round(1).parquet_path(0).read_bytes()
    for path in (run.summary_path, run.round(1).seal_path(1), run.round(1).path / "sealed.json"):
        path.unlink()
    run.remove_checkpoint(8)
    assert command("train", recipe, other, "--loss.beta2", "0.5") == 0
    assert other.round(1).parquet_path(0).read_bytes() != own
    assert command("train", recipe, run, *options) == 0
    assert not run.round(1).is_imported()
    assert run.round(1).parquet_path(0).read_bytes() == own


def test_rounds_of_another_task_are_refused(write_recipe, recorded: RunFolder, run: RunFolder, capsys):
    recipe = write_recipe(task={"args": {"max_numbers": 3}})
    assert command("train", recipe, run, "--launch.rounds_from", str(recorded.path)) == 2
    assert "was recorded with task.args = {}, the recipe asks for {'max_numbers': 3}" in capsys.readouterr().err
    assert not run.config_path.exists()  # nothing is fixed by a start that failed


def test_rounds_of_another_vocabulary_are_refused(
    write_recipe, recorded: RunFolder, run: RunFolder, tiny_model: Path, tmp_path: Path, capsys
):
    """Two of its tokens have changed places, so the recorded ids would be other text."""
    other = tmp_path / "other_model"
    shutil.copytree(tiny_model, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    recipe = write_recipe(model={"name_or_path": str(other)})
    assert command("train", recipe, run, "--launch.rounds_from", str(recorded.path)) == 2
    assert f"was recorded with the tokens of {tiny_model}" in capsys.readouterr().err


def test_the_recorded_runs_model_may_have_moved(write_recipe, recorded: RunFolder, run: RunFolder, tiny_model: Path):
    text = recorded.config_path.read_text()
    recorded.config_path.write_text(text.replace(str(tiny_model), "/nowhere/model"))
    assert command("train", write_recipe(), run, "--launch.rounds_from", str(recorded.path)) == 0


def test_a_folder_without_sealed_rounds_is_refused(write_recipe, run: RunFolder, tmp_path: Path, capsys):
    assert command("train", write_recipe(), run, "--launch.rounds_from", str(tmp_path)) == 2
    assert "holds no sealed round" in capsys.readouterr().err


def test_epochs_must_divide_a_round(write_recipe, run: RunFolder, capsys):
    assert command("train", write_recipe(trainer={"num_epochs": 3}), run) == 2
    assert "num_epochs = 3 must divide weight_sync_steps = 4" in capsys.readouterr().err


def test_a_run_cannot_record_for_itself(write_recipe, recorded: RunFolder, capsys):
    recipe = write_recipe(trainer={"num_steps": 4})
    assert command("train", recipe, recorded, "--launch.rounds_from", str(recorded.path)) == 2
    assert "is the run's own folder" in capsys.readouterr().err


def test_a_pruned_run_has_no_rounds_to_give(write_recipe, recorded: RunFolder, run: RunFolder, capsys):
    recorded.prune()
    assert command("train", write_recipe(), run, "--launch.rounds_from", str(recorded.path)) == 2
    assert "whose rounds were removed. Set the study's keep = 'all'" in capsys.readouterr().err
