"""Programs that attack the grader. Each is judged for real, beside a right program.

The problem that most of them get is to add one. A program of ATTEMPTS tries something forbidden and then answers
rightly, so that a reward would mean that it got through. What FAKES have to print cannot be computed.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest

from helpers import NEEDS_SANDBOX
from oapl.errors import TaskError
from oapl.grading.code import grader as grading
from oapl.grading.code import sandbox
from oapl.grading.code.grader import CodeGrader
from oapl.grading.code.problem_tests import Tests
from oapl.grading.code.sandbox import Limits, Sandbox
from oapl.types import Verdict

pytestmark = NEEDS_SANDBOX

LIMITS = Limits(timeout_s=2.0, total_timeout_s=5.0, memory_mb=200, num_processes=16)
ADD_ONE = Tests("stdin", (("2", "3"), ("10", "11")))
RIGHT = "print(int(input()) + 1)"
SECRET = "48151623"
UNKNOWABLE = Tests("stdin", (("1", SECRET),))
UNKNOWABLE_CALL = Tests("call", (("[1]", SECRET),), "f")
CHECKS = f"def check(candidate):\n    secret = {SECRET}\n    assert candidate(1) == secret"
CHECKED = Tests("check", ((CHECKS, ""),), "f")
MARK = "/tmp/written-by-a-hostile-program"

CLONE, BPF, IO_SETUP, VMSPLICE, SYNCFS, EXIT = (
    (56, 321, 206, 278, 306, 60) if platform.machine() == "x86_64" else (220, 280, 0, 75, 267, 93)
)
LIBC = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"

ATTEMPTS = {
    "a TCP connection": ("import socket; socket.create_connection(('127.0.0.1', 22), 1)", "PermissionError"),
    "a UDP socket": ("import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)", "PermissionError"),
    "an IPv6 socket": ("import socket; socket.socket(socket.AF_INET6)", "PermissionError"),
    "a name looked up": ("import socket; socket.getaddrinfo('example.com', 80)", "gaierror"),
    "an abstract unix socket": ("import socket; socket.socket(socket.AF_UNIX).connect('\\0x')", "PermissionError"),
    "a socket to the hypervisor": ("import socket; socket.socket(40, socket.SOCK_STREAM)", "PermissionError"),
    "the list of users": ("open('/etc/passwd').read()", "FileNotFoundError"),
    "the host's name": ("assert __import__('os').uname().nodename != 'sandbox'", "AssertionError"),
    "root's home": ("import os; os.listdir('/root')", "FileNotFoundError"),
    "the homes": ("import os; os.listdir('/home')", "FileNotFoundError"),
    "this file": (f"open({str(Path(__file__).resolve())!r})", "FileNotFoundError"),
    "other processes": ("import os; os.listdir('/proc')", "FileNotFoundError"),
    "the parent's memory": ("import os; open(f'/proc/{os.getppid()}/mem')", "FileNotFoundError"),
    "the kernel's settings": ("import os; os.listdir('/sys')", "FileNotFoundError"),
    "the environment of the run": ("import os; os.environ['OF_THE_RUN']", "KeyError"),
    "a file in the system": ("open('/usr/x', 'w')", "Read-only|Permission"),
    "a file at the root": ("open('/x', 'w')", "Read-only"),
    "a file among the devices": ("open('/dev/x', 'w')", "Read-only"),
    "a link out": ("import os; os.symlink('/etc/passwd', 'x'); open('x')", "FileNotFoundError"),
    "a hard link": ("import os; os.link('/usr/bin/env', '/tmp/env')", "Invalid cross-device|Permission|not permitted"),
    "a device of its own": ("import os, stat; os.mknod('/tmp/d', stat.S_IFBLK | 0o600, 1)", "PermissionError"),
    "the terminal": ("open('/dev/tty')", "FileNotFoundError"),
    "typing into the terminal": ("import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x')", "OSError"),
    "becoming root": ("import os; os.setuid(0)", "PermissionError|Invalid argument"),
    "a root folder of its own": ("import os; os.chroot('/tmp')", "PermissionError"),
    "more than its limits": (
        "import resource as r; r.setrlimit(r.RLIMIT_NPROC, (r.RLIM_INFINITY,) * 2)",
        "not allowed to raise",
    ),
    "a lower nice value": ("import os; os.setpriority(os.PRIO_PROCESS, 0, -5)", "PermissionError"),
    "a new namespace": (LIBC + "assert libc.unshare(0x10000000) == 0", "AssertionError"),
    "a namespace by clone": (LIBC + f"assert libc.syscall({CLONE}, 0x10000011, 0, 0, 0, 0) >= 0", "AssertionError"),
    "a sandbox of its own": (
        "import subprocess; subprocess.run(['bwrap', '--bind', '/', '/', 'true'], check=True)",
        "CalledProcessError",
    ),
    "a mount": (LIBC + "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0", "AssertionError"),
    "writing to the read-only root": (LIBC + "assert libc.mount(b'', b'/', b'', 32, None) == 0", "AssertionError"),
    "tracing the harness": (LIBC + "assert libc.ptrace(16, 1, 0, 0) == 0", "AssertionError"),
    "tracing itself": (LIBC + "assert libc.ptrace(0, 0, 0, 0) == 0", "AssertionError"),
    "files without a place": ("import os; os.memfd_create('x')", "PermissionError"),
    "memory without a process": (LIBC + "assert libc.shmget(0, 1 << 20, 0o1600) >= 0", "AssertionError"),
    "memory that is shared without a file": ("import mmap; mmap.mmap(-1, 4096)", "PermissionError"),
    "memory that is shared by a device": ("open('/dev/zero', 'r+b')", "FileNotFoundError"),
    "memory that only a pipe holds": (
        LIBC + f"import os; assert libc.syscall({VMSPLICE}, os.pipe()[1], ctypes.create_string_buffer(16), 1, 0) >= 0",
        "AssertionError",
    ),
    "the host's disks at work": (LIBC + f"assert libc.syscall({SYNCFS}, 0) == 0", "AssertionError"),
    "a watch on the host's files": (LIBC + "assert libc.inotify_init1(0) >= 0", "AssertionError"),
    "a wider watch on the host's files": (LIBC + "assert libc.fanotify_init(0x200, 0) >= 0", "AssertionError"),
    "the kernel's log": (LIBC + "assert libc.klogctl(10, None, 0) >= 0", "AssertionError"),
    "the kernel's rings": (
        LIBC + "assert libc.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0",
        "AssertionError",
    ),
    "the kernel's older rings": (
        LIBC + f"assert libc.syscall({IO_SETUP}, 1, ctypes.byref(ctypes.c_long())) == 0",
        "AssertionError",
    ),
    "a lock on a file of the host": (
        "import fcntl, sys; fcntl.flock(open('/usr/bin/env'), fcntl.LOCK_SH)",
        "PermissionError",
    ),
    "a pair of sockets of another kind": ("import socket; socket.socketpair(30)", "PermissionError"),
    "limits of another process": ("import resource; resource.prlimit(1, resource.RLIMIT_CPU)", "PermissionError"),
    "a kernel program": (LIBC + f"assert libc.syscall({BPF}, 0, 0, 0) >= 0", "AssertionError"),
    "a huge file": ("open('x', 'wb').truncate(1 << 40)", "File too large"),
    "a full /tmp": ("open('x', 'wb').write(bytes(1 << 27))", "No space left"),
    "a full /dev/shm": ("open('/dev/shm/x', 'wb').write(bytes(1 << 27))", "No space left"),
    "a gigabyte at once": ("x = bytearray(1 << 30)", "MemoryError"),
    "no descriptors": ("import os; os.closerange(0, 64)", "EOF|Bad file|OSError|exit code"),
    "a crash": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "an abort": ("import os; os.abort()", "SIGABRT"),
    "no end to recursion": ("def f(): f()\nf()", "RecursionError"),
    "a file of the system as a program": ("import os; os.execv('/usr/bin/true', ['true'])", "wrong output: got ''"),
    "others to kill": ("import os; os.kill(-1, 9)", "ProcessLookupError"),
    "a life after death": ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
}

EXCESSES = {
    "a fork bomb": ("import os\nwhile True: os.fork()", "ended with|2 s|one core"),
    "a patient fork bomb": (
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        "2 s|processes|one core",
    ),
    "zombies": ("import os\nwhile True:\n  if os.fork() == 0: os._exit(0)", "BlockingIOError"),
    "threads without end": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
        "can't start new thread|2 s",
    ),
    "a thread that does not end": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
        "2 s",
    ),
    "memory step by step": ("x = []\nwhile True: x.append(bytearray(10**6))", "200 MB|MemoryError"),
    "memory of many processes": (
        "import os, time\nfor _ in range(8):\n  if os.fork() == 0: x = b'x' * 60_000_000; break\ntime.sleep(9)",
        "200 MB|one core",
    ),
    "memory that is shared": (
        "import mmap, os\nf = open('/run/x', 'w+b')\nf.truncate(15 * 10**7)\nm = mmap.mmap(f.fileno(), 0)\n"
        "os.fork()\nfor i in range(0, len(m), 4096): m[i] = 1\nwhile True: pass",
        "200 MB",
    ),
    "memory of processes whose first thread has ended": (
        LIBC + "import os, threading, time\n"
        "def hoard(): time.sleep(0.3); x = b'x' * 60_000_000; time.sleep(9)\n"
        "for _ in range(4):\n  if os.fork() == 0: threading.Thread(target=hoard).start(); libc.syscall("
        f"{EXIT}, 0)\ntime.sleep(9)",
        "200 MB",
    ),
    "memory in files": (
        "x = [open(p, 'wb').write(bytes(62 << 20)) for p in ('/tmp/x', '/dev/shm/x')]\n"
        "open('/run/x', 'wb').write(bytes(99 << 20))\nwhile True: pass",
        "200 MB",
    ),
    "empty files": ("import itertools\nfor n in itertools.count(): open(str(n), 'w').close()", "200 MB|2 s"),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
        "200 MB|MemoryError|SEGV",
    ),
    "sleep": ("import time\ntime.sleep(99)", "2 s"),
    "a busy loop": ("while True: pass", "2 s"),
    "reading without end": ("import sys\nwhile True: sys.stdin.read()", "2 s"),
    "deaf to signals": (
        "import signal\nfor s in set(range(1, 32)) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "2 s",
    ),
    "an alarm put off": ("import signal\nsignal.alarm(0)\nsignal.setitimer(0, 0)\nwhile True: pass", "2 s"),
    "stopped": ("import os\nos.kill(os.getpid(), 19)", "2 s"),
    "output without end": ("while True: print('x' * 1000)", "printed without end"),
    "one line without end": ("while True: print('x' * 1000, end='')", "printed without end"),
    "errors without end": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "printed without end"),
    "output of many": ("import os\nos.fork(); os.fork()\nwhile True: os.write(1, b'x' * 9999)", "printed without end"),
    "slow to compile": ("x = " + "-" * 90_000 + "1", "MemoryError|RecursionError|SyntaxError|SEGV|2 s"),
}

LOOK_EVERYWHERE = """
import gc, os, sys
backwards = '32615184'
seen = [repr(o)[:10**6] for o in gc.get_objects()]
frame = sys._getframe()
while frame:
    seen += [repr(frame.f_locals), repr(frame.f_globals)]
    frame = frame.f_back
