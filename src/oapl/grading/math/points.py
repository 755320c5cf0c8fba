"""The points at which two expressions in variables are compared.

Six fractions, from 0.1 to 100 and of both signs, tell smooth expressions apart. `|x - 2024|` changes at a number that
occurs in it, so points lie about all of these numbers. Floors, ceilings, gcd and lcm change at whole numbers: there
the points are many whole numbers, small ones in a row so that every residue occurs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TypeAlias

import sympy

Point: TypeAlias = dict[sympy.Symbol, sympy.Rational]

SCALES = (sympy.Rational(1, 10), sympy.Integer(1), sympy.Integer(10))
IN_A_ROW = 60
"""Whole numbers from 1 on, and their negatives, at which floors and the like are compared."""
MOST_CONSTANTS = 8
"""The largest ones; a formula of an answer to mathematics has fewer."""
WHOLE_NAMES = frozenset("jklmnpqKLMN")
"""Variables that stand for whole numbers where a floor or the like occurs. `x` and `a` do not."""


class Gcd(sympy.Function):  # type: ignore[misc]
    """The greatest common divisor: sympy's own takes variables for polynomials, so that gcd(m, n) would be 1."""

    @classmethod
    def eval(cls, *values: sympy.Expr) -> sympy.Expr | None:
        return sympy.igcd(*values) if all(value.is_Integer for value in values) else None


class Lcm(sympy.Function):  # type: ignore[misc]
    @classmethod
    def eval(cls, *values: sympy.Expr) -> sympy.Expr | None:
        return sympy.ilcm(*values) if all(value.is_Integer for value in values) else None


DIVISORS = (Gcd, Lcm)
STEPS = (sympy.floor, sympy.ceiling, *DIVISORS)


def points(a: sympy.Expr, b: sympy.Expr) -> list[Point]:
    """The same each time."""
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    chance = random.Random("points")
    if a.has(*STEPS) or b.has(*STEPS):
        return list(_whole_points(symbols, a, b, chance))
    found = [{symbol: scale * _signed_fraction(chance) for symbol in symbols} for scale in SCALES]
    if not (_is_smooth(a) and _is_smooth(b)):
        found += _points_between(symbols, _constants(a) | _constants(b), chance)
    return [each for point in found for each in (point, {symbol: -value for symbol, value in point.items()})]


def _signed_fraction(chance: random.Random) -> sympy.Rational:
    """From 1 to 10 in size."""
    return sympy.Rational(chance.choice((-1, 1)) * chance.randrange(1_000, 10_000), 1_009)


def _is_smooth(value: sympy.Expr) -> bool:
    """Whether it has no absolute values, maxima, roots or logarithms, which may differ on two sides of a number."""
    if value.has(sympy.Abs, sympy.Max, sympy.Min, sympy.log):
        return False
    return all(power.exp.is_Integer or not power.exp.is_number for power in value.atoms(sympy.Pow))


def _points_between(
    symbols: list[sympy.Symbol], constants: set[sympy.Rational], chance: random.Random
) -> Iterator[Point]:
    """One variable after the other between two neighbours of the numbers in a formula, just past them and far past."""
    sizes = sorted(constants)[-MOST_CONSTANTS:]
    if not sizes:
        return
    middles = [(low + high) / 2 for low, high in zip([sympy.Integer(0), *sizes], sizes, strict=False)]
    spots = [*middles, sizes[-1] * sympy.Rational(11, 10), sizes[-1] * 3, sizes[-1] * 1_009]
    for spot in spots:
        for symbol in symbols:
            point = {other: spot * _signed_fraction(chance) / 7 for other in symbols}
            yield point | {symbol: spot}


def _constants(value: sympy.Expr) -> set[sympy.Rational]:
    """The sizes of the numbers in a formula, exponents aside."""
    if value.is_Pow and value.exp.is_number and value.free_symbols:
        return _constants(value.base)
    if value.free_symbols:
        return {size for argument in value.args for size in _constants(argument)}
    if value.is_Rational:
        return {abs(value), sympy.Integer(abs(value.p)), sympy.Integer(value.q)} - {0, 1}
    size = abs(sympy.N(value))
    return {sympy.Integer(size) + 1} if size.is_finite else set()


def _whole_points(symbols: list[sympy.Symbol], a: sympy.Expr, b: sympy.Expr, chance: random.Random) -> Iterator[Point]:
    """Whole numbers; for variables that need not be whole, fractions at every other point."""
    whole = {symbol for symbol in symbols if str(symbol)[0] in WHOLE_NAMES}
    whole |= {symbol for part in a.atoms(*DIVISORS) | b.atoms(*DIVISORS) for symbol in part.free_symbols}
    has_counts = a.has(sympy.factorial, sympy.binomial)  # of what is positive
    constants = {size for size in _constants(a) | _constants(b) if size.is_Integer and size > 2}
    places = list(range(1, IN_A_ROW + 1))
    for size in sorted(constants, reverse=True)[:MOST_CONSTANTS]:
        places += [int(size) * factor + more for factor in (1, 2, 3) for more in (-1, 0, 1)]
    for turn, place in enumerate(places):
        point = {}
        for number, symbol in enumerate(symbols):
            value = sympy.Integer(place if number == 0 else chance.choice((place, chance.randrange(1, 2 * place + 5))))
            is_broken = symbol not in whole and turn % 2 == 1
            point[symbol] = value + sympy.Rational(chance.randrange(1, 1_009), 1_009) if is_broken else value
        yield point
        if has_counts:
            continue
        yield {symbol: -value for symbol, value in point.items()}
        if len(symbols) > 1:
            yield {symbol: chance.choice((-1, 1)) * value for symbol, value in point.items()}
