"""`oapl plan`: rates from a run folder or from options, the layouts that are tried, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from helpers import make_group, make_round, make_shard
from oapl.cli import main
from oapl.config import PlanConfig, dump_recipe, load_plan, load_recipe
from oapl.errors import ConfigError
from oapl.planning import layout_of, splits_of, trainer_speed
from oapl.rates import Measurement, Span, given_lengths, rate_alone, rates_of, slowdown_of
from oapl.store import RoundFolder, RunFolder
from oapl.store.files import write_json

GIVEN = {"sampler_tokens_per_s": 100.0, "trainer_tokens_per_s": 50.0, "completion_tokens": 5.0, "policy_gib": 2.0}


@pytest.fixture
def recipe_path(write_recipe) -> Path:
    """Two rounds of 4 steps of one prompt with 2 completions, which fill the engine."""
    return write_recipe(
        sampling={"num_generations": 2},
        trainer={"num_steps": 8, "weight_sync_steps": 4, "prompts_per_step": 1},
        engine={"max_num_seqs": 2},
        launch={"kind": "processes"},
    )


def set_time(folder: RoundFolder, shard: int, moment: float) -> None:
    write_json(folder.seal_path(shard), {**folder.shard_seal(shard), "time": moment})


@pytest.fixture
def run(recipe_path: Path, tmp_path: Path) -> RunFolder:
    """Such a run, by the clock: a shard takes 1.5 s, 0.25 s of it for grading, and is stored 2 s after the one before;
    a step takes 0.5 s, but for the first; after the first round 0.7 s for saving and 3.5 s of waiting."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config_path.write_text(dump_recipe(load_recipe(recipe_path)))
    policy = run.publish_policy(0, 0, lambda path: (path / "model.safetensors").write_bytes(b"x" * 1000) and None)
    run.write_checkpoint(4, lambda path: (path / "model.safetensors").write_bytes(b"x" * 4000) and None)
    for index in range(2):
        folder, round = run.round(index), make_round(index, policy, num_shards=4)
        folder.open(round)
        for number in range(4):
            folder.write_shard(round, number, make_shard([make_group(number, [0, 1])]))
            moment = 1e9 + 100 * index + 2 * number
            set_time(folder, number, moment)
    for step in range(1, 9):
        run.append_metrics(
            {
                "step": step,
                "round": (step - 1) // 4,
                "num_tokens": 2,
                "time": 2e9 + step,
                "step_s": 9.0 if step == 1 else 0.5,
                "wait_s": 3.5 if step == 5 else 0.0,
                "save_s": 0.7 if step == 5 else 0.0,
            }
        )
    return run


# Rates


def test_a_run_shows_its_rates(run: RunFolder):
    rates = Measurement(run).rates()
    assert rates["sampler_tokens_per_s"] == pytest.approx(2 / 1.25)
    assert rates["trainer_tokens_per_s"] == pytest.approx(2 / 0.5)  # without the first step, which warms up
    assert rates["save_s"] == 0.7
    assert rates["sync_s"] == pytest.approx(3.5 - 1.5)  # what was waited beyond the first shard's own time
    assert rates["grading_s"] == pytest.approx((0.25 + (2 - 1.5)) / 2)  # storing counts, two completions a shard
    assert rates["policy_bytes"] == 1000 + (run.policy_path(0) / "sealed.json").stat().st_size
    assert Measurement(run).lengths == [1] * 16


def test_a_gap_in_which_a_run_was_stopped_is_not_storing(run: RunFolder):
    set_time(run.round(1), 3, 2e9)
    assert Measurement(run).rates()["grading_s"] == pytest.approx((0.25 + 0.5) / 2)


def test_sides_that_slow_each_other_are_told_from_slow_ones():
    """Alone a unit of work takes either side 1 s; beside the other 1.6."""
    steps = [Span(100, 10, 10), Span(200, 8, 8 / 1.6)]
    blocks = [Span(200, 8, 8 / 1.6), Span(300, 8, 8)]
    assert [step.overlap(blocks) for step in steps] == [0, 1]
    assert slowdown_of(steps, blocks) == pytest.approx(1.6)
    assert slowdown_of(blocks, steps) == pytest.approx(1.6)
    assert rate_alone(steps, blocks, 1.6) == pytest.approx(1)
    assert slowdown_of(steps[:1], blocks) is None  # which says nothing of the other case


def test_with_gpus_for_each_side_they_do_not_slow_each_other(run: RunFolder, recipe_path: Path):
    moved = [{**record, "time": 1e9 + record["step"]} for record in run.metrics()]
    run.metrics_path.unlink()
    for record in moved:
        run.append_metrics(record)
    assert Measurement(run).rates()["shared_slowdown"] >= 1
    rates, told = rates_of(load_recipe(recipe_path), PlanConfig(gpus=4), run)
    assert rates.shared_slowdown == 1
    assert told[-1] == "sampler and trainer slow each other by 1.00 times (by default)"


