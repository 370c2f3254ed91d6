"""
The kernel's protections, called through ctypes: seccomp filters, Landlock, namespaces, privileges. Each function
either takes effect or raises `OSError`. `main` finds out what a machine allows, in child processes that end at once.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import struct
from collections.abc import Callable, Sequence
from pathlib import Path


NOBODY = 65534  # the group that a zygote started by root gets
MAX_THREADS = 128  # of one program, besides the one that it starts with
FOLDER_BYTES, FOLDER_FILES = 4 << 20, 256  # of all files together, which includes folders
DIE_WITH_PARENT, DUMPABLE, ADOPT_ORPHANS = 1, 4, 36  # options of `prctl`
_SECCOMP, _DROP_CAPABILITY, _NO_NEW_PRIVILEGES = 22, 24, 38

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
# column in the table of calls, name in filters, number of a call
_MACHINES = {"x86_64": (1, 0xC000003E, 155), "aarch64": (2, 0xC00000B7, 41)}
_FIELD, _ARCHITECTURE, _PIVOT_ROOT = _MACHINES.get(platform.machine(), (0, 0, 0))


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option: int, value: int, pointer: int = 0) -> None:
    """Sets a property of this process."""
    _check(_libc.prctl(option, value, pointer, 0, 0), f"prctl {option}")


def lock_down(
    role: str, layers: list[str], limits: dict[int, int], readable: list[str], root: int | None = None
) -> None:
    """
    Applies the layers to the verifier or the zygote, irrevocably. Only folders in `readable` may be read. With the
    layer `folder`, the programs' folder becomes the working directory; the verifier then gets the zygote's user, and
    its root, the open file `root`.
    """
    user = spare_user()
    has_folder, is_zygote = "folder" in layers, role == "zygote"
    file_limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: FOLDER_BYTES * has_folder}
    for limit, value in (limits | file_limits).items():
        resource.setrlimit(limit, (value, value))
    if is_zygote and "namespaces" in layers:
        enter_namespaces(has_folder)
    if root is not None:
        # An ordinary user gets the right to change the root in a user namespace
        _check(_libc.unshare(_NEWUSER) if os.getuid() else 0, "unshare")
        os.fchdir(root)
        os.chroot(".")
    if has_folder:
        os.chdir("/folder")
        if is_zygote and "user" in layers:
            os.chown(".", user, NOBODY)
        user = os.stat(".").st_uid
    if (is_zygote or has_folder) and "user" in layers:
        os.setgroups([])
        os.setresgid(*[NOBODY] * 3)
        os.setresuid(*[user] * 3)
    elif is_zygote and "userns" in layers and "namespaces" not in layers:
        _check(_libc.unshare(_NEWUSER), "unshare")  # the kernel then counts the threads of this process separately
    for capability in range(64):
        if _libc.prctl(_DROP_CAPABILITY, capability, 0, 0, 0) < 0:
            break  # this is past the last capability, or the process has none
    _check(_libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
    prctl(DUMPABLE, 0)  # no other process of this user may trace this one or read its memory
    if is_zygote:  # after the change of user, which resets `DIE_WITH_PARENT`
        prctl(*((DIE_WITH_PARENT, 9) if "namespaces" in layers else (ADOPT_ORPHANS, 1)))
    if "landlock" in layers:
        restrict_files(readable, ["."] * has_folder)
    if "seccomp" in layers:
        filter_calls(f"folder {role}" if has_folder else role)


def spare_user() -> int:
    """
    Returns a user id that no other process has. The kernel limits threads by user, so every zygote gets a user of its
    own.
    """
    extents = [[*map(int, line.split())] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max(extents, key=lambda extent: extent[2])
    low, high = first + count // 2, first + count
    if high > 0x7FFFFFFF:
        low, high = 0x70000000, 0x7FFFFFFF  # a range that systems leave unused
    # processes in different containers may have the same number, but not the same namespace
    return low + hash((os.stat("/proc/self/ns/pid").st_ino, os.getpid())) % (high - low)


# Seccomp. Each entry is name:number on x86_64:number on aarch64:roles that may make the call. The number `-` means
# that the machine has no such call. The roles are
#   a     every process: these calls compute, run threads and asyncio, and name no file, process or address
#   z, v  the zygote, the verifier; a candidate gives these calls up
#   f     every process, if programs have a folder
#   e, w  the zygote and the verifier then
#   a capital letter: the conditions of the call, below, do not apply to this role
_CALLS = """
read:0:63:a write:1:64:a open:2:-:zvF close:3:57:a stat:4:-:vf fstat:5:80:a lstat:6:-:vf poll:7:-:a lseek:8:62:a
mmap:9:222:aV mprotect:10:226:aV munmap:11:215:a brk:12:214:a rt_sigaction:13:134:a rt_sigprocmask:14:135:a
rt_sigreturn:15:139:a ioctl:16:29:aV access:21:-:vf pipe:22:-:a select:23:-:a sched_yield:24:124:a mremap:25:216:a
madvise:28:233:a dup:32:23:a dup2:33:-:v nanosleep:35:101:a getitimer:36:102:a alarm:37:-:a setitimer:38:103:a
getpid:39:172:a sendto:44:206:a recvfrom:45:207:a sendmsg:46:211:zv recvmsg:47:212:zv socketpair:53:199:a
getsockname:51:204:a getsockopt:55:209:a clone:56:220:aZ exit:60:93:a wait4:61:260:z kill:62:129:z uname:63:160:a
fcntl:72:25:ZVf getcwd:79:17:a readlink:89:-:v gettimeofday:96:169:a getrusage:98:165:a sysinfo:99:179:a
times:100:153:a getuid:102:174:a getgid:104:176:a geteuid:107:175:a getegid:108:177:a setpgid:109:154:z
getppid:110:173:a sigaltstack:131:132:a setpriority:141:140:z prctl:157:167:z gettid:186:178:a futex:202:98:a
sched_getaffinity:204:123:a getdents64:217:61:zvf pread64:17:67:f pwrite64:18:68:f fsync:74:82:f fdatasync:75:83:f
ftruncate:77:46:f chdir:80:49:e rename:82:-:f mkdir:83:-:f rmdir:84:-:f unlink:87:-:f chmod:90:-:ew mkdirat:258:34:f
unlinkat:263:35:f renameat:264:38:f fchmodat:268:53:ew utimensat:280:88:f landlock_create_ruleset:444:444:e
landlock_add_rule:445:445:e landlock_restrict_self:446:446:e set_tid_address:218:96:a restart_syscall:219:128:a
clock_gettime:228:113:a clock_getres:229:114:a clock_nanosleep:230:115:a exit_group:231:94:a epoll_wait:232:-:a
epoll_ctl:233:21:a openat:257:56:zvF newfstatat:262:79:zvf readlinkat:267:78:v faccessat:269:48:vf pselect6:270:72:a
ppoll:271:73:a set_robust_list:273:99:a epoll_pwait:281:22:a eventfd2:290:19:a epoll_create1:291:20:a dup3:292:24:v
pipe2:293:59:a prlimit64:302:261:z getrandom:318:278:a statx:332:291:vf rseq:334:293:a
clone3:435:435:- faccessat2:439:439:vf
"""
_ENTRIES = [entry.split(":") for entry in _CALLS.split()] if _FIELD else []
_WHO = {entry[0]: entry[3] for entry in _ENTRIES}
_NUMBERS = {entry[0]: int(entry[_FIELD]) for entry in _ENTRIES if entry[_FIELD] != "-"}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF instructions
_KILL, _REFUSE, _ABSENT, _ALLOW = 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x7FFF0000
_PROT_EXEC, _MAP_SHARED, _AF_UNIX, _FIONBIO, _MSG_OOB = 4, 1, 1, 0x5421, 1
_CLONE_FILES, _CLONE_VFORK, _CLONE_THREAD = 0x400, 0x4000, 0x10000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Conditions of a call, all of which must hold: (index of the argument, test, value). BPF compares 32 bits at a time.
# `equals`, `is not`, `any of` and `none of` compare the lower half, because the kernel reads no more of these
# arguments or defines no flag above it. `is zero` compares both halves, as a pointer requires
_ONLY_IF = {
    # Shared pages stay when a part of them is unmapped, but no longer count as the process's memory
    "mmap": [(2, "none of", _PROT_EXEC), (3, "none of", _MAP_SHARED)],
    "mprotect": [(2, "none of", _PROT_EXEC)],
    "sendto": [(4, "is zero", 0), (3, "none of", _MSG_OOB)],  # no address
    "recvfrom": [(3, "none of", _MSG_OOB)],
    "socketpair": [(0, "equals", _AF_UNIX)],
    "ioctl": [(1, "equals", _FIONBIO)],
    # Threads share the table of descriptors, whose size is limited. To wait for a thread would not count as idle
    "clone": [(0, "any of", _CLONE_THREAD), (0, "any of", _CLONE_FILES), (0, "none of", _CLONE_VFORK)],
    "openat": [(2, "none of", _WRITING)],
    "open": [(1, "none of", _WRITING)],
    "fcntl": [
        (1, "none of", 0xFFFFFBF8),
        (1, "is not", 1024),
    ],  # no signals, and no leases, which the verifier waits for
}


Condition = tuple[int, str, int]
Rules = dict[str, int | list[Condition]]
Instruction = tuple[int, int, int, int]


def _rules(letters: str) -> Rules:
    """Returns what the roles together may do: for each call an action, or the conditions under which it is allowed."""
    rules: Rules = {"clone3": _ABSENT}  # its flags are in memory, which a filter cannot read; libc then uses clone
    for name, who in _WHO.items():
        if set(f"a{letters}{letters.upper()}") & set(who):
            rules[name] = _ALLOW if set(letters.upper()) & set(who) else _ONLY_IF.get(name, _ALLOW)
    return rules


def _guarded(conditions: list[Condition]) -> list[Instruction]:
    """Instructions that allow a call under these conditions and refuse it otherwise."""
    body = [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    for argument, test, value in reversed(conditions):
        for half in (4, 0) if test == "is zero" else (0,):
            refuse = len(body) - 1  # jump offset
            compare = _ANY_BIT if test in ("any of", "none of") else _EQUAL
            if_true, if_false = (refuse, 0) if test in ("none of", "is not") else (0, refuse)
            body[:0] = [(_LOAD, 0, 0, 16 + 8 * argument + half), (compare, if_true, if_false, value)]
    return body


def _assemble(rules: Rules, default: int) -> tuple[ctypes.Array, ctypes.Array]:
    """Returns the rules in the kernel's form. Other calls get the action `default`."""
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURE), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    program += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]  # other numbers of the same calls on x86_64
    for name, action in rules.items():
        if name not in _NUMBERS:
            continue
        body = [(_RETURN, 0, 0, action)] if isinstance(action, int) else _guarded(action)
        program += [(_EQUAL, 0, len(body), _NUMBERS[name]), *body]
    program.append((_RETURN, 0, 0, default))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    return header, code  # the header points at the code


