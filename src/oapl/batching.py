"""From groups to micro-batches: the arrays a forward pass and the loss need.

Shapes: G completions of a group, B completions of a micro-batch, T of their tokens with padding, R prompts,
P of their tokens with padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oapl.objective import Objective, StepCounts
from oapl.types import Completion, Group


@dataclass(frozen=True, eq=False)
class Row:
    """One completion with its prompt and what the loss needs of it."""

    position: int
    """Of its group within the round."""
    prompt_ids: np.ndarray
    completion: Completion
    mark: float
    """By which it counts as right or not: see `Group.marks`."""
    advantage: float

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion.token_ids)


@dataclass(frozen=True)
class Batch:
    """A micro-batch, padded on the right. The model reads `inputs` and says how likely `targets` were."""

    prompts: Tensor
    """i64[R, P]: each prompt once, without its last token. [0, 0] where rows hold their prompts themselves."""
    prompt_lengths: Tensor
    """i64[R]"""
    prompt_of_row: Tensor
    """i64[B]: which prompt each row goes on from."""
    inputs: Tensor
    """i64[B, T]: the prompt's last token, or all of the prompt, and the completion but for its last token."""
    targets: Tensor
    """i64[B, T]: the token after each input."""
    mask: Tensor
    """bool[B, T], True where the target belongs to the completion."""
    sampler_logprobs: Tensor
    """f32[B, T], of the targets; zero where the mask is False."""
    advantages: Tensor
    """f32[B]"""
    marks: Tensor
    """f32[B]"""

    @property
    def num_computed_tokens(self) -> int:
        """Padding included."""
        return self.prompts.numel() + self.inputs.numel()

    @property
    def num_scores(self) -> int:
        """Pairs of tokens that attention compares, padding included, for each head: those of prompts with themselves,
        and of rows with their prompts and themselves."""
        width = self.prompts.shape[1]
        return self.prompts.numel() * width + self.inputs.numel() * (width + self.inputs.shape[1])


def group_rows(groups: Sequence[Group], objective: Objective, judged_by: str | None = None) -> list[Row]:
    """Every completion that is trained on, with its advantage within its whole group."""
    rows = []
    for group in groups:
        if not objective.keeps_group(group):
            continue
        advantages_G = objective.advantages(torch.from_numpy(group.all_rewards).double())[: len(group.completions)]
        for completion, mark, advantage in zip(
            group.completions, group.marks(judged_by).tolist(), advantages_G.tolist(), strict=True
        ):
            if objective.keeps_completion(completion):
                rows.append(Row(group.position, group.prompt_ids, completion, mark, advantage))
    return rows


def step_counts(rows: Sequence[Row], max_completion_length: int) -> StepCounts:
    """What the losses of a step that trains on these rows divide by."""
    return StepCounts(len(rows), sum(len(row.completion.token_ids) for row in rows), max_completion_length)


class MicroBatch:
    """Rows that are computed together, and how many tokens that takes, padding included."""

    def __init__(self, share_prompts: bool) -> None:
        self.rows: list[Row] = []
        self._share_prompts = share_prompts
        self._positions: set[int] = set()
        self._longest_prompt = self._longest = 0

    def num_tokens(self, row: Row | None = None) -> int:
        """With another row, if one is given."""
        positions, prompt, longest = self._positions, self._longest_prompt, self._longest
        if row is not None:
            positions = positions | {row.position} if row.position not in positions else positions
            prompt, longest = max(prompt, self._shared(row)), max(longest, self._own(row))
        return len(positions) * prompt + (len(self.rows) + (row is not None)) * longest

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._positions.add(row.position)
        self._longest_prompt = max(self._longest_prompt, self._shared(row))
        self._longest = max(self._longest, self._own(row))

    def _shared(self, row: Row) -> int:
        """Tokens that are computed once for all rows of a prompt; the prompt's last one is computed in each."""
        return len(row.prompt_ids) - 1 if self._share_prompts else 0

    def _own(self, row: Row) -> int:
        """The other tokens, but for the last, after which there is nothing to predict."""
        return len(row) - self._shared(row) - 1


