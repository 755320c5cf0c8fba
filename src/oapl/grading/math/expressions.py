r"""From tokens to a value of sympy, exact, and small enough to work with.

The rules are those of a reader of LaTeX. `2x`, `2(3)` and `\sqrt2\sqrt3` are products, `1\frac45` is a mixed number,
`\sin 2x` is a sine of 2x, `e` and `i` are the constants. What could mean two things, such as `1/2x` or `2 3`, is not
read at all. Sizes are looked at before anything is computed: a tower of powers costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sympy

from oapl.grading.math.latex import FUNCTIONS, Unreadable
from oapl.grading.math.points import Gcd, Lcm

MOST_BITS = 50_000
"""Of a power of fractions, which is computed exactly."""
MOST_BITS_OF_ROOT = 2_000
"""Of a fraction under a root: sympy looks for squares in it."""
LARGEST_FACTORIAL = 3_000
LARGEST_EXPONENT = 3_000
"""Of what is no fraction: it is compared by its values, which grow with it."""

_GREEK_LETTERS = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega
Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell
"""
GREEK = frozenset(_GREEK_LETTERS.split())
DECORATIONS = frozenset([r"\overline", r"\bar", r"\vec", r"\hat", r"\tilde", r"\widehat", r"\overrightarrow"])
INFINITY = frozenset([r"\infty", "+", "-", "(", ")", "{", "}"])
"""All that may stand with an infinity."""
DEEPEST = 8
"""Functions within each other, of which each counts as two, and roots."""
LARGEST_ARGUMENT = {"exp": 3_000, "sinh": 3_000, "cosh": 3_000, "tanh": 3_000, "coth": 3_000}
MANY = {"gcd": Gcd, "lcm": Lcm, "max": sympy.Max, "min": sympy.Min}
"""Functions of several values."""
MOST_VALUES = 20
"""Of such a function: sympy compares each with each."""


def function_of_one(name: str) -> Callable[[sympy.Expr], sympy.Expr]:
    if name in ("log", "lg"):
        return logarithm(sympy.Integer(10))
    if name.startswith("arc"):
        name = "a" + name.removeprefix("arc")
    function: Callable[[sympy.Expr], sympy.Expr] = getattr(sympy, name)
    return function


def inverse(name: str) -> Callable[[sympy.Expr], sympy.Expr]:
    r"""Of `\sin^{-1}`, by convention no power."""
    if f"arc{name}" not in FUNCTIONS:
        raise Unreadable(f"the inverse of `{name}`, or its power")
    return function_of_one(f"arc{name}")


def logarithm(base: sympy.Expr) -> Callable[[sympy.Expr], sympy.Expr]:
    return lambda value: sympy.log(value) / sympy.log(base)


def read_expression(tokens: list[str]) -> sympy.Expr:
    """The value of all of the tokens. Raises Unreadable."""
    if not tokens:
        raise Unreadable("nothing where a value is expected")
    if r"\infty" in tokens and (tokens.count(r"\infty") > 1 or not INFINITY.issuperset(tokens)):
        raise Unreadable("arithmetic on infinity")
    value = _Reader(tokens).all()
    if value.has(sympy.nan, sympy.zoo):
        raise Unreadable("undefined, such as a division by zero")
    return value


