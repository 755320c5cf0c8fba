"""Finds the program in a completion."""

from __future__ import annotations

import textwrap

END_OF_THOUGHT = "</think>"
LANGUAGES = ("", "python", "python3", "py")
"""What may follow an opening fence. Blocks of other languages are passed over."""


def last_program(text: str, answer_after: str | None = None) -> tuple[str | None, str]:
    """The last fenced Python block, or None and the reason why there is no program.

    `answer_after` is a text that a completion must hold; only what follows its last occurrence counts. Without it,
    what a completion says before `</think>`, if it has one, does not count.
    """
    if answer_after is not None and answer_after not in text:
        return None, f"no {answer_after}"
    answer = text.rpartition(END_OF_THOUGHT if answer_after is None else answer_after)[2]
    program: str | None = None
    block: list[str] = []
    fence, wanted = "", False
    for line in answer.split("\n"):
        bare = line.strip()
        ticks = bare[: len(bare) - len(bare.lstrip("`"))]
        if not fence and len(ticks) >= 3:
            fence, block, wanted = ticks, [], bare[len(ticks) :].strip().lower() in LANGUAGES
        elif fence and ticks == bare and len(ticks) >= len(fence):
            program, fence = ("\n".join(block) if wanted else program), ""
        elif fence:
            block.append(line)
    if fence and wanted:
        return None, "the last block of code is cut off"
    if program is None:
        return None, "no block of code"
    return textwrap.dedent(program), ""  # a block in a list is indented as a whole
