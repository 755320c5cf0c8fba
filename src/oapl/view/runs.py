"""The run folders below the folders that were given, found anew now and then: nothing else is ever read."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oapl.config import Recipe, load_recipe
from oapl.errors import ConfigError, StoreError
from oapl.paths import ObjectPath, StorePath
from oapl.report.runs import names_of, read_summary, status
from oapl.store import RunFolder
from oapl.view.metrics import last_record

DEPTH = 4
"""Folders below the one given in which runs are looked for: runs/studies/NAME/runs/RUN."""
LOOK_EVERY_S = 2.0


@dataclass(frozen=True)
class Found:
    """A run folder. `name` is what the page and its addresses call it."""

    name: str
    run: RunFolder
    recipe: Recipe
    stamp: tuple[int, int, int] | None
    """Of config.toml, as of when it was read: continuing a run may change it."""


class Runs:
    """Raises ConfigError where a path is in an object store, no folder, or a run given twice."""

    def __init__(self, paths: Sequence[StorePath]) -> None:
        self._roots: list[Path] = []
        for path in paths:
            if isinstance(path, ObjectPath):
                raise ConfigError(
                    f"{path}: oapl view follows folders of this machine. For a run in an object store there are "
                    f"`oapl inspect {path}` and `oapl report {path} --output report.html`; or copy or mount it."
                )
            if not path.is_dir():
                raise ConfigError(f"{path} is no folder. Give a run's folder, or one that holds runs, such as runs.")
            self._roots.append(path.resolve())
        self._prefixes = names_of(self._roots)
        self._lock = threading.Lock()
        self._looked_at = -LOOK_EVERY_S
        self._found: dict[str, Found] = {}
        self._failures: dict[str, str] = {}
        self._cards: dict[str, tuple[Any, dict[str, Any]]] = {}

    def all(self) -> dict[str, Found]:
        with self._lock:
            if time.monotonic() - self._looked_at > LOOK_EVERY_S:
                self._look()
                self._looked_at = time.monotonic()
            return self._found

    def is_one(self) -> bool:
        """Whether what was given is one run, and no folder of runs."""
        return len(self._roots) == 1 and (self._roots[0] / "config.toml").is_file()

    def get(self, name: str) -> Found:
        """Raises StoreError where there is no run of that name."""
        found = self.all().get(name)
        if found is None:
            raise StoreError("There is no such run here.")
        return found

    def notes(self) -> list[str]:
        """Folders that seem to be runs and cannot be read, and why."""
        return list(self._failures.values())

    def _look(self) -> None:
        found: dict[str, Found] = {}
        failures: dict[str, str] = {}
        for root, prefix in zip(self._roots, self._prefixes, strict=True):
            for folder in run_folders(root, root, DEPTH):
                below = folder.relative_to(root).as_posix()
                parts = [prefix] if below == "." else [prefix, below] if len(self._roots) > 1 else [below]
                name = "/".join(parts)
                known = self._found.get(name)
                try:
                    for file in ("config.toml", "metrics.jsonl", "summary.json", "collapse.json"):
                        check_inside(folder / file, folder)
                    stamp = stamp_of(folder / "config.toml")
                    if known is not None and known.run.path == folder and known.stamp == stamp:
                        found[name] = known
                        continue
                    found[name] = Found(name, RunFolder(folder), load_recipe(folder / "config.toml"), stamp)
                except Exception as error:  # of one folder, which is not to hide the others
                    failures[name] = f"{name}: {error}"
        self._found, self._failures = found, failures

    def cards(self) -> list[dict[str, Any]]:
        """A line on each run, those with the newest activity first."""
        return sorted((self._card(each) for each in self.all().values()), key=lambda card: -(card["active_at"] or 0))

    def _card(self, found: Found) -> dict[str, Any]:
        run = found.run
        files = [stamp_of(Path(path)) for path in (run.metrics_path, run.summary_path, run.collapse_path)]
        stamp = (found.stamp, *files)
        active_at = last_activity(run)
        with self._lock:
            known = self._cards.get(found.name)
        if known is None or known[0] != stamp:
            known = (stamp, make_card(found))
            with self._lock:
                self._cards[found.name] = known
        return {**known[1], "active_at": active_at}


def make_card(found: Found) -> dict[str, Any]:
    recipe, notes = found.recipe, list[str]()
    try:
        record = last_record(Path(found.run.metrics_path)) or {}
        state = status(found.run, recipe, [record] if record else [], read_summary(found.run, notes), notes)
    except Exception as error:  # of one run, which is not to hide the others
        record, state = {}, {"kind": "unfinished", "text": f"cannot be read: {error}"}
    return {
        "name": found.name,
        "status": state,
        "step": record.get("step", 0),
        "num_steps": recipe.trainer.num_steps,
        "reward": record.get("reward"),
        "model": recipe.model.name_or_path,
        "task": recipe.task.name,
        "loss": recipe.loss.kind,
        "seed": recipe.seed,
    }


def run_folders(folder: Path, root: Path, depth: int) -> Iterator[Path]:
    """Those with a config.toml, and nothing below one; links out of the root are not followed."""
    if (folder / "config.toml").is_file():
        yield folder
        return
    if depth == 0:
        return
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.name.startswith(".") or not entry.is_dir():
                continue
            below = (folder / entry.name).resolve()
            if below.is_relative_to(root):
                yield from run_folders(below, root, depth - 1)


def real_inside(path: Path, root: Path) -> Path:
    """The real path, be it there or not. Raises StoreError where it leads out of `root`, which is a folder's own."""
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(root):
        raise StoreError(f"{path} is a link out of the run, which is not followed")
    return real


def check_inside(path: Path, root: Path) -> None:
    """`real_inside`, and raises StoreError where the path leads to what may be read without end."""
    real = real_inside(path, root)
    if real.exists() and not real.is_file() and not real.is_dir():
        raise StoreError(f"{path} is neither a file nor a folder")


def check_folder(folder: Path, root: Path) -> None:
    """`check_inside` of the folder and of the JSON files in it."""
    check_inside(folder, root)
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".json") and not entry.is_file(follow_symlinks=False):
                check_inside(Path(entry.path), root)


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None


def last_activity(run: RunFolder) -> float | None:
    """When the run last wrote: its metrics, or into its newest rounds or evaluations; seconds since 1970."""
    folder = Path(run.path)
    places = [folder / "metrics.jsonl", folder / "summary.json", folder / "collapse.json"]
    for kind in ("rounds", "evaluations", "policies"):
        names = [name for name in names_in(folder / kind) if re.fullmatch(r"\d{6,}", name)]
        places += [folder / kind / name for name in sorted(names, key=int)[-2:]]
        if kind == "rounds":
            places += [folder / kind / name / "leases" for name in sorted(names, key=int)[-1:]]
    times = []
    for place in places:
        with suppress(OSError):
            times.append(place.stat().st_mtime)
    return max(times, default=None)


def names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