class _Reader:
    def __init__(self, tokens: list[str], functions_around: int = 0) -> None:
        self.tokens, self.place = tokens, 0
        self.functions_around = functions_around
        self.has_closed = False
        """Whether the last factor ended in a bracket, an exponent in braces, `!` or a root, so that a digit is new."""

    @property
    def next(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def after(self, count: int) -> str:
        return self.tokens[self.place + count] if self.place + count < len(self.tokens) else ""

    def take(self) -> str:
        if not self.next:
            raise Unreadable("ends too early")
        self.place += 1
        return self.tokens[self.place - 1]

    def expect(self, token: str) -> None:
        if self.next != token:
            raise Unreadable(f"`{token}` expected, found `{self.next or 'the end'}`")
        self.place += 1

    def all(self) -> sympy.Expr:
        value = self.sum()
        if self.place < len(self.tokens):
            raise Unreadable(f"`{self.next}` where no sign of its kind can stand")
        return value

    def sum(self) -> sympy.Expr:
        total = self.signed(self.product)
        while self.next in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            total += sign * self.signed(self.product)
        return total

    def signed(self, read: Callable[[], sympy.Expr]) -> sympy.Expr:
        sign = 1
        while self.next in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        return sign * read()

    def product(self) -> sympy.Expr:
        value = self.power()
        divided = False
        while True:
            if self.next == r"\cdot":
                self.take()
                value, divided = value * self.signed(self.power), False
            elif self.next == "/":
                if divided:
                    raise Unreadable("`/` twice: it is open what is divided first")
                self.take()
                value, divided = self.quotient(value, self.signed(self.power)), True
            elif self.starts_factor():
                if divided:
                    raise Unreadable(f"`/` before `{self.next}`: it is open what is divided by")
                if self.next == "{" and self.tokens[self.place - 1] == "}":
                    raise Unreadable("braces after braces without a sign between them")
                value = value * self.power()
            else:
                return value

    def starts_factor(self) -> bool:
        """Whether the next token can multiply without a sign. In `x2` and `2 3` something is missing."""
        token = self.next
        if token[:1].isdigit():
            return self.has_closed
        return bool(
            re.fullmatch(r"[A-Za-z(\[{]", token)
            or token in (r"\frac", r"\sqrt", r"\binom", r"\pi", r"\lfloor", r"\lceil", r"\infty", *DECORATIONS)
            or token[1:] in GREEK | FUNCTIONS
        )

    def power(self) -> sympy.Expr:
        first = self.next
        is_function = first.startswith("\\") and first[1:] in FUNCTIONS
        base = self.function(self.take()[1:]) if is_function else self.atom()
        self.has_closed = first in ("(", r"\sqrt")
        while True:
            if self.next == "!":
                self.take()
                if self.next == "!":
                    raise Unreadable("a double factorial")
                base, self.has_closed = factorial(base), True
            elif self.next == "^" and self.after(1) == r"\circ":
                self.place += 2
                base = base * sympy.pi / 180
            elif self.next == "^":
                self.take()
                is_braced = self.next == "{"
                base = power(base, self.exponent())
                self.has_closed = is_braced
                if self.next == "^":
                    raise Unreadable("a power of a power without brackets")
            else:
                return base

    def exponent(self) -> sympy.Expr:
        """What follows `^`: also `x^10` and `x^-1`, which mean more than LaTeX takes them for."""
        sign = -1 if self.next == "-" else 1
        if sign == -1:
            self.take()
        return sign * self.atom()

    def atom(self) -> sympy.Expr:
        token = self.take()
        if re.match(r"\.?\d", token):
            return self.number(token)
        if token == "{":
            return self.until("}")
        if token in ("(", "["):
            return self.until(")" if token == "(" else "]")
        if token == "|":
            return sympy.Abs(self.until("|"))
        if token == r"\lfloor":
            return sympy.floor(self.until(r"\rfloor"))
        if token == r"\lceil":
            return sympy.ceiling(self.until(r"\rceil"))
        if token == r"\frac":
            return self.quotient(*self.two_arguments())
        if token == r"\binom":
            return binomial(*self.two_arguments())
        if token == r"\sqrt":
            return self.root()
        if token == r"\pi":
            return sympy.pi
        if token == r"\infty":
            return sympy.oo
        if token == "e" and self.next != "_":
            return sympy.E
        if token == "i" and self.next != "_":
            return sympy.I
        if token in DECORATIONS:
            return self.symbol(token[1:] + "".join(self.group()))
        if re.fullmatch(r"[A-Za-z]|\\mathbb\{\w\}", token) or token[1:] in GREEK:
            return self.symbol(token.lstrip("\\"))
        raise Unreadable(f"`{token}` is not understood")

    def number(self, token: str) -> sympy.Expr:
        """A decimal as the fraction that it is; with the fraction after it, a mixed number."""
        value = sympy.Rational(token)
        if "." in token:
            return value
        if self.next == r"\frac":
            place = self.place
            self.take()
            arguments = self.arguments_as_tokens()
            if all(len(a) == 1 and a[0].isdigit() for a in arguments):
                return value + self.quotient(*(sympy.Integer(a[0]) for a in arguments))
            self.place = place
        elif self.next.isdigit() and self.after(1) == "/" and self.after(2).isdigit():
            top, bottom = sympy.Integer(self.next), sympy.Integer(self.after(2))
            self.place += 3
            return value + self.quotient(top, bottom)
        return value

    def quotient(self, top: sympy.Expr, bottom: sympy.Expr) -> sympy.Expr:
        if bottom == 0:
            raise Unreadable("a division by zero")
        return top / bottom

    def until(self, closing: str) -> sympy.Expr:
        value = self.sum()
        self.expect(closing)
        return value

    def group(self) -> list[str]:
        """The tokens of a braced argument, or the single one that is the argument."""
        if self.next != "{":
            return [self.take()]
        start, depth = self.place + 1, 0
        while True:
            token = self.take()
            depth += (token == "{") - (token == "}")
            if depth == 0:
                return self.tokens[start : self.place - 1]

    def arguments_as_tokens(self) -> list[list[str]]:
        r"""The two arguments of \frac or \binom, also those of `\frac12` and `\frac1{20}`."""
        if self.next.isdigit() and len(self.next) == 2:
            return [[digit] for digit in self.take()]
        arguments = []
        for _ in range(2):
            if len(self.next) > 1 and self.next[0].isdigit():
                raise Unreadable(f"it is open which digits of `{self.next}` are divided")
            arguments.append(self.group())
        return arguments

    def two_arguments(self) -> list[sympy.Expr]:
        return [self.inner(tokens) for tokens in self.arguments_as_tokens()]

    def inner(self, tokens: list[str]) -> sympy.Expr:
        return _Reader(tokens, self.functions_around).all()

    def root(self) -> sympy.Expr:
        with self.within_function(1):
            return self._root()

    def _root(self) -> sympy.Expr:
        degree = sympy.Integer(2)
        if self.next == "[":
            self.take()
            degree = self.until("]")
        if len(self.next) > 1 and self.next[0].isdigit():
            raise Unreadable(f"it is open which digits of `{self.next}` are under the root")
        base = self.atom() if self.next == "(" else self.inner(self.group())
        if base.is_negative and degree.is_odd:
            return -power(-base, 1 / degree)  # the real root, not the first one of the complex numbers
        return power(base, self.quotient(sympy.Integer(1), degree))

    def symbol(self, name: str) -> sympy.Expr:
        if self.next == "_":
            self.take()
            name += "_" + "".join(self.group())
        return sympy.Symbol(name)

    @contextmanager
    def within_function(self, cost: int) -> Iterator[None]:
        """Bounds functions of functions: each costs sympy several times what the one within it costs."""
        if self.functions_around + cost > DEEPEST:
            raise Unreadable("functions too deep within each other")
        self.functions_around += cost
        yield
        self.functions_around -= cost

    def function(self, name: str) -> sympy.Expr:
        with self.within_function(2):
            return self._function(name)

    def _function(self, name: str) -> sympy.Expr:
        if name in MANY:
            opening = self.take()
            if opening not in ("(", r"\{"):
                raise Unreadable(f"`{opening}` after `{name}`, which is of several values")
            values = [self.sum()]
            while self.next == ",":
                self.take()
                values.append(self.sum())
            self.expect(")" if opening == "(" else r"\}")
            return of_many(name, values)
        exponent = None
        function = function_of_one(name)
        if name == "log" and self.next == "_":
            self.take()
            function = logarithm(self.inner(self.group()))
        if self.next == "^":
            self.take()
            exponent = self.exponent()
            if exponent == -1:
                function, exponent = inverse(name), None
        argument = self.atom() if self.next in ("(", "{") else self.argument()
        if name in LARGEST_ARGUMENT and argument.is_number and not abs(sympy.N(argument)) <= LARGEST_ARGUMENT[name]:
            raise Unreadable(f"`{name}` of what is too large")
        value = function(argument)
        return value if exponent is None else power(value, exponent)

    def argument(self) -> sympy.Expr:
        r"""Of a function without brackets: `2\pi x` in `\sin 2\pi x \cos y`."""
        value = self.power()
        while self.starts_factor() and self.next[1:] not in FUNCTIONS and not self.next.isdigit():
            value *= self.power()
        if self.next == "/":
            raise Unreadable("`/` after a function without brackets")
        return value


def of_many(name: str, values: list[sympy.Expr]) -> sympy.Expr:
    if len(values) > MOST_VALUES:
        raise Unreadable(f"more than {MOST_VALUES} values of `{name}`")
    if name in ("gcd", "lcm") and any(value.is_number and not value.is_Integer for value in values):
        raise Unreadable(f"`{name}` of what is no whole number")
    return MANY[name](*values)


def power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    """The power, once it is known to be of a size to work with."""
    too_large = Unreadable("a power too large to compute")
    if base.is_Rational and exponent.is_Rational:
        bits = 0 if base in (-1, 0, 1) else max(abs(base.p).bit_length(), base.q.bit_length())
        if (
            bits * abs(exponent) > (MOST_BITS if exponent.is_Integer else MOST_BITS_OF_ROOT)
            or exponent.q > LARGEST_EXPONENT
        ):
            raise too_large
        if base == 0 and exponent <= 0:
            raise Unreadable("0 to a power that is not positive")
    elif exponent.is_number and exponent.is_finite is not False and not abs(sympy.N(exponent)) <= LARGEST_EXPONENT:
        raise too_large
    value = sympy.Pow(base, exponent)
    if any(part.exp.is_Rational and abs(part.exp) > LARGEST_EXPONENT for part in value.atoms(sympy.Pow)):
        raise too_large  # powers of powers have become one
    return value


def factorial(n: sympy.Expr) -> sympy.Expr:
    if n.is_number and not (n.is_Integer and 0 <= n <= LARGEST_FACTORIAL):
        raise Unreadable("a factorial too large to compute, or of what is no natural number")
    return sympy.factorial(n)


def binomial(n: sympy.Expr, k: sympy.Expr) -> sympy.Expr:
    if n.is_number and not abs(sympy.N(n)) <= LARGEST_FACTORIAL:
        raise Unreadable("a binomial coefficient too large to compute")
    if k.is_number and not abs(sympy.N(k)) <= LARGEST_FACTORIAL:
        raise Unreadable("a binomial coefficient too large to compute")
    return sympy.binomial(n, k)