def test_options_win_over_what_a_run_shows(run: RunFolder, recipe_path: Path):
    recipe = load_recipe(recipe_path)
    rates, told = rates_of(recipe, PlanConfig(step_s=0.25, sync_s=9.0, storage_gib_per_s=2.0), run)
    assert rates.trainer_tokens_per_s == pytest.approx(2 * 1 / 0.25)
    assert (rates.sync_s, rates.save_s, rates.storage_bytes_per_s) == (9.0, 0.7, 2 * 2**30)
    assert "given" in told[1]
    assert f"measured in {run.path}" in told[0]


def test_an_engine_of_more_rows_is_faster_by_what_does_not_grow_with_them(run: RunFolder, recipe_path: Path):
    recipe = load_recipe(recipe_path, {"engine": {"max_num_seqs": 4}})  # twice the run's

    def rate(share: float) -> float:
        return rates_of(recipe, PlanConfig(engine_fixed_share=share), run)[0].sampler_tokens_per_s

    assert [rate(share) for share in (0, 1, 0.5)] == pytest.approx([1.6, 2 * 1.6, 2 / 1.5 * 1.6])


def test_a_checkpoint_is_weights_and_two_moments_in_float32(recipe_path: Path):
    rates, _ = rates_of(load_recipe(recipe_path), PlanConfig(**GIVEN))
    assert (rates.policy_bytes, rates.checkpoint_bytes) == (2 * 2**30, 3 * 2 * 2**30)
    halves = load_recipe(recipe_path, {"trainer": {"bf16": True}})
    assert rates_of(halves, PlanConfig(**GIVEN))[0].checkpoint_bytes == 6 * 2 * 2**30


def test_the_size_of_a_policy_follows_from_the_model(recipe_path: Path):
    given = {name: value for name, value in GIVEN.items() if name != "policy_gib"}
    rates, told = rates_of(load_recipe(recipe_path), PlanConfig(**given))
    assert 4 * 19_000 < rates.policy_bytes < 4 * 25_000  # 20 thousand weights
    assert "from the model's shape" in told[-2]


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 3.0])
def test_lengths_that_are_drawn_have_the_mean_that_was_asked_for(spread: float):
    lengths = given_lengths(PlanConfig(completion_tokens=3000, completion_spread=spread), 16384)
    assert np.mean(lengths) == pytest.approx(3000, rel=1e-3)
    assert min(lengths) >= 1
    assert max(lengths) <= 16384
    if 0 < spread <= 0.3:  # hardly one is cut
        assert np.std(lengths) / np.mean(lengths) == pytest.approx(spread, rel=0.05)


def test_lengths_may_come_from_a_file(tmp_path: Path):
    path = tmp_path / "lengths"
    path.write_text("3\n1\n2\n")
    assert given_lengths(PlanConfig(lengths_file=path), 3) == [3, 1, 2]
    with pytest.raises(ConfigError, match="'3' is no length from 1 to sampling"):
        given_lengths(PlanConfig(lengths_file=path), 2)


# Layouts


def test_a_layout_is_cut_as_the_recipe_is(recipe_path: Path):
    recipe = load_recipe(recipe_path, {"trainer": {"num_epochs": 2}, "engine": {"max_num_seqs": 256}})
    layout = layout_of(recipe)
    assert (layout.num_rounds, layout.steps_per_round, layout.shards_per_round) == (2, 4, 2)
    assert (layout.rows_per_shard, layout.shards_per_block) == (2, 1)  # at most a quarter of the round


def test_a_budget_is_split_until_nothing_is_left():
    splits = splits_of(PlanConfig(gpus=16, gpus_per_sampler=4), 1)
    assert [(split.num_samplers, split.trainer_gpus) for split in splits] == [(1, 12), (2, 8), (3, 4)]
    many = splits_of(PlanConfig(gpus=1000), 8)
    assert all(split.num_samplers * 8 + split.trainer_gpus == 1000 for split in many)
    assert len(many) == 32
    assert (many[0].num_samplers, many[-1].num_samplers) == (1, 124)


def test_named_numbers_take_their_part_of_the_budget_and_all_is_paid_for():
    (split,) = splits_of(PlanConfig(gpus=10, gpus_per_sampler=4, trainer_gpus=(3,)), 1)
    assert (split.num_samplers, split.trainer_gpus, split.gpus) == (1, 3, 10)


