"""The embedded engine: plain PyTorch over a Hugging Face causal language model, in the sampler's process.

Shapes: B rows decoded at once (one row a completion), V vocabulary, C of its tokens in a block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from oapl.config import EngineConfig
from oapl.engines.base import Engine
from oapl.engines.fast import GROUPED, pack_linears
from oapl.engines.slots import Slots, bytes_per_token
from oapl.errors import EngineError
from oapl.model import context_length, eos_token_ids, load_model, load_tokenizer, score
from oapl.types import Completion, FinishReason, Request, SamplingParams

PREFILL_TOKENS = 4096
"""Tokens of prompts computed at once, padding included."""

BLOCK = 256
"""Tokens of the vocabulary whose chances are added up first when one is drawn."""

FEW = 256
"""Likeliest tokens that are sorted first to find those that top_p leaves."""

CACHED_LOGITS = 2**18
"""Logits that a CPU draws from at once: 1 MiB in float32."""


class EmbeddedEngine(Engine):
    """Decodes up to `max_num_seqs` rows at once; a finished row's place goes to the next at once.

    Each prompt is computed once for all its completions. Keys and values are kept in one preallocated block.
    """

    _model: PreTrainedModel

    def __init__(self, config: EngineConfig, attn_implementation: str | None = None) -> None:
        self._config, self._attn_implementation = config, attn_implementation
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def load(self, policy: Path) -> None:
        self.close()  # never two policies at once
        known = self._attn_implementation if self._attn_implementation in ("eager", "sdpa") else None
        self._model = load_model(str(policy), self._config.dtype, self._config.device, known)
        self._eos = torch.tensor(eos_token_ids(policy))
        self._policy, self._tokenizer = policy, None
        self._windows = attention_windows(self._model)
        if self._model.config._attn_implementation == "sdpa":
            self._model.set_attn_implementation(GROUPED)
        if self._config.device == "cpu":
            pack_linears(self._model)

    def close(self) -> None:
        self.__dict__.pop("_model", None)

    @property
    def context_length(self) -> int:
        return context_length(self._model)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return score(self._model, sequences)

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        stops = None
        if params.stop:
            self._tokenizer = self._tokenizer or load_tokenizer(str(self._policy))
            stops = StopTexts(self._tokenizer, params.stop)
        rows = [Row(request, index, params, stops) for request in requests for index in range(params.num_generations)]
        waiting, prompts = deque(rows), Prompts(self, requests)
        at_work: list[Row] = []
        slots: Slots | None = None
        while waiting or at_work:
            while waiting and (slots is None or len(at_work) < slots.num_slots):
                row = waiting.popleft()
                cache, index = prompts.of(row.request)
                if slots is None:
                    slots = self._make_slots(cache, requests, params, len(rows))
                slots.put(len(at_work), cache, index, row.position)
                at_work.append(row)
            assert slots is not None
            self._step(slots, at_work, params)
            finished = [place for place, row in enumerate(at_work) if row.finish_reason is not None]
            for place in reversed(finished):  # the last row in use takes the place of a finished one
                last = at_work.pop()
                if place < len(at_work):
                    slots.move(len(at_work), place, last.position)
                    at_work[place] = last
        made = iter(rows)
        return [[next(made).completion() for _ in range(params.num_generations)] for _ in requests]

    def _make_slots(
        self, like: DynamicCache, requests: Sequence[Request], params: SamplingParams, num_rows: int
    ) -> Slots:
        """As many as are asked for, and as the budget of memory holds."""
        length = max(len(request.prompt_ids) for request in requests) + params.max_completion_length
        num_slots, budget = min(self._config.max_num_seqs, num_rows), self._config.kv_cache_memory_bytes
        if budget is not None:
            needed = bytes_per_token(like) * length
            if needed > budget:
                raise EngineError(
                    f"engine.kv_cache_memory_bytes = {budget:,} holds no completion: one of {length} tokens with its "
                    f"prompt takes {needed:,}. Raise it, or lower sampling.max_completion_length."
                )
            num_slots = min(num_slots, budget // needed)
        return Slots(like, num_slots, length)

    def _step(self, slots: Slots, rows: Sequence[Row], params: SamplingParams) -> None:
        """One token for every row."""
        device = self._config.device
        positions_B = torch.tensor([row.position for row in rows])
        slots.use(positions_B.to(device))
        ids_B1 = torch.tensor([[row.last_token] for row in rows], device=device)
        logits_BV = self._forward(ids_B1, self._masks(slots), positions_B[:, None].to(device), slots.cache)
        uniform_B = torch.tensor([row.uniforms[row.num_tokens] for row in rows], dtype=torch.float64, device=device)
        token_B, logprob_B = (found.cpu() for found in draw(logits_BV, uniform_B, params))
        if not torch.isfinite(logprob_B).all():
            raise EngineError(
                "the policy gives log-probs that are not finite, so its weights are broken or overflow in "
                f"engine.dtype = {self._config.dtype!r}. Try engine.dtype = 'float32', or an earlier policy."
            )
        ended_B = torch.isin(token_B, self._eos)
        for row, token, logprob, ended in zip(
            rows, token_B.tolist(), logprob_B.tolist(), ended_B.tolist(), strict=True
        ):
            row.add(token, logprob, ended)

    def _masks(self, slots: Slots) -> Tensor | Mapping[str, Tensor]:
        """What each row attends to, by the kind of layer where there are several."""
        dtype = getattr(torch, self._config.dtype)
        if len(self._windows) == 1:
            return slots.mask(dtype, *self._windows.values())
        return {kind: slots.mask(dtype, window) for kind, window in self._windows.items()}

    def prefill(self, ids_RP: Tensor) -> DynamicCache:
        """Keys and values of prompts padded on the right. Layers keep all of them, whatever their window."""
        cache = DynamicCache()
        self._forward(ids_RP.to(self._config.device), None, None, cache)
        return cache

    def _forward(
        self,
        ids: Tensor,
        mask: Tensor | Mapping[str, Tensor] | None,
        position_ids: Tensor | None,
        cache: object,
    ) -> Tensor:
        """Logits after the last of `ids`."""
        output = self._model(
            input_ids=ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, logits_to_keep=1
        )
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV


class StopTexts:
    """Texts that end a completion."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        self._num_tokens = max(len(text.encode()) for text in texts) + 4
        """As many of the last tokens as can hold a text: each is a byte or more, but for a few that may be nothing."""

    def end(self, tokens: Sequence[int]) -> bool:
        """Whether one of the texts is there, called after every token."""
        tail = self._tokenizer.decode(tokens[-self._num_tokens :])
        return any(text in tail for text in self._texts)


