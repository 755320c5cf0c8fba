"""What a process and all its descendants use, read from /proc: the watch that a sandbox cannot switch off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
INODE_BYTES = 1024  # about what an empty file takes
GONE = (FileNotFoundError, ProcessLookupError)  # a process may end between two looks at it


class Usage(NamedTuple):
    num_bytes: int
    """Of resident memory. What processes share counts once for each."""
    num_threads: int
    num_ready: int
    """Threads that are computing or could if a core were free."""


def children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(*GONE):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(*GONE):
                found += map(int, (thread / "children").read_text().split())
    return found


def measure(root: int) -> Usage:
    num_bytes = num_threads = num_ready = 0
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        waiting += children(pid)
        with suppress(*GONE):
            of_process = _stat(Path(f"/proc/{pid}"))
            num_threads += int(of_process[17])
            threads = [of_process] if of_process[17] == b"1" else list(_stats_of_threads(pid))
            # What is said of a process is said of its first thread, which shows no memory once it has ended.
            num_bytes += max((int(thread[21]) for thread in threads), default=0) * PAGE_BYTES
            num_ready += sum(thread[0] == b"R" for thread in threads)
    return Usage(num_bytes, num_threads, num_ready)


def _stats_of_threads(pid: int) -> Iterator[list[bytes]]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(*GONE):
            yield _stat(thread)


def _stat(entry: Path) -> list[bytes]:
    """The fields from the third on, the state. The second is the program's name, which may hold anything."""
    return (entry / "stat").read_bytes().rpartition(b")")[2].split()


def folder_bytes(pid: int, folders: tuple[str, ...]) -> int:
    """What lies in folders held in memory, as the process sees them."""
    num_bytes = 0
    for folder in folders:
        with suppress(OSError):  # at its end a process has no folders
            held = os.statvfs(f"/proc/{pid}/root{folder}")
            num_bytes += (held.f_blocks - held.f_bfree) * held.f_frsize + (held.f_files - held.f_ffree) * INODE_BYTES
    return num_bytes
