"""A sandbox for one untrusted Python program: bubblewrap around the harness, and a watch on it from outside.

Inside there is no network, no file of the host but the system's and Python's own, no /proc, and nothing to write to but
small folders that vanish. One kill ends all that runs in there, and so does the end of the thread or process that
started it.
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Literal, Self

from oapl.errors import GradingError, TaskError
from oapl.grading.code import process_tree
from oapl.grading.code.system_calls import filter_program

Kind = Literal["stdin", "call", "check"]
"""How a program is tested: as one that reads and prints, by calls of a function, by code that checks a function."""
End = Literal["answered", "died", "time", "output", "memory", "processes", "cpu"]
"""How a test ended. Only `answered` leaves a sandbox that can take another; `died` is the end of the whole sandbox."""

HELLO_TIMEOUT_S = 30.0
POLL_S = 0.025
"""Between two looks at what a program uses, on average: it must not know when to be idle."""
READY_THREADS = 1.5
"""How many a program may have for ever: one, and some of another that hands over to it.

Those that are ready are counted and not the time that they got, as that is little where the machine is busy, which is
where they take the most from their neighbours, whose time is wall-clock time.
"""
READY_SLACK_S = 2.0
"""What a program may have beyond that, in threads times seconds: two threads for 4 s, ten for a quarter of a second."""
STACK_MB = 512
FOLDERS_MB = {"/tmp": 64, "/dev/shm": 64, "/run": 256}
"""What can be written to, and how much it holds. /run is for the test's input."""
ERROR_TAIL_BYTES = 4096
ERROR_LIMIT_BYTES = 16 << 20
READ_BYTES = 1 << 16  # what a pipe holds
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the order of a set must not decide a reward
    "OPENBLAS_NUM_THREADS": "1",  # a thread's stack counts as address space
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # else each thread reserves as much for what it allocates
}
REMEDY = (
    "Where user namespaces are disabled, root can enable them: sysctl -w user.max_user_namespaces=15000, on Debian "
    "also kernel.unprivileged_userns_clone=1, on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0. In "
    "Docker: docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined. No program runs bare."
)

_started = count()


@dataclass(frozen=True)
class Limits:
    timeout_s: float = 6.0
    """Wall-clock time of one test."""
    total_timeout_s: float = 60.0
    """Wall-clock time of all tests of a program."""
    memory_mb: int = 1024
    """Resident memory of all processes of a program together, and of the files they write."""
    num_processes: int = 32
    """Processes and threads of a program."""


@dataclass(frozen=True)
class Outcome:
    """What one exchange with the harness gave."""

    end: End
    answer: str
    """The harness's line, where it answered."""
    output: bytes
    error: str
    """The last line of standard error."""

    @property
    def exit_code(self) -> int:
        """Of a test that ended by itself. Negative: the signal that ended it."""
        return os.waitstatus_to_exitcode(int(self.answer.lstrip("+")))


@contextmanager
def _no_fault_of_the_program() -> Iterator[None]:
    """What the host refuses, descriptors say, ends no program with a reward of 0."""
    try:
        yield
    except OSError as error:
        raise GradingError(f"the sandbox failed: {error}") from error


