"""Contenders of a benchmark: each in a process of its own, asked in turns over its standard input and output, or run
once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

READY, ANSWER = "ready", "answer "
"""How the lines begin that are meant for the asker; libraries print others."""


def answer_all(make_answer: Callable[[str], Any]) -> None:
    """A contender's side: says that it is ready, and answers each line of its standard input."""
    print(READY, flush=True)
    for line in sys.stdin:
        print(ANSWER + json.dumps(make_answer(line.strip())), flush=True)


def run_once(script: str, name: str, threads: int, timeout: float | None = None) -> dict[str, Any]:
    """What a benchmark's own script, run with `--child NAME` and the same arguments, prints as its last line, in JSON;
    or, as `failed`, why there is none."""
    try:
        done = subprocess.run(
            [sys.executable, script, "--child", name, *sys.argv[1:]],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {timeout} seconds"}
    if done.returncode:
        return {"failed": " ".join(done.stderr.strip().splitlines()[-1:])[:200]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


class Contender:
    """The asker's side of a benchmark's own script, run with `--child NAME` and the same arguments."""

    def __init__(self, script: str, name: str, threads: int) -> None:
        self._hint = f"`python {script} --child {name}` says why."
        self._process = subprocess.Popen(
            [sys.executable, script, "--child", name, *sys.argv[1:]],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._read(READY)

    def ask(self, question: str) -> Any:
        """The answer to one line."""
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return json.loads(self._read(ANSWER))

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _read(self, start: str) -> str:
        """The rest of the next line that begins so."""
        for line in self._process.stdout:
            if line.startswith(start):
                return line.removeprefix(start)
        raise SystemExit(f"A contender ended early; {self._hint}")
