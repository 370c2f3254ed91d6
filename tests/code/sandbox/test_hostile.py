"""
The corpus of hostile and honest programs, run by `benchmarks/code/hostile.py`.

A sample of every category runs by default; `SANDBOX_CORPUS=all` runs all of it. Of the sample, what only a wrong
verdict would betray runs in one sandbox of this process: a host process for each takes half a second.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.code import hostile


ROOT = Path(__file__).resolve().parents[3]
CORPUS = ROOT / "tests" / "hostile" / "programs.jsonl"
SAMPLE = """
loop_c_sum_range mem_alloc_6g daemon_double_fork rec_limit_c_stack parse_surrogate exit_kill_group exit_exc_str
cheat_any_proxy patch_random_seed flat_frame_counter gc_queue_forge protocol_deep_json read_proc_mem truncate_file
net_abstract rlimit_raise missing_package guard_assert_false ok_types ok_prompt_helper ok_returns_fn ok_partial
spin_gcd spin_same_hash_dict spin_between threads_sleep net_datagram protocol_out_of_band protocol_shape
recursion_callback ok_threads_at_once ok_subclasses ok_object object_equal_to_everything object_magic_mock
object_should_stop object_own_mock object_suppressing_exit object_forged_references folder_modules
folder_left_for_later folder_lease folder_deep
""".split()


# Without a danger to the machine, to the files or to the processes of the host
VERDICTS = "honest objects spin equal patch imports frames plain parser forge loop crash".split()
ITEMS = {item["id"]: {**hostile.OPTIONAL, **item} for item in map(json.loads, CORPUS.read_text().splitlines())}
ALL = os.environ.get("SANDBOX_CORPUS") == "all"
SANDBOX = {"workers": 1, "check_timeout": 0.5, "min_tier": "seccomp"}


def names(in_this_process=False):
    if ALL:
        return [] if in_this_process else [*ITEMS]
    return [name for name in ITEMS if name in SAMPLE and (ITEMS[name]["category"] in VERDICTS) == in_this_process]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    command = [sys.executable, str(ROOT / "benchmarks" / "code" / "hostile.py"), "--jobs", "2"]
    command += ["--out", str(folder / "out.jsonl"), "--base", str(folder / "run"), "--only", ",".join(names())]
    environment = {**os.environ, "SBX_TIMEOUT": "0.5"}
    output = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    skipped = re.search(r"skipped=(\[.*\])", output)
    assert skipped, output
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return {row["id"]: row for row in rows} | dict.fromkeys(ast.literal_eval(skipped[1]))


@pytest.mark.parametrize("name", names())
def test_program(results, name):
    row = results[name]
    if row is None:
        pytest.skip("the runner cannot contain this program on this machine")
    assert row["flags"] == [], row["detail"]


@pytest.mark.parametrize("name", names(in_this_process=True))
def test_verdict(sandbox, name):
    """After each program the sandbox still scores an honest and a wrong one right."""
    item = ITEMS[name]
    assert not item["danger"] and not item["requires"]
    program = {key: value for key, value in item.items() if key in hostile.HONEST}
    assert hostile.score(sandbox, hostile.HONEST)["complete"]
    before = hostile.fingerprint()
    result = {"result": hostile.score(sandbox, program)}
    result |= {"after_honest": hostile.score(sandbox, hostile.HONEST)["complete"]}
    result |= {"after_wrong": hostile.score(sandbox, hostile.WRONG)["passed"] > 0}
    after = hostile.fingerprint()
    result["changed"] = [key for key in before if before[key] != after[key]]
    assert [*hostile.verdict_flags(item, result)] == [], result["result"]["detail"]
