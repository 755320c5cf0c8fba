"""Keys and values of the rows that are decoded together: preallocated, each row with a place and a length of its own.

Shapes: S slots, B of them in use (the first B), H heads of keys and values, L tokens, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

WIDTH_STEP = 32
"""Attention reads keys in whole multiples of so many tokens, so that few shapes occur."""


class Slots:
    """The memory of `num_slots` rows of at most `length` tokens, in every layer."""

    def __init__(self, like: DynamicCache, num_slots: int, length: int) -> None:
        """Layers, heads and types are those of a cache that a forward pass has filled."""
        self.num_slots, self.length = num_slots, length
        self._layers = [SlotLayer(self, layer.keys, layer.values) for layer in like.layers]
        self.cache = Cache(layers=list(self._layers))
        self.positions = torch.zeros(0, dtype=torch.long)
        """i64[B]: where each row in use puts its next token."""
        self.width = 0
        """Tokens that attention reads of every row."""

    def use(self, positions: Tensor) -> None:
        """Says, before a forward pass of one token a row, where those tokens go."""
        self.positions = positions
        longest = int(positions.max()) + 1
        self.width = min(-(-longest // WIDTH_STEP) * WIDTH_STEP, self.length)

    def mask(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """[B, 1, 1, L], 0 at the keys that each row's token attends to, all or the last `window`, else the least."""
        places = torch.arange(self.width, device=self.positions.device)
        ends = self.positions[:, None]
        seen = places <= ends
        if window is not None:
            seen &= places > ends - window
        least = torch.finfo(dtype).min
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, least)[:, None, None]

    def put(self, slot: int, prompt: DynamicCache, index: int, num_tokens: int) -> None:
        """Copies the first tokens of one row of a filled cache into a slot."""
        for own, given in zip(self._layers, prompt.layers, strict=True):
            own.keys[slot, :, :num_tokens] = given.keys[index, :, :num_tokens]
            own.values[slot, :, :num_tokens] = given.values[index, :, :num_tokens]

    def move(self, source: int, target: int, num_tokens: int) -> None:
        for layer in self._layers:
            layer.keys[target, :, :num_tokens] = layer.keys[source, :, :num_tokens]
            layer.values[target, :, :num_tokens] = layer.values[source, :, :num_tokens]


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, [S, H, L, D]."""

    keys: Tensor
    values: Tensor

    def __init__(self, slots: Slots, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._slots = slots
        shapes = ((slots.num_slots, like.shape[1], slots.length, like.shape[3]) for like in (keys, values))
        self.keys, self.values = (keys.new_zeros(shape) for shape in shapes)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Adds one token to each row in use; returns what attention is to read."""
        num_rows, width = len(key_states), self._slots.width
        rows = torch.arange(num_rows, device=key_states.device)
        self.keys[rows, :, self._slots.positions] = key_states[:, :, 0]
        self.values[rows, :, self._slots.positions] = value_states[:, :, 0]
        return self.keys[:num_rows, :, :width], self.values[:num_rows, :, :width]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def get_seq_length(self) -> int:
        return self._slots.width - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slots.width, 0

    def get_max_length(self) -> int:
        return self._slots.length


def bytes_per_token(cache: DynamicCache) -> int:
    """Of keys and values, in all layers together."""
    states = [state for layer in cache.layers for state in (layer.keys, layer.values)]
    return sum(state.shape[1] * state.shape[3] * state.element_size() for state in states)
