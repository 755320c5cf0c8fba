"""Where one run stands, as the page shows it: curves, the rounds on the wire, the load of both sides."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from oapl.config import flatten
from oapl.inspection import round_facts
from oapl.report.figures import charts_for, curves_of, seconds_of
from oapl.report.runs import KEY_SETTINGS, read_summary, status
from oapl.store import RoundFolder
from oapl.store.files import numbered_folders
from oapl.store.leases import is_gone
from oapl.view.metrics import Metrics
from oapl.view.runs import Found, check_folder, last_activity

MAX_POINTS = 1000
"""Points of a curve; of a longer run, neighbouring steps are averaged."""
NUM_ROUNDS = 12
"""Rounds of the table, the newest."""
RECENT = 50
"""Steps that the load is averaged over."""


class State:
    """Of one run; its metrics are read on from look to look. `version` is that of a state before, which it follows."""

    def __init__(self, found: Found, version: int = 0) -> None:
        self.found = found
        self._run, self._recipe, self._name = found.run, found.recipe, found.name
        self._metrics = Metrics(Path(found.run.metrics_path), version)
        self._lock = threading.Lock()
        self._curves: tuple[int, dict[str, Any]] = (-1, {})
        dumped = flatten(found.recipe.model_dump(mode="json", exclude_none=True))
        self._settings = {
            key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in dumped.items()
        }

    @property
    def version(self) -> int:
        return self._metrics.version

    def look(self, seen: int = -1) -> dict[str, Any]:
        """Everything but completions; without the curves where they are those of version `seen`."""
        with self._lock:  # no step may come between two columns
            return self._look(seen)

    def _look(self, seen: int) -> dict[str, Any]:
        self._metrics.refresh()
        version = self._metrics.version
        notes: list[str] = []
        last = self._metrics.last(1)
        if last:
            last[0]["step"] = int(last[0]["step"])
        summary: Mapping[str, Any] = {}
        try:
            summary = read_summary(self._run, notes)
            standing = status(self._run, self._recipe, last, summary, notes)
        except Exception as error:  # whatever the files hold
            standing = {"kind": "unfinished", "text": f"cannot be read: {error}"}
        indices = numbered_folders(self._run.path / "rounds")
        found = {
            "name": self._name,
            "status": standing,
            "step": last[0]["step"] if last else 0,
            "num_steps": self._recipe.trainer.num_steps,
            "active_at": last_activity(self._run),
            "settings": self._settings,
            "card": [[label, self._settings[key]] for label, key in KEY_SETTINGS if key in self._settings],
            "scores": {name: summary[name] for name in ("base", "final", "difference") if name in summary},
            "version": version,
            "wire": self._wire(indices, notes),
            "rounds": self._rounds(indices, notes),
            "load": self._load(),
            "notes": notes,
        }
        return found if seen == version else {**found, **self._drawn(version)}

    def _drawn(self, version: int) -> dict[str, Any]:
        if self._curves[0] != version:
            columns = curves_of(self._metrics.column, MAX_POINTS)
            charts = charts_for(set(columns))
            self._curves = version, {"charts": charts, "curves": columns, "seconds": seconds_of(self._metrics.column)}
        return self._curves[1]

    def _load(self) -> dict[str, float] | None:
        """Sums of the last steps' seconds, and what went through; None before the first step."""
        names = ("wait_s", "step_s", "save_s", "sampling_s", "grading_s", "num_tokens", "num_completions")
        steps = self._metrics.last(RECENT)
        sums = {name: float(sum(step.get(name, 0.0) for step in steps)) for name in names}
        sums["steps"] = len(steps)
        sums["lag"] = steps[-1].get("lag", 0.0) if steps else 0.0
        return sums if steps else None

    def _rounds(self, indices: Sequence[int], notes: list[str]) -> list[dict[str, Any]]:
        newest = indices[-NUM_ROUNDS:]
        steps_per_round = self._recipe.trainer.weight_sync_steps
        steps = [step for step in self._metrics.last(steps_per_round * (NUM_ROUNDS + 1)) if "round" in step]
        rounds: list[dict[str, Any]] = []
        for index in reversed(newest):
            try:
                check_folder(Path(self._run.round(index).path), Path(self._run.path))
                if self._run.round(index).is_open():
                    rounds += map(asdict, round_facts(self._run, [index], steps, steps_per_round))
            except Exception as error:  # of one round, which is not to hide the others
                notes.append(f"Round {index} cannot be shown now: {error}")
        return rounds

    def _wire(self, indices: Sequence[int], notes: list[str]) -> list[dict[str, Any]]:
        """The rounds that are sampled or trained on, oldest first."""
        last = max((int(step["round"]) for step in self._metrics.last(1) if "round" in step), default=0)
        shown = [index for index in indices if index >= last][:3] or list(indices[-1:])
        rounds = []
        for index in shown:
            try:
                rounds.append(self._round_on_wire(index))
            except Exception as error:  # as in _rounds
                if self._run.round(index).is_open():
                    notes.append(f"Round {index}: {error}")
        return rounds

    def _round_on_wire(self, index: int) -> dict[str, Any]:
        folder = self._run.round(index)
        for each in (folder.path, folder.path / "leases"):
            check_folder(Path(each), Path(self._run.path))
        round = folder.load()
        stored = folder.stored_shards()
        states = ["waits"] * round.num_shards
        drafts = [int(path.stem[6:]) for path in folder.path.glob("draft-?????.json")]
        held = leases(folder)
        for lease in held:
            if lease["shard"] < len(states):
                states[lease["shard"]] = "leased"
        for number in drafts:
            if number < len(states):
                states[number] = "drafted"
        for number in stored:
            if number < len(states):
                states[number] = "stored"
        rounds, epochs = self._metrics.column("round", -1.0), self._metrics.column("epoch", 0.0)
        for number in range(min(int(np.sum((rounds == index) & (epochs == 0))), len(states))):
            states[number] = "trained"
        return {
            "index": index,
            "policy": round.policy.version,
            "imported": folder.is_imported(),
            "prompts": round.num_prompts,
            "generations": round.sampling.num_generations,
            "states": states,
            "leases": held,
            "sealed": len(stored) == round.num_shards,
        }


def leases(folder: RoundFolder) -> list[dict[str, Any]]:
    """Who holds which block of shards, by the newest file of each lease: those given back, or whose holder is known to
    be gone, left out. `beat_at` is when the file was written last, in seconds since 1970."""
    place = Path(folder.path) / "leases"
    newest: dict[str, tuple[int, Path]] = {}
    with suppress(OSError):
        for path in place.iterdir():
            if match := re.fullmatch(r"block-(\d{5})\.(\d+)\.json", path.name):
                newest[match[1]] = max(newest.get(match[1], (-1, path)), (int(match[2]), path))
    held = []
    for block, (_, path) in sorted(newest.items()):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            content: Mapping[str, Any] = json.loads(path.read_bytes())
            if not content.get("released") and not is_gone(dict(content)):
                held.append(
                    {
                        "shard": int(block),
                        "host": str(content.get("host", "")),
                        "pid": int(content.get("pid", 0)),
                        "beat_at": path.stat().st_mtime,
                    }
                )
    return held