def _given_up(zygote: Rules, kept: Rules) -> Rules:
    """
    Returns what a candidate may no longer do: a short filter behind the zygote's, because it is installed for every
    program.
    """
    return {name: kept.get(name, _REFUSE) for name, action in zygote.items() if kept.get(name) != action}


_FILTERS = {}
for _kind, _zygote, _verifier, _kept in (("", "z", "v", ""), ("folder ", "zef", "vwf", "f")):
    _FILTERS[f"{_kind}zygote"] = _assemble(_rules(_zygote), _REFUSE)
    _FILTERS[f"{_kind}verifier"] = _assemble(_rules(_verifier), _REFUSE)
    _FILTERS[f"{_kind}candidate"] = _assemble(_given_up(_rules(_zygote), _rules(_kept)), _ALLOW)


def filter_calls(role: str) -> None:
    """
    Seccomp: from now on this process can make only the calls of its role, `[folder ]zygote`, `candidate` or
    `verifier`.
    """
    prctl(_NO_NEW_PRIVILEGES, 1)
    prctl(_SECCOMP, 2, ctypes.addressof(_FILTERS[role][0]))


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _READ_FILE, _READ_DIRECTORY = 444, 445, 446, 4, 8
# Files and folders may be read, written, removed, made, moved and cut off, but there are no devices, sockets, FIFOs or
# links
_ALL_WITH_FILES = sum(1 << bit for bit in (1, 2, 3, 4, 5, 7, 8, 13, 14))


