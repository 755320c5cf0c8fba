"""What processes that share nothing but files do about each other: wait, and end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait


def end_with_parent(*, whole_group: bool = False) -> None:
    """From now on this process, or its whole process group, ends when its parent does, however that ended."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        wait([parent.sentinel])
        if whole_group:
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def wait_until(ready: Callable[[], bool], should_stop: Callable[[], bool], poll_s: float = 0.02) -> bool:
    """True once it is ready; False when told to stop first."""
    while not ready():
        if should_stop():
            return False
        time.sleep(poll_s)
    return True
