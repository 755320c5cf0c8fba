r"""What an answer is made of: a value, words, a list, a tuple or interval, an equation, a matrix.

Structure is read from the tokens here, each part on its own; what stands in a part is a value of `expressions`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeAlias

import sympy

from oapl.grading.math.equality import are_equal
from oapl.grading.math.expressions import DECORATIONS, GREEK, read_expression
from oapl.grading.math.latex import FUNCTIONS, Unreadable, closing_place, depth, split, tokenize
from oapl.grading.math.units import MULTIPLIERS, is_like_a_unit, known_unit


@dataclass(frozen=True)
class Value:
    """`5`, `\\frac{x}{2}`, `5 \\text{ cm}`."""

    expression: sympy.Expr
    unit: str | None = None
    time: tuple[int, int] | None = None
    """What `4:30` says, were it no ratio but a time; `4` is four o'clock."""


@dataclass(frozen=True)
class Clock:
    """`4:30 \\text{ p.m.}`, which is no ratio."""

    hour: int
    minute: int
    half: str | None


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
    """`2x + y = 3`, `x + y \\le 1`: `difference` is the left side less the right one.

    `stated` is the value of `m + n = 42`, which may answer what m + n is; the one of `2x = 5` is no such value.
    """

    sign: str
    difference: sympy.Expr
    stated: Value | None = None


@dataclass(frozen=True)
class Choice:
    """`\\textbf{(B) } 12`: a letter, and what stands beside it."""

    letter: str
    answer: Answer


Answer: TypeAlias = Value | Clock | Words | Numeral | Group | Matrix | Named | Relation | Choice

DEEPEST = 40
"""Brackets within brackets: reading calls itself for each."""
AND, OR = r"\text{and}", r"\text{or}"
SIGNED = frozenset([r"\pm", r"\mp"])
SEPARATORS = frozenset([",", ";", AND, OR])
SIGNS = frozenset(["=", "<", ">", r"\le", r"\ge", r"\ne"])
TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
CONNECTIVE = re.compile(r"\\text\{,?\s*(and|or)\s*,?\}")
_LETTER = rf"(?:[A-Za-z]|\\(?:{'|'.join(sorted(GREEK, key=len, reverse=True))})|\\mathbb\{{[A-Z]\}})"
_DECORATED = rf"(?:{'|'.join(re.escape(name) for name in sorted(DECORATIONS))})(?:\{{[A-Za-z]+\}}|[A-Za-z])"
_TEXT = r"\\text\{[^{}]*\}"
_MARKS = r"(?:_(?:\{[^{}]*\}|\w)|')*"
_CAPITALS = rf"(?:[A-Z]{_MARKS}){{2,}}"
_SINGLE = rf"(?:{_LETTER}|{_DECORATED}){_MARKS}"
_BEFORE = rf"(?:m\\angle|\\(?:sin|cos|tan|cot|sec|csc)\\angle|\\det|\\deg|(?:{_TEXT})?(?:\\angle|\\triangle)?)"
NAME = re.compile(rf"{_BEFORE}(?:{_CAPITALS}|{_SINGLE}|(?:{_TEXT}{_MARKS})+)")
"""`x`, `x_1`, `AB`, `\\angle ABC`, `\\text{Area}`. No product, as `xy` is: `xy = 6` does not say what xy is called."""
_GREEK = rf"\\(?:{'|'.join(sorted(GREEK, key=len, reverse=True))})"
_CALLED = rf"(?:[fghpqrsuvwA-Z]|\\det|\\deg|{_GREEK}|{_TEXT}){_MARKS}(?:\^\{{?-1\}}?)?"
CALL = re.compile(rf"({_CALLED})(?:\(([^()<>]*)\)|\[([^\[\]<>]*)\])")
"""`f(x)`, `f^{-1}(2)`, `P(X=2)`, `E[X]`. `x(x+1)` is a product."""
FUNCTION_OF_ONE = re.compile(r"([a-z])\(([ntx])\)")
"""`a(n)`, `y(x)`."""
SIZE = re.compile(r"\|(?:[A-Z]|\\cup|\\cap|\\vec\{[A-Za-z]+\})+\||\[[A-Z]{3,}\]")
"""The number of a set's elements, the length of a segment or vector, and the area `[ABC]`."""
TUPLE_OF_NAMES = re.compile(rf"\({_LETTER}(?:,{_LETTER})+\)")
CHOICE = re.compile(r"(?:\(([A-E])\)|([A-E])[.)])\s*(\S.*)?", re.DOTALL)
ANOTHER_CHOICE = re.compile(r"\([A-E]\)|(?:^|[,;/]|or|and)[A-E][.)]?(?=$|[,;/]|or|and)")
"""Beside a first one: who names two has made none."""
REALS = frozenset(["all real numbers", "all reals", "the real numbers", "all real x", "all real values"])
ALL_REALS = Group("()", (Value(-sympy.oo), Value(sympy.oo)))
DOMAIN = re.compile(r"([A-Za-z])\\in\\mathbb\{[NZRQC]\}")
CONDITION = re.compile(
    r"(?:\\text\{(?:for|where|all|any|every|real|positive|integers?|numbers?| )+\})+"
    r"(?:[A-Za-z](?:(?:\\ge|>|\\in)(?:\d+|\\mathbb\{[NZRQC]\}))?)?"
)
"""`\\text{ for all } x`, `\\text{ for } n \\ge 1`."""


