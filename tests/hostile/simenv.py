"""
Runs a command as on a restricted machine.

    python simenv.py docker,user -- python runner.py ...

Modes, which need root and x86_64: `docker` (the capabilities and refused calls of Docker's default settings),
`nouserns` (no new user namespaces), `nolandlock` (a kernel before 5.13), `user` (an ordinary user with no other
processes).
"""

import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from trl_multiagent.code.sandbox.helpers import kernel


NEW_NAMESPACES = 0x7E020000 | 0x2000000
NEW_USER = 0x10000000
CAPABILITIES = """
chown dac_override fsetid fowner mknod net_raw setgid setuid setfcap setpcap net_bind_service sys_chroot kill
audit_write
""".split()
REFUSED = {"unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "keyctl": 250, "bpf": 321}
USER = 61237


def restrict(modes):
    """Puts this process, and what it starts, on such a machine; `calls` stands for Docker's refused calls."""
    rules = {"clone3": kernel._ABSENT}
    if "calls" in modes:
        rules |= dict.fromkeys(REFUSED, kernel._REFUSE) | {"clone": [(0, "none of", NEW_NAMESPACES)]}
    if "nouserns" in modes:
        rules |= {"unshare": [(0, "none of", NEW_USER)], "clone": [(0, "none of", NEW_USER)]}
    if "nolandlock" in modes:
        rules["landlock_create_ruleset"] = kernel._ABSENT
    kernel._NUMBERS.update(REFUSED, landlock_create_ruleset=444)
    kernel._FILTERS["machine"] = kernel._assemble(rules, kernel._ALLOW)
    if "user" in modes:
        os.setgroups([])
        os.setresgid(*[USER] * 3)
        os.setresuid(*[USER] * 3)
    kernel.filter_calls("machine")


def main():
    end = sys.argv.index("--")
    modes, command = sys.argv[1].split(","), sys.argv[end + 1 :]
    if "docker" in modes:  # capabilities first: `setpriv` drops them and comes back here
        bounds = ",".join(["-all", *(f"+{name}" for name in CAPABILITIES)])
        modes[modes.index("docker")] = "calls"
        command = [sys.executable, __file__, ",".join(modes), "--", *command]
        os.execvp("setpriv", ["setpriv", f"--bounding-set={bounds}", *command])
    restrict(modes)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
