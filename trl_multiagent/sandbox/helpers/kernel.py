"""
The kernel's own protections, called through ctypes: seccomp filters, Landlock, namespaces, privileges.

Each function either takes effect or raises `OSError`. What a machine allows is found out by `probe`, which tries each
layer in a throw-away child and looks at the effect.
"""

import ctypes
import errno
import json
import os
import platform
import struct
from pathlib import Path


NOBODY = 65534  # the user and group that a zygote started by root becomes

_libc = ctypes.CDLL(None, use_errno=True)
_MACHINE = platform.machine()
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_SUBREAPER = 1, 4, 22, 24, 36
_PR_SET_NO_NEW_PRIVS = 38
_SIGKILL = 9


def _check(result, what):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option, *args):
    words = [ctypes.c_ulong(arg) for arg in (*args, 0, 0, 0, 0)[:4]]
    return _check(_libc.prctl(option, *words), f"prctl {option}")


def die_with_parent():
    """The kernel kills this process when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def adopt_orphans():
    """Processes that lose their parent below this one become its children."""
    _prctl(_PR_SET_SUBREAPER, 1)


def hide_memory():
    """No other process of the same user may trace this one or read its memory."""
    _prctl(_PR_SET_DUMPABLE, 0)


# ---------------------------------------------------------------------------------------------------------- privileges


def drop_user():
    """Becomes nobody; only root can."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def drop_capabilities():
    """Gives up every capability, for this process and whatever it starts."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # past the last one, or not privileged enough to have any
    header = struct.pack("Ii", 0x20080522, 0)
    _check(_libc.capset(header, bytes(24)), "capset")


# ------------------------------------------------------------------------------------------------------------- seccomp

# name:number on x86_64:number on aarch64, where `-` means that the machine has no such call
_NUMBERS = {
    name: int(number)
    for name, *numbers in (
        entry.split(":")
        for entry in """
    read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62 mmap:9:222 mprotect:10:226
    munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 ioctl:16:29 access:21:-
    pipe:22:- select:23:- sched_yield:24:124 mremap:25:216 madvise:28:233 dup:32:23 dup2:33:- nanosleep:35:101
    getitimer:36:102 alarm:37:- setitimer:38:103 getpid:39:172 sendto:44:206 recvfrom:45:207 sendmsg:46:211
    recvmsg:47:212 socketpair:53:199 getsockname:51:204 getsockopt:55:209 clone:56:220 exit:60:93 wait4:61:260 kill:62:129
    uname:63:160 fcntl:72:25 getcwd:79:17 chdir:80:49 readlink:89:- gettimeofday:96:169 getrusage:98:165 sysinfo:99:179
    times:100:153 getuid:102:174 getgid:104:176 geteuid:107:175 getegid:108:177 setpgid:109:154 getppid:110:173
    sigaltstack:131:132 prctl:157:167 gettid:186:178 futex:202:98 sched_getaffinity:204:123
    getdents64:217:61 set_tid_address:218:96 restart_syscall:219:128 clock_gettime:228:113 clock_getres:229:114
    clock_nanosleep:230:115 exit_group:231:94 epoll_wait:232:- epoll_ctl:233:21 openat:257:56 newfstatat:262:79
    readlinkat:267:78 faccessat:269:48 pselect6:270:72 ppoll:271:73 set_robust_list:273:99 epoll_pwait:281:22
    eventfd2:290:19 epoll_create1:291:20 dup3:292:24 pipe2:293:59 prlimit64:302:261 getrandom:318:278 membarrier:324:283
    statx:332:291 rseq:334:293 clone3:435:435 faccessat2:439:439
    """.split()
    )
    if (number := dict(zip(("x86_64", "aarch64"), numbers, strict=True)).get(_MACHINE, "-")) != "-"
}
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}.get(_MACHINE)
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF instructions
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_PROT_EXEC, _CLONE_THREAD, _AF_UNIX, _FIONBIO, _TIOCGWINSZ = 4, 0x10000, 1, 0x5421, 0x5413
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# What computing, threads and asyncio need. No way to name a file, a process or an address is among them.
_COMPUTE = """
read write close fstat poll lseek munmap brk rt_sigaction rt_sigprocmask rt_sigreturn select sched_yield mremap madvise dup
nanosleep getitimer alarm setitimer getpid getppid uname getcwd gettimeofday getrusage sysinfo times getuid getgid geteuid
getegid sigaltstack gettid futex sched_getaffinity epoll_wait epoll_ctl exit exit_group clock_gettime clock_getres
clock_nanosleep restart_syscall set_tid_address pselect6 ppoll set_robust_list epoll_pwait eventfd2 epoll_create1 pipe pipe2
getrandom membarrier rseq getsockopt getsockname recvfrom
""".split()
_COMPUTE_IF = {  # (index of the argument, test, value): the call is refused where the test fails
    "mmap": (2, "none of", _PROT_EXEC),
    "mprotect": (2, "none of", _PROT_EXEC),
    "sendto": (4, "equals", 0),
    "socketpair": (0, "equals", _AF_UNIX),
    "ioctl": (1, "equals", _FIONBIO),
    "clone": (0, "any of", _CLONE_THREAD),
}
# What the zygote needs besides, and every candidate gives up
_ZYGOTE = (
    "wait4 kill prlimit64 setpgid setpriority recvmsg sendmsg prctl dup2 dup3 fcntl close_range clone openat".split()
)
# What the verifier needs besides: sockets, and reading the standard library
_VERIFIER = """
recvmsg sendmsg mmap mprotect ioctl fcntl dup2 dup3 stat lstat access readlink getdents64 newfstatat readlinkat faccessat
faccessat2 statx openat open
""".split()


def _assemble(rules, default):
    """`rules`: call -> action, or (test, action where it holds, action where it does not). The kernel's form of a filter."""
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURE or 0), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if _MACHINE == "x86_64":
        program += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]  # the x32 numbers of the same calls
    for name, action in rules.items():
        if name not in _NUMBERS:
            continue
        if type(action) is int:
            program += [(_EQUAL, 0, 1, _NUMBERS[name]), (_RETURN, 0, 0, action)]
            continue
        (argument, test, value), holds, fails = action
        jump = {"equals": (_EQUAL, 0, 1), "any of": (_ANY_BIT, 0, 1), "none of": (_ANY_BIT, 1, 0)}[test]
        program += [
            (_EQUAL, 0, 4, _NUMBERS[name]),
            (_LOAD, 0, 0, 16 + 8 * argument),
            (*jump, value),
            (_RETURN, 0, 0, holds),
            (_RETURN, 0, 0, fails),
        ]
    program.append((_RETURN, 0, 0, default))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    return header, code  # the header points at the code


