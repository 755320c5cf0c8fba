"""Runs on a Ray cluster of three nodes on this machine, each begun by `ray start`, whole and with parts of it killed.

pytest -m slow tests/test_ray.py

As root, where there is `ip`, each node has a network namespace of its own, and dies as a machine does: all of it at
once. Elsewhere the nodes share this machine's network, and of one that dies its own process is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from oapl.store import RunFolder
from oapl.store.files import read_json
from test_death import assert_complete, sealed_groups

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

COUNTDOWN = Path(__file__).parents[1] / "recipes" / "countdown.toml"
PORT, DASHBOARD = 6399, 8299
RAY = Path(sys.executable).with_name("ray")
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
APART = os.geteuid() == 0 and shutil.which("ip") is not None
"""Whether nodes have networks of their own."""
HEAD = "10.231.0.1" if APART else "127.0.0.1"


def call(*words: object, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, env={**ENVIRONMENT, **environment}, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ip(words: str) -> str:
    return call("ip", *words.split())


class Cluster:
    """A head, on which nothing runs but drivers, and nodes with room for all of a run."""

    def __init__(self) -> None:
        self._num_nodes = 0

    def start(self) -> None:
        if APART:
            ip("link add oapl type bridge")
            ip(f"address add {HEAD}/24 dev oapl")
            ip("link set oapl up")
        words = ["--head", f"--port={PORT}", "--num-cpus=0", f"--node-ip-address={HEAD}"]
        call(RAY, "start", *words, f"--dashboard-host={HEAD}", f"--dashboard-port={DASHBOARD}")

    def add_node(self) -> None:
        self._num_nodes += 1
        words = [RAY, "start", f"--address={HEAD}:{PORT}", "--num-cpus=4"]
        if not APART:
            call(*words)
            return
        name, address = f"oapl-{self._num_nodes}", f"10.231.0.{10 + self._num_nodes}"
        ip(f"netns add {name}")
        ip(f"link add {name} type veth peer name eth0 netns {name}")
        ip(f"link set {name} master oapl up")
        ip(f"-n {name} address add {address}/24 dev eth0")
        ip(f"-n {name} link set eth0 up")
        ip(f"-n {name} link set lo up")
        inside = ["ip", "netns", "exec", name]
        call(*inside, *words, f"--node-ip-address={address}", GLOO_SOCKET_IFNAME="eth0")

    def kill_node_of(self, pid: int) -> None:
        if not APART:
            os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
            return
        name = ip(f"netns identify {pid}").strip()
        ip(f"link set {name} down")  # so that nobody hears a last word
        for process in ip(f"netns pids {name}").split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    def stop(self) -> None:
        call(RAY, "stop", "--force")
        if APART:
            for number in range(1, self._num_nodes + 1):
                ip(f"netns delete oapl-{number}")
            ip("link delete oapl")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        made.start()
        for _ in range(2):
            made.add_node()
        yield made
    finally:
        made.stop()


def start(run: RunFolder, log: Path, *words: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "oapl", "train", str(COUNTDOWN), "--run_dir", str(run.path)]
    command += ["--trainer.num_ranks", "2", "--launch.num_samplers", "2", "--launch.lease_s", "10", *map(str, words)]
    with open(log, "ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The recipe's run by plain processes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = RunFolder(folder / "run")
    assert start(run, folder / "log").wait(timeout=3000) == 0, (folder / "log").read_text()
    return run


def pass_at_1(run: RunFolder) -> list[float]:
    """With its interval."""
    found: Any = read_json(run.summary_path)["final"]["pass_at_k"]["1"]
    return list(map(float, found))


def sampler_of(run: RunFolder) -> int:
    """A sampler that has a piece in hand; else one that had."""
    leases = [read_json(path) for path in run.path.glob("rounds/*/leases/*.json")]
    alive = [lease for lease in leases if Path(f"/proc/{lease['pid']}").exists()]
    return int(min(alive, key=lambda lease: bool(lease.get("released")))["pid"])


def trainer_of(run: RunFolder) -> int:
    """The first rank."""
    return int((run.path / ".trainer.lock").read_text())


def wait_for(so: Callable[[], bool], patience_s: float = 1200) -> None:
    give_up = time.monotonic() + patience_s
    while not so():
        assert time.monotonic() < give_up
        time.sleep(0.1)


@pytest.mark.parametrize("victim", ["nobody", "sampler", "sampler's node", "rank", "trainer's node", "driver"])
def test_the_countdown_recipe_finishes_on_three_nodes_whatever_dies(
    undisturbed: RunFolder, tmp_path: Path, cluster: Cluster, victim: str, record_property
):
    """In the second of its three rounds. The policies are to the last bit those of the run that nothing disturbed."""
    run, log = RunFolder(tmp_path / "run"), tmp_path / "driver.log"
    on_ray = ("--launch.kind", "ray", "--launch.ray_address", f"{HEAD}:{PORT}")
    driver = start(run, log, *on_ray)
    try:
        wait_for(lambda: len(run.metrics()) >= 60 or driver.poll() is not None)
        assert driver.poll() is None, log.read_text()
        kept = sealed_groups(run)
        if victim == "driver":
            driver.kill()
            driver.wait()
            driver = start(run, log, *on_ray)
        elif victim != "nobody":
            pid = sampler_of(run) if "sampler" in victim else trainer_of(run)
            if "node" in victim:
                cluster.kill_node_of(pid)
                time.sleep(5)
                cluster.add_node()
            else:
                os.kill(pid, signal.SIGKILL)
        assert driver.wait(timeout=3000) == 0, log.read_text()
    finally:
        driver.kill()
        driver.wait()
    record_property("pass@1", [pass_at_1(undisturbed), pass_at_1(run)])
    record_property("wall_s", [read_json(each.summary_path)["wall_s"] for each in (undisturbed, run)])
    assert kept.items() <= sealed_groups(run).items()
    assert_complete(run, 150, 50)
    assert [run.policy(version) for version in range(4)] == [undisturbed.policy(version) for version in range(4)]
    assert pass_at_1(run) == pass_at_1(undisturbed)


def test_a_run_is_submitted_as_a_job(write_recipe, tmp_path: Path, cluster: Cluster):
    recipe = write_recipe(launch={"kind": "ray", "num_samplers": 1})
    run = RunFolder(tmp_path / "run")
    words = [sys.executable, "-m", "oapl", "train", recipe, "--run_dir", run.path]
    call(RAY, "job", "submit", f"--address=http://{HEAD}:{DASHBOARD}", "--", *words)
    assert_complete(run, 12, 4)
