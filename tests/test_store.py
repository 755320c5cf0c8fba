"""The run folder: what is stored comes back exactly, what is damaged is noticed, and nothing is ever deleted."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors import SafetensorError

from helpers import flip_a_bit, make_completion, make_group, make_round, make_shard
from oapl.errors import StoreError
from oapl.store import RoundFolder, RunFolder, Unscored, put_in_order
from oapl.store.files import (
    SEAL,
    Lock,
    digest_file,
    move_aside,
    numbered_folders,
    storing,
    verify_sealed_folder,
    write_bytes,
    write_sealed_folder,
)
from oapl.types import FailedGroup, PolicyRef, Round, Shard

POLICY = PolicyRef(version=4, step=200, digest="ab" * 32)


def cut_in_half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


DAMAGES = pytest.mark.parametrize("damage", [flip_a_bit, cut_in_half])
Damage = Callable[[Path], None]


# Shards


def odd_shard() -> Shard:
    """Completions of unlike lengths, log-probs of every magnitude, text that needs care."""
    rng = np.random.default_rng(0)
    tiny = -np.float32(1.4e-45)  # the least float32 there is
    first = make_group(
        0,
        [1.0, 0.1],
        prompt_ids=[5, 6, 7],
        completions=[
            make_completion(range(100), -rng.exponential(size=100) * 10.0 ** rng.integers(-30, 3, size=100)),
            make_completion([2**31 - 1], [tiny], finish_reason="length"),
        ],
    )
    second = make_group(1, [-2.5, 1e30], prompt_ids=[9])
    return make_shard([first, second], [FailedGroup(2, "train/2", 'it raised "é"\n')])


def stored(path: Path, shard: Shard) -> tuple[RoundFolder, Round]:
    """A round of two shards of three prompts each, the first of which is in."""
    folder, round = RoundFolder(path), make_round(4, POLICY, num_shards=2, prompts_per_shard=3)
    folder.open(round)
    folder.write_shard(round, 0, shard)
    return folder, round


def test_a_shard_comes_back_exactly(tmp_path: Path):
    shard = odd_shard()
    folder, _ = stored(tmp_path / "000004", shard)
    back = folder.read_shard(0)
    assert back.failed == shard.failed
    assert (back.sampling_s, back.grading_s, back.mismatch) == (shard.sampling_s, shard.grading_s, shard.mismatch)
    assert (back.num_completions, back.num_tokens) == (4, 100 + 1 + 1 + 1)
    for group, original in zip(back.groups, shard.groups, strict=True):
        assert (group.position, group.prompt_id, group.prompt) == (
            original.position,
            original.prompt_id,
            original.prompt,
        )
        assert group.texts == original.texts
        assert group.prompt_ids.tolist() == original.prompt_ids.tolist()
        assert group.rewards.tobytes() == original.rewards.tobytes()
        for completion, source in zip(group.completions, original.completions, strict=True):
            assert completion.finish_reason == source.finish_reason
            assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
            assert completion.token_ids.tobytes() == source.token_ids.tobytes()
            assert completion.logprobs.tobytes() == source.logprobs.tobytes()  # bit for bit


def test_a_shard_of_failures_alone_comes_back(tmp_path: Path):
    shard = make_shard([], [FailedGroup(0, "train/0", "it hung")])
    folder, _ = stored(tmp_path / "000004", shard)
    assert folder.read_shard(0).groups == ()
    assert folder.read_shard(0).failed == shard.failed


def test_a_round_comes_back_exactly(tmp_path: Path):
    folder, round = stored(tmp_path / "000004", odd_shard())
    assert folder.load() == round


def test_a_round_of_before_there_was_truncation_or_stop_texts_is_read(tmp_path: Path):
    folder, round = stored(tmp_path / "000004", odd_shard())
    value = json.loads((folder.path / "round.json").read_text())
    for name in ("stop", "top_p", "top_k"):
        del value["sampling"][name]
    (folder.path / "round.json").write_text(json.dumps(value))
    assert folder.load() == round


def test_a_shard_is_readable_with_pandas_alone(tmp_path: Path):
    folder, round = stored(tmp_path / "000004", odd_shard())
    frame = pd.read_parquet(folder.path / "groups-00000.parquet")
    assert list(frame.columns) == [
        "round",
        "position",
        "prompt_id",
        "index",
        "prompt",
        "completion",
        "reward",
        "answer",
        "reason",
        "scores",
        "finish_reason",
        "prompt_ids",
        "token_ids",
        "logprobs",
        "policy_version",
        "policy_digest",
        "temperature",
        "max_completion_length",
        "seed",
        "verifier",
    ]
    assert len(frame) == 4
    last = frame.iloc[3]
    assert (last["round"], last["position"], last["index"], last["prompt_id"]) == (4, 1, 1, "train/1")
    assert (last["prompt"], last["completion"], last["finish_reason"]) == ("question 1\n", "answer 1", "stop")
    assert (last["policy_version"], last["policy_digest"]) == (4, POLICY.digest)
    assert (last["temperature"], last["max_completion_length"]) == (1.0, 8)
    assert (last["seed"], last["verifier"]) == (round.seed, "countdown/1")
    assert (last["prompt_ids"].tolist(), last["token_ids"].tolist()) == ([9], [4])
    assert frame["reward"].tolist() == pytest.approx([1.0, 0.1, -2.5, 1e30])


def test_a_shard_counts_only_once_its_seal_is_written(tmp_path: Path):
    folder, _ = stored(tmp_path / "000004", odd_shard())
    assert folder.has_shard(0)
    folder.seal_path(0).unlink()
    assert not folder.has_shard(0)


def test_a_round_is_sealed_with_the_sums_of_its_shards(tmp_path: Path):
    folder, round = stored(tmp_path / "000004", odd_shard())
    with pytest.raises(StoreError, match=r"groups-00001\.json cannot be read"):
        folder.seal(round)
    folder.write_shard(round, 1, make_shard([make_group(3, [1.0, 0.0])]))
    folder.seal(round)
    seal = json.loads((folder.path / SEAL).read_text())
    assert {name: seal[name] for name in ("num_groups", "num_failed", "num_completions", "num_tokens")} == {
        "num_groups": 2 + 1,
        "num_failed": 1,
        "num_completions": 4 + 2,
        "num_tokens": 103 + 2,
    }
    assert seal["digests"] == [digest_file(folder.parquet_path(0)), digest_file(folder.parquet_path(1))]


@DAMAGES
def test_a_damaged_shard_is_told_with_both_digests(tmp_path: Path, damage: Damage):
    folder, _ = stored(tmp_path / "000004", odd_shard())
    path = folder.parquet_path(0)
    sealed = digest_file(path)
    damage(path)
    with pytest.raises(StoreError, match=f"SHA-256 {digest_file(path)[:12]}…, sealed as {sealed[:12]}…") as caught:
        folder.read_shard(0)
    assert str(path) in str(caught.value)


@DAMAGES
def test_a_damaged_shard_is_set_aside_with_its_bytes(tmp_path: Path, damage: Damage):
    folder, round = stored(tmp_path / "000004", odd_shard())
    folder.write_shard(round, 1, make_shard([make_group(3, [1.0, 0.0])]))
    folder.seal(round)
    damage(folder.parquet_path(0))
    before = contents(tmp_path)
    assert "does not match its seal" in str(folder.set_damaged_shard_aside(0))
    assert not folder.has_shard(0)
    assert not folder.is_sealed()
    assert folder.has_shard(1)
    assert contents(tmp_path) == before
    folder.write_shard(round, 0, make_shard([], [FailedGroup(0, "train/0", "it hung")]))  # its place is free
    assert folder.set_damaged_shard_aside(0) is None
    assert not folder.is_sealed()  # all are in, but what was sealed is not what is there now
    folder.seal(round)
    seal = json.loads((folder.path / SEAL).read_text())
    assert seal["num_failed"] == 1
    assert seal["digests"] == [digest_file(folder.parquet_path(0)), digest_file(folder.parquet_path(1))]


def test_a_seal_that_lost_its_shard_is_set_aside(tmp_path: Path):
    folder, _ = stored(tmp_path / "000004", odd_shard())
    folder.parquet_path(0).unlink()
    assert "groups-00000.parquet cannot be read" in str(folder.set_damaged_shard_aside(0))
    assert not folder.has_shard(0)


def test_a_good_shard_stays_where_it_is(tmp_path: Path):
    folder, _ = stored(tmp_path / "000004", odd_shard())
    before = sorted(folder.path.iterdir())
    assert folder.set_damaged_shard_aside(0) is None
    assert folder.set_damaged_shard_aside(1) is None  # not stored yet
    assert sorted(folder.path.iterdir()) == before


def test_a_seal_with_any_bit_flipped_is_either_read_or_told(tmp_path: Path):
    # A flip may land in a number, which then reads as another; it must never end in another error than StoreError.
    folder, _ = stored(tmp_path / "000004", odd_shard())
    data = folder.seal_path(0).read_bytes()
    told = 0
    for place in range(len(data)):
        folder.seal_path(0).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            folder.read_shard(0)
        except StoreError:
            told += 1
    assert told > len(data) / 2


# Sealed folders


def sealed_folder(path: Path) -> Path:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_bytes(b"{}")

    write_sealed_folder(path, {"step": 200}, write)
    return path


def test_a_sealed_folder_carries_its_facts_and_digests(tmp_path: Path):
    folder = sealed_folder(tmp_path / "000004")
    assert verify_sealed_folder(folder) == {
        "step": 200,
        "files": {name: digest_file(folder / name) for name in ("config.json", "model.safetensors")},
    }


def test_an_altered_file_is_named_with_both_digests(tmp_path: Path):
    folder = sealed_folder(tmp_path / "000004")
    sealed = digest_file(folder / "model.safetensors")
    flip_a_bit(folder / "model.safetensors")
    found = digest_file(folder / "model.safetensors")
    with pytest.raises(StoreError, match=rf"model\.safetensors .*SHA-256 {found[:12]}…, sealed as {sealed[:12]}…"):
        verify_sealed_folder(folder)


def test_a_missing_file_is_named(tmp_path: Path):
    folder = sealed_folder(tmp_path / "000004")
    (folder / "config.json").unlink()
    with pytest.raises(StoreError, match=r"config\.json is missing, though .*sealed\.json lists it"):
        verify_sealed_folder(folder)


def test_a_seal_without_its_list_of_files_is_told(tmp_path: Path):
    folder = sealed_folder(tmp_path / "000004")
    (folder / SEAL).write_text('{"step": 200, "filet": {}}')
    with pytest.raises(StoreError, match=r"sealed\.json lacks `files`"):
        verify_sealed_folder(folder)


def test_a_folder_is_not_seen_before_it_is_whole(tmp_path: Path):
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half of the wei")
        assert numbered_folders(tmp_path) == []
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreError, match=r"cannot write .*000004: No space left on device\. The disk is full"):
        write_sealed_folder(tmp_path / "000004", {"step": 200}, write)
    assert numbered_folders(tmp_path) == []
    sealed_folder(tmp_path / "000004")  # what the first try left behind is no obstacle
    verify_sealed_folder(tmp_path / "000004")


def test_a_folder_that_lost_its_seal_gives_way_and_is_kept(tmp_path: Path):
    folder = sealed_folder(tmp_path / "000004")
    (folder / SEAL).unlink()
    (folder / "model.safetensors").write_bytes(b"old")
    sealed_folder(folder)
    verify_sealed_folder(folder)
    assert (tmp_path / "000004.aside-1" / "model.safetensors").read_bytes() == b"old"


def test_what_is_set_aside_never_overwrites_what_was_before(tmp_path: Path):
    for number in (1, 2, 3):
        (tmp_path / "000004").write_text(f"number {number}")
        assert move_aside(tmp_path / "000004").name == f"000004.aside-{number}"
    assert [(tmp_path / f"000004.aside-{n}").read_text() for n in (1, 2, 3)] == ["number 1", "number 2", "number 3"]


# Files


@pytest.mark.parametrize(
    ("code", "words", "remedy"),
    [
        (errno.ENOSPC, "No space left on device", "The disk is full. Free some space and run the same command again"),
        (errno.EROFS, "Read-only file system", "The file system is read-only. Make it writable or choose another"),
        (errno.EACCES, "Permission denied", "Change the permissions or choose another run_dir"),
        (errno.EIO, "Input/output error", "Check the run folder and run the same command again"),
    ],
)
@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_bytes_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, words: str, remedy: str
):
    path = tmp_path / "summary.json"
    write_bytes(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError) as caught:
            write_bytes(path, b"new")
    assert str(caught.value).startswith(f"cannot write {path}: {words}. ")
    assert remedy in str(caught.value)
    assert "what was sealed so far is kept" in str(caught.value)
    assert path.read_bytes() == b"old"
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_full_disk_leaves_a_shard_unstored_and_the_next_try_stores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, round = stored(tmp_path / "000004", odd_shard())

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shard = make_shard([make_group(3, [1.0, 0.0])])
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", fail)
        with pytest.raises(StoreError, match="The disk is full"):
            folder.write_shard(round, 1, shard)
    assert folder.has_shard(0)
    assert not folder.has_shard(1)
    folder.write_shard(round, 1, shard)
    assert folder.read_shard(1).num_completions == 2


# Metrics


def test_metrics_come_back_in_the_order_of_their_steps(tmp_path: Path):
    run = RunFolder(tmp_path)
    assert run.metrics() == []
    for step in (1, 2, 3):
        run.append_metrics({"step": step, "loss": step / 2})
    assert run.metrics() == [{"step": step, "loss": step / 2} for step in (1, 2, 3)]


def test_a_cut_last_line_is_skipped_and_does_not_spoil_the_next(tmp_path: Path):
    run = RunFolder(tmp_path)
    run.append_metrics({"step": 1, "loss": 0.5})
    run.append_metrics({"step": 2, "loss": 0.25})
    run.metrics_path.write_bytes(run.metrics_path.read_bytes()[:-8])  # a crash inside the second line
    assert [record["step"] for record in run.metrics()] == [1]
    run.append_metrics({"step": 2, "loss": 0.125})
    assert run.metrics() == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.125}]


def test_of_a_step_done_twice_the_later_record_counts(tmp_path: Path):
    run = RunFolder(tmp_path)
    for step, loss in ((1, 0.5), (2, 0.4), (3, 0.3), (2, 0.44), (3, 0.33)):
        run.append_metrics({"step": step, "loss": loss})
    assert [(record["step"], record["loss"]) for record in run.metrics()] == [(1, 0.5), (2, 0.44), (3, 0.33)]


# Locks

HOLD = """
import sys, time
from pathlib import Path
from oapl.store.files import Lock
with Lock(Path(sys.argv[1]), "trainer"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_has_one_holder_and_is_free_once_that_is_killed(tmp_path: Path):
    path = tmp_path / ".trainer.lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(StoreError) as caught, Lock(path, "trainer", patience_s=0.1):
                pass
            assert str(caught.value) == (
                f"{tmp_path} already has a trainer at work (process {holder.pid}). "
                f"Wait for it to end, stop it, or choose another run_dir."
            )
        finally:
            holder.send_signal(signal.SIGKILL)
    with Lock(path, "trainer", patience_s=5.0):
        assert path.read_text() == str(os.getpid())


def test_a_lock_is_free_again_after_its_block(tmp_path: Path):
    for _ in range(2):
        with Lock(tmp_path / ".sampler.lock", "sampler", patience_s=0.1):
            pass


# Putting a run in order: L = 2 steps a round, one group a step

STEPS_PER_ROUND = 2
NUM_ROUNDS = 4


def contents(path: Path) -> Counter[bytes]:
    """Every file's bytes, wherever it lies: what must be the same before and after."""
    return Counter(file.read_bytes() for file in path.rglob("*") if file.is_file())


def make_run(path: Path, *, rounds: int, checkpoints: list[int], rounds_ahead: int = 0) -> RunFolder:
    """A run that has sampled `rounds` whole rounds. Weights and states are a few bytes; nothing here reads them."""
    run = RunFolder(path)
    for index in range(rounds):
        policy = publish(run, max(0, index - rounds_ahead))
        fill(run, index, policy)
    for step in checkpoints:
        run.write_checkpoint(step, lambda folder, step=step: write_file(folder, "state.json", f"state of step {step}"))
    return run


def write_file(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def publish(run: RunFolder, version: int) -> PolicyRef:
    return run.publish_policy(
        version, version * STEPS_PER_ROUND, lambda folder: write_file(folder, "model.safetensors", f"weights {version}")
    )


def fill(run: RunFolder, index: int, policy: PolicyRef) -> None:
    folder, round = run.round(index), make_round(index, policy, num_shards=STEPS_PER_ROUND)
    folder.open(round)
    for number in range(STEPS_PER_ROUND):
        folder.write_shard(round, number, make_shard([make_group(number, [1.0, float(index)])]))
    folder.seal(round)


def unscored(run: RunFolder) -> Unscored:
    """First and last policy are to be evaluated, and the snapshots there are, or were, validated."""
    snapshots = numbered_folders(run.path / "snapshots")
    return Unscored(
        frozenset(
            version for version in (0, NUM_ROUNDS) if not run.evaluation(version).is_complete_of(run.policy(version))
        ),
        frozenset(step for step in snapshots if not run.validation(step).is_complete_of(run.snapshot(step))),
    )


def order(run: RunFolder, rounds_ahead: int = 0) -> list[str]:
    """Puts a run in order, and checks that it deletes nothing and that a second time has nothing to do."""

    def policy_of_round(index: int) -> int:
        return max(0, index - rounds_ahead)

    before = contents(run.path)
    notes = put_in_order(
        run,
        steps_per_round=STEPS_PER_ROUND,
        shards_per_round=STEPS_PER_ROUND,
        num_rounds=NUM_ROUNDS,
        policy_of_round=policy_of_round,
        unscored=partial(unscored, run),
    )
    assert contents(run.path) == before
    return notes


def test_a_run_in_order_is_left_alone(tmp_path: Path):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2, 3])
    assert order(run) == []
    assert (run.checkpoint_steps(), run.policy_versions(), run.round_indices()) == ([0, 2, 3], [0, 1], [0, 1])


