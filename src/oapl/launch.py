"""Who runs when: a run's phases, in one process or several."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from oapl.config import Recipe, all_differences, load_recipe, rows_of
from oapl.crew import Crew
from oapl.errors import ConfigError, InstallationError, StoreError
from oapl.guard import WARNING, beta2_warning
from oapl.opening import check_not_collapsed, check_same_run, check_servers_are_of_one, open_run
from oapl.paths import ObjectPath, poll_s
from oapl.plan import plan_evaluation, plan_validation
from oapl.processes import stop_on_signal, wait_until
from oapl.progress import Progress
from oapl.results import (
    Scoring,
    base_scoring,
    evaluations,
    finish,
    is_filled,
    is_finished,
    unfilled,
    unsampled,
    unsampled_rounds,
    unvalidated,
)
from oapl.store import RoundFolder, RunFolder
from oapl.store.files import move_aside, read_json
from oapl.tasks import Task, make_task
from oapl.tracking import make_trackers
from oapl.types import Events, PolicyRef, Round

OF_A_MACHINE = ("engine.", "launch.lease_s", "task.num_workers", "task.reward_timeout_s")
"""Settings that a sampler may have other than its run."""


def train(recipe: Recipe, run: RunFolder, progress: Progress) -> dict[str, Any]:
    """Runs a recipe, or what is left of it, in a run folder; returns what summary.json then holds.

    Raises KeyboardInterrupt when told to stop, once everything is saved, and an OaplError where the run cannot go on.
    """
    start = time.monotonic()
    check_servers_are_of_one(recipe)
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
        resumed_from = run.last_step()
        check_not_collapsed(recipe, run)
        launch = LAUNCHES[recipe.launch.kind]
        with telling(recipe, run, progress) as on_step:
            launch(recipe, run, progress, replace(events, on_step=on_step))
        if events.should_stop():
            raise KeyboardInterrupt
        return finish(recipe, run, wall_s=time.monotonic() - start, resumed_from=resumed_from)


def sample(recipe: Recipe, run: RunFolder, progress: Progress) -> int | None:
    """Samples every round whose policy is there. Returns the index of the first unfilled one; None where all are."""
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
        find_work = partial(unsampled_rounds, recipe, run)
        roles.sample(recipe, run, events, find_work, lambda: next(find_work(), None) is None)
        return next(unfilled(recipe, run), None)


def assist(run: RunFolder, overrides: Mapping[str, Any], console: Console) -> str:
    """Samples for a run that is trained elsewhere what waits and is in no other sampler's hands, from base to final
    evaluation. Returns how the run ended.

    `overrides`: of the run's settings, those that suit this machine. The run may be continued with others of its own
    meanwhile. Raises KeyboardInterrupt when told to stop, once what is at hand is stored, and ConfigError where an
    override would change the run.
    """
    from oapl import roles

    if isinstance(run.path, ObjectPath):
        run.path.check_conditional_writes()  # a bucket that is not there would be waited for
    with stop_on_signal() as stop:
        if not run.config_path.exists():
            console.print(f"waiting until {run.path} is opened by `oapl train` …", markup=False, highlight=False)
            wait_until(run.config_path.exists, stop.is_set, poll_s(run.path))
    while True:
        settings = run.config_path.read_bytes()
        of_run, recipe = load_recipe(run.config_path), load_recipe(run.config_path, overrides)
        check_of_a_machine(of_run, recipe)
        check_servers_are_others(of_run, recipe)
        is_waiting = False

        def on_wait(nothing_to_do: bool) -> None:
            nonlocal is_waiting
            if nothing_to_do != is_waiting:
                is_waiting = nothing_to_do
                progress.phase("waiting for the next policy" if is_waiting else "sampling")

        def is_over() -> bool:
            return how_ended(recipe, run) is not None or run.config_path.read_bytes() != settings  # noqa: B023

        with Progress(recipe, console) as progress, stoppable(progress) as events:
            progress.phase("sampling")
            roles.sample(recipe, run, events, partial(unsampled, recipe, run), is_over, on_wait)
        if (how := how_ended(recipe, run)) is not None:
            return how


def how_ended(recipe: Recipe, run: RunFolder) -> str | None:
    """None while there is work, or will be."""
    if run.collapse_path.exists():
        return "was stopped by its guard"
    is_over = run.is_pruned() or (run.summary_path.exists() and is_finished(recipe, run))
    return "is finished" if is_over else None


def check_of_a_machine(of_run: Recipe, here: Recipe) -> None:
    """Raises ConfigError where a sampler that joins has other settings than those of its machine."""
    changed = [text for key, text in all_differences(of_run, here).items() if not key.startswith(OF_A_MACHINE)]
    if changed:
        raise ConfigError(
            f"a sampler that joins a run takes its settings, but for {', '.join(OF_A_MACHINE)}; leave out "
            f"{'; '.join(changed)}."
        )


def check_servers_are_others(of_run: Recipe, here: Recipe) -> None:
    """Raises ConfigError where a sampler that joins would take the servers from the run's own."""
    taken = sorted(set(of_run.engine.server_urls) & set(here.engine.server_urls))
    if taken and of_run.launch.num_samplers > 0:
        raise ConfigError(
            f"{taken[0]} is a server of the run's own sampler, which would lose its weights. Give this one others by "
            f"--engine.server_urls, or none by --engine.kind embedded --engine.server_urls '[]'. If the run starts no "
            f"sampler, set launch.num_samplers = 0 in its recipe."
        )


