"""Putting a resumed run in order: whatever it could trip over is moved aside, to be made again. Nothing is deleted."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from oapl.errors import StoreError
from oapl.paths import StorePath, cache_folder
from oapl.store.files import (
    UPLOAD,
    move_aside,
    numbered_folders,
    remove_folder,
    storing,
    verify_sealed_folder,
)
from oapl.store.rounds import RoundFolder
from oapl.store.run import SCORED, RunFolder, sealed_folders, sealed_weights
from oapl.types import PolicyRef, Round

OLD_S = 600.0
"""No file takes so long to write."""
OLD_UPLOAD_S = 86400.0
"""Nor a folder into an object store."""


@dataclass(frozen=True)
class Unscored:
    """What an evaluation or a validation still has to be sampled from."""

    versions: frozenset[int] = frozenset()
    """Of policies."""
    steps: frozenset[int] = frozenset()
    """Of snapshots."""

    def __bool__(self) -> bool:
        return bool(self.versions or self.steps)


@dataclass(frozen=True)
class Order:
    """How a run's steps, rounds and policies belong together, and what was done to put its folder in order."""

    run: RunFolder
    steps_per_round: int
    shards_per_round: int
    num_rounds: int
    policy_of_round: Callable[[int], int]
    unscored: Callable[[], Unscored]
    """Asked once damaged evaluations are out of the way."""
    reads_samplers: bool
    """Whether training on a round reads the policy that it was sampled from."""
    notes: list[str] = field(default_factory=list)

    def restore(self) -> list[str]:
        """Checks what the rest of the run will read; returns what was moved aside, and why.

        What is trained already, of which a long run has much, is not looked at: its rounds, and their policies.
        Checkpoints are checked newest first until one is good. From its step on, every shard is checked, as are the
        evaluations, and the policies and snapshots that still have something to sample. A damaged one is made again
        from the checkpoint of its step, or from the model itself. Raises StoreError where there is no such checkpoint.
        """
        step = self.newest_good_checkpoint()
        remove_leftovers(self.run, self.round_of(step))
        self.set_unreadable_weights_aside(step)
        self.set_future_aside(step)
        complete = self.check_rounds(step)
        self.check_evaluations()
        unscored = self.unscored()
        for version in self.policies_needed(step, complete, unscored):
            if not self.check_policy(version, step):
                return self.restore()  # from the older checkpoint that makes it again
        for snapshot in sorted(snapshot for snapshot in unscored.steps if snapshot <= step):
            if not self.check_snapshot(snapshot, step):
                return self.restore()
        return self.notes

    def round_of(self, step: int) -> int:
        """The round that training goes on with after so many steps."""
        return step // self.steps_per_round

    def newest_good_checkpoint(self) -> int:
        """The step that training goes on from."""
        for step in reversed(self.run.checkpoint_steps()):
            try:
                verify_sealed_folder(self.run.checkpoint_path(step))
            except StoreError as error:
                self._set_aside(self.run.checkpoint_path(step), error)
            else:
                return step
        return 0

    def set_future_aside(self, step: int) -> None:
        """Policies and snapshots of steps that are to be trained again, and the rounds that the policies sampled."""
        for version in self.run.policy_versions(self.round_of(step) + 1):
            reason = f"Step {version * self.steps_per_round} is trained again, so policy {version} is made anew"
            for index in self.run.round_indices(version):
                if self.policy_of_round(index) == version and not self.run.round(index).is_imported():
                    self._set_aside(self.run.round(index).path, reason)
            self._set_aside(self.run.policy_path(version), reason)
        for snapshot in (s for s in self.run.snapshot_steps() if s > step):
            self._set_aside(self.run.snapshot_path(snapshot), f"Step {snapshot} is trained again")

    def set_unreadable_weights_aside(self, step: int) -> None:
        first = self.policy_of_round(self.round_of(step))
        paths = [
            *map(self.run.policy_path, (0, *self.run.policy_versions(max(1, first)))),
            *map(self.run.snapshot_path, self.run.snapshot_steps()),
        ]
        for path in paths:
            try:
                sealed_weights(path, None)
            except StoreError as error:
                self._set_aside(path, error)

    def check_rounds(self, step: int) -> set[int]:
        """Sets damaged shards that training has yet to read aside; returns the rounds that have all of theirs."""
        first, trained = divmod(step, self.steps_per_round)
        if self.shards_per_round < self.steps_per_round:
            trained = 0  # a later epoch reads every shard again
        complete = set()
        for index in self.run.round_indices(first):
            folder = self.run.round(index)
            round = self._checked(folder, first_shard=trained if index == first else 0)
            if round is None:
                continue
            if not folder.is_imported() and self._contradicts_its_policy(round):
                self._set_aside(
                    folder.path, f"{folder.path} was sampled from other weights than policy {round.policy.version}"
                )
            elif len(folder.stored_shards()) == round.num_shards:
                complete.add(index)
        return complete

    def check_evaluations(self) -> None:
        for folder in self.run.scored_rounds():
            folder.finish_adopting()
            self._checked(folder, first_shard=0)

    def _checked(self, folder: RoundFolder, first_shard: int) -> Round | None:
        """The round, its damaged shards set aside; None where its description had to be set aside too."""
        self.notes.extend(folder.set_damage_aside(first_shard))
        return folder.load() if folder.is_open() else None

    def policies_needed(self, step: int, complete: set[int], unscored: Unscored) -> list[int]:
        """Those that training has reached and that a round still has to be sampled from, or trained on with, or that
        are still to be evaluated."""
        first = self.round_of(step)
        opened = self.run.round_indices(first)
        in_need = {first, first + 1, *opened} - {index for index in opened if self.run.round(index).is_imported()}
        if not self.reads_samplers:
            in_need -= complete
        versions = {self.policy_of_round(index) for index in in_need if index < self.num_rounds}
        versions |= unscored.versions
        return sorted(version for version in versions if version * self.steps_per_round <= step)

    def check_policy(self, version: int, step: int) -> bool:
        """See `_check_weights`."""
        path, maker = self.run.policy_path(version), version * self.steps_per_round
        return self._check_weights(f"Policy {version}", path, partial(self.run.policy, version), maker, step)

    def check_snapshot(self, snapshot: int, step: int) -> bool:
        """See `_check_weights`."""
        path = self.run.snapshot_path(snapshot)
        return self._check_weights(f"Snapshot {snapshot}", path, partial(self.run.snapshot, snapshot), snapshot, step)

    def _check_weights(
        self, name: str, path: StorePath, find: Callable[[], PolicyRef | None], maker: int, step: int
    ) -> bool:
        """Sets damaged weights aside, and with them the checkpoints that are past them: False where there were some."""
        try:
            policy = find()
            if policy is None:
                raise StoreError(f"{path} is missing")
            self.run.verified_policy_path(policy)
        except StoreError as error:
            if path.exists():
                self._set_aside(path, error)
            if maker in (0, step):
                return True  # made again from the model, or from the weights the trainer resumes with
            if maker not in self.run.checkpoint_steps():
                raise StoreError(
                    f"{error}, and there is no checkpoint of step {maker} to make it from again. "
                    f"Restore {path} from a copy, or start a new run_dir."
                ) from error
            for later in (s for s in self.run.checkpoint_steps() if s > maker):
                self._set_aside(self.run.checkpoint_path(later), f"{name} is made again from step {maker}")
            return False
        return True

    def _contradicts_its_policy(self, round: Round) -> bool:
        """Whether the policy a round should be of is there and whole, and is another one."""
        try:
            policy = self.run.policy(self.policy_of_round(round.index))
            if policy is None or policy == round.policy:
                return False
            self.run.verified_policy_path(policy)
        except StoreError:
            return False
        return True

    def _set_aside(self, path: StorePath, reason: object) -> None:
        self.notes.append(f"{reason}. Moved to {move_aside(path).name}.")


