"""
Runs a script, and forks the scripts that it starts as processes of its own: `forked_children.py SCRIPT ARGUMENTS`.
"""

import atexit
import faulthandler
import os
import subprocess
import sys

from forked import run_to_the_end


FORKED_MODULES = ("accelerate.commands.launch", "benchmarks.", "pytest", "trl_multiagent.cli")


class Popen(subprocess.Popen):
    """Other programs, and most other modules, are started as ever."""

    def _execute_child(self, command, *others):
        command = [str(part) for part in command]
        is_module = command[1] == "-m" and command[2].startswith(FORKED_MODULES)
        is_known = command[1].endswith(".py") or is_module
        if command[0] != sys.executable or not is_known:
            return super()._execute_child(command, *others)
        environment, pipes, starts_session = others[5], others[9:15], others[20]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for number, end in enumerate((pipes[0], pipes[3], pipes[5])):
                if end != -1:
                    os.dup2(end, number)
            if starts_session:
                os.setsid()
            os.closerange(3, 1024)  # a sibling would not see that its input has ended
            atexit._clear()  # the temporary folders of this process are not the child's to delete
            if environment is not None:
                os.environ.clear()
                os.environ.update(environment)
            run_to_the_end(command[1:])
        self._child_created = True
        self._close_pipe_fds(*pipes)


if __name__ == "__main__":
    # A forked process cannot set or cancel a deadline while this one has one
    faulthandler.cancel_dump_traceback_later()
    subprocess.Popen = Popen
    run_to_the_end(sys.argv[1:])
