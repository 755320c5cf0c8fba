"""Who runs when: a run's phases, in one process or several, and what opens and closes a run."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from oapl.config import OAPLConfig, Recipe, differences, dump_recipe, load_recipe, may_change
from oapl.crew import Crew
from oapl.errors import ConfigError, StoreError, TaskError
from oapl.evaluation import best_step, read_scores
from oapl.guard import WARNING, collapse_error
from oapl.processes import stop_on_signal
from oapl.progress import Progress
from oapl.report import plot_pass_at_k, summarize, summarize_run
from oapl.store import RoundFolder, RunFolder, Unscored, put_in_order
from oapl.store.files import read_json, write_bytes, write_json
from oapl.store.run import num_sampled
from oapl.tracking import make_trackers
from oapl.types import Events, PolicyRef

LEAST_HOLD = 0.05
"""beta2 times the surprise of an answer (nats) below which a run is warned: 0.005 collapses (docs/findings.md)."""
GOOD_HOLD = 0.5
"""The same of the shipped recipe, which learns."""


def train(recipe: Recipe, run: RunFolder, progress: Progress) -> dict[str, Any]:
    """Runs a recipe, or what is left of it, in a run folder; returns what summary.json then holds.

    Raises KeyboardInterrupt when told to stop, once everything is saved, and an OaplError where the run cannot go on.
    """
    start = time.monotonic()
    with run.lock("run"), stoppable(progress) as events:
        for note in open_run(recipe, run):
            progress.note(note)
        if run.summary_path.exists() and is_finished(recipe, run):
            with suppress(StoreError):  # a damaged one is made again
                return read_json(run.summary_path)
        resumed_from = max(run.checkpoint_steps(), default=0)
        check_not_collapsed(recipe, run)
        trackers = make_trackers(recipe.tracking, run, recipe.model_dump(mode="json"))

        def on_step(record: Mapping[str, Any]) -> None:
            if record["step"] == 1 and (warning := beta2_warning(recipe, record.get("surprise", math.inf))):
                progress.note(warning)
            if (warning := record.get(WARNING)) is not None:
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


def check_not_collapsed(recipe: Recipe, run: RunFolder) -> None:
    """Raises CollapseError where the guard has stopped the run before, unless it may go on now."""
    if not run.collapse_path.exists():
        return
    if recipe.trainer.on_collapse == "stop":
        raise collapse_error(run)
    run.collapse_path.unlink()


def beta2_warning(recipe: Recipe, surprise: float) -> str | None:
    """What to say of a beta2 that is too small for answers of this mean surprise (nats), or None."""
    if not isinstance(recipe.loss, OAPLConfig) or (hold := recipe.loss.beta2 * surprise) >= LEAST_HOLD:
        return None
    return (
        f"loss.beta2 times the answers' mean surprise is {hold:.2g}: so little hardly holds the policy, "
        f"and right answers may be unlearnt. With {surprise:.1f} nats an answer, try loss.beta2 = "
        f"{GOOD_HOLD / surprise:.1g}."
    )


def open_run(recipe: Recipe, run: RunFolder) -> list[str]:
    """Makes the run folder, or checks that it holds this recipe's run and puts it in order; returns what was mended."""
    with run.lock("trainer"), run.lock("sampler"):  # until the processes of a killed run are gone
        check_same_run(recipe, run)
        recorded = recorded_rounds(recipe, run)
        trainer = recipe.trainer
        notes = put_in_order(
            run,
            steps_per_round=trainer.weight_sync_steps,
            shards_per_round=trainer.shards_per_round,
            num_rounds=trainer.num_rounds,
            policy_of_round=recipe.policy_of_round,
            unscored=partial(unscored, recipe, run),
        )
        if (step := max(run.checkpoint_steps(), default=0)) > trainer.num_steps:
            raise ConfigError(
                f"{run.path} has been trained for {step} steps, more than trainer.num_steps = {trainer.num_steps}. "
                f"Give at least {step}, or choose another run_dir."
            )
        write_bytes(run.config_path, dump_recipe(recipe).encode())
        for index, source in recorded.items():
            run.round(index).import_from(source)
        check_whole_imports(run)
        write_json(run.path / "environment.json", environment())
        return notes


