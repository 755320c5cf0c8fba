"""A run folder in an object store: a real S3 server in a process of its own, with and without bad days."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from helpers import flip_a_bit, free_port, make_group, make_round, make_shard
from oapl import paths
from oapl.errors import ConfigError, StoreError
from oapl.paths import ObjectPath, store_path
from oapl.store import RoundFolder, RunFolder, files
from oapl.store.files import (
    SEAL,
    digest_file,
    local_folder,
    move_aside,
    read_json,
    verify_sealed_folder,
    write_sealed_folder,
)
from oapl.store.leases import Leases
from oapl.store.order import remove_leftovers
from oapl.types import PolicyRef
from test_death import assert_complete, sealed_groups

pytest.importorskip("moto", reason="the S3 server of these tests")
pytest.importorskip("s3fs")
ClientError = pytest.importorskip("botocore.exceptions").ClientError

HERE = Path(__file__).parent
COUNTDOWN = HERE.parent / "recipes" / "countdown.toml"
POLICY = PolicyRef(version=4, step=200, digest="ab" * 32)


@contextmanager
def serving(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 60
        while not answers(port):
            assert server.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.05)
        yield server
    finally:
        server.kill()
        server.wait()


def answers(port: int) -> bool:
    with socket.socket() as place:
        return place.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of an S3 server."""
    port = free_port()
    with serving([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        yield port


@pytest.fixture
def bucket(server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectPath]:
    """An empty bucket of that server."""
    import fsspec

    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "a-secret-that-nothing-may-write",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server}",
        "OAPL_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    path = store_path(f"s3://bucket-{os.urandom(6).hex()}/runs")
    assert isinstance(path, ObjectPath)
    fsspec.filesystem("s3").mkdir(path.parent.key)
    yield path
    paths.filesystem.cache_clear()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


# Paths


def test_a_path_in_a_store_is_used_as_one_on_a_disk(bucket: ObjectPath):
    path = bucket / "a" / "b.json"
    assert str(path).startswith("s3://bucket-")
    assert (path.name, path.stem, path.suffix, path.parent) == ("b.json", "b", ".json", bucket / "a")
    assert not path.exists()
    path.write_bytes(b"1")
    assert path.exists()
    assert path.is_file()
    assert (bucket / "a").is_dir()
    assert path.read_bytes() == b"1"
    assert list(bucket.iterdir()) == [bucket / "a"]
    assert list(bucket.glob("a/?.json")) == [path]
    assert list((bucket / "none").iterdir()) == []
    with pytest.raises(FileNotFoundError):
        (bucket / "none").read_bytes()
    path.unlink()
    path.unlink(missing_ok=True)
    assert not (bucket / "a").exists()


def test_of_many_who_create_an_object_at_once_one_does(bucket: ObjectPath):
    for attempt in range(5):
        path = bucket / f"{attempt}"
        with ThreadPoolExecutor(6) as pool:
            won = list(pool.map(lambda n: path.create_bytes(b"%d" % n), range(6)))  # noqa: B023
        assert won.count(True) == 1
        assert path.read_bytes() == b"%d" % won.index(True)
        assert path.create_bytes(path.read_bytes())  # as one whose answer was lost would try again


@pytest.mark.parametrize("url", ["s3://", "s3:///run", "s3://key:secret@bucket/run"])
def test_a_url_without_a_bucket_or_with_credentials_is_refused(url: str):
    with pytest.raises(ConfigError, match="credentials come from the environment"):
        store_path(url)


def test_a_bucket_that_is_not_there_is_told_at_once(bucket: ObjectPath):
    start = time.monotonic()
    with pytest.raises((StoreError, FileNotFoundError), match="bucket"):
        (bucket.parent.parent / "no-such-bucket" / "x").write_bytes(b"1")
    assert time.monotonic() - start < 10


# Opening


def test_a_store_that_can_hold_a_run_is_left_as_it_was(bucket: ObjectPath):
    bucket.check_conditional_writes()
    assert list(bucket.iterdir()) == []


def test_a_store_without_conditional_writes_holds_no_run(monkeypatch: pytest.MonkeyPatch):
    class Careless(MemoryFileSystem):
        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: object) -> None:
            super().pipe_file(path, value)

    monkeypatch.setattr(paths, "filesystem", lambda _: Careless())
    with (
        pytest.raises(ConfigError, match="careless:// has no conditional writes"),
        RunFolder("careless://bucket/run").lock("run"),
    ):
        pass


