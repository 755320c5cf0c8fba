r"""From the many ways to write an answer in LaTeX to one row of tokens.

`\left( \dfrac12,\,\text{3 cm} \right)` becomes `( \frac 12 , \text{3 cm} )`: a number, a letter, a command, a sign, or
a piece of text is one token, and what only concerns looks is gone.
"""

from __future__ import annotations

import re

from oapl.grading.math.units import known_unit

SYNONYMS = {
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    r"\cfrac": r"\frac",
    r"\nicefrac": r"\frac",
    r"\sfrac": r"\frac",
    r"\dbinom": r"\binom",
    r"\tbinom": r"\binom",
    r"\leq": r"\le",
    r"\leqslant": r"\le",
    r"\lt": "<",
    r"\geq": r"\ge",
    r"\geqslant": r"\ge",
    r"\gt": ">",
    r"\neq": r"\ne",
    r"\times": r"\cdot",
    r"\ast": r"\cdot",
    "*": r"\cdot",
    r"\div": "/",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\lbrack": "[",
    r"\rbrack": "]",
    r"\lparen": "(",
    r"\rparen": ")",
    r"\langle": "(",
    r"\rangle": ")",
    r"\lvert": "|",
    r"\rvert": "|",
    r"\vert": "|",
    r"\mid": "|",
    r"\varnothing": r"\emptyset",
    r"\infin": r"\infty",
    r"\colon": ":",
    r"\land": r"\text{and}",
    r"\lor": r"\text{or}",
    r"\vee": r"\text{or}",
    r"\varphi": r"\phi",
    r"\varepsilon": r"\epsilon",
    r"\simeq": r"\approx",
    r"\bigcup": r"\cup",
    r"\imath": "i",
    r"\Pr": "P",
    r"\pounds": "£",
    r"\&": r"\text{and}",
    "%": r"\%",
}

SIGNS = {
    "−": "-",
    "–": "-",
    "×": r"\cdot ",
    "·": r"\cdot ",
    "÷": "/",
    "π": r"\pi ",
    "√": r"\sqrt ",
    "°": r"^\circ ",
    "º": r"^\circ ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "∪": r"\cup ",
    "∅": r"\emptyset ",
    "±": r"\pm ",
    "∈": r"\in ",
    "²": "^2",
    "³": "^3",
    "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
    "…": "...",
    "\u00a0": " ",
}
"""Signs outside ASCII, and the commands that they stand for."""

LOOKS = re.compile(
    r"""(?<!\\)\\(?: [,!;:>\s] | (?:quad|qquad|displaystyle|textstyle|limits|left\s*\.|right\s*\.|left|right|middle
    |[bB]igg?[lrm]?|rm|bf|it|tt|sf|hfill|boxed|fbox|thinspace|hspace\{[^{}]*\}|phantom\{[^{}]*\}|strut
    |tiny|small|large|Large|LARGE|huge|Huge|underline|(?:text)?color\{[^{}]*\})(?![A-Za-z]) )
    |\$|~|(?<!\\)\\[\[\]()]""",
    re.VERBOSE,
)
"""What only concerns looks. `\\$` is not in it: it says dollars."""

GAP = r"\s*(?:\{,\}|\\text\{,\}|,\s*\\!|\\!\s*,|\\[,!:; ]|~|\s)\s*"
GROUPED = re.compile(rf"(?<![\d.])(?<!(?<!\\),)\d{{1,3}}(?:{GAP}\d{{3}})+(?!\d)")
"""Digits in threes, with a mark between them that is no comma of a list. A `\\,` before them is a space."""
COMMAS = re.compile(r"(?<![\d.])(?<!(?<!\\),)\d{1,3}(?:,\d{3})+(?![\d])")

REPEATING = re.compile(
    r"(\d*)\.(\d*)\s*\\(?:(?:overline|bar)\s*\{(\d+)\}|(?:overline|bar|dot)\s*(?:\{(\d)\}|(\d)(?!\d)))"
)
"""`0.1\\overline{6}`; of `0.\\bar 3` and `0.\\dot{3}` the period is a digit."""
DEGREES = re.compile(
    r"(?:\{\}\s*)?\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![A-Za-z]))|\\(?:text)?degree(?![A-Za-z])"
)
"""`36^\\circ`, `36^{\\circ}`, `36{}^\\circ`, `36\\degree`."""

_FUNCTION_NAMES = """
sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth ln log lg exp gcd lcm max min
"""
FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
TEXT = re.compile(
    r"\\(?:text|mbox|textrm|textbf|textit|textnormal|textsf|texttt|textup|emph|mathrm|mathsf|operatorname\*?)\s*\{([^{}]*)\}"
)
BOLD = re.compile(r"\\(?:mathbf|mathit|mathtt|boldsymbol|bm|bold)\s*(?=\{)")
"""Fonts of letters and digits, which stay what they are."""
INFIX = re.compile(r"\{([^{}]*)\\(over|choose)(?![A-Za-z])([^{}]*)\}")
SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE](\d+)(?!\w)")
UNIT_FRACTION = re.compile(
    r"\\[dt]?frac\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}"
)
LINE_BREAK = re.compile(r"\\\\\[\s*-?[\d.]+\s*[a-z]{2}\s*\]")
ARGUMENT = re.compile(r"\s*(?:\\left)?\s*(?:[(\[{|^_A-Za-z\d]|\\(?!text|mathrm|mbox)[A-Za-z{])")
"""What may follow the name of a function."""
TOKEN = re.compile(
    r"\\(?:text|begin|end|mathbb|mathcal)\s*\{[^{}]*\}|\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\.\d+|[A-Za-z]|\S", re.DOTALL
)
TRAILING_WORDS = re.compile(r"(?<=[\d})\s])([A-Za-z]{2,}(?:\s+[A-Za-z]{2,})*)((?:\^\{?\d\}?)?)$")
SPELLED = re.compile(
    rf"(?<![\\A-Za-z])({'|'.join(sorted(FUNCTIONS | {'sqrt', 'pi', 'infty'}, key=len, reverse=True))})(?![A-Za-z])"
)
OR = re.compile(r"(?<![\\A-Za-z])(and|or)(?![A-Za-z])")