for top in ('/tmp', '/run', '/dev/shm'):
    for path, _, files in os.walk(top):
        seen += [open(os.path.join(path, name), errors='replace').read() for name in files]
for descriptor in range(3, 64):
    try:
        os.set_blocking(descriptor, False)
        seen.append(os.read(descriptor, 9999).decode())
    except OSError:
        pass
seen += map(str, sys.argv + list(os.environ.values()))
if any(backwards[::-1] in text for text in seen): print(backwards[::-1])
"""

FAKES = {
    "ends at once": "import sys; sys.exit(0)",
    "ends harder": "import os; os._exit(0)",
    "raises SystemExit": "raise SystemExit",
    "ends at its end": "import atexit, os; atexit.register(os._exit, 0)",
    "swaps itself for true": "import os; os.execv('/bin/true', ['true'])",
    "prints what it thinks the harness says": "print('0'); print('256')",
    "writes to every descriptor": (
        "import os\nfor d in range(2, 64):\n  try: os.write(d, b'0\\n')\n  except OSError: pass\nos._exit(0)"
    ),
    "looks for the answer everywhere": LOOK_EVERYWHERE,
    "patches what compares": "import builtins, json\njson.loads = json.dumps = builtins.all = lambda *a, **k: True",
    "patches the harness": (
        "import sys\nfor m in list(sys.modules.values()):\n"
        "  for n in list(vars(m)):\n    if n in ('end_of', 'compare', 'same_output'): setattr(m, n, lambda *a: 0)"
    ),
    "prints bytes that are no text": "import os; os.write(1, bytes(range(256)))",
    "prints an object that equals all": (
        "class E(str):\n  __eq__ = lambda *a: True\n  __hash__ = str.__hash__\nprint(E('x'))"
    ),
    "leaves the answering to a child": "import os\nif os.fork(): os._exit(0)\nprint(1)",
    "kills its parent": "import os; os.kill(os.getppid(), 9); os._exit(0)",
}

ALWAYS_EQUAL = "class E(int):\n  __eq__ = lambda *a: True\n  __ne__ = lambda *a: False\n  __hash__ = int.__hash__\n"
FAKE_FUNCTIONS = {
    "returns what equals all": ALWAYS_EQUAL + "def f(x): return E(7)",
    "returns what calls a function when read": (
        "import os\nclass P:\n  def __reduce__(self): return (os._exit, (0,))\ndef f(x): return P()"
    ),
    "ends instead of returning": "import os\ndef f(x): os._exit(0)",
    "exits instead of returning": "import sys\ndef f(x): sys.exit(0)",
    "ends before it is called": "import os; os._exit(0)",
    "looks at its caller": (
        "import gc, sys\ndef f(x):\n  frame = sys._getframe()\n  while frame := frame.f_back:\n"
        "    if 'secret' in frame.f_locals: return frame.f_locals['secret']\n"
        "  return max((o for o in gc.get_objects() if isinstance(o, int)), default=0)"
    ),
    "kills the other side": "import os, signal\ndef f(x): os.kill(-1, signal.SIGTERM)",
    "interrupts the other side": "import os, signal\ndef f(x): os.kill(-1, signal.SIGINT); return 1",
    "leaves no process to the other side": (
        "import os, time\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(9)"
    ),
    "takes the memory at once": "x = []\nwhile True: x.append(b'x' * 10**7)",
    "writes answers of its own": (
        "import os, pickle\nfor d in range(3, 64):\n  try: os.write(d, pickle.dumps((None, True)))\n"
        "  except OSError: pass\ndef f(x): return True"
    ),
}

HARMLESS = {
    "kills the first process": "import os; os.kill(1, 9); os.kill(1, 15); os.kill(1, 2)",
    "stops the first process": "import os; os.kill(1, 19)",
    "leaves a child": "import os, time\nif os.fork() == 0: time.sleep(99)",
    "leaves a daemon": (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        "    while True: os.write(1, b''); time.sleep(.01)\n  os._exit(0)"
    ),
    "leaves files": (
        "import os; open('/tmp/x', 'x'); os.mkdir('/tmp/d'); os.symlink('/', '/tmp/d/l'); open('/dev/shm/x', 'x')"
    ),
    "writes where the host might": f"open({MARK!r}, 'w')",
    "replaces its input": "import os; os.unlink('/run/stdin'); os.symlink('/dev/random', '/run/stdin')",
}


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    grader = CodeGrader(num_workers=2, limits=LIMITS)
    grader.start()
    yield grader
    grader.close()


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test no process is in the namespace of one of its sandboxes, and nothing is on the host."""
    namespaces = []
    held = ExitStack()  # a namespace that is held open keeps its number for itself

    class Watched(Sandbox):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            namespace = f"/proc/{self._inside}/ns/pid"
            held.callback(os.close, os.open(namespace, os.O_RDONLY))
            namespaces.append(os.readlink(namespace))

    monkeypatch.setattr(grading, "Sandbox", Watched)
    monkeypatch.setenv("OF_THE_RUN", "1")
    with held:
        yield
        assert not set(namespaces) & set(all_namespaces())
    assert not Path(MARK).exists()


