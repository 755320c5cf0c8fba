"""The output head: log-probs and entropies of given tokens, without the logits of all of them at once.

Shapes: N tokens, H hidden size, V vocabulary, C of its tokens in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oapl.fused import fuse, sum_type

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
    compiled: bool = False
    """Whether torch.compile fuses what is done to each chunk of logits."""

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
        largest_N = torch.full((len(hidden_NH),), -torch.inf, dtype=sum_type(hidden_NH.dtype), device=hidden_NH.device)
        total_N, weighted_N, target_N = (torch.zeros_like(largest_N) for _ in range(3))
        settings = (head.scale, head.softcap, temperature)
        sums = fuse(_sums, head.compiled)
        for tokens in _chunks(len(hidden_NH), len(weight_VH)):
            products_NC, bias_C = hidden_NH @ weight_VH[tokens].T, None if bias_V is None else bias_V[tokens]
            rows, places = _inside(targets_N, tokens)
            bias = None if bias_C is None else bias_C[places]
            target_N[rows] = _logits(products_NC[rows, places], bias, *settings)[0]
            most_N, more_N, more_weighted_N = sums(products_NC, bias_C, *settings)
            before_N, largest_N = largest_N, torch.maximum(largest_N, most_N)
            shrink_N, shrink_more_N = (before_N - largest_N).exp_(), (most_N - largest_N).exp_()
            total_N = total_N * shrink_N + more_N * shrink_more_N
            weighted_N = weighted_N * shrink_N + more_weighted_N * shrink_more_N
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
        settings = (ctx.head.scale, ctx.head.softcap, ctx.temperature)
        slopes = fuse(_slopes, ctx.head.compiled)
        for tokens in _chunks(len(hidden_NH), len(weight_VH)):
            products_NC, bias_C = hidden_NH @ weight_VH[tokens].T, None if bias_V is None else bias_V[tokens]
            rows, places = _inside(targets_N, tokens)
            logits, slope = _logits(products_NC[rows, places], None if bias_C is None else bias_C[places], *settings)
            of_targets = -torch.expm1(logits - logsumexp_N[rows]) * grad_N[rows] * slope
            grad = slopes(products_NC, bias_C, logsumexp_N, grad_N, *settings)
            grad[rows, places] = of_targets.to(grad.dtype)
            if grad_bias is not None:
                grad_bias[tokens] = grad.sum(0)
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


def _logits(
    products: Tensor, bias: Tensor | None, scale: float, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor | float]:
    """Of products of hidden states and weights, over temperature; and their slope by the products."""
    logits = products.to(sum_type(products.dtype))
    if bias is not None:
        logits = logits + bias
    if softcap is None:
        return logits * (scale / temperature), scale / temperature
    capped = (logits * (scale / softcap)).tanh()
    return capped * (softcap / temperature), (1 - capped.square()) * (scale / temperature)


def _sums(
    products_NC: Tensor, bias_C: Tensor | None, scale: float, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row the largest logit, and the sums of exp(logit - largest) and of this times the logit."""
    logits_NC, _ = _logits(products_NC, bias_C, scale, softcap, temperature)
    largest_N = logits_NC.amax(-1)
    exps_NC = (logits_NC - largest_N[:, None]).exp_()
    return largest_N, exps_NC.sum(-1), exps_NC.mul_(logits_NC).sum(-1)


def _slopes(
    products_NC: Tensor,
    bias_C: Tensor | None,
    logsumexp_N: Tensor,
    grad_N: Tensor,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> Tensor:
    """The gradient of the products of tokens that are not the target."""
    logits_NC, slope_NC = _logits(products_NC, bias_C, scale, softcap, temperature)
    chances_NC = logits_NC.sub_(logsumexp_N[:, None]).exp_()
    return chances_NC.mul_(-grad_N[:, None]).mul_(slope_NC).to(products_NC.dtype)


def chunk_logits(num_tokens: int, vocabulary: int) -> int:
    """How many logits exist at once."""
    return num_tokens * min(vocabulary, _chunk_size(num_tokens))


def _chunk_size(num_tokens: int) -> int:
    return max(LEAST_CHUNK, CHUNK_LOGITS // max(1, num_tokens))


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    size = _chunk_size(num_tokens)
    return [slice(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size)]


def _inside(targets_N: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
    """Which rows have their target in a chunk, and where in it."""
    rows = ((targets_N >= tokens.start) & (targets_N < tokens.stop)).nonzero().squeeze(-1)
    return rows, targets_N[rows] - tokens.start