def test_an_empty_run_is_in_order(tmp_path: Path):
    assert order(RunFolder(tmp_path)) == []


@DAMAGES
def test_a_damaged_newest_checkpoint_is_set_aside_for_the_one_before(tmp_path: Path, damage: Damage):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2, 3])
    damage(run.checkpoint_path(3) / "state.json")
    (note,) = order(run)
    assert "state.json does not match its seal" in note
    assert note.endswith("Moved to 000003.aside-1.")
    assert run.checkpoint_steps() == [0, 2]
    assert (run.policy_versions(), run.round_indices()) == ([0, 1], [0, 1])  # step 2 made policy 1: both stay
    assert order(run) == []


@DAMAGES
def test_a_checkpoint_whose_seal_is_damaged_is_set_aside(tmp_path: Path, damage: Damage):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2, 3])
    damage(run.checkpoint_path(3) / SEAL)
    assert "Moved to 000003.aside-1." in order(run)[0]
    assert run.checkpoint_steps() == [0, 2]


def test_policies_and_rounds_that_training_has_yet_to_reach_again_are_set_aside(tmp_path: Path):
    run = make_run(tmp_path, rounds=3, checkpoints=[0, 2, 4])
    flip_a_bit(run.checkpoint_path(4) / "state.json")  # back to step 2: policy 2 and its round are of the future
    notes = order(run)
    assert run.checkpoint_steps() == [0, 2]
    assert (run.policy_versions(), run.round_indices()) == ([0, 1], [0, 1])
    assert "Step 4 is trained again, so policy 2 is made anew. Moved to 000002.aside-1." in notes
    assert len(notes) == 3
    assert order(run) == []


