"""What the documentation tells a reader to type: it runs, or is at least understood."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from oapl.cli import parse
from oapl.errors import ConfigError

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUN = ("docs/tutorial.md", "README.md")
"""Pages whose labelled blocks are run, in order and in one folder."""


class Block(NamedTuple):
    page: str
    language: str
    title: str | None
    text: str


def blocks_of(page: Path) -> list[Block]:
    found = re.findall(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```', page.read_text(), re.DOTALL | re.MULTILINE)
    return [
        Block(str(page.relative_to(ROOT)), language, title or None, text)
        for language, title, text in found
        if "--8<--" not in text
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands() -> list[tuple[str, str]]:
    """Every `oapl …` that stands at the start of a line or after a `.venv/bin/`."""
    found = []
    for block in BLOCKS:
        if block.language in ("", "bash"):
            for line in block.text.replace("\\\n", " ").splitlines():
                if match := re.match(r"(?:\.venv/bin/)?oapl (.*)", line):
                    found.append((block.page, match[1]))
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_each_command_is_understood(page: str, command: str):
    """But for words that stand for others, such as RUN or `…`."""
    words = [word for word in shlex.split(command, comments=True) if word != "…"]
    try:
        parse(words)
    except ConfigError as error:
        raise AssertionError(f"{page}: oapl {command}: {error}") from error


@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = 0
    for block in blocks_of(ROOT / page):
        if block.title is not None:
            (tmp_path / block.title).write_text(block.text)
        elif block.language in ("bash", "python"):
            words = ["bash", "-e"] if block.language == "bash" else [sys.executable]
            told = subprocess.run(
                [*words, "-c", block.text], cwd=tmp_path, env=environment, capture_output=True, text=True
            )
            assert told.returncode == 0, f"{block.text}\n{told.stdout}\n{told.stderr}"
            done += 1
    assert done > 0


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}-{block.language}")
def test_each_block_is_of_its_language(block: Block):
    if block.language == "python":
        compile(block.text, block.page, "exec")
    elif block.language == "toml":
        tomllib.loads(block.text)
