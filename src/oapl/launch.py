"""Who runs when: a run's phases, in one process or several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from oapl.config import Recipe, rows_of
from oapl.crew import Crew
from oapl.errors import StoreError
from oapl.guard import WARNING, beta2_warning
from oapl.opening import check_not_collapsed, check_same_run, open_run
from oapl.processes import stop_on_signal
from oapl.progress import Progress
from oapl.results import finish, is_finished, reported, unvalidated
from oapl.store import RoundFolder, RunFolder
from oapl.store.files import read_json
from oapl.tracking import make_trackers
from oapl.types import Events, PolicyRef


def train(recipe: Recipe, run: RunFolder, progress: Progress) -> dict[str, Any]:
    """Runs a recipe, or what is left of it, in a run folder; returns what summary.json then holds.

    Raises KeyboardInterrupt when told to stop, once everything is saved, and an OaplError where the run cannot go on.
    """
    start = time.monotonic()
    with run.lock("run"), stoppable(progress) as events:
        for note in open_run(recipe, run):
            progress.note(note)
        if (rows := rows_of(recipe.task.dataset, recipe.task.split)) is not None and rows == rows_of(
            recipe.task.eval_dataset, recipe.task.eval_split
        ):
            progress.note("task.eval_dataset holds the training problems: pass@k is not of held-out ones")
        if run.summary_path.exists() and is_finished(recipe, run):
            with suppress(StoreError):  # a damaged one is made again
                return read_json(run.summary_path)
        resumed_from = max(run.checkpoint_steps(), default=0)
        check_not_collapsed(recipe, run)
        warned: set[int] = set()
        trackers = make_trackers(recipe.tracking, run, recipe.model_dump(mode="json"))

        def on_step(record: Mapping[str, Any]) -> None:
            if record["step"] == 1 and (warning := beta2_warning(record)):
                progress.note(warning)
            if (warning := record.get(WARNING)) is not None and record["round"] not in warned:
                warned.add(record["round"])  # once a round
                progress.note(f"step {record['step']}: {warning}")
            progress.step(record)
            for tracker in trackers:
                tracker.log({name: value for name, value in record.items() if name != WARNING})

        launch = run_inline if recipe.launch.kind == "inline" else run_processes
        try:
            launch(recipe, run, progress, replace(events, on_step=on_step))
        finally:
            for tracker in trackers:
                tracker.close()
        if events.should_stop():
            raise KeyboardInterrupt
        return finish(recipe, run, wall_s=time.monotonic() - start, resumed_from=resumed_from)


def sample(recipe: Recipe, run: RunFolder, progress: Progress) -> int | None:
    """Samples on its own: see `oapl.sampler.run_sampler`."""
    from oapl import roles
    from oapl.train_loop import ensure_first_policy

    with stoppable(progress) as events:
        if not run.config_path.exists() or run.policy(0) is None:
            with run.lock("run"):
                for note in open_run(recipe, run):
                    progress.note(note)
                ensure_first_policy(recipe, run)
        check_same_run(recipe, run)
        check_not_collapsed(recipe, run)
        progress.phase("sampling")
        return roles.sample(recipe, run, events, follow=False)


@contextmanager
def stoppable(progress: Progress) -> Iterator[Events]:
    """Ctrl-C or SIGTERM lets the work at hand end well, then raises KeyboardInterrupt; a second one does so at once."""
    with stop_on_signal() as stop:
        yield Events(stop.is_set, progress.step, progress.shard)


# One process


def run_inline(recipe: Recipe, run: RunFolder, progress: Progress, events: Events) -> None:
    """Evaluation, sampling and training in turn, in this process."""
    from oapl import roles
    from oapl.train_loop import ensure_first_policy

    roles.use_threads(recipe.trainer.num_threads)
    ensure_first_policy(recipe, run)
    if recipe.evaluation.eval_on_start:
        progress.phase("base evaluation")
        roles.evaluate(recipe, run, events, folder=run.evaluation(0), find=partial(run.policy, 0))
    if not events.should_stop():
        progress.phase("training")
        roles.train_inline(recipe, run, events)
    if not events.should_stop() and (steps := unvalidated(recipe, run)):
        progress.phase("validation")
        roles.validate(recipe, run, events, steps=steps)
    if not events.should_stop():
        folder, find = reported(recipe, run)
        progress.phase("final evaluation")
        roles.evaluate(recipe, run, events, folder=folder, find=find)


# Several processes


def run_processes(recipe: Recipe, run: RunFolder, progress: Progress, events: Events) -> None:
    """Trainer and sampler side by side, with evaluations before and after on all workers."""
    crew = Crew(run, progress, events)
    trained = run.has_policy(recipe.trainer.num_rounds) and set(recipe.snapshot_steps) <= set(run.snapshot_steps())
    try:
        if not trained:
            crew.start("trainer", "train")
        if recipe.evaluation.eval_on_start and not run.is_evaluated(0):
            progress.phase("base evaluation")
            evaluate_with(crew, recipe, run.evaluation(0), partial(run.policy, 0))
        if not trained:
            progress.phase("training")
            crew.start("sampler", "sample", follow=True)
            crew.wait_for("trainer", "sampler")
        if steps := unvalidated(recipe, run):
            progress.phase("validation")
            for step in steps:
                run.validation(step).set_aside_unless_of(run.snapshot(step))
            run_workers(crew, recipe, "validate", steps=steps)
        folder, find = reported(recipe, run)
        if not folder.is_complete_of(find()):
            progress.phase("final evaluation")
            evaluate_with(crew, recipe, folder, find)
    except BaseException:
        crew.stop()
        raise


def evaluate_with(crew: Crew, recipe: Recipe, folder: RoundFolder, find: Callable[[], PolicyRef | None]) -> None:
    folder.set_aside_unless_of(find())  # before the workers: none of them may move another's files
    run_workers(crew, recipe, "evaluate", folder=folder, find=find)


def run_workers(crew: Crew, recipe: Recipe, role: str, **arguments: Any) -> None:
    """Shares a role that samples evaluations out to all workers, and waits for them."""
    workers = [f"evaluation-{worker}" for worker in range(recipe.evaluation.num_workers)]
    for worker in workers:
        crew.start(worker, role, **arguments)
    crew.wait_for(*workers)