_REFUSE = _ERRNO | errno.EPERM
_RULES_COMPUTE = dict.fromkeys(_COMPUTE, _ALLOW) | {
    name: (test, _ALLOW, _REFUSE) for name, test in _COMPUTE_IF.items()
}
_NO_CLONE3 = {"clone3": _ERRNO | errno.ENOSYS}  # its flags are in memory, where a filter cannot look: libc uses clone
_READING = {
    "openat": ((2, "none of", _WRITING), _ALLOW, _REFUSE),
    "open": ((1, "none of", _WRITING), _ALLOW, _REFUSE),
}
_FILTERS = {
    # only what a candidate may do, and what forking and ending candidates takes
    "zygote": _assemble(_RULES_COMPUTE | dict.fromkeys(_ZYGOTE, _ALLOW) | _READING | _NO_CLONE3, _REFUSE),
    # on top of it, gives up what the zygote keeps for itself; short, because it is set up for every program
    "candidate": _assemble(
        dict.fromkeys(_ZYGOTE, _REFUSE) | {"clone": ((0, "any of", _CLONE_THREAD), _ALLOW, _REFUSE)}, _ALLOW
    ),
    # computing, its sockets and reading files; no new process, no new connection, no signal to another process
    "verifier": _assemble(_RULES_COMPUTE | dict.fromkeys(_VERIFIER, _ALLOW) | _READING | _NO_CLONE3, _REFUSE),
}


