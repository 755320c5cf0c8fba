"""What runs inside the sandbox: it is given one program and then tests, and gives each test a process of its own.

It is the first process of the sandbox's process namespace: no program can signal it away, all processes that a program
leaves behind become its children, and when it ends, the kernel kills the rest. It knows no expected output and judges
nothing. It needs the standard library alone and imports nothing of oapl, which the sandbox does not hold.

In, on descriptor 0: frames, a 4-byte length before each. Out, on the descriptor of its first argument, which no program
gets: a line with the version of Python, then for each test a `+` from each process that it starts and a line with the
exit status (as `waitpid` gives it). What programs print goes straight to descriptors 1 and 2.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import json
import os
import pickle
import resource
import signal
import sys
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

STDIN = "/run/stdin"  # where /dev/stdin points
WRITABLE = ("/tmp", "/dev/shm", "/run")
STAR_IMPORTED = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "json", "typing"),
)
PLAIN_COLLECTIONS: tuple[type[Any], ...] = (list, tuple, set, frozenset)
PLAIN_KINDS: dict[type[Any], Callable[[Any], Any]] = {
    **{kind: kind for kind in (int, float, complex, bytes)},
    str: str.__str__,  # `str` itself would name an enumeration's member
}
THREAD_STACK_BYTES = 16 << 20  # twice what is usual: all that may run fit into the address space

Settings = dict[str, Any]


def serve(control: int) -> Callable[[], None]:
    """Starts a process a test for ever. Returns in those processes alone, with what is to be done there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one signal that Python has a handler for
    os.set_inheritable(control, False)
    settings: Settings = json.loads(read_frame())
    set_limits(settings)
    names = prelude()
    gc.freeze()  # what is there now need not be looked through at the end of each test
    os.write(control, "{}.{}.{}\n".format(*sys.version_info).encode())
    program = read_frame().decode("utf-8", "surrogatepass")

    def in_child(act: Callable[..., None], *arguments: Any) -> Callable[[], None]:
        os.write(control, b"+")  # by the child, so that nothing of the program's comes before it
        os.close(control)
        seconds = settings["cpu_s"]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        sys.setrecursionlimit(50_000)
        return partial(act, program, names, settings["function"], *arguments)

    act = {"stdin": run_main, "call": run_call}.get(settings["kind"])
    while True:
        test = read_frame()
        clear_folders()
        if act:
            give_stdin(test if act is run_main else b"")
            child = os.fork()
            if child == 0:
                return in_child(act, test)
        else:
            (asks_in, asks_out), (answers_in, answers_out) = os.pipe(), os.pipe()
            if os.fork() == 0:  # before the checks are read: they never were in the memory of the program's process
                close(asks_out, answers_in)
                give_stdin(b"")
                return in_child(answer_calls, asks_in, answers_out)
            close(asks_in, answers_out)
            checks = read_frame()
            child = os.fork()
            if child == 0:
                return in_child(run_checks, checks, asks_out, answers_in)
            del checks  # nor are they in that of a later one
            close(asks_out, answers_in)
        os.write(control, f"{end_of(child)}\n".encode())


def read_frame() -> bytes:
    return read_exactly(int.from_bytes(read_exactly(4), "big"))


