"""Finds the program in a completion."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

END_OF_THOUGHT = "</think>"
FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<ticks>`{3,})(?P<info>.*)")
PYTHON = re.compile(r"\{?\s*\.?py(thon)?[\d.]*(?![\w+-])", re.IGNORECASE)
"""What follows the fence of a program: `python`, `Python 3`, `py`, `{.python}`, `python run`, but no `pycon`."""
WORD = re.compile(r"[\w{]")


@dataclass
class _Block:
    indent: int
    ticks: str
    info: str
    lines: list[str] = field(default_factory=list)
    closed: bool = False

    def closes(self, line: str) -> bool:
        """No deeper than it opened, as a docstring may hold fences. Text may follow, but no language."""
        fence = FENCE.fullmatch(line)
        if fence is None or len(fence["indent"]) > self.indent or len(fence["ticks"]) < len(self.ticks):
            return False
        return not WORD.match(fence["info"])


def last_program(text: str, answer_after: str | None = None) -> tuple[str | None, str]:
    """The last fenced block that names Python, else the last that names nothing; or None and the reason why not.

    `answer_after` is a text that a completion must hold; only what follows its last occurrence counts. Without it,
    what a completion says before `</think>`, if it has one, does not count.
    """
    if answer_after is not None and answer_after not in text:
        return None, f"no {answer_after}"
    answer = text if answer_after is None else text.rpartition(answer_after)[2]
    blocks = _blocks(answer, END_OF_THOUGHT if answer_after is None else None)
    named = [block for block in blocks if PYTHON.match(block.info)]
    candidates = named or [block for block in blocks if not block.info]  # beside a named one, a listing of its output
    if not candidates:
        return None, "no block of code"
    block = candidates[-1]
    if not block.closed:
        return None, "the last block of code is cut off"
    return _dedented(block.lines), ""  # a block in a list is indented as a whole


def _dedented(lines: list[str]) -> str:
    """As `textwrap.dedent`, which takes seconds for an endless run of blanks."""
    indents = [line[: len(line) - len(line.lstrip(" \t"))] for line in lines if line.strip()]
    margin = len(os.path.commonprefix(indents))  # noqa: RUF071  # they are no paths
    return "\n".join(line[margin:] for line in lines)


def _blocks(text: str, end_of_thought: str | None) -> list[_Block]:
    """Those after the end of thought. Within a block, which may print that tag, it ends one only on a new line."""
    blocks: list[_Block] = []
    is_open = False
    for line in text.split("\n"):
        if end_of_thought and end_of_thought in line and (not is_open or line.lstrip().startswith(end_of_thought)):
            blocks, is_open = [], False
            line = line.rpartition(end_of_thought)[2]
        if not is_open:
            fence = FENCE.fullmatch(line)
            if fence and "`" not in fence["info"]:
                blocks.append(_Block(len(fence["indent"]), fence["ticks"], fence["info"].strip()))
                is_open = True
        elif blocks[-1].closes(line):
            blocks[-1].closed, is_open = True, False
        else:
            blocks[-1].lines.append(line)
    return blocks
