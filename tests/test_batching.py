"""From groups to rows, micro-batches and tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import tensor

from helpers import make_completion, make_group
from oapl.batching import Row, collate, group_rows, micro_batches
from oapl.config import OAPLConfig
from oapl.objective import make_objective

OBJECTIVE = make_objective(OAPLConfig(beta1=1.0))


def make_row(
    prompt_ids: list[int],
    token_ids: list[int],
    logprobs: list[float] | None = None,
    advantage: float = 0.0,
    position: int = 0,
) -> Row:
    completion = make_completion(token_ids, logprobs)
    return Row(position, np.array(prompt_ids, np.int32), completion, mark=1.0, advantage=advantage)


def row_of_length(length: int, prompt: int = 1, position: int = 0) -> Row:
    return make_row([1] * prompt, [2] * (length - prompt), position=position)


def computed(rows: Sequence[Row], share_prompts: bool) -> int:
    """Tokens of a micro-batch with padding, counted on its tensors."""
    return collate(rows, "cpu", share_prompts).num_computed_tokens


def test_an_advantage_is_the_reward_less_the_value_of_its_own_group():
    rows = group_rows([make_group(0, [1.0, 0.0]), make_group(1, [0.5, 0.5])], OBJECTIVE)
    value = math.log((math.e + 1) / 2)  # of the first group; the second's is 0.5, as all its rewards are
    assert [row.advantage for row in rows] == pytest.approx([1 - value, -value, 0.0, 0.0])
    assert [row.mark for row in rows] == [1.0, 0.0, 0.5, 0.5]


def test_rows_keep_each_completion_with_its_own_prompt():
    rows = group_rows([make_group(0, [1.0, 0.0], prompt_ids=[7]), make_group(1, [0.0], prompt_ids=[8, 9])], OBJECTIVE)
    assert [row.prompt_ids.tolist() for row in rows] == [[7], [7], [8, 9]]
    assert [row.completion.token_ids.tolist() for row in rows] == [[3], [4], [3]]
    assert [len(row) for row in rows] == [2, 2, 3]


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 50, 64, 200, 10_000])
def test_micro_batches_keep_to_the_token_budget_and_hold_every_row_once(max_tokens: int, share_prompts: bool):
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 20, size=20).tolist()
    rows = [row_of_length(prompts[i % 20] + int(rng.integers(1, 60)), prompts[i % 20], i % 20) for i in range(100)]
    batches = micro_batches(rows, max_tokens, share_prompts)
    for batch in batches:
        assert len(batch) == 1 or computed(batch, share_prompts) <= max_tokens
    assert sorted(id(row) for batch in batches for row in batch) == sorted(id(row) for row in rows)


def test_a_row_beyond_the_budget_is_a_micro_batch_of_its_own():
    short, long = [row_of_length(4) for _ in range(3)], row_of_length(100)
    assert micro_batches([short[0], long, *short[1:]], max_tokens=12, share_prompts=False) == [[long], short]


def test_rows_of_like_length_go_together():
    rows = [row_of_length(length) for length in (3, 10, 3, 10)]
    batches = micro_batches(rows, max_tokens=20, share_prompts=False)
    assert [[len(row) for row in batch] for batch in batches] == [[10, 10], [3, 3]]


def test_rows_of_long_prompts_go_together_by_prompt():
    """Two prompts of 101 tokens, each with an answer of 2 and one of 3: by prompt 100 + 2 * 3 tokens each."""
    rows = [row_of_length(101 + length, 101, position) for length in (2, 3) for position in (0, 1)]
    batches = micro_batches(rows, max_tokens=110, share_prompts=True)
    assert [{row.position for row in batch} for batch in batches] == [{0}, {1}]


def test_rows_of_short_prompts_go_together_by_length():
    """By length 1 + 2 * 10 and 1 + 2 * 100 tokens a micro-batch, by prompt 1 + 2 * 100 twice."""
    rows = [row_of_length(2 + length, 2, position) for length in (10, 100) for position in (0, 1)]
    batches = micro_batches(rows, max_tokens=202, share_prompts=True)
    assert [[len(row) for row in batch] for batch in batches] == [[102, 102], [12, 12]]


def test_a_shared_prompt_stands_once_and_its_last_token_in_every_row():
    rows = [
        make_row([11, 12, 13], [14, 15], [-0.1, -0.2], advantage=0.5, position=3),
        make_row([21, 22], [23, 24, 25, 26], [-0.3, -0.4, -0.5, -0.6], advantage=-0.5, position=4),
        make_row([11, 12, 13], [16], [-0.7], position=3),
    ]
    batch = collate(rows, "cpu", share_prompts=True)
    assert batch.prompts.tolist() == [[11, 12], [21, 0]]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.prompt_of_row.tolist() == [0, 1, 0]
    assert batch.inputs.tolist() == [[13, 14, 0, 0], [22, 23, 24, 25], [13, 0, 0, 0]]
    assert batch.targets.tolist() == [[14, 15, 0, 0], [23, 24, 25, 26], [16, 0, 0, 0]]
    assert batch.mask.sum(-1).tolist() == [2, 4, 1]
    assert (batch.targets != 0).equal(batch.mask)
    assert batch.num_computed_tokens == 2 * 2 + 3 * 4


def test_collate_puts_every_log_prob_at_the_token_it_belongs_to():
    rows = [
        make_row([11, 12, 13], [14, 15], [-0.1, -0.2], advantage=0.5),
        make_row([21, 22], [23, 24, 25, 26], [-0.3, -0.4, -0.5, -0.6], advantage=-0.5),
    ]
    batch = collate(rows, "cpu", share_prompts=False)
    assert batch.prompts.shape == (0, 0)
    assert batch.inputs.tolist() == [[11, 12, 13, 14, 0], [21, 22, 23, 24, 25]]
    assert batch.targets.tolist() == [[12, 13, 14, 15, 0], [22, 23, 24, 25, 26]]
    assert batch.mask.tolist() == [[False, False, True, True, False], [False, True, True, True, True]]
    torch.testing.assert_close(
        batch.sampler_logprobs, tensor([[0.0, 0.0, -0.1, -0.2, 0.0], [0.0, -0.3, -0.4, -0.5, -0.6]])
    )
    assert batch.advantages.tolist() == [0.5, -0.5]
    assert batch.marks.tolist() == [1.0, 1.0]


def test_collate_makes_the_types_that_the_loss_needs():
    batch = collate([make_row([1], [2, 3])], "cpu", share_prompts=True)
    assert batch.inputs.dtype == batch.targets.dtype == batch.prompts.dtype == torch.int64
    assert batch.mask.dtype == torch.bool
    assert batch.sampler_logprobs.dtype == batch.advantages.dtype == batch.marks.dtype == torch.float32


@pytest.mark.parametrize("share_prompts", [False, True])
def test_a_prompt_of_one_token_is_scored_from_its_first_completion_token(share_prompts: bool):
    batch = collate([make_row([1], [2, 3])], "cpu", share_prompts)
    assert batch.inputs.tolist() == [[1, 2]]
    assert batch.mask.tolist() == [[True, True]]