def test_without_any_good_checkpoint_training_starts_again_on_the_first_round(tmp_path: Path):
    run = make_run(tmp_path, rounds=2, checkpoints=[2, 3])
    for step in (2, 3):
        cut_in_half(run.checkpoint_path(step) / "state.json")
    order(run)
    assert run.checkpoint_steps() == []
    assert (run.policy_versions(), run.round_indices()) == ([0], [0])


def test_rounds_ahead_are_kept_where_their_policy_is(tmp_path: Path):
    # Round 2 is sampled from policy 1, which stands although step 4 is trained again.
    run = make_run(tmp_path, rounds=3, checkpoints=[0, 2, 4], rounds_ahead=1)
    flip_a_bit(run.checkpoint_path(4) / "state.json")
    order(run, rounds_ahead=1)
    assert (run.policy_versions(), run.round_indices()) == ([0, 1], [0, 1, 2])


@DAMAGES
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_shard_of_the_current_round_is_set_aside(tmp_path: Path, damage: Damage, number: int):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2])
    damage(run.round(1).parquet_path(number))
    (note,) = order(run)
    assert f"groups-0000{number}.parquet does not match its seal" in note
    assert note.endswith("Moved aside; it is sampled again.")
    assert [run.round(1).has_shard(n) for n in (0, 1)] == [number != 0, number != 1]
    assert not run.round(1).is_sealed()
    assert order(run) == []


