"""A study: what it asks for, what it refuses, and that it can be stopped and killed without doing anything twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tomli_w

from oapl.cli import main
from oapl.config import Recipe, TaskConfig, load_recipe
from oapl.errors import ConfigError
from oapl.evaluation import read_scores
from oapl.store import RunFolder
from oapl.store.files import read_json
from oapl.study import load_study

StudyWriter = Callable[..., Path]


@pytest.fixture
def write_study(write_recipe, tmp_path: Path) -> StudyWriter:
    """Writes a study of one method and seed 0; keys given take the place of its own, None removes one."""

    def write(**keys: Any) -> Path:
        write_recipe()
        study = {"recipe": "recipe.toml", "seeds": [0], "methods": {"plain": {}}, **keys}
        path = tmp_path / "study.toml"
        path.write_text(tomli_w.dumps({key: value for key, value in study.items() if value is not None}))
        return path

    return write


def study_command(path: Path, *options: str) -> list[str]:
    return ["study", str(path), "--study_dir", str(path.parent / "study"), *options]


def run_folder(path: Path, name: str) -> RunFolder:
    return RunFolder(path.parent / "study" / "runs" / name)


def run_cells(path: Path, *names: str) -> None:
    """Runs cells of a study where it has them, by the command that it would run, but in this process."""
    for cell in load_study(path).cells:
        if cell.name in names or not names:
            recipe_path = path.parent / f"{cell.name}.toml"
            recipe_path.write_text(tomli_w.dumps(cell.recipe.model_dump(mode="json", exclude_none=True)))
            assert main(["train", str(recipe_path), "--run_dir", str(run_folder(path, cell.name).path)]) == 0


def written(path: Path) -> tuple[int, int]:
    """Which file this is, and when it was last written."""
    return path.stat().st_ino, path.stat().st_mtime_ns


def results(path: Path) -> pd.DataFrame:
    return pd.read_csv(path.parent / "study" / "results.csv")


# What a study asks for


def test_every_method_meets_every_combination_of_the_grid_and_every_seed(write_study):
    path = write_study(
        seeds=[0, 3],
        methods={"weak": {"loss": {"beta2": 0.1}}, "strong": {"loss": {"beta2": 1.0}}},
        grid={"trainer.weight_sync_steps": [2, 4], "loss.beta1": [1.0, 5.0]},
    )
    cells = load_study(path).cells
    assert [
        (c.recipe.loss.beta2, c.recipe.trainer.weight_sync_steps, c.recipe.loss.beta1, c.recipe.seed) for c in cells
    ] == [
        (beta2, steps, beta1, seed)
        for beta2 in (0.1, 1.0)
        for steps in (2, 4)
        for beta1 in (1.0, 5.0)
        for seed in (0, 3)
    ]
    assert [cell.name for cell in cells][:3] == ["weak-2-1.0-seed0", "weak-2-1.0-seed3", "weak-2-5.0-seed0"]


def test_a_seed_is_worked_off_before_the_next(write_study):
    path = write_study(seeds=[5, 0], methods={"a": {}, "b": {"loss.beta2": 1.0}})
    assert [cell.name for cell in load_study(path).in_order_of_work()] == ["a-seed5", "b-seed5", "a-seed0", "b-seed0"]


def test_a_run_is_skipped_where_all_entries_of_a_skip_table_match(write_study):
    path = write_study(
        seeds=[0, 1],
        methods={"a": {}, "b": {"loss.beta2": 1.0}},
        grid={"trainer.weight_sync_steps": [2, 4]},
        skip=[{"method": "b", "trainer.weight_sync_steps": 2}, {"method": ["b", "c"], "seed": 1}],
    )
    names = [cell.name for cell in load_study(path).cells]
    assert names == ["a-2-seed0", "a-2-seed1", "a-4-seed0", "a-4-seed1", "b-4-seed0"]


def only_recipe(path: Path) -> Recipe:
    (cell,) = load_study(path).cells
    return cell.recipe


def test_grid_lies_over_method_over_settings_over_one_core_over_recipe(write_study, write_recipe):
    write = {"launch": {"kind": "processes"}, "trainer": {"num_threads": 2, "save_steps": 7}, "engine.num_threads": 2}
    recipe = only_recipe(write_study())
    assert (recipe.trainer.num_steps, recipe.loss.beta2) == (12, 0.1)  # the recipe's
    for settings in (write, {"launch.kind": "processes", "trainer.num_threads": 2, "engine": {"num_threads": 2}}):
        recipe = only_recipe(write_study(settings=settings))
        assert (recipe.launch.kind, recipe.trainer.num_threads, recipe.engine.num_threads) == ("processes", 2, 2)
    path = write_study(
        settings={"loss": {"beta1": 2.0, "beta2": 2.0}, "sampling.temperature": 2.0},
        methods={"one": {"loss": {"beta1": 3.0}, "sampling": {"temperature": 3.0}}},
        grid={"trainer.learning_rate": [4.0]},
    )
    write_recipe(launch={"kind": "processes"}, trainer={"num_threads": 2}, engine={"num_threads": 2})
    recipe = only_recipe(path)
    assert (recipe.launch.kind, recipe.trainer.num_threads, recipe.engine.num_threads) == ("inline", 1, 1)
    assert (recipe.loss.beta2, recipe.loss.beta1, recipe.sampling.temperature) == (2.0, 3.0, 3.0)
    assert recipe.trainer.learning_rate == 4.0


def test_a_grid_key_may_be_written_with_or_without_quotes(write_study):
    quoted = load_study(write_study(grid={"loss.beta1": [1.0, 2.0]}))
    bare = load_study(write_study(grid={"loss": {"beta1": [1.0, 2.0]}}))
    assert quoted == bare
    assert bare.grid_keys == ("loss.beta1",)


def test_a_model_folder_is_found_from_the_study_file(write_study, tmp_path: Path, tiny_model: Path):
    shutil.copytree(tiny_model, tmp_path / "bases" / "early")
    path = write_study(grid={"model.name_or_path": ["bases/early", "builtin:countdown"]})
    names = [cell.recipe.model.name_or_path for cell in load_study(path).cells]
    assert names == [str((tmp_path / "bases" / "early").resolve()), "builtin:countdown"]
    assert [c.name for c in load_study(path).cells] == ["plain-bases-early-seed0", "plain-builtin-countdown-seed0"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"metods": {}}, "metods is not a key of a study; did you mean methods?"),
        ({"trainer": {"num_steps": 4}}, "trainer is not a key of a study; it has recipe, seeds"),
        ({"methods": None}, "methods is missing: add it to the study."),
        ({"methods": {}}, "methods = {} is empty: give at least one."),
        ({"methods": {"a/b": {}}}, "methods.'a/b' names folders"),
        ({"seeds": []}, r"seeds = \[\] is empty"),
        ({"seeds": [1, 2, 1]}, "seeds has 1 2 times"),
        ({"seeds": ["x"]}, "seeds.0 = 'x': input should be a valid integer"),
        ({"recipe": "other.toml"}, "recipe = 'other.toml': there is no file .*other.toml"),
        ({"settings": {"seed": 3}}, "settings sets `seed`"),
        ({"grid": {"loss.beta1": 2.0}}, "grid.loss.beta1 = 2.0 must be a list"),
        ({"grid": {"loss.beta1": []}}, r"grid.loss.beta1 = \[\] must be a list of at least one value"),
        (
            {"grid": {"loss.beta2": [1.0]}, "methods": {"a": {"loss": {"beta2": 2.0}}}},
            "methods.a sets loss.beta2, and so does the grid",
        ),
        ({"skip": [{}]}, "skip table 1 is empty"),
        ({"skip": [{"loss.beta1": 1}]}, "skip table 1 has loss.beta1, which does not tell runs apart; .* method, seed"),
        ({"skip": [{"method": "plane"}]}, "skip table 1, .*plane.*, matches no run"),
        ({"skip": [{"method": "plain"}]}, "the skip tables leave no run"),
        ({"methods": {"a": {}, "b": {"loss.beta2": 0.1}}}, "method a and method b have the same settings throughout"),
        ({"grid": {"loss.beta1": [1.0, 1.0]}}, "have the same settings throughout"),
        ({"keep": "some"}, "keep = 'some': input should be 'all' or 'results'"),
    ],
)
def test_a_study_that_is_wrong_is_refused(write_study, keys: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as error:
        load_study(write_study(**keys))
    assert "study.toml" in str(error.value)


def test_every_wrong_recipe_of_the_matrix_is_named_with_its_method_and_grid(write_study, capsys):
    path = write_study(
        methods={"a": {}, "b": {"loss.betta2": 0.1}}, grid={"trainer.weight_sync_steps": [4, 5]}, seeds=[0, 1]
    )
    assert main(study_command(path)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert "study.toml: method a, trainer.weight_sync_steps = 5: " in lines[0]
    assert "num_steps = 12 must be a multiple of weight_sync_steps = 5" in lines[0]
    assert "method b, trainer.weight_sync_steps = 4: " in lines[1]
    assert "did you mean loss.beta2?" in lines[1]
    assert not (path.parent / "study").exists()


def test_less_than_one_worker_is_refused(write_study, capsys):
    assert main(study_command(write_study(), "--num_workers", "0")) == 2
    assert "--num_workers 0 must be at least 1" in capsys.readouterr().err


# What it makes of runs that have ended


def test_the_tables_hold_what_the_runs_hold(write_study, write_recipe):
    path = write_study(seeds=[0, 1], grid={"trainer.weight_sync_steps": [6]}, settings={"evaluation.num_prompts": 8})
    run_cells(path)
    assert main(study_command(path)) == 0

    rows, runs = results(path), [run_folder(path, f"plain-6-seed{seed}") for seed in (0, 1)]
    assert list(rows["run"]) == ["runs/plain-6-seed0", "runs/plain-6-seed1"]
    assert rows[
        ["method", "trainer.weight_sync_steps", "status", "step", "num_steps"]
    ].drop_duplicates().to_numpy().tolist() == [["plain", 6, "finished", 12, 12]]
    for (_, row), run in zip(rows.iterrows(), runs, strict=True):
        summary = read_json(run.summary_path)
        for k in ("1", "2", "4"):
            assert row[f"base_pass@{k}"] == summary["base"]["pass_at_k"][k][0]
            for name, interval in (
                ("final", summary["final"]["pass_at_k"][k]),
                ("difference", summary["difference"][k]),
            ):
                assert [row[f"{name}_pass@{k}{end}"] for end in ("", "_low", "_high")] == interval
        entropies = [record["entropy"] for record in run.metrics()]
        assert row["last_entropy"] == pytest.approx(sum(entropies[2:]) / 10)  # of 12 steps
        assert row["num_completions"] == 12 * 2 * 4

    (setting,) = pd.read_csv(path.parent / "study" / "table.csv").to_dict("records")
    assert (setting["num_seeds"], setting["num_collapsed"]) == (2, 0)
    for name in ("pass@1", "difference_pass@4"):
        of_seeds = rows[name if name.startswith("difference") else f"final_{name}"]
        assert setting[name] == pytest.approx(of_seeds.mean())
        assert (setting[f"{name}_min"], setting[f"{name}_max"]) == pytest.approx((of_seeds.min(), of_seeds.max()))
        assert setting[f"{name}_low"] <= setting[name] <= setting[f"{name}_high"]


def test_the_tables_follow_a_selection_and_do_without_scores_from_before(write_study):
    path = write_study(settings={"selection": {"eval_steps": 6, "num_prompts": 4}, "evaluation.eval_on_start": False})
    run_cells(path)
    assert main(study_command(path)) == 0
    summary = read_json(run_folder(path, "plain-seed0").summary_path)
    (row,), (setting,) = (
        pd.read_csv(path.parent / "study" / name).to_dict("records") for name in ("results.csv", "table.csv")
    )
    assert row["step"] == summary["selection"]["step"]
    assert row["final_pass@2"] == setting["pass@2"] == summary["final"]["pass_at_k"]["2"][0]
    assert not [name for name in [*row, *setting] if name.startswith(("base_", "difference_"))]


def test_of_a_run_that_has_ended_the_results_stay_and_the_rest_goes(write_study, capsys):
    path = write_study()
    run_cells(path)
    run = run_folder(path, "plain-seed0")
    shutil.copytree(run.path / "policies", run.path / "snapshots")
    assert main(study_command(path)) == 0
    names = {"config.toml", "metrics.jsonl", "summary.json", "evaluations", "environment.json", "pass_at_k.png"}
    assert {p.name for p in run.path.iterdir() if p.name[0] != "."} == {*names, "pruned.json"}
    capsys.readouterr()
    assert main(["inspect", str(run.path)]) == 0
    assert "rounds, policies, checkpoints and snapshots were removed" in capsys.readouterr().out

    (run.path / "rounds").mkdir()  # as a kill amid the removal would leave it
    before = written(run.summary_path)
    assert main(study_command(path)) == 0
    assert not (run.path / "rounds").exists()
    assert written(run.summary_path) == before
    assert read_scores(run.evaluation(0), TaskConfig(name="countdown")).num_generations == 4

    capsys.readouterr()
    assert main(["train", str(run.config_path), "--run_dir", str(run.path)]) == 2
    assert "rounds and policies were removed" in capsys.readouterr().err


def test_all_is_kept_where_that_is_asked_for(write_study):
    path = write_study(keep="all")
    run_cells(path)
    assert main(study_command(path)) == 0
    assert run_folder(path, "plain-seed0").policy_versions() == [0, 1, 2, 3]


def test_a_run_that_a_guard_ended_counts_as_done_and_has_no_final_scores(write_study):
    path = write_study(seeds=[0, 1])
    run_cells(path)
    run = run_folder(path, "plain-seed1")
    run.summary_path.unlink()
    run.collapse_path.write_text(json.dumps({"step": 9, "reason": "entropy 0.01 for 5 steps", "entropy": 0.01}))
    assert main(study_command(path)) == 0
    finished, collapsed = results(path).to_dict("records")
    assert finished["status"] == "finished"
    assert (collapsed["status"], collapsed["reason"], collapsed["step"]) == ("collapsed", "entropy 0.01 for 5 steps", 9)
    assert (
        collapsed["base_pass@1"] == read_json(run_folder(path, "plain-seed0").summary_path)["base"]["pass_at_k"]["1"][0]
    )
    assert pd.isna(collapsed["final_pass@1"])
    assert not pd.isna(collapsed["last_entropy"])
    (setting,) = pd.read_csv(path.parent / "study" / "table.csv").to_dict("records")
    assert (setting["num_seeds"], setting["num_collapsed"]) == (1, 1)


def test_runs_with_other_settings_are_refused_before_anything_runs(write_study, capsys):
    path = write_study()
    run_cells(path)
    before = written(run_folder(path, "plain-seed0").summary_path)
    capsys.readouterr()
    assert main(study_command(write_study(settings={"loss.beta2": 0.2, "engine.max_num_seqs": 8}))) == 2
    message = capsys.readouterr().err
    assert "plain-seed0 holds a run with other settings" in message
    assert "(engine.max_num_seqs: 256 -> 8; loss.beta2: 0.1 -> 0.2)" in message
    assert "choose another study_dir" in message
    assert written(run_folder(path, "plain-seed0").summary_path) == before


# Death


def start(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "oapl", *study_command(path, "--num_workers", "2")]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def wait_for(ready: Callable[[], bool], patience_s: float = 120) -> None:
    give_up = time.monotonic() + patience_s
    while not ready():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def test_a_killed_study_leaves_no_process_and_goes_on_without_doing_anything_twice(write_study):
    path = write_study(seeds=[0, 1, 2], settings={"trainer.num_steps": 40}, keep="all")
    run_cells(path, "plain-seed0")
    finished, interrupted, failing = (run_folder(path, f"plain-seed{seed}") for seed in (0, 1, 2))
    before = written(finished.summary_path)
    log, error = failing.path / "logs" / "study.log", f"StoreError: {failing.path} already has a run at work"

    def has_failed() -> bool:
        return log.exists() and error in log.read_text()

    with failing.lock("run"):  # so that its own command finds the folder in use, and fails
        process = start(path)
        wait_for(lambda: max(interrupted.checkpoint_steps(), default=0) > 0 and has_failed())
        child = int((interrupted.path / ".run.lock").read_text())
        process.kill()
        process.wait()
        wait_for(lambda: not is_alive(child), patience_s=5)
        assert not interrupted.summary_path.exists()
        first_shard = written(interrupted.round(0).parquet_path(0))

        assert main(study_command(path)) == 1
    assert written(finished.summary_path) == before
    assert written(interrupted.round(0).parquet_path(0)) == first_shard
    assert read_json(interrupted.summary_path)["resumed_from_step"] > 0
    rows = results(path)
    assert list(rows["status"]) == ["finished", "finished", "failed"]
    assert rows["reason"][2].startswith(f"{error} (process {os.getpid()})")
    (setting,) = pd.read_csv(path.parent / "study" / "table.csv").to_dict("records")
    assert (setting["num_seeds"], setting["num_failed"]) == (2, 1)
    assert log.read_text().count(error) == 2  # it was tried again


def test_a_stopped_study_lets_its_runs_save_and_says_so_by_its_exit_code(write_study):
    path = write_study(settings={"trainer.num_steps": 4000})
    run = run_folder(path, "plain-seed0")
    process = start(path)
    wait_for(lambda: max(run.checkpoint_steps(), default=0) > 0)
    child = int((run.path / ".run.lock").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert not is_alive(child)
    assert max(run.checkpoint_steps()) == run.metrics()[-1]["step"]  # it saved where it stood
    assert list(results(path)["run"]) == []
    assert load_recipe(run.config_path) == only_recipe(path)