def restrict_files(readable: list[str], writable: Sequence[str] = ()) -> None:
    """
    Landlock: only files beneath `readable` may be read, and only those beneath `writable` made and changed. Where the
    kernel's version supports it, TCP, abstract sockets and signals are denied too.
    """
    version = _check(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1), "landlock")
    rights = (1 << 13) - 1
    for since, right in ((2, 13), (3, 14), (5, 15)):
        rights |= (version >= since) << right
    ruleset = struct.pack("Q", rights) + struct.pack("Q", 3) * ((version >= 4) + (version >= 6))
    fd = _check(_libc.syscall(_CREATE_RULESET, ruleset, ctypes.c_size_t(len(ruleset)), 0), "landlock")
    for path in (*readable, *writable):
        directory = os.open(path, os.O_PATH | os.O_CLOEXEC)
        own = _ALL_WITH_FILES & rights if path in writable else _READ_FILE | _READ_DIRECTORY
        _check(_libc.syscall(_ADD_RULE, fd, 1, struct.pack("=Qi", own, directory), 0), "landlock rule")
        os.close(directory)
    prctl(_NO_NEW_PRIVILEGES, 1)
    _check(_libc.syscall(_RESTRICT_SELF, fd, 0), "landlock restrict")
    os.close(fd)


_NEWUSER, _NEWNS_UTS_IPC_PID_NET = 0x10000000, 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
_RDONLY, _NOSUID_NODEV_NOEXEC, _REMOUNT, _REC_PRIVATE, _DETACH = 1, 2 | 4 | 8, 32, 16384 | 1 << 18, 2


