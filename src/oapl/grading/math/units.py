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
    "am": "",
    "pm": "",
}
_KNOWN = {alias: unit for unit, aliases in _NAMES.items() for alias in (unit, *aliases.split())}
MULTIPLIERS = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}


def known_unit(words: str, exponent: int = 1) -> str | None:
    """`square inches` is `in^2`. None for what is no unit of measure, such as `apples`: that is not compared."""
    unit = None
    for word in re.findall("[a-z]+", words.lower().replace(".", "")):
        if word in _POWERS:
            exponent *= _POWERS[word]
        elif unit is None and (found := _known(word)) is not None:
            unit = found
        else:
            return None
    return unit if unit is None or exponent == 1 else f"{unit}^{exponent}"


def _known(word: str) -> str | None:
    if word in _KNOWN or len(word) < 3:
        return _KNOWN.get(word)
    return _KNOWN.get(word.removesuffix("s")) or _KNOWN.get(word.removesuffix("es"))
