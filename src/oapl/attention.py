"""Attention for training on a CPU, where the backward pass of the fused kernels is slow in bfloat16.

The chances of all pairs of tokens are kept for the backward pass, in the type of the keys: 2 bytes a pair in bfloat16,
a third of what Transformers' `eager` keeps. Heads that share keys stand beside each other as queries, so keys and
values are never repeated.

Shapes: B rows, N query heads, H heads of keys and values, R = N / H query heads a key head, T queries, L keys, D head
size, of values perhaps another than of keys; S = B * H.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from oapl.fused import fuse, sum_type

KEPT, KEPT_COMPILED = "oapl_kept", "oapl_kept_compiled"
"""Names for a model's `attn_implementation`; the second has torch.compile fuse what is done to each score."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    is_compiled: bool,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What Transformers asks of an attention: of [B, N, T, D] queries, [B, H, L, D] keys and values and an additive
    mask [B, 1, T, L], the [B, T, N, D] output. What adds more than such a mask to the scores goes the usual way."""
    if not is_plain(attention_mask, kwargs):
        usual: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return usual
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    output: Tensor = _Attention.apply(query, key, value, attention_mask, scale, is_compiled)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


def is_plain(mask: Tensor | None, others: Mapping[str, Any]) -> bool:
    """Whether the mask is the same for all heads, nothing learnt, and all that is added to the scores."""
    return others.get("position_bias") is None and (mask is None or (mask.shape[1] == 1 and not mask.requires_grad))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BNTD: Tensor,
        key_BHLD: Tensor,
        value_BHLD: Tensor,
        mask_B1TL: Tensor | None,
        scale: float,
        is_compiled: bool,
    ) -> Tensor:
        key_SLD, value_SLD = key_BHLD.flatten(0, 1), value_BHLD.flatten(0, 1)
        query_SQD = query_BNTD.reshape(len(key_SLD), -1, query_BNTD.shape[-1])  # Q = R * T
        scores_SQL = torch.bmm(query_SQD, key_SLD.transpose(1, 2))
        scores_BNTL = scores_SQL.view(*query_BNTD.shape[:3], -1)
        chances_BNTL = fuse(_chances, is_compiled)(scores_BNTL, mask_B1TL, scale)
        output_SQD = torch.bmm(chances_BNTL.view(scores_SQL.shape), value_SLD)
        ctx.save_for_backward(query_SQD, key_SLD, value_SLD, chances_BNTL, output_SQD)
        ctx.scale, ctx.is_compiled, ctx.shapes = scale, is_compiled, (query_BNTD.shape, key_BHLD.shape)
        return output_SQD.view(*query_BNTD.shape[:3], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_SQD, key_SLD, value_SLD, chances_BNTL, output_SQD = ctx.saved_tensors
        of_queries, of_keys = ctx.shapes
        grad_SQD = grads[0].reshape(output_SQD.shape)
        chances_SQL = chances_BNTL.view(*query_SQD.shape[:2], -1)
        grad_value_SLD = torch.bmm(chances_SQL.transpose(1, 2), grad_SQD)
        grad_chances_SQL = torch.bmm(grad_SQD, value_SLD.transpose(1, 2))
        grad_scores_SQL = fuse(_score_grads, ctx.is_compiled)(
            chances_SQL, grad_chances_SQL, output_SQD, grad_SQD, ctx.scale
        )
        grad_query_SQD = torch.bmm(grad_scores_SQL, key_SLD)
        grad_key_SLD = torch.bmm(grad_scores_SQL.transpose(1, 2), query_SQD)
        return (
            grad_query_SQD.view(of_queries),
            grad_key_SLD.view(of_keys),
            grad_value_SLD.view(*of_keys[:3], -1),
            None,
            None,
            None,
        )


def _chances(scores_BNTL: Tensor, mask_B1TL: Tensor | None, scale: float) -> Tensor:
    exact = scores_BNTL.to(sum_type(scores_BNTL.dtype)) * scale
    if mask_B1TL is not None:
        exact = exact + mask_B1TL
    return exact.softmax(-1).to(scores_BNTL.dtype)


def _score_grads(chances: Tensor, grad_chances: Tensor, output: Tensor, grad_output: Tensor, scale: float) -> Tensor:
    """Of softmax: chance * (its gradient - the mean of gradients by chance), which output and its gradient tell."""
    exact = sum_type(chances.dtype)
    mean = (output.to(exact) * grad_output.to(exact)).sum(-1, keepdim=True)
    return ((grad_chances.to(exact) - mean) * chances.to(exact) * scale).to(chances.dtype)


for name, is_compiled in ((KEPT, False), (KEPT_COMPILED, True)):
    AttentionInterface.register(name, partial(attend, is_compiled=is_compiled))
    AttentionMaskInterface.register(name, eager_mask)
