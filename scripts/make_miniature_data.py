"""The problems of recipes/miniature: `python scripts/make_miniature_data.py`.

Easy mathematics and programming problems, made by rules, for models that can hardly do either. A rule with its numbers
is in one split only: held-out problems have other numbers than those trained on, and mostly the same rules.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

OUTPUT = Path("recipes/miniature")
SEED = 0
SPLITS = {"": 400, "_eval": 64, "_validation": 48}
"""Mathematics problems of each file, named by what its name ends with."""
CODE_SPLITS = {"": 112, "_eval": 40, "_validation": 20}
TESTS_A_PROBLEM = 6

NAMES = ("Ada", "Ben", "Carla", "Dan", "Eva", "Farid", "Gita", "Hugo")
THINGS = ("apples", "books", "cups", "eggs", "keys", "pens", "shells", "stamps")


# Mathematics


@dataclass(frozen=True)
class MathProblem:
    rule: str
    numbers: tuple[int, ...]
    problem: str
    answer: str


def fraction(numerator: int, denominator: int) -> str:
    shared = gcd(numerator, denominator)
    top, bottom = numerator // shared, denominator // shared
    return str(top) if bottom == 1 else f"\\frac{{{top}}}{{{bottom}}}"


def math_problem(rule: str, numbers: tuple[int, ...], draw: random.Random) -> MathProblem:
    """The problem in words; who has what of which things changes nothing."""
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    words, answer = MATH_RULES[rule][1](*numbers)
    return MathProblem(rule, numbers, words.replace("{name}", name).replace("{thing}", thing), answer)


def pairs(first: range, second: range) -> list[tuple[int, ...]]:
    return [(a, b) for a in first for b in second]


MathRule = tuple[list[tuple[int, ...]], Callable[..., tuple[str, str]]]
"""The numbers that there are, and the words and the answer for some of them."""

MATH_RULES: dict[str, MathRule] = {
    "sum": (pairs(range(1, 7), range(1, 7)), lambda a, b: (f"What is {a} + {b}?", str(a + b))),
    "difference": (
        [(a, b) for a, b in pairs(range(2, 11), range(1, 7)) if b < a],
        lambda a, b: (f"What is {a} - {b}?", str(a - b)),
    ),
    "product": (pairs(range(2, 6), range(2, 6)), lambda a, b: (f"What is {a} times {b}?", str(a * b))),
    "more": (
        pairs(range(1, 7), range(1, 7)),
        lambda a, b: (f"{{name}} has {a} {{thing}} and gets {b} more. How many {{thing}} are there now?", str(a + b)),
    ),
    "fewer": (
        [(a, b) for a, b in pairs(range(3, 10), range(1, 6)) if b < a],
        lambda a, b: (f"{{name}} had {a} {{thing}} and gave {b} away. How many {{thing}} are left?", str(a - b)),
    ),
    "boxes": (
        pairs(range(2, 6), range(2, 6)),
        lambda a, b: (f"There are {a} boxes with {b} {{thing}} in each. How many {{thing}} is that?", str(a * b)),
    ),
    "three": (
        [(a, b, c) for a in range(1, 4) for b in range(1, 4) for c in range(1, 4)],
        lambda a, b, c: (f"What is {a} + {b} + {c}?", str(a + b + c)),
    ),
    "more and fewer": (
        [(a, b, c) for a in range(2, 6) for b in range(1, 4) for c in range(1, 3)],
        lambda a, b, c: (
            f"{{name}} has {a} {{thing}}, finds {b} and loses {c}. How many {{thing}} are there now?",
            str(a + b - c),
        ),
    ),
    "larger": (
        [(a, b) for a, b in pairs(range(1, 21), range(1, 21)) if a != b],
        lambda a, b: (f"Which number is larger, {a} or {b}?", str(max(a, b))),
    ),
    "smaller": (
        [(a, b) for a, b in pairs(range(1, 21), range(1, 21)) if a != b],
        lambda a, b: (f"Which number is smaller, {a} or {b}?", str(min(a, b))),
    ),
    "half": ([(n,) for n in range(2, 22, 2)], lambda n: (f"What is half of {n}?", str(n // 2))),
    "weeks": ([(n,) for n in range(1, 6)], lambda n: (f"How many days are there in {n} weeks?", str(7 * n))),
    "parts": (
        [(a, b, c) for c in range(3, 10) for a in range(1, c) for b in range(1, c - a)],
        lambda a, b, c: (f"What is \\frac{{{a}}}{{{c}}} + \\frac{{{b}}}{{{c}}}?", fraction(a + b, c)),
    ),
    "slices": (
        [(k, n) for n in range(3, 10) for k in range(1, n)],
        lambda k, n: (
            f"{{name}} cuts a cake into {n} equal slices and eats {k}. What fraction of the cake was eaten?",
            fraction(k, n),
        ),
    ),
}


def math_problems(seed: int = SEED) -> dict[str, list[MathProblem]]:
    """The problems of each split. Rules take turns, as long as they have numbers left."""
    draw = random.Random(seed)
    decks = {rule: draw.sample(numbers, len(numbers)) for rule, (numbers, _) in MATH_RULES.items()}
    dealt = deal(decks, sum(SPLITS.values()), draw)
    return split([math_problem(rule, numbers, draw) for rule, numbers in dealt], SPLITS)


def deal(decks: dict[str, list[Any]], count: int, draw: random.Random) -> list[tuple[str, Any]]:
    """So many of all, in a random order, as evenly over the decks as these allow."""
    rounds = max(len(deck) for deck in decks.values())
    in_turn = [(rule, deck[turn]) for turn in range(rounds) for rule, deck in decks.items() if turn < len(deck)]
    return draw.sample(in_turn[:count], count)


def split(problems: Sequence[Any], sizes: dict[str, int]) -> dict[str, list[Any]]:
    rest = iter(problems)
    return {name: [next(rest) for _ in range(size)] for name, size in sizes.items()}


# Programs


@dataclass(frozen=True)
class CodeProblem:
    problem: str
    solution: str
    """Python that solves it: the expected outputs are what it gives."""
    starter_code: str
    """What it begins with."""
    fn_name: str = ""
    inputs: tuple[Any, ...] = ()
    """Text for standard input, or lists of arguments."""

    @property
    def outputs(self) -> list[Any]:
        return [output_of(self, given) for given in self.inputs]


WORDS = ("apple", "banana", "cat", "letter", "moon", "paper", "river", "seven", "stone", "tree", "window", "yellow")
NUMBER_RULES = {
    "add": ("Print the number plus {k}.", "n + {k}", range(1, 25)),
    "subtract": ("Print the number minus {k}.", "n - {k}", range(1, 21)),
    "multiply": ("Print the number times {k}.", "n * {k}", range(2, 21)),
    "double and add": ("Print twice the number plus {k}.", "2 * n + {k}", range(1, 9)),
    "square and add": ("Print the square of the number plus {k}.", "n * n + {k}", range(1, 7)),
    "remainder": ("Print the remainder when the number is divided by {k}.", "n % {k}", range(2, 12)),
    "compare": ("Print True if the number is greater than {k}, otherwise print False.", "n > {k}", range(2, 21)),
}
"""What to do with a number n and a constant k."""
PAIR_RULES = (
    ("their sum", "a + b"),
    ("the first minus the second", "a - b"),
    ("their product", "a * b"),
    ("the larger one", "max(a, b)"),
    ("the smaller one", "min(a, b)"),
    ("True if they are equal, otherwise False", "a == b"),
    ("their sum plus 1", "a + b + 1"),
    ("twice their sum", "2 * (a + b)"),
    ("the sum of their squares", "a * a + b * b"),
    ("twice the first plus the second", "2 * a + b"),
    ("their product plus their sum", "a * b + a + b"),
    ("their product minus 1", "a * b - 1"),
)
LIST_RULES = (
    ("the sum", "sum(x)"),
    ("the largest number", "max(x)"),
    ("the smallest number", "min(x)"),
    ("how many numbers there are", "len(x)"),
    ("the first number", "x[0]"),
    ("the last number", "x[-1]"),
    ("the largest number minus the smallest", "max(x) - min(x)"),
    ("twice the sum", "2 * sum(x)"),
)
WORD_RULES = (
    *((f"Print the word {n} times in a row, without spaces.", f"s * {n}") for n in range(2, 11)),
    *((f"Print how many times the letter {c} is in the word.", f's.count("{c}")') for c in "abeilnoprstw"),
    *(
        (f"Print the word with {c} at its end.", f's + "{c}"')
        for c in ("!", "?", ".", "s", "y", "er", "ed", "ly", "ing")
    ),
    *((f"Print the word with {c} before it.", f'"{c}" + s') for c in ("#", "-", "x", "my", "un", "re", "pre", "the")),
    *((f"Print the word without its letters {c}.", f's.replace("{c}", "")') for c in "aelnot"),
    *((f"Print the first {n} letters of the word.", f"s[:{n}]") for n in (2, 3)),
    ("Print the word backwards.", "s[::-1]"),
    ("Print how many letters the word has.", "len(s)"),
    ("Print the word in capital letters.", "s.upper()"),
    ("Print the first letter of the word.", "s[0]"),
    ("Print the last letter of the word.", "s[-1]"),
)
INPUTS = {
    "number": ("Read one integer.", "n = int(input())"),
    "pair": ("Read two integers, each on its own line.", "a = int(input())\nb = int(input())"),
    "list": ("Read one line of integers that are separated by spaces.", "x = list(map(int, input().split()))"),
    "word": ("Read one word.", "s = input()"),
}
ARGUMENTS = {
    "number": ("n", "The function gets a number n."),
    "pair": ("a, b", "The function gets two numbers a and b."),
    "list": ("x", "The function gets a list x of numbers."),
    "word": ("s", "The function gets a word s."),
}


def code_problem(kind: str, task: str, expression: str, draw: random.Random) -> CodeProblem:
    """A problem that reads its input, or, one time in four, a function."""
    if draw.random() < 0.25:
        arguments, told = ARGUMENTS[kind]
        head = f"def solve({arguments}):"
        told = f"{told} {task}".replace("Print ", "Return ").replace("print ", "return ")
        problem = CodeProblem(told, f"{head}\n    return {expression}\n", head, "solve")
    else:
        told, program = INPUTS[kind]
        problem = CodeProblem(f"{told} {task}", f"{program}\nprint({expression})\n", starter_code=program)
    while len(set(map(str, problem.outputs))) < 2:  # which a program that knows the one output would pass
        cases = [arguments_of(kind, draw) for _ in range(TESTS_A_PROBLEM)]
        inputs = cases if problem.fn_name else [as_text(kind, case) for case in cases]
        problem = replace(problem, inputs=tuple(inputs))
    return problem


def arguments_of(kind: str, draw: random.Random) -> list[Any]:
    match kind:
        case "number":
            return [draw.randrange(40)]
        case "pair":
            first = draw.randrange(1, 20)
            return [first, draw.choice((first, draw.randrange(1, 20), draw.randrange(1, 20)))]
        case "list":
            return [draw.sample(range(1, 60), draw.randrange(2, 7))]
        case _:
            return [draw.choice(WORDS)]


def as_text(kind: str, arguments: list[Any]) -> str:
    """The same on standard input."""
    parts, separator = (arguments[0], " ") if kind == "list" else (arguments, "\n")
    return separator.join(map(str, parts)) + "\n"


def all_code_problems(draw: random.Random) -> Iterator[tuple[str, CodeProblem]]:
    """Every problem there is, with its rule."""
    for rule, (task, expression, constants) in NUMBER_RULES.items():
        for k in constants:
            yield rule, code_problem("number", task.format(k=k), expression.format(k=k), draw)
    for what, expression in PAIR_RULES:
        yield "pair", code_problem("pair", f"Print {what}.", expression, draw)
    for what, expression in LIST_RULES:
        yield "list", code_problem("list", f"Print {what}.", expression, draw)
    for task, expression in WORD_RULES:
        yield "word", code_problem("word", task, expression, draw)


def code_problems(seed: int = SEED) -> dict[str, list[CodeProblem]]:
    draw = random.Random(seed)
    decks: dict[str, list[CodeProblem]] = {}
    for rule, problem in all_code_problems(draw):
        decks.setdefault(rule, []).append(problem)
    shuffled = {rule: draw.sample(deck, len(deck)) for rule, deck in decks.items()}
    return split([problem for _, problem in deal(shuffled, sum(CODE_SPLITS.values()), draw)], CODE_SPLITS)


def output_of(problem: CodeProblem, given: Any) -> Any:
    """What the solution prints for this input, or returns for these arguments."""
    names: dict[str, Any] = {}
    if problem.fn_name:
        exec(problem.solution, names)
        return names[problem.fn_name](*given)
    lines = iter(given.splitlines())
    names["input"] = lambda: next(lines)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(problem.solution, names)
    return printed.getvalue()


# Files


def math_row(problem: MathProblem) -> dict[str, str]:
    return {"problem": problem.problem, "answer": problem.answer}


def code_row(problem: CodeProblem) -> dict[str, str]:
    """DeepCoder's layout, in the form of TACO and APPS."""
    tests: dict[str, Any] = {"inputs": problem.inputs, "outputs": problem.outputs}
    if problem.fn_name:
        tests["fn_name"] = problem.fn_name
    return {"problem": problem.problem, "starter_code": problem.starter_code, "tests": json.dumps(tests)}


def files(seed: int = SEED) -> dict[str, str]:
    """The text of every file, by its name."""
    made = {f"math{name}.jsonl": map(math_row, problems) for name, problems in math_problems(seed).items()}
    made |= {f"code{name}.jsonl": map(code_row, problems) for name, problems in code_problems(seed).items()}
    return {name: "".join(f"{json.dumps(row)}\n" for row in rows) for name, rows in made.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the folder of the files")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (output / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
