"""From groups to rows, micro-batches and tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import tensor

from helpers import make_completion, make_group
from oapl.batching import Row, collate, group_rows, micro_batches
from oapl.config import OAPLConfig
from oapl.objective import make_objective

OBJECTIVE = make_objective(OAPLConfig(beta1=1.0))


def make_row(prompt_ids: list[int], token_ids: list[int], logprobs: list[float] | None = None, advantage: float = 0.0):
    return Row(np.array(prompt_ids, np.int32), make_completion(token_ids, logprobs), reward=1.0, advantage=advantage)


def row_of_length(length: int) -> Row:
    return make_row([1], [2] * (length - 1))


def test_an_advantage_is_the_reward_less_the_value_of_its_own_group():
    rows = group_rows([make_group(0, [1.0, 0.0]), make_group(1, [0.5, 0.5])], OBJECTIVE)
    value = math.log((math.e + 1) / 2)  # of the first group; the second's is 0.5, as all its rewards are
    assert [row.advantage for row in rows] == pytest.approx([1 - value, -value, 0.0, 0.0])
    assert [row.reward for row in rows] == [1.0, 0.0, 0.5, 0.5]


def test_rows_keep_each_completion_with_its_own_prompt():
    rows = group_rows([make_group(0, [1.0, 0.0], prompt_ids=[7]), make_group(1, [0.0], prompt_ids=[8, 9])], OBJECTIVE)
    assert [row.prompt_ids.tolist() for row in rows] == [[7], [7], [8, 9]]
    assert [row.completion.token_ids.tolist() for row in rows] == [[3], [4], [3]]
    assert [len(row) for row in rows] == [2, 2, 3]


@pytest.mark.parametrize("max_tokens", [1, 50, 64, 200, 10_000])
def test_micro_batches_keep_to_the_token_budget_and_hold_every_row_once(max_tokens: int):
    lengths = np.random.default_rng(0).integers(2, 60, size=100).tolist()
    rows = [row_of_length(length) for length in lengths]
    batches = micro_batches(rows, max_tokens)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(len(row) for row in batch) <= max_tokens
    assert sorted(id(row) for batch in batches for row in batch) == sorted(id(row) for row in rows)


def test_a_row_beyond_the_budget_is_a_micro_batch_of_its_own():
    short, long = [row_of_length(4) for _ in range(3)], row_of_length(100)
    assert micro_batches([short[0], long, *short[1:]], max_tokens=12) == [[long], short]


def test_rows_of_like_length_go_together():
    rows = [row_of_length(length) for length in (3, 10, 3, 10)]
    assert [[len(row) for row in batch] for batch in micro_batches(rows, max_tokens=20)] == [[10, 10], [3, 3]]


def test_collate_puts_every_log_prob_at_the_token_it_belongs_to():
    rows = [
        make_row([11, 12, 13], [14, 15], [-0.1, -0.2], advantage=0.5),
        make_row([21, 22], [23, 24, 25, 26], [-0.3, -0.4, -0.5, -0.6], advantage=-0.5),
    ]
    batch = collate(rows, "cpu")
    # Score j is of token first + 1 + j. The shorter prompt has 2 tokens, so scores start with token 2: first = 1.
    assert batch.first == 1
    assert batch.ids.tolist() == [[11, 12, 13, 14, 15, 0], [21, 22, 23, 24, 25, 26]]
    scored_tokens = batch.ids[:, batch.first + 1 :]
    assert scored_tokens.tolist() == [[13, 14, 15, 0], [23, 24, 25, 26]]
    assert batch.mask.tolist() == [[False, True, True, False], [True, True, True, True]]
    torch.testing.assert_close(batch.sampler_logprobs, tensor([[0.0, -0.1, -0.2, 0.0], [-0.3, -0.4, -0.5, -0.6]]))
    assert batch.advantages.tolist() == [0.5, -0.5]
    assert batch.rewards.tolist() == [1.0, 1.0]


def test_collate_makes_the_types_that_the_loss_needs():
    batch = collate([make_row([1], [2, 3])], "cpu")
    assert (batch.ids.dtype, batch.mask.dtype) == (torch.int64, torch.bool)
    assert batch.sampler_logprobs.dtype == batch.advantages.dtype == batch.rewards.dtype == torch.float32


def test_a_prompt_of_one_token_is_scored_from_its_first_completion_token():
    batch = collate([make_row([1], [2, 3])], "cpu")
    assert batch.first == 0
    assert batch.mask.tolist() == [[True, True]]