class Unreadable(Exception):
    """Text that is no answer as this grader reads them, and why."""


def tokenize(text: str) -> list[str]:
    """The tokens of an answer. Texts come as `\\text{…}`, whatever command set them."""
    for sign, command in SIGNS.items():
        text = text.replace(sign, command)
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # a backslash escaped once too often
    text = re.sub(r"(?<!\\)\\$", "", text)  # of a `\ ` whose space was cut off
    text = LINE_BREAK.sub(r"\\\\", text).replace("**", "^")
    text = INFIX.sub(_infix, text)
    text = SCIENTIFIC.sub(r"(\1 \\cdot 10^{\2})", text)
    text = UNIT_FRACTION.sub(r"\\text{\1/\2}", text)
    text = GROUPED.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    text = _join_thousands(text)
    text = REPEATING.sub(_repeating_decimal, text)
    text = DEGREES.sub(r"^\\circ ", text)
    text = re.sub(r"\^\{(st|nd|rd|th)\}", r"^{\\text{\1}}", text)
    text = re.sub(r"\\mathbb\s*([A-Z])(?![A-Za-z])", r"\\mathbb{\1}", text).replace("...", r"\ldots ")
    text = BOLD.sub("", text).replace("{:}", ":")
    text = LOOKS.sub(" ", text.replace(r"\$", r"\dollar "))
    tokens: list[str] = []
    place = 0
    for match in TEXT.finditer(text):
        tokens += _tokenize_mathematics(text[place : match.start()])
        has_argument = ARGUMENT.match(text, match.end()) is not None
        tokens += _tokenize_text(match.group(1), has_argument)
        place = match.end()
    tokens += _tokenize_mathematics(text[place:])
    return _with_upright_letters(tokens)


def _infix(match: re.Match[str]) -> str:
    command = {"over": r"\frac", "choose": r"\binom"}[match.group(2)]
    return f"{{{command}{{{match.group(1)}}}{{{match.group(3)}}}}}"


