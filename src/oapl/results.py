"""What a run has scored and has yet to score, which of its weights it reports, and its summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from oapl.config import Recipe
from oapl.errors import TaskError
from oapl.evaluation import best_step, read_scores
from oapl.guard import first_sign
from oapl.plan import Work, plan_evaluation, plan_round, plan_validation
from oapl.report import plot_pass_at_k, summarize, summarize_run
from oapl.store import RoundFolder, RunFolder, Unscored
from oapl.store.files import SEAL, write_json
from oapl.store.run import num_sampled
from oapl.types import PolicyRef, Round

CHOICES: dict[tuple[bytes, ...], Choice] = {}
"""Those made already, by the task and the seals of the validations, which hold the digests of all their shards."""


@dataclass(frozen=True)
class Scoring:
    """Some weights of a run, and the problems that they are scored on."""

    name: str
    folder: RoundFolder
    find: Callable[[], PolicyRef | None]
    """The weights, once they are there."""
    plan: Callable[..., Round]
    """Of `recipe`, `task` and `policy`."""
    version: int | None
    """Of a policy; of a snapshot None."""
    step: int

    def is_complete(self) -> bool:
        return self.folder.is_complete_of(self.find())


def scorings(recipe: Recipe, run: RunFolder) -> Iterator[Scoring]:
    """What a run scores, in order. Of the snapshots, one is evaluated, which shows once all are validated."""
    if recipe.evaluation.eval_on_start:
        yield base_scoring(run)
    steps = () if recipe.selection is None else (0, *recipe.snapshot_steps)
    validations = [
        Scoring(
            "validation", run.validation(step), partial(run.snapshot, step), plan_validation, None if step else 0, step
        )
        for step in steps
    ]
    yield from validations
    if all(each.is_complete() for each in validations):
        yield final_scoring(recipe, run)


def evaluations(recipe: Recipe, run: RunFolder) -> Iterator[Scoring]:
    """What the summary compares: the model as it came, where that is asked for, and the weights that are reported.

    Both are looked at when the run ends, since a reward may have been mended after the first was graded.
    """
    if recipe.evaluation.eval_on_start:
        yield base_scoring(run)
    yield final_scoring(recipe, run)


def base_scoring(run: RunFolder) -> Scoring:
    """Of the model as it came."""
    return Scoring("base evaluation", run.evaluation(0), partial(run.policy, 0), plan_evaluation, 0, 0)


def final_scoring(recipe: Recipe, run: RunFolder) -> Scoring:
    """Of the last policy, or of the best of the snapshots, all validated."""
    name = "final evaluation"
    if recipe.selection is None:
        last, step = recipe.trainer.num_rounds, recipe.trainer.num_steps
        return Scoring(name, run.evaluation(last), partial(run.policy, last), plan_evaluation, last, step)
    step = choose(recipe, run).step
    return Scoring(name, run.selected(step), partial(run.snapshot, step), plan_evaluation, None if step else 0, step)


def incomplete(recipe: Recipe, run: RunFolder) -> Iterator[Scoring]:
    return (each for each in scorings(recipe, run) if not each.is_complete())


def is_finished(recipe: Recipe, run: RunFolder) -> bool:
    """Whether nothing is left to train or evaluate."""
    return next(incomplete(recipe, run), None) is None


def unscored(recipe: Recipe, run: RunFolder) -> Unscored:
    """What the run has yet to score, as far as that shows."""
    left = list(incomplete(recipe, run))
    return Unscored(
        frozenset(each.version for each in left if each.version is not None),
        frozenset(each.step for each in left if each.version is None),
    )


def unvalidated(recipe: Recipe, run: RunFolder) -> list[int]:
    """The steps of the snapshots whose validation is still to be sampled; 0 is the model as it came."""
    return [each.step for each in incomplete(recipe, run) if each.plan is plan_validation]


@dataclass(frozen=True)
class Choice:
    """What weights are chosen by."""

    scores: Mapping[int, float]
    """pass@1 of every snapshot on the validation problems, by step."""
    num_prompts: int
    """The problems that were graded for every snapshot: what failed once counts nowhere."""

    @property
    def step(self) -> int:
        return best_step(self.scores)


def choose(recipe: Recipe, run: RunFolder) -> Choice:
    """Of a run whose snapshots are all validated. A start of it asks several times, and reads the validations once."""
    folders = {step: run.validation(step) for step in (0, *recipe.snapshot_steps)}
    sealed = (recipe.task.model_dump_json().encode(), *((each.path / SEAL).read_bytes() for each in folders.values()))
    if sealed not in CHOICES:
        scores = {step: read_scores(folder, recipe.task) for step, folder in folders.items()}
        graded = set.intersection(*(set(each.num_correct) for each in scores.values()))
        if not graded:
            raise TaskError("no validation problem was graded for every snapshot, so none of them can be chosen.")
        CHOICES[sealed] = Choice({step: each.success(graded) for step, each in scores.items()}, len(graded))
    return CHOICES[sealed]


def unfilled(recipe: Recipe, run: RunFolder) -> Iterator[int]:
    """The rounds that are neither trained nor sampled whole, in order."""
    trained = run.last_step() // recipe.trainer.weight_sync_steps
    for index in range(trained, recipe.trainer.num_rounds):
        folder = run.round(index)
        if not (folder.is_sealed() and folder.is_of(run.policy(recipe.policy_of_round(index)))):
            yield index


def is_filled(recipe: Recipe, run: RunFolder) -> bool:
    """Whether every round is sampled whole."""
    return next(unfilled(recipe, run), None) is None


def unsampled_rounds(recipe: Recipe, run: RunFolder) -> Iterator[Work]:
    """The unfilled rounds that have their policy."""
    for index in unfilled(recipe, run):
        if (policy := run.policy(recipe.policy_of_round(index))) is None:
            return
        yield run.round(index), policy, partial(plan_round, recipe, policy=policy, index=index)


def unsampled(recipe: Recipe, run: RunFolder) -> Iterator[Work]:
    """What of a run can be sampled now and is not complete: rounds first, for which the trainer waits."""
    yield from unsampled_rounds(recipe, run)
    for each in incomplete(recipe, run):
        if (policy := each.find()) is not None:
            yield each.folder, policy, partial(each.plan, recipe, policy=policy)


def finish(recipe: Recipe, run: RunFolder, *, wall_s: float, resumed_from: int) -> dict[str, Any]:
    """Writes summary.json and the picture from what the run folder holds."""
    base = read_scores(run.evaluation(0), recipe.task) if recipe.evaluation.eval_on_start else None
    final = read_scores(final_scoring(recipe, run).folder, recipe.task)
    metrics = run.metrics()
    summary = {
        **summarize_run(base, final),
        **summarize_selection(recipe, run),
        **collapse_signs(metrics),
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


def collapse_signs(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first sign of a collapse in a run's steps, whatever was done about it; nothing where there was none."""
    if (first := first_sign(metrics)) is None:
        return {}
    step, reason = first
    return {"collapse_sign": {"step": step, "reason": reason}}


def summarize_selection(recipe: Recipe, run: RunFolder) -> dict[str, Any]:
    """What the choice was made by; nothing where there was none to make."""
    if recipe.selection is None:
        return {}
    choice = choose(recipe, run)
    scores = {str(step): score for step, score in choice.scores.items()}
    return {"selection": {"step": choice.step, "pass@1": scores, "num_prompts": choice.num_prompts}}


def summarize_evaluation(recipe: Recipe, folder: RoundFolder, of: Mapping[str, str]) -> dict[str, Any]:
    """Writes and returns the summary of an evaluation: `of` what, by which settings, and the scores."""
    round = folder.load()
    summary = {
        **of,
        **summarize(read_scores(folder, recipe.task)),
        "temperature": round.sampling.temperature,
        "top_p": round.sampling.top_p,
        "top_k": round.sampling.top_k,
        "max_completion_length": round.sampling.max_completion_length,
        "verifier": round.verifier,
    }
    write_json(folder.path / "summary.json", summary)
    return summary
