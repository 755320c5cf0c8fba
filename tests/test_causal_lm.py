"""Log-probs and gradients of real architectures against the plain way: whole rows, full logits, log-softmax."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from helpers import make_completion
from oapl.attention import KEPT
from oapl.batching import Batch, Row, collate
from oapl.causal_lm import take_apart
from oapl.config import EngineConfig
from oapl.engines.embedded import EmbeddedEngine
from oapl.errors import ModelError
from oapl.model import has_tied_head, load_model
from oapl.pieces import backward_in_pieces
from oapl.types import Request, SamplingParams

SIZES = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 6},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": False},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.25},
    "gpt_neox": {},
    "phi": {},
    "doge": {},  # its masks are computed, one for each head
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_key_value_heads": 4,
    },  # its values are smaller than its keys
}
SLIDING = {"gemma2", "gemma3_text", "mistral"}


def make_model(kind: str, attention: str = "eager") -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **ARCHITECTURES[kind]})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()


def make_rows() -> list[Row]:
    """Three prompts of 1, 4 and 9 tokens; completions of 1 to 12 tokens."""
    rng = np.random.default_rng(0)
    rows = []
    for position, length in enumerate((9, 4, 1)):
        prompt_ids = rng.integers(3, 41, length).astype(np.int32)
        for _ in range(3):
            tokens = rng.integers(3, 41, int(rng.integers(1, 13))).tolist()
            completion = make_completion(tokens, (-rng.random(len(tokens))).tolist())
            rows.append(Row(position, prompt_ids, completion, mark=1.0, advantage=float(rng.normal())))
    return rows


def weights_of(rows: list[Row]) -> list[Tensor]:
    """What each log-prob counts in the tests' loss."""
    return [
        torch.linspace(-1, 2, len(row.completion.token_ids), dtype=torch.float64) * (i + 1)
        for i, row in enumerate(rows)
    ]


def plainly(model: PreTrainedModel, rows: list[Row], temperature: float) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Each row's log-probs, and the gradient of their weighted sum."""
    model.zero_grad()
    logprobs = []
    for row, weights in zip(rows, weights_of(rows), strict=True):
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.completion.token_ids]).astype(np.int64))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1]
        own = (logits / temperature).log_softmax(-1).gather(-1, ids[0, len(row.prompt_ids) :, None]).squeeze(-1)
        (own * weights).sum().backward()
        logprobs.append(own.detach())
    return logprobs, gradient(model)


def gradient(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def of_rows(values_BT: Tensor, batch: Batch) -> list[Tensor]:
    return [values[mask] for values, mask in zip(values_BT, batch.mask, strict=True)]


def assert_close(have: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def assert_same_gradient(have: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert have.keys() == want.keys()
    for name in want:
        scale = float(want[name].abs().max())
        torch.testing.assert_close(
            have[name], want[name], rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("attention", ["eager", "sdpa", KEPT])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_log_probs_and_gradients_are_those_of_full_logits(kind: str, attention: str):
    model, rows = make_model(kind, attention), make_rows()
    want, want_gradient = plainly(model, rows, 0.8)
    lm = take_apart(model)
    assert lm.has_plain_cache == (kind not in SLIDING)
    for share_prompts in {False, lm.has_plain_cache}:
        model.zero_grad()
        batch = collate(rows, "cpu", share_prompts)
        logprobs, entropy = lm.logprobs(batch, 0.8)
        assert_close(of_rows(logprobs.detach(), batch), want)
        assert not logprobs[~batch.mask].any()
        assert not entropy[~batch.mask].any()
        weighted = [own * weights for own, weights in zip(of_rows(logprobs, batch), weights_of(rows), strict=True)]
        torch.cat(weighted).sum().backward()
        assert_same_gradient(gradient(model), want_gradient)


@pytest.mark.parametrize("piece_tokens", [1, 5, 11, 100])
@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind not in SLIDING])
def test_a_row_in_pieces_has_the_gradient_of_the_whole(kind: str, piece_tokens: int):
    model, rows = make_model(kind), make_rows()[:1]
    want, want_gradient = plainly(model, rows, 0.8)
    model.zero_grad()
    batch = collate(rows, "cpu", share_prompts=False)
    (weights,) = weights_of(rows)
    logprobs, entropy = backward_in_pieces(
        take_apart(model), batch, 0.8, piece_tokens, lambda logprobs: (logprobs[batch.mask] * weights).sum()
    )
    assert_close(of_rows(logprobs, batch), want)
    assert_same_gradient(gradient(model), want_gradient)
    torch.testing.assert_close(entropy, take_apart(model).logprobs(batch, 0.8)[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_embedded_engine_agrees_with_the_trainer(kind: str, attention: str | None, tmp_path: Path):
    """Completions longer than the sliding windows, in fewer places than there are completions."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **ARCHITECTURES[kind]})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = EmbeddedEngine(EngineConfig(max_num_seqs=3), attention)
    engine.load(tmp_path)
    requests = [Request(row.prompt_ids, seed) for seed, row in enumerate(make_rows()[::3])]
    answers = engine.generate(requests, SamplingParams(0.8, 20, 2))
    assert max(len(completion.token_ids) for group in answers for completion in group) > 10
    rows = [
        Row(position, request.prompt_ids, completion, 1.0, 0.0)
        for position, (request, group) in enumerate(zip(requests, answers, strict=True))
        for completion in group
    ]
    lm = take_apart(load_model(str(tmp_path), "float32", "cpu", attention))
    batch = collate(rows, "cpu", lm.has_plain_cache)
    with torch.no_grad():
        logprobs, _ = lm.logprobs(batch, 0.8)
    torch.testing.assert_close(logprobs, batch.sampler_logprobs, rtol=1e-4, atol=1e-4)


def test_a_cap_on_the_scores_of_attention_holds_by_default(tmp_path: Path):
    """Gemma 2's, which only `eager` attention knows: both trainer and engine load models this way."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma2", **{**SIZES, **ARCHITECTURES["gemma2"], "attn_logit_softcapping": 0.5})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ids = torch.arange(3, 23)[None]
    by_default, capped, model = (load_model(str(tmp_path), "float32", "cpu", kind) for kind in (None, "eager", "eager"))
    model.set_attn_implementation("sdpa")
    by_default, capped, uncapped = (made(ids).logits for made in (by_default, capped, model))
    assert torch.equal(by_default, capped)
    assert (capped - uncapped).abs().max() > 1e-2
    with pytest.raises(ModelError, match=r"attn_implementation = 'sdpa' leaves out the cap .* Gemma2ForCausalLM has"):
        load_model(str(tmp_path), "float32", "cpu", "sdpa")


def test_logits_that_are_changed_in_an_unknown_way_are_refused():
    model = make_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * 1.5)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM changes its logits in a way that is not known here"):
        take_apart(model)


@pytest.mark.parametrize(
    ("config", "is_tied"),
    [
        ({"model_type": "qwen2", "tie_word_embeddings": True}, True),
        ({"model_type": "qwen2", "tie_word_embeddings": False}, False),
        ({"model_type": "inkling_text"}, False),  # whose configuration has no such field
    ],
    ids=str,
)
def test_whether_a_head_is_tied_is_seen_in_its_configuration(config: dict[str, object], is_tied: bool, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert has_tied_head(tmp_path) is is_tied