def _with_upright_letters(tokens: list[str]) -> list[str]:
    r"""`2\mathrm{r}` is a product. Letters alone stay texts, since they may be choices, and those of units do."""
    if all(token.startswith(r"\text{") for token in tokens):
        return tokens
    letters = []
    for place, token in enumerate(tokens):
        is_scale = r"\circ" in tokens[max(0, place - 2) : place] and token in (r"\text{C}", r"\text{F}")
        is_letter = re.fullmatch(r"\\text\{[A-Za-z]\}", token) and not is_scale
        letters.append(token[6:-1] if is_letter and known_unit(token[6:-1]) is None else token)
    return letters


def _join_thousands(text: str) -> str:
    """`1,080` is one number, but within brackets a comma parts two."""

    def join(match: re.Match[str]) -> str:
        before = text[: match.start()]
        inside = sum(before.count(sign) for sign in "([") + before.count(r"\{")
        inside -= sum(before.count(sign) for sign in ")]") + before.count(r"\}")
        return match.group() if inside > 0 else match.group().replace(",", "")

    return COMMAS.sub(join, text)


def _repeating_decimal(match: re.Match[str]) -> str:
    r"""`0.1\overline{6}` is 15/90: the digits with one period, less those before it, over nines and zeros."""
    whole, before, *periods = match.groups()
    period = next(filter(None, periods))
    top = int(whole + before + period) - int(whole + before or "0")
    return rf"{{\frac{{{top}}}{{{'9' * len(period) + '0' * len(before)}}}}}"


def _tokenize_text(content: str, has_argument: bool) -> list[str]:
    word = " ".join(content.split())
    if word in FUNCTIONS and (has_argument or known_unit(word) is None):  # alone, `min` is minutes
        return ["\\" + word]
    if word == r"\dollar":
        return [word]
    if word in ("e", "i"):  # upright constants; alone they are still letters
        return [word]
    return [rf"\text{{{word}}}"] if re.search(r"\w", word) else _tokenize_mathematics(word)  # `\text{-}5` is -5


def _tokenize_mathematics(text: str) -> list[str]:
    text = OR.sub(r"\\text{\1}", text.strip())
    text = TRAILING_WORDS.sub(_unit_as_text, text)
    text = SPELLED.sub(r"\\\1 ", text) if r"\text{" not in text else _spelled_outside_texts(text)
    return [SYNONYMS.get(token, token) for token in TOKEN.findall(text)]


def _spelled_outside_texts(text: str) -> str:
    pieces = re.split(r"(\\text\{[^{}]*\})", text)
    return "".join(piece if piece.startswith(r"\text") else SPELLED.sub(r"\\\1 ", piece) for piece in pieces)


def _unit_as_text(match: re.Match[str]) -> str:
    """`5 cm` and `18 apples` have units; `5xyz` is a product, and so is `5m`."""
    words, exponent = match.groups()
    after_space = match.start() > 0 and match.string[match.start() - 1].isspace()
    is_unit = known_unit(words) is not None or (after_space and len(words.split()[0]) >= 4)
    return rf"\text{{{words}}}{exponent}" if is_unit else match.group()


def depth(tokens: list[str]) -> int:
    """How many brackets stand within each other."""
    deepest = now = 0
    for token in tokens:
        now += (token in OPENING) - (token in CLOSING)
        deepest = max(deepest, now)
    return deepest


OPENING = frozenset(["(", "[", "{", r"\{", r"\lfloor", r"\lceil"])
CLOSING = frozenset([")", "]", "}", r"\}", r"\rfloor", r"\rceil"])


def split(tokens: list[str], separators: frozenset[str]) -> tuple[list[list[str]], list[str]]:
    """The parts between separators that stand outside all brackets, and those separators."""
    parts: list[list[str]] = [[]]
    found = []
    depth = 0
    for token in tokens:
        depth += (token in OPENING or token.startswith(r"\begin")) - (token in CLOSING or token.startswith(r"\end"))
        if depth == 0 and token in separators:
            parts.append([])
            found.append(token)
        else:
            parts[-1].append(token)
    return parts, found


def closing_place(tokens: list[str], start: int = 0) -> int | None:
    """Where the bracket that opens at `start` closes. Half-open intervals close with another kind."""
    depth = 0
    for place in range(start, len(tokens)):
        depth += (tokens[place] in OPENING) - (tokens[place] in CLOSING)
        if depth == 0:
            return place
    return None