def test_memory_holds_no_run():
    with pytest.raises(ConfigError, match="only this process would see it"), RunFolder("memory://a/run").lock("run"):
        pass


def test_a_bucket_that_is_not_there_holds_no_run(bucket: ObjectPath):
    run = RunFolder(bucket.parent.parent / "no-such-bucket" / "run")
    with pytest.raises(ConfigError, match="there is no 'no-such-bucket'"), run.lock("run"):
        pass


# Patience


class Failing:
    """A store whose every call takes a while and then fails."""

    def __init__(self, error: Exception, takes_s: float = 0.0) -> None:
        self.error, self.takes_s, self.tries = error, takes_s, 0

    def put_file(self, *_: object, **__: object) -> None:
        self.tries += 1
        time.sleep(self.takes_s)
        raise self.error

    get_file = put_file


def failing(monkeypatch: pytest.MonkeyPatch, *about: Any) -> Failing:
    store = Failing(*about)
    monkeypatch.setattr(paths, "PATIENCE_S", 0.3)
    monkeypatch.setattr(paths, "filesystem", lambda _: store)
    return store


def test_an_upload_that_takes_longer_than_patience_lasts_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    store = failing(monkeypatch, OSError("connection reset"), 0.5)
    with pytest.raises(StoreError, match="connection reset"):
        ObjectPath("s3://bucket/x").upload(Path("x"))
    assert store.tries == 2


@pytest.mark.parametrize("error", [OSError(errno.EINVAL, "Invalid bucket name"), ValueError("Invalid endpoint")])
def test_what_asking_again_does_not_mend_is_told_at_once(error: Exception, monkeypatch: pytest.MonkeyPatch):
    store = failing(monkeypatch, error)
    with pytest.raises(StoreError, match="Invalid"):
        ObjectPath("s3://bucket/x").upload(Path("x"))
    assert store.tries == 1


def test_a_body_that_was_cut_short_on_the_way_is_sent_again(monkeypatch: pytest.MonkeyPatch):
    error = OSError(errno.EINVAL, "You did not provide the number of bytes")
    error.__cause__ = ClientError({"Error": {"Code": "IncompleteBody"}}, "PutObject")
    store = failing(monkeypatch, error)
    with pytest.raises(StoreError, match="number of bytes"):
        ObjectPath("s3://bucket/x").upload(Path("x"))
    assert store.tries > 1


