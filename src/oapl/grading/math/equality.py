"""Whether two values are equal: exact for fractions, to far more digits than the values have for all else.

Never by a tolerance. The difference of two numbers is computed with as many bits as it takes to tell it from zero; it
counts as zero when it cannot be told from it with `precision` bits, which grows with the size of all that is in it.
Expressions in variables are compared by their values at fixed points (`points`): two different ones agree at no such
point but by chance, and there are several.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy
from sympy.core.evalf import evalf

from oapl.grading.math.latex import Unreadable
from oapl.grading.math.points import Point, points

LEAST_BITS = 400
MOST_BITS = 60_000
MOST_BITS_OF_POWER = 2**28
LARGEST_EXPONENT = 3_000
"""Of what is no fraction, at a point: `2^{2^n}` has none of its digits right for n = 90."""
EXPONENTIAL = (sympy.exp, sympy.sinh, sympy.cosh, sympy.tanh, sympy.coth)


def are_equal(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether a and b have the same value, for every value of their variables."""
    if a == b:
        return True
    if a.is_Rational and b.is_Rational:
        return False
    if a.is_infinite or b.is_infinite:
        return False
    if not a.free_symbols | b.free_symbols:
        return is_zero(a - b)
    return all(is_zero(value - other) for value, other in values(a, b))


def are_proportional(a: sympy.Expr, b: sympy.Expr, *, positively: bool = False) -> bool:
    """Whether a is a constant multiple of b, and neither is zero: `a = 0` and `b = 0` are one equation."""
    ratios: list[sympy.Expr] = []
    for value, other in values(a, b):
        if is_zero(value) and is_zero(other) and ratios:
            continue  # where both are zero, as `\\lfloor n/2 \\rfloor` and its double are for n = 1
        if is_zero(value) or is_zero(other):
            return False
        ratios.append(value / other)
    if positively and not all(sympy.N(ratio).is_positive for ratio in ratios):
        return False
    return all(is_zero(ratio - ratios[0]) for ratio in ratios[1:])


def values(gold: sympy.Expr, answer: sympy.Expr) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """Of both at the same points, without those where the gold answer has none: an answer must have one elsewhere."""
    found = points(gold, answer)
    left_out = 0
    for point in found:
        try:
            value = at(gold, point)
        except Unreadable as error:
            left_out += 1
            if 2 * left_out > len(found):
                raise Unreadable(f"a formula without a value at most points: {error}") from error
            continue
        yield value, at(answer, point)


def at(value: sympy.Expr, point: Point) -> sympy.Expr:
    """The value at a point. Raises Unreadable where it is undefined, or too large to be compared."""
    if value in point:
        return point[value]
    if not value.free_symbols:
        return value
    arguments = [at(argument, point) for argument in value.args]
    if value.is_Pow and not is_small(*arguments):
        raise Unreadable("a power too large to compare")
    if isinstance(value, EXPONENTIAL) and not is_small(sympy.E, arguments[0]):
        raise Unreadable("an exponential too large to compare")
    found = value.func(*arguments)
    if found.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        raise Unreadable("infinity or an undefined value within a formula")
    return found


def is_small(base: sympy.Expr, exponent: sympy.Expr) -> bool:
    """Whether a power can be compared: beyond, the digits of the exponent do not suffice, or memory does not."""
    if exponent.is_Integer and base.is_Rational:
        bits = 0 if base in (-1, 0, 1) else max(abs(base.p).bit_length(), base.q.bit_length())
        return bool(bits * abs(exponent) <= MOST_BITS_OF_POWER)
    return bool(abs(sympy.N(exponent)) <= LARGEST_EXPONENT)


def is_zero(difference: sympy.Expr) -> bool:
    if difference.is_Rational:
        return bool(difference == 0)
    if difference.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        raise Unreadable("infinity or an undefined value within a formula")
    bits = precision(difference)
    try:
        real, imaginary, real_bits, imaginary_bits = evalf(difference, 53, {"maxprec": bits})
    except (NotImplementedError, ValueError, ZeroDivisionError, OverflowError, AttributeError) as error:
        raise Unreadable(f"a value that cannot be computed ({type(error).__name__})") from error
    known = (
        part and part != sympy.core.evalf.fzero and (accuracy or 0) > 3
        for part, accuracy in ((real, real_bits), (imaginary, imaginary_bits))
    )
    return not any(known)


def precision(value: sympy.Expr) -> int:
    """Bits that tell the value from zero: some for every bit of the numbers in it, more for powers and exponentials."""
    bits = LEAST_BITS
    for number in value.atoms(sympy.Rational):
        bits += 4 * (int(abs(number.p)).bit_length() + int(number.q).bit_length())
    for power in value.atoms(sympy.Pow):
        if power.exp.is_Rational:
            bits += 8 * int(abs(power.exp))
    for exponential in value.atoms(*EXPONENTIAL):
        bits += 8 * int(abs(sympy.N(exponential.args[0])))
    if bits > MOST_BITS:
        raise Unreadable("numbers too large to compare")
    return bits