def enter_namespaces(with_folder: bool = False) -> None:
    """
    Creates namespaces with an empty read-only root, and `/folder` in it if asked. Returns in a child, which is their
    first process.
    """
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(_NEWNS_UTS_IPC_PID_NET | (_NEWUSER if uid else 0)), "unshare")
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    child = os.fork()
    if child:
        os.closerange(0, 256)  # the sockets must close when the child ends
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    prctl(DIE_WITH_PARENT, 9)
    _mount(b"none", b"/", None, _REC_PRIVATE)
    _mount(b"tmpfs", b"/tmp", b"tmpfs", _NOSUID_NODEV_NOEXEC, b"size=64k,mode=755")
    os.mkdir("/tmp/proc")
    os.mkdir("/tmp/old")
    _mount(b"proc", b"/tmp/proc", b"proc", _NOSUID_NODEV_NOEXEC)
    if with_folder:
        os.mkdir("/tmp/folder")
        options = f"size={FOLDER_BYTES},nr_inodes={FOLDER_FILES},mode=700".encode()
        _mount(b"tmpfs", b"/tmp/folder", b"tmpfs", _NOSUID_NODEV_NOEXEC, options)
    os.chdir("/tmp")
    _check(_libc.syscall(_PIVOT_ROOT, b".", b"old"), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/old", _DETACH), "umount")
    os.rmdir("/old")
    _mount(b"none", b"/", None, _REMOUNT | _RDONLY | _NOSUID_NODEV_NOEXEC)


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None = None) -> None:
    _check(_libc.mount(source, target, kind, ctypes.c_ulong(flags), options), f"mount {target.decode()}")


def _refused(action: Callable, *args: object) -> bool:
    with contextlib.suppress(PermissionError):
        action(*args)
        return False
    return True


def _works(layer: str) -> bool:
    if layer == "seccomp":
        filter_calls("zygote")
        filter_calls("candidate")
        return _refused(os.open, "/", os.O_RDONLY) and _refused(os.fork) and _refused(os.kill, 0, 0)
    if layer == "landlock":
        restrict_files([])
        return _refused(os.listdir, "/")
    if layer == "namespaces":
        enter_namespaces()
        return os.listdir("/") == ["proc"] and os.getpid() == 1
    if layer == "folder":
        lock_down("zygote", ["namespaces", "landlock", "seccomp", "folder"], {}, [])
        Path("file").write_text("")
        return os.listdir() == ["file"] and _refused(os.listdir, "/")
    if layer == "userns":
        _check(_libc.unshare(_NEWUSER), "unshare")
        return True
    lock_down("zygote", ["user"], {}, [])
    return os.getuid() != 0


def main(config: dict) -> None:
    """Prints the names of the layers that this machine allows, each tried in a child of its own."""
    layers = []
    for layer in ("seccomp", "landlock", "namespaces", "user", "userns", "folder"):
        child = os.fork()
        if not child:
            try:
                os._exit(0 if _FIELD and _works(layer) else 1)
            finally:
                os._exit(1)
        if os.waitpid(child, 0)[1] == 0:
            layers.append(layer)
    print(json.dumps(layers))
