"""How far a run's newest policy moved the tokens of some completions, for people to look at.

Shapes: B completions of one prompt, S tokens of a sequence (prompt, completion, padding), T completion tokens, H sizes
of a hidden state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oapl.causal_lm import CausalLM, take_apart
from oapl.errors import StoreError
from oapl.model import load_model, load_tokenizer
from oapl.report.completions import ShownGroup, TokenScores
from oapl.store import RunFolder
from oapl.types import Group

MAX_TOKENS = 4096
"""Tokens of one forward pass, padding included, but for a single sequence that is longer."""
MAX_SECONDS = 15.0
"""Time for scoring, so that a report of long completions or of a large model comes too."""
REPLACEMENT = "\ufffd"
"""What a part of a character decodes to."""


def score_groups(run: RunFolder, sampled: Sequence[ShownGroup], seconds: float = MAX_SECONDS) -> TokenScores:
    """Scores as many of the groups, in order, as `seconds` allow, but at least the first.

    With the run's newest policy, on the CPU. Raises StoreError or ModelError where that cannot be.
    """
    model, tokenizer, version = newest_policy(run)
    if all(item.round.policy == run.policy(version) for item in sampled):
        raise StoreError(f"policy {version} sampled all of these, and the run has sealed no later one")
    lm = take_apart(model)
    scores = TokenScores(version, [], [])
    end = time.monotonic() + seconds
    for item in sampled:
        if scores.pieces and time.monotonic() > end:
            break
        completions = item.group.completions
        scores.pieces.append([token_pieces(tokenizer, completion.token_ids.tolist()) for completion in completions])
        scores.log_ratios.append(group_log_ratios(lm, item.group, item.round.sampling.temperature))
    return scores


def newest_policy(run: RunFolder) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, int]:
    """The model and tokenizer of the newest sealed policy, and its version. Raises StoreError or ModelError."""
    version = run.newest_version()
    policy = None if version is None else run.policy(version)
    if version is None or policy is None:
        raise StoreError(f"{run.path} holds no policy any more, so there is nothing to score with")
    path = str(run.verified_policy_path(policy))
    return load_model(path, "float32", "cpu"), load_tokenizer(path), version


@torch.no_grad()
def group_log_ratios(lm: CausalLM, group: Group, temperature: float) -> list[NDArray[np.float32]]:
    """log pi - log pi_sampler of each token of each completion, in nats: f32[T] a completion."""
    num_prompt = len(group.prompt_ids)
    longest = num_prompt + max(len(completion.token_ids) for completion in group.completions)
    batch = max(1, MAX_TOKENS // longest)
    ratios = []
    for start in range(0, len(group.completions), batch):
        part = group.completions[start : start + batch]
        ids_BS = torch.zeros(len(part), longest, dtype=torch.long)
        for row, completion in enumerate(part):
            ids = np.concatenate([group.prompt_ids, completion.token_ids])
            ids_BS[row, : len(ids)] = torch.from_numpy(ids)
        hidden_BTH = lm.hidden_states(ids_BS[:, :-1], None, None, None)[:, num_prompt - 1 :]
        targets_BT = ids_BS[:, num_prompt:]
        logprobs_BT, _ = lm.of_targets(
            hidden_BTH, targets_BT, torch.ones_like(targets_BT, dtype=torch.bool), temperature
        )
        for row, completion in enumerate(part):
            ratios.append(logprobs_BT[row, : len(completion.token_ids)].numpy() - completion.logprobs)
    return ratios


def token_pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, special tokens included; "" for one that ends within a character.

    Together they read as the whole decodes: a token is decoded with those before it, since many tokenizers
    drop the space before a first word.
    """
    pieces: list[str] = []
    start, read = 0, 0  # ids[start:read] are the tokens of the last whole piece
    for end in range(1, len(ids) + 1):
        known = tokenizer.decode(ids[start:read])
        text = tokenizer.decode(ids[start:end])
        if text.endswith(REPLACEMENT) and end < len(ids):
            pieces.append("")
            continue
        pieces.append(text[len(known) :])
        start, read = read, end
    return pieces
