"""
Runs scripts in one process or several, as a launcher does, but forked from one process that has imported the
libraries, so that a start takes no time. Run as a script, this is that process: it reads a run per line and answers
with how it ended. The workers of pytest share one, which listens on a Unix socket.
"""

import atexit
import faulthandler
import functools
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path


ACCELERATE_CONFIGS = Path(__file__).resolve().parents[2] / "accelerate_configs"
LAUNCHER = Path(__file__).with_name("launcher.py")
FORKED_CHILDREN = Path(__file__).with_name("forked_children.py")
# The launcher of accelerate, which reads options of torchrun here, forks its processes instead of starting them
FORKING = {"PET_RUN_PATH": "1", "PET_START_METHOD": "fork"}
SHARED = "TESTS_FORKED"  # names the variable with the address of the process that the workers share
SETTINGS = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
SETTINGS["TRANSFORMERS_VERBOSITY"] = "warning"
NO_NETWORK = Path(__file__).parents[1] / "demo" / "no_network" / "sitecustomize.py"
IMPORTED = "TESTS_IMPORTED"  # has what the imports wrote to the error stream, and which network they looked for
DEADLINE = 600  # seconds, after which processes that wait for each other say where and end


@dataclass
class Finished:
    """
    Args:
        codes (`list[int]`):
            Exit code of every process, negative for the signal that ended it. When one ends with another code than 0,
            the others are killed.
        stdout (`str`): What the first process printed.
        stderr (`str`): What all processes printed to their error streams, one process after the other.
    """

    codes: list[int]
    stdout: str
    stderr: str


def start(*arguments, **pipes) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, __file__, *arguments], env={**os.environ, **SETTINGS}, text=True, **pipes)


def start_shared() -> subprocess.Popen:
    """Starts a process for all workers. It imports at the first connection, and ends when its input is closed."""
    address = str(Path(tempfile.mkdtemp()) / "socket")
    process = start(address, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if process.stdout.readline():  # else each worker starts its own: the path of a socket may be too long
        os.environ[SHARED] = address
    return process


class Forked:
    """Starts the process that imports, or connects to that of all workers. `run` and `launch` fork from it."""

    def __init__(self):
        self.process = None
        if SHARED in os.environ:
            with socket.socket(socket.AF_UNIX) as connection:  # which is open until both files are closed
                connection.connect(os.environ[SHARED])
                self.requests, self.answers = connection.makefile("w"), connection.makefile()
        else:
            self.process = start(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.requests, self.answers = self.process.stdin, self.process.stdout

    def run(self, script, *arguments, processes=1, cwd=".", zero=None, environment=None) -> Finished:
        """
        Args:
            zero (`Path`, *optional*): Configuration of DeepSpeed. Without it accelerate runs on the CPU by itself.
            environment (`dict[str, str]`, *optional*):
                More environment variables. What a library reads when it is imported, it has already read.
        """
        engine = {"ACCELERATE_USE_CPU": "true"}
        if zero is not None:
            engine = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(zero)}
            # As DeepSpeed's launcher does. Without it, DeepSpeed starts `numactl` whenever it needs this number
            engine["LOCAL_SIZE"] = str(processes)
        return self._run([script, *arguments], processes, cwd, engine | (environment or {}))

    def launch(self, config, script, *arguments) -> Finished:
        """
        Runs `accelerate launch` with two processes. The launcher is forked, and forks the two in its turn.

        Args:
            config (`str`): Name of a file in `accelerate_configs`, without its ending.
            script (`Path`): Absolute path of the script.

        Returns:
            [`Finished`]: The launcher's exit code, and what the launcher and its processes printed.
        """
        options = ["--config_file", ACCELERATE_CONFIGS / f"{config}.yaml", "--main_process_port", "0"]
        options += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        return self._run([LAUNCHER, *options, script, *arguments], 1, ".", FORKING)

    def _run(self, command, processes, cwd, environment) -> Finished:
        command = [str(part) for part in command]
        with tempfile.TemporaryDirectory() as folder:
            request = [command, processes, str(Path(cwd).resolve()), environment, folder]
            print(json.dumps(request), file=self.requests, flush=True)
            codes = json.loads(self.answers.readline())
            stdout = (Path(folder) / "stdout_0").read_text(errors="replace")
            stderr = [(Path(folder) / f"stderr_{k}").read_text(errors="replace") for k in range(processes)]
        return Finished(codes, stdout, "".join(stderr))

    def close(self) -> None:
        self.requests.close()
        self.answers.close()
        if self.process is not None:
            self.process.wait(60)


def launch(command, processes, cwd, environment, folder) -> list[int]:
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = {}
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            os.environ.update(environment)
            if processes > 1:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            run_script(command, cwd, Path(folder), rank)
        children[pid] = rank
    codes = [0] * processes
    while children:
        pid, status = os.wait()
        codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        if status != 0:
            for other in children:
                os.kill(other, signal.SIGKILL)
    return codes


def run_script(command, cwd, folder: Path, rank: int) -> None:
    """Never returns, as [`run_to_the_end`]."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / f"{stream}_{rank}", os.O_WRONLY | os.O_CREAT), number)
    faulthandler.dump_traceback_later(DEADLINE, exit=True)
    os.chdir(cwd)
    run_to_the_end(command)


def run_to_the_end(command) -> None:
    """
    Runs a script, or a module after `-m`. Never returns: its end, by an error too, is the end of the process. It ends
    without the half second that Python takes to tear down the libraries.
    """
    import torch

    # A fork makes torch's pool of threads anew when it is used, and two threads must not do so at the same time
    torch.set_num_threads(1)
    code = 0
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as exit:
        code = exit.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def accept(address: str) -> None:
    """Returns in a copy of this process for each connection, which is the copy's input and output."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("listening", flush=True)
        while True:
            ready, *_ = select.select([sys.stdin, listening], [], [])
            if sys.stdin in ready:
                shutil.rmtree(Path(address).parent)
                sys.exit()
            import_libraries()
            connection, _ = listening.accept()
            if os.fork() == 0:
                for number in (0, 1):
                    os.dup2(connection.fileno(), number)
                connection.close()
                return
            connection.close()


@functools.cache
def import_libraries() -> None:
    """Imports without a network, and notes what is seen of it."""
    runpy.run_path(str(NO_NETWORK))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("network", "stderr")]
        os.environ["NETWORK_LOG"] = str(files[0])
        stderr = os.dup(2)
        os.dup2(os.open(files[1], os.O_WRONLY | os.O_CREAT), 2)
        try:
            import_all()
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            del os.environ["NETWORK_LOG"]  # which ends the guard
        os.environ[IMPORTED] = "".join(file.read_text() for file in files if file.is_file())


def import_all() -> None:
    gc.set_threshold(50_000, 50, 50)  # as in `conftest.py`
    from transformers import logging
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from trl_multiagent.configs.recipes.demo import problems, report  # noqa: F401

    import tiny  # noqa: F401
    from process_group import import_deepspeed
    from quick import make_libraries_quick

    import_deepspeed()
    make_libraries_quick()
    get_checkpoint_conversion_mapping("llama")  # the first load of a model makes a table with hundreds of patterns
    problems.demo_rows("train")
    logging.set_verbosity_error()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def main() -> None:
    if sys.argv[1:]:
        accept(sys.argv[1])
    import_libraries()
    for line in sys.stdin:
        print(json.dumps(launch(*json.loads(line))), flush=True)
    os._exit(0)  # as in `run_to_the_end`


if __name__ == "__main__":
    main()
