"""Units: they may be left out or written in another way, but what names another unit is another answer."""

from __future__ import annotations

import re

_NAMES = {
    "m": "meter metre",
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "km": "kilometer kilometre",
    "in": "inch",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "g": "gram",
    "kg": "kilogram",
    "lb": "pound",
    "oz": "ounce",
    "l": "liter litre",
    "ml": "milliliter millilitre",
    "s": "sec second",
    "min": "minute",
    "h": "hr hour",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "degree": "deg",
    "radian": "rad",
    "dollar": "usd",
    "cent": "",
    "percent": "pct percentage",
    "mph": "",
    "kph": "",
    "kmph": "",
    "am": "",
    "pm": "",
}
_KNOWN = {alias: unit for unit, aliases in _NAMES.items() for alias in (unit, *aliases.split())}
_SPEEDS = {"mph": "mi/h", "kph": "km/h", "kmph": "km/h"}
MULTIPLIERS = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}


_MORE = """
or and if not minus plus times half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths
seventh sevenths eighth eighths ninth ninths tenth tenths eleventh elevenths twelfth twelfths twentieth twentieths
hundredth hundredths thousandth thousandths millionth millionths billionth billionths zero one two three four five six
seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty
fifty sixty seventy eighty ninety hundred thousand million billion trillion dozen score double triple twice thrice
squared cubed root factorial power log sin cos tan sqrt pi infinity infinite base mod modulo remainder fraction
divided multiplied over choose to through between from more less fewer greater larger smaller than least most about
around approximately nearly almost roughly even odd prime composite negative positive integer but except unless when
where while for otherwise else only is are was isn be no none never nothing neither nor wrong incorrect false maybe
perhaps unknown any other also another either both instead without
"""
_MEANS_MORE = frozenset(_MORE.split())
"""Words that are no part of a unit: with one of them, a text says more than the number before it."""
KINDS = re.compile(r"\b(?:positive |negative |even |odd |prime )+(?:integers|numbers|solutions|factors|divisors)\b")
"""What is counted: `4 positive integers` is 4, `n even` is not n."""
LONGEST_UNIT = 6
"""Words."""


def known_unit(words: str) -> str | None:
    """`square inches` is `in^2`, `miles per hour` is `mi/h`. None for what is no unit of measure, such as `apples`."""
    sides = re.split(r"/|\bper\b", words.lower())
    units = [_simple_unit(side) for side in sides]
    if len(units) > 2 or None in units:
        return None
    unit = "/".join(unit for unit in units if unit)
    return _SPEEDS.get(unit, unit)


def _simple_unit(words: str) -> str | None:
    unit, exponent = None, 1
    power = re.search(r"\^\s*\{?\s*(\d)\s*\}?\s*$", words)
    if power:
        words, exponent = words[: power.start()], int(power.group(1))
    for word in words.replace(".", "").split():
        if word in _POWERS:
            exponent *= _POWERS[word]
        elif unit is None and (found := _known(word)) is not None:
            unit = found
        else:
            return None
    return unit if unit is None or exponent == 1 else f"{unit}^{exponent}"


def is_like_a_unit(words: str) -> bool:
    """Whether the words may follow a number without changing it, as `apples` or `square units` do."""
    words = re.sub(r"\bunits? ?(?:squared|cubed|\^\{?\d\}?)$", "units", words.lower().strip())
    words = KINDS.sub("numbers", words)
    pieces = re.split(r"[\s/-]+", words.replace(".", " ").strip())
    return len(pieces) <= LONGEST_UNIT and all(
        re.fullmatch(r"[a-z]+(?:'[a-z]*)?", piece)
        and piece not in _MEANS_MORE
        and (len(piece) > 1 or piece == "a" or piece in _KNOWN)
        for piece in pieces
        if piece
    )


def _known(word: str) -> str | None:
    if word in _KNOWN or len(word) < 3:
        return _KNOWN.get(word)
    return _KNOWN.get(word.removesuffix("s")) or _KNOWN.get(word.removesuffix("es"))
