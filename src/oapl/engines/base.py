"""What the sampler needs of anything that generates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from oapl.types import Completion, Request, SamplingParams


class Engine(Protocol):
    """Holds one policy at a time. `tests/test_engine_contract.py` says what every engine must do."""

    def load(self, policy: Path) -> None:
        """Takes the weights of a Hugging Face model folder. Raises ModelError where they cannot be loaded."""
        ...

    @property
    def context_length(self) -> int:
        """The most tokens, prompt and completion together, that the loaded policy can hold."""
        ...

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        """`params.num_generations` completions of each request, in order.

        A completion ends with the end-of-sequence token or one of `params.stop` (`stop`), or when it has
        `max_completion_length` tokens (`length`). Its log-probs are of the distribution its tokens were drawn from,
        temperature and truncation applied. Its randomness depends on the request's seed and its own index alone.

        Here and in `score`, raises PolicyLostError where the engine found that it no longer held the policy.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each sequence, the log-probs of its tokens after the first, each given those before it, in nats at
        temperature 1."""
        ...

    def close(self) -> None:
        """Frees what the engine holds. It may be loaded again."""
        ...
