"""Whether two values are equal: exact for fractions, to far more digits than the values have for all else.

Never by a tolerance. The difference of two numbers is computed with as many bits as it takes to tell it from zero; it
counts as zero when it cannot be told from it with `precision` bits, which grows with the size of all that is in it.
Expressions in variables are compared by their values at fixed points: two different ones agree at no such point but by
chance, and there are several.
"""

from __future__ import annotations

import random

import sympy
from sympy.core.evalf import evalf

from oapl.grading.math.latex import Unreadable

SCALES = (sympy.Rational(1, 10), sympy.Integer(1), sympy.Integer(10))
LEAST_BITS = 400
MOST_BITS = 60_000


def are_equal(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether a and b have the same value, for every value of their variables."""
    if a == b:
        return True
    if a.is_Rational and b.is_Rational:
        return False
    if a.is_infinite or b.is_infinite:
        return False
    symbols = sorted((a - b).free_symbols, key=str)
    if not symbols:
        return is_zero(a - b)
    return all(is_zero(at(a, point) - at(b, point)) for point in points(symbols))


def are_proportional(a: sympy.Expr, b: sympy.Expr, *, positively: bool = False) -> bool:
    """Whether a is a constant multiple of b, and neither is zero: `a = 0` and `b = 0` are one equation."""
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    ratios = []
    for point in points(symbols):
        value, other = at(a, point), at(b, point)
        if is_zero(value) or is_zero(other):
            return False
        ratios.append(value / other)
    if positively and not all(sympy.N(ratio).is_positive for ratio in ratios):
        return False
    return all(is_zero(ratio - ratios[0]) for ratio in ratios[1:])


def points(symbols: list[sympy.Symbol]) -> list[dict[sympy.Symbol, sympy.Rational]]:
    """Fractions from 0.1 to 100, the same each time, and their negatives: `|x - 20|` is not `20 - x` at all of them."""
    chance = random.Random("points")
    found = []
    for scale in SCALES:
        point = {
            symbol: scale * sympy.Rational(chance.choice((-1, 1)) * chance.randrange(1_000, 10_000), 1_009)
            for symbol in symbols
        }
        found += [point, {symbol: -value for symbol, value in point.items()}]
    return found


def at(value: sympy.Expr, point: dict[sympy.Symbol, sympy.Rational]) -> sympy.Expr:
    return value.xreplace(point)


def is_zero(difference: sympy.Expr) -> bool:
    if difference.is_Rational:
        return bool(difference == 0)
    if difference.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        raise Unreadable("infinity or an undefined value within a formula")
    bits = precision(difference)
    try:
        real, imaginary, real_bits, imaginary_bits = evalf(difference, 53, {"maxprec": bits})
    except (NotImplementedError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise Unreadable(f"a value that cannot be computed ({type(error).__name__})") from error
    known = (
        part and part != sympy.core.evalf.fzero and (accuracy or 0) > 3
        for part, accuracy in ((real, real_bits), (imaginary, imaginary_bits))
    )
    return not any(known)


def precision(value: sympy.Expr) -> int:
    """Bits that tell the value from zero: some for every bit of the numbers in it, more for powers."""
    bits = LEAST_BITS
    for number in value.atoms(sympy.Rational):
        bits += 4 * (int(abs(number.p)).bit_length() + int(number.q).bit_length())
    for power in value.atoms(sympy.Pow):
        if power.exp.is_Rational:
            bits += 8 * int(abs(power.exp))
    if bits > MOST_BITS:
        raise Unreadable("numbers too large to compare")
    return bits
