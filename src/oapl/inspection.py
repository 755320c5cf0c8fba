"""What lies in a run folder, told without loading a model: `oapl inspect`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oapl.config import load_recipe
from oapl.errors import StoreError
from oapl.guard import collapse_error
from oapl.report import summary_table
from oapl.store import RoundFolder, RunFolder
from oapl.store.files import numbered_folders, read_json
from oapl.types import Group


def inspect(run: RunFolder, console: Console, num_groups: int = 2, num_rounds: int = 20) -> None:
    """Prints a run's progress, its newest rounds and their policies, where time went, and some completions; older
    rounds are not looked at. Raises StoreError."""
    if RoundFolder(run.path).is_open():
        raise StoreError(
            f"{run.path} is an evaluation and no run: the same `oapl eval` shows its table, and its Parquet files hold "
            f"every sample with its verdict."
        )
    if not run.config_path.exists():
        raise StoreError(f"{run.path} is not a run folder: it has no config.toml. Start one with `oapl train RECIPE`.")
    recipe = load_recipe(run.config_path)
    metrics = run.metrics()
    step = metrics[-1]["step"] if metrics else 0
    first = max(0, max(numbered_folders(run.path / "rounds"), default=0) + 1 - num_rounds)
    console.print(
        f"{run.path}: step {step} of {recipe.trainer.num_steps}, model {recipe.model.name_or_path}, "
        f"task {recipe.task.name}, L = {recipe.trainer.weight_sync_steps}, G = {recipe.sampling.num_generations}, "
        f"seed {recipe.seed}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if run.collapse_path.exists():
        console.print(str(collapse_error(run)), style="bold", markup=False, soft_wrap=True)
    if run.is_pruned():
        console.print(
            "A study's run that has ended: its rounds, policies, checkpoints and snapshots were removed (pruned.json).",
            highlight=False,
            soft_wrap=True,
        )
    else:
        since = f" (since {first})" if first > 0 else ""
        console.print(
            f"policies sealed{since}: {run.policy_versions(first)}   checkpoints: {run.checkpoint_steps()}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    if recipe.selection is not None and not run.is_pruned():
        console.print(f"snapshots sealed: {run.snapshot_steps()}", highlight=False, soft_wrap=True)
    if indices := run.round_indices(first):
        console.print(rounds_table(round_facts(run, indices, metrics, recipe.trainer.weight_sync_steps)))
        if first > 0:
            console.print(
                f"{first} older rounds are not shown: --rounds {first + num_rounds} shows all.",
                highlight=False,
                soft_wrap=True,
            )
        console.print(
            "wall: the trainer's clock over the round. sample, train: what each side was busy for. "
            "overlap: wall / the longer of the two; 1.00 hides the shorter side wholly.",
            style="dim",
            highlight=False,
            soft_wrap=True,
        )
        for group in islice(last_groups(run, indices), num_groups):
            print_group(group, console)
    if run.summary_path.exists():
        try:
            print_summary(read_json(run.summary_path), console)
        except StoreError as error:
            console.print(f"{error}. `oapl train` on this folder makes it again.", markup=False, soft_wrap=True)


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """The table, with the choice that led to its weights, and the sign that they should not be trusted."""
    if "selection" in summary:
        chosen = summary["selection"]
        scores = ", ".join(f"{score:.3f} at {step}" for step, score in chosen["pass@1"].items())
        what = f"step {chosen['step']}" if chosen["step"] else "the model as it came"
        console.print(f"chosen: {what}, by pass@1 on validation problems of {scores}", highlight=False)
    if "collapse_sign" in summary:
        sign = summary["collapse_sign"]
        console.print(f"sign of a collapse at step {sign['step']}: {sign['reason']}", style="bold", highlight=False)
    console.print(summary_table(summary))


@dataclass(frozen=True)
class RoundFacts:
    """A round as the seals of its shards and the steps that trained on it tell it."""

    index: int
    policy: int | None = None
    """Version of the weights that sampled it; None of a round that another run sampled."""
    num_shards: int = 0
    """0 where its description cannot be read."""
    num_stored: int = 0
    is_sealed: bool = False
    num_failed: int = 0
    reward: float | None = None
    """Mean over the steps that have one."""
    wall_s: float = 0.0
    """The trainer's clock over the round."""
    sampling_s: float = 0.0
    training_s: float = 0.0
    overlap: float | None = None
    """`wall_s` over the longer of the other two, of a round that is trained whole."""


