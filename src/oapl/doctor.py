"""Whether this machine and a model are fit to train: versions, cores, and engine against trainer."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from oapl.config import EngineConfig
from oapl.engines.embedded import EmbeddedEngine
from oapl.installation import vllm_package
from oapl.model import load_model, next_token_logprobs, resolve
from oapl.opening import environment
from oapl.types import Request, SamplingParams

TOLERANCE = 1e-4
"""Nats a token within which the embedded engine and the trainer agree in float32."""


def examine(name_or_path: str, console: Console) -> bool:
    """Prints what was found; True where the engine and the trainer agree on the model. Raises ModelError."""
    table = Table(show_header=False, box=None)
    for name, value in environment().items():
        table.add_row(name, str(value))
    table.add_row(
        "free cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    )
    table.add_row("torch threads", str(torch.get_num_threads()))
    table.add_row("cuda", torch.cuda.get_device_name() if torch.cuda.is_available() else "not available")
    if vllm_package() is None:
        table.add_row("vllm", "not installed")
    console.print(table)
    gap = largest_gap(name_or_path)
    console.print(
        f"{name_or_path}: embedded engine and trainer differ by at most {gap:.1e} nats a token in float32 "
        f"({'good' if gap <= TOLERANCE else f'too much: the limit is {TOLERANCE:.0e}'})",
        highlight=False,
    )
    return gap <= TOLERANCE


def largest_gap(name_or_path: str, num_tokens: int = 32, temperature: float = 1.0) -> float:
    """The largest gap between the log-probs an engine reports while sampling and those of one forward pass."""
    engine = EmbeddedEngine(EngineConfig())
    engine.load(Path(resolve(name_or_path)))
    model = load_model(name_or_path, "float32", "cpu")
    rng = np.random.default_rng(0)
    requests = [
        Request(rng.integers(0, model.config.get_text_config().vocab_size, size=length).astype(np.int32), seed=length)
        for length in (3, 5, 8)
    ]
    gap = 0.0
    for request, completions in zip(
        requests, engine.generate(requests, SamplingParams(temperature, num_tokens, 4)), strict=True
    ):
        for completion in completions:
            ids = torch.tensor([[*request.prompt_ids.tolist(), *completion.token_ids.tolist()]])
            with torch.no_grad():
                logprobs = next_token_logprobs(model, ids, temperature, first=len(request.prompt_ids) - 1)
            gap = max(gap, float((logprobs[0] - torch.from_numpy(completion.logprobs)).abs().max()))
    return gap
