"""Leases: one holder at a time, taken over from the dead and the silent, and late work counted once or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier

import pytest

from helpers import make_group, make_round, make_shard
from oapl.errors import StoreError
from oapl.store import RoundFolder, RunFolder, leases, rounds
from oapl.store import run as run_module
from oapl.store.files import create_bytes, move_aside
from oapl.store.leases import LeaseLock, Leases, is_gone, machine, this_process
from oapl.types import PolicyRef, Round

LONG_S, SHORT_S = 600.0, 0.4
POLICY = PolicyRef(version=4, step=200, digest="ab" * 32)

HOLD = """
import sys, time
from pathlib import Path
from oapl.store.leases import Leases
with Leases(Path(sys.argv[1]), float(sys.argv[2])).take("a"):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder_of_a(folder: Path, length_s: float) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lease `a`; killed at the end, if it still lives."""
    command = [sys.executable, "-c", HOLD, str(folder), str(length_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            yield holder
        finally:
            holder.kill()


def wait_for(leases: Leases, name: str, patience_s: float = 30.0):
    give_up = time.monotonic() + patience_s
    while (lease := leases.take(name)) is None:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return lease


def test_a_lease_has_one_holder_and_is_free_once_given_back(tmp_path: Path):
    mine, theirs = Leases(tmp_path, LONG_S), Leases(tmp_path, LONG_S)
    lease = mine.take("a")
    assert lease is not None
    with lease:
        assert theirs.take("a") is None
        other = theirs.take("b")  # another name is another lease
        assert other is not None
        with other:
            assert mine.take("b") is None
    again = theirs.take("a")
    assert again is not None
    with again:
        assert mine.take("a") is None


def test_of_many_who_reach_for_a_lease_at_once_one_has_it(tmp_path: Path):
    for name in map(str, range(20)):
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(lambda _: Leases(tmp_path, LONG_S).take(name), range(8)))  # noqa: B023
        held = [lease for lease in taken if lease is not None]
        assert len(held) == 1
        with held[0]:
            pass


@pytest.mark.skipif(machine() is None, reason="the system does not tell machines apart")
def test_a_killed_holder_on_this_machine_is_taken_over_from_at_once(tmp_path: Path):
    with holder_of_a(tmp_path, LONG_S):
        assert Leases(tmp_path, LONG_S).take("a") is None
    lease = Leases(tmp_path, LONG_S).take("a")
    assert lease is not None
    with lease:
        pass


def test_a_holder_elsewhere_that_falls_silent_is_taken_over_from_after_the_leases_length(tmp_path: Path):
    """Frozen, as one behind a cut network seems: it says nothing, and cannot be seen to have ended."""
    leases = Leases(tmp_path, SHORT_S)
    with holder_of_a(tmp_path, SHORT_S) as holder:
        start = time.monotonic()
        while time.monotonic() - start < 5 * SHORT_S:
            assert leases.take("a") is None  # it says that it lives
            time.sleep(0.02)
        holder.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        with wait_for(leases, "a"):
            assert time.monotonic() - start >= SHORT_S / 2  # since it last spoke
            holder.send_signal(signal.SIGCONT)
            time.sleep(2 * SHORT_S)  # back, it sees that it was taken over from
            assert Leases(tmp_path, LONG_S).take("a") is None
            newest = json.loads((tmp_path / "a.1.json").read_text())
            assert newest["pid"] == os.getpid()


def test_a_holder_whose_folder_was_moved_aside_leaves_the_next_ones_lease_alone(tmp_path: Path):
    """As a sampler whose round is made again meanwhile."""
    first = Leases(tmp_path / "round", SHORT_S).take("a")
    assert first is not None
    with first:
        move_aside(tmp_path / "round")
        second = Leases(tmp_path / "round", SHORT_S).take("a")
        assert second is not None
        lease = tmp_path / "round" / "a.0.json"
        own = json.loads(lease.read_text())["id"]
        give_up = time.monotonic() + 2 * SHORT_S
        while time.monotonic() < give_up:
            assert json.loads(lease.read_text())["id"] == own
            time.sleep(0.01)
        assert first.is_lost()
        assert not second.is_lost()
    assert Leases(tmp_path / "round", LONG_S).take("a") is None  # what the first gave back was not this one
    second.__exit__()


def test_a_lease_is_judged_by_the_length_that_its_holder_gave_it(tmp_path: Path):
    content = {"machine": "another", "length_s": LONG_S}
    (tmp_path / "a.0.json").write_text(json.dumps(content))
    (tmp_path / "b.0.json").write_text(json.dumps({**content, "length_s": SHORT_S}))
    mine = Leases(tmp_path, 0.01)
    assert mine.take("a") is None
    with wait_for(Leases(tmp_path, LONG_S), "b"):
        assert mine.take("a") is None


def test_a_trainer_that_was_taken_over_from_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the lock of an object store. The first was suspended, and goes on once another has its place."""
    monkeypatch.setattr(leases, "LOCK_S", SHORT_S)
    monkeypatch.setattr(leases, "is_gone", lambda _: False)
    monkeypatch.setattr(run_module, "lock", lambda path, *about: LeaseLock(path, *about, "run_dir", path.parent))

    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"weights")

    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    with first.lock("trainer"):
        first.write_checkpoint(0, write)
        silence(first)
        with second.lock("trainer", 20.0):
            for late in (
                lambda: first.publish_policy(1, 4, write),
                lambda: first.publish_snapshot(4, write),
                lambda: first.write_checkpoint(4, write),
                lambda: first.remove_checkpoint(0),
            ):
                with pytest.raises(StoreError, match="another trainer has taken the run over"):
                    late()
            second.publish_policy(1, 4, write)
    assert (second.policy_versions(), second.checkpoint_steps(), second.snapshot_steps()) == ([1], [0], [])