def all_namespaces() -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            yield os.readlink(process / "ns/pid")


def judged(grader: CodeGrader, program: str, tests: Tests, right: str = RIGHT) -> Verdict:
    """What the program earns while a right one runs beside it, which has to pass."""
    start = time.monotonic()
    verdict, beside = grader.grade([f"```\n{text}\n```" for text in (program, right)], tests)
    if tests is ADD_ONE:
        assert beside.reward == 1.0, beside.reason
    assert time.monotonic() - start < LIMITS.timeout_s + 3
    return verdict


@pytest.mark.parametrize("name", ATTEMPTS)
def test_the_sandbox_does_not_give(name: str, grader: CodeGrader) -> None:
    attempt, reason = ATTEMPTS[name]
    verdict = judged(grader, f"{attempt}\n{RIGHT}", ADD_ONE)
    assert verdict.reward == 0.0
    assert re.search(reason, verdict.reason), verdict.reason


@pytest.mark.parametrize("name", EXCESSES)
def test_the_sandbox_ends(name: str, grader: CodeGrader) -> None:
    program, reason = EXCESSES[name]
    verdict = judged(grader, program, ADD_ONE)
    assert verdict.reward == 0.0
    assert re.search(reason, verdict.reason), verdict.reason


@pytest.mark.parametrize("name", FAKES)
def test_no_reward_for_a_program_that(name: str, grader: CodeGrader) -> None:
    verdict = judged(grader, FAKES[name], UNKNOWABLE)
    assert verdict.reward == 0.0
    assert "wrong output" in verdict.reason or "ended" in verdict.reason