def remove_leftovers(run: RunFolder, first_round: int = 0) -> None:
    """What a killed process had begun to write or to remove, under names that nothing reads.

    Rounds and policies before `first_round` are done with, and are not looked at. Samplers may be at work on the other
    rounds, so of these only what is too old to be in anyone's hands. Evaluations on other problems (`benchmarks/`) are
    no work of the run's. In an object store, what the trainer had begun lies under its final name and lacks its seal;
    whoever calls this holds the trainer's lock.
    """
    kinds = {"policies": first_round, "checkpoints": 0, "snapshots": 0}
    if not isinstance(run.path, Path):
        for kind, first in kinds.items():
            found = {number for number in numbered_folders(run.path / kind) if number >= first}
            for number in found - set(sealed_folders(run.path / kind, first)):
                remove_folder(run.path / kind / f"{number:06d}")
        for path in cache_folder().glob(f"{UPLOAD}*"):
            if is_older(path, OLD_UPLOAD_S):
                shutil.rmtree(path, ignore_errors=True)
        return
    trainers = (run.path, *(run.path / kind for kind in kinds))
    leftovers = [path for folder in trainers for end in ("partial", "removed") for path in folder.glob(f".*.{end}")]
    sampled = [run.path / kind for kind in SCORED]
    rounds = run.path / "rounds"
    sampled += [rounds / f"{index:06d}" for index in numbered_folders(rounds) if index >= first_round]
    leftovers += [path for folder in sampled for path in folder.rglob(".*.partial") if is_older(path, OLD_S)]
    for path in leftovers:
        with storing(path):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def is_older(path: Path, seconds: float) -> bool:
    with suppress(FileNotFoundError):  # it was renamed since it was listed
        return time.time() - path.stat().st_mtime > seconds
    return False


def put_in_order(
    run: RunFolder,
    *,
    steps_per_round: int,
    shards_per_round: int,
    num_rounds: int,
    policy_of_round: Callable[[int], int],
    unscored: Callable[[], Unscored],
    reads_samplers: bool = False,
) -> list[str]:
    """See `Order.restore`."""
    return Order(
        run, steps_per_round, shards_per_round, num_rounds, policy_of_round, unscored, reads_samplers
    ).restore()