def silence(run: RunFolder) -> None:
    """Ends what says that the run's trainer lives."""
    assert isinstance(run._trainer_lock, LeaseLock)
    run._trainer_lock._lease._ended.set()


def test_who_is_gone_is_known_on_its_own_machine_alone():
    here = this_process()
    assert not is_gone(here)
    assert not is_gone({**here, "machine": "another", "pid": 2**22})  # who knows
    if here["machine"] is not None:
        assert is_gone({**here, "started": "0"})  # the number went to another process
        assert is_gone({**here, "pid": 2**22 + 1})  # beyond the largest there is


def test_a_lease_whose_file_is_cut_short_is_taken_over_after_its_length(tmp_path: Path):
    (tmp_path / "a.0.json").write_text('{"machine"')
    leases = Leases(tmp_path, SHORT_S)
    assert leases.take("a") is None
    with wait_for(leases, "a"):
        pass


# What is stored by two who both think the lease is theirs


def test_of_two_samplers_that_store_one_shard_the_first_counts_and_the_other_leaves_no_trace(tmp_path: Path):
    round, folder = make_round(4, POLICY, num_shards=1, prompts_per_shard=1), RoundFolder(tmp_path)
    folder.open(round)
    assert folder.write_shard(round, 0, make_shard([make_group(0, [1.0, 0.0])]))
    assert not folder.write_shard(round, 0, make_shard([make_group(0, [0.0, 0.5])]))
    assert folder.read_shard(0).groups[0].rewards.tolist() == [1.0, 0.0]
    assert [path.name for path in folder.path.glob("*.parquet")] == ["groups-00000.parquet"]


def test_a_shard_whose_file_a_dead_sampler_left_without_a_seal_is_stored_beside_it(tmp_path: Path):
    """And the file that nothing names is gone then, so that others who read the Parquet files find each group once."""
    round, folder = make_round(4, POLICY, num_shards=1, prompts_per_shard=1), RoundFolder(tmp_path)
    folder.open(round)
    folder.parquet_path(0).write_bytes(b"PAR1 of another")
    assert folder.write_shard(round, 0, make_shard([make_group(0, [1.0, 0.0])]))
    assert folder.read_shard(0).groups[0].rewards.tolist() == [1.0, 0.0]
    assert list(folder.path.glob("*.parquet")) == [folder.parquet_path(0)]


