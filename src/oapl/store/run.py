"""The run folder: what each part of it is called, and how a resumed run is put in order.

config.toml  environment.json  metrics.jsonl  summary.json  pass_at_k.png
policies/000003/      a plain Hugging Face model folder, its probe and `sealed.json`
rounds/000003/        the groups that policy sampled (see `oapl.store.rounds`)
checkpoints/000150/   the trainer's exact state after 150 steps
evaluations/000003/   held-out problems, answered by policy 3
snapshots/000050/     with a selection: the weights after 50 steps, as a policy's folder
validations/000050/   the problems to choose by, answered by them
selected/000050/      the problems of the evaluations, answered by the snapshot that was chosen
logs/                 what each process printed
collapse.json         at which step and why a guard ended the run, where one did
pruned.json           what was removed once the run had ended, where it was
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oapl.errors import StoreError
from oapl.paths import StorePath, cache_folder, store_path
from oapl.store.files import (
    SEAL,
    Lock,
    digest_bytes,
    fsync,
    local_folder,
    numbered_folders,
    read_json,
    remove_folder,
    rename,
    storing,
    verified_folder,
    write_bytes,
    write_json,
    write_sealed_folder,
)
from oapl.store.leases import LeaseLock, lock
from oapl.store.rounds import RoundFolder
from oapl.types import PolicyRef

METRICS_EVERY_S = 20.0
LOGS = "logs"
"""The folder of what a run's processes print."""
SCORED = ("evaluations", "validations", "selected")
"""The folders of rounds that were sampled to score some weights, and not to train on."""
LARGE = ("rounds", "policies", "checkpoints", "snapshots")
"""The folders of a run that only continuing it, or looking into it, needs."""


def num_sampled(metrics: Iterable[Mapping[str, Any]]) -> int:
    """Completions behind some lines of metrics.jsonl, each counted once however many epochs it was trained on."""
    return int(sum(record["num_completions"] for record in metrics if not record.get("epoch")))