def micro_batches(rows: Sequence[Row], max_tokens: int, share_prompts: bool) -> list[list[Row]]:
    """Every row once, in micro-batches that compute at most `max_tokens` each, padding included.

    Rows of like length go together, so that little is padding, or rows of one prompt, so that it is computed once:
    whichever of the two orders computes less in all. A row beyond the budget is a micro-batch of its own.
    """
    by_length = sorted(rows, key=len, reverse=True)
    orders = [by_length]
    if share_prompts:
        longest: dict[int, int] = {}
        for row in by_length:
            longest.setdefault(row.position, len(row))
        orders.append(sorted(by_length, key=lambda row: (-longest[row.position], row.position)))
    plans = [fill(order, max_tokens, share_prompts) for order in orders]
    best = min(plans, key=lambda plan: sum(batch.num_tokens() for batch in plan))
    return [batch.rows for batch in best]


def shared_micro_batches(
    rows: Sequence[Row], max_tokens: int, share_prompts: bool, num_ranks: int
) -> list[list[list[Row]]]:
    """For each rank its `micro_batches`: as many as any other has, so that some may be empty.

    Rows are dealt out by length, so that each rank computes about as much as the others, at about the same time.
    """
    by_length = sorted(rows, key=len, reverse=True)
    plans = [micro_batches(by_length[rank::num_ranks], max_tokens, share_prompts) for rank in range(num_ranks)]
    most = max(map(len, plans))
    return [plan + [[] for _ in range(most - len(plan))] for plan in plans]


def fill(rows: Sequence[Row], max_tokens: int, share_prompts: bool) -> list[MicroBatch]:
    """Rows in this order, each in the last micro-batch if it fits there, else in a new one."""
    batches: list[MicroBatch] = []
    for row in rows:
        if not batches or batches[-1].num_tokens(row) > max_tokens:
            batches.append(MicroBatch(share_prompts))
        batches[-1].add(row)
    return batches


def collate(rows: Sequence[Row], device: str, share_prompts: bool) -> Batch:
    """The tensors of a micro-batch. Without sharing, every row begins with its whole prompt."""
    prompt_of: dict[int, int] = {}
    prompts: list[np.ndarray] = []
    for row in rows if share_prompts else ():
        if row.position not in prompt_of:
            prompt_of[row.position] = len(prompts)
            prompts.append(row.prompt_ids[:-1])
    before = [1 if share_prompts else len(row.prompt_ids) for row in rows]
    """Prompt tokens that stand in each row."""
    width = max(n + len(row.completion.token_ids) - 1 for n, row in zip(before, rows, strict=True))
    inputs, targets = np.zeros((2, len(rows), width), np.int64)
    sampler_logprobs = np.zeros((len(rows), width), np.float32)
    mask = np.zeros((len(rows), width), bool)
    for b, (num_prompt, row) in enumerate(zip(before, rows, strict=True)):
        ids = np.concatenate([row.prompt_ids[-num_prompt:], row.completion.token_ids])
        scored = slice(num_prompt - 1, len(ids) - 1)
        inputs[b, : len(ids) - 1], targets[b, : len(ids) - 1] = ids[:-1], ids[1:]
        sampler_logprobs[b, scored] = row.completion.logprobs
        mask[b, scored] = True
    prompt_ids = np.zeros((len(prompts), max(map(len, prompts), default=0)), np.int64)
    for r, prompt in enumerate(prompts):
        prompt_ids[r, : len(prompt)] = prompt
    return Batch(
        prompts=torch.from_numpy(prompt_ids).to(device),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64, device=device),
        prompt_of_row=torch.tensor([prompt_of.get(row.position, 0) for row in rows], device=device),
        inputs=torch.from_numpy(inputs).to(device),
        targets=torch.from_numpy(targets).to(device),
        mask=torch.from_numpy(mask).to(device),
        sampler_logprobs=torch.from_numpy(sampler_logprobs).to(device),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32, device=device),
        marks=torch.tensor([row.mark for row in rows], dtype=torch.float32, device=device),
    )


def idle_batch(device: str) -> Batch:
    """A micro-batch of one token and no target, whose log-probs sum to 0: for a rank that only takes part."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return Batch(
        prompts=token[:0, :0],
        prompt_lengths=token[0, :0],
        prompt_of_row=token[0],
        inputs=token,
        targets=token,
        mask=token.bool(),
        sampler_logprobs=token.float(),
        advantages=token[0].float(),
        marks=token[0].float(),
    )
