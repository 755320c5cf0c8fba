"""Conducts a study: what is left of it, as child processes that run `oapl train`, several at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from rich.console import Console

from oapl.config import Recipe, dump_recipe
from oapl.errors import ConfigError
from oapl.processes import LIFELINE, stop_on_signal
from oapl.store.files import Lock, storing, write_bytes
from oapl.study.matrix import Cell, Study
from oapl.study.states import (
    Outcome,
    check_runs,
    forget_failure,
    log_path,
    outcome_of,
    record_failure,
    run_of,
    well_ended,
)
from oapl.study.tables import (
    Row,
    result_columns,
    result_row,
    rich_table,
    setting_columns,
    setting_row,
    write_table,
)

POLL_S = 0.1
STOPPED = (130, -signal.SIGTERM)
"""Exit codes of a run that was told to stop: after it saved, or before it had begun."""


def run_study(study: Study, study_dir: Path, num_workers: int | None, console: Console) -> bool:
    """Does what is left of a study; returns whether every run has ended well.

    Raises KeyboardInterrupt when told to stop, once the runs at work have saved.
    """
    num_workers = len(os.sched_getaffinity(0)) if num_workers is None else num_workers
    if num_workers < 1:
        raise ConfigError(f"--num_workers {num_workers} must be at least 1; leave it out for one a core.")
    with Lock(study_dir / ".study.lock", "study", setting="study_dir"):
        check_runs(study, study_dir)
        record = Record(study, study_dir, console)
        try:
            with stop_on_signal() as stop:
                work_off(record.left(), study_dir, num_workers, record, stop)
        except KeyboardInterrupt:
            record.show()
            raise
        record.show()
        return record.all_well()


class Record:
    """How the runs of a study ended: kept in its tables, and told as it happens."""

    def __init__(self, study: Study, study_dir: Path, console: Console) -> None:
        self._study, self._study_dir, self._console = study, study_dir, console
        self._outcomes: dict[str, Outcome] = {}
        self._rows: dict[str, Row] = {}
        for cell in study.cells:
            if (outcome := outcome_of(cell, run_of(cell, study_dir))) is not None:
                self._take(cell, outcome)
        self._write_results()

    def left(self) -> list[Cell]:
        """The cells that are to run, in the order of work."""
        return [cell for cell in self._study.in_order_of_work() if not self._ended_well(cell)]

    def started(self, cell: Cell) -> None:
        """Forgets how the run failed before."""
        self._outcomes.pop(cell.name, None)
        self._rows.pop(cell.name, None)

    def ended(self, cell: Cell, outcome: Outcome, wall_s: float) -> None:
        self._take(cell, outcome)
        self._write_results()
        row, done = self._rows[cell.name], sum(map(self._ended_well, self._study.cells))
        says = [f"{cell.name} {outcome.status}" + (f": {outcome.reason}" if outcome.reason else "")]
        if "final_pass@1" in row:
            before = f"{row['base_pass@1']:.3f} -> " if "base_pass@1" in row else ""
            says.append(f"pass@1 {before}{row['final_pass@1']:.3f}")
        self._say(f"{done} of {len(self._study.cells)} done: {', '.join(says)}, {wall_s:.0f} s")

    def show(self) -> None:
        """Writes and prints the table over seeds, names what failed, and where everything is."""
        rows = list(filter(None, map(self._setting_row, self._study.settings())))
        write_table(self._study_dir / "table.csv", rows, setting_columns(self._study.grid_keys))
        if rows:
            self._console.print(rich_table(rows, self._study.grid_keys))
        for cell in self._study.cells:
            if (outcome := self._outcomes.get(cell.name)) is not None and outcome.status == "failed":
                log = log_path(run_of(cell, self._study_dir))
                self._say(f"failed: {cell.name}: {outcome.reason}   output: {log}")
        self._say(f"runs: {self._study_dir / 'results.csv'}   over seeds: {self._study_dir / 'table.csv'}")

    def all_well(self) -> bool:
        return all(map(self._ended_well, self._study.cells))

    def _ended_well(self, cell: Cell) -> bool:
        outcome = self._outcomes.get(cell.name)
        return outcome is not None and outcome.status != "failed"

    def _take(self, cell: Cell, outcome: Outcome) -> None:
        run = run_of(cell, self._study_dir)
        if outcome.status != "failed" and self._study.keep == "results":
            run.prune()
        self._outcomes[cell.name] = outcome
        self._rows[cell.name] = result_row(cell, run, outcome, self._study_dir)

    def _write_results(self) -> None:
        rows = [self._rows[cell.name] for cell in self._study.cells if cell.name in self._rows]
        write_table(self._study_dir / "results.csv", rows, result_columns(self._study.grid_keys))

    def _setting_row(self, cells: Sequence[Cell]) -> Row | None:
        runs = [run_of(cell, self._study_dir) for cell in cells]
        return setting_row(cells, [self._outcomes.get(cell.name) for cell in cells], runs)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def work_off(cells: Sequence[Cell], study_dir: Path, num_workers: int, record: Record, stop: Event) -> None:
    """Runs the cells in order, `num_workers` at once, until all have ended or, told to stop, those at work have."""
    waiting, at_work, told = deque(cells), set[Child](), False
    with lifeline() as descriptor:
        try:
            while at_work or (waiting and not stop.is_set()):
                while waiting and len(at_work) < num_workers and not stop.is_set():
                    cell = waiting.popleft()
                    record.started(cell)
                    at_work.add(Child(cell, study_dir, descriptor))
                if stop.is_set() and not told:
                    told = True
                    for child in at_work:
                        child.process.terminate()
                for child in [child for child in at_work if child.process.poll() is not None]:
                    at_work.remove(child)
                    if (outcome := child.outcome(told)) is not None:
                        record.ended(child.cell, outcome, time.monotonic() - child.start)
                time.sleep(POLL_S)
        finally:  # only where the user lost patience, or a table could not be written
            for child in at_work:
                child.process.kill()
                child.process.wait()


class Child:
    """A run at work in a process of its own, which prints into the run's log."""

    def __init__(self, cell: Cell, study_dir: Path, descriptor: int) -> None:
        self.cell, self.run, self.start = cell, run_of(cell, study_dir), time.monotonic()
        recipe_path = study_dir / "recipes" / f"{cell.name}.toml"
        write_bytes(recipe_path, dump_recipe(cell.recipe).encode())
        forget_failure(self.run)
        log = log_path(self.run)
        with storing(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            with open(log, "ab") as output:
                self._log_start = output.tell()
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "oapl", "train", str(recipe_path), "--run_dir", str(self.run.path)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, LIFELINE: str(descriptor), "OMP_NUM_THREADS": num_threads(cell.recipe)},
                    pass_fds=(descriptor,),
                    process_group=0,  # Ctrl-C is for the study, which passes it on once
                )

    def outcome(self, told_to_stop: bool) -> Outcome | None:
        """How the run ended, stored where it failed; None where it was stopped and is to be continued."""
        if (ended := well_ended(self.cell, self.run)) is not None:
            return ended
        if told_to_stop and self.process.returncode in STOPPED:
            return None
        reason = self._failure()
        record_failure(self.run, reason)
        return Outcome("failed", reason)

    def _failure(self) -> str:
        """The last line of what the run printed, which is its error; of a killed one, by what."""
        code = self.process.returncode
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        printed = log_path(self.run).read_bytes()[self._log_start :].decode(errors="replace")
        lines = [line.strip() for line in printed.splitlines() if line.strip()]
        return lines[-1] if lines else f"ended with exit code {code} and printed nothing"


def num_threads(recipe: Recipe) -> str:
    """What OpenMP may use: sampler and trainer take turns in one process."""
    return str(max(recipe.trainer.num_threads, recipe.engine.num_threads))


@contextmanager
def lifeline() -> Iterator[int]:
    """The reading end of a pipe whose writing end only this process has: children end when it does, even by SIGKILL."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)
