"""What tests of several parts need: small real groups, a free port, a sandbox."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oapl.types import Completion, FailedGroup, Group, PolicyRef, Round, SamplingParams, Shard, Verdict

NEEDS_SANDBOX = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="the sandbox is not installed: apt install bubblewrap"
)


def make_completion(token_ids: Sequence[int], logprobs: Sequence[float] | None = None, finish_reason: Any = "stop"):
    logprobs = [-0.5] * len(token_ids) if logprobs is None else logprobs
    return Completion(np.array(token_ids, np.int32), np.array(logprobs, np.float32), finish_reason)


def make_group(
    position: int,
    rewards: Sequence[float],
    *,
    prompt_ids: Sequence[int] = (1, 2),
    completions: Sequence[Completion] | None = None,
) -> Group:
    """A group of one-token completions, unless others are given."""
    if completions is None:
        completions = [make_completion([3 + i]) for i in range(len(rewards))]
    return Group(
        position=position,
        prompt_id=f"train/{position}",
        prompt=f"question {position}\n",
        prompt_ids=np.array(prompt_ids, np.int32),
        completions=tuple(completions),
        texts=tuple(f"answer {i}" for i in range(len(rewards))),
        verdicts=tuple(Verdict(reward) for reward in rewards),
    )


def make_shard(groups: Sequence[Group], failed: Sequence[FailedGroup] = ()) -> Shard:
    return Shard(tuple(groups), tuple(failed), sampling_s=1.5, grading_s=0.25, mismatch=1e-5)


def make_round(index: int, policy: PolicyRef, *, num_shards: int, prompts_per_shard: int = 1, num_generations: int = 2):
    return Round(
        index=index,
        policy=policy,
        sampling=SamplingParams(1.0, 8, num_generations),
        seed=12345678901234567,
        prompt_ids=tuple(f"train/{i}" for i in range(num_shards * prompts_per_shard)),
        prompts_per_shard=prompts_per_shard,
        verifier="countdown/1",
    )


def flip_a_bit(path: Path, place: float = 0.5) -> None:
    """Flips one bit of the byte at this share of the file."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(data)


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])
