"""What a process and all its descendants use, read from /proc: the watch that a sandbox cannot switch off."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
INODE_BYTES = 1024  # about what an empty file takes
GONE = (FileNotFoundError, ProcessLookupError)  # a process may end between two looks at it


class Usage(NamedTuple):
    num_bytes: int
    """Of resident memory. What processes share counts once for each."""
    num_threads: int
    cpu_s: float
    """Of the processes there are, and of those that one of them has waited for. It sinks where nobody waits."""


def children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(*GONE):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(*GONE):
                found += map(int, (thread / "children").read_text().split())
    return found


def measure(root: int) -> Usage:
    num_bytes = num_threads = ticks = 0
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        waiting += children(pid)
        with suppress(*GONE):
            # From the third field on, the state: the second, the program's name, may hold anything.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # in user and kernel mode, its own and of those it waited for
            num_threads += int(fields[17])
            num_bytes += int(fields[21]) * PAGE_BYTES
    return Usage(num_bytes, num_threads, ticks / TICKS)


def folder_bytes(pid: int, folders: tuple[str, ...]) -> int:
    """What lies in folders held in memory, as the process sees them."""
    num_bytes = 0
    for folder in folders:
        with suppress(OSError):  # at its end a process has no folders
            held = os.statvfs(f"/proc/{pid}/root{folder}")
            num_bytes += (held.f_blocks - held.f_bfree) * held.f_frsize + (held.f_files - held.f_ffree) * INODE_BYTES
    return num_bytes
