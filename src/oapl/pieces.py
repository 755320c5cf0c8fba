"""The exact gradient of a row too long for one backward pass: piece by piece, in memory that one piece needs.

Two passes. The first, without gradients, goes through the pieces in order, keeps every layer's keys and values, and
gives the row's log-probs; by them the loss says how much each log-prob weighs. The second goes backwards: each
piece is computed anew on the kept keys and values of those before it, and its backward pass gives the gradient of
the weights and of those keys and values, which the pieces before take over. What is added to one plain backward pass
is a second forward pass, and two sets of keys and values.

Shapes: T tokens of the row, K of a piece, N scored tokens; keys and values are [1, heads, tokens, head size].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache

from oapl.batching import Batch
from oapl.causal_lm import CausalLM

Loss = Callable[[Tensor], Tensor]
"""f32[1, T] log-probs to the loss."""


def backward_in_pieces(
    lm: CausalLM, batch: Batch, temperature: float, piece_tokens: int, loss: Loss
) -> tuple[Tensor, Tensor]:
    """Adds the gradient of the loss to the weights'; returns log-probs and entropies, [1, T], as `CausalLM.logprobs`.

    The batch holds one row, its prompt in its `inputs`. The model needs a plain cache.
    """
    logprobs, entropy, cache = logprobs_in_pieces(lm, batch, temperature, piece_tokens)
    leaf = logprobs.requires_grad_()
    (weight,) = torch.autograd.grad(loss(leaf), leaf)
    states = [state for layer in cache.layers for state in (layer.keys, layer.values)]
    grads = [torch.zeros_like(state) for state in states]
    for piece in reversed(pieces_of(batch, piece_tokens)):
        past = [state[:, :, : piece.start].detach().requires_grad_() for state in states]
        cache = cache_of(lm, past) if piece.start else DynamicCache(config=lm.model.config)
        of_piece, _ = lm_piece(lm, batch, piece, cache, temperature)
        made = [state[:, :, piece] for layer in cache.layers for state in (layer.keys, layer.values)]
        parts = list(zip(made, (grad[:, :, piece] for grad in grads), strict=True))
        if batch.mask[:, piece].any():
            parts.append((of_piece, weight[:, piece]))
        parts = [(output, grad) for output, grad in parts if output.requires_grad]  # not all do beside frozen weights
        torch.autograd.backward([output for output, _ in parts], [grad for _, grad in parts])
        for grad, state in zip(grads, past, strict=True):
            if state.grad is not None:
                grad[:, :, : piece.start] += state.grad
    return logprobs.detach(), entropy


@torch.no_grad()
def logprobs_in_pieces(
    lm: CausalLM, batch: Batch, temperature: float, piece_tokens: int
) -> tuple[Tensor, Tensor, DynamicCache]:
    """Log-probs and entropies of the row, [1, T], without gradients, and the keys and values that were made."""
    cache = DynamicCache(config=lm.model.config)
    parts = [lm_piece(lm, batch, piece, cache, temperature) for piece in pieces_of(batch, piece_tokens)]
    logprobs, entropy = (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
    return logprobs, entropy, cache


def pieces_of(batch: Batch, piece_tokens: int) -> list[slice]:
    num_tokens = batch.inputs.shape[1]
    return [slice(start, min(start + piece_tokens, num_tokens)) for start in range(0, num_tokens, piece_tokens)]


def lm_piece(
    lm: CausalLM, batch: Batch, piece: slice, cache: DynamicCache, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a piece, f32[1, K], given the cache of those before it, which grows by the piece."""
    mask = batch.mask[:, piece]
    positions = torch.arange(piece.start, piece.stop, device=mask.device)[None]
    hidden_1KH = lm.hidden_states(batch.inputs[:, piece], None, positions, cache)
    return lm.of_targets(hidden_1KH, batch.targets[:, piece], mask, temperature)


def cache_of(lm: CausalLM, states: list[Tensor]) -> DynamicCache:
    """A cache that begins with these keys and values, layer by layer, as leaves that gather gradients."""
    cache = DynamicCache(config=lm.model.config)
    for layer, keys, values in zip(cache.layers, states[::2], states[1::2], strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return cache