@pytest.mark.parametrize("tests", [UNKNOWABLE_CALL, CHECKED], ids=["call", "check"])
@pytest.mark.parametrize("name", FAKE_FUNCTIONS)
def test_no_reward_for_a_function_that(name: str, tests: Tests, grader: CodeGrader) -> None:
    right = f"def f(x): return {SECRET}"
    verdict, beside = grader.grade([f"```\n{text}\n```" for text in (FAKE_FUNCTIONS[name], right)], tests)
    assert verdict.reward == 0.0, verdict.reason
    assert beside.reward == 1.0, beside.reason


@pytest.mark.parametrize("name", HARMLESS)
def test_no_harm_is_done_by_a_right_program_that(name: str, grader: CodeGrader) -> None:
    verdict = judged(grader, f"{RIGHT}\nimport sys; sys.stdout.flush()\n{HARMLESS[name]}", ADD_ONE)
    assert verdict.reward == 1.0, verdict.reason


def test_programs_with_many_busy_processes_are_ended_before_their_neighbour_runs_out_of_time() -> None:
    """Each in a session of its own, which the kernel gives as much time as the neighbour's whole sandbox."""
    hostile = "import os\nfor _ in range(30):\n  if os.fork() == 0: os.setsid(); break\nwhile True: pass"
    honest = "import time\nwhile time.process_time() < 1.5: pass\nprint(int(input()) + 1)"
    grader = CodeGrader(2)
    programs = [honest, *(f"# {number}\n{hostile}" for number in range(3))]
    beside, *ended = grader.grade([f"```\n{program}\n```" for program in programs], Tests("stdin", (("2", "3"),)))
    grader.close()
    assert {verdict.reason for verdict in ended} == {"test 1 of 1: used more than one core"}
    assert beside.reward == 1.0, beside.reason