def round_facts(
    run: RunFolder, indices: Sequence[int], metrics: Iterable[Mapping[str, Any]], steps_per_round: int
) -> list[RoundFacts]:
    """Of these rounds, in their order; of the steps' records `metrics`, those of other rounds are passed over."""
    steps_of: dict[int, list[Mapping[str, Any]]] = {index: [] for index in indices}
    for record in metrics:
        if record["round"] in steps_of:
            steps_of[record["round"]].append(record)
    return [facts_of_round(run, index, steps, steps_per_round) for index, steps in steps_of.items()]


def facts_of_round(run: RunFolder, index: int, steps: Sequence[Mapping[str, Any]], steps_per_round: int) -> RoundFacts:
    folder = run.round(index)
    try:
        round = folder.load()
    except StoreError:
        return RoundFacts(index)
    found = folder.summary()
    rewards = [record["reward"] for record in steps if "reward" in record]
    own = not folder.is_imported()
    sampling_s = found["sampling_s"] if own else 0.0
    training_s = sum(record["step_s"] for record in steps)
    wall_s = sum(record["wait_s"] + record["step_s"] + record["save_s"] for record in steps)
    longer = max(sampling_s, training_s)
    return RoundFacts(
        index,
        round.policy.version if own else None,
        round.num_shards,
        len(found["digests"]),
        folder.is_sealed(),
        found["num_failed"],
        sum(rewards) / len(rewards) if rewards else None,
        wall_s,
        sampling_s,
        training_s,
        wall_s / longer if steps and len(steps) == steps_per_round and longer > 0 else None,
    )


def rounds_table(rounds: Iterable[RoundFacts]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True, title="Rounds", title_justify="left")
    for name in (
        "round",
        "policy",
        "shards",
        "failed",
        "reward",
        "wall s",
        "sample s",
        "train s",
        "overlap",
    ):
        table.add_column(name, justify="right")
    for each in rounds:
        if each.num_shards == 0:
            table.add_row(str(each.index), "", "damaged")
            continue
        table.add_row(
            str(each.index),
            "other run's" if each.policy is None else str(each.policy),
            f"{each.num_stored}/{each.num_shards}" + ("" if each.is_sealed else " open"),
            str(each.num_failed),
            "" if each.reward is None else f"{each.reward:.3f}",
            f"{each.wall_s:.1f}",
            f"{each.sampling_s:.1f}",
            f"{each.training_s:.1f}",
            "" if each.overlap is None else f"{each.overlap:.2f}",
        )
    return table


def last_groups(run: RunFolder, indices: Sequence[int]) -> Iterator[Group]:
    """Groups of the newest stored shard of these rounds, those with both right and wrong completions first."""
    for index in reversed(indices):
        folder = run.round(index)
        for number in reversed(folder.stored_shards()):
            yield from sorted(folder.read_shard(number).groups, key=lambda group: len(set(group.rewards.tolist())) == 1)
            return


def print_group(group: Group, console: Console) -> None:
    table = Table(box=SIMPLE, title=f"{group.prompt_id}: {escape(repr(group.prompt))}", title_justify="left")
    has_reasons = any(verdict.reason for verdict in group.verdicts)
    for name in ("reward", "tokens", "log-prob", "completion", *(["reason"] if has_reasons else [])):
        table.add_column(name, justify="left" if name in ("completion", "reason") else "right")
    for completion, text, verdict in zip(group.completions, group.texts, group.verdicts, strict=True):
        table.add_row(
            f"{verdict.reward:g}",
            str(len(completion.token_ids)),
            f"{completion.logprobs.sum():.1f}",
            escape(repr(text)),
            *([escape(verdict.reason)] if has_reasons else []),
        )
    console.print(table)
