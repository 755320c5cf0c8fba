"""What a process and all its descendants use, read from /proc: the watch that a sandbox cannot switch off."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
INODE_BYTES = 1024  # about what an empty file takes
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


def folder_bytes(pid: int, folders: tuple[str, ...]) -> int:
    """What lies in folders held in memory, as the process sees them."""
    num_bytes = 0
    for folder in folders:
        with suppress(OSError):  # at its end a process has no folders
            held = os.statvfs(f"/proc/{pid}/root{folder}")
            num_bytes += (held.f_blocks - held.f_bfree) * held.f_frsize + (held.f_files - held.f_ffree) * INODE_BYTES
    return num_bytes
