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
    "l": "L liter litre",
    "mg": "milligram",
    "dm": "decimeter decimetre",
    "nm": "nanometer nanometre",
    "cl": "centiliter centilitre",
    "ml": "milliliter millilitre cc",
    "hz": "hertz",
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
    "euro": "",
    "yen": "",
    "rupee": "",
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

_CARDINAL = r"""(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve
|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty
|hundred|thousand|(?:m|b|tr)illion|dozen|score)"""
_ORDINAL = rf"(?:half|halve|third|quarter|fifth|eighth|ninth|twelfth|\w+tieth|{_CARDINAL}th)"
NUMBER = re.compile(rf"{_CARDINAL}*(?:{_CARDINAL}|{_ORDINAL})s?", re.VERBOSE)
"""`six`, `sixteenths`, `fortyfive`."""
_MORE = """
or and if not minus plus times double triple twice thrice reciprocal inverse opposite
squared cubed root factorial power log sin cos tan sqrt pi infinity infinite base mod modulo remainder fraction
divided multiplied over choose to through between from more less fewer greater larger smaller than least most about
around approximately nearly almost roughly even odd prime composite negative positive integer but except unless when
where while for otherwise else only is are was isn be no none never nothing neither nor wrong incorrect false maybe
perhaps possibly probably alternatively unknown any other also another either both instead without excluding
"""
_MEANS_MORE = frozenset(_MORE.split())
"""Words that are no part of a unit, as numbers are none: with one of them, a text says more than what it follows."""
KINDS = re.compile(r"\b(?:positive |negative |even |odd |prime )+(?:integers|numbers|solutions|factors|divisors)\b")
"""What is counted: `4 positive integers` is 4, `n even` is not n."""
LONGEST_UNIT = 6
"""Words."""
_SHORT = frozenset(["a", "an", "as", "at", "by", "in", "it", "of", "on", "st", "nd", "rd", "th"])
"""Words of one or two letters that say nothing; others are letters of mathematics, as in `\\mathrm{AB}`."""


def known_unit(words: str) -> str | None:
    """`square inches` is `in^2`, `miles per hour` is `mi/h`. None for what is no unit of measure, such as `apples`."""
    sides = re.split(r"/|\bper\b", _lowered(words))
    units = [_simple_unit(side) for side in sides]
    if len(units) > 2 or None in units:
        return None
    unit = "/".join(unit for unit in units if unit)
    return _SPEEDS.get(unit, unit)


def _lowered(words: str) -> str:
    """A capital alone stays one: M is no metre."""
    return re.sub(r"[A-Za-z']{2,}", lambda match: match.group().lower(), words)


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
    words = re.sub(r"\bunits? ?(?:squared|cubed|\^\{?\d\}?)$", "units", _lowered(words).strip())
    words = KINDS.sub("numbers", words)
    pieces = re.split(r"[\s/-]+", words.replace(".", " ").strip())
    return len(pieces) <= LONGEST_UNIT and all(
        re.fullmatch(r"[a-z]+(?:'[a-z]*)?|L", piece)
        and piece not in _MEANS_MORE
        and not NUMBER.fullmatch(piece)
        and (len(piece) > 2 or piece in _SHORT or piece in _KNOWN)
        for piece in pieces
        if piece
    )


def _known(word: str) -> str | None:
    if word in _KNOWN or len(word) < 3:
        return _KNOWN.get(word)
    return _KNOWN.get(word.removesuffix("s")) or _KNOWN.get(word.removesuffix("es"))
