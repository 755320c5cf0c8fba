"""Death is boring: whatever is killed, and whenever, the same command continues and nothing sealed is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from oapl.store import RunFolder
from oapl.store.files import read_json

KILLED = -signal.SIGKILL


class ForkServer:
    """A warm `tests/fork_server.py`."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("fork_server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, *argv: object, **kill: float) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"argv": list(map(str, argv)), **kill}), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.process.communicate(timeout=30)


def sealed_groups(run: RunFolder) -> dict[tuple[int, int], str]:
    """The digest of every sealed shard of the run's rounds."""
    return {
        (index, int(path.stem.removeprefix("groups-"))): read_json(path)["digest"]
        for index in run.round_indices()
        for path in run.round(index).path.glob("groups-?????.json")
    }


def assert_complete(run: RunFolder, num_steps: int, steps_per_round: int) -> None:
    """Every group of every round is whole, readable, and counted exactly once in the final weights' history."""
    groups = sealed_groups(run)
    in_order = [groups[divmod(step, steps_per_round)] for step in range(num_steps)]
    assert len(groups) == num_steps
    state = read_json(run.checkpoint_path(num_steps) / "state.json")
    assert state["step"] == num_steps
    assert state["consumed"] == in_order
    for index in run.round_indices():
        round = run.round(index).load()
        positions = [g.position for n in range(round.num_shards) for g in run.round(index).read_shard(n).groups]
        assert positions == list(range(len(round.prompt_ids)))
        assert run.round(index).is_sealed()
        policy = run.policy(round.policy.version)
        assert policy == round.policy
    assert [record["step"] for record in run.metrics()] == list(range(1, num_steps + 1))
    assert set(read_json(run.summary_path)) >= {"base", "final", "difference", "seed", "wall_s", "num_completions"}


def kill_inline_runs(server: ForkServer, recipe: Path, tmp_path: Path, kills: list[dict[str, float]]) -> int:
    """An undisturbed run, and one killed over and over; returns how many kills struck."""
    straight, broken = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "broken")
    assert server.run("train", recipe, "--run_dir", straight.path) == 0
    struck, kept = 0, {}
    for kill in kills:
        code = server.run("train", recipe, "--run_dir", broken.path, **kill)
        assert code in (KILLED, 0)
        struck += code == KILLED
        now = sealed_groups(broken)
        assert kept.items() <= now.items()
        kept = now
    assert server.run("train", recipe, "--run_dir", broken.path) == 0
    assert_complete(broken, 12, 4)
    assert [broken.policy(v) for v in range(4)] == [straight.policy(v) for v in range(4)]
    assert sealed_groups(broken) == sealed_groups(straight)
    assert not list(broken.path.rglob("*.aside-*"))
    return struck


def test_inline_runs_are_bitwise_repeatable(server: ForkServer, write_recipe, tmp_path: Path):
    recipe = write_recipe()
    one, other = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "other")
    assert server.run("train", recipe, "--run_dir", one.path) == 0
    assert server.run("train", recipe, "--run_dir", other.path) == 0
    assert [one.policy(v) for v in range(4)] == [other.policy(v) for v in range(4)]
    assert one.policy(3) != one.policy(2)
    assert_complete(one, 12, 4)


def test_kills_inside_writes_change_no_bit(server: ForkServer, write_recipe, tmp_path: Path):
    draw = random.Random(0)
    kills = [{"kill_at_write": draw.randint(1, 60)} for _ in range(10)]
    assert kill_inline_runs(server, write_recipe(), tmp_path, kills) >= 8


def test_kills_between_any_two_checkpoints_change_no_bit(server: ForkServer, write_recipe, tmp_path: Path):
    """A checkpoint every step, so that a resume can start in the middle of a round."""
    recipe = write_recipe(trainer={"save_steps": 1}, launch={"rounds_ahead": 1})
    draw = random.Random(1)
    kills = [{"kill_at_write": draw.randint(20, 90)} for _ in range(6)]
    assert kill_inline_runs(server, recipe, tmp_path, kills) >= 4


