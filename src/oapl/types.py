"""What crosses a boundary between parts: frozen, validated when made, free of torch.

Shapes: P prompt tokens, T completion tokens, G completions of one prompt. Log-probs are natural logs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length"]
Split = Literal["train", "validation", "evaluation"]
"""What is trained on, what weights are chosen by, and what is reported: no problem is in two of them."""
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PolicyRef:
    """One sealed set of weights. `step` counts the optimizer steps that made it."""

    version: int | None
    """Of a run's policies, from 0 on, and 0 for a model that is no run's. None for a snapshot, which the sampler of
    rounds never sees."""
    step: int
    digest: str
    """SHA-256 of the weight file's bytes, as lowercase hex."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. Those to train on are drawn by temperature alone, which the trainer repeats."""

    temperature: float
    max_completion_length: int
    num_generations: int
    stop: tuple[str, ...] = ()
    """Texts that end a completion, of which they are part."""
    top_p: float = 1.0
    """Draws from the fewest likeliest tokens whose chances sum to this, renormalised; 1 is all of them."""
    top_k: int = 0
    """Draws from this many likeliest tokens, renormalised, of which `top_p` then takes its share; 0 is all of them."""

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be positive and finite, not {self.temperature}")
        if self.max_completion_length < 1:
            raise ValueError(f"max_completion_length must be at least 1, not {self.max_completion_length}")
        if self.num_generations < 1:
            raise ValueError(f"num_generations must be at least 1, not {self.num_generations}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, not {self.top_k}")


@dataclass(frozen=True)
class Prompt:
    """One problem. `text` is a plain string, or chat messages for the tokenizer's chat template."""

    id: str
    """`<split>/<index>`: names the problem within its task."""
    text: str | Messages
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What else the reward needs: the dataset's other columns."""


def split_and_index(prompt_id: str) -> tuple[Split, int]:
    split, _, index = prompt_id.partition("/")
    assert split in get_args(Split), prompt_id
    return split, int(index)  # type: ignore[return-value]


@dataclass(frozen=True)
class Request:
    """One prompt for an engine. Completion i draws from a random stream owned by `(seed, i)`."""

    prompt_ids: NDArray[np.int32]
    seed: int


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled answer, as the engine made it. Its ids are what is trained on; text is never re-tokenized."""

    token_ids: NDArray[np.int32]
    """i32[T], the end-of-sequence token included when it was sampled."""
    logprobs: NDArray[np.float32]
    """f32[T], nats, of the distribution the token was really drawn from (temperature and truncation applied)."""
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        if not 0 < len(self.token_ids) == len(self.logprobs):
            raise ValueError(
                f"a completion needs as many log-probs as tokens, and at least one: "
                f"got {len(self.token_ids)} tokens and {len(self.logprobs)} log-probs"
            )
        if not np.isfinite(self.logprobs).all():
            raise ValueError("a completion's log-probs must be finite")


@dataclass(frozen=True)
class Verdict:
    """What grading found of one completion."""

    reward: float
    """Finite in float32."""
    answer: str | None = None
    """What was graded: a boxed answer, a program; None where there was none, or where all of the text counts."""
    reason: str = ""
    """Why it earned its reward, for people to read: `equal to 3/4`, `test 2: wrong output`, `no boxed answer`."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """What each reward function alone gave, where several make the reward, and the other numbers that verl's gave."""


@dataclass(frozen=True, eq=False)
class SampledGroup:
    """The G completions of one prompt from one policy, as they were sampled."""

    position: int
    """The prompt's place in its round's list of prompts."""
    prompt_id: str
    prompt: str
    """What the model was given, as text."""
    prompt_ids: NDArray[np.int32]
    """i32[P]"""
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]
    """The completions decoded, special tokens left out: what is graded, and what people read."""


