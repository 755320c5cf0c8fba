"""Batches that the tests of losses share. Shapes: B completions, T tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from oapl.losses import grpo_loss, grpo_plus_loss, oapl_loss, reinforce_loss

COUNTS = {"num_completions": 8, "num_tokens": 29, "max_completion_length": 10}
"""Of an optimizer step, whatever part of it a batch is."""

LossFunction = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


def oapl(**settings: Any) -> LossFunction:
    def loss(*batch: Tensor, num_completions: int, **unused: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        return oapl_loss(*batch, beta2=0.5, num_completions=num_completions, **settings)

    return loss


def reinforce(*batch: Tensor, num_completions: int, **unused: int) -> tuple[Tensor, Mapping[str, Tensor]]:
    return reinforce_loss(*batch, num_completions=num_completions)


def grpo(**settings: Any) -> LossFunction:
    def loss(*batch: Tensor, **counts: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        return grpo_loss(*batch, **settings, **counts)

    return loss


EVERY_LOSS: dict[str, LossFunction] = {
    "oapl": oapl(),
    "oapl rescaled": oapl(rescale=True),
    "oapl per token": oapl(per_token_mean=True),
    **{f"grpo {kind}": grpo(loss_type=kind) for kind in ("grpo", "dr_grpo", "dapo")},
    **{
        f"grpo {kind}": grpo(importance_sampling=kind, importance_sampling_clip_max=1.2)
        for kind in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "grpo_plus": grpo_plus_loss,
    "reinforce": reinforce,
}


def value_and_gradient(
    loss: LossFunction, batch: Mapping[str, Tensor], counts: Mapping[str, int] = COUNTS
) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    """The loss, its gradient by the policy's log-probs, and its metrics."""
    logprobs = batch["logprobs"].clone().requires_grad_()
    value, metrics = loss(logprobs, batch["sampler_logprobs"], batch["mask"], batch["advantages"], **counts)
    value.backward()
    assert logprobs.grad is not None
    return value.detach(), logprobs.grad, metrics


def random_batch(num_completions: int = 8, num_tokens: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths_B = torch.randint(1, num_tokens + 1, (num_completions,), generator=generator)
    return {
        "logprobs": -torch.rand(num_completions, num_tokens, generator=generator, dtype=torch.float64),
        "sampler_logprobs": -torch.rand(num_completions, num_tokens, generator=generator, dtype=torch.float64),
        "mask": torch.arange(num_tokens) < lengths_B[:, None],
        "advantages": torch.randn(num_completions, generator=generator, dtype=torch.float64),
    }


def select(batch: Mapping[str, Tensor], rows: Tensor | slice) -> dict[str, Tensor]:
    return {name: value[rows] for name, value in batch.items()}