def train_alone(recipe: Recipe, run: RunFolder, progress: Progress) -> None:
    """The trainer alone, or the one of its ranks that torchrun started here, on rounds that are sampled elsewhere."""
    from oapl import roles
    from oapl.sharding import Place, joined

    with stoppable(progress) as events, joined(Place.of_environment(), recipe.trainer.device) as ranks:
        if not ranks.is_first:
            roles.train_as(ranks, recipe, run, events)
            return
        with run.lock("run"):
            for note in open_run(recipe, run):
                progress.note(note)
        check_not_collapsed(recipe, run)
        progress.phase("training")
        with telling(recipe, run, progress) as on_step:
            roles.train_as(ranks, recipe, run, replace(events, on_step=on_step))
        if ranks.others_stop:
            raise KeyboardInterrupt


@contextmanager
def telling(recipe: Recipe, run: RunFolder, progress: Progress) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """What tells of each step: on the screen, and wherever else metrics are to go."""
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

    try:
        yield on_step
    finally:
        for tracker in trackers:
            tracker.close()


@contextmanager
def stoppable(progress: Progress) -> Iterator[Events]:
    """Ctrl-C or SIGTERM lets the work at hand end well, then raises KeyboardInterrupt; a Ctrl-C after it, at once."""
    with stop_on_signal() as stop:
        yield Events(stop.is_set, progress.step, progress.shard)


# What is scored


def prepare_validations(recipe: Recipe, run: RunFolder, progress: Progress) -> None:
    if recipe.selection is not None:
        steps = (0, *recipe.snapshot_steps)
        prepare(recipe, plan_validation, ((run.validation(step), run.snapshot(step)) for step in steps), progress)


def prepare_begun(recipe: Recipe, run: RunFolder, progress: Progress) -> None:
    """Readies all that a run scores, for samplers that then do all of it: what is of weights that are not there, and
    may be made otherwise than before, is moved aside."""
    prepare_validations(recipe, run, progress)
    evaluated = [(run.evaluation(version), run.policy(version)) for version in (0, recipe.trainer.num_rounds)]
    chosen = [(run.selected(step), run.snapshot(step)) for step in recipe.snapshot_steps]
    prepare(recipe, plan_evaluation, (*evaluated, *chosen), progress)
    validated = [(run.validation(step), run.snapshot(step)) for step in recipe.snapshot_steps]
    for folder, policy in (*evaluated, *chosen, *validated):
        if policy is None and folder.is_begun():
            progress.note(f"{folder.path} is of weights that are gone; moved to {move_aside(folder.path).name}")


def prepare(
    recipe: Recipe,
    plan: Callable[[Recipe, Task, PolicyRef], Round],
    scored: Iterable[tuple[RoundFolder, PolicyRef | None]],
    progress: Progress,
    ready: Callable[[RoundFolder, Round], str | None] = RoundFolder.prepare,
) -> None:
    """Readies what earlier samplers have left of these, before the next start, and tells what was done."""
    begun = [(folder, policy) for folder, policy in scored if policy is not None and folder.is_begun()]
    if not begun:
        return
    task = make_task(recipe.task)
    try:
        for folder, policy in begun:
            if (note := ready(folder, plan(recipe, task, policy))) is not None:
                progress.note(note)
    finally:
        task.close()


# One process


