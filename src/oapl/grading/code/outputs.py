"""Whether what a program gave is what its test expects, by one rule for all problems.

Printed output: blank lines do not count, the others must match one to one, and so must the words of each. Two words
match if they are the same, or if both are numbers and near enough. Results of calls: as JSON values.

Numbers are compared as decimals, exactly where the expected one is a whole number, however long, up to an absolute
error of 1e-6 for what was computed in floating point; where it has a fraction or an exponent, up to a relative or
absolute error of 1e-6, but never more than half of it: 0 is not 9.9e-7. `nan` and `inf` are no numbers, and neither is
what is expected with zeros in front: `0010` is a code or a row of bits.
"""

from __future__ import annotations

import json
import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from typing import Any

TOLERANCE = Decimal("1e-6")
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
EXPECTED_NUMBER = re.compile(r"-?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
CONTEXT = Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
LONGEST_INT = 4000  # digits that Python converts without being told to


def same_output(got: str, expected: str) -> bool:
    """Takes time in proportion to what was printed."""
    if got == expected:
        return True
    got_lines, expected_lines = (list(filter(None, map(str.strip, text.split("\n")))) for text in (got, expected))
    return len(got_lines) == len(expected_lines) and all(map(_same_line, got_lines, expected_lines))


def same_result(got: str, expected: str, wrapped: bool = False) -> bool:
    """Both are JSON. `wrapped`: an expected list of one element stands for that element as well."""
    try:
        value, wanted = _parse(got), _parse(expected)
        if _same_value(value, wanted):
            return True
        return wrapped and isinstance(wanted, list) and len(wanted) == 1 and _same_value(value, wanted[0])
    except (ValueError, RecursionError):  # nothing that can be compared
        return False


def _same_line(got: str, expected: str) -> bool:
    if got == expected:
        return True
    got_words, expected_words = got.split(), expected.split()
    return len(got_words) == len(expected_words) and all(map(_same_word, got_words, expected_words))


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if not (NUMBER.fullmatch(got) and EXPECTED_NUMBER.fullmatch(expected)):
        return False
    return _near(Decimal(got), Decimal(expected), whole=WHOLE.fullmatch(expected) is not None)


def _same_value(got: Any, expected: Any) -> bool:
    """As Python's `==`, where True is 1 and 1 is 1.0, but for the tolerance in numbers."""
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(_same_value, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(_same_value(got[key], expected[key]) for key in got)
    if isinstance(got, int | float | Decimal) and isinstance(expected, int | float | Decimal):
        return _near(Decimal(got), Decimal(expected), whole=not isinstance(expected, float))
    return bool(got == expected)


def _near(got: Decimal, expected: Decimal, whole: bool) -> bool:
    if got == expected:
        return True
    if not (got.is_finite() and expected.is_finite()):
        return False
    size = CONTEXT.abs(expected)
    allowed = TOLERANCE if whole else max(TOLERANCE, CONTEXT.multiply(TOLERANCE, size))
    if size:
        allowed = min(allowed, CONTEXT.multiply(size, Decimal("0.5")))
    return CONTEXT.abs(CONTEXT.subtract(got, expected)) <= allowed


def _parse(text: str) -> Any:
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < LONGEST_INT else Decimal(digits))