def test_a_shard_whose_seal_is_damaged_is_set_aside(tmp_path: Path):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2])
    cut_in_half(run.round(1).seal_path(0))
    assert "Moved aside; it is sampled again." in order(run)[0]
    assert [run.round(1).has_shard(n) for n in (0, 1)] == [False, True]


def test_a_shard_that_is_trained_already_is_left_alone(tmp_path: Path):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2])
    flip_a_bit(run.round(0).parquet_path(0))
    assert order(run) == []
    assert run.round(0).has_shard(0)


def test_a_round_whose_description_is_damaged_is_opened_again_with_its_shards(tmp_path: Path):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2])
    cut_in_half(run.round(1).path / "round.json")
    assert order(run)[0].endswith("Moved to round.json.aside-1.")
    assert not run.round(1).is_open()
    assert not run.round(1).is_sealed()
    assert [run.round(1).has_shard(n) for n in (0, 1)] == [True, True]


def test_a_sealed_round_of_other_weights_is_set_aside(tmp_path: Path):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2])
    path = run.round(1).path / "round.json"
    path.write_text(path.read_text().replace(run.policy(1).digest, "0" * 64))
    (note,) = order(run)
    assert "was sampled from other weights than policy 1" in note
    assert run.round_indices() == [0]
    assert run.policy_versions() == [0, 1]


