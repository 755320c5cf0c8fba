"""A Hugging Face causal language model as the trainer uses it: a body that makes hidden states, and a head.

Shapes: B completions of a micro-batch, T of their tokens, R prompts, P of their tokens, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from oapl.batching import Batch
from oapl.errors import ModelError
from oapl.head import Head
from oapl.lora import merged_weights

T = TypeVar("T")

HEAD_TOLERANCE = 1e-3
"""Nats by which log-probs from hidden states may differ from those of the model's own logits, in float32."""


@dataclass(frozen=True)
class CausalLM:
    """Made by `take_apart`."""

    model: PreTrainedModel
    body: torch.nn.Module
    head: Head
    has_plain_cache: bool
    """Whether every layer attends to all tokens before, by keys and values that a cache can hold as they are."""

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of the batch's targets and the entropies they were drawn at, [B, T] in nats; 0 off the mask."""
        cache = attention_mask = position_ids = None
        if batch.prompts.shape[1]:
            cache = self.read_prompts(batch)
            of_row_BP = torch.arange(batch.prompts.shape[1], device=batch.inputs.device)[None]
            lengths_B1 = batch.prompt_lengths[batch.prompt_of_row][:, None]
            attention_mask = torch.cat([of_row_BP < lengths_B1, torch.ones_like(batch.mask)], dim=-1)
            position_ids = lengths_B1 + torch.arange(batch.inputs.shape[1], device=batch.inputs.device)
        hidden_BTH = self.hidden_states(batch.inputs, attention_mask, position_ids, cache)
        return self.of_targets(hidden_BTH, batch.targets, batch.mask, temperature)

    def of_targets(
        self, hidden_BTH: Tensor, targets_BT: Tensor, mask_BT: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """What the head says of the targets after these hidden states, [B, T]; 0 off the mask."""
        logprobs_N, entropy_N = self.head.logprobs(hidden_BTH[mask_BT], targets_BT[mask_BT], temperature)
        zeros_BT = logprobs_N.new_zeros(mask_BT.shape)
        return zeros_BT.masked_scatter(mask_BT, logprobs_N), zeros_BT.masked_scatter(mask_BT, entropy_N)

    def weights(self) -> dict[str, Tensor]:
        """Those of the plain model that computes the same, by name."""
        return merged_weights(self.model)

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a function of the model returns, without gradients."""
        with torch.no_grad():
            return function(*arguments)

    def read_prompts(self, batch: Batch) -> DynamicCache:
        """Keys and values of each prompt, computed once and given to every row that goes on from it."""
        cache = DynamicCache(config=self.model.config)
        self.hidden_states(batch.prompts, None, None, cache)
        cache.batch_select_indices(batch.prompt_of_row)
        return cache

    def hidden_states(
        self, ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: DynamicCache | None
    ) -> Tensor:
        """Of the last layer, for each of `ids`, which follow what the cache holds. Right padding needs no mask."""
        output = self.body(
            input_ids=ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


def take_apart(model: PreTrainedModel, compile_head: bool = False) -> CausalLM:
    """Of a model in float32 or better. Raises ModelError where its logits are not what its head makes of the body's
    hidden states."""
    config = model.config.get_text_config(decoder=True)
    output = model.get_output_embeddings()
    if output is None:
        raise ModelError(f"{model.config._name_or_path}: {type(model).__name__} has no output embeddings to train.")
    head = Head(
        output.weight,
        getattr(output, "bias", None),
        scale=logit_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
        compiled=compile_head,
    )
    lm = CausalLM(model, model.get_decoder(), head, has_plain_cache(model))
    check_head(lm)
    return lm


def has_plain_cache(model: PreTrainedModel) -> bool:
    """See `CausalLM.has_plain_cache`."""
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def logit_scale(config: Any) -> float:
    """What a few architectures multiply their logits by: Cohere's `logit_scale`, 1 / Granite's `logits_scaling`."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


@torch.no_grad()
def check_head(lm: CausalLM) -> None:
    ids = torch.arange(8, device=lm.head.weight.device)[None] % len(lm.head.weight)
    logits = lm.model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    expected = logits.log_softmax(-1)[0].gather(-1, ids[0, 1:, None]).squeeze(-1)
    hidden = lm.hidden_states(ids[:, :-1], None, None, None)
    head = replace(lm.head, compiled=False)
    gap = (head.logprobs(hidden[0], ids[0, 1:], 1.0)[0] - expected).abs().max().item()
    if not gap <= HEAD_TOLERANCE:
        raise ModelError(
            f"{lm.model.config._name_or_path}: {type(lm.model).__name__} changes its logits in a way that is not known "
            f"here: log-probs differ by {gap:.3g} nats. Such a model cannot be trained yet; please report it."
        )
