"""The completions a report shows: a bounded, seeded sample of a run's groups, spread over its rounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oapl.config import Recipe
from oapl.errors import OaplError, StoreError
from oapl.store import RunFolder
from oapl.store.files import numbered_folders
from oapl.types import Group, Round

MAX_GROUPS = 60
MAX_SHARDS = 24
"""Shards opened at most, and rounds: enough to see a run move, few enough to read in seconds."""
MAX_BYTES = 8_000_000
"""Of a report's completions, over all of its runs."""
HEAD, TAIL = 1500, 500
"""Tokens kept of both ends of a completion that is longer than their sum."""
LEAST_SCALE = 0.05
"""Nats at which the colour is full in a run whose log-ratios are smaller still."""


@dataclass(frozen=True, eq=False)
class ShownGroup:
    """A group, and where in the run it comes from."""

    round: Round
    step: int
    """The first optimizer step that trains on it."""
    group: Group


@dataclass(frozen=True, eq=False)
class TokenScores:
    """The tokens of some groups' completions as text, and how far a policy moved each of them.

    Of the groups that were to be scored, in their order; the last ones may be missing.
    """

    policy_version: int
    pieces: list[list[list[str]]]
    """By group, completion and token."""
    log_ratios: list[list[NDArray[np.float32]]]
    """log pi - log pi_sampler of each token, in nats."""


Scorer = Callable[[RunFolder, Sequence[ShownGroup]], TokenScores]
"""Scores groups with the run's newest policy. Raises OaplError where there is none, or it cannot be loaded."""


def completions(
    run: RunFolder, recipe: Recipe, last_step: int | None, scorer: Scorer | None, max_groups: int, max_bytes: int
) -> tuple[dict[str, Any] | None, list[str]]:
    """The sample of a run that is trained up to `last_step` as JSON values, or None where no completion is left; and
    what could not be shown, and why."""
    sampled, num_groups, notes = sample_groups(run, recipe.trainer.weight_sync_steps, max_groups, last_step)
    if not sampled:
        return None, notes
    scores = None
    if scorer is None:
        notes.append("Tokens are not coloured: the report was made without scoring them.")
    else:
        try:
            scores = scorer(run, sampled)
        except OaplError as error:
            notes.append(f"Tokens are not coloured: {error}")
    scored = len(scores.pieces) if scores else 0
    if 0 < scored < len(sampled):
        notes.append(f"Tokens are coloured in {scored} of the {len(sampled)} groups: there was no time to score more.")
    groups = [
        group_record(item, recipe.task.judged_by, scores if i < scored else None, i) for i, item in enumerate(sampled)
    ]
    kept = within_bytes(groups, max_bytes)
    if len(kept) < len(groups):
        notes.append(f"{len(groups) - len(kept)} of the {len(groups)} groups are left out to keep the file small.")
    return {
        "num_groups": num_groups,
        "threshold": recipe.task.success_threshold,
        "policy": scores.policy_version if scores else None,
        "scale": colour_scale(scores) if scores else None,
        "groups": sorted(kept, key=lambda record: (record["round"], record["step"], record["position"])),
    }, notes