def run_inline(recipe: Recipe, run: RunFolder, progress: Progress, events: Events) -> None:
    """Evaluation, sampling and training in turn, in this process."""
    from oapl import roles
    from oapl.train_loop import ensure_first_policy

    roles.use_threads(recipe.trainer.num_threads)
    ensure_first_policy(recipe, run)

    def evaluate(each: Scoring) -> None:
        prepare(recipe, each.plan, [(each.folder, each.find())], progress)
        if not each.is_complete() and not events.should_stop():
            progress.phase(each.name)
            roles.evaluate(recipe, run, events, folder=each.folder, find=each.find)

    if recipe.evaluation.eval_on_start:
        evaluate(base_scoring(run))
    if not events.should_stop():
        progress.phase("training")
        roles.train_inline(recipe, run, events)
    if not events.should_stop():
        prepare_validations(recipe, run, progress)
        if steps := unvalidated(recipe, run):
            progress.phase("validation")
            roles.validate(recipe, run, events, steps=steps)
    if not events.should_stop():
        for each in evaluations(recipe, run):
            evaluate(each)


# Several processes


def run_processes(recipe: Recipe, run: RunFolder, progress: Progress, events: Events) -> None:
    """Trainer and samplers side by side, with evaluations before and after on all workers; or the trainer alone, where
    all is left to samplers that join."""
    crew = Crew(run, progress, events)
    last, snapshots = recipe.trainer.num_rounds, set(recipe.snapshot_steps)
    trained = (
        run.has_policy(0) and run.has_policy(last) and snapshots <= set(run.snapshot_steps())
    )  # else it makes them

    def evaluate(each: Scoring) -> None:
        if each.folder.is_begun():
            crew.wait_until(lambda: each.find() is not None)
        prepare(recipe, each.plan, [(each.folder, each.find())], progress)
        if not each.is_complete():
            progress.phase(each.name)
            run_workers(crew, recipe, "evaluate", folder=each.folder, find=each.find)

    with tempfile.TemporaryDirectory(prefix="oapl-") as scratch:
        try:
            if not trained:
                trainers = start_trainer(crew, recipe, Path(scratch))
            if recipe.launch.num_samplers == 0:
                prepare_begun(recipe, run, progress)
                progress.note(f"samplers are to join: `oapl sample --run_dir {run.path}`, any number, anywhere")
                progress.phase("training")
                crew.wait_until(partial(is_finished, recipe, run))
                return
            if recipe.evaluation.eval_on_start:
                evaluate(base_scoring(run))
            if not trained:
                progress.phase("training")
                samplers = [f"sampler-{number}" for number in range(recipe.launch.num_samplers)]
                find_work, is_over = partial(unsampled_rounds, recipe, run), partial(is_filled, recipe, run)
                for sampler in samplers:
                    crew.start(sampler, "sample", find_work=find_work, is_over=is_over)
                crew.wait_for(*trainers, *samplers)
            prepare_validations(recipe, run, progress)
            if steps := unvalidated(recipe, run):
                progress.phase("validation")
                run_workers(crew, recipe, "validate", steps=steps)
            for each in evaluations(recipe, run):
                evaluate(each)
        except BaseException:
            crew.stop()
            raise


def start_trainer(crew: Crew, recipe: Recipe, scratch: Path) -> list[str]:
    """Starts the trainer, each of its ranks in a process; returns their names. They meet at a file."""
    count = recipe.trainer.num_ranks
    if count == 1:
        crew.start("trainer", "train")
        return ["trainer"]
    names = [f"trainer-{rank}" for rank in range(count)]
    for rank, name in enumerate(names):
        crew.start(name, "train", team="trainer", rank=rank, meeting=(scratch / "ranks").as_uri())
    return names


def run_workers(crew: Crew, recipe: Recipe, role: str, **arguments: Any) -> None:
    """Shares a role that samples evaluations out to all workers, and waits for them."""
    workers = [f"evaluation-{worker}" for worker in range(recipe.evaluation.num_workers)]
    for worker in workers:
        crew.start(worker, role, **arguments)
    crew.wait_for(*workers)


# A cluster


def run_on_ray(recipe: Recipe, run: RunFolder, progress: Progress, events: Events) -> None:
    """See `oapl.cluster`. Raises InstallationError where Ray is missing."""
    try:
        from oapl.cluster import run_ray
    except ImportError as error:
        raise InstallationError(f"launch.kind = 'ray' needs Ray: pip install 'oapl[ray]' ({error}).") from error
    prepare_begun(recipe, run, progress)
    run_ray(recipe, run, progress, events)


LAUNCHES = {"inline": run_inline, "processes": run_processes, "ray": run_on_ray}
