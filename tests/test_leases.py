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

import pytest

from helpers import make_group, make_round, make_shard
from oapl.store import RoundFolder
from oapl.store.leases import Leases, is_gone, machine, this_process
from oapl.types import PolicyRef

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
