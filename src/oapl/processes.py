"""What processes that share nothing but files do about each other: wait, and end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

LIFELINE = "OAPL_LIFELINE"
"""The environment variable by which a program is told the pipe that it should not outlive."""


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


def end_with_lifeline() -> None:
    """From now on this program ends when the other end of the pipe in LIFELINE closes; without one, nothing happens.

    Whoever starts a program and keeps the writing end open needs no farewell: the system closes it, even at a SIGKILL.
    """
    descriptor = os.environ.pop(LIFELINE, None)
    if descriptor is None:
        return

    def watch() -> None:
        os.read(int(descriptor), 1)  # nothing is ever written
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Ctrl-C or SIGTERM sets the event, so that the work at hand can end well; a Ctrl-C after it interrupts at once.

    A SIGTERM may come twice: from a batch system to all processes of a job, and from the one that started this one.
    Raises KeyboardInterrupt at the end where the event was set.
    """
    stop = threading.Event()

    def ask(number: int, _: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stop.is_set():
        raise KeyboardInterrupt


def pause(seconds: float, should_stop: Callable[[], bool]) -> None:
    """Sleeps, or until told to stop."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end, should_stop)


def wait_until(ready: Callable[[], bool], should_stop: Callable[[], bool], poll_s: float = 0.02) -> bool:
    """True once it is ready; False when told to stop first."""
    while not ready():
        if should_stop():
            return False
        time.sleep(poll_s)
    return True