def test_who_looks_everywhere_does_find_what_is_there(grader: CodeGrader) -> None:
    in_its_input = Tests("stdin", ((SECRET, SECRET),))
    assert judged(grader, LOOK_EVERYWHERE, in_its_input).reward == 1.0


def test_a_program_that_only_knows_the_first_test_fails_the_second(grader: CodeGrader) -> None:
    assert judged(grader, "print(3)", ADD_ONE).reason == "test 2 of 2: wrong output: got '3', expected '11'"


def test_a_program_that_hides_its_files_leaves_none_to_its_next_test(grader: CodeGrader) -> None:
    program = f"""
import os
os.chmod("/tmp", 0o755)
assert not os.path.exists("/tmp/left")
open("/tmp/left", "x")
os.chmod("/tmp", 0)
{RIGHT}"""
    assert judged(grader, program, ADD_ONE).reward == 1.0


def test_a_program_that_wakes_the_watch_does_not_choose_its_moments() -> None:
    """Looks are neither told by the time since the last nor, where output wakes the watch, chosen by printing."""
    program = "import os, time\nwhile True: time.sleep(0.026); os.write(1, b'x')"
    moments: list[float] = []

    class Watched(Sandbox):
        def _excess(self) -> sandbox.End | None:
            moments.append(time.monotonic())
            return super()._excess()

    with Watched(program, "stdin", "", LIMITS) as watched:
        watched.run(b"", output_limit=1000, timeout_s=2)
    waits = [later - earlier for earlier, later in pairwise(moments)]
    assert quantiles(waits, n=10)[0] < 0.02 < 0.03 < quantiles(waits, n=10)[-1]