def read_exactly(num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        piece = os.read(0, num_bytes - len(data))
        if not piece:
            os._exit(0)  # who asked is gone or has seen enough
        data += piece
    return bytes(data)


def set_limits(settings: Settings) -> None:
    """For every process from here on. None of them may raise a limit again."""
    limits = {
        resource.RLIMIT_AS: settings["address_space"],
        resource.RLIMIT_NPROC: settings["processes"] + 2,  # and this process, and that of a check
        resource.RLIMIT_FSIZE: settings["file_size"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    threading.stack_size(THREAD_STACK_BYTES)  # the default is the limit on the main thread's stack
    sys.set_int_max_str_digits(0)


def prelude() -> dict[str, Any]:
    """The names LiveCodeBench imports for every program: `from m import *` of all, builtins on top, then the modules.

    Builtins come after the stars, so that `pow`, `open` or `compile` are what a program takes them for.
    """
    names: dict[str, Any] = {}
    for module in map(import_module, STAR_IMPORTED):
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        names.update((name, getattr(module, name)) for name in public)
    for name in vars(builtins):
        names.pop(name, None)
    return names | {name: sys.modules[name] for name in (*STAR_IMPORTED, "sys")}


def clear_folders() -> None:
    """No test finds what another wrote."""
    for folder in WRITABLE:
        os.chmod(folder, 0o755)  # a folder that cannot be read looks empty
        for path, folders, files in os.walk(folder, topdown=False):
            for name in (*folders, *files):
                entry = os.path.join(path, name)
                os.rmdir(entry) if name in folders and not os.path.islink(entry) else os.unlink(entry)


def give_stdin(data: bytes) -> None:
    """A file, as a judge's shell would redirect it: its size can be asked, and it can be read again by name."""
    with open(STDIN, "xb") as file:
        file.write(data)


def end_of(child: int) -> int:
    """Waits for a process, then ends all others; returns when the harness is alone."""
    status = 0
    while True:
        with suppress(InterruptedError):
            ended, its_status = os.wait()
            if ended == child:
                status = its_status
                break
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    return status


def enter(name: str, names: dict[str, Any]) -> types.ModuleType:
    """A module that programs run in, with standard input where they look for it."""
    descriptor = os.open(STDIN, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # the old one wraps a pipe
    sys.__stdin__ = sys.stdin  # type: ignore[misc]
    sys.argv = ["program.py"]
    module = types.ModuleType(name)
    module.__dict__.update(names)
    module.__dict__.update(__builtins__=builtins, __file__="program.py")
    sys.modules[name] = module
    return module


def run_main(program: str, names: dict[str, Any], _function: str, _input: bytes) -> None:
    """As `python program.py < input`. The interpreter's own end would take longer than a small test, so it is here."""
    module = enter("__main__", names)
    status = status_of(lambda: exec(compile(program, "program.py", "exec", dont_inherit=True), module.__dict__))
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all threads but daemons
    atexit._run_exitfuncs()
    flush()
    module.__dict__.clear()  # a file left open is written when nothing holds it any more
    gc.collect()
    flush()
    os._exit(status)


def status_of(act: Callable[[], None]) -> int:
    """The exit status that Python gives it."""
    try:
        act()
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            return (ending.code or 0) & 0xFF
        print(ending.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def flush() -> None:
    """What cannot be flushed, as it was closed, detached or has no such method, tells nothing: the output does."""
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        with suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def run_call(program: str, names: dict[str, Any], function: str, arguments: bytes) -> None:
    """Writes the function's result as JSON where output is read. What the program prints goes nowhere."""
    result_to = os.dup(1)
    silence(1)
    result = json.dumps(load_function(program, names, function)(*json.loads(arguments))).encode()
    with open(result_to, "wb") as file:
        file.write(result)
    os._exit(0)


def answer_calls(program: str, names: dict[str, Any], function: str, asks: int, answers: int) -> None:
    """The program's side of a check: runs it, then calls its function with what the other side asks for."""
    silence(1)
    silence(2)
    failure = ""
    try:
        call = load_function(program, names, function)
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"  # told at each call
    with open(asks, "rb") as questions, open(answers, "wb") as replies:
        while True:
            try:
                arguments, keywords = pickle.load(questions)
            except EOFError:
                return
            try:
                reply = failure, "", None
                if not failure:
                    reply = "", "", plain(call(*arguments, **keywords))
                replies.write(pickle.dumps(reply))
            except BaseException as error:
                of_python = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
                replies.write(pickle.dumps((f"{type(error).__name__}: {error}", of_python, str(error))))
            replies.flush()


def plain(value: Any) -> Any:
    """What the other side can read, of what equals it: a Counter is a dict, and a named tuple a tuple."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind in PLAIN_COLLECTIONS:
        if isinstance(value, kind):
            return kind(map(plain, value))
    for kind, exactly in PLAIN_KINDS.items():
        if isinstance(value, kind) and type(value) is not kind:
            return exactly(value)
    return value


def run_checks(_program: str, names: dict[str, Any], function: str, checks: bytes, asks: int, answers: int) -> None:
    """The tests' side: `check(candidate)`, where each call of the candidate is done by the program's process.

    Results come over as plain values: an object that calls itself equal to everything does not.
    """
    silence(1)
    questions, replies = open(asks, "wb"), open(answers, "rb")  # noqa: SIM115

    def candidate(*arguments: Any, **keywords: Any) -> Any:
        pickle.dump((arguments, keywords), questions)
        questions.flush()
        try:
            fault, kind, result = PlainUnpickler(replies).load()
        except EOFError:
            raise RuntimeError("the program ended") from None
        if fault:
            raise exception(fault, kind, result)
        return result

    namespace = {**names, "__name__": "checks"}
    exec(compile(checks, "checks.py", "exec", dont_inherit=True), namespace)
    namespace[function] = candidate  # some checks call the function by its name as well
    namespace["check"](candidate)
    os._exit(0)


class PlainUnpickler(pickle.Unpickler):
    """Numbers, strings, lists, tuples, dicts, sets and ranges. Nothing else is looked up or called.

    A class written in Python must not be among them: a pickle can set its attributes, `__eq__` for one.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("builtins", "range"), ("builtins", "complex")):
            return getattr(builtins, name)
        raise pickle.UnpicklingError(f"the function's result holds a {module}.{name}")


def exception(fault: str, kind: str, message: str) -> Exception:
    """What a check may expect of a candidate: an exception of Python's own kinds, but none that ends a process, nor a
    loop over the candidate's results."""
    found = getattr(builtins, kind, None) if kind else None
    ends_a_loop = found in (StopIteration, StopAsyncIteration)
    if isinstance(found, type) and issubclass(found, Exception) and not ends_a_loop:
        with suppress(TypeError):  # some kinds are not made of a message
            return found(message)
    return RuntimeError(fault)


def load_function(program: str, names: dict[str, Any], name: str) -> Callable[..., Any]:
    """Runs the program, whose main guard does not fire. A method of a class `Solution` comes before a function."""
    module = enter("program", names)
    module.__dict__.pop(name, None)  # `add` of the prelude is not the program's
    exec(compile(program, "program.py", "exec", dont_inherit=True), module.__dict__)
    solution = getattr(module, "Solution", None)
    if solution and hasattr(solution, name):
        return getattr(solution(), name)  # type: ignore[no-any-return]
    if name not in vars(module):
        raise NameError(f"there is no function {name}")
    return vars(module)[name]  # type: ignore[no-any-return]


def close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def silence(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


if __name__ == "__main__":
    serve(int(sys.argv[1]))()