def recorded_rounds(recipe: Recipe, run: RunFolder) -> dict[int, RoundFolder]:
    """The rounds of another run that this one trains on, by index: all that are sealed, and not begun here already.

    Raises ConfigError where there is none, or where one does not fit the recipe.
    """
    if recipe.launch.rounds_from is None:
        return {}
    source = RunFolder(recipe.launch.rounds_from)
    has_some = any(run.round(index).is_imported() for index in run.round_indices())
    sealed = [i for i in source.round_indices() if i < recipe.trainer.num_rounds and source.round(i).is_sealed()]
    if not sealed and not has_some:
        raise ConfigError(
            f"launch.rounds_from = {recipe.launch.rounds_from!r} holds no sealed round. Give the folder of a run whose "
            f"rounds are full: `oapl sample RECIPE --run_dir DIR` fills them."
        )
    recorded = {i: source.round(i) for i in sealed if run.round(i).is_imported() or not run.round(i).is_open()}
    if recorded:
        check_same_task(recipe, source)
    for folder in recorded.values():
        check_fits(recipe, folder)
    return recorded


def check_same_task(recipe: Recipe, source: RunFolder) -> None:
    """Raises ConfigError where the other run's completions answer other problems."""
    stored = load_recipe(source.config_path).task
    for name, asked in recipe.task.model_dump().items():
        if getattr(stored, name) != asked and not may_change(f"task.{name}"):
            raise ConfigError(
                f"{source.path} was recorded with task.{name} = {getattr(stored, name)!r}, "
                f"the recipe asks for {asked!r}."
            )


def check_whole_imports(run: RunFolder) -> None:
    """Raises StoreError where a round that was brought in has lost shards, and its source has them no longer."""
    for folder in (run.round(index) for index in run.round_indices()):
        if folder.is_imported() and not folder.is_sealed():
            raise StoreError(
                f"{folder.path} lacks some of its shards, and launch.rounds_from no longer has that round. Restore it, "
                f"or start a new run_dir."
            )


def check_fits(recipe: Recipe, folder: RoundFolder) -> None:
    """Raises ConfigError where a recorded round is not shaped like the recipe's own would be."""
    round = folder.load()
    facts = {
        "sampling.temperature": (round.sampling.temperature, recipe.sampling.temperature),
        "sampling.num_generations": (round.sampling.num_generations, recipe.sampling.num_generations),
        "sampling.max_completion_length": (round.sampling.max_completion_length, recipe.sampling.max_completion_length),
        "trainer.prompts_per_step": (round.prompts_per_shard, recipe.trainer.prompts_per_step),
        "trainer.weight_sync_steps / trainer.num_epochs": (round.num_shards, recipe.trainer.shards_per_round),
    }
    for name, (stored, asked) in facts.items():
        if stored != asked:
            raise ConfigError(f"{folder.path} was recorded with {name} = {stored}, the recipe asks for {asked}.")


def check_same_run(recipe: Recipe, run: RunFolder) -> None:
    """Raises ConfigError where the folder holds a run that this recipe would change, or the rest of one."""
    if run.is_pruned():
        raise ConfigError(
            f"{run.path} holds the results of a run whose rounds and policies were removed once it had ended "
            f"({run.pruned_path.name} lists them), so it cannot be continued. Choose another run_dir for a new run."
        )
    if not run.round_indices() and not run.policy_versions():
        return  # nothing was made with whatever settings
    if not run.config_path.exists():
        raise ConfigError(
            f"{run.path} holds rounds or policies but no config.toml. Restore it, or choose another run_dir."
        )
    changed = differences(load_recipe(run.config_path), recipe)
    if changed:
        raise ConfigError(
            f"{run.path} holds a run with other settings ({'; '.join(changed)}). "
            f"Restore the settings to continue it, or choose another run_dir for a new run."
        )


def environment() -> dict[str, Any]:
    """Versions and machine facts that a result may depend on."""
    packages = ("oapl", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "pydantic")
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"python": platform.python_version(), "platform": platform.platform(), "cores": os.cpu_count(), **versions}


def is_finished(recipe: Recipe, run: RunFolder) -> bool:
    """Whether nothing is left to train or evaluate."""
    return not unscored(recipe, run)


def unscored(recipe: Recipe, run: RunFolder) -> Unscored:
    """What the run has yet to score. Which snapshot is to be evaluated shows once all are validated."""
    last = recipe.trainer.num_rounds
    versions = {0} if recipe.evaluation.eval_on_start and not run.is_evaluated(0) else set()
    if recipe.selection is None:
        return Unscored(frozenset(versions if run.is_evaluated(last) else {*versions, last}))
    steps = unvalidated(recipe, run)
    if not steps:
        folder, find = reported(recipe, run)
        if not folder.is_complete_of(policy := find()):
            assert policy is not None
            steps = [policy.step]
    return Unscored(frozenset(versions | ({0} & set(steps))), frozenset(steps) - {0})