def sample_groups(
    run: RunFolder, steps_per_round: int, max_groups: int, last_step: int | None = None
) -> tuple[list[ShownGroup], int, list[str]]:
    """The sample, those to drop first last; of how many groups it is; and what was damaged.

    Groups of steps after `last_step`, which no step was trained on, are no part of it. Of many rounds some are looked
    at, evenly apart; those between count as whole.
    """
    notes: list[str] = []
    rounds: dict[int, Round] = {}
    shards: list[tuple[int, int]] = []
    first_step: dict[int, int] = {}
    indices = numbered_folders(run.path / "rounds")
    if last_step is not None:
        indices = [index for index in indices if index * steps_per_round < last_step]
    looked_at = [indices[place] for place in spread(len(indices), MAX_SHARDS)]
    for index in looked_at:
        folder = run.round(index)
        if not folder.is_open():
            continue
        try:
            rounds[index] = folder.load()
        except StoreError as error:
            notes.append(f"Round {index} is left out: {error}")
            continue
        first_step[index] = index * steps_per_round + 1
        shards += [
            (index, number)
            for number in folder.stored_shards()
            if number < rounds[index].num_shards and (last_step is None or first_step[index] + number <= last_step)
        ]
    num_groups = sum(len(rounds[index].positions(number)) for index, number in shards)
    num_groups += (len(indices) - len(looked_at)) * max((round.num_prompts for round in rounds.values()), default=0)
    if not shards or max_groups < 1:
        return [], num_groups, notes
    chosen = spread(len(shards), min(MAX_SHARDS, max_groups))
    share = -(-max_groups // len(chosen))
    rng = np.random.default_rng(0)
    columns: list[list[ShownGroup]] = []
    for place in chosen:
        index, number = shards[place]
        try:
            groups = run.round(index).read_shard(number).groups
        except StoreError as error:
            notes.append(f"Step {first_step[index] + number} is left out: {error}")
            continue
        picked = rng.permutation(len(groups))[:share]
        columns.append([ShownGroup(rounds[index], first_step[index] + number, groups[i]) for i in picked])
    deals = [[column[deal] for column in columns if deal < len(column)] for deal in range(share)]
    ordered = [deal[place] for deal in deals for place in ends_first(len(deal))]
    return ordered[:max_groups], num_groups, notes


def spread(count: int, most: int) -> list[int]:
    """At most `most` of 0 … count - 1, evenly apart, with both ends."""
    if most >= count:
        return list(range(count))
    return sorted({round(place) for place in np.linspace(0, count - 1, max(2, most))})[-most:]


def ends_first(count: int) -> list[int]:
    """0 … count - 1 in the order in which to fill a small space: the ends, then what lies between, evenly."""
    between = (place for step in (16, 8, 4, 2) for place in range(step // 2, count, step))
    return list(dict.fromkeys([*range(count)[:1], *range(count)[-1:], *between, *range(count)]))


def group_record(item: ShownGroup, judged_by: str | None, scores: TokenScores | None, index: int) -> dict[str, Any]:
    group = item.group
    marks = group.marks(judged_by).tolist()
    return {
        "round": item.round.index,
        "step": item.step,
        "position": group.position,
        "id": group.prompt_id,
        "prompt": cut_text(group.prompt),
        "sampler": item.round.policy.version,
        "answers": [
            {
                "reward": round(verdict.reward, 4),
                "mark": round(marks[i], 4),
                **({"reason": cut_text(verdict.reason)} if verdict.reason else {}),
                "finish": completion.finish_reason,
                "length": len(completion.token_ids),
                "logprob": round(float(completion.logprobs.sum()), 2),
                **(
                    token_fields(scores.pieces[index][i], scores.log_ratios[index][i], completion.logprobs)
                    if scores
                    else {"text": cut_text(text)}
                ),
            }
            for i, (completion, text, verdict) in enumerate(
                zip(group.completions, group.texts, group.verdicts, strict=True)
            )
        ],
    }


def token_fields(
    pieces: Sequence[str], log_ratios: NDArray[np.float32], logprobs: NDArray[np.float32]
) -> dict[str, Any]:
    """The tokens of a completion, those in the middle of a very long one left out."""
    kept = list(range(len(pieces)))
    if len(kept) > HEAD + TAIL:
        kept = [*kept[:HEAD], *kept[-TAIL:]]
    return {
        "ratio": round(float(log_ratios.sum()), 3),
        "tokens": [pieces[i] for i in kept],
        "ratios": [round(float(log_ratios[i]), 3) for i in kept],
        "logprobs": [round(float(logprobs[i]), 2) for i in kept],
        **({"omitted": len(pieces) - len(kept)} if len(kept) < len(pieces) else {}),
    }


def cut_text(text: str, head: int = 4 * HEAD, tail: int = 4 * TAIL) -> str:
    """The text, without the middle of a very long one."""
    if len(text) <= head + tail:
        return text
    return f"{text[:head]}\n[… {len(text) - head - tail} characters …]\n{text[-tail:]}"


def within_bytes(groups: Sequence[dict[str, Any]], max_bytes: int) -> list[dict[str, Any]]:
    """As many of the groups, in order, as fit."""
    kept, size = [], 0
    for group in groups:
        size += len(json.dumps(group, ensure_ascii=False).encode("utf-8", "backslashreplace"))
        if size > max_bytes:
            break
        kept.append(group)
    return kept


def colour_scale(scores: TokenScores) -> float:
    """The log-ratio at which a colour is full: nineteen of twenty tokens moved by less."""
    every = np.concatenate([ratios for group in scores.log_ratios for ratios in group])
    known = np.abs(every[np.isfinite(every)])
    return max(LEAST_SCALE, float(f"{np.quantile(known, 0.95):.1g}")) if len(known) else LEAST_SCALE
