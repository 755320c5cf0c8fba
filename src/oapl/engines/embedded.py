"""The embedded engine: plain PyTorch over a Hugging Face causal language model, in the sampler's process.

Shapes: R requests, B rows decoded at once (one row a completion), P prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from oapl.config import EngineConfig
from oapl.engines.base import Engine
from oapl.errors import EngineError
from oapl.model import context_length, eos_token_ids, load_model, score
from oapl.types import Completion, Request, SamplingParams

COMPACT_BELOW = 0.75
"""Finished rows are dropped from the cache once fewer than this share of its rows still decode."""

Row = tuple[int, int]
"""Which request, and which of its completions."""


class EmbeddedEngine(Engine):
    """Decodes `max_num_seqs` rows at once over a KV cache; each prompt is prefilled once for its completions."""

    _model: PreTrainedModel

    def __init__(self, config: EngineConfig, attn_implementation: str | None = None) -> None:
        self._config, self._attn_implementation = config, attn_implementation

    def load(self, policy: Path) -> None:
        self._model = load_model(str(policy), self._config.dtype, self._config.device, self._attn_implementation)
        self._eos = torch.tensor(eos_token_ids(self._model), device=self._config.device)

    @property
    def context_length(self) -> int:
        return context_length(self._model)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        return score(self._model, sequences, temperature)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        completions: list[list[Completion]] = [[] for _ in requests]
        for rows in waves(len(requests), params.num_generations, self._config.max_num_seqs):
            for (request, _), completion in zip(rows, self._decode(requests, rows, params), strict=True):
                completions[request].append(completion)
        return completions

    @torch.inference_mode()
    def _decode(self, requests: Sequence[Request], rows: Sequence[Row], params: SamplingParams) -> list[Completion]:
        uniforms = torch.from_numpy(uniform_streams(requests, rows, params.max_completion_length))
        logits_BV, cache, mask_BP = self._prefill(requests, rows)
        tokens = torch.zeros(len(rows), params.max_completion_length, dtype=torch.int32)
        logprobs = torch.zeros(len(rows), params.max_completion_length)
        lengths = torch.full((len(rows),), params.max_completion_length)
        stopped = torch.zeros(len(rows), dtype=torch.bool)

        row_B = torch.arange(len(rows))  # which completion each row of the cache decodes
        position_B = mask_BP.sum(-1)
        for t in range(params.max_completion_length):
            token_B, logprob_B = draw(logits_BV, uniforms[row_B, t].to(logits_BV.device), params.temperature)
            going = ~stopped[row_B]
            tokens[row_B[going], t] = token_B.cpu()[going].int()
            logprobs[row_B[going], t] = logprob_B.cpu()[going]
            ended = going & torch.isin(token_B, self._eos).cpu()
            lengths[row_B[ended]] = t + 1
            stopped[row_B[ended]] = True
            going &= ~ended
            if not going.any() or t + 1 == params.max_completion_length:
                break
            if going.float().mean() < COMPACT_BELOW:
                keep = going.nonzero().squeeze(-1)
                row_B, on_device = row_B[keep], keep.to(token_B.device)
                cache.batch_select_indices(on_device)
                token_B, mask_BP, position_B = token_B[on_device], mask_BP[on_device], position_B[on_device]
            mask_BP = torch.cat([mask_BP, mask_BP.new_ones(len(row_B), 1)], dim=-1)
            logits_BV = self._forward(token_B[:, None], mask_BP, position_B[:, None], cache)
            position_B = position_B + 1
        if not torch.isfinite(logprobs).all():
            raise EngineError(
                "the policy gives log-probs that are not finite, so its weights are broken or overflow in "
                f"engine.dtype = {self._config.dtype!r}. Try engine.dtype = 'float32', or an earlier policy."
            )
        return [
            Completion(
                tokens[row, :length].numpy().copy(),
                logprobs[row, :length].numpy().copy(),
                "stop" if stopped[row] else "length",
            )
            for row, length in enumerate(lengths.tolist())
        ]

    def _prefill(self, requests: Sequence[Request], rows: Sequence[Row]) -> tuple[Tensor, DynamicCache, Tensor]:
        """Next-token logits, cache and attention mask of each row, every prompt computed once. Padding is left."""
        used = sorted({request for request, _ in rows})
        width = max(len(requests[request].prompt_ids) for request in used)
        ids_RP = np.zeros((len(used), width), np.int64)
        mask_RP = np.zeros((len(used), width), np.int64)
        for r, request in enumerate(used):
            prompt_ids = requests[request].prompt_ids
            ids_RP[r, width - len(prompt_ids) :] = prompt_ids
            mask_RP[r, width - len(prompt_ids) :] = 1
        device = self._config.device
        ids, mask = torch.from_numpy(ids_RP).to(device), torch.from_numpy(mask_RP).to(device)
        cache = DynamicCache(config=self._model.config)
        logits_RV = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        of_row = torch.tensor([used.index(request) for request, _ in rows], device=device)
        cache.batch_select_indices(of_row)
        return logits_RV[of_row], cache, mask[of_row]

    def _forward(self, ids: Tensor, mask: Tensor, position_ids: Tensor, cache: DynamicCache) -> Tensor:
        """Logits after the last of `ids`, in float32."""
        output = self._model(
            input_ids=ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, logits_to_keep=1
        )
        logits_BV: Tensor = output.logits[:, -1].float()
        return logits_BV


def waves(num_requests: int, num_generations: int, max_num_seqs: int) -> Iterator[list[Row]]:
    """All rows in order, at most `max_num_seqs` at once; a request's rows stay together where they fit."""
    rows = [(request, index) for request in range(num_requests) for index in range(num_generations)]
    size = max_num_seqs // num_generations * num_generations or max_num_seqs
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def uniform_streams(requests: Sequence[Request], rows: Sequence[Row], length: int) -> np.ndarray:
    """f64[B, length] in [0, 1): row b's numbers depend on its request's seed and its own index, nothing else."""
    return np.stack(
        [
            np.random.Generator(np.random.Philox(key=np.array([requests[request].seed, index], np.uint64))).random(
                length
            )
            for request, index in rows
        ]
    )


def draw(logits_BV: Tensor, uniform_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """A token a row, by inverting the cumulative distribution at the row's uniform number, and its log-prob."""
    logprobs_BV = (logits_BV / temperature).log_softmax(-1)
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    threshold_B1 = (uniform_B * cumulative_BV[:, -1])[:, None]
    token_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(-1).clamp(max=logits_BV.shape[-1] - 1)
    return token_B, logprobs_BV.gather(-1, token_B[:, None]).squeeze(-1)
