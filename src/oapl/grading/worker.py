"""A function in a process of its own, with a hard kill: what grades may hang, crash or leak, and the run goes on."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from oapl.errors import GradingError, TaskError
from oapl.processes import end_with_parent

START_TIMEOUT_S = 120.0


class FunctionWorker:
    """Calls `module:function` in a worker process, started when first needed and again after a kill.

    Threads that call at once wait for each other.
    """

    def __init__(
        self,
        function: str,
        timeout_s: float,
        memory_bytes: int | None = None,
        timeout_setting: str = "task.reward_timeout_s",
    ) -> None:
        """`memory_bytes` bounds the worker's address space: what wants more raises MemoryError or dies there."""
        self.function, self.timeout_s, self.memory_bytes = function, timeout_s, memory_bytes
        self.timeout_setting = timeout_setting
        self._process: Any = None
        self._connection: Connection | None = None
        self._turn = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Raises TaskError where the function cannot be imported."""
        with self._turn:
            self._start()

    def _start(self) -> None:
        if self._closed:
            raise GradingError(f"{self.function} was closed")
        if self._process is not None and self._process.is_alive():
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.function, os.getcwd(), self.memory_bytes))
        self._process.start()
        theirs.close()
        try:
            status, value = self._receive(START_TIMEOUT_S, f"{START_TIMEOUT_S:g} s")
        except GradingError as error:
            raise TaskError(f"reward function {self.function}: its import failed: {error}.") from error
        if status == "error":
            raise TaskError(f"reward function {self.function} cannot be imported: {value}")

    def call(self, **arguments: Any) -> Any:
        """The function's result. Raises GradingError where it raises, outlasts `timeout_s` or ends its process."""
        with self._turn:
            self._start()
            assert self._connection is not None
            with suppress(ConnectionError):  # a worker that has died since: receiving tells how
                self._connection.send(arguments)
            status, value = self._receive(self.timeout_s, f"{self.timeout_setting} = {self.timeout_s:g} s")
        if status == "refused":
            raise GradingError(value)
        if status == "error":
            raise GradingError(f"{self.function} raised {value}")
        return value

    def _receive(self, timeout_s: float, limit: str) -> tuple[str, Any]:
        assert self._connection is not None
        if not self._connection.poll(timeout_s):
            self._kill()
            raise GradingError(f"{self.function} took longer than {limit} and its process was killed")
        try:
            status, value = self._connection.recv()
        except (EOFError, ConnectionError):
            code = self._process.join() or self._process.exitcode
            self._kill()
            raise GradingError(f"{self.function} ended its process (exit code {code})") from None
        except (ImportError, AttributeError, TypeError, pickle.UnpicklingError) as error:
            raise GradingError(
                f"{self.function} returned what only its own process can read ({error}): it must return numbers"
            ) from error
        return status, value

    def close(self) -> None:
        """Ends the process, and with it a call at hand, whose thread gets a GradingError; later calls get one too."""
        self._closed = True
        process = self._process
        if process is not None and process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        with self._turn:
            self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        self._process = None


def load_function(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    value: Any = getattr(importlib.import_module(module), name)
    return value  # type: ignore[no-any-return]


def _serve(connection: Connection, function: str, folder: str, memory_bytes: int | None) -> None:
    """The worker: imports the function, then answers calls until the other side is gone."""
    os.setsid()  # a group of its own: a kill takes what the function started along
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run; this call may end in peace
    end_with_parent(whole_group=True)
    sys.path.insert(0, folder)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        call = load_function(function)
    except BaseException as error:
        connection.send(("error", _describe(error)))
        return
    connection.send(("ready", None))
    while True:
        try:
            arguments: Mapping[str, Any] = connection.recv()
        except (EOFError, OSError):
            return
        try:
            value = call(**arguments)
            answer = ("value", asyncio.run(value) if inspect.iscoroutine(value) else value)
        except GradingError as error:  # of a grader of ours, which says all there is to say
            answer = ("refused", str(error))
        except Exception as error:
            answer = ("error", _describe(error))
        try:
            connection.send(answer)
        except (TypeError, ValueError, AttributeError) as error:  # what cannot be pickled
            connection.send(("error", f"a result that cannot be sent back: {_describe(error)}"))


def _describe(error: BaseException) -> str:
    """`ValueError: text (rewards.py, line 12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
