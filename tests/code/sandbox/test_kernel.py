"""The filters of system calls, run by an interpreter of their instructions."""

import platform
import struct

import pytest

from trl_multiagent.code.sandbox.helpers import kernel


pytestmark = pytest.mark.skipif(not kernel._FIELD, reason="no table of system calls for this machine")
HIGH = 1 << 32  # a 64-bit argument whose lower half is zero


def decide(role, name, *args, number=None, architecture=None):
    """What a filter returns for a call."""
    data = struct.pack("<IIQ", number or kernel._NUMBERS[name], architecture or kernel._ARCHITECTURE, 0)
    data += struct.pack("<6Q", *args, *[0] * (6 - len(args)))
    instructions = list(struct.iter_unpack("HBBI", kernel._FILTERS[role][1].raw[:-1]))
    at, word = 0, 0
    while True:
        code, if_true, if_false, value = instructions[at]
        at += 1
        if code == kernel._RETURN:
            return value
        if code == kernel._LOAD:
            (word,) = struct.unpack_from("<I", data, value)
        else:
            holds = {kernel._EQUAL: word == value, kernel._AT_LEAST: word >= value, kernel._ANY_BIT: word & value}
            at += if_true if holds[code] else if_false


def allowed(name, *args):
    """Whether a program may make a call: it is behind the zygote's filter and its own."""
    return all(decide(role, name, *args) == kernel._ALLOW for role in ("zygote", "candidate"))


@pytest.mark.parametrize(
    ("name", "fine", "refused"),
    [
        ("sendto", [(3, 1, 1, 0x4000, 0)], [(3, 1, 1, 0, HIGH), (3, 1, 1, 0, 1), (3, 1, 1, 0, 5 * HIGH)]),
        ("sendto", [], [(3, 1, 1, 1, 0), (3, 1, 1, 0x4001, 0), (3, 1, 1, HIGH + 1, 0)]),
        ("recvfrom", [(3, 1, 1, 0), (3, 1, 1, 0x40)], [(3, 1, 1, 1), (3, 1, 1, 0x41)]),
        ("mmap", [(0, 1, 3), (HIGH, 1, 3)], [(0, 1, 7), (0, 1, 4), (0, 1, HIGH + 4), (0, 1, 0xFFFFFFFF)]),
        ("mprotect", [(0, 1, 3)], [(0, 1, 5), (0, 1, HIGH + 5)]),
        ("clone", [(0x3D0F00,)], [(0x1200011,), (HIGH,), (HIGH + 17,), (0,)]),
        ("socketpair", [(1, 1), (1, 2)], [(2, 1), (10, 2), (16, 3), (HIGH + 2, 1)]),
        ("ioctl", [(0, 0x5421)], [(0, 0x5412), (0, 0), (0, HIGH)]),
    ],
)
def test_conditions_look_at_all_of_an_argument(name, fine, refused):
    assert [args for args in fine if not allowed(name, *args)] == []
    assert [args for args in refused if allowed(name, *args)] == []


def test_a_program_has_no_call_that_names_something():
    names = (
        "open openat kill setpgid setpriority prctl prlimit64 fcntl sendmsg recvmsg getdents64 newfstatat wait4 clone3"
    )
    assert [name for name in names.split() if name in kernel._NUMBERS and allowed(name)] == []
    for role in ("zygote", "verifier"):
        assert decide(role, "", number=59 if platform.machine() == "x86_64" else 221) == kernel._REFUSE  # execve
        assert decide(role, "openat", 0, 0, 0) == kernel._ALLOW
        assert decide(role, "openat", 0, 0, 1) == decide(role, "openat", 0, 0, 0o100) == kernel._REFUSE
        assert decide(role, "read", architecture=0x40000003) == kernel._KILL  # the same processor's 32-bit calls
        assert decide(role, "", number=0x40000000 + kernel._NUMBERS["read"]) == kernel._KILL


def test_a_folder_adds_calls_for_files_but_no_leases_signals_or_rights():
    def allowed(name, *args):
        return all(decide(f"folder {role}", name, *args) == kernel._ALLOW for role in ("zygote", "candidate"))

    assert allowed("openat", 0, 0, 0o102) and allowed("unlinkat") and allowed("getdents64") and not allowed("clone3")
    # F_DUPFD_CLOEXEC, F_SETLKW, F_SETLEASE, F_SETOWN, F_SETSIG
    assert [allowed("fcntl", 3, act) for act in (1030, 7, 1024, 8, 10)] == [True, True, False, False, False]
    names = "chdir fchmodat kill prctl setpriority prlimit64 sendmsg recvmsg landlock_restrict_self wait4"
    assert not any(map(allowed, names.split()))
    assert decide("folder verifier", "fchmodat") == kernel._ALLOW != decide("folder verifier", "chdir")
