"""Runs `oapl` commands in forks of one warm process, so that a test can kill hundreds of runs in little time.

Reads one JSON object a line: `argv`, and when to die by SIGKILL: `kill_at_write` (before the n-th write
operation of the store) or `kill_after_s`. Answers each with the fork's exit status, negative for a signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

import oapl.roles
from oapl.cli import main

WRITES = ("fsync", "replace", "rename", "link")


def die_at_write(number: int) -> None:
    """Before the n-th write operation the process dies; the file that was being synced is left half written."""
    count = 0

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                if name == "fsync":
                    path = os.readlink(f"/proc/self/fd/{args[0]}")
                    if os.path.isfile(path) and ".partial" in path:
                        os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in WRITES:
        setattr(os, name, wrap(name, getattr(os, name)))


def run(argv: list[str], kill_at_write: int | None, kill_after_s: float | None) -> int:
    pid = os.fork()
    if pid == 0:
        log = os.open(os.devnull, os.O_WRONLY)
        os.dup2(log, 1)
        if kill_at_write is not None:
            die_at_write(kill_at_write)
        if kill_after_s is not None:
            threading.Timer(kill_after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        os._exit(main(argv))
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    oapl.roles.use_threads(1)
    torch.set_num_interop_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        code = run(request["argv"], request.get("kill_at_write"), request.get("kill_after_s"))
        print(code, flush=True)