def test_sigkill_of_the_run_ends_its_sandboxes() -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", "import sys\nfrom oapl.grading.code.sandbox import *\n"
         "s = Sandbox('while True: pass', 'stdin', '', Limits())\nprint(s._inside, flush=True)\n"
         "s.run(b'', output_limit=1, timeout_s=60)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    first_process = Path(f"/proc/{int(run.stdout.readline())}")
    time.sleep(0.3)  # the program is running by now
    assert first_process.exists()
    run.send_signal(signal.SIGKILL)
    run.communicate()
    deadline = time.monotonic() + 5
    while first_process.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_bubblewrap_no_program_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TaskError, match=r"there is no (setpriv|bwrap)\. Install it: apt install"):
        CodeGrader(1).grade([f"```\n{RIGHT}\n```"], ADD_ONE)


def test_where_namespaces_are_refused_the_error_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "bwrap: No permissions to create a new namespace"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # root's ordinary users cannot enter pytest's own
        os.chmod(folder, 0o755)
        refusing = Path(folder) / "bwrap"
        refusing.write_text(f"#!/bin/sh\necho '{refusal}' >&2\nexit 1\n")
        refusing.chmod(0o755)
        monkeypatch.setenv("PATH", folder, prepend=os.pathsep)
        with pytest.raises(TaskError, match=rf"{refusal}.*sysctl.*docker run --security-opt"):
            sandbox.check()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_an_ordinary_user_has_the_same_sandbox() -> None:
    source = Path(sandbox.__file__).parents[3]
    if not all(folder.stat().st_mode & 0o001 for folder in (source, *source.parents)):
        pytest.skip("an ordinary user cannot reach this package")
    program = """
from oapl.grading.code.sandbox import *
print(check())
hoard = "open('x', 'wb').write(b'x' * (60 << 20))\\nx = b'x' * (60 << 20)\\nwhile True: pass"
forks = "import os, time\\nfor n in range(99):\\n  try: os.fork() or time.sleep(9)\\n  except OSError: break\\nprint(n)"
for program, memory_mb in ((forks, 1000), (hoard, 100)):
    with Sandbox(program, "stdin", "", Limits(2, memory_mb=memory_mb, num_processes=8)) as sandbox:
        outcome = sandbox.run(b"", output_limit=1000, timeout_s=2)
        print(outcome.end, outcome.output.decode().strip() or outcome.error)
"""
    ran = subprocess.run(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/python3", "-B", "-c", program],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )
    version, forks, memory = ran.stdout.splitlines()
    assert re.fullmatch(r"3\.\d+\.\d+", version)
    assert forks == "answered 8"  # of 8 + 2 processes one is the harness and one the program itself
    assert memory == "memory "