def read(text: str) -> Answer:
    """Raises Unreadable."""
    if (words := _bare_words(text)) is not None:
        return _words(words)
    bold = re.fullmatch(r"\s*\*\*([^*]*)\*\*\s*", text)
    text = bold.group(1) if bold else text
    tokens = [CONNECTIVE.sub(r"\\text{\1}", token) for token in tokenize(text)]
    while tokens and tokens[-1] in (".", ","):
        tokens.pop()
    if tokens[:1] == ["="]:
        tokens = tokens[1:]
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
    if (choice := _choice(tokens)) is not None:
        return choice
    tokens = _without_condition(tokens)
    parts, separators = split(tokens, SEPARATORS)
    if len(parts) == 1:
        return _one_or_two(parts[0])
    parts = list(_without_gaps(parts, separators))
    domain = DOMAIN.fullmatch("".join(parts[-1]))
    if domain and all(domain.group(1) in part for part in parts[:-1]):  # k\pi, k \in \mathbb{Z}
        parts = parts[:-1]
        return _collection(parts) if len(parts) > 1 else _one_or_two(parts[0])
    if separators == [AND] and (both := _intersection(*map(_one_or_two, parts))) is not None:
        return both
    return _collection(parts)


def _choice(tokens: list[str]) -> Answer | None:
    r"""`\textbf{(B) } 12`, `(B)\ 12` and `B. 12`. `(B)x` and `(B)(C)` are products."""
    if not tokens:
        return None
    if tokens[0].startswith(r"\text{") and len(tokens) > 1:
        match = CHOICE.fullmatch(tokens[0][6:-1])
        if match and not match.group(3):
            return _chosen(match.group(1) or match.group(2), "".join(tokens[1:]), _list(tokens[1:]))
    match = re.match(r"(?:\(([A-E])\)|([A-E])\.)(?:\d|\\frac|\\dollar)", "".join(tokens[:4]))
    if match:
        beside = tokens[3:] if match.group(1) else tokens[2:]
        return _chosen(match.group(1) or match.group(2), "".join(beside), _list(beside))
    return None


def _chosen(letter: str, beside: str, answer: Answer) -> Choice:
    if ANOTHER_CHOICE.search(re.sub(r"\\text|[{}\s]", "", beside)):
        raise Unreadable("more than one choice")
    return Choice(letter, answer)


def _without_condition(tokens: list[str]) -> list[str]:
    r"""A formula without its `\text{ for all } x`. A number with a condition is one case of several: it stays."""
    place = next((i for i, token in enumerate(tokens) if re.match(r"\\text\{(?:for|where)\b", token)), None)
    if not place or not any(re.fullmatch("[A-Za-z]", token) for token in tokens[:place]):
        return tokens
    return tokens[:place] if CONDITION.fullmatch("".join(tokens[place:])) else tokens


def _intersection(one: Answer, other: Answer) -> Answer | None:
    r"""`x \ge 1` and `x \le 3`: what lies between."""
    if not (isinstance(one, Named) and isinstance(other, Named) and one.name == other.name):
        return None
    lines = [each.answer for each in (one, other) if isinstance(each.answer, Group) and len(each.answer.items) == 2]
    above = [line for line in lines if line.items[1] == Value(sympy.oo)]
    below = [line for line in lines if line.items[0] == Value(-sympy.oo)]
    if len(above) != 1 or len(below) != 1:
        return None
    brackets = above[0].brackets[0] + below[0].brackets[1]
    return Named(one.name, Group(brackets, (above[0].items[0], below[0].items[1])))


