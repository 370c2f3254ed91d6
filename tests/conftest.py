import compileall
import gc
import gzip
import os
import signal
import sys


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# No test compiles. bitsandbytes, which PEFT imports, would load the compiler in every process, for seconds
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from pathlib import Path

import pytest

from forked import Forked, start_shared


# The process that distributes tests to workers loads this file before it starts them. It need not import what takes
# seconds

PACKAGE = Path(__file__).parents[1] / "trl_multiagent"
# Libraries make a million objects when they are imported. With Python's thresholds, a fifth of that time goes into
# looking at them again
gc.set_threshold(50_000, 50, 50)
# Tests send Ctrl-C. A shell that starts the tests in the background has them ignore it, and all their child processes
# too
signal.signal(signal.SIGINT, signal.default_int_handler)
for name in ("RUN_ID", "JOB_ID"):  # which name the folders of runs
    os.environ.pop(name, None)


# The files that take longest, in this order. When workers share the tests, these start first, so that all workers end
# together
SLOW = """
test_distributed_forms test_benchmarks test_checkpoints test_code_generation test_demo_run test_hub test_together
test_actor_critic test_vllm_generation test_hostile test_wrong_settings test_limits test_earned_attacks test_stopping
test_failures test_marlhf test_preference_processes test_wheel test_evaluate test_code_reward test_own_task
test_endpoints test_two_processes test_control test_commands test_preference_run test_docs test_magrpo_update
test_madpo_update test_team_forms test_collection test_site test_madpo_trainer test_recipe test_precision
test_experiments test_joint_reward_trainer test_own_family test_iterations test_rewards test_bad_endings
test_router_loss test_two_hosts test_dropout test_cli test_verdicts test_answers test_client
test_quantized_base test_report test_earned_reward
""".split()
# The longest of the others, which `make check` runs too
NEXT = """
test_magrpo_trainer test_team test_workflows test_class_completion test_writing test_needed test_generation
test_bug_fixing test_trace test_code_data test_seats test_code_extraction test_comparators test_package
""".split()


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        # As pip does. The helpers of a sandbox write no bytecode, and would compile themselves at every start. Where
        # Python is told to write none, so would all other processes
        compileall.compile_dir(PACKAGE, quiet=2)
    if config.getoption("numprocesses", None):  # in the process that distributes tests to workers
        config.forked = start_shared()


def pytest_unconfigure(config):
    if hasattr(config, "forked"):
        config.forked.communicate()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    rank = {name: k for k, name in enumerate([*SLOW, *NEXT])}
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish():
    from quick import make_libraries_quick

    make_libraries_quick()


KNOWN, SEEN = set(), [None]


def new_modules() -> set[str]:
    """Returns the names of the modules that are new since the last call. There are thousands, and new ones seldom."""
    state = len(sys.modules), next(reversed(sys.modules))
    if state == SEEN[0]:
        return set()
    names = {*sys.modules}
    new = names - KNOWN
    KNOWN.intersection_update(names)
    KNOWN.update(new)
    SEEN[0] = state
    return new


@pytest.fixture(autouse=True)
def own_modules(tmp_path_factory):
    """
    Forgets the modules that a test wrote into a temporary folder and imported. The next test may write another by that
    name.
    """
    new_modules()
    yield
    for name in ("PYTHONSAFEPATH", "TRL_MULTIAGENT_COMMAND"):  # a command sets them for the processes that it starts
        os.environ.pop(name, None)
    folder = str(tmp_path_factory.getbasetemp())
    for name in new_modules():
        if str(getattr(sys.modules[name], "__file__", None)).startswith(folder):
            del sys.modules[name]


@pytest.fixture(scope="module")
def reports():
    """Trainings write their reports and pictures, as they do for users."""
    from trl_multiagent.report.run_report import RunReport

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunReport, "refresh", RunReport.drawn)
        yield


@pytest.fixture
def refused(capsys):
    """Calls a program that ends with exit status 2, and returns the one line that says why."""

    def refused(program, *args, **kwargs) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            program(*args, **kwargs)
        err = capsys.readouterr().err
        lines = [line for line in err.splitlines() if line.strip() and "note: " not in line]
        assert ended.value.code == 2 and (len(lines) == 1 or lines[0].startswith("usage: ")), err
        assert "error: " in lines[-1]
        return lines[-1]

    return refused


@pytest.fixture(scope="module")
def sandbox(request):
    """The sandbox of a module's tests, made with the arguments that its `SANDBOX` holds."""
    from trl_multiagent.code.sandbox import Sandbox

    with Sandbox(**request.module.SANDBOX) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory) -> Path:
    """A folder with the benchmarks that come with the package, as JSON lines."""
    folder = tmp_path_factory.mktemp("benchmarks")
    for packed in (PACKAGE / "data").glob("*.gz"):
        (folder / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Folder of a tiny random Llama with a byte-level tokenizer."""
    from tiny import byte_tokenizer, tiny_llama

    folder = tmp_path_factory.mktemp("tiny_model")
    tiny_llama(num_hidden_layers=1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def forked():
    """Runs scripts in forked processes."""
    forked = Forked()
    yield forked
    forked.close()
