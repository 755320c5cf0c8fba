r"""The answer of a completion: the content of its last \boxed{…} outside the thinking part."""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST_ANSWER = 2_000
"""Characters. An answer beyond it is not looked at: no answer to mathematics needs them, and reading costs time."""

SEARCHED = 100_000
"""Characters at the end of a completion in which a box is looked for."""

_MARK = re.compile(r"(\\(?:boxed|fbox)(?![A-Za-z])\s*)|\\[A-Za-z]+|\\.|[{}]", re.DOTALL)
_SHORTHAND = re.compile(r"[^\s{}$]+")


@dataclass(frozen=True)
class Extracted:
    """An answer, or None and the reason why there is none."""

    answer: str | None
    reason: str = ""


def final_answer(text: str, *, answer_after: str | None = None) -> Extracted:
    """The last box's content. An empty or unterminated last box is no answer, whatever was boxed before it.

    `answer_after` is the text that ends the thinking, for models whose prompt has begun it: without that text a
    completion is thinking throughout.
    """
    if answer_after is not None:
        if answer_after not in text:
            return Extracted(None, f"no answer: the completion never reaches {answer_after!r}")
        text = text.rpartition(answer_after)[2]
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return Extracted(None, "no answer: the thinking never ends")
    text = text[-SEARCHED:]
    box = _last_box(text)
    if box is None:
        where = f" in the last {SEARCHED:,} characters" if len(text) == SEARCHED else ""
        return Extracted(None, f"no answer: no box{where}")
    start, end = box
    if end is None:
        return Extracted(None, "no answer: the last box is not closed")
    answer = text[start:end].strip()
    if not answer:
        return Extracted(None, "no answer: the last box is empty")
    if len(answer) > LONGEST_ANSWER:
        return Extracted(None, f"no answer: the box holds {len(answer):,} characters, more than {LONGEST_ANSWER:,}")
    return Extracted(answer.encode("utf-8", "replace").decode("utf-8"))  # a lone surrogate could not be stored


def _last_box(text: str) -> tuple[int, int | None] | None:
    """Start and end of the content of the box that begins last, boxes within boxes aside; end None where not closed."""
    opened: list[int | None] = []
    """For each brace not closed yet: where a box's content starts, or None for any other brace."""
    closed: list[tuple[int, int | None]] = []
    after_box = False
    for mark in _MARK.finditer(text):
        sign = mark.group()
        if sign == "{":
            opened.append(mark.end() if after_box else None)
        elif sign == "}" and opened:
            start = opened.pop()
            if start is not None:
                while closed and closed[-1][0] > start:
                    closed.pop()
                closed.append((start, mark.start()))
        after_box = mark.group(1) is not None
        if after_box and text[mark.end() : mark.end() + 1] != "{":
            shorthand = _SHORTHAND.match(text, mark.end())
            closed.append((mark.end(), shorthand.end() if shorthand else mark.end()))
            after_box = False
    unclosed = [start for start in opened if start is not None]
    if unclosed and (not closed or unclosed[-1] > closed[-1][0]):
        return unclosed[-1], None
    return closed[-1] if closed else None