class Sandbox:
    """One program in a sandbox of its own, from start to `close`. The thread that starts it has to outlive it."""

    @_no_fault_of_the_program()
    def __init__(
        self, program: str, kind: Kind, function: str, limits: Limits, stop: threading.Event | None = None
    ) -> None:
        """`stop`, once set, ends what runs with a GradingError."""
        self.limits = limits
        self._stop = stop or threading.Event()
        self._ready_excess_s = 0.0
        self._last_look = time.monotonic()
        self._inside: int | None = None
        """The namespace's first process, by its number outside, and a descriptor that stays its own."""
        self._handle = -1
        self._has_run = False
        pipes = _pipes(5)
        (job, self._job), (self._output, output), (self._error, error), (self._control, control), filters = pipes
        try:
            for descriptor in (self._job, self._output, self._error, self._control):
                os.set_blocking(descriptor, False)
            os.write(filters[1], filter_program())
            self._process = subprocess.Popen(
                [*confined(filters[0]), *_harness(control)],
                stdin=job,
                stdout=output,
                stderr=error,
                pass_fds=(filters[0], control),
                start_new_session=True,  # Ctrl-C is for the run
            )
        except BaseException:
            _close(self._job, self._output, self._error, self._control)
            raise
        finally:
            _close(job, output, error, control, *filters)
        try:
            self.python_version = self._hello(kind, function)
        except BaseException:
            self.close()
            raise
        self._unsent = memoryview(_frame(program.encode("utf-8", "surrogatepass")))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @_no_fault_of_the_program()
    def run(self, *inputs: bytes, output_limit: int, timeout_s: float) -> Outcome:
        """One test. A check takes two inputs, of which the first only starts the program.

        Raises GradingError where the program was not even started; later tests it may have spoilt itself.
        """
        self._unsent = memoryview(b"".join((self._unsent, *map(_frame, inputs))))
        outcome = self._exchange(output_limit, timeout_s)
        self._has_run = self._has_run or outcome.answer.startswith("+")
        if not self._has_run:
            raise GradingError(f"the sandbox did not start the program ({outcome.end}): {outcome.error}")
        return outcome

    def close(self) -> None:
        """Returns when no process of the sandbox is left."""
        if self._inside is None:
            self._process.kill()
        else:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)
        self._process.wait()  # bubblewrap waits for the namespace's first process, and the kernel has it end last
        _close(self._job, self._output, self._error, self._control)

    def _hello(self, kind: Kind, function: str) -> str:
        """Waits for the harness, which has been given nothing yet that is not ours."""
        settings = {
            "kind": kind,
            "function": function,
            "cpu_s": math.ceil(self.limits.timeout_s) + 1,
            "address_space": (self.limits.memory_mb + STACK_MB) << 20,
            "processes": self.limits.num_processes,
            "file_size": max(FOLDERS_MB.values()) << 20,
        }
        self._unsent = memoryview(_frame(json.dumps(settings).encode()))
        hello = self._exchange(READ_BYTES, HELLO_TIMEOUT_S)
        processes = process_tree.children(self._process.pid)
        if hello.end != "answered" or len(processes) != 1:
            raise GradingError(f"the sandbox did not start ({hello.end}): {hello.error or 'it said nothing'}")
        self._handle = os.pidfd_open(processes[0])
        self._inside = processes[0]
        for pid in (self._process.pid, *processes):
            with suppress(OSError):
                Path(f"/proc/{pid}/oom_score_adj").write_text("1000")  # where memory ends, programs go before the run
        return hello.answer

    def _exchange(self, output_limit: int, timeout_s: float) -> Outcome:
        """Sends what is unsent, and reads until the harness answers or a limit is passed."""
        deadline = time.monotonic() + timeout_s
        next_look = _next_look()
        output, error, answer, num_error_bytes = bytearray(), b"", b"", 0
        poll = select.poll()
        for descriptor in (self._output, self._error, self._control):
            poll.register(descriptor, select.POLLIN)
        poll.register(self._job, select.POLLOUT)
        end: End | None = None
        while end is None:
            if self._stop.is_set():
                raise GradingError("the grader was closed")
            ready = {descriptor for descriptor, _ in poll.poll(max(0.0, next_look - time.monotonic()) * 1000)}
            if self._job in ready and not self._send():
                poll.unregister(self._job)
            if self._control in ready:  # before output is read: what was printed before the answer is then in the pipe
                answer += (said := _read(self._control))
                end = "died" if not said else "answered" if answer.endswith(b"\n") else None
            while (piece := _read(self._output)) and len(output) <= output_limit:
                output += piece
            while (piece := _read(self._error)) and num_error_bytes <= ERROR_LIMIT_BYTES:
                num_error_bytes += len(piece)
                error = (error + piece)[-ERROR_TAIL_BYTES:]
            if len(output) > output_limit or num_error_bytes > ERROR_LIMIT_BYTES:
                end = "output"
            now = time.monotonic()
            if end is None and now >= deadline:
                end = "time"
            if end is None and now >= next_look:
                end, next_look = self._excess(), _next_look()
        lines = error.decode("utf-8", "replace").split("\n")
        return Outcome(end, answer.decode().strip(), bytes(output), next((s for s in lines[::-1] if s.strip()), ""))

    def _send(self) -> bool:
        """Whether something is left to send, to someone who reads."""
        try:
            self._unsent = self._unsent[os.write(self._job, self._unsent[:READ_BYTES]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return len(self._unsent) > 0

    def _excess(self) -> End | None:
        if self._inside is None:
            return None
        num_bytes, num_threads, num_ready = process_tree.measure(self._process.pid)
        num_bytes += process_tree.folder_bytes(self._inside, tuple(FOLDERS_MB))
        if num_bytes > self.limits.memory_mb << 20:
            return "memory"
        if num_threads > self.limits.num_processes + 4:  # two are bubblewrap and harness
            return "processes"
        return "cpu" if self._are_too_many(num_ready) else None

    def _are_too_many(self, num_ready: int) -> bool:
        """A bucket that runs over, through all tests of the program. Idling empties it but saves nothing up."""
        now = time.monotonic()
        since_s = min(now - self._last_look, 4 * POLL_S)  # one look that was late says little of the time before
        excess_s = (num_ready - READY_THREADS) * since_s
        self._ready_excess_s = max(0.0, self._ready_excess_s + excess_s)
        self._last_look = now
        return self._ready_excess_s > READY_SLACK_S


def check() -> str:
    """Starts a sandbox for real and returns its Python's version. Raises TaskError with the remedy where it cannot."""
    try:
        with Sandbox("print(6 * 7)", "stdin", "", Limits()) as sandbox:
            outcome = sandbox.run(b"", output_limit=READ_BYTES, timeout_s=HELLO_TIMEOUT_S)
            version = sandbox.python_version
    except GradingError as error:
        raise TaskError(f"programs cannot be graded: {error}. {REMEDY}") from error
    if outcome.output != b"42\n":
        raise TaskError(f"programs cannot be graded: a first program failed: {outcome.error or outcome.end}. {REMEDY}")
    return version


def confined(filter_in: int) -> list[str]:
    """The words before a command that put it into the sandbox. `filter_in`: where bubblewrap reads the call filter."""
    _, prefix = _python_inside()
    ordinary_user: list[str] = []
    if os.geteuid() == 0:  # for whom the kernel limits no number of processes: each sandbox gets a user of its own
        uid = str(64_000 + next(_started) % 1000)
        ordinary_user = [_tool("setpriv", "util-linux"), "--reuid", uid, "--regid", uid, "--clear-groups"]
    return [
        *ordinary_user,
        *(_tool("bwrap", "bubblewrap"), "--unshare-all", "--unshare-user", "--disable-userns", "--hostname", "sandbox"),
        *("--die-with-parent", "--as-pid-1", "--new-session", "--cap-drop", "ALL", "--seccomp", str(filter_in)),
        *("--ro-bind", "/usr", "/usr"),
        *(word for folder in SYSTEM_FOLDERS for word in _show_folder(folder)),
        *(word for file in SYSTEM_FILES for word in ("--ro-bind-try", file, file)),
        *("--tmpfs", "/dev", "--symlink", "/run/stdin", "/dev/stdin", "--symlink", "/run/stdin", "/dev/fd/0"),
        *(word for device in DEVICES for word in ("--dev-bind", device, device)),
        *(word for path, mb in FOLDERS_MB.items() for word in ("--size", str(mb << 20), "--tmpfs", path)),
        *(("--ro-bind", prefix, prefix) if prefix else ()),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv"),
        *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
        "--",
    ]


def _harness(control: int) -> list[str]:
    """Its source is in the command: where oapl is installed may be hidden from the sandbox."""
    interpreter, _ = _python_inside()
    # The main thread's, fixed when it starts. The soft limit alone: many programs set both to unlimited.
    stack = f'ulimit -S -s {STACK_MB << 10} 2>/dev/null; exec "$0" "$@"'
    return ["/bin/sh", "-c", stack, interpreter, "-s", "-P", "-B", "-c", _harness_source(), str(control)]


@cache
def _harness_source() -> str:
    return Path(__file__).with_name("harness.py").read_text()


def _show_folder(folder: str) -> tuple[str, ...]:
    """Most systems have /lib as a link into /usr."""
    if os.path.islink(folder):
        return ("--symlink", os.readlink(folder), folder)
    return ("--ro-bind-try", folder, folder)


def _tool(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise TaskError(
            f"programs cannot be graded: there is no {name}. Install it: apt install {package}. No program runs bare."
        )
    return path


@cache
def _python_inside() -> tuple[str, str | None]:
    """The interpreter for programs, and the folder to show for it if that is not in /usr.

    It is the one that runs oapl, where the sandbox's user can reach it: root's own files, no other user can.
    """
    prefix = os.path.realpath(sys.base_prefix)
    interpreter = f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if Path(prefix).is_relative_to("/usr"):
        return interpreter, None
    if os.geteuid() != 0 or all(folder.stat().st_mode & 0o001 for folder in (Path(prefix), *Path(prefix).parents)):
        return interpreter, prefix
    if os.access("/usr/bin/python3", os.X_OK):
        return "/usr/bin/python3", None
    raise TaskError(
        f"programs cannot be graded: an ordinary user cannot reach {interpreter}, and there is no /usr/bin/python3. "
        f"Install one (apt install python3), or run as an ordinary user."
    )


def _next_look() -> float:
    return time.monotonic() + POLL_S * random.uniform(0.5, 1.5)


def _pipes(number: int) -> list[tuple[int, int]]:
    """All or none."""
    pipes: list[tuple[int, int]] = []
    try:
        for _ in range(number):
            pipes.append(os.pipe())
    except OSError:
        _close(*(end for pipe in pipes for end in pipe))
        raise
    return pipes


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    """Nothing at the end, and where there is nothing yet."""
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return b""


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data