class RunFolder:
    """Paths and sealed contents of one run. Creating the object touches nothing."""

    def __init__(self, path: StorePath | str) -> None:
        self.path = store_path(path)
        self._unwritten: list[bytes] = []
        """Lines of metrics.jsonl that an object store does not hold yet: it cannot add to an object."""
        self._written_at = time.monotonic()
        self._trainer_lock: Lock | LeaseLock | None = None

    @property
    def local_path(self) -> Path:
        """A folder on this machine for what its processes print: the run's own, if that is here."""
        if isinstance(self.path, Path):
            return self.path
        return cache_folder() / digest_bytes(str(self.path).encode())[:16]

    @property
    def config_path(self) -> StorePath:
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> StorePath:
        return self.path / "metrics.jsonl"

    @property
    def summary_path(self) -> StorePath:
        return self.path / "summary.json"

    @property
    def collapse_path(self) -> StorePath:
        """Written when the guard stops the run: `step`, `reason`, `best_policy`, `advice`."""
        return self.path / "collapse.json"

    @property
    def pruned_path(self) -> StorePath:
        return self.path / "pruned.json"

    @contextmanager
    def lock(self, role: str, patience_s: float = 5.0) -> Iterator[None]:
        """Held for as long as this process plays `role` on the run. Raises StoreError where another one does, and
        ConfigError where the place can hold no run."""
        with lock(self.path / f".{role}.lock", role, patience_s) as held:
            if role != "trainer":
                yield
                return
            self._trainer_lock = held
            try:
                yield
            finally:
                self._trainer_lock = None

    def check_lock(self) -> None:
        """Raises StoreError where this process trained the run, and another has taken it over."""
        if self._trainer_lock is not None and self._trainer_lock.is_lost():
            raise StoreError(
                f"{self.path}: another trainer has taken the run over, since this one was not heard of for too long. "
                f"It goes on from the newest checkpoint; this one has nothing left to do."
            )

    def _write_sealed(self, folder: StorePath, step: int, write: Callable[[Path], None]) -> None:
        self.check_lock()
        write_sealed_folder(folder, {"step": step}, write, self.check_lock)

    # Policies

    def policy_path(self, version: int) -> StorePath:
        return self.path / "policies" / f"{version:06d}"

    def policy_versions(self, first: int = 0) -> list[int]:
        """The versions from `first` on that are sealed. Older ones are not looked at."""
        return sealed_folders(self.path / "policies", first)

    def newest_version(self) -> int | None:
        """That of the newest sealed policy, whatever lies before it."""
        folder = self.path / "policies"
        return next((number for number in reversed(numbered_folders(folder)) if is_sealed(folder, number)), None)

    def policy(self, version: int) -> PolicyRef | None:
        """The sealed policy, or None while there is none."""
        return sealed_weights(self.policy_path(version), version)

    def has_policy(self, version: int) -> bool:
        return self.policy(version) is not None

    def verified_policy_path(self, policy: PolicyRef) -> Path:
        """Where a policy or snapshot lies on this machine, verified. Raises StoreError where a file does not match its
        seal."""
        path = self.snapshot_path(policy.step) if policy.version is None else self.policy_path(policy.version)
        copy, seal = verified_folder(path)
        if (found := weights_digest(seal["files"])) != policy.digest:
            raise StoreError(
                f"{path} holds weights {found[:12]}…, but round.json asks for {policy.digest[:12]}… of that version. "
                f"Run the same command again: the round that does not match is moved aside."
            )
        return copy

    def publish_policy(self, version: int, step: int, write: Callable[[Path], None]) -> PolicyRef:
        """Seals a policy, or finds it sealed already."""
        if self.policy(version) is None:
            self._write_sealed(self.policy_path(version), step, write)
        policy = self.policy(version)
        assert policy is not None
        return policy

    # Snapshots

    def snapshot_path(self, step: int) -> StorePath:
        return self.path / "snapshots" / f"{step:06d}"

    def snapshot_steps(self) -> list[int]:
        return sealed_folders(self.path / "snapshots")

    def snapshot(self, step: int) -> PolicyRef | None:
        """The sealed weights after `step` steps, or None while there are none. Those after none are policy 0."""
        return sealed_weights(self.snapshot_path(step), None) if step > 0 else self.policy(0)

    def publish_snapshot(self, step: int, write: Callable[[Path], None]) -> None:
        """Seals a snapshot, or finds it sealed already."""
        if self.snapshot(step) is None:
            self._write_sealed(self.snapshot_path(step), step, write)

    # Rounds

    def round(self, index: int) -> RoundFolder:
        return RoundFolder(self.path / "rounds" / f"{index:06d}")

    def is_unused(self) -> bool:
        """Whether nothing was ever sampled or trained here, whatever was put ready for it."""
        kinds = ("policies", "checkpoints", "rounds", "evaluations")
        folders = [path for kind in kinds for path in self.path.glob(f"{kind}/*")]
        is_first = all(path.name == "000000" for path in folders)
        has_shards = any(RoundFolder(path).stored_shards() for path in folders)
        return is_first and not has_shards and not self.metrics_path.exists()

    def round_indices(self, first: int = 0) -> list[int]:
        """The rounds from `first` on that are open. Older ones, of which a long run has many, are not looked at."""
        return [i for i in numbered_folders(self.path / "rounds") if i >= first and self.round(i).is_open()]

    def evaluation(self, version: int) -> RoundFolder:
        """The held-out round that a policy sampled."""
        return RoundFolder(self.path / "evaluations" / f"{version:06d}")

    def validation(self, step: int) -> RoundFolder:
        """The round of validation problems that a snapshot sampled."""
        return RoundFolder(self.path / "validations" / f"{step:06d}")

    def selected(self, step: int) -> RoundFolder:
        """The held-out round that a chosen snapshot sampled; policy 0 has that of its evaluation."""
        return RoundFolder(self.path / "selected" / f"{step:06d}") if step > 0 else self.evaluation(0)

    def scored_rounds(self) -> list[RoundFolder]:
        """Every round that was sampled to score some weights, and not to train on."""
        return [
            folder
            for kind in SCORED
            for number in numbered_folders(self.path / kind)
            if (folder := RoundFolder(self.path / kind / f"{number:06d}")).is_open()
        ]

    # Checkpoints

    def checkpoint_path(self, step: int) -> StorePath:
        return self.path / "checkpoints" / f"{step:06d}"

    def checkpoint_steps(self) -> list[int]:
        return sealed_folders(self.path / "checkpoints")

    def last_step(self) -> int:
        """That of the newest checkpoint, or 0 without one."""
        return max(self.checkpoint_steps(), default=0)

    def write_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        if not (self.checkpoint_path(step) / SEAL).exists():
            self._write_sealed(self.checkpoint_path(step), step, write)

    def local_checkpoint(self, step: int) -> Path:
        """Where a checkpoint lies on this machine."""
        return local_folder(self.checkpoint_path(step))

    def remove_checkpoint(self, step: int) -> None:
        """Takes a checkpoint away: its name or its seal first, so that a crash leaves no half of one."""
        self.check_lock()
        path = self.checkpoint_path(step)
        if isinstance(path, Path):
            leftover = path.with_name(f".{path.name}.removed")
            rename(path, leftover)
            path = leftover
        remove_folder(path)

    # What may go once a run has ended

    def is_pruned(self) -> bool:
        return self.pruned_path.exists()

    def prune(self) -> None:
        """Removes all but the results, and what a guard says is to be gone on from. The note of it comes first, so that
        a crash leaves nothing that seems whole; done again, it removes what is left."""
        large = [name for name in LARGE if not (name == "policies" and self.collapse_path.exists())]
        if not self.is_pruned():
            write_json(self.pruned_path, {"removed": large})
        for name in large:
            remove_folder(self.path / name)

    # Metrics

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Adds one line. A line that a crash cut short is ended first, and readers skip it. An object store gets the
        lines now and then."""
        if not isinstance(self.metrics_path, Path):
            self._unwritten.append(json.dumps(record).encode() + b"\n")
            if time.monotonic() - self._written_at > METRICS_EVERY_S:
                self.sync_metrics()
            return
        with storing(self.metrics_path), open(self.metrics_path, "ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(record).encode() + b"\n")

    def sync_metrics(self) -> None:
        """Forces the lines so far to the disk, or into the object store."""
        if not isinstance(self.metrics_path, Path):
            self.check_lock()
            write_bytes(self.metrics_path, self._metrics_bytes())
            self._unwritten.clear()
            self._written_at = time.monotonic()
        elif self.metrics_path.exists():
            fsync(self.metrics_path)

    def _metrics_bytes(self) -> bytes:
        """Every line, those not written yet among them."""
        try:
            written = self.metrics_path.read_bytes()
        except FileNotFoundError:
            written = b""
        return written + b"".join(self._unwritten)

    def metrics(self) -> list[dict[str, Any]]:
        """One record a step, in order; of a step done again after a restart, the last record."""
        records = {}
        for line in io.BytesIO(self._metrics_bytes()):
            try:
                record = json.loads(line, object_pairs_hook=with_shared_names)
            except ValueError:
                continue
            records[record["step"]] = record
        return [records[step] for step in sorted(records)]


def with_shared_names(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A record of metrics.jsonl whose names are those of all others, which take half of its memory otherwise."""
    return {sys.intern(name): value for name, value in pairs}


