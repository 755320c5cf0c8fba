"""Leases: who works on what, among processes that share only a folder, and may die, hang, or come back at any time.

A lease is a row of files, `NAME.0.json`, `NAME.1.json`, …, of which the newest counts. Each is made where there was
none, so by one process alone, and written again by it now and then to say that it lives. Whoever has seen the newest
unchanged for the length that it names, by a clock of its own, makes the next one: clocks of machines are never
compared. Before it writes, a holder looks whether the lease is still its own; if not, it never writes there again.

A lease spares double work, no more. What is stored under it must be safe by itself: a holder that was thought dead may
come back with work that another has done since.
"""

from __future__ import annotations

import json
import os
import platform
import re
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from oapl.errors import StoreError
from oapl.paths import ObjectPath, StorePath
from oapl.store.files import Lock, create_bytes, write_bytes

LOCK_S = 30.0
"""Length of a lock's lease."""
RENEWALS = 4
"""Times that a holder says it lives within a lease's length."""


class Leases:
    """The leases in a folder as one process sees, takes and keeps them."""

    def __init__(self, folder: StorePath, length_s: float) -> None:
        self.folder, self.length_s = folder, length_s
        self._seen: dict[str, tuple[bytes, float]] = {}
        """What each lease's newest file held, and since when it has."""

    def take(self, name: str) -> Lease | None:
        """The lease, or None while another process holds it, and lives as far as can be seen."""
        generation = self.newest(name)
        if generation is not None and not self._is_over(name, generation):
            return None
        lease = Lease(self.folder, name, 0 if generation is None else generation + 1, self.length_s)
        return lease if lease.begin() else None

    def newest(self, name: str) -> int | None:
        pattern = re.compile(re.escape(name) + r"\.(\d+)\.json")
        names = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        return max((int(match[1]) for each in names if (match := pattern.fullmatch(each))), default=None)

    def _is_over(self, name: str, generation: int) -> bool:
        """Whether it was given back, or its holder is gone or silent for too long."""
        try:
            data = path_of(self.folder, name, generation).read_bytes()
            content = json.loads(data)
        except FileNotFoundError:
            return False  # gone since it was listed: look again
        except ValueError:
            data, content = b"", {}
        if content.get("released") or is_gone(content):
            return True
        now = time.monotonic()
        before, since = self._seen.get(name, (None, now))
        if data != before:
            since = now
        self._seen[name] = (data, since)
        return now - since > float(content.get("length_s", self.length_s))


class Lease:
    """Held from `begin` to the end of its context, and meanwhile kept by a thread."""

    def __init__(self, folder: StorePath, name: str, generation: int, length_s: float) -> None:
        self._path, self._next = path_of(folder, name, generation), path_of(folder, name, generation + 1)
        self._renew_every_s = length_s / RENEWALS
        self._content: dict[str, Any] = {**this_process(), "id": uuid.uuid4().hex, "length_s": length_s, "beat": 0}
        self._lost = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def begin(self) -> bool:
        """False where another process was quicker."""
        if not create_bytes(self._path, self._bytes()):
            return False
        self._thread.start()
        return True

    def _keep(self) -> None:
        while not self._ended.wait(self._renew_every_s):
            with suppress(StoreError, OSError):  # others will think this process dead: see `is_lost`
                if self.is_lost():
                    return
                self._content["beat"] += 1
                write_bytes(self._path, self._bytes())

    def is_lost(self) -> bool:
        """Whether another process has taken it over, or its file is gone or another's. Once lost, it stays so."""
        self._lost = self._lost or self._next.exists() or not self._is_own()
        return self._lost

    def _is_own(self) -> bool:
        try:
            content = json.loads(self._path.read_bytes())
        except (FileNotFoundError, ValueError):
            return False
        return bool(content.get("id") == self._content["id"])

    def _bytes(self) -> bytes:
        return json.dumps(self._content).encode()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._content["released"] = True
        with suppress(StoreError, OSError):
            if not self.is_lost():
                write_bytes(self._path, self._bytes())


class LeaseLock:
    """A lock by a lease, for where the system has none that ends with its holder: in an object store."""

    def __init__(self, path: StorePath, role: str, patience_s: float, setting: str, of: StorePath) -> None:
        self._leases, self._path, self._patience_s = Leases(path.parent, LOCK_S), path, patience_s
        self._message = f"{of} already has a {role} at work. Wait for it to end, stop it, or choose another {setting}."

    def __enter__(self) -> LeaseLock:
        if isinstance(self._path, ObjectPath):
            self._path.parent.check_conditional_writes()
        give_up = time.monotonic() + max(self._patience_s, 2 * LOCK_S)
        while (lease := self._leases.take(self._path.stem)) is None:
            if time.monotonic() > give_up:
                raise StoreError(self._message)
            time.sleep(1.0)
        self._lease = lease
        return self

    def is_lost(self) -> bool:
        """Whether another process has taken it over, since this one was silent for too long."""
        return self._lease.is_lost()

    def __exit__(self, *_: object) -> None:
        self._lease.__exit__()


def lock(
    path: StorePath, role: str, patience_s: float = 5.0, setting: str = "run_dir", of: StorePath | None = None
) -> Lock | LeaseLock:
    """See `Lock`; `of` is what errors say is in use."""
    if isinstance(path, Path):
        return Lock(path, role, patience_s, setting, path.parent if of is None else Path(of))
    return LeaseLock(path, role, patience_s, setting, path.parent if of is None else of)


def path_of(folder: StorePath, name: str, generation: int) -> StorePath:
    return folder / f"{name}.{generation}.json"


def this_process() -> dict[str, Any]:
    """What tells whether a process is gone, to others on its machine."""
    return {"machine": machine(), "host": platform.node(), "pid": os.getpid(), "started": started(os.getpid())}


def is_gone(content: dict[str, Any]) -> bool:
    """Whether the process ran on this machine and has ended; False where that cannot be known."""
    here = content.get("machine") is not None and content["machine"] == machine()
    return here and started(content["pid"]) != content["started"]


def machine() -> str | None:
    """Tells this boot of this machine, or of this container, from others; None where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def started(pid: int) -> str | None:
    """When a process of this machine started, in the system's ticks; None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]  # a zombie works no more
