"""The output head: log-probs and entropies of given tokens, without the logits of all of them at once.

Shapes: N tokens, H hidden size, V vocabulary, C of its tokens in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 2**23
"""Logits held at once, a few times over: 32 MiB each time in float32, whatever the vocabulary and the length."""
LEAST_CHUNK = 256
"""Tokens of the vocabulary that are computed together at least."""


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

        Logits exist in chunks of the vocabulary, here and again in the backward pass, which makes them anew: so each
        chunk's gradient of the weights is whole, and nothing of the vocabulary's size is added up. No gradient goes
        through the entropies. Products are of the hidden states' type, sums in float32 or better.
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
        largest_N = torch.full((len(hidden_NH),), -torch.inf, dtype=_sum_type(hidden_NH.dtype), device=hidden_NH.device)
        total_N, weighted_N, target_N = (torch.zeros_like(largest_N) for _ in range(3))
        for tokens in _chunks(len(hidden_NH), len(weight_VH)):
            logits_NC, _ = _scaled_logits(hidden_NH, weight_VH, bias_V, tokens, head, temperature)
            rows, places = _inside(targets_N, tokens)
            target_N[rows] = logits_NC[rows, places]
            before_N, largest_N = largest_N, torch.maximum(largest_N, logits_NC.amax(-1))
            shrink_N = (before_N - largest_N).exp_()
            exps_NC = (logits_NC - largest_N[:, None]).exp_()
            total_N = total_N * shrink_N + exps_NC.sum(-1)
            weighted_N = weighted_N * shrink_N + exps_NC.mul_(logits_NC).sum(-1)
        logsumexp_N = largest_N + total_N.log()
        entropy_N = logsumexp_N - weighted_N / total_N
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, logsumexp_N)
        ctx.head, ctx.temperature = head, temperature
        ctx.mark_non_differentiable(entropy_N)
        return target_N - logsumexp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_N = grads[0]
        hidden_NH, weight_VH, bias_V, targets_N, logsumexp_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden_NH, dtype=grad_N.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight_VH) if needs_weight else None
        grad_bias = torch.empty_like(bias_V) if needs_bias else None
        for tokens in _chunks(len(hidden_NH), len(weight_VH)):
            logits_NC, slope_NC = _scaled_logits(hidden_NH, weight_VH, bias_V, tokens, ctx.head, ctx.temperature)
            grad_NC = logits_NC.sub_(logsumexp_N[:, None]).exp_().mul_(-grad_N[:, None])
            rows, places = _inside(targets_N, tokens)
            grad_NC[rows, places] += grad_N[rows]
            grad_NC.mul_(slope_NC)
            if grad_bias is not None:
                grad_bias[tokens] = grad_NC.sum(0)
            grad = grad_NC.to(hidden_NH.dtype)
            if grad_hidden is not None:
                grad_hidden += grad @ weight_VH[tokens]
            if grad_weight is not None:
                torch.mm(grad.T, hidden_NH, out=grad_weight[tokens])
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype),
            grad_weight,
            grad_bias,
            None,
            None,
            None,
        )


def _scaled_logits(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, tokens: slice, head: Head, temperature: float
) -> tuple[Tensor, Tensor | float]:
    """Logits of some tokens over temperature, and their slope by the product of hidden state and weight."""
    logits_NC = (hidden_NH @ weight_VH[tokens].T).to(_sum_type(hidden_NH.dtype))
    if bias_V is not None:
        logits_NC += bias_V[tokens]
    slope: Tensor | float = head.scale / temperature
    if head.softcap is None:
        return logits_NC.mul_(slope), slope
    capped_NC = logits_NC.mul_(head.scale / head.softcap).tanh_()
    slope = (1 - capped_NC.square()) * slope
    return capped_NC.mul_(head.softcap / temperature), slope


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    size = max(LEAST_CHUNK, CHUNK_LOGITS // max(1, num_tokens))
    return [slice(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size)]


def _inside(targets_N: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
    """Which rows have their target in a chunk, and where in it."""
    rows = ((targets_N >= tokens.start) & (targets_N < tokens.stop)).nonzero().squeeze(-1)
    return rows, targets_N[rows] - tokens.start
