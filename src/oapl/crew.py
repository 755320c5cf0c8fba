"""Roles in processes of their own: started, listened to, told to stop, and missed when they die."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from oapl.config import load_recipe
from oapl.errors import LostRankError, OaplError, WorkerError
from oapl.paths import poll_s
from oapl.processes import end_with_parent
from oapl.progress import Progress
from oapl.store import RunFolder
from oapl.store.run import LOGS
from oapl.types import Events

STOP_PATIENCE_S = 120.0
"""Seconds a process may take to end its step and save, once told to stop."""

TOLD_TO_STOP = 3
"""Exit code of a process that ended early, and well, since it got SIGTERM."""


class Child:
    """A role in a process of its own, whose events come through a pipe and whose output goes to a log."""

    def __init__(self, run: RunFolder, name: str, role: str, team: str, **arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, self.team = name, team
        self.log = run.local_path / LOGS / f"{name}.log"
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=child_main, args=(theirs, str(run.path), role, str(self.log), arguments), name=name
        )
        self.process.start()
        theirs.close()
        self.error: OaplError | None = None

    def failure(self) -> OaplError | None:
        """Why the process ended before its work was done; None while it runs or where it ended well."""
        code = self.process.exitcode
        if code is None or code == 0:
            return None
        if self.error is not None:
            return self.error
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = "was told to stop" if code == TOLD_TO_STOP else f"ended with exit code {code}"
        return WorkerError(
            f"the {self.name} process {how}; its output is in {self.log}. "
            f"Run the same command again to continue: what was sealed is kept."
        )


def child_main(connection: Connection, run_dir: str, role: str, log: str, arguments: Mapping[str, Any]) -> None:
    """The start of every child process. It ends when its parent does, however that ended."""
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    end_with_parent()
    sending = threading.Lock()

    def tell(kind: str, value: Any) -> None:
        with sending:  # warnings come from any thread
            connection.send((kind, value))

    code = 1
    try:
        from oapl import roles

        for handler in (logging.StreamHandler(), Told(tell)):
            logging.getLogger("oapl").addHandler(handler)
        run = RunFolder(run_dir)
        events = Events(
            should_stop=stop.is_set,
            on_step=lambda record: tell("step", dict(record)),
            on_shard=lambda record: tell("shard", dict(record)),
        )
        getattr(roles, role)(load_recipe(run.config_path), run, events, **arguments)
        code = TOLD_TO_STOP if stop.is_set() else 0
    except OaplError as error:
        traceback.print_exc()
        tell("error", error)
    except Exception:
        traceback.print_exc()
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # gives back semaphores of libraries
    os._exit(code)  # all is stored; what threads of native libraries do at a slow exit is not worth waiting for


class Told(logging.Handler):
    """Passes warnings on to who watches the run; all else that a child says is in its log alone."""

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # nobody listens any more
            self._tell("warning", record.getMessage())


class Crew:
    """The child processes of a run. If one fails, the others are told to stop."""

    def __init__(self, run: RunFolder, progress: Progress, events: Events) -> None:
        self.run, self._progress, self._events = run, progress, events
        self._children: dict[str, Child] = {}

    def start(self, name: str, role: str, *, team: str | None = None, **arguments: Any) -> None:
        """A child that works with others of its `team`, all or none of which can go on."""
        self._children[name] = Child(self.run, name, role, team or name, **arguments)

    def wait_for(self, *names: str) -> None:
        """Passes events on until these children have ended.

        Raises what ended a child, as soon as any of them fails, and KeyboardInterrupt when told to stop.
        """
        self.wait_until(lambda: not any(self._children[name].process.is_alive() for name in names))

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Passes events on until something is so. Raises as `wait_for` does, whichever child fails."""
        while not ready():
            self._pass_on(timeout_s=max(0.2, poll_s(self.run.path)))
            self._progress.refresh()
            self._raise_failure()
            if self._events.should_stop():
                raise KeyboardInterrupt
        self._pass_on(timeout_s=0)
        self._raise_failure()

    def stop(self) -> None:
        """Asks every child to save and end, and kills what has not ended in time."""
        for process in multiprocessing.active_children():  # also one that an interrupt kept from being listed here
            process.terminate()
        give_up = time.monotonic() + STOP_PATIENCE_S
        try:
            for process in multiprocessing.active_children():
                process.join(max(0.0, give_up - time.monotonic()))
        finally:  # also where the user lost patience before
            for process in multiprocessing.active_children():
                process.kill()
                process.join()

    def _raise_failure(self) -> None:
        failed = [child for child in self._children.values() if child.failure() is not None]
        if not failed:
            return
        self._pass_on(timeout_s=0)
        broken = {child.team for child in failed if child.process.exitcode != TOLD_TO_STOP}
        for child in self._children.values():
            if child.team in broken and child.process.is_alive():
                child.process.kill()  # it waits for one that is gone, and can save nothing alone
        failures = [failure for child in failed if (failure := child.failure()) is not None]
        raise min(failures, key=lambda failure: isinstance(failure, LostRankError))

    def _pass_on(self, timeout_s: float) -> None:
        waiting = {child.connection: child for child in self._children.values() if not child.connection.closed}
        while ready := wait(list(waiting), timeout=timeout_s):
            for connection in (c for c in ready if isinstance(c, Connection)):
                child = waiting[connection]
                try:
                    kind, value = connection.recv()
                except (EOFError, OSError):
                    connection.close()
                    del waiting[connection]
                    continue
                if kind == "error":
                    child.error = value
                elif kind == "warning":
                    self._progress.note(f"{child.name}: {value}")
                elif kind == "step":
                    self._events.on_step(value)
                else:
                    self._events.on_shard(value)
            timeout_s = 0