def test_a_full_disk_of_this_machine_is_no_fault_of_the_store(bucket: ObjectPath, monkeypatch: pytest.MonkeyPatch):
    seal_a_folder(bucket / "000001")
    store = Failing(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(paths.filesystem("s3"), "get_file", store.get_file)
    with pytest.raises(StoreError, match=r"cannot write .*cache.*: No space left on device\. The disk is full"):
        local_folder(bucket / "000001")
    assert store.tries == 1


# Sealed folders and shards


def seal_a_folder(folder: ObjectPath, content: bytes = b"weights" * 2**20) -> None:
    write_sealed_folder(folder, {"step": 3}, lambda place: (place / "model.safetensors").write_bytes(content))


def test_a_sealed_folder_is_downloaded_once_a_machine(bucket: ObjectPath, tmp_path: Path):
    seal_a_folder(bucket / "000001")
    copy = local_folder(bucket / "000001")
    assert copy.is_relative_to(tmp_path / "cache")
    before = (copy / "model.safetensors").stat().st_mtime_ns
    assert verify_sealed_folder(bucket / "000001")["step"] == 3
    assert local_folder(bucket / "000001") == copy
    assert (copy / "model.safetensors").stat().st_mtime_ns == before


def test_a_copy_that_was_altered_is_downloaded_again(bucket: ObjectPath):
    seal_a_folder(bucket / "000001")
    flip_a_bit(local_folder(bucket / "000001") / "model.safetensors")
    assert (local_folder(bucket / "000001") / "model.safetensors").read_bytes() == b"weights" * 2**20


def test_an_object_that_was_altered_is_told(bucket: ObjectPath):
    seal_a_folder(bucket / "000001")
    (bucket / "000001" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(StoreError, match="does not match its seal"):
        local_folder(bucket / "000001")


def test_of_two_processes_that_seal_one_folder_the_second_is_told(bucket: ObjectPath):
    seal_a_folder(bucket / "000001")
    with pytest.raises(StoreError, match="sealed by another process"):
        seal_a_folder(bucket / "000001", b"others")
    move_aside(bucket / "000001")
    assert (bucket / "000001.aside-1" / SEAL).exists()
    assert not (bucket / "000001").exists()
    seal_a_folder(bucket / "000001", b"others")


def test_a_late_trainers_upload_changes_no_byte_that_another_has_sealed(bucket: ObjectPath):
    late, other = RunFolder(bucket / "run"), RunFolder(bucket / "run")

    def write_late(place: Path) -> None:
        (place / "model.safetensors").write_bytes(b"late")
        other.publish_policy(1, 4, lambda place: (place / "model.safetensors").write_bytes(b"other"))

    with pytest.raises(StoreError, match="sealed by another process"):
        late.publish_policy(1, 4, write_late)
    policy = other.policy(1)
    assert policy is not None
    assert (other.verified_policy_path(policy) / "model.safetensors").read_bytes() == b"other"


def test_a_trainer_that_was_taken_over_from_adds_no_metrics(bucket: ObjectPath):
    run = RunFolder(bucket / "run")
    with run.lock("trainer"):
        run.append_metrics({"step": 1})
        run.sync_metrics()
        assert (bucket / "run" / ".trainer.1.json").create_bytes(b"{}")  # as another takes it over
        run.append_metrics({"step": 2})
        with pytest.raises(StoreError, match="another trainer has taken the run over"):
            run.sync_metrics()
    assert [record["step"] for record in RunFolder(run.path).metrics()] == [1]


def test_what_a_killed_upload_left_is_replaced_or_removed_at_a_trainers_start(bucket: ObjectPath, tmp_path: Path):
    run = RunFolder(bucket / "run")
    (run.policy_path(1) / "model.safetensors").write_bytes(b"of a killed one")
    seal_a_folder(run.policy_path(1))
    assert verify_sealed_folder(run.policy_path(1))["step"] == 3
    leftovers = [run.policy_path(2), run.checkpoint_path(8), run.snapshot_path(8)]
    for folder in leftovers:
        (folder / "model.safetensors").write_bytes(b"half")
    uploads = [tmp_path / "cache" / f"upload-{age}" for age in ("old", "new")]
    for path in uploads:
        path.mkdir()
    os.utime(uploads[0], (0, 0))
    remove_leftovers(run)
    assert not any(folder.exists() for folder in leftovers)
    assert [path.exists() for path in uploads] == [False, True]
    assert run.policy_versions() == [1]


def test_a_folder_that_lacks_a_file_or_its_seal_is_told(bucket: ObjectPath):
    with pytest.raises(StoreError, match=r"sealed\.json cannot be read"):
        local_folder(bucket / "000002")
    seal_a_folder(bucket / "000001")
    (bucket / "000001" / "model.safetensors").unlink()
    with pytest.raises(StoreError, match=r"model\.safetensors is missing, though .*sealed\.json lists it"):
        local_folder(bucket / "000001")


def test_a_policy_is_read_once_to_verify_it(bucket: ObjectPath, monkeypatch: pytest.MonkeyPatch):
    run = RunFolder(bucket / "run")
    policy = run.publish_policy(0, 0, lambda place: (place / "model.safetensors").write_bytes(b"weights"))
    read: list[str] = []
    monkeypatch.setattr(files, "digest_file", lambda path: read.append(path.name) or digest_file(path))
    for _ in range(2):  # as it is downloaded, and as it is found in the cache
        run.verified_policy_path(policy)
        assert read == ["model.safetensors"]
        read.clear()


def test_of_two_who_move_a_folder_aside_none_fails(bucket: ObjectPath):
    for number in range(5):
        folder = bucket / f"{number:06d}"
        seal_a_folder(folder, b"weights")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(move_aside, [folder, folder]))
        assert not folder.exists()


def test_the_lengths_of_a_rounds_completions_are_read(bucket: ObjectPath):
    round, folder = make_round(4, POLICY, num_shards=1, prompts_per_shard=1), RoundFolder(bucket / "000004")
    group = make_group(0, [1.0, 0.0])
    folder.write_shard(round, 0, make_shard([group]))
    assert folder.completion_lengths(0) == [len(completion.token_ids) for completion in group.completions]


def test_of_two_samplers_that_store_one_shard_the_first_counts(bucket: ObjectPath):
    round, folder = make_round(4, POLICY, num_shards=1, prompts_per_shard=1), RoundFolder(bucket / "000004")
    folder.open(round)
    assert folder.write_shard(round, 0, make_shard([make_group(0, [1.0, 0.0])]))
    assert not folder.write_shard(round, 0, make_shard([make_group(0, [0.0, 0.5])]))
    assert folder.read_shard(0).groups[0].rewards.tolist() == [1.0, 0.0]
    folder.seal(round)
    assert folder.is_sealed()


def test_a_lease_in_a_store_has_one_holder(bucket: ObjectPath):
    leases = Leases(bucket / "leases", 600.0)
    lease = leases.take("a")
    assert lease is not None
    with lease:
        assert Leases(bucket / "leases", 600.0).take("a") is None
    again = Leases(bucket / "leases", 600.0).take("a")
    assert again is not None
    with again:
        pass


# Runs


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "oapl", *map(str, words)]


