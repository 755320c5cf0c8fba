"""A run on a Ray cluster of three nodes on this machine, each begun by `ray start`, whole and with parts of it killed.

pytest -m slow tests/test_ray.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from oapl.store import RunFolder
from oapl.store.files import read_json
from test_death import assert_complete, sealed_groups

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TRAINER = {"num_steps": 36, "weight_sync_steps": 12, "prompts_per_step": 2, "num_ranks": 2, "save_steps": 4}
PORT = 6399
RAY = Path(sys.executable).with_name("ray")


def ray(*words: str) -> None:
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    subprocess.run([RAY, *words], check=True, capture_output=True, env=environment, timeout=120)


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster of a head, on which nothing runs but drivers, and two nodes with room for all."""
    ray("stop", "--force")
    ray("start", "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false", "--disable-usage-stats")
    for _ in range(2):
        add_node()
    yield f"127.0.0.1:{PORT}"
    ray("stop", "--force")


def add_node() -> None:
    ray("start", f"--address=127.0.0.1:{PORT}", "--num-cpus=4", "--disable-usage-stats")


def start(recipe: Path, run: RunFolder, address: str, log: Path) -> subprocess.Popen[bytes]:
    words = ["train", str(recipe), "--run_dir", str(run.path), "--launch.ray_address", address]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "oapl", *words], stdout=output, stderr=subprocess.STDOUT, env=environment
        )


def sampler_of(run: RunFolder) -> int:
    """A sampler that has a piece in hand; else one that had."""
    leases = [read_json(path) for path in run.path.glob("rounds/*/leases/*.json")]
    alive = [lease for lease in leases if Path(f"/proc/{lease['pid']}").exists()]
    return int(min(alive, key=lambda lease: bool(lease.get("released")))["pid"])


def trainer_of(run: RunFolder) -> int:
    """The first rank."""
    return int((run.path / ".trainer.lock").read_text())


def parent_of(pid: int) -> int:
    """Of a worker: its node's own process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for(so: Callable[[], bool], patience_s: float = 600) -> None:
    give_up = time.monotonic() + patience_s
    while not so():
        assert time.monotonic() < give_up
        time.sleep(0.1)


@pytest.mark.parametrize("victim", ["nobody", "sampler", "sampler's node", "rank", "trainer's node", "driver"])
def test_a_run_on_three_nodes_finishes_whatever_dies(write_recipe, tmp_path: Path, cluster: str, victim: str):
    recipe = write_recipe(
        trainer=TRAINER,
        launch={"kind": "ray", "num_samplers": 2, "lease_s": 10.0},
        engine={"max_num_seqs": 16},
    )
    run, log = RunFolder(tmp_path / "run"), tmp_path / "driver.log"
    driver = start(recipe, run, cluster, log)
    try:
        wait_for(lambda: len(run.metrics()) >= 14 or driver.poll() is not None)  # in the second round
        assert driver.poll() is None, log.read_text()
        kept = sealed_groups(run)
        if victim == "driver":
            driver.kill()
            driver.wait()
            driver = start(recipe, run, cluster, log)
        elif victim != "nobody":
            pid = sampler_of(run) if "sampler" in victim else trainer_of(run)
            os.kill(parent_of(pid) if "node" in victim else pid, signal.SIGKILL)
            if "node" in victim:
                time.sleep(5)
                add_node()
        assert driver.wait(timeout=1200) == 0, log.read_text()
    finally:
        with suppress(ProcessLookupError):
            driver.kill()
            driver.wait()
    assert kept.items() <= sealed_groups(run).items()
    assert_complete(run, 36, 12)
