"""bfloat16 computation over float32 weights: what is trained moves by steps too small for bfloat16 to hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from oapl.lora import trained_parameters

PIECE = 2**20
"""Numbers that are converted at once: what is made on the way then stays in the cache, and its memory is used again."""


def compute_in_bfloat16(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Rounds the model to bfloat16; returns float32 weights for what is trained, which gather its gradients.

    Each backward pass adds its gradient, in bfloat16, to the float32 ones.
    """
    masters = {name: torch.nn.Parameter(parameter.detach()) for name, parameter in trained_parameters(model).items()}
    round_to_bfloat16(model.parameters())
    for name, parameter in trained_parameters(model).items():
        parameter.register_post_accumulate_grad_hook(_Gather(masters[name]))  # type: ignore[no-untyped-call]
    return masters


def round_to_bfloat16(parameters: Iterable[torch.nn.Parameter]) -> None:
    """In place. A model's buffers, such as those of rotary embeddings, keep their type."""
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.bfloat16)


class _Gather:
    """Adds a gradient to that of a float32 weight, and frees it."""

    def __init__(self, master: torch.nn.Parameter) -> None:
        self._master = master

    def __call__(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        assert self._master.grad is not None, "Trainer.zero_gradients makes them"
        total, part = self._master.grad.view(-1), parameter.grad.reshape(-1)
        for start in range(0, len(total), PIECE):
            total[start : start + PIECE] += part[start : start + PIECE]
        parameter.grad = None
