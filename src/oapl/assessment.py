"""What `oapl eval` does: score a model, or a run's weights, on its recipe's task, on a benchmark, or on a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from oapl.config import (
    BENCHMARKS,
    Benchmark,
    Recipe,
    build_recipe,
    dump_recipe,
    find_benchmark,
    load_recipe,
    merge,
    rows_of,
)
from oapl.errors import ConfigError, StoreError
from oapl.launch import prepare, stoppable
from oapl.opening import check_is_free
from oapl.paths import StorePath
from oapl.plan import plan_evaluation
from oapl.progress import Progress
from oapl.report import evaluation_table
from oapl.results import final_scoring, is_finished, summarize_evaluation
from oapl.store import RoundFolder, RunFolder
from oapl.store.files import move_aside, write_bytes
from oapl.store.leases import lock
from oapl.store.run import SCORED
from oapl.types import PolicyRef, Round

DEFAULTS: Mapping[str, Any] = {
    "trainer": {"num_steps": 1, "weight_sync_steps": 1},
    "evaluation": {"num_generations": 4, "max_completion_length": 2048},
}
"""Of an evaluation without a recipe, which trains nothing."""
ALL_PROMPTS = 1_000_000
SHOWN_FAILURES = 3
OF_THE_MODEL = ("chat", "system_prompt", "chat_template_kwargs", "answer_after", "reward_timeout_s", "num_workers")
"""What a run's task says of the model, whatever the problems."""
OF_THE_KIND = ("prompt_template", "test_timeout_s", "max_tests")
"""What it says of mathematics, or of programs, besides."""


@dataclass(frozen=True)
class Weights:
    """A run's weights that are evaluated."""

    run: RunFolder
    name: str
    """`policy 4`, or `step 150 (chosen)`."""
    find: Callable[[], PolicyRef | None]
    own: RoundFolder
    """Where their evaluation on the run's own task lies."""


@dataclass(frozen=True)
class Target:
    """What is evaluated, and where its evaluations go."""

    name: str
    weights: Weights | None
    """None for a model that is no run's."""
    recipe: Recipe | None
    """That of the run, or of the run whose folder the model lies in."""
    output_dir: Path | None

    def folder(self, label: str | None) -> RoundFolder:
        """`label` names a benchmark or a file; None stands for the run's own task."""
        if self.output_dir is not None:
            return RoundFolder(self.output_dir)
        if self.weights is None:
            return RoundFolder(Path("evaluations") / "-".join(map(as_name, filter(None, (self.name, label)))))
        if label is None:
            return self.weights.own
        return RoundFolder(self.weights.run.path / "benchmarks" / as_name(label) / as_name(self.weights.name))


def find_target(name: str, version: int | None, output_dir: Path | None) -> Target:
    """Raises ConfigError where there is no such policy, or nothing that can be evaluated."""
    run = RunFolder(name)
    if RoundFolder(run.path).is_open():
        raise ConfigError(f"{name} is an evaluation itself. Name the model or the run, or `oapl compare {name} …`.")
    if not run.config_path.exists():
        if version is not None:
            raise ConfigError(f"--policy {version}: {name} is not a run folder, so it has no policies. Leave it out.")
        return Target(name, None, recipe_around(Path(name)), output_dir)
    recipe = load_recipe(run.config_path)
    newest = run.newest_version()
    if newest is None and run.is_pruned():
        raise ConfigError(
            f"{run.path} holds the results of a study's run and no policies. Set the study's keep = 'all'."
        )
    if newest is None:
        raise ConfigError(f"{run.path} has no policies yet. Start it with `oapl train RECIPE --run_dir {run.path}`.")
    if version is None and recipe.selection is not None and is_finished(recipe, run):
        final = final_scoring(recipe, run)
        return Target(name, Weights(run, f"step {final.step} (chosen)", final.find, final.folder), recipe, output_dir)
    if version is not None and not run.has_policy(version):
        raise ConfigError(f"{run.path} has policies {run.policy_versions()}; policy {version} is not among them.")
    chosen = newest if version is None else version
    weights = Weights(run, f"policy {chosen}", partial(run.policy, chosen), run.evaluation(chosen))
    return Target(name, weights, recipe, output_dir)


def recipe_around(model: Path) -> Recipe | None:
    """The recipe of the run in whose folder a model lies; None where it lies elsewhere."""
    folder = model.resolve().parent
    run = RunFolder(folder.parent)
    return (
        load_recipe(run.config_path) if folder.name in ("policies", "snapshots") and run.config_path.exists() else None
    )