@dataclass(frozen=True, eq=False)
class Group(SampledGroup):
    """A group that was graded, whole or not at all.

    Example: `Group(position=3, prompt_id="train/3", prompt="2+2=", prompt_ids=[5, 9], completions=(c0, …, c7),
    texts=("4", …), verdicts=(Verdict(1.0), …))`: `texts[i]` is what `completions[i]` reads and `verdicts[i]` what it
    earned.
    """

    verdicts: tuple[Verdict, ...]
    other_rewards: tuple[float, ...] = ()
    """Of a group that others sampled: the rewards of its completions that are not here, and count in its value."""

    def __post_init__(self) -> None:
        if len(self.verdicts) != len(self.completions):
            raise ValueError(
                f"group {self.prompt_id}: {len(self.completions)} completions and {len(self.verdicts)} verdicts"
            )
        if not np.isfinite(self.all_rewards).all():
            raise ValueError(f"group {self.prompt_id}: rewards must be finite, got {self.all_rewards.tolist()}")

    @cached_property
    def rewards(self) -> NDArray[np.float32]:
        """f32[G]"""
        return np.array([verdict.reward for verdict in self.verdicts], np.float32)

    @cached_property
    def all_rewards(self) -> NDArray[np.float32]:
        """f32[G + others]: `rewards`, and those of the group's completions that are not here."""
        return np.concatenate([self.rewards, np.array(self.other_rewards, np.float32)])

    def marks(self, judged_by: str | None) -> NDArray[np.float32]:
        """f32[G], by which a completion counts as right: one reward function's own score, or the whole reward."""
        if judged_by is None:
            return self.rewards
        return np.array([verdict.scores.get(judged_by, 0.0) for verdict in self.verdicts], np.float32)

    @classmethod
    def of(cls, sampled: SampledGroup, verdicts: Sequence[Verdict], other_rewards: Sequence[float] = ()) -> Group:
        return cls(**vars(sampled), verdicts=tuple(verdicts), other_rewards=tuple(other_rewards))

    def without_verdicts(self) -> SampledGroup:
        return SampledGroup(**{f.name: getattr(self, f.name) for f in fields(SampledGroup)})


@dataclass(frozen=True)
class FailedGroup:
    """A prompt whose group could not be made whole, and why."""

    position: int
    prompt_id: str
    cause: str
    sampled: SampledGroup | None = None
    """What could not be graded, to be graded again; None where nothing could be sampled."""


@dataclass(frozen=True)
class Round:
    """One frozen policy, a fixed list of prompts, and how their completions are drawn and graded."""

    index: int
    policy: PolicyRef
    sampling: SamplingParams
    seed: int
    """Seeds every completion of the round, together with the prompt's position and the completion's index."""
    prompt_ids: tuple[str, ...]
    prompts_per_shard: int
    """Shard s holds the groups of the next this many prompts after those of shard s - 1: one optimizer step."""
    verifier: str
    """Name and version of what gives the rewards."""
    problems: str = ""
    """Digest of the prompts as they are posed, of a round that scores a policy: which file or benchmark they are of."""
    gold: str = ""
    """Digest of what grading reads of such a round's problems beside the completions: answers, tests, other columns."""

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_shards(self) -> int:
        return -(-len(self.prompt_ids) // self.prompts_per_shard)

    def positions(self, shard: int) -> range:
        """The positions of a shard's prompts in `prompt_ids`."""
        start = shard * self.prompts_per_shard
        return range(start, min(start + self.prompts_per_shard, len(self.prompt_ids)))


@dataclass(frozen=True)
class Shard:
    """What a sampler stores at once: the groups of one optimizer step, and what making them cost."""

    groups: tuple[Group, ...]
    failed: tuple[FailedGroup, ...]
    sampling_s: float
    """Seconds it took: its part of the shards that were sampled together, and its grading."""
    grading_s: float
    """The part of `sampling_s` spent on rewards."""
    mismatch: float
    """Mean |log-prob gap| per token, in nats, between this engine and the trainer on the policy's probe."""

    @property
    def num_prompts(self) -> int:
        return len(self.groups) + len(self.failed)

    @property
    def num_completions(self) -> int:
        return sum(len(group.completions) for group in self.groups)

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for group in self.groups for completion in group.completions)

    def without_verdicts(self) -> Draft:
        """What was sampled, to be graded anew."""
        held = [group.without_verdicts() for group in self.groups]
        held += [failed.sampled for failed in self.failed if failed.sampled is not None]
        return Draft(
            tuple(sorted(held, key=lambda group: group.position)),
            tuple(failed for failed in self.failed if failed.sampled is None),
            self.sampling_s - self.grading_s,
            self.mismatch,
        )


@dataclass(frozen=True)
class Draft:
    """What was sampled together and waits for its verdicts."""

    sampled: tuple[SampledGroup, ...]
    unsampled: tuple[FailedGroup, ...]
    """Prompts that could not be asked."""
    sampling_s: float
    mismatch: float
    """As a shard's."""

    @property
    def positions(self) -> set[int]:
        return {group.position for group in self.sampled} | {failed.position for failed in self.unsampled}

    def part(self, positions: Collection[int]) -> Draft:
        """That of some of its prompts, with their share of the time."""
        return Draft(
            tuple(group for group in self.sampled if group.position in positions),
            tuple(failed for failed in self.unsampled if failed.position in positions),
            self.sampling_s * len(positions) / len(self.positions),
            self.mismatch,
        )


@dataclass(frozen=True)
class Events:
    """What a part of a run is told, and tells, while it works."""

    should_stop: Callable[[], bool]
    on_step: Callable[[Mapping[str, Any]], None]
    """Called with each optimizer step's record of metrics.jsonl."""
    on_shard: Callable[[Mapping[str, Any]], None]
    """Called when a shard has been sampled, graded and stored."""
