"""
The corpus of hostile and honest programs, run by `benchmarks/code/hostile.py`.

A sample of every category runs by default; `SANDBOX_CORPUS=all` runs all of it.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


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


def names():
    known = [json.loads(line)["id"] for line in CORPUS.read_text().splitlines()]
    return known if os.environ.get("SANDBOX_CORPUS") == "all" else [name for name in known if name in SAMPLE]


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
