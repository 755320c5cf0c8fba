"""The sampler's log-probs as the trainer computes them: by a frozen copy of the policy that sampled a round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oapl.batching import Batch, Row, collate, micro_batches
from oapl.causal_lm import CausalLM, take_apart
from oapl.config import Recipe
from oapl.errors import ModelError
from oapl.model import compile_parts, load_model
from oapl.pieces import logprobs_in_pieces
from oapl.precision import round_to_bfloat16
from oapl.sharding import ALONE, Ranks, shard
from oapl.types import PolicyRef


class Anchor:
    """Holds one policy at a time, in the type and with the kernels that the trainer computes with.

    So at lag 0, without LoRA, its log-probs are the trainer's own to the last bit.
    """

    def __init__(self, recipe: Recipe, ranks: Ranks) -> None:
        self._ranks = ranks
        self._attn_implementation, self._config = recipe.model.attn_implementation, recipe.trainer
        self._temperature = recipe.sampling.temperature
        self._policy: PolicyRef | None = None
        self._lm: CausalLM | None = None

    def holds(self, policy: PolicyRef) -> bool:
        return policy == self._policy

    def load(self, policy: PolicyRef, path: Path, like: CausalLM | None = None) -> None:
        """Takes a policy's weights in the place of those before. Raises ModelError where its attention is of another
        kind than that of the trainer's model, whose batches it is to read, if it is."""
        self._policy = self._lm = None  # never two policies at once
        with self._ranks.turn():
            self._lm = self._load(path, like)
        self._policy = policy

    def _load(self, path: Path, like: CausalLM | None) -> CausalLM:
        device = self._config.device if self._ranks is ALONE else "cpu"
        model = load_model(str(path), "float32", device, self._attn_implementation)
        lm = take_apart(model, compile_head=self._config.torch_compile)
        if like is not None and lm.has_plain_cache != like.has_plain_cache:
            raise ModelError(
                f"loss.anchor = 'trainer': {path} is a {type(model).__name__}, which attends otherwise than the "
                f"{type(like.model).__name__} that is trained. Use loss.anchor = 'engine'."
            )
        if self._config.bf16:
            round_to_bfloat16(model.parameters())
        if self._config.torch_compile:
            compile_parts(model)
        return shard(lm, self._ranks, bf16=self._config.bf16)

    @torch.no_grad()
    def logprobs(self, batch: Batch, attn_implementation: str, piece_tokens: int | None) -> Tensor:
        """Of the batch's targets, f32[B, T] in nats, 0 off the mask; in pieces of so many tokens, if that is given."""
        assert self._lm is not None, "no policy is loaded"
        if self._lm.model.config._attn_implementation != attn_implementation:
            self._lm.model.set_attn_implementation(attn_implementation)
        if piece_tokens is None:
            return self._lm.logprobs(batch, self._temperature)[0]
        return logprobs_in_pieces(self._lm, batch, self._temperature, piece_tokens)[0]

    def score(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """The log-probs of each row's completion, f32[T] in nats, in micro-batches like the trainer's."""
        assert self._lm is not None, "no policy is loaded"
        shares, max_tokens = self._lm.has_plain_cache, self._config.max_tokens_per_microbatch
        attn_implementation = self._lm.model.config._attn_implementation
        found: dict[int, NDArray[np.float32]] = {}
        for micro in micro_batches(rows, max_tokens, shares):
            is_long = shares and len(micro) == 1 and len(micro[0]) > max_tokens
            batch = collate(micro, self._config.device, share_prompts=shares and not is_long)
            logprobs_BT = self.logprobs(batch, attn_implementation, max_tokens if is_long else None).cpu()
            for row, of_row, mask in zip(micro, logprobs_BT, batch.mask.cpu(), strict=True):
                found[id(row)] = of_row[mask].numpy()
        return [found[id(row)] for row in rows]