def run_oapl(*words: object, timeout: float = 600) -> str:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def same_results(one: RunFolder, other: RunFolder) -> bool:
    policies = [[run.policy(version) for version in range(4)] for run in (one, other)]
    return policies[0] == policies[1] and sealed_groups(one) == sealed_groups(other)


@pytest.fixture
def on_disk(write_recipe, tmp_path: Path) -> tuple[Path, RunFolder]:
    """A recipe, and its run on a disk."""
    recipe, run = write_recipe(), RunFolder(tmp_path / "on_disk")
    run_oapl("train", recipe, "--run_dir", run.path)
    return recipe, run


def test_a_run_in_a_store_is_bitwise_the_run_on_a_disk(on_disk, bucket: ObjectPath, tmp_path: Path):
    recipe, run = on_disk
    inside = RunFolder(bucket / "run")
    run_oapl("train", recipe, "--run_dir", inside.path)
    assert same_results(inside, run)
    assert_complete(inside, 12, 4)
    assert "step 12 of 12" in run_oapl("inspect", inside.path)
    run_oapl("report", inside.path, "--output", tmp_path / "report.html")
    run_oapl("eval", inside.path, "--policy", 2, "--output_dir", tmp_path / "evaluation")
    written = [path for path in bucket._objects() if b"a-secret-that" in path.read_bytes()]
    assert not written