def lacking_a_shard(run: RunFolder, index: int) -> None:
    """Its round is then still to be sampled, so its policy is needed."""
    for path in (run.round(index).seal_path(1), run.round(index).path / SEAL):
        path.unlink()


def damage_weights(run: RunFolder, version: int) -> None:
    flip_a_bit(run.policy_path(version) / "model.safetensors")


def damage_seal(run: RunFolder, version: int) -> None:
    cut_in_half(run.policy_path(version) / SEAL)


def lose_seal(run: RunFolder, version: int) -> None:
    (run.policy_path(version) / SEAL).unlink()


DamagePolicy = Callable[[RunFolder, int], None]


@pytest.mark.parametrize("damage", [damage_weights, damage_seal, lose_seal])
def test_a_damaged_policy_is_made_again_from_the_checkpoint_of_its_step(tmp_path: Path, damage: DamagePolicy):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2, 3])
    lacking_a_shard(run, 1)
    damage(run, 1)
    notes = order(run)
    assert run.policy_versions() == [0]
    assert (run.path / "policies" / "000001.aside-1").is_dir()
    assert run.checkpoint_steps() == [0, 2]  # so that training passes step 2 again and seals policy 1
    assert any("Policy 1 is made again from step 2. Moved to 000003.aside-1." in note for note in notes)
    assert run.round(1).has_shard(0)
    publish(run, 1)
    assert order(run) == []