def as_name(text: str) -> str:
    """The text as part of a folder's name."""
    return re.sub(r"[^\w.@-]+", "-", text).strip("-.")


def recipe_for(
    target: Target, given: Path | None, benchmark: str | None, data: Path | None, overrides: Mapping[str, Any]
) -> Recipe:
    """The settings of one evaluation. Raises ConfigError where they do not fit together, or where the problems are
    those that the weights were chosen by or trained on."""
    if target.weights is not None and given is not None:
        raise ConfigError(f"{target.name} is a run folder and has its own recipe; leave {given} out.")
    path = given if target.weights is None else target.weights.run.config_path
    task = task_of(benchmark, data)
    if path is None and not (task or "task" in overrides):
        raise ConfigError(
            f"{target.name} is not a run folder; to evaluate it as a model, say on what: a recipe, --benchmark NAME, "
            f"--data FILE, or a task such as --task.name math --task.eval_dataset FILE."
        )
    if path is not None and not task:
        recipe = load_recipe(path, overrides)
    else:
        recipe = recipe_with(target, path, task, overrides)
    if target.recipe is not None:
        check_not_seen(target.recipe, recipe)
    return recipe


def recipe_with(
    target: Target, path: StorePath | None, task: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Recipe:
    """A recipe, or the defaults, with another task in the place of its own."""
    values: dict[str, Any] = {**DEFAULTS, "model": {"name_or_path": target.name}}
    if path is not None:
        base = load_recipe(path)
        kept = {*OF_THE_MODEL, *(OF_THE_KIND if base.task.name == task["name"] else ())}
        task = {**base.task.model_dump(include=kept, exclude_none=True), **task}
        values = base.model_dump(exclude_none=True, exclude={"selection", "task"})
    elif has_chat_template(target.name):
        task = {"chat": True, **task}
    values = merge(values, {"task": task})
    if "num_prompts" not in overrides.get("evaluation", {}):
        values = merge(values, {"evaluation": {"num_prompts": ALL_PROMPTS}})
    values = merge(values, overrides)
    if "dataset" not in values["task"] and (rows := values["task"].get("eval_dataset")):
        values["task"] |= {"dataset": rows, "split": values["task"].get("eval_split", "test")}
    return build_recipe(values, Path("oapl eval"))


def task_of(benchmark: str | None, data: Path | None) -> dict[str, Any]:
    """The task section that poses a benchmark's or a file's problems; empty without either."""
    if benchmark is None:
        return {} if data is None else {"name": "math", "eval_dataset": str(data)}
    known = known_benchmark(benchmark)
    task = {"name": known.kind, "eval_dataset": benchmark, "eval_split": known.split}
    return task if data is None else {**task, "eval_data_file": str(data)}


def known_benchmark(name: str) -> Benchmark:
    try:
        benchmark = find_benchmark(name)
    except ValueError as error:
        raise ConfigError(f"--benchmark {error}.") from error
    if benchmark is None:
        raise ConfigError(f"--benchmark {name}: no benchmark has that name. There are {', '.join(BENCHMARKS)}.")
    return benchmark


def check_not_seen(trained: Recipe, asked: Recipe) -> None:
    """Raises ConfigError where a result would look better than it is, since the weights have seen the problems."""
    own, task = trained.task, asked.task
    held_out = rows_of(own.eval_dataset, own.eval_split)
    for rows in (rows_of(task.eval_dataset, task.eval_split), rows_of(task.eval_data_file, "")):
        if rows is None or rows == held_out:
            continue
        for key, seen, how in (
            ("validation_dataset", rows_of(own.validation_dataset, own.validation_split), "chosen by"),
            ("dataset", rows_of(own.dataset, own.split), "trained on"),
        ):
            if seen is not None and seen.overlaps(rows) and (how == "trained on" or trained.selection is not None):
                raise ConfigError(
                    f"the run's weights were {how} these problems (task.{key} = {getattr(own, key)!r}), so their score "
                    f"would be better than it is. Evaluate on others than {rows.path}."
                )


def has_chat_template(name_or_path: str) -> bool:
    from oapl.model import load_tokenizer

    return load_tokenizer(name_or_path).chat_template is not None


def run_of(path: StorePath) -> RunFolder | None:
    """The run that an evaluation is part of."""
    folder = path.resolve().parent
    run = RunFolder(folder.parent)
    return run if folder.name in SCORED and run.config_path.exists() else None


@contextmanager
def locked(path: StorePath) -> Iterator[None]:
    """Held by who evaluates into a folder; of a run's own evaluation, in place of the run's own work on it."""
    with ExitStack() as held:
        if (run := run_of(path)) is not None:
            held.enter_context(run.lock("run"))
        held.enter_context(lock(path.parent / f".{path.name}.lock", "sampler", setting="output_dir", of=path))
        yield


def prepare_alone(target: Target, folder: RoundFolder, round: Round) -> str | None:
    """As `RoundFolder.prepare`, but nothing complete, and no other model's answers, give way unasked."""
    if folder.is_open() and (stored := folder.load()).policy != round.policy:
        if target.weights is None or target.output_dir is not None:  # else the run has made these weights anew
            raise StoreError(
                f"{folder.path} holds answers of other weights ({stored.policy.digest[:12]}…, and these are "
                f"{round.policy.digest[:12]}…). Name another --output_dir, or move that folder away."
            )
    elif folder.is_sealed() and folder.is_judged_otherwise(round):
        folder.check_planned(round)
        raise StoreError(
            f"{folder.path} was graded by {stored.verifier}, and the task, which has {round.verifier} now, or its rows "
            f"have changed since. Grade all of it again by --regrade, or take another output_dir."
        )
    return folder.prepare(round)


def assess(
    target: Target, recipe: Recipe, folder: RoundFolder, console: Console, *, label: str, regrade: bool
) -> dict[str, Any]:
    """Samples and grades what is missing, or with `regrade` grades what there is anew; writes and returns the
    summary."""
    from oapl import roles

    weights, path = target.weights, folder.path
    check_is_free(path, "evaluation", "output_dir", is_one=any(path.glob("round.json*")))
    with locked(path), Progress(recipe, console) as progress, stoppable(progress) as events:
        folder.finish_adopting()
        for damage in folder.set_damage_aside():
            progress.note(damage)
        if regrade:
            progress.phase(f"grading {label} again")
            roles.regrade(recipe, events, folder)
        else:
            policy = roles.model_ref(target.name) if weights is None else weights.find()
            assert policy is not None
            prepare(recipe, plan_evaluation, [(folder, policy)], progress, ready=partial(prepare_alone, target))
            if weights is not None:
                progress.phase(f"evaluating {weights.name} on {label}")
                roles.evaluate(recipe, weights.run, events, folder=folder, find=weights.find, alone=True)
            else:
                progress.phase(f"evaluating {target.name} on {label}")
                roles.evaluate_model(recipe, target.name, policy, events, folder)
    write_bytes(path / "config.toml", dump_recipe(recipe).encode())
    if regrade and (run := run_of(path)) is not None and run.summary_path.exists():
        move_aside(run.summary_path)  # which has the old scores
        console.print(f"the run's own summary is written anew by `oapl train` with --run_dir {run.path}")
    model = target.name if weights is None else f"{target.name}, {weights.name}"
    return summarize_evaluation(recipe, folder, {"model": model, "problems": label})


def evaluate(
    target: Target,
    given: Path | None,
    benchmarks: Sequence[str],
    data: Path | None,
    overrides: Mapping[str, Any],
    console: Console,
    *,
    regrade: bool = False,
) -> list[dict[str, Any]]:
    """One evaluation of each benchmark, or one of the recipe's task, and a table of each."""
    if len(benchmarks) > 1 and (data is not None or target.output_dir is not None):
        raise ConfigError("--data and --output_dir are for one benchmark. Evaluate others by commands of their own.")
    names: Sequence[str | None] = benchmarks or [None]
    asked = [(name, recipe_for(target, given, name, data, overrides)) for name in names]
    summaries = []
    for name, recipe in asked:
        rows = name or recipe.task.eval_dataset
        is_own = target.weights is not None and name is None and data is None and "task" not in overrides
        folder = target.folder(None if is_own else rows or recipe.task.name)
        label = (rows or recipe.task.name) + (f" ({data.name})" if name and data else "")
        summary = assess(target, recipe, folder, console, label=label, regrade=regrade)
        summaries.append(summary)
        console.print(evaluation_table(f"{summary['model']} on {summary['problems']}", summary))
        for failed in islice(folder.failures(), SHOWN_FAILURES):
            console.print(f"{failed.prompt_id} was not graded: {failed.cause}", highlight=False, markup=False)
        console.print(f"samples and summary: {folder.path}", highlight=False, soft_wrap=True)
    return summaries