def unvalidated(recipe: Recipe, run: RunFolder) -> list[int]:
    """The steps of the snapshots whose validation is still to be sampled; 0 is the model as it came."""
    if recipe.selection is None:
        return []
    return [step for step in (0, *recipe.snapshot_steps) if not run.is_validated(step)]


def validation_scores(recipe: Recipe, run: RunFolder) -> dict[int, float]:
    """pass@1 of every snapshot on the validation problems, by step."""
    threshold = recipe.task.success_threshold
    scores = {step: read_scores(run.validation(step), threshold) for step in (0, *recipe.snapshot_steps)}
    graded = set.intersection(*(set(each.num_correct) for each in scores.values()))  # what failed once counts nowhere
    if not graded:
        raise TaskError("no validation problem was graded for every snapshot, so none of them can be chosen.")
    return {step: each.success(graded) for step, each in scores.items()}


def reported(recipe: Recipe, run: RunFolder) -> tuple[RoundFolder, Callable[[], PolicyRef | None]]:
    """The final evaluation's folder and weights: the last policy, or the best of the snapshots, all validated."""
    if recipe.selection is None:
        last = recipe.trainer.num_rounds
        return run.evaluation(last), partial(run.policy, last)
    step = best_step(validation_scores(recipe, run))
    return run.selected(step), partial(run.snapshot, step)


def finish(recipe: Recipe, run: RunFolder, *, wall_s: float, resumed_from: int) -> dict[str, Any]:
    """Writes summary.json and the picture from what the run folder holds."""
    threshold = recipe.task.success_threshold
    base = read_scores(run.evaluation(0), threshold) if recipe.evaluation.eval_on_start else None
    final = read_scores(reported(recipe, run)[0], threshold)
    metrics = run.metrics()
    summary = {
        **summarize_run(base, final),
        **summarize_selection(recipe, run),
        "num_steps": recipe.trainer.num_steps,
        "num_completions": num_sampled(metrics),
        "seed": recipe.seed,
        "wall_s": wall_s,
        "training_s": sum(record["save_s"] + record["wait_s"] + record["step_s"] for record in metrics),
        "resumed_from_step": resumed_from,
    }
    plot_pass_at_k(summary, run.path / "pass_at_k.png")
    write_json(run.summary_path, summary)
    return summary


def summarize_selection(recipe: Recipe, run: RunFolder) -> dict[str, Any]:
    """What the choice was made by; nothing where there was none to make."""
    if recipe.selection is None:
        return {}
    scores = validation_scores(recipe, run)
    return {"selection": {"step": best_step(scores), "pass@1": {str(step): score for step, score in scores.items()}}}


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
        progress.phase("sampling")
        return roles.sample(recipe, run, events, follow=False)


def evaluate_policy(
    recipe: Recipe, run: RunFolder, progress: Progress, version: int | None, output_dir: Path | None
) -> dict[str, Any]:
    """Evaluates one of a run's policies, by default the newest; returns its part of a summary."""
    from oapl import roles

    versions = run.policy_versions()
    if not versions and run.is_pruned():
        raise ConfigError(
            f"{run.path} holds the results of a study's run and no policies. Set the study's keep = 'all'."
        )
    if not versions:
        raise ConfigError(f"{run.path} has no policies yet. Start it with `oapl train RECIPE --run_dir {run.path}`.")
    if version is not None and version not in versions:
        raise ConfigError(f"{run.path} has policies {versions}; policy {version} is not among them.")
    chosen = versions[-1] if version is None else version
    folder = RoundFolder(output_dir) if output_dir else run.evaluation(chosen)
    with stoppable(progress) as events:
        progress.phase(f"evaluating policy {chosen}")
        roles.evaluate(recipe, run, events, folder=folder, find=partial(run.policy, chosen))
    return summarize_evaluation(recipe, folder)


def evaluate_model(recipe: Recipe, name_or_path: str, progress: Progress, output_dir: Path) -> dict[str, Any]:
    """Evaluates any model on the recipe's task; returns its part of a summary."""
    from oapl import roles

    folder = RoundFolder(output_dir)
    with stoppable(progress) as events:
        progress.phase(f"evaluating {name_or_path}")
        roles.evaluate_model(recipe, name_or_path, events, folder)
    return summarize_evaluation(recipe, folder)


def summarize_evaluation(recipe: Recipe, folder: RoundFolder) -> dict[str, Any]:
    summary = summarize(read_scores(folder, recipe.task.success_threshold))
    write_json(folder.path / "summary.json", summary)
    return summary


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
    count = recipe.evaluation.num_workers
    workers = [f"evaluation-{worker}" for worker in range(count)]
    for worker, child in enumerate(workers):
        crew.start(child, role, worker=worker, num_workers=count, **arguments)
    crew.wait_for(*workers)