def filter_calls(role: str):
    """Seccomp: from here on this process makes only the system calls of its role, `zygote`, `candidate` or `verifier`."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(_FILTERS[role][0]))


# ------------------------------------------------------------------------------------------------------------ Landlock

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3


def restrict_files(readable: list):
    """
    Landlock: no file may be touched but those beneath `readable`, which may be read. No TCP, and from version 6 of the
    interface on no abstract sockets and no signals out of this domain.
    """
    version = _check(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1), "landlock")
    rights = (1 << 13) - 1
    for since, right in ((2, 13), (3, 14), (5, 15)):
        rights |= (1 << right) if version >= since else 0
    ruleset = struct.pack("Q", rights) + struct.pack("Q", 3) * ((version >= 4) + (version >= 6))
    fd = _check(_libc.syscall(_CREATE_RULESET, ruleset, ctypes.c_size_t(len(ruleset)), 0), "landlock")
    for path in readable:
        directory = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", _READ_FILE | _READ_DIRECTORY, directory)
        _check(_libc.syscall(_ADD_RULE, fd, 1, rule, 0), "landlock rule")
        os.close(directory)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _check(_libc.syscall(_RESTRICT_SELF, fd, 0), "landlock restrict")
    os.close(fd)


# ---------------------------------------------------------------------------------------------------------- namespaces

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _REC_PRIVATE, _DETACH = 1, 2, 4, 8, 32, 16384 | 1 << 18, 2


def enter_namespaces():
    """
    Moves to mount, process, network, IPC and host-name namespaces of its own, behind an empty read-only root, and
    returns in a child that is their first process. The parent waits for it and passes its exit status on.
    """
    flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        _check(_libc.unshare(flags), "unshare")
    else:
        _check(_libc.unshare(flags | _NEWUSER), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    child = os.fork()
    if child:
        os.closerange(0, 256)  # the sockets must close when the child ends
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    _mount("none", "/", None, _REC_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV | _NOEXEC, "size=64k,mode=755")
    os.mkdir("/tmp/proc")
    os.mkdir("/tmp/old")
    _mount("proc", "/tmp/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.chdir("/tmp")
    _check(_libc.syscall({"x86_64": 155, "aarch64": 41}[_MACHINE], b".", b"old"), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/old", _DETACH), "umount")
    os.rmdir("/old")
    _mount("none", "/", None, _REMOUNT | _RDONLY | _NOSUID | _NODEV | _NOEXEC)


def _mount(source, target, kind, flags, options=None):
    encoded = [text.encode() if text else None for text in (source, target, kind)]
    data = options.encode() if options else None
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), data), f"mount {target}")


# --------------------------------------------------------------------------------------------------------------- probe


def _refused(action):
    try:
        action()
    except PermissionError:
        return True
    return False


def _works(layer):
    if layer == "seccomp":
        filter_calls("zygote")
        filter_calls("candidate")
        return all(_refused(act) for act in (lambda: os.open("/", os.O_RDONLY), os.fork, lambda: os.kill(0, 0)))
    if layer == "landlock":
        restrict_files([])
        return _refused(lambda: os.listdir("/"))
    if layer == "namespaces":
        enter_namespaces()
        return os.listdir("/") == ["proc"] and os.getpid() == 1
    drop_user()
    return os.getuid() == NOBODY


def probe() -> list:
    """Names of the layers that this machine allows, each tried in a child of its own."""
    layers = []
    for layer in ("seccomp", "landlock", "namespaces", "user"):
        child = os.fork()
        if not child:
            worked = False
            try:
                worked = (_ARCHITECTURE is not None or layer != "seccomp") and _works(layer)
            finally:
                os._exit(0 if worked else 1)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            layers.append(layer)
    return layers


def main(config: dict):
    """Body of the process that probes: prints the names of the layers."""
    print(json.dumps(probe()))
