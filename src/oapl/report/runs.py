"""What a report says of one run: settings, how far it came, pass@k and curves. No completion is read for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from oapl.config import Recipe, flatten
from oapl.errors import ConfigError, OaplError, StoreError
from oapl.evaluation import read_scores
from oapl.report.figures import curves, seconds_by_round
from oapl.report.summary import summarize
from oapl.store import RunFolder
from oapl.store.files import read_json

KEY_SETTINGS = (
    ("model", "model.name_or_path"),
    ("task", "task.name"),
    ("steps", "trainer.num_steps"),
    ("L", "trainer.weight_sync_steps"),
    ("G", "sampling.num_generations"),
    ("prompts a step", "trainer.prompts_per_step"),
    ("learning rate", "trainer.learning_rate"),
    ("epochs", "trainer.num_epochs"),
    ("loss", "loss.kind"),
    ("beta1", "loss.beta1"),
    ("beta2", "loss.beta2"),
    ("temperature", "sampling.temperature"),
    ("completion limit", "sampling.max_completion_length"),
    ("rounds ahead", "launch.rounds_ahead"),
    ("seed", "seed"),
)
"""What a run's card shows, each with the setting's name; the rest unfolds."""


def open_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Raises ConfigError where a path is no run folder."""
    for path in paths:
        if not (path / "config.toml").is_file():
            raise ConfigError(
                f"{path} is neither a run folder (it has no config.toml) nor a study folder (it has no results.csv). "
                f"Give the folder that `oapl train` or `oapl study` wrote to."
            )
    return [RunFolder(path) for path in paths]


def names_of(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of their paths as tells them apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"a run is given twice among {', '.join(map(str, paths))}. Name each run once.")


def run_record(run: RunFolder, recipe: Recipe, name: str, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One run as JSON values, but for its completions."""
    notes: list[str] = []
    summary = read_summary(run, notes)
    dumped = flatten(recipe.model_dump(mode="json", exclude_none=True))
    settings = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in dumped.items()}
    return {
        "name": name,
        "status": status(run, recipe, metrics, summary, notes),
        "settings": settings,
        "card": [[label, settings[key]] for label, key in KEY_SETTINGS if key in settings],
        "facts": facts(run, metrics, summary),
        "columns": curves(metrics),
        "rounds": seconds_by_round(metrics),
        "sync": recipe.trainer.weight_sync_steps,
        "scores": scores(run, recipe, summary, notes),
        "selection": selection(summary),
        "notes": notes,
    }


def read_summary(run: RunFolder, notes: list[str]) -> dict[str, Any]:
    """summary.json, or nothing where there is none that can be read."""
    if not run.summary_path.exists():
        return {}
    try:
        return read_json(run.summary_path, "final")
    except StoreError as error:
        notes.append(f"{error}. `oapl train` on this folder makes it again.")
        return {}


def status(
    run: RunFolder,
    recipe: Recipe,
    metrics: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    notes: list[str],
) -> dict[str, str]:
    """`kind` is finished, collapsed or unfinished; `text` says where the run stands. What to do goes to the notes."""
    step, wanted = (metrics[-1]["step"] if metrics else 0), recipe.trainer.num_steps
    if run.collapse_path.exists():
        try:
            found = read_json(run.collapse_path, "step", "reason")
        except StoreError as error:
            found = {"step": step, "reason": str(error)}
        notes += [found["advice"]] if "advice" in found else []
        return {"kind": "collapsed", "text": f"collapsed at step {found['step']} of {wanted}: {found['reason']}"}
    if summary and step >= wanted:
        return {"kind": "finished", "text": f"finished, {wanted} steps"}
    return {"kind": "unfinished", "text": f"unfinished: step {step} of {wanted}"}


def facts(run: RunFolder, metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[list[str]]:
    """Dates, amounts and versions, as label and text."""
    found = []
    times = [record["time"] for record in metrics if isinstance(record.get("time"), int | float)]
    if times:
        found += [["first step", when(min(times))], ["last step", when(max(times))]]
    found.append(["completions", f"{sum(int(record.get('num_completions', 0)) for record in metrics):,}"])
    found.append(["tokens", f"{sum(int(record.get('num_tokens', 0)) for record in metrics):,}"])
    if summary.get("resumed_from_step"):
        found.append(["resumed from step", str(summary["resumed_from_step"])])
    environment = run.path / "environment.json"
    if environment.exists():
        found += [[name, str(value)] for name, value in read_json(environment).items()]
    return found


def when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def scores(run: RunFolder, recipe: Recipe, summary: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """`base`, `final` and `difference`: of summary.json, or of an unfinished run what its evaluations tell."""
    if summary:
        return {name: summary[name] for name in ("base", "final", "difference") if name in summary}
    found = {}
    for name, version in (("base", 0), ("final", recipe.trainer.num_rounds)):
        if run.evaluation(version).is_sealed():
            try:
                found[name] = summarize(read_scores(run.evaluation(version), recipe.task))
            except OaplError as error:
                notes.append(f"Evaluation {version} is left out: {error}")
    return found


def selection(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """The validation pass@1 by step and the step that was chosen, where the run chose one."""
    chosen = summary.get("selection")
    if not isinstance(chosen, Mapping) or not isinstance(chosen.get("pass@1"), Mapping):
        return None
    points = sorted((int(step), float(value)) for step, value in chosen["pass@1"].items())
    return {"step": chosen.get("step"), "steps": [p[0] for p in points], "values": [p[1] for p in points]}
