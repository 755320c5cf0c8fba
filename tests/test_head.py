"""The head without logits, against plain log-softmax in float64.

Shapes: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from oapl import head as head_module
from oapl.head import Head


def inputs(num_tokens: int = 13, hidden: int = 8, vocabulary: int = 29) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(num_tokens, hidden, generator=generator, dtype=torch.float64)
    weight_VH = torch.randn(vocabulary, hidden, generator=generator, dtype=torch.float64)
    bias_V = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    targets_N = torch.randint(vocabulary, (num_tokens,), generator=generator)
    return hidden_NH, weight_VH, bias_V, targets_N


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, temperature: float):
    """By the definition: softcap * tanh(scale * (h W^T + b) / softcap) / temperature, and its log-softmax."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


COMPILES = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("default"),  # torch warns of its own ways while it compiles
]
FORMS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.3},
    "scale and softcap": {"scale": 2.0, "softcap": 5.0},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 60, 10**6], ids="{} logits at once".format)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=COMPILES)], ids=["plain", "compiled"])
def test_values_and_gradients_are_those_of_a_plain_log_softmax(
    monkeypatch, form, with_bias, chunk, temperature, compiled
):
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", chunk)
    *given, targets = inputs()
    upstream = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    results = []
    for exact in (True, False):
        dtype = torch.float64 if exact else torch.float32
        h, w, b = (x.to(dtype).clone().requires_grad_() for x in given)
        head = Head(w, b if with_bias else None, **form, compiled=compiled)
        if exact:
            logprobs, entropy = plain(h, w, b if with_bias else None, targets, head, temperature)
        else:
            logprobs, entropy = head.logprobs(h, targets, temperature)
        (logprobs * upstream.to(dtype)).sum().backward()
        results.append([logprobs, entropy, h.grad, w.grad, *([b.grad] if with_bias else [])])
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_passes_the_gradient_on_and_takes_none():
    hidden, weight, _, targets = (x.float() if x.is_floating_point() else x for x in inputs())
    hidden.requires_grad_()
    Head(weight).logprobs(hidden, targets, 1.0)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_no_gradient_goes_through_the_entropy():
    hidden, weight, _, targets = (x.float() if x.is_floating_point() else x for x in inputs())
    _, entropy = Head(weight.requires_grad_()).logprobs(hidden.requires_grad_(), targets, 1.0)
    assert not entropy.requires_grad


def test_of_bfloat16_states_the_log_probs_are_float32_and_near():
    hidden, weight, _, targets = (x.float() if x.is_floating_point() else x for x in inputs())
    exact, _ = Head(weight).logprobs(hidden, targets, 1.0)
    weight, hidden = weight.bfloat16().requires_grad_(), hidden.bfloat16()
    coarse, _ = Head(weight).logprobs(hidden, targets, 1.0)
    coarse.sum().backward()
    assert coarse.dtype == torch.float32
    assert weight.grad.dtype == torch.bfloat16
    assert 0 < (coarse - exact).abs().max() < 0.2


def test_no_tokens_give_no_log_probs():
    hidden, weight, _, targets = (x.float() if x.is_floating_point() else x for x in inputs())
    logprobs, entropy = Head(weight.requires_grad_()).logprobs(hidden[:0].requires_grad_(), targets[:0], 1.0)
    assert (logprobs.shape, entropy.shape) == ((0,), (0,))
    logprobs.sum().backward()
    assert (weight.grad == 0).all()