@pytest.mark.parametrize("damage", [damage_weights, damage_seal, lose_seal])
def test_a_damaged_policy_without_its_checkpoint_is_told_with_what_to_do(tmp_path: Path, damage: DamagePolicy):
    run = make_run(tmp_path, rounds=2, checkpoints=[3])
    lacking_a_shard(run, 1)
    damage(run, 1)
    before = contents(run.path)
    with pytest.raises(StoreError, match=r"there is no checkpoint of step 2 to make it from again\. Restore .*000001"):
        order(run)
    assert contents(run.path) == before


def test_a_damaged_first_policy_is_made_again_from_the_model(tmp_path: Path):
    run = make_run(tmp_path, rounds=1, checkpoints=[0, 1])
    lacking_a_shard(run, 0)
    damage_weights(run, 0)
    order(run)
    assert run.policy_versions() == []
    assert run.round(0).has_shard(0)


def test_a_damaged_policy_that_nothing_needs_any_more_is_left_alone(tmp_path: Path):
    run = make_run(tmp_path, rounds=3, checkpoints=[2, 4])
    damage_weights(run, 1)
    assert order(run) == []


def publish_snapshot(run: RunFolder, step: int) -> None:
    run.publish_snapshot(step, lambda folder: write_file(folder, "model.safetensors", f"weights of step {step}"))


def test_a_snapshot_of_a_step_that_is_trained_again_is_set_aside(tmp_path: Path):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2])
    for step in (1, 2, 3):
        publish_snapshot(run, step)
    (note,) = order(run)
    assert "Step 3 is trained again. Moved to 000003.aside-1." in note
    assert run.snapshot_steps() == [1, 2]