def sampler_path(folder: RoundFolder) -> Path:
    """Where the policy that sampled a round lies, verified: in its run, or in the one that it was copied from.

    Raises StoreError where neither has it whole.
    """
    policy, origin = folder.load().policy, folder
    while (source := origin.source()) is not None:
        origin = source
    run, recorder = (RunFolder(of.path.parents[1]) for of in (folder, origin))
    assert policy.version is not None
    return (run if run.policy(policy.version) == policy else recorder).verified_policy_path(policy)


def sealed_folders(parent: StorePath, first: int = 0) -> list[int]:
    """The numbers of the sealed folders in `parent` from `first` on, rising."""
    return [number for number in numbered_folders(parent) if number >= first and is_sealed(parent, number)]


def is_sealed(parent: StorePath, number: int) -> bool:
    return (parent / f"{number:06d}" / SEAL).exists()


def sealed_weights(path: StorePath, version: int | None) -> PolicyRef | None:
    """The weights in a sealed folder, or None where there is no seal."""
    if not (path / SEAL).exists():
        return None
    seal = read_json(path / SEAL, "step", "files")
    return PolicyRef(version, seal["step"], weights_digest(seal["files"]))


def weights_digest(files: Mapping[str, str]) -> str:
    """The digest of the weight file; of several, the digest of their names and digests."""
    return joint_digest({name: digest for name, digest in files.items() if name.endswith(".safetensors")})


def joint_digest(files: Mapping[str, str]) -> str:
    """The digest of the only file; of several, the digest of their names and digests."""
    if len(files) == 1:
        return next(iter(files.values()))
    return digest_bytes("".join(f"{name}:{digest}\n" for name, digest in sorted(files.items())).encode())