@dataclass(eq=False)
class Row:
    """A completion in the making."""

    request: Request
    index: int
    params: SamplingParams
    stops: StopTexts | None = None
    finish_reason: FinishReason | None = None
    num_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.uniforms = uniform_stream(self.request.seed, self.index, self.params.max_completion_length)

    @property
    def position(self) -> int:
        """Of the token that is read next: the prompt's last one, then each one drawn."""
        return len(self.request.prompt_ids) - 1 + self.num_tokens

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else int(self.request.prompt_ids[-1])

    def add(self, token: int, logprob: float, ended: bool) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.num_tokens += 1
        if ended or (self.stops is not None and self.stops.end(self.tokens)):
            self.finish_reason = "stop"
        elif self.num_tokens == self.params.max_completion_length:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32), self.finish_reason)


class Prompts:
    """Keys and values of prompts without their last tokens, some prompts at once, in the order of the requests."""

    def __init__(self, engine: EmbeddedEngine, requests: Sequence[Request]) -> None:
        self._engine, self._waiting = engine, deque(requests)
        self._batch: list[Request] = []
        self._cache = DynamicCache()

    def of(self, request: Request) -> tuple[DynamicCache, int]:
        """The cache that holds a request's prompt, and its place there."""
        while not any(request is held for held in self._batch):
            self._next()
        return self._cache, next(i for i, held in enumerate(self._batch) if held is request)

    def _next(self) -> None:
        self._batch, width = [], 1
        while self._waiting:
            width = max(width, len(self._waiting[0].prompt_ids) - 1)
            if self._batch and width * (len(self._batch) + 1) > PREFILL_TOKENS:
                break
            self._batch.append(self._waiting.popleft())
        ids_RP = torch.zeros(len(self._batch), width, dtype=torch.long)
        for row, request in zip(ids_RP, self._batch, strict=True):
            prompt = torch.from_numpy(request.prompt_ids[:-1].astype(np.int64))
            row[: len(prompt)] = prompt
        self._cache = self._engine.prefill(ids_RP)


def attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """How many tokens back each kind of layer sees, None for all. Raises EngineError for kinds that have no keys."""
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"])
    known = {"full_attention": None, "sliding_attention": window}
    if unknown := kinds - known.keys():
        raise EngineError(
            f"the embedded engine does not know layers of {', '.join(sorted(unknown))}. Use engine.kind = 'vllm'."
        )
    return {kind: known[kind] for kind in kinds}


def uniform_stream(seed: int, index: int, length: int) -> np.ndarray:
    """f64[length] in [0, 1), which depend on the request's seed and the completion's index, and on nothing else."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, index], np.uint64))).random(length)


def draw(logits_BV: Tensor, uniform_B: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """A token a row, by inverting the cumulative distribution at the row's uniform number, and its log-prob.

    Chances are added up by blocks of tokens, these in float64, then token by token in the block that the number falls
    in. A CPU takes as many rows at once as its cache holds.
    """
    rows = len(logits_BV) if logits_BV.is_cuda else max(1, CACHED_LOGITS // logits_BV.shape[-1])
    pieces = [slice(start, start + rows) for start in range(0, len(logits_BV), rows)]
    drawn = [_draw(logits_BV[piece], uniform_B[piece], params) for piece in pieces]
    token_B, logprob_B = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    return token_B, logprob_B


def _draw(logits_BV: Tensor, uniform_B: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    scaled_BV = logits_BV.float() / params.temperature if params.temperature != 1 else logits_BV.float()
    if params.top_k or params.top_p < 1:
        least_B1 = least_kept(scaled_BV, params.top_p, params.top_k)
        scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B1, -torch.inf)
    largest_B1 = scaled_BV.amax(-1, keepdim=True)
    chance_BV = (scaled_BV - largest_B1).exp_()
    padding = -chance_BV.shape[-1] % BLOCK
    chance_BKC = torch.nn.functional.pad(chance_BV, (0, padding)).view(len(chance_BV), -1, BLOCK)
    upto_BK = chance_BKC.sum(-1).double().cumsum(-1)
    total_B1 = upto_BK[:, -1:]
    goal_B1 = uniform_B[:, None] * total_B1
    block_B1 = torch.searchsorted(upto_BK, goal_B1, right=True).clamp(max=upto_BK.shape[-1] - 1)
    before_B1 = torch.where(block_B1 > 0, upto_BK.gather(-1, (block_B1 - 1).clamp(min=0)), 0.0)
    chance_BC = chance_BKC[torch.arange(len(chance_BV)), block_B1[:, 0]]
    upto_BC = before_B1 + chance_BC.double().cumsum(-1)
    place_B1 = torch.searchsorted(upto_BC, goal_B1, right=True)
    place_B1 = place_B1.clamp(max=last_possible(chance_BC))  # rounding may leave the number beyond the block's end
    token_B1 = block_B1 * BLOCK + place_B1
    logprob_B1 = scaled_BV.gather(-1, token_B1) - largest_B1 - total_B1.log().float()
    return token_B1[:, 0], logprob_B1[:, 0]


def least_kept(scaled_BV: Tensor, top_p: float, top_k: int, num_sorted: int = FEW) -> Tensor:
    """[B, 1]: the logit of the least likely token that truncation leaves; those of equal logits are left alike.

    Only the likeliest tokens are sorted: for `top_p` a few, and many times more where these do not sum to it.
    """
    num_sorted = min(top_k or num_sorted, scaled_BV.shape[-1])
    sorted_BK = scaled_BV.topk(num_sorted).values
    if top_p == 1:
        return sorted_BK[:, -1:]
    total_B1 = (sorted_BK if top_k else scaled_BV).logsumexp(-1, keepdim=True)
    chance_BK = (sorted_BK - total_B1).double().exp()
    before_BK = chance_BK.cumsum(-1) - chance_BK
    num_kept_B1 = (before_BK < top_p).sum(-1, keepdim=True).clamp(min=1)
    if not top_k and num_sorted < scaled_BV.shape[-1] and num_kept_B1.max() == num_sorted:
        return least_kept(scaled_BV, top_p, top_k, 16 * num_sorted)
    return sorted_BK.gather(-1, num_kept_B1 - 1)


def last_possible(chance_BC: Tensor) -> Tensor:
    """[B, 1]: the last token of each row whose chance is not 0."""
    places_C = torch.arange(chance_BC.shape[-1], device=chance_BC.device)
    return torch.where(chance_BC > 0, places_C, 0).amax(-1, keepdim=True)
