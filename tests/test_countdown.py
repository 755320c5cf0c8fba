"""The countdown verifier and its problems."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations

import pytest

from oapl.config import TaskConfig
from oapl.errors import TaskError
from oapl.tasks import make_task
from oapl.tasks.countdown import Countdown, Step, apply, chain_text, random_chain, reaches_target
from oapl.types import Prompt

# The verifier


def every_chain(numbers: list[int]) -> Iterator[list[Step]]:
    """All ways to combine the numbers, two at a time, to one that is left, through whole numbers from 0 on."""
    if len(numbers) == 1:
        yield []
    for i in range(len(numbers)):
        for j in range(len(numbers)):
            if i == j:
                continue
            others = [number for place, number in enumerate(numbers) if place not in (i, j)]
            for operator in "+-*/":
                result = apply(numbers[i], operator, numbers[j])
                if result is not None and result >= 0:
                    for rest in every_chain([*others, result]):
                        yield [(numbers[i], operator, numbers[j], result), *rest]


@pytest.mark.parametrize("numbers", [[2, 3, 4], [5, 5, 1], [12, 0, 7], [1, 2, 3, 4]])
def test_every_chain_reaches_its_own_result_and_no_other(numbers: list[int]):
    chains = list(every_chain(numbers))
    assert len(chains) > 20
    for chain in chains:
        result = chain[-1][3]
        assert reaches_target(chain_text(chain), numbers, result)
        assert not reaches_target(chain_text(chain), numbers, result + 1)


@pytest.mark.parametrize(
    "answer",
    [
        "2*3=6\n6*4=24",
        "3*4=12\n12*2=24",
        "4*2=8\n3*8=24",  # the result on the right
        " 2 * 3 = 6 \n 6 * 4 = 24 \n",  # spaces and a last line break
        "2*3=6\r\n6*4=24",
    ],
)
def test_any_valid_chain_is_accepted(answer: str):
    assert reaches_target(answer, [2, 3, 4], 24)


def test_results_beyond_what_the_generator_makes_are_accepted():
    assert reaches_target("10*12=120\n120/2=60", [10, 12, 2], 60)


def test_a_number_given_twice_may_be_used_twice():
    assert reaches_target("5+5=10\n10*2=20", [5, 2, 5], 20)


@pytest.mark.parametrize(
    ("answer", "numbers", "target"),
    [
        pytest.param("3+3=6\n6*4=24", [3, 4], 24, id="a number used twice"),
        pytest.param("6*4=24", [4], 24, id="a number made up"),
        pytest.param("2*3=6\n2*3=6\n6*4=24", [2, 3, 4], 24, id="a pair used twice"),
        pytest.param("5*5=25\n25-1=24", [2, 3, 4], 24, id="numbers never given"),
        pytest.param("2*3=7\n7*4=28", [2, 3, 4], 28, id="wrong arithmetic"),
        pytest.param("7/2=3\n3*4=12", [7, 2, 4], 12, id="inexact division"),
        pytest.param("4/0=0\n0+2=2", [4, 0, 2], 2, id="division by zero"),
        pytest.param("2-3=-1\n4+-1=3", [2, 3, 4], 3, id="a negative result"),
        pytest.param("2*3=6", [2, 3, 4], 6, id="a number left over"),
        pytest.param("6*4=24", [2, 3, 6, 4], 24, id="numbers left over"),
        pytest.param("2*3=6\n6*4=24", [2, 3, 4], 25, id="another target"),
        pytest.param("2*3=6\n\n6*4=24", [2, 3, 4], 24, id="an empty line between"),
        pytest.param("2*3=6 6*4=24", [2, 3, 4], 24, id="two steps on a line"),
        pytest.param("2*3*4=24", [2, 3, 4], 24, id="three numbers on a line"),
        pytest.param("2*3=6\n6*4=24\nso the answer is 24", [2, 3, 4], 24, id="words after it"),
        pytest.param("2×3=6\n6×4=24", [2, 3, 4], 24, id="another multiplication sign"),
        pytest.param("24", [2, 3, 4], 24, id="the target alone"),
        pytest.param("use 2 3 4 make 24", [2, 3, 4], 24, id="the prompt again"),
        pytest.param("=\n*+\0", [2, 3, 4], 24, id="garbage"),
        pytest.param("2*3=" + "9" * 10_000, [2, 3, 4], 24, id="ten thousand digits"),
        pytest.param("", [2, 3, 4], 24, id="nothing"),
        pytest.param("\n \n", [2, 3, 4], 24, id="blanks"),
    ],
)
def test_what_is_no_valid_chain_is_rejected(answer: str, numbers: list[int], target: int):
    assert not reaches_target(answer, numbers, target)


def test_rewards_are_one_and_zero_in_the_order_of_the_completions():
    prompt = Prompt("train/0", "use 2 3 4 make 24\n", {"numbers": [2, 3, 4], "target": 24})
    verdicts = Countdown().grade(prompt, ["2*3=6\n6*4=24", "", "3*4=12\n12*2=24"])
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 1.0]


# The problems


def test_a_random_chain_is_accepted_for_its_own_target():
    for seed in range(500):
        rng = random.Random(seed)
        numbers = [rng.randint(1, 12) for _ in range(rng.randint(2, 6))]
        chain = random_chain(rng, numbers)
        assert reaches_target(chain_text(chain), numbers, chain[-1][3])


def problem_key(prompt: Prompt) -> tuple[tuple[int, ...], int]:
    return tuple(sorted(prompt.columns["numbers"])), prompt.columns["target"]


def test_no_problem_is_in_two_splits():
    task = Countdown()
    keys = {
        split: {problem_key(task.prompt(split, i)) for i in range(2000)}
        for split in ("train", "validation", "evaluation")
    }
    assert {
        split: len(problems) > least for (split, problems), least in zip(keys.items(), (1000, 150, 500), strict=True)
    } == {
        "train": True,
        "validation": True,
        "evaluation": True,
    }
    for one, other in combinations(keys.values(), 2):
        assert not one & other


def test_the_training_problems_never_change():
    """A round names its prompts by index alone: other problems under them would change what a resume trains on."""
    task = Countdown()
    texts = [task.prompt("train", i).text for i in range(1000)]
    assert texts[:3] == ["use 5 10 7 make 57\n", "use 6 2 1 6 make 42\n", "use 1 8 4 12 make 25\n"]
    assert task.prompt("train", 30_000_007).text == "use 9 10 12 9 make 16\n"
    digest = hashlib.sha256("".join(map(str, texts)).encode()).hexdigest()
    assert digest == "4a4753692798072128542e8e81687a32990149135d6ef0082ef47c7d43c7f647"


def test_a_problem_is_within_its_bounds_and_reads_as_documented():
    task = Countdown(min_numbers=3, max_numbers=5, largest_number=9)
    counts = set()
    for i in range(200):
        prompt = task.prompt("train", i)
        numbers, target = prompt.columns["numbers"], prompt.columns["target"]
        counts.add(len(numbers))
        assert all(1 <= number <= 9 for number in numbers)
        assert 1 <= target <= 99
        assert prompt.text == f"use {' '.join(map(str, numbers))} make {target}\n"
        assert prompt.id == f"train/{i}"
    assert counts == {3, 4, 5}


def test_an_index_is_the_same_problem_in_every_process():
    code = (
        "from oapl.tasks import countdown as c; [print(repr(c.Countdown().prompt('train', i).text)) for i in range(5)]"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.splitlines() == [repr(Countdown().prompt("train", i).text) for i in range(5)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_number": 5}, "takes min_numbers, max_numbers and largest_number"),
        ({"min_numbers": "three"}, "task.args"),
        ({"min_numbers": 2.5}, "task.args"),
        ({"min_numbers": 5, "max_numbers": 4}, "needs 2 <= min_numbers <= max_numbers, got 5 and 4"),
        ({"min_numbers": 1}, "needs 2 <= min_numbers <= max_numbers, got 1 and 4"),
        ({"largest_number": 1}, "needs 2 <= largest_number <= 99, got 1"),
        ({"largest_number": 100}, "needs 2 <= largest_number <= 99, got 100"),
    ],
)
def test_arguments_that_make_no_problems_are_refused(args: dict[str, object], message: str):
    with pytest.raises(TaskError, match=message):
        make_task(TaskConfig(name="countdown", args=args))


def test_arguments_with_too_few_problems_for_a_held_out_part_are_refused():
    # Two numbers up to 2 make seven problems, none of which falls into the held-out eighth.
    with pytest.raises(TaskError, match="too few problems"):
        make_task(TaskConfig(name="countdown", args={"min_numbers": 2, "max_numbers": 2, "largest_number": 2}))
