"""Samplers that join a run from elsewhere, leave it, die, or freeze and come back: every group counts once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oapl.cli import main
from oapl.config import dump_recipe, load_recipe
from oapl.store import RunFolder
from oapl.store.files import read_json, write_bytes
from test_death import assert_complete, sealed_groups

LEASE_S = 3.0
GATED_REWARD = """
import time
from pathlib import Path

def reward(prompts, completions, **columns):
    while Path("shut").exists():
        time.sleep(0.05)
    return [float(len(completion)) for completion in completions]
"""
ROUND = {"num_steps": 24, "weight_sync_steps": 8, "prompts_per_step": 2, "learning_rate": 1e-3}


class Processes:
    """`oapl` commands in the background; all of them are killed at the end."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._all = logs, []

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        with open(self._logs / f"{len(self._all)}.log", "wb") as log:
            command = [sys.executable, "-m", "oapl", *map(str, words)]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self._logs)
        self._all.append(process)
        return process

    def output_of(self, process: subprocess.Popen[bytes]) -> str:
        return (self._logs / f"{self._all.index(process)}.log").read_text()

    def end(self, process: subprocess.Popen[bytes], patience_s: float = 240) -> int:
        return process.wait(timeout=patience_s)

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def wait_for(so: Callable[[], bool], *alive: subprocess.Popen[bytes], patience_s: float = 240) -> None:
    give_up = time.monotonic() + patience_s
    while not so():
        assert time.monotonic() < give_up
        assert all(process.poll() is None for process in alive)
        time.sleep(0.02)


def gated_task(folder: Path) -> dict[str, Any]:
    """Grading that waits while there is a file `shut`, so that there is time to come and go in."""
    (folder / "gated.py").write_text(GATED_REWARD)
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "use {n} 2 make 3\\n"}}\n' for n in range(1, 10)))
    rows = str(folder / "rows.jsonl")
    return {
        "name": "dataset",
        "dataset": rows,
        "eval_dataset": rows,
        "reward_funcs": "gated:reward",
        "reward_timeout_s": 600.0,
    }


def at_work(run: RunFolder) -> set[int]:
    """The processes that have a piece of a round in hand."""
    leases = [read_json(path) for path in run.path.glob("rounds/*/leases/*.json")]
    return {lease["pid"] for lease in leases if not lease.get("released")}


def num_stored(run: RunFolder) -> int:
    return len(sealed_groups(run))


def test_samplers_come_and_go_die_and_freeze_and_every_group_counts_once(
    write_recipe, tmp_path: Path, processes: Processes
):
    """1, 3, 0, then 2 of them: of the three one is killed, one is told to stop, and one is frozen for longer than its
    lease and comes back. Then all is done by the two, from base to final evaluation."""
    recipe = write_recipe(
        trainer=ROUND,
        task=gated_task(tmp_path),
        launch={"kind": "processes", "num_samplers": 0, "lease_s": LEASE_S},
        engine={"max_num_seqs": 16},
    )
    run = RunFolder(tmp_path / "run")
    first = processes.start("sample", "--run_dir", run.path)  # before there is a run
    wait_for(lambda: "waiting until" in processes.output_of(first), first)
    trainer = processes.start("train", recipe, "--run_dir", run.path)
    wait_for(lambda: num_stored(run) >= 2, trainer, first)
    (tmp_path / "shut").touch()
    told, frozen = others = [processes.start("sample", "--run_dir", run.path) for _ in range(2)]
    wait_for(lambda: {first.pid, told.pid, frozen.pid} <= at_work(run), trainer, first, *others)
    kept = sealed_groups(run)
    first.kill()
    frozen.send_signal(signal.SIGSTOP)
    told.send_signal(signal.SIGTERM)
    assert processes.end(told) == 130
    assert "everything so far is kept" in processes.output_of(told)
    (tmp_path / "shut").unlink()
    last = [processes.start("sample", "--run_dir", run.path) for _ in range(2)]
    wait_for(lambda: run.round(0).is_sealed(), trainer, *last)  # so what the three had in hand was taken over
    frozen.send_signal(signal.SIGCONT)
    assert processes.end(trainer) == 0, processes.output_of(trainer)
    for sampler in (frozen, *last):
        assert processes.end(sampler) == 0, processes.output_of(sampler)
        assert "is finished" in processes.output_of(sampler)
    assert kept.items() <= sealed_groups(run).items()
    assert_complete(run, 24, 8)
    assert not list(run.path.rglob("*.aside-*"))


def test_samplers_join_those_of_the_run(write_recipe, tmp_path: Path, processes: Processes):
    recipe = write_recipe(trainer=ROUND, launch={"kind": "processes", "num_samplers": 2}, engine={"max_num_seqs": 16})
    run = RunFolder(tmp_path / "run")
    trainer = processes.start("train", recipe, "--run_dir", run.path)
    sampler = processes.start("sample", "--run_dir", run.path, "--engine.max_num_seqs", "8")  # of smaller blocks
    assert processes.end(trainer) == 0, processes.output_of(trainer)
    assert processes.end(sampler) == 0, processes.output_of(sampler)
    assert_complete(run, 24, 8)


@pytest.mark.parametrize("setting", ["sampling.temperature 0.5", "trainer.num_steps 24"])
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_joined_sampler_may_not_change_the_run(
    write_recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, has_begun: bool
):
    run, recipe = RunFolder(tmp_path / "run"), write_recipe()
    if has_begun:
        assert main(["sample", str(recipe), "--run_dir", str(run.path)]) == 0
    else:
        write_bytes(run.config_path, dump_recipe(load_recipe(recipe)).encode())
    name, value = setting.split()
    assert main(["sample", "--run_dir", str(run.path), f"--{name}", value]) == 2
    assert f"leave out {name}" in capsys.readouterr().err


def test_a_sampler_that_stays_samples_for_the_run_when_that_is_continued_for_longer(
    write_recipe, tmp_path: Path, processes: Processes
):
    """It waits at the end of the first 8 steps, whose evaluation is not asked for before the run has other settings."""
    run = RunFolder(tmp_path / "run")
    launch = {"kind": "processes", "num_samplers": 0}
    short = write_recipe(trainer={**ROUND, "num_steps": 8}, launch=launch)
    write_bytes(run.config_path, dump_recipe(load_recipe(short)).encode())
    sampler = processes.start("sample", "--run_dir", run.path)
    wait_for(lambda: "waiting for the next policy" in processes.output_of(sampler), sampler)
    trainer = processes.start("train", write_recipe(trainer=ROUND, launch=launch), "--run_dir", run.path)
    assert processes.end(trainer) == 0, processes.output_of(trainer)
    assert processes.end(sampler) == 0, processes.output_of(sampler)
    assert_complete(run, 24, 8)


def test_a_sampler_is_told_which_run(capsys: pytest.CaptureFixture[str]):
    assert main(["sample"]) == 2
    assert "name a recipe, or the --run_dir of a run" in capsys.readouterr().err