def test_a_damaged_snapshot_is_made_again_from_the_checkpoint_of_its_step(tmp_path: Path):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 1, 2, 3])
    for step in (1, 3):
        publish_snapshot(run, step)
    flip_a_bit(run.snapshot_path(1) / "model.safetensors")
    assert any("Snapshot 1 is made again from step 1" in note for note in order(run))
    assert run.checkpoint_steps() == [0, 1]
    assert run.snapshot_steps() == []


def test_a_damaged_snapshot_of_the_newest_checkpoint_costs_no_step(tmp_path: Path):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2, 3])
    publish_snapshot(run, 3)
    cut_in_half(run.snapshot_path(3) / SEAL)
    order(run)
    assert run.checkpoint_steps() == [0, 2, 3]
    assert run.snapshot_steps() == []


def test_a_damaged_snapshot_without_its_checkpoint_is_told_with_what_to_do(tmp_path: Path):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2])
    publish_snapshot(run, 1)
    flip_a_bit(run.snapshot_path(1) / "model.safetensors")
    with pytest.raises(StoreError, match=r"no checkpoint of step 1 to make it from again\. Restore .*snapshots/000001"):
        order(run)


def test_a_damaged_snapshot_that_is_scored_already_is_left_alone(tmp_path: Path):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2])
    publish_snapshot(run, 1)
    snapshot = run.snapshot(1)
    assert snapshot is not None
    folder, round = run.validation(1), make_round(1, snapshot, num_shards=1)
    folder.open(round)
    folder.write_shard(round, 0, make_shard([make_group(0, [1.0, 0.0])]))
    folder.seal(round)
    assert folder.load() == round
    flip_a_bit(run.snapshot_path(1) / "model.safetensors")
    assert order(run) == []


def test_a_finished_run_is_in_order(tmp_path: Path):
    last = NUM_ROUNDS * STEPS_PER_ROUND
    run = make_run(tmp_path, rounds=NUM_ROUNDS, checkpoints=[last - STEPS_PER_ROUND, last])
    publish(run, NUM_ROUNDS)
    assert order(run) == []


def test_what_is_no_part_of_a_run_is_ignored(tmp_path: Path):
    run = make_run(tmp_path, rounds=2, checkpoints=[0, 2])
    for name in ("notes.txt", "000009.aside-1", ".000009.partial", "9", "0000009"):
        (tmp_path / "policies" / name).mkdir()
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "rounds" / name).mkdir()
    assert order(run) == []
    assert (run.checkpoint_steps(), run.policy_versions(), run.round_indices()) == ([0, 2], [0, 1], [0, 1])


def test_what_safetensors_says_of_a_full_disk_reads_like_any_other(tmp_path: Path):
    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with (
        pytest.raises(StoreError, match=r"No space left on device. The disk is full. Free some space"),
        storing(tmp_path / "model.safetensors"),
    ):
        raise error


def test_leftovers_of_a_killed_write_are_cleared_wherever_they_lie(tmp_path: Path):
    """A kill while a folder's seal is written leaves a temporary file inside a temporary folder. What a sampler may be
    writing right now, or who evaluates on other problems, is left alone."""
    run = make_run(tmp_path, rounds=1, checkpoints=[0])
    live = run.round(0).path / ".groups-00001.parquet.125.partial"
    others = run.path / "benchmarks" / "amc" / "policy-1" / ".round.json.126.partial"
    others.parent.mkdir(parents=True)
    for path in (live, others):
        path.write_text("{")
    partial = run.path / "policies" / ".000001.partial"
    partial.mkdir()
    (partial / ".sealed.json.123.partial").write_text("{")
    old = run.round(0).path / ".round.json.124.partial"
    old.write_text("{")
    an_hour_ago = time.time() - 3600
    os.utime(old, (an_hour_ago, an_hour_ago))
    removed = run.path / "checkpoints" / ".000002.removed"
    removed.mkdir()
    put_in_order(
        run,
        steps_per_round=STEPS_PER_ROUND,
        shards_per_round=STEPS_PER_ROUND,
        num_rounds=NUM_ROUNDS,
        policy_of_round=lambda index: index,
        unscored=Unscored,
    )
    assert {path for path in run.path.rglob(".*") if path.name.endswith((".partial", ".removed"))} == {live, others}
