"""Contenders of a benchmark: each in a process of its own, asked in turns over its standard input and output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


class Contender:
    """A benchmark's own script with `--child NAME` and the same arguments, which prints `ready` once it is."""

    def __init__(self, script: str, name: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, script, "--child", name, *sys.argv[1:]],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        while (line := self._process.stdout.readline()) and line != "ready\n":
            pass
        if not line:
            raise SystemExit(f"{name} ended before it was ready; `python {script} --child {name}` says why.")

    def ask(self, question: str = "") -> Any:
        """The answer, in JSON, to one line."""
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()
