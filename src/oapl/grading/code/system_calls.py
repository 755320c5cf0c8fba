"""The system calls that a program under test is refused, as the filter that bubblewrap loads into the kernel.

Refused is what would get around the sandbox's other limits: memory that belongs to no process and to no file system
(which no limit counts), looking into other processes, new namespaces, and parts of the kernel that a program which
computes an answer has no use for.
"""

from __future__ import annotations

import platform
import struct

from oapl.errors import TaskError

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's AUDIT_ARCH_*: a call made in another architecture's way, with other numbers, ends its process."""

REFUSED = {  # by the kernel's tables: x86_64, aarch64
    "socket": (41, 198),  # socketpair, which asyncio needs, is another call
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "open_by_handle_at": (304, 265),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "vmsplice": (278, 75),  # a pipe then holds a page, and all of a huge one, that is no longer anyone's
    "sync": (162, 81),  # of all the host's disks
    "syncfs": (306, 267),
    "inotify_init": (253, 26),  # what happens to files of the host, and memory for what happened
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "syslog": (103, 116),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_setup": (206, 0),
    "flock": (73, 32),  # on files of the host, all of which can be opened for reading
    "personality": (135, 92),
}

ALLOWED_FOR = {  # the one value of the first argument with which a call is not refused
    "socketpair": ((53, 199), 1),  # AF_UNIX
    "prlimit64": ((302, 261), 0),  # itself
}

REFUSED_WITH = {  # the argument, and what of its bits makes a call refused
    # Shared memory without a file stays where it is, seen by no limit, when all but a page of it is unmapped.
    "mmap": ((9, 222), 3, 0x2F, 0x21),  # MAP_SHARED | MAP_ANONYMOUS
}

LOAD, AND, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16  # offsets in the kernel's struct seccomp_data
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE: the call fails with EPERM
FOREIGN_NUMBERS = 0x40000000  # x86_64 has its x32 calls from here on


def filter_program(machine: str = platform.machine()) -> bytes:
    """A classic BPF program: 8 bytes an instruction (code, jump if true, jump if false, value)."""
    if machine not in ARCHITECTURES:
        raise TaskError(
            f"programs can be graded on {' and '.join(ARCHITECTURES)}, whose system calls the sandbox knows, "
            f"but this machine is {machine}. Grade on another machine."
        )
    column = list(ARCHITECTURES).index(machine)
    numbers = [FOREIGN_NUMBERS, *(refused[column] for refused in REFUSED.values())]
    tests = [JUMP_IF_AT_LEAST] + [JUMP_IF_EQUAL] * (len(numbers) - 1)
    lines = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        *(line for numbers, value in ALLOWED_FOR.values() for line in _only_with(numbers[column], value)),
        *(line for numbers, *bits in REFUSED_WITH.values() for line in _only_without(numbers[column], *bits)),
        *((test, len(numbers) - i, 0, number) for i, (test, number) in enumerate(zip(tests, numbers, strict=True))),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _only_with(number: int, value: int) -> list[tuple[int, int, int, int]]:
    """Passes on where the call is another one. It looks at the 32 bits that the kernel takes for the value."""
    return [
        (JUMP_IF_EQUAL, 0, 4, number),
        (LOAD, 0, 0, ARGUMENT),
        (JUMP_IF_EQUAL, 0, 1, value),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]


def _only_without(number: int, argument: int, mask: int, bits: int) -> list[tuple[int, int, int, int]]:
    return [
        (JUMP_IF_EQUAL, 0, 5, number),
        (LOAD, 0, 0, ARGUMENT + 8 * argument),
        (AND, 0, 0, mask),
        (JUMP_IF_EQUAL, 0, 1, bits),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