def test_kills_of_a_run_that_selects_change_no_snapshot_and_no_choice(server: ForkServer, write_recipe, tmp_path: Path):
    """Snapshots fall between the weight syncs; the last kills are in validations and the final evaluation."""
    recipe = write_recipe(selection={"eval_steps": 3, "num_prompts": 4, "num_generations": 4})
    kills = [{"kill_at_write": count} for count in (25, 44, 52, 61, 35)]
    assert kill_inline_runs(server, recipe, tmp_path, kills) >= 4
    straight, broken = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "broken")
    assert broken.snapshot_steps() == [3, 6, 9, 12]
    assert [broken.snapshot(step) for step in (3, 6, 9, 12)] == [straight.snapshot(step) for step in (3, 6, 9, 12)]
    before, after = read_json(straight.summary_path), read_json(broken.summary_path)
    assert (after["selection"], after["final"]) == (before["selection"], before["final"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sixty_kills_of_an_inline_run_change_no_bit(server: ForkServer, write_recipe, tmp_path: Path):
    """60 deaths at random: half at a random write, half at a random time; runs that ended alive do not count."""
    draw = random.Random(2)
    struck = 0
    for attempt in range(20):
        kills = [
            {"kill_at_write": draw.randint(1, 50)} if i % 2 else {"kill_after_s": draw.uniform(0.05, 2.0)}
            for i in range(8)
        ]
        folder = tmp_path / str(attempt)
        struck += kill_inline_runs(server, write_recipe(trainer={"save_steps": 1 + attempt % 4}), folder, kills)
        if struck >= 60:
            return
    raise AssertionError(f"only {struck} kills struck")


# Processes


def start(recipe: Path, run: RunFolder) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "oapl", "train", str(recipe), "--run_dir", str(run.path)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def lock_pid(run: RunFolder, role: str) -> int:
    return int((run.path / f".{role}.lock").read_text())


def lease_pid(path: Path) -> int:
    return int(json.loads(path.read_text())["pid"])


def holder(run: RunFolder, role: str, launcher: subprocess.Popen[bytes], patience_s: float = 120) -> int | None:
    """The process that plays a role in this launch, once there is one; None if the launch ended first."""
    give_up = time.monotonic() + patience_s
    while launcher.poll() is None:
        assert time.monotonic() < give_up, f"no {role} after {patience_s} s"
        leases = run.path.glob("rounds/*/leases/*.json")
        pids = [partial(lease_pid, path) for path in leases] if role == "sampler" else [partial(lock_pid, run, role)]
        for read in pids:
            with suppress(OSError, ValueError):
                status = Path(f"/proc/{(pid := read())}/status").read_text()
                if f"PPid:\t{launcher.pid}\n" in status:
                    return pid
        time.sleep(0.02)
    return None


def kill_once(recipe: Path, run: RunFolder, victims: list[str], delay_s: float) -> bool:
    """Starts the run, lets it work for a moment, kills the victims; whether it died of that."""
    launcher = start(recipe, run)
    pids = [pid for role in victims if (pid := holder(run, role, launcher)) is not None]
    time.sleep(delay_s)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, stderr = launcher.communicate(timeout=120)
    if launcher.returncode == 0:
        return False
    assert launcher.returncode == 1, stderr.decode()
    assert "was killed by SIGKILL" in stderr.decode()
    assert "Run the same command again to continue" in stderr.decode()
    return True


LONG = {"num_steps": 120, "weight_sync_steps": 12, "prompts_per_step": 2, "learning_rate": 1e-3}


def kill_processes(recipe: Path, run: RunFolder, plan: list[tuple[list[str], float]]) -> int:
    struck, kept = 0, {}
    for victims, delay_s in plan:
        struck += kill_once(recipe, run, victims, delay_s)
        now = sealed_groups(run)
        assert kept.items() <= now.items()
        kept = now
    launcher = start(recipe, run)
    _, stderr = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, stderr.decode()
    assert kept.items() <= sealed_groups(run).items()
    assert_complete(run, 120, 12)
    return struck


def test_processes_survive_the_death_of_either_or_both(write_recipe, tmp_path: Path):
    recipe = write_recipe(
        trainer=LONG,
        launch={"kind": "processes"},
        evaluation={"num_prompts": 8, "num_workers": 2},
    )
    plan = [(["trainer"], 0.3), (["sampler"], 0.2), (["trainer", "sampler"], 0.4)]
    assert kill_processes(recipe, RunFolder(tmp_path / "run"), plan) >= 2


def test_children_end_with_a_killed_launcher(write_recipe, tmp_path: Path):
    run = RunFolder(tmp_path / "run")
    launcher = start(write_recipe(trainer=LONG, launch={"kind": "processes"}), run)
    trainer, sampler = holder(run, "trainer", launcher), holder(run, "sampler", launcher)
    assert trainer is not None
    assert sampler is not None
    launcher.kill()
    launcher.communicate()
    give_up = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in (trainer, sampler)):
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_a_request_to_stop_saves_and_the_same_command_continues(write_recipe, tmp_path: Path, kind: str):
    run = RunFolder(tmp_path / "run")
    recipe = write_recipe(trainer=LONG, launch={"kind": kind})
    launcher = start(recipe, run)
    while len(run.metrics()) < 3:
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(signal.SIGINT)
    _, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 130
    assert "The same command continues from there" in stderr.decode()
    stopped_at = run.checkpoint_steps()[-1]
    assert stopped_at == run.metrics()[-1]["step"]  # no step is lost
    launcher = start(recipe, run)
    _, stderr = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, stderr.decode()
    assert_complete(run, 120, 12)
    assert read_json(run.summary_path)["resumed_from_step"] == stopped_at


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_sixty_kills_of_trainer_sampler_or_both(write_recipe, tmp_path: Path):
    """60 deaths at random moments over runs in processes mode, spread over as many runs as they take."""
    draw, struck = random.Random(3), 0
    for attempt in range(30):
        plan = [
            (draw.choice([["trainer"], ["sampler"], ["trainer", "sampler"]]), draw.uniform(0.0, 1.5)) for _ in range(6)
        ]
        recipe = write_recipe(trainer={**LONG, "save_steps": draw.choice([1, 5, 12])}, launch={"kind": "processes"})
        struck += kill_processes(recipe, RunFolder(tmp_path / str(attempt)), plan)
        if struck >= 60:
            return
    raise AssertionError(f"only {struck} kills struck")


# Disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 700 kB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_gives_a_clear_error_and_a_resumable_run(server: ForkServer, write_recipe, small_disk: Path, capfd):
    recipe, run = write_recipe(), RunFolder(small_disk / "run")
    assert subprocess.run([sys.executable, "-m", "oapl", "train", recipe, "--run_dir", run.path]).returncode == 1
    message = capfd.readouterr().err
    assert "StoreError: cannot write" in message
    assert "The disk is full. Free some space and run the same command again" in message
    kept = sealed_groups(run)
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    assert server.run("train", recipe, "--run_dir", run.path) == 0
    assert kept.items() <= sealed_groups(run).items()
    assert_complete(run, 12, 4)


def test_a_read_only_run_folder_gives_a_clear_error(server: ForkServer, write_recipe, small_disk: Path, capfd):
    recipe, run = write_recipe(), RunFolder(small_disk / "run")
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    assert server.run("train", recipe, "--run_dir", run.path, kill_at_write=150) == KILLED
    kept = sealed_groups(run)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert subprocess.run([sys.executable, "-m", "oapl", "train", recipe, "--run_dir", run.path]).returncode == 1
    assert "The file system is read-only" in capfd.readouterr().err
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert server.run("train", recipe, "--run_dir", run.path) == 0
    assert kept.items() <= sealed_groups(run).items()
    assert_complete(run, 12, 4)