def test_without_a_budget_all_pairs_are_tried():
    splits = splits_of(PlanConfig(samplers=(1, 2), trainer_gpus=(4, 8)), 2)
    assert [(split.num_samplers, split.trainer_gpus, split.gpus) for split in splits] == [
        (1, 4, 6),
        (1, 8, 10),
        (2, 4, 8),
        (2, 8, 12),
    ]


def test_a_budget_that_leaves_a_side_nothing_is_refused():
    with pytest.raises(ConfigError, match="--gpus 8 does not do for 2 samplers of 4 and a trainer of 1"):
        splits_of(PlanConfig(gpus=8, samplers=(2,)), 4)
    with pytest.raises(ConfigError, match="--gpus 1 does not do"):
        splits_of(PlanConfig(gpus=1), 1)


def test_twice_the_gpus_are_twice_as_fast_times_the_efficiency():
    plan = PlanConfig(measured_gpus=8, scaling_efficiency=0.9)
    assert [trainer_speed(gpus, plan) for gpus in (8, 16, 32)] == pytest.approx([1, 1.8, 1.8**2])
    assert trainer_speed(4, plan) == pytest.approx(1 / 1.8)


# The command


def test_the_best_split_of_a_budget_comes_first_and_all_are_written(recipe_path: Path, tmp_path: Path, capsys):
    output = tmp_path / "out" / "plan"
    output.parent.mkdir()
    rates = tmp_path / "rates.toml"
    rates.write_text("\n".join(f"{name} = {value}" for name, value in GIVEN.items()) + "\ngpus = 6\n")
    command = ["plan", str(recipe_path), "--rates", str(rates), "--output", str(output), "--rounds_ahead", "0,1"]
    assert main([*command, "--weight_sync_steps", "2,4", "--gpus", "5"]) == 0
    found = json.loads(output.with_name("plan.json").read_text())
    layouts = found["layouts"]
    assert len(layouts) == 2 * 2 * 4
    assert {layout["gpus"] for layout in layouts} == {5}  # the option, not the file's 6
    walls = [layout["wall_s"] for layout in layouts]
    assert walls[0] <= 1.005 * min(walls)
    assert output.with_name("plan.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert f"best: {layouts[0]['num_samplers']} sampler(s), {layouts[0]['trainer_gpus']} GPU(s)" in printed


def test_a_measured_run_is_planned_on(run: RunFolder, recipe_path: Path, tmp_path: Path, capsys):
    """8 blocks of 2 s and 8 steps of 0.5 s in two rounds: the sampler sets the pace."""
    command = ["plan", str(recipe_path), "--from_run", str(run.path), "--output", str(tmp_path / "plan")]
    assert main(command) == 0
    (layout,) = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    assert layout["wall_s"] == pytest.approx(2 * (2.0 + 4 * 2 + 0.5 + 0.7))  # load, sample, last step, save
    assert main([*command, "--best_by", "gpu_hours", "--samplers", "1,4"]) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["layouts"][0]["num_samplers"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give --completion_tokens, or --lengths_file, and --sampler_tokens_per_s and --trainer_tokens_per_s"),
        ({"step_s": "-1"}, "--step_s = '-1': input should be greater than 0"),
        ({"sampler_tokens_per_s": "inf"}, "--sampler_tokens_per_s = 'inf': input should be a finite number"),
        ({"samplers": "1,x"}, "--samplers = 'x': input should be a valid integer"),
        ({"rounds_ahead": "2"}, "--rounds_ahead = '2': input should be less than or equal to 1"),
        ({"step_s": "1", "trainer_tokens_per_s": "1"}, "trainer_tokens_per_s and step_s say the same"),
        ({"gpus": "8", "samplers": "1", "trainer_gpus": "1"}, "give samplers or trainer_gpus, not both"),
        ({**GIVEN, "weight_sync_steps": "3"}, "num_steps = 8 must be a multiple of weight_sync_steps = 3"),
        ({**GIVEN, "completion_tokens": "99"}, "beyond sampling.max_completion_length = 10"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_told(options: dict[str, object], message: str, recipe_path: Path, capsys):
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["plan", str(recipe_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_shows_no_rates_is_refused(run: RunFolder, recipe_path: Path, tmp_path: Path, capsys):
    assert main(["plan", str(recipe_path), "--from_run", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    run.metrics_path.unlink()
    assert main(["plan", str(recipe_path), "--from_run", str(run.path)]) == 2
    assert "A run of one round does" in capsys.readouterr().err


def test_a_file_of_rates_is_checked_by_name(tmp_path: Path):
    path = tmp_path / "rates.toml"
    path.write_text("stepp_s = 1\n")
    with pytest.raises(ConfigError, match=r"rates\.toml: stepp_s is not known to `oapl plan`"):
        load_plan({}, path)
