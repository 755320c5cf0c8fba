"""What makes a Hugging Face model decode faster without changing what it computes.

Shapes: B rows, N query heads, H heads of keys and values, R = N / H query heads a key head, L tokens, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oapl.attention import is_plain

GROUPED = "oapl_grouped"


class PackedLinear(torch.nn.Module):
    """A bfloat16 linear layer on a CPU, its weights laid out once for oneDNN and not in each call."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = linear.bias

    def forward(self, states: Tensor) -> Tensor:
        made: Tensor = torch.ops.mkldnn._linear_pointwise(states, self._packed, self._bias, "none", [], "")
        return made


def pack_linears(model: PreTrainedModel) -> None:
    """Puts packed layers in the place of the model's bfloat16 linear layers, where oneDNN computes with that type."""
    if model.dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and module.weight.dtype == torch.bfloat16:
            model.set_submodule(name, PackedLinear(module))


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one token a row, [B, N, 1, D], to the keys and values of its row, [B, H, L, D].

    The R query heads of a key head stand as R queries before it, so that keys and values are read once and never
    repeated in memory. Prompts, with their many tokens, go the usual way, and so does what adds more than a mask.
    """
    if query.shape[2] != 1 or not is_plain(attention_mask, kwargs):
        made: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return made
    num_rows, num_heads, _, head_size = query.shape
    grouped = query.view(num_rows, key.shape[1], num_heads // key.shape[1], head_size)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling")
    )
    return output.reshape(num_rows, 1, num_heads, -1), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
