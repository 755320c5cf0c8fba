"""What `oapl eval` does: score a model, or a run's policy, on its recipe's task, on a benchmark, or on a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from oapl.errors import ConfigError
from oapl.launch import stoppable
from oapl.progress import Progress
from oapl.report import evaluation_table
from oapl.results import summarize_evaluation
from oapl.store import RoundFolder, RunFolder
from oapl.store.files import Lock, write_bytes

DEFAULTS: Mapping[str, Any] = {
    "trainer": {"num_steps": 1, "weight_sync_steps": 1},
    "sampling": {"max_completion_length": 1},
    "evaluation": {"num_generations": 4, "max_completion_length": 2048},
}
"""Of an evaluation without a recipe, which trains nothing."""
KEPT_OF_A_RUN = ("chat", "system_prompt", "chat_template_kwargs", "answer_after", "reward_timeout_s", "num_workers")
"""What a run's task says of the model, and not of its problems."""


@dataclass(frozen=True)
class Target:
    """What is evaluated, and where its evaluations go."""

    name: str
    run: RunFolder | None
    """The run, where a policy of it is evaluated; None for any other model."""
    version: int | None
    output_dir: Path | None

    def folder(self, label: str | None) -> RoundFolder:
        """`label` names a benchmark or a file; None stands for the recipe's own task."""
        if self.output_dir is not None:
            return RoundFolder(self.output_dir)
        if self.run is None:
            return RoundFolder(Path("evaluations") / "-".join(map(as_name, filter(None, (self.name, label)))))
        assert self.version is not None
        if label is None:
            return self.run.evaluation(self.version)
        return RoundFolder(self.run.path / "benchmarks" / as_name(label) / f"{self.version:06d}")


def find_target(name: str, version: int | None, output_dir: Path | None) -> Target:
    """Raises ConfigError where there is no such policy, or nothing that can be evaluated."""
    run = RunFolder(name)
    if RoundFolder(run.path).is_open():
        raise ConfigError(f"{name} is an evaluation itself. Name the model or the run, or `oapl compare {name} …`.")
    if not run.config_path.exists():
        return Target(name, None, None, output_dir)
    versions = run.policy_versions()
    if not versions and run.is_pruned():
        raise ConfigError(
            f"{run.path} holds the results of a study's run and no policies. Set the study's keep = 'all'."
        )
    if not versions:
        raise ConfigError(f"{run.path} has no policies yet. Start it with `oapl train RECIPE --run_dir {run.path}`.")
    if version is not None and version not in versions:
        raise ConfigError(f"{run.path} has policies {versions}; policy {version} is not among them.")
    return Target(name, run, versions[-1] if version is None else version, output_dir)


def as_name(text: str) -> str:
    """The text as part of a folder's name."""
    return re.sub(r"[^\w.@-]+", "-", text).strip("-")


def recipe_for(
    target: Target, given: Path | None, benchmark: str | None, data: Path | None, overrides: Mapping[str, Any]
) -> Recipe:
    """The settings of one evaluation. Raises ConfigError where they do not fit together, or where the benchmark's
    problems are those that the run's weights were chosen by or trained on."""
    if target.run is not None and given is not None:
        raise ConfigError(f"{target.name} is a run folder and has its own recipe; leave {given} out.")
    path = given if target.run is None else target.run.config_path
    task = task_of(benchmark, data)
    if path is None and not (task or "task" in overrides):
        raise ConfigError(
            f"{target.name} is not a run folder; to evaluate it as a model, say on what: a recipe, --benchmark NAME, "
            f"--data FILE, or a task such as --task.name math --task.eval_dataset FILE."
        )
    if path is not None and not task:
        return load_recipe(path, overrides)
    values: dict[str, Any] = {**DEFAULTS, "model": {"name_or_path": target.name}}
    if path is not None:
        base = load_recipe(path)
        check_not_seen(base, benchmark)
        task = {**base.task.model_dump(include=set(KEPT_OF_A_RUN), exclude_none=True), **task}
        values = {**base.model_dump(exclude_none=True, exclude={"selection"}), "task": {}}
    elif has_chat_template(target.name):
        task = {"chat": True, **task}
    values = merge(values, {"task": task})
    values = merge(values, overrides)
    if "dataset" not in values["task"] and (rows := values["task"].get("eval_dataset")):
        values["task"] |= {"dataset": rows, "split": values["task"].get("eval_split", "test")}
    if "num_prompts" not in overrides.get("evaluation", {}):
        values = merge(values, {"evaluation": {"num_prompts": MOST_PROMPTS}})
    return build_recipe(values, Path("oapl eval"))


MOST_PROMPTS = 1_000_000
"""All that there are."""


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


def check_not_seen(recipe: Recipe, benchmark: str | None) -> None:
    """Raises ConfigError where a run's result on a benchmark would look better than it is."""
    if benchmark is None:
        return
    rows = rows_of(benchmark, "")
    task = recipe.task
    if recipe.selection is not None and rows == rows_of(task.validation_dataset, task.validation_split):
        raise ConfigError(
            f"--benchmark {benchmark}: the run's weights were chosen by these problems (task.validation_dataset = "
            f"{task.validation_dataset!r}), so its score on them would be better than it is. Report another."
        )
    if rows == rows_of(task.dataset, task.split):
        raise ConfigError(
            f"--benchmark {benchmark}: the run was trained on these problems (task.dataset = {task.dataset!r}). "
            f"Report another."
        )


def has_chat_template(name_or_path: str) -> bool:
    from oapl.model import load_tokenizer

    return load_tokenizer(name_or_path).chat_template is not None


def assess(
    target: Target, recipe: Recipe, folder: RoundFolder, console: Console, *, label: str, regrade: bool
) -> dict[str, Any]:
    """Samples and grades what is missing, or with `regrade` grades what there is anew; writes and returns the
    summary."""
    from oapl import roles

    with (
        Lock(folder.path / ".evaluation.lock", "evaluation", setting="output_dir"),
        Progress(recipe, console) as progress,
    ):
        write_bytes(folder.path / "config.toml", dump_recipe(recipe).encode())
        with stoppable(progress) as events:
            if regrade:
                progress.phase(f"grading {label} again")
                roles.regrade(recipe, events, folder)
            elif target.run is not None:
                progress.phase(f"evaluating policy {target.version} on {label}")
                assert target.version is not None
                find = partial(target.run.policy, target.version)
                roles.evaluate(recipe, target.run, events, folder=folder, find=find)
            else:
                progress.phase(f"evaluating {target.name} on {label}")
                roles.evaluate_model(recipe, target.name, events, folder)
    model = target.name if target.run is None else f"{target.name}, policy {target.version}"
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
        raise ConfigError(
            "--data and --output_dir are for one benchmark. Evaluate the others by commands of their own."
        )
    names: Sequence[str | None] = benchmarks or [None]
    asked = [(name, recipe_for(target, given, name, data, overrides)) for name in names]
    summaries = []
    for name, recipe in asked:
        label = name or (data and str(data)) or None
        folder = target.folder(label)
        summary = assess(target, recipe, folder, console, label=label or recipe.task.name, regrade=regrade)
        summaries.append(summary)
        console.print(evaluation_table(f"{summary['model']} on {summary['problems']}", summary))
        console.print(f"samples and summary: {folder.path}", highlight=False)
    return summaries
