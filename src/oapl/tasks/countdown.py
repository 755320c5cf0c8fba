"""Countdown: reach a target from given numbers, each used exactly once, one step a line.

A prompt reads `use 4 9 6 make 30` and a right answer `4*9=36`, `36-6=30`: every line takes two of the
numbers at hand and puts their result back, and the last line leaves the target alone. Any such chain counts.
"""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter
from collections.abc import Sequence

from oapl.errors import TaskError
from oapl.types import Prompt, Split, Verdict

LARGEST_RESULT = 99
HELD_OUT_SHARE = 8
"""One problem in this many is held out from training, by a hash of the problem itself."""

VALIDATION_SHARE = 4
"""Of the held-out problems, one in this many belongs to the validation split, the others to the evaluation split."""

MAX_TRIES = 10_000
"""Draws after which a split is taken to have no problems."""

STEP = re.compile(r"\s*(\d{1,99})\s*([-+*/])\s*(\d{1,99})\s*=\s*(\d{1,99})\s*")
"""Bounded, since Python refuses to read numbers of thousands of digits, and a model may write them."""

Step = tuple[int, str, int, int]


def random_step(rng: random.Random, numbers: Sequence[int]) -> Step:
    """One legal step on two of the numbers, its result between 0 and 99."""
    while True:
        a, b = rng.sample(numbers, 2)
        operator = rng.choice("+-*/")
        result = apply(a, operator, b)
        if result is not None and 0 <= result <= LARGEST_RESULT:
            return a, operator, b, result


def apply(a: int, operator: str, b: int) -> int | None:
    """The result of a step, or None where a division is not exact."""
    if operator == "+":
        return a + b
    if operator == "-":
        return a - b
    if operator == "*":
        return a * b
    return a // b if b != 0 and a % b == 0 else None


def random_chain(rng: random.Random, numbers: Sequence[int]) -> list[Step]:
    """Random legal steps until one number is left; the last step's result is what the chain reaches."""
    left, chain = list(numbers), []
    while len(left) > 1:
        a, operator, b, result = random_step(rng, left)
        left.remove(a)
        left.remove(b)
        left.append(result)
        chain.append((a, operator, b, result))
    return chain


def chain_text(chain: Sequence[Step]) -> str:
    return "\n".join(f"{a}{operator}{b}={result}" for a, operator, b, result in chain)


def prompt_text(numbers: Sequence[int], target: int) -> str:
    return f"use {' '.join(map(str, numbers))} make {target}\n"


def split_of(numbers: Sequence[int], target: int) -> Split:
    """The one split that a problem belongs to, whatever the order of its numbers."""
    held_out, rest = divmod(zlib.crc32(f"{sorted(numbers)} {target}".encode()), HELD_OUT_SHARE)
    if rest != 0:
        return "train"
    return "validation" if held_out % VALIDATION_SHARE == 0 else "evaluation"


def reaches_target(completion: str, numbers: Sequence[int], target: int) -> bool:
    """Whether every line is a true step on numbers at hand, and the target alone is left."""
    at_hand = Counter(numbers)
    for line in completion.strip().split("\n"):
        match = STEP.fullmatch(line)
        if match is None:
            return False
        a, operator, b, result = int(match[1]), match[2], int(match[3]), int(match[4])
        taken = Counter([a, b])
        if not taken <= at_hand or apply(a, operator, b) != result:
            return False
        at_hand = at_hand - taken + Counter([result])
    return at_hand == Counter([target])


class Countdown:
    """Endless problems of `min_numbers` to `max_numbers` numbers up to `largest_number`."""

    verifier = "countdown/1"
    num_workers = 1

    def __init__(self, *, min_numbers: int = 3, max_numbers: int = 4, largest_number: int = 12) -> None:
        for value in (min_numbers, max_numbers, largest_number):
            if not isinstance(value, int):
                raise TaskError(f"task.args: countdown needs whole numbers, got {value!r}")
        if not 2 <= min_numbers <= max_numbers:
            raise TaskError(
                f"task.args: countdown needs 2 <= min_numbers <= max_numbers, got {min_numbers} and {max_numbers}"
            )
        if not 2 <= largest_number <= LARGEST_RESULT:
            raise TaskError(f"task.args: countdown needs 2 <= largest_number <= 99, got {largest_number}")
        self.min_numbers, self.max_numbers, self.largest_number = min_numbers, max_numbers, largest_number
        self.prompt("train", 0)
        self.prompt("evaluation", 0)

    def num_prompts(self, split: Split) -> None:
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        numbers, chain = self.problem(random.Random(f"{split}/{index}"), split)
        target = chain[-1][3]
        return Prompt(f"{split}/{index}", prompt_text(numbers, target), {"numbers": numbers, "target": target})

    def problem(self, rng: random.Random, split: Split) -> tuple[list[int], list[Step]]:
        """Numbers, and a chain whose last result is the target, from the split asked for. Raises TaskError if empty."""
        for _ in range(MAX_TRIES):
            count = rng.randint(self.min_numbers, self.max_numbers)
            numbers = [rng.randint(1, self.largest_number) for _ in range(count)]
            chain = random_chain(rng, numbers)
            target = chain[-1][3]
            if target > 0 and split_of(numbers, target) == split:
                return numbers, chain
        raise TaskError(
            f"task.args: {self.min_numbers} to {self.max_numbers} numbers up to {self.largest_number} make too few "
            f"problems for the {split} split. Raise max_numbers or largest_number."
        )

    def grade(self, prompt: Prompt, completions: Sequence[str]) -> list[Verdict]:
        numbers, target = prompt.columns["numbers"], prompt.columns["target"]
        return [Verdict(float(reaches_target(completion, numbers, target))) for completion in completions]

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass
