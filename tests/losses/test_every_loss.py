"""What holds for every loss: masks, padding, micro-batches and order change nothing, and wrong shapes are refused.

Shapes: B completions, T tokens.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from loss_examples import COUNTS, EVERY_LOSS, LossFunction, random_batch, select, value_and_gradient

NAN, INF = math.nan, math.inf

every_loss = pytest.mark.parametrize("loss", EVERY_LOSS.values(), ids=EVERY_LOSS)


@every_loss
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("where", ["logprobs", "sampler_logprobs", "both"])
def test_what_is_masked_reaches_neither_loss_nor_gradient_nor_metrics(loss: LossFunction, garbage: float, where: str):
    batch = random_batch()
    value, gradient, metrics = value_and_gradient(loss, batch)
    for name in ("logprobs", "sampler_logprobs"):
        if where in (name, "both"):
            batch[name] = torch.where(batch["mask"], batch[name], garbage)
    dirty_value, dirty_gradient, dirty_metrics = value_and_gradient(loss, batch)
    assert torch.equal(dirty_value, value)
    assert torch.equal(dirty_gradient, gradient)
    assert dirty_metrics == metrics
    assert not gradient[~batch["mask"]].any()


@every_loss
@pytest.mark.parametrize("sizes", [[3, 5], [1, 1, 6], [1] * 8])
def test_losses_gradients_and_metrics_of_micro_batches_add_up_to_the_step_s(loss: LossFunction, sizes: list[int]):
    batch = random_batch()
    value, gradient, metrics = value_and_gradient(loss, batch)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [
        value_and_gradient(loss, select(batch, slice(start, start + size)))
        for start, size in zip(starts, sizes, strict=True)
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), value, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient, rtol=1e-12, atol=0)
    for name, total in metrics.items():
        torch.testing.assert_close(sum(part[2][name] for part in parts), total, rtol=1e-6, atol=1e-9)


@every_loss
def test_padding_does_not_change_loss_gradient_or_metrics(loss: LossFunction):
    batch = random_batch()
    value, gradient, metrics = value_and_gradient(loss, batch)
    pad = torch.nn.functional.pad
    padded = {
        **batch,
        "logprobs": pad(batch["logprobs"], (2, 5), value=NAN),
        "sampler_logprobs": pad(batch["sampler_logprobs"], (2, 5), value=7.0),
        "mask": pad(batch["mask"], (2, 5), value=False),
    }
    padded_value, padded_gradient, padded_metrics = value_and_gradient(loss, padded)
    torch.testing.assert_close(padded_value, value, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(padded_gradient, pad(gradient, (2, 5)), rtol=1e-12, atol=0)
    assert {k: v.item() for k, v in padded_metrics.items()} == pytest.approx({k: v.item() for k, v in metrics.items()})


@every_loss
def test_order_does_not_change_the_loss_or_its_gradient(loss: LossFunction):
    batch, order = random_batch(), torch.tensor([5, 0, 7, 3, 1, 6, 2, 4])
    value, gradient, _ = value_and_gradient(loss, batch)
    shuffled_value, shuffled_gradient, _ = value_and_gradient(loss, select(batch, order))
    torch.testing.assert_close(shuffled_value, value, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(shuffled_gradient, gradient[order], rtol=1e-12, atol=0)


@every_loss
def test_metrics_carry_no_gradient(loss: LossFunction):
    *_, metrics = value_and_gradient(loss, random_batch())
    assert not any(value.requires_grad for value in metrics.values())


POLICY_GRADIENTS = [name for name in EVERY_LOSS if name not in ("oapl", "oapl per token")]


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_at_lag_0_every_policy_gradient_pushes_each_token_by_its_advantage(name: str):
    """Where policy and sampler agree no ratio is anything but 1, so what is left apart is the normalization."""
    batch = random_batch()
    batch["logprobs"] = batch["sampler_logprobs"].clone()
    _, gradient_BT, metrics = value_and_gradient(EVERY_LOSS[name], batch)
    lengths_B1 = batch["mask"].sum(-1, keepdim=True)
    scale_B1 = {
        "oapl rescaled": 1 / 8,
        "reinforce": 1 / 8,
        "grpo grpo": 1 / (8 * lengths_B1),
        "grpo dr_grpo": 1 / (8 * 10),
    }.get(name, 1 / 29)
    expected_BT = torch.where(batch["mask"], -batch["advantages"][:, None] * scale_B1, 0.0)
    torch.testing.assert_close(gradient_BT, expected_BT, rtol=1e-6, atol=1e-9)
    assert metrics.get("clip_share", 0) == 0


# What is refused


@every_loss
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler_logprobs": torch.zeros(8, 4)}, r"one shape \[B, T\], got \[8, 6\], \[8, 4\] and \[8, 6\]"),
        ({"mask": torch.ones(8, 1, dtype=torch.bool)}, r"one shape \[B, T\], got \[8, 6\], \[8, 6\] and \[8, 1\]"),
        ({"logprobs": torch.zeros(6)}, r"one shape \[B, T\], got \[6\], \[8, 6\] and \[8, 6\]"),
        ({"advantages": torch.zeros(8, 1)}, r"advantages need shape \[8\], got \[8, 1\]"),
        ({"advantages": torch.zeros(3)}, r"advantages need shape \[8\], got \[3\]"),
    ],
)
def test_shapes_that_would_broadcast_are_refused(loss: LossFunction, changes: dict[str, Tensor], message: str):
    with pytest.raises(ValueError, match=message):
        value_and_gradient(loss, {**random_batch(), **changes})


@every_loss
def test_a_step_without_completions_is_refused(loss: LossFunction):
    with pytest.raises(ValueError, match="num_completions = 0 must be at least 1"):
        value_and_gradient(loss, random_batch(), {**COUNTS, "num_completions": 0})
