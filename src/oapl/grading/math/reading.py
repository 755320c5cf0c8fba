r"""What an answer is made of: a value, words, a list, a tuple or interval, an equation, a matrix.

Structure is read from the tokens here, each part on its own; what stands in a part is a value of `expressions`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import sympy

from oapl.grading.math.equality import are_equal
from oapl.grading.math.expressions import DECORATIONS, GREEK, read_expression
from oapl.grading.math.latex import FUNCTIONS, Unreadable, closing_place, depth, split, tokenize
from oapl.grading.math.units import MULTIPLIERS, known_unit


@dataclass(frozen=True)
class Value:
    """`5`, `\\frac{x}{2}`, `5 \\text{ cm}`."""

    expression: sympy.Expr
    unit: str | None = None


@dataclass(frozen=True)
class Words:
    """`\\text{Evelyn}`, `\\text{(C)}`, `east`: compared without case, brackets and article."""

    text: str


@dataclass(frozen=True)
class Numeral:
    """`2516_8`: the digits in their base, since a number alone would not be what was asked for."""

    digits: str
    base: int


@dataclass(frozen=True)
class Group:
    """Several answers. `{}`: in any order, a set, list or union; `()`, `[]`, `(]`, `[)`: a tuple, point or interval."""

    brackets: str
    items: tuple[Answer, ...]


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True)
class Named:
    """`x = 5`, `f(x) = 2x`, `x \\in [1, 2]`, `-2 < x < 7`: the name may be left out."""

    name: str
    answer: Answer


@dataclass(frozen=True)
class Relation:
    """`2x + y = 3`, `x + y \\le 1`: `difference` is the left side less the right one."""

    sign: str
    difference: sympy.Expr


Answer: TypeAlias = Value | Words | Numeral | Group | Matrix | Named | Relation

DEEPEST = 40
"""Brackets within brackets: reading calls itself for each."""
AND, OR = r"\text{and}", r"\text{or}"
SEPARATORS = frozenset([",", ";", AND, OR])
SIGNS = frozenset(["=", "<", ">", r"\le", r"\ge", r"\ne"])
TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
CONNECTIVE = re.compile(r"\\text\{,?\s*(and|or)\s*,?\}")
_LETTER = rf"(?:[A-Za-z]|\\(?:{'|'.join(sorted(GREEK, key=len, reverse=True))})|\\mathbb\{{[A-Z]\}})"
_DECORATED = rf"(?:{'|'.join(re.escape(name) for name in sorted(DECORATIONS))})(?:\{{[A-Za-z]+\}}|[A-Za-z])"
_PARTS = rf"(?:{_LETTER}|{_DECORATED}|\\text\{{[^{{}}]*\}}|_(?:\{{[^{{}}]*\}}|\w)|')+"
NAME = re.compile(rf"m?(?:\\angle|\\triangle)?{_PARTS}(?:\([^()=<>]*\))?")
TUPLE_OF_NAMES = re.compile(r"\([A-Za-z](?:,[A-Za-z])+\)")


def read(text: str) -> Answer:
    """Raises Unreadable."""
    if (words := _bare_words(text)) is not None:
        return Words(words)
    tokens = [CONNECTIVE.sub(r"\\text{\1}", token) for token in tokenize(text)]
    while tokens and tokens[-1] in (".", ","):
        tokens.pop()
    while tokens[:1] == ["{"] and closing_place(tokens) == len(tokens) - 1:  # such as a box within the box leaves
        tokens = tokens[1:-1]
    if not tokens:
        raise Unreadable("empty")
    if depth(tokens) > DEEPEST:
        raise Unreadable(f"brackets more than {DEEPEST} deep")
    return _list(tokens)


def _bare_words(text: str) -> str | None:
    """`B)`, `east` or `no solution`, which look like products of letters: three at least, and a word among them."""
    text = text.strip().rstrip(".")
    if re.fullmatch(r"[A-Z]\)", text):  # a choice
        return text[0]
    pieces = text.replace("-", " ").split()
    if sum(map(len, pieces)) < 3 or not all(re.fullmatch(r"[A-Za-z]+'?[a-z]*", piece) for piece in pieces):
        return None
    if FUNCTIONS.union(["pi", "sqrt", "infty"]).intersection(pieces):
        return None
    if all(len(piece) == 1 or piece in ("and", "or") for piece in pieces):
        return None
    return text


def _list(tokens: list[str]) -> Answer:
    parts, separators = split(tokens, SEPARATORS)
    if len(parts) == 1:
        return _one_or_two(parts[0])
    return _collection(_one_or_two(part) for part in _without_gaps(parts, separators))


def _without_gaps(parts: list[list[str]], separators: list[str]) -> Iterable[list[str]]:
    """The parts, without the empty one between the comma and the `and` of `1, 2, and 3`."""
    for place, part in enumerate(parts):
        if part or not (0 < place < len(separators) and separators[place] in (AND, OR)):
            yield part


def _collection(items: Iterable[Answer]) -> Group:
    """Items in any order; an item that is two, as `\\pm 2` is, counts as two."""
    flat: list[Answer] = []
    for item in items:
        flat += item.items if isinstance(item, Group) and item.brackets == "{}" else [item]
    return Group("{}", tuple(flat))


def _one_or_two(tokens: list[str]) -> Answer:
    r"""Two where there is a `\pm`; several in one answer all have the same sign, and `\mp` has the other."""
    if not {r"\pm", r"\mp"}.intersection(tokens) or _is_set(tokens):
        return _one(tokens)
    plus, minus = {r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"}
    both = [_one([signs.get(token, token) for token in tokens]) for signs in (plus, minus)]
    if all(isinstance(answer, Named) for answer in both):
        named = [answer for answer in both if isinstance(answer, Named)]
        return Named(named[0].name, _collection(answer.answer for answer in named))
    return _collection(both)


def _is_set(tokens: list[str]) -> bool:
    return tokens[0] == r"\{" and closing_place(tokens) == len(tokens) - 1


def _one(tokens: list[str]) -> Answer:
    if not tokens:
        raise Unreadable("nothing where an answer is expected")
    left, _ = split(tokens, frozenset([r"\approx"]))
    if len(left) == 2 and all(left):  # what it nearly is, is no answer, unless it is all that there is
        return _one(left[1] if _name(left[0]) else left[0])
    left, _ = split(tokens, frozenset([r"\in"]))
    if len(left) == 2 and (name := _name(left[0])):
        return Named(name, _one_or_two(left[1]))
    sides, signs = split(tokens, SIGNS)
    if signs:
        return _relation(sides, signs)
    parts, _ = split(tokens, frozenset([r"\cup"]))
    if len(parts) > 1:
        return _collection(_one(part) for part in parts)
    if all(token.startswith(r"\text{") for token in tokens):
        return _words(" ".join(token[6:-1] for token in tokens))
    if tokens[0].startswith(r"\begin") and tokens[-1] == tokens[0].replace(r"\begin", r"\end"):
        return _matrix(tokens)
    if tokens[0] in ("(", "[", r"\{") and closing_place(tokens) == len(tokens) - 1:
        return _bracketed(tokens)
    if tokens == [r"\emptyset"]:
        return Group("{}", ())
    return _numeral(tokens) or _value(tokens)


def _words(text: str) -> Answer:
    return read(text) if re.match(r"[-.$\d]", text) else Words(text)


def _name(tokens: list[str]) -> str:
    """The tokens as a name, such as `x`, `f(x)`, `\\angle ABC` or `(x,y)`; empty where they are none."""
    text = "".join(tokens)
    return text if NAME.fullmatch(text) or TUPLE_OF_NAMES.fullmatch(text) else ""


def _relation(sides: list[list[str]], signs: list[str]) -> Answer:
    names = [_name(side) for side in sides]
    if all(sign == "=" for sign in signs):
        if names[0] and names[0] not in ("e", "i"):
            return Named(names[0], _all_the_same(sides[1:]))
        if len(sides) == 2 and names[1] and names[1] not in ("e", "i"):
            return Named(names[1], _one_or_two(sides[0]))
    turned = [TURNED[sign] for sign in signs]
    if len(sides) == 2 and bool(names[0]) != bool(names[1]) and signs[0] not in ("=", r"\ne"):
        sign, bound = (signs[0], sides[1]) if names[0] else (turned[0], sides[0])
        return Named(names[0] or names[1], _half_line(sign, _one(bound)))
    if len(sides) == 3 and names[1] and set(signs) <= {"<", r"\le"}:
        return Named(names[1], _interval(_one(sides[0]), signs, _one(sides[2])))
    if len(sides) == 3 and names[1] and set(signs) <= {">", r"\ge"}:
        return Named(names[1], _interval(_one(sides[2]), turned[::-1], _one(sides[0])))
    values = [read_expression(side) for side in sides]
    if all(value.is_number for value in values) and set(signs) == {"="}:
        return _all_the_same(sides)
    if len(sides) > 2:
        raise Unreadable("several relations in a row")
    if signs[0] in (">", r"\ge"):
        return Relation(turned[0], values[1] - values[0])
    return Relation(signs[0], values[0] - values[1])


def _all_the_same(sides: list[list[str]]) -> Answer:
    """`x = 2 + 3 = 5` says 5; what says that two different values are equal says nothing."""
    answers = [_one_or_two(side) for side in sides]
    for answer in answers[1:]:
        first = answers[0]
        if not (isinstance(first, Value) and isinstance(answer, Value)):
            raise Unreadable("several equations in a row")
        if not are_equal(first.expression, answer.expression):
            raise Unreadable("an equation that is false")
    return answers[-1]


def _half_line(sign: str, bound: Answer) -> Group:
    if sign in ("<", r"\le"):
        return _interval(Value(-sympy.oo), ["<", sign], bound)
    return _interval(bound, [TURNED[sign], "<"], Value(sympy.oo))


def _interval(low: Answer, signs: list[str], high: Answer) -> Group:
    return Group(("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]"), (low, high))


def _bracketed(tokens: list[str]) -> Answer:
    brackets = (tokens[0] + tokens[-1]).replace("\\", "")
    inner = tokens[1:-1]
    if brackets == "{}":
        if not inner:
            return Group("{}", ())
        return _collection(_one_or_two(part) for part in split(inner, SEPARATORS)[0])
    if brackets not in ("()", "[]", "(]", "[)"):
        raise Unreadable("brackets that do not match")
    parts, _ = split(inner, frozenset([",", ";"]))
    if len(parts) > 1:
        return Group(brackets, tuple(_one_or_two(part) for part in parts))
    if brackets in ("(]", "[)"):
        raise Unreadable("brackets that do not match")
    return _one_or_two(inner)


def _matrix(tokens: list[str]) -> Answer:
    kind = tokens[0].partition("{")[2]
    inner = tokens[1:-1]
    if kind == "array}" and inner[:1] == ["{"]:
        inner = inner[inner.index("}") + 1 :]  # the alignment of its columns
    elif not kind.endswith("matrix}") or kind == "vmatrix}":
        raise Unreadable(f"`{tokens[0]}` is not understood")
    lines, _ = split(inner, frozenset([r"\\"]))
    rows = tuple(tuple(_one(cell) for cell in split(line, frozenset("&"))[0]) for line in lines if line)
    if len({len(row) for row in rows}) != 1:
        raise Unreadable("a matrix whose rows differ in length")
    if len(rows[0]) == 1 and len(rows) > 1:
        return Group("()", tuple(row[0] for row in rows))  # a column is a vector, as (1, 2) is
    return Matrix(rows)


def _numeral(tokens: list[str]) -> Answer | None:
    """`2516_8`, `2516_{8}`, `1A_{16}`; in base ten it is a number like any other."""
    match = re.fullmatch(r"([0-9A-Z]+)_\{?(\d+)\}?", "".join(tokens).replace(r"\text", "").replace(" ", ""))
    if match is None or not tokens[0].isdigit() or tokens[1].isdigit():
        return None
    digits, base = match.group(1), int(match.group(2))
    return Value(sympy.Integer(digits)) if base == 10 and digits.isdigit() else Numeral(digits.lstrip("0"), base)


def _value(tokens: list[str]) -> Value:
    tokens, factor, unit = _without_unit(tokens)
    parts, _ = split(tokens, frozenset([":"]))
    if len(parts) == 2:
        tokens = ["(", *parts[0], ")", "/", "(", *parts[1], ")"]  # the ratio 3 : 2
    return Value(factor * read_expression(tokens), unit)


UNIT = re.compile(r"(?:\\text\{[^{}]*\}(?:\^(?:\d|\{-?\d\}))?|\\cdot|/|\.)+")
DEGREES = ["^", r"\circ"], ["^", "{", r"\circ", "}"]


def _without_unit(tokens: list[str]) -> tuple[list[str], int, str | None]:
    """The value's tokens, what `million` and the like multiply it by, and the unit where it is a known one."""
    if r"\dollar" in tokens:
        tokens, factor, _ = _without_unit([token for token in tokens if token != r"\dollar"])
        return tokens, factor, "dollar"
    if tokens and tokens[-1] == r"\%":
        return tokens[:-1], 1, "percent"
    for degrees in DEGREES:
        if tokens[-len(degrees) :] == degrees and not FUNCTIONS.intersection(token[1:] for token in tokens):
            return tokens[: -len(degrees)], 1, "degree"
    start = next((place for place, token in enumerate(tokens) if token.startswith(r"\text{")), len(tokens))
    if start == len(tokens):
        return tokens, 1, None
    value, unit = tokens[:start], "".join(tokens[start:])
    if not UNIT.fullmatch(unit) or AND in tokens or OR in tokens:
        raise Unreadable("words within a formula")
    words = " ".join(re.findall(r"\\text\{([^{}]*)\}", unit)).split()
    factor = MULTIPLIERS.get(words[0].lower(), 1)
    if factor > 1:
        return value, factor, known_unit(" ".join(words[1:]))
    exponent = re.search(r"\d", unit)
    known = None if "/" in unit else known_unit(" ".join(words), int(exponent.group()) if exponent else 1)
    value, factor, degrees_before = _without_unit(value)  # such as the degrees of 20^\circ \text{C}
    return value, factor, known or degrees_before
