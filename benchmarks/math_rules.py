r"""Answers made from a gold answer by rule: rewritings that say the same, and near misses that do not.

Each rule takes a gold answer as text and gives other texts, none where it does not apply. The rules know strings and
Python's fractions alone, so that they cannot share a mistake with a grader.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

Rule = Callable[[str], list[str]]

INTEGER = re.compile(r"-?\d+")
DECIMAL = re.compile(r"-?\d*\.\d+")
FRACTION = re.compile(r"(-?)\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
SURD = re.compile(r"(\d*)\s*\\sqrt\{(\d+)\}")
TUPLE = re.compile(r"(?:\\left)?\s*([(\[])(.*?),(.*?)(?:\\right)?\s*([)\]])")
WORD = re.compile(r"\\text\{\(?([A-Za-z]+)\)?\}")
LINE = re.compile(r"y\s*=\s*(.+)")
NO_SCALAR = ("\\text", "\\mbox", "=", "\\in", "\\cup", "_", "\\pm", "\\begin", "%", "$", "\\circ", ",", "\\{")


def is_scalar(gold: str) -> bool:
    """Whether it is one value without a unit, so that it may stand in a sum."""
    return not any(sign in gold for sign in NO_SCALAR)


def is_list(gold: str) -> bool:
    """Whether it is several values with commas between them, and nothing around them."""
    return (
        "," in gold
        and not any(sign in gold for sign in ("(", "[", "\\{", "\\!", "$", "begin"))
        and not is_grouped(gold)
    )


def is_grouped(gold: str) -> bool:
    """`58,500`: one number."""
    return re.fullmatch(r"\d{1,3}(,\d{3})+", gold) is not None


def fraction_in(gold: str) -> Fraction | None:
    if match := FRACTION.fullmatch(gold):
        sign, *digits = match.groups()
        top, bottom = (int(digit) for digit in digits if digit)
        return Fraction(-top if sign else top, bottom)
    return None


def as_decimal(value: Fraction) -> str | None:
    """The finite decimal that the fraction is, where it is one."""
    for places in range(13):
        scaled = value * 10**places
        if scaled.denominator == 1:
            digits = str(abs(scaled.numerator)).rjust(places + 1, "0")
            sign = "-" if value < 0 else ""
            return sign + (f"{digits[:-places]}.{digits[-places:]}" if places else digits)
    return None


def frac(value: Fraction, scale: int = 1) -> str:
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator) * scale}}}{{{value.denominator * scale}}}"


# Rewritings


def spaces(gold: str) -> list[str]:
    if "\\text" in gold or "\\mbox" in gold or "\\!" in gold or is_grouped(gold):
        return []
    return [re.sub(r"([-+=,()])", r" \1 ", gold), rf"\,{gold}\;"]


def display_fractions(gold: str) -> list[str]:
    return [gold.replace("\\frac", "\\dfrac"), gold.replace("\\frac", "\\tfrac")] if "\\frac" in gold else []


def unit(gold: str) -> list[str]:
    return [rf"{gold} \text{{ cm}}", rf"{gold}\text{{ apples}}"] if is_scalar(gold) and is_number(gold) else []


def is_number(gold: str) -> bool:
    return re.search(r"[A-Za-z]", re.sub(r"\\[a-z]+", "", gold)) is None


def period(gold: str) -> list[str]:
    return [f"{gold}."]


def dollar_signs(gold: str) -> list[str]:
    return [f"${gold}$"]


def nested_box(gold: str) -> list[str]:
    return [rf"\boxed{{{gold}}}"]


def named(gold: str) -> list[str]:
    return [f"t = {gold}", f"A={gold}"] if is_scalar(gold) and is_number(gold) else []


def left_right(gold: str) -> list[str]:
    if "\\left" in gold:
        return [gold.replace("\\left", "").replace("\\right", "")]
    if "\\text" in gold or "(" not in gold:
        return []
    signs = {sign: f"\\left{sign}" for sign in "(["} | {sign: f"\\right{sign}" for sign in ")]"}
    return ["".join(signs.get(sign, sign) for sign in gold)]


def reordered(gold: str) -> list[str]:
    return [", ".join(reversed(gold.split(",")))] if is_list(gold) else []


def in_braces(gold: str) -> list[str]:
    return [rf"\{{{gold}\}}"] if is_list(gold) else []


def union_reordered(gold: str) -> list[str]:
    return [r" \cup ".join(reversed(gold.split("\\cup")))] if "\\cup" in gold else []


def decimal(gold: str) -> list[str]:
    value = fraction_in(gold)
    text = None if value is None else as_decimal(value)
    return [text] if text else []


def fraction(gold: str) -> list[str]:
    if DECIMAL.fullmatch(gold):
        return [frac(Fraction(gold)), frac(Fraction(gold), 2)]
    return [f"{int(gold) * 3}/3"] if INTEGER.fullmatch(gold) else []


def scaled_fraction(gold: str) -> list[str]:
    value = fraction_in(gold)
    return [] if value is None else [frac(value, 3), f"{value.numerator}/{value.denominator}"]


def mixed_number(gold: str) -> list[str]:
    value = fraction_in(gold)
    if value is None or value <= 1:
        return []
    whole = math.floor(value)
    return [whole_and_part(whole, value - whole)] if value != whole else []


def whole_and_part(whole: int, part: Fraction) -> str:
    return f"{whole}{frac(part)}"


def written_sum(gold: str) -> list[str]:
    if INTEGER.fullmatch(gold):
        return [f"{int(gold) - 7} + 7", rf"2 \cdot {int(gold)} - ({gold})"]
    return [f"7 + ({gold}) - 7", rf"\frac{{2({gold})}}{{2}}"] if is_scalar(gold) else []


def written_product(gold: str) -> list[str]:
    """Without a sign between the factors, as in `2(3)`."""
    return [f"2({int(gold) // 2})"] if INTEGER.fullmatch(gold) and int(gold) % 2 == 0 else []


def thousands(gold: str) -> list[str]:
    if not INTEGER.fullmatch(gold) or abs(int(gold)) < 1000:
        return []
    grouped = f"{int(gold):,}"
    return [grouped, grouped.replace(",", "{,}"), grouped.replace(",", r"\,"), grouped.replace(",", r",\!")]


def surd(gold: str) -> list[str]:
    match = SURD.fullmatch(gold)
    if match is None:
        return []
    factor, radicand = int(match.group(1) or 1), int(match.group(2))
    return [rf"\sqrt{{{factor**2 * radicand}}}", rf"\frac{{{factor * radicand}}}{{\sqrt{{{radicand}}}}}"]


def bare_word(gold: str) -> list[str]:
    match = WORD.fullmatch(gold)
    return [match.group(1), rf"\textbf{{{match.group(1)}}}", rf"\text{{{match.group(1).lower()}}}"] if match else []


def scaled_equation(gold: str) -> list[str]:
    match = LINE.fullmatch(gold)
    return [f"2y = 2({match.group(1)})", f"y - ({match.group(1)}) = 0", match.group(1)] if match else []


def other_matrix(gold: str) -> list[str]:
    return [gold.replace("pmatrix", "bmatrix")] if "pmatrix" in gold else []


REWRITINGS: dict[str, Rule] = {
    "the gold itself": lambda gold: [gold],
    **{
        rule.__name__.replace("_", " "): rule
        for rule in (
            spaces,
            display_fractions,
            unit,
            period,
            dollar_signs,
            nested_box,
            named,
            left_right,
            reordered,
            in_braces,
            union_reordered,
            decimal,
            fraction,
            scaled_fraction,
            mixed_number,
            written_sum,
            written_product,
            thousands,
            surd,
            bare_word,
            scaled_equation,
            other_matrix,
        )
    },
}


# Near misses


def sign(gold: str) -> list[str]:
    if INTEGER.fullmatch(gold):
        return [str(-int(gold))] if int(gold) else []
    return [f"-({gold})"] if is_scalar(gold) else []


def off_by_one(gold: str) -> list[str]:
    if INTEGER.fullmatch(gold):
        return [str(int(gold) + 1), str(int(gold) - 1)]
    return [f"{gold} + 1"] if is_scalar(gold) else []


def nearly(gold: str) -> list[str]:
    r"""By less than any tolerance that compares floats would notice."""
    return [rf"{gold} + 10^{{-20}}", rf"{gold} - \frac{{1}}{{10^{{60}}}}"] if is_scalar(gold) else []


def rounded(gold: str) -> list[str]:
    value = fraction_in(gold)
    if value is not None:
        return [f"{float(value):.10f}"] if as_decimal(value) is None else []
    match = SURD.fullmatch(gold)
    if match is None:
        return []
    return [f"{int(match.group(1) or 1) * math.sqrt(int(match.group(2))):.12f}"]


def swapped(gold: str) -> list[str]:
    match = TUPLE.fullmatch(gold)
    if match is None:
        return []
    opening, first, rest, closing = match.groups()
    second, comma, others = rest.partition(",")
    return [] if first.strip() == second.strip() else [f"{opening}{second}, {first}{comma}{others}{closing}"]


def superset(gold: str) -> list[str]:
    return [f"{gold}, 12345"] if is_scalar(gold) or is_list(gold) else []


def subset(gold: str) -> list[str]:
    return [gold.rpartition(",")[0], gold.partition(",")[2]] if is_list(gold) else []


def one_sign(gold: str) -> list[str]:
    return [gold.replace("\\pm", "+"), gold.replace("\\pm", "-")] if "\\pm" in gold and "{" not in gold[:2] else []


def other_denominator(gold: str) -> list[str]:
    value = fraction_in(gold)
    if value is None:
        return []
    return [frac(Fraction(value.numerator, 1) / (value.denominator + 1)), frac(1 / value)] if value**2 != 1 else []


def other_ends(gold: str) -> list[str]:
    if not TUPLE.fullmatch(gold) or "\\infty" in gold:
        return []
    other = {"(": "[", "[": "(", ")": "]", "]": ")"}
    return [other[gold[0]] + gold[1:] if gold[0] in other else gold, gold[:-1] + other[gold[-1]]][
        gold[0] not in other :
    ]


def other_base(gold: str) -> list[str]:
    match = re.fullmatch(r"(\d+)_\{?(\d)\}?", gold)
    if match is None:
        return []
    digits, base = match.groups()
    return [f"{digits}_{{{int(base) + 1}}}", str(int(digits, int(base))), f"{digits}1_{base}"]


def other_line(gold: str) -> list[str]:
    return [f"{gold} + 1", gold.replace("y", "z", 1), "0 = 0", "y = y"] if LINE.fullmatch(gold) else []


def part_of_union(gold: str) -> list[str]:
    return gold.split("\\cup") if "\\cup" in gold else []


def other_word(gold: str) -> list[str]:
    match = WORD.fullmatch(gold)
    if match is None:
        return []
    word = match.group(1)
    return [rf"\text{{not {word}}}", word[::-1] if word[::-1].lower() != word.lower() else "D"]


def other_power(gold: str) -> list[str]:
    return (
        [re.sub(r"([a-z])\^\d", r"\1^9", gold, count=1)] if re.search(r"[a-z]\^[1-8]", gold) and is_scalar(gold) else []
    )


def rows_swapped(gold: str) -> list[str]:
    match = re.fullmatch(r"(\\begin\{pmatrix\})(.*?)\\\\(.*?)((?:\\\\.*)?\\end\{pmatrix\})", gold)
    return [f"{match.group(1)}{match.group(3)} \\\\ {match.group(2)}{match.group(4)}"] if match else []


def list_reads_as_number(gold: str) -> list[str]:
    """The thousands' mark with a space behind it: a list of two."""
    if not INTEGER.fullmatch(gold) or int(gold) < 1000:
        return []
    return [f"{int(gold):,}".replace(",", ", ")]


NEAR_MISSES: dict[str, Rule] = {
    rule.__name__.replace("_", " "): rule
    for rule in (
        sign,
        off_by_one,
        nearly,
        rounded,
        swapped,
        superset,
        subset,
        one_sign,
        other_denominator,
        other_ends,
        other_base,
        other_line,
        part_of_union,
        other_word,
        other_power,
        rows_swapped,
        list_reads_as_number,
    )
}