def test_many_samplers_that_store_one_shard_at_once_leave_one_whole(tmp_path: Path):
    for attempt in range(10):
        round, folder = make_round(4, POLICY, num_shards=1, prompts_per_shard=1), RoundFolder(tmp_path / str(attempt))
        folder.open(round)
        shards = [make_shard([make_group(0, [float(sampler), 0.0])]) for sampler in range(6)]
        with ThreadPoolExecutor(6) as pool:
            won = list(pool.map(lambda shard: folder.write_shard(round, 0, shard), shards))  # noqa: B023
        assert won.count(True) == 1
        assert folder.read_shard(0).groups[0].rewards[0] == float(won.index(True))
        assert list(folder.path.glob("*.parquet")) == [folder.parquet_path(0)]


def test_a_late_draft_of_a_round_that_was_moved_aside_is_none_of_the_new_one(tmp_path: Path):
    """Else its samples would be graded, and stored as the new policy's."""
    old, new = (
        make_round(4, policy, num_shards=2, prompts_per_shard=1) for policy in (POLICY, PolicyRef(4, 200, "cd"))
    )
    folder, shard = RoundFolder(tmp_path), make_shard([make_group(0, [1.0, 0.0])])
    folder.open(new)
    folder.write_draft(old, 0, shard.without_verdicts())
    assert folder.read_drafts(new) == {}
    assert list(folder.read_drafts(old)) == [0]


def test_a_late_shard_of_a_round_that_was_moved_aside_does_not_count_for_the_new_one(tmp_path: Path):
    old, new = (
        make_round(4, policy, num_shards=2, prompts_per_shard=1) for policy in (POLICY, PolicyRef(4, 200, "cd"))
    )
    folder = RoundFolder(tmp_path)
    folder.open(new)
    folder.write_shard(new, 0, make_shard([make_group(0, [1.0, 0.0])]))
    folder.write_shard(old, 1, make_shard([make_group(1, [1.0, 0.0])]))
    assert folder.set_strange_shards_aside(new) == [1]
    assert folder.stored_shards() == [0]


def test_two_may_set_the_same_late_shard_aside(tmp_path: Path):
    """A trainer and a sampler that both come upon it."""
    for attempt in range(30):
        old, new = (make_round(4, policy, num_shards=1) for policy in (POLICY, PolicyRef(4, 200, "cd")))
        folder = RoundFolder(tmp_path / str(attempt))
        folder.open(new)
        folder.write_shard(old, 0, make_shard([make_group(0, [1.0, 0.0])]))
        together = Barrier(2)

        def set_aside(folder: RoundFolder = folder, new: Round = new, together: Barrier = together) -> None:
            together.wait()
            folder.set_strange_shards_aside(new)

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(set_aside) for _ in range(2)]:
                done.result()
        assert folder.stored_shards() == []
        assert not list(folder.path.glob("*.parquet"))


def test_a_shard_that_was_set_aside_meanwhile_is_none_of_the_round(tmp_path: Path):
    round, folder = make_round(4, POLICY, num_shards=1), RoundFolder(tmp_path)
    folder.open(round)
    assert not folder.is_shard_of(round, 0)
    folder.seal_path(0).write_text("{")
    with pytest.raises(StoreError, match="cannot be read as JSON"):  # damage is no such case
        folder.is_shard_of(round, 0)


def test_a_shard_counts_whole_though_its_file_was_cleaned_away_before_its_seal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By a sampler that was quicker, and whose own shard is set aside then."""
    round, folder = make_round(4, POLICY, num_shards=1), RoundFolder(tmp_path)
    folder.open(round)

    def create_and_wait(path: Path, data: bytes) -> bool:
        created = create_bytes(path, data)
        monkeypatch.setattr(rounds, "create_bytes", create_bytes)
        assert folder.write_shard(round, 0, make_shard([make_group(0, [0.0, 0.5])]))
        folder.set_shard_aside(0)
        return created

    monkeypatch.setattr(rounds, "create_bytes", create_and_wait)
    assert folder.write_shard(round, 0, make_shard([make_group(0, [1.0, 0.0])]))
    assert folder.read_shard(0).groups[0].rewards.tolist() == [1.0, 0.0]