def _without_gaps(parts: list[list[str]], separators: list[str]) -> Iterable[list[str]]:
    """The parts, without the empty one between the comma and the `and` of `1, 2, and 3`."""
    for place, part in enumerate(parts):
        if part or not (0 < place < len(separators) and separators[place] in (AND, OR)):
            yield part


def _collection(parts: Iterable[list[str]]) -> Group:
    """Items in any order; an item that is two, as `\\pm 2` is, counts as two. A set within a set is one item."""
    flat: list[Answer] = []
    for part in parts:
        item = _one_or_two(part)
        is_two = isinstance(item, Group) and SIGNED.intersection(part) and not _is_set(part)
        flat += item.items if isinstance(item, Group) and (is_two or _is_union(part)) else [item]
    return Group("{}", tuple(flat))


def _is_union(tokens: list[str]) -> bool:
    return len(split(tokens, frozenset([r"\cup"]))[0]) > 1


def _union(parts: Iterable[Answer]) -> Group:
    """Of sets and intervals: the elements of the sets, and the intervals."""
    flat: list[Answer] = []
    for part in parts:
        flat += part.items if isinstance(part, Group) and part.brackets == "{}" else [part]
    return Group("{}", tuple(flat))


def _one_or_two(tokens: list[str]) -> Answer:
    r"""Two where there is a `\pm`; several in one answer all have the same sign, and `\mp` has the other."""
    if not SIGNED.intersection(tokens) or _is_set(tokens):
        return _one(tokens)
    if (points := _independent_signs(tokens)) is not None:
        return points
    plus, minus = {r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"}
    both = [_one([signs.get(token, token) for token in tokens]) for signs in (plus, minus)]
    if all(isinstance(answer, Named) for answer in both):
        named = [answer for answer in both if isinstance(answer, Named)]
        return Named(named[0].name, _union(answer.answer for answer in named))
    return _union(both)


def _independent_signs(tokens: list[str]) -> Group | None:
    r"""`(\pm 1, \pm 2)` is four points: each coordinate has a sign of its own. With a `\mp` they have one."""
    if tokens[0] != "(" or closing_place(tokens) != len(tokens) - 1 or r"\mp" in tokens:
        return None
    parts, _ = split(tokens[1:-1], frozenset([",", ";"]))
    if sum(r"\pm" in part for part in parts) < 2 or len(parts) > 3 or not all(parts):
        return None
    choices = [[_one(_with_sign(part, sign)) for sign in ("+-" if r"\pm" in part else "+")] for part in parts]
    return Group("{}", tuple(Group("()", point) for point in product(*choices)))


def _with_sign(tokens: list[str], sign: str) -> list[str]:
    return [sign if token == r"\pm" else token for token in tokens]


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
        return _union(_one(part) for part in parts)
    if tokens == [r"\mathbb{R}"]:
        return ALL_REALS
    if all(token.startswith(r"\text{") for token in tokens):
        return _words(" ".join(token[6:-1] for token in tokens))
    if tokens[0].startswith(r"\begin") and tokens[-1] == tokens[0].replace(r"\begin", r"\end"):
        return _matrix(tokens)
    if tokens[0] in ("(", "[", r"\{") and closing_place(tokens) == len(tokens) - 1:
        return _bracketed(tokens)
    if tokens == [r"\emptyset"]:
        return Group("{}", ())
    return _numeral(tokens) or _clock(tokens) or _point(tokens) or _value(tokens)


def _words(text: str) -> Answer:
    text = " ".join(text.split())
    choice = CHOICE.fullmatch(text)
    if choice and choice.group(3) and re.match(r"[-.$\d]", choice.group(3)):
        return _chosen(choice.group(1) or choice.group(2), choice.group(3), read(choice.group(3)))
    if re.match(r"[-.$\d]|\(.*\d|[A-Za-z] ?= ?[-.$\d]", text):
        return read(text)
    if text.casefold().rstrip(".") in REALS:
        return ALL_REALS
    names = re.split(r", and |, | and ", text)
    if len(names) > 1 and all(re.fullmatch(r"[A-Za-z]+(?: [A-Za-z]+)?", name) for name in names):
        return Group("{}", tuple(map(Words, names)))
    return Words(text)


def _name(tokens: list[str]) -> str:
    """The tokens as a name, such as `x`, `f(x)`, `\\angle ABC` or `(x,y)`; empty where they are none."""
    text = "".join(tokens)
    if NAME.fullmatch(text) or SIZE.fullmatch(text) or TUPLE_OF_NAMES.fullmatch(text):
        return text
    if (call := FUNCTION_OF_ONE.fullmatch(text)) and call.group(1) != call.group(2):
        return text
    call = CALL.fullmatch(text)
    if call is None:
        return ""
    head, inner = call.group(1), call.group(2) or call.group(3) or ""
    is_function = head[0] in "fghFGPE" or not {"+", "-"}.intersection(inner)  # p(q+1) is a product
    return text if inner and is_function and (head not in inner or len(inner) == 1) else ""


def _point(tokens: list[str]) -> Named | None:
    """`A(2, -3)`: a point with its name."""
    if not re.fullmatch("[A-Z]", tokens[0]) or tokens[1:2] != ["("] or closing_place(tokens, 1) != len(tokens) - 1:
        return None
    point = _bracketed(tokens[1:]) if "," in tokens else None
    return Named(tokens[0], point) if isinstance(point, Group) and point.brackets == "()" else None


def _relation(sides: list[list[str]], signs: list[str]) -> Answer:
    names = [_name(side) for side in sides]
    if all(sign == "=" for sign in signs):
        if names[0]:
            if len(sides) > 2 and all(names[1:-1]):  # x = y = 2
                value = _one_or_two(sides[-1])
                return Group("{}", tuple(_named(name, value) for name in names[:-1]))
            return _named(names[0], _all_the_same(sides[1:]))
        if len(sides) == 2 and names[1]:
            return _named(names[1], _one_or_two(sides[0]))
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
    return Relation(signs[0], values[0] - values[1], _stated(*values) if signs[0] == "=" else None)


def _stated(left: sympy.Expr, right: sympy.Expr) -> Value | None:
    """What an equation says that something is, such as m + n or the tangent of an angle, which it cannot determine."""
    if left.is_number:
        left, right = right, left
    letters = [str(symbol) for symbol in left.free_symbols]
    is_of_angle = len(letters) == 1 and left.is_Function and (letters[0] in GREEK or letters[0].isupper())
    return Value(right) if right.is_number and (len(letters) > 1 or is_of_angle) else None


FAMILIES = ("abcdefgh", "mn", "pqrst", "uvw", "xyz", "ABCD", "XYZ")
"""Letters whose order is that of the alphabet wherever they are coordinates. It is not certain of m and b."""


def in_order(names: Sequence[str]) -> list[int] | None:
    """The places of the names in the order that is certain; None where there is none."""
    if len(set(names)) != len(names):
        return None
    bases = {name.partition("_")[0] for name in names}
    is_family = any(bases <= set(family) for family in FAMILIES) and len(bases) == len(names)
    is_numbered = len(bases) == 1 and all(re.fullmatch(r".*_\{?\d\}?", name) for name in names)
    if is_family or is_numbered or list(names) == sorted(names):
        return sorted(range(len(names)), key=lambda place: names[place])
    return None


def _named(name: str, answer: Answer) -> Named:
    """Of a tuple of names, in the order of the alphabet: `(b, a) = (3, 2)` says (a, b) = (2, 3)."""
    if TUPLE_OF_NAMES.fullmatch(name) and isinstance(answer, Group) and answer.brackets == "()":
        names = name[1:-1].split(",")
        places = in_order(names)
        if len(names) != len(answer.items):
            raise Unreadable("a tuple of another length than its names")
        if places is not None:
            name = f"({','.join(names[place] for place in places)})"
            answer = Group("()", tuple(answer.items[place] for place in places))
    return Named(name, answer)


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
        return _collection(split(inner, SEPARATORS)[0])
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
    """`2516_8`, `2516_{8}`, `(2516)_8`, `A1_{16}`; in base ten it is a number like any other."""
    match = re.fullmatch(r"(\()?([0-9A-Z]+)(?(1)\))_\{?(\d+)\}?", "".join(tokens).replace(r"\text", ""))
    if match is None or any(one.isdigit() and other.isdigit() for one, other in pairwise(tokens)):
        return None
    digits, base = match.group(2), int(match.group(3))
    if not digits[0].isdigit() and (len(digits) == 1 or int(max(digits), 36) >= base):  # such as the segment AB_1
        return None
    return Value(sympy.Integer(digits)) if base == 10 and digits.isdigit() else Numeral(digits.lstrip("0"), base)


def _clock(tokens: list[str]) -> Clock | None:
    """With a.m. or p.m.; or two digits with a zero before them, as no ratio has. `4:30` alone is a ratio."""
    match = re.fullmatch(r"(\d{1,2})(?::([0-5]\d))?(?:\\text\{([ap]m)\})?", "".join(tokens).replace(".", "").lower())
    if match is None or not (match.group(3) or (match.group(2) or "").startswith("0")):
        return None
    hour, minute, half = int(match.group(1)), int(match.group(2) or 0), match.group(3)
    if hour > 24 or (half and not 1 <= hour <= 12):
        raise Unreadable("no time of the day")
    return Clock(hour, minute, half)


def _value(tokens: list[str]) -> Value:
    tokens, factor, unit = _without_unit(tokens)
    parts, _ = split(tokens, frozenset([":"]))
    if len(parts) == 2:
        tokens = ["(", *parts[0], ")", "/", "(", *parts[1], ")"]  # the ratio 3 : 2
    time = re.fullmatch(r"(\d{1,2})(?:\)/\((\d\d))?", "".join(tokens).strip("()"))
    clock = (int(time.group(1)), int(time.group(2) or 0)) if time else None
    return Value(factor * read_expression(tokens), unit, clock)


UNIT = re.compile(r"(?:\\text\{[^{}]*\}(?:\^(?:\d|\{-?\d\}))?|\\cdot|/|\.)+")
SCALES = ("C", "F")
"""Of temperature."""
DEGREES = ["^", r"\circ"]
CURRENCIES = {r"\dollar": "dollar", "¢": "cent", "€": "euro", "£": "lb", "¥": "yen", "₹": "rupee"}
"""Their signs, and the units that their names are read as: a pound is one of either kind."""


def _without_unit(tokens: list[str]) -> tuple[list[str], int, str | None]:
    """The value's tokens, what `million` and the like multiply it by, and the unit where it is a known one."""
    if len(currencies := {*CURRENCIES}.intersection(tokens)) == 1:
        tokens, factor, _ = _without_unit([token for token in tokens if token not in currencies])
        return tokens, factor, CURRENCIES[currencies.pop()]
    if tokens and tokens[-1] == r"\%":
        return tokens[:-1], 1, "percent"
    if r"\circ" in tokens[-3:-1] and tokens[-1] in (*SCALES, *(rf"\text{{{scale}}}" for scale in SCALES)):
        tokens = tokens[:-1]  # 50^\circ F
    if tokens[-2:] == DEGREES and not FUNCTIONS.intersection(token[1:] for token in tokens):
        return tokens[:-2], 1, "degree"
    if re.fullmatch(r".*\d\^\{?\\text\{(?:st|nd|rd|th)\}\}?", "".join(tokens)):
        return tokens[: -4 if tokens[-1] == "}" else -2], 1, None  # 7^{\text{th}}
    start = next((place for place, token in enumerate(tokens) if token.startswith(r"\text{")), len(tokens))
    if start == len(tokens):
        return tokens, 1, None
    value, unit = tokens[:start], "".join(tokens[start:])
    if not UNIT.fullmatch(unit) or AND in tokens or OR in tokens:
        raise Unreadable("words within a formula")
    words = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", unit).replace(r"\cdot", " ").strip()
    first, _, others = words.partition(" ")
    factor = MULTIPLIERS.get(first.lower(), 1)
    if factor > 1:
        return value, factor, _unit_named(others) if others.strip() else None
    known = _unit_named(words)
    value, factor, degrees_before = _without_unit(value)  # such as the degrees of 20^\circ \text{C}
    return value, factor, known or degrees_before


def _unit_named(words: str) -> str | None:
    """Raises Unreadable where words say more than a unit: `5 \\text{ or 6}` is not 5."""
    known = known_unit(words)
    if known is None and not is_like_a_unit(words):
        raise Unreadable(f"words that may change the value: {words.strip()}")
    return known
