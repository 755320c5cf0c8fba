"""How far each run of a study is, as its folder tells."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oapl.config import all_differences, load_recipe, may_change
from oapl.errors import ConfigError, StoreError
from oapl.store import RunFolder
from oapl.store.files import read_json, write_json
from oapl.store.run import LOGS
from oapl.study.matrix import Cell, Study


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Literal["finished", "collapsed", "failed"]
    reason: str = ""
    """Why it ended before its last step; nothing where it did not."""
    step: int | None = None
    """Of a collapsed run: where it was ended."""


def run_of(cell: Cell, study_dir: Path) -> RunFolder:
    return RunFolder(study_dir / "runs" / cell.name)


def log_path(run: RunFolder) -> Path:
    """What the run's command printed, of all its starts."""
    return run.local_path / LOGS / "study.log"


def failure_path(run: RunFolder) -> Path:
    """Why the run failed when it was last tried."""
    return run.local_path / "failure.json"


def outcome_of(cell: Cell, run: RunFolder) -> Outcome | None:
    """How the run ended; None where it has not."""
    if (ended := well_ended(cell, run)) is not None:
        return ended
    if failure_path(run).exists():
        return Outcome("failed", str(read_json(failure_path(run), "reason")["reason"]))
    return None


def well_ended(cell: Cell, run: RunFolder) -> Outcome | None:
    """The outcome of a run that is not to be repeated."""
    if run.collapse_path.exists():
        collapse = read_json(run.collapse_path, "step", "reason")
        return Outcome("collapsed", str(collapse["reason"]), int(collapse["step"]))
    if run.summary_path.exists():
        with suppress(StoreError):  # a damaged one is made again
            if read_json(run.summary_path, "num_steps")["num_steps"] == cell.recipe.trainer.num_steps:
                return Outcome("finished")
    return None


def record_failure(run: RunFolder, reason: str) -> None:
    write_json(failure_path(run), {"reason": reason})


def forget_failure(run: RunFolder) -> None:
    failure_path(run).unlink(missing_ok=True)


def check_runs(study: Study, study_dir: Path) -> None:
    """Raises ConfigError where the folder holds a run that the study, as it is now, would have made otherwise."""
    for cell in study.cells:
        run = run_of(cell, study_dir)
        if changed := changed_settings(cell, run):
            raise ConfigError(
                f"{run.path} holds a run with other settings than {study.path} has for it ({'; '.join(changed)}). "
                f"Restore the settings, choose another study_dir, or remove the run's folder to run it anew."
            )
        if run.is_pruned() and well_ended(cell, run) is None:
            raise ConfigError(
                f"{run.path} lacks the results of its run, or has those of another length, and the rounds to continue "
                f"from were removed. Choose another study_dir, or remove the run's folder to run it anew."
            )


def changed_settings(cell: Cell, run: RunFolder) -> list[str]:
    """What the cell has otherwise than its run, as `key: stored -> asked`. A run that goes on may change some settings,
    as `oapl train` lets it; the results of one that has ended are those of its settings, all of them."""
    ended = run.summary_path.exists() or run.collapse_path.exists()
    if not ended and run.newest_version() is None and not run.round_indices():
        return []  # nothing was made with whatever settings
    if not run.config_path.exists():
        return ["config.toml is missing"]
    changed = all_differences(load_recipe(run.config_path), cell.recipe)
    return [text for key, text in changed.items() if ended or not may_change(key)]
