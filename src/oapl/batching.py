"""From groups to padded micro-batches: the arrays a forward pass and the loss need.

Shapes: G completions of a group, B completions of a micro-batch, S tokens of a padded row (prompt, completion,
padding), K scored positions: tokens 1 + first … S - 1 of every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oapl.objective import Objective, StepCounts
from oapl.types import Completion, Group


@dataclass(frozen=True)
class Row:
    """One completion with its prompt and what the loss needs of it."""

    prompt_ids: np.ndarray
    completion: Completion
    reward: float
    advantage: float

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion.token_ids)


@dataclass(frozen=True)
class Batch:
    """A padded micro-batch. Every tensor's first axis is B."""

    ids: Tensor
    """[B, S], padded on the right."""
    first: int
    """Scores start with the token after this one, so that no head is computed over prompts."""
    sampler_logprobs: Tensor
    """f32[B, K], zero where the mask is False."""
    mask: Tensor
    """bool[B, K], True on completion tokens."""
    advantages: Tensor
    """f32[B]"""
    rewards: Tensor
    """f32[B]"""


def group_rows(groups: Sequence[Group], objective: Objective) -> list[Row]:
    """Every completion that is trained on, with its advantage within its whole group."""
    rows = []
    for group in groups:
        if not objective.keeps_group(group):
            continue
        rewards_G = torch.from_numpy(group.rewards).double()
        advantages_G = objective.advantages(rewards_G)
        for completion, reward, advantage in zip(
            group.completions, rewards_G.tolist(), advantages_G.tolist(), strict=True
        ):
            if objective.keeps_completion(completion):
                rows.append(Row(group.prompt_ids, completion, reward, advantage))
    return rows


def step_counts(rows: Sequence[Row], max_completion_length: int) -> StepCounts:
    """What the losses of a step that trains on these rows divide by."""
    return StepCounts(len(rows), sum(len(row.completion.token_ids) for row in rows), max_completion_length)


def micro_batches(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Rows of like length together, so that little is padding: rows times the longest is at most `max_tokens`.

    A row longer than that is a micro-batch of its own.
    """
    batches: list[list[Row]] = []
    for row in sorted(rows, key=len, reverse=True):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0]) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def collate(rows: Sequence[Row], device: str) -> Batch:
    width = max(len(row) for row in rows)
    first = min(len(row.prompt_ids) for row in rows) - 1
    ids = np.zeros((len(rows), width), np.int64)
    sampler_logprobs = np.zeros((len(rows), width - 1 - first), np.float32)
    mask = np.zeros((len(rows), width - 1 - first), bool)
    for b, row in enumerate(rows):
        num_prompt, end = len(row.prompt_ids), len(row)
        ids[b, :num_prompt] = row.prompt_ids
        ids[b, num_prompt:end] = row.completion.token_ids
        scored = slice(num_prompt - 1 - first, end - 1 - first)
        sampler_logprobs[b, scored] = row.completion.logprobs
        mask[b, scored] = True
    return Batch(
        ids=torch.from_numpy(ids).to(device),
        first=first,
        sampler_logprobs=torch.from_numpy(sampler_logprobs).to(device),
        mask=torch.from_numpy(mask).to(device),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32, device=device),
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float32, device=device),
    )
