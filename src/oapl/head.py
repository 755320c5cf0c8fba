"""The output head: log-probs and entropies of given tokens, without the logits of all of them at once.

Shapes: N tokens, H hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 2**23
"""Logits held at once, a few times over: 32 MiB each time in float32, whatever the vocabulary and the length."""


@dataclass(frozen=True)
class Head:
    """How a model makes logits of its last hidden state: `softcap * tanh(scale * (h W^T + b) / softcap)`."""

    weight: Tensor
    """[V, H]; may be tied to the input embeddings."""
    bias: Tensor | None = None
    """[V]"""
    scale: float = 1.0
    softcap: float | None = None

    def logprobs(self, hidden_NH: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets at this temperature, [N] in nats, and the entropies they were drawn at.

        Logits exist in chunks of `CHUNK_LOGITS`, here and again in the backward pass, which makes them anew. No
        gradient goes through the entropies. Products are of the hidden states' type, sums in float32 or better.
        """
        logprobs_N, entropy_N = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_NH, self.weight, self.bias, targets_N, self, temperature
        )
        return logprobs_N, entropy_N


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        head: Head,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = torch.empty(len(hidden_NH), dtype=_sum_type(hidden_NH.dtype), device=hidden_NH.device)
        entropy_N, logsumexp_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for rows in _chunks(len(hidden_NH), len(weight_VH)):
            logits_CV, _ = _scaled_logits(hidden_NH[rows], weight_VH, bias_V, head, temperature)
            logprobs_CV = logits_CV.log_softmax(-1)
            logprobs_N[rows] = logprobs_CV.gather(-1, targets_N[rows, None]).squeeze(-1)
            logsumexp_N[rows] = logits_CV.gather(-1, targets_N[rows, None]).squeeze(-1) - logprobs_N[rows]
            entropy_N[rows] = -logits_CV.copy_(logprobs_CV).exp_().mul_(logprobs_CV).sum(-1)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, logsumexp_N)
        ctx.head, ctx.temperature = head, temperature
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_N = grads[0]
        hidden_NH, weight_VH, bias_V, targets_N, logsumexp_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_NH) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=grad_N.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=grad_N.dtype) if needs_bias else None
        for rows in _chunks(len(hidden_NH), len(weight_VH)):
            hidden_CH = hidden_NH[rows]
            logits_CV, slope_CV = _scaled_logits(hidden_CH, weight_VH, bias_V, ctx.head, ctx.temperature)
            grad_CV = (logits_CV - logsumexp_N[rows, None]).exp_().mul_(-grad_N[rows, None])
            grad_CV.scatter_add_(-1, targets_N[rows, None], grad_N[rows, None])
            grad_CV.mul_(slope_CV)
            if grad_bias is not None:
                grad_bias += grad_CV.sum(0)
            grad = grad_CV.to(hidden_NH.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight_VH
            if grad_weight is not None:
                grad_weight += grad.T @ hidden_CH
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _scaled_logits(
    hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, head: Head, temperature: float
) -> tuple[Tensor, Tensor | float]:
    """Logits over temperature, and their slope by the product of hidden state and weight."""
    logits_CV = (hidden_CH @ weight_VH.T).to(_sum_type(hidden_CH.dtype))
    if bias_V is not None:
        logits_CV += bias_V
    slope: Tensor | float = head.scale / temperature
    if head.softcap is None:
        return logits_CV.mul_(slope), slope
    capped_CV = logits_CV.mul_(head.scale / head.softcap).tanh_()
    slope = (1 - capped_CV.square()) * slope
    return capped_CV.mul_(head.softcap / temperature), slope


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocabulary)
    return [slice(start, start + size) for start in range(0, num_tokens, size)]