@pytest.mark.slow
def test_a_killed_run_in_a_store_goes_on_on_another_machine(on_disk, bucket: ObjectPath, monkeypatch, tmp_path: Path):
    """Another machine has none of the copies, and cannot see that the first one's processes have ended."""
    recipe, run = on_disk
    inside, draw = RunFolder(bucket / "run"), random.Random(0)
    struck = 0
    for attempt in range(3):
        monkeypatch.setenv("OAPL_CACHE", str(tmp_path / f"machine-{attempt}"))
        process = subprocess.Popen(command("train", recipe, "--run_dir", inside.path), stderr=subprocess.DEVNULL)
        give_up, target = time.monotonic() + 120, len(inside.metrics()) + 1
        while len(inside.checkpoint_steps()) <= attempt and process.poll() is None and target:
            assert time.monotonic() < give_up
            time.sleep(draw.uniform(0.05, 0.4))
        process.kill()
        struck += process.wait() == -signal.SIGKILL
    run_oapl("train", recipe, "--run_dir", inside.path)
    assert struck >= 2
    assert same_results(inside, run)
    assert_complete(inside, 12, 4)


@pytest.mark.slow
def test_errors_slow_answers_and_restarts_of_the_store_change_no_bit(
    on_disk, bucket: ObjectPath, server: int, monkeypatch
):
    recipe, run = on_disk
    inside, port = RunFolder(bucket / "run"), free_port()
    proxy = [sys.executable, str(HERE / "flaky_proxy.py"), str(port), str(server), "0.05", "0.05"]
    environment = {**os.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    with serving([*proxy, "0"], port) as first:
        words = command("train", recipe, "--run_dir", inside.path)
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        while not inside.policy(1):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        first.kill()  # in the middle of whatever is on its way
        first.wait()
        time.sleep(3.0)
        assert process.poll() is None
    with serving([*proxy, "1"], port):
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output.decode()
    assert same_results(inside, run)
    assert_complete(inside, 12, 4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_countdown_recipe_in_a_store_on_bad_days(bucket: ObjectPath, server: int, tmp_path: Path, record_property):
    """Two samplers join, each by a gateway of its own. One is killed while a shard of its goes up, and another comes;
    5 % of all requests fail and 5 % are slow; the trainer's gateway is killed twice, for ten seconds."""
    run, inside = RunFolder(tmp_path / "on_disk"), RunFolder(bucket / "run")
    run_oapl("train", COUNTDOWN, "--run_dir", run.path, timeout=3000)
    gateways, held = [free_port() for _ in range(3)], tmp_path / "held"

    def gateway(number: int, *held: Path) -> Any:
        port = gateways[number]
        proxy = [sys.executable, HERE / "flaky_proxy.py", port, server, 0.05, 0.05, number, *held]
        return serving([*map(str, proxy)], port)

    def start(number: int, *words: object) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{gateways[number]}",
            "OAPL_CACHE": str(tmp_path / f"cache-{number}"),
        }
        with open(tmp_path / f"log-{number}", "ab") as log:
            return subprocess.Popen(
                command(*words, "--run_dir", inside.path), env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_for_steps(count: int) -> None:
        give_up = time.monotonic() + 1200
        while len(inside.metrics()) < count:
            assert train.poll() is None, (tmp_path / "log-0").read_text()
            assert time.monotonic() < give_up
            time.sleep(0.5)

    with gateway(1, held), gateway(2):
        with gateway(0) as first:
            train = start(0, "train", COUNTDOWN, "--launch.num_samplers", 0, "--launch.lease_s", 10)
            samplers = [start(1, "sample")]
            while not held.exists():
                assert samplers[0].poll() is None, (tmp_path / "log-1").read_text()
                time.sleep(0.1)
            samplers[0].kill()
            samplers[0].wait()
            samplers = [start(1, "sample"), start(2, "sample")]
            wait_for_steps(30)
            first.kill()
            first.wait()
            time.sleep(10)
        with gateway(0) as second:
            wait_for_steps(90)
            second.kill()
            second.wait()
            time.sleep(10)
        with gateway(0):
            assert train.wait(timeout=2000) == 0, (tmp_path / "log-0").read_text()
            assert [sampler.wait(timeout=120) for sampler in samplers] == [0, 0]
    results = [read_json(each.summary_path)["final"]["pass_at_k"]["1"] for each in (run, inside)]
    record_property("pass@1", results)
    assert results[0] == results[1]
    assert same_results(inside, run)
    assert_complete(inside, 150, 50)
