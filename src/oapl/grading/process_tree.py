"""What a process and all its descendants use, read from /proc: the watch that a sandbox cannot switch off."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
GONE = (FileNotFoundError, ProcessLookupError)  # a process may end between two looks at it


def children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(*GONE):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(*GONE):
                found += map(int, (thread / "children").read_text().split())
    return found


def measure(root: int) -> tuple[int, int]:
    """Bytes of resident memory, and the number of threads. What processes share counts once for each."""
    num_bytes = num_threads = 0
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        waiting += children(pid)
        with suppress(*GONE):
            num_bytes += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
            num_threads += len(os.listdir(f"/proc/{pid}/task"))
    return num_bytes, num_threads
