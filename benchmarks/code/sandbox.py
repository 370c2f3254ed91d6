"""
Measures the sandbox: throughput against a fresh interpreter per program, a batch with endless loops, growth over many
programs, and what each tier stops of a corpus of hostile programs.

    python -m benchmarks.code.sandbox --data humaneval.jsonl --output sandbox.json

Without `--data` the programs are small made-up ones. The hostile programs are those of `tests/hostile`, or `--hostile`
names another folder with a `programs.jsonl`; `--tiers` without a name leaves them out. Rates are medians of
`--repeats` rounds in which every contender takes its turn, so that a busy machine slows all of them down alike.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trl_multiagent.code.sandbox import Program, Sandbox, SandboxError


HOSTILE = Path(__file__).resolve().parents[2] / "tests" / "hostile"


def load(path):
    """Canonical solutions with their tests, from a HumanEval file."""
    if path is None:
        check = "def check(candidate):\n" + "".join(f"    assert candidate({n}) == {n * n}\n" for n in range(9))
        return [Program(f"def f(x):\n    return x * x + {n} - {n}\n", "f", check) for n in range(164)]
    programs = []
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        start = re.search(rf"^def {row['entry_point']}\b", row["prompt"], re.MULTILINE).start()
        source = row["prompt"] + row["canonical_solution"]
        programs.append(Program(source, row["entry_point"], row["test"], setup=row["prompt"][:start]))
    return programs


def fresh_interpreters(programs, flags):
    """Programs per second, each with its checks in an interpreter of its own, as many at once as there are cores."""
    sources = [f"{program.source}\n{program.checks}\ncheck({program.entry_point})\n" for program in programs]

    def run(source):
        return subprocess.run([sys.executable, *flags, "-c", source], capture_output=True).returncode

    start = time.monotonic()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        correct = list(threads.map(run, sources)).count(0)
    assert correct == len(programs), f"{correct} of {len(programs)} programs are right in plain interpreters"
    return len(programs) / (time.monotonic() - start)


def sandboxed(programs, sandbox):
    """Programs per second."""
    start = time.monotonic()
    verdicts = sandbox.run(programs)
    seconds = time.monotonic() - start
    correct = sum(verdict.passed == verdict.total > 0 for verdict in verdicts)
    assert correct == len(programs), f"{correct} of {len(programs)} programs are right in the sandbox"
    return len(programs) / seconds


def throughput(programs, repeats):
    sandboxes = {}
    for tier in ("seccomp", "landlock", "namespaces"):
        sandbox = Sandbox(min_tier=tier, max_tier=tier)
        try:
            sandbox.run(programs)  # helpers start, checks are compiled
        except SandboxError as error:
            print(f"tier {tier} left out: {error}")
            continue
        sandboxes[f"sandbox, tier {tier}"] = sandbox
    verdicts = next(iter(sandboxes.values())).run(programs)
    own = 1000 * statistics.mean(verdict.cpu_seconds for verdict in verdicts)
    print(f"processor time that a program's own process takes, from its fork to its end: {own:.1f} ms on average")
    rates = {name: [] for name in ("python -I", "python -I -S -B", *sandboxes)}
    for _ in range(repeats):
        rates["python -I"].append(fresh_interpreters(programs, ["-I"]))
        rates["python -I -S -B"].append(fresh_interpreters(programs, ["-I", "-S", "-B"]))
        for name, sandbox in sandboxes.items():
            rates[name].append(sandboxed(programs, sandbox))
    for sandbox in sandboxes.values():
        sandbox.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"\n{'programs per second':32s} {'median':>8s} {'x python -I':>12s}")
    for name, rate in medians.items():
        print(f"{name:32s} {rate:8.0f} {rate / medians['python -I']:12.2f}")
    return medians


def endless_loops(timeout, number, total):
    """Seconds for programs of which some never end; each of these costs one deadline, all at the same time."""
    check = "def check(candidate):\n    assert candidate(1) == 1\n"
    loops = [Program(f"def f(x):\n    while {n}: pass", "f", check) for n in range(1, number + 1)]
    honest = [Program(f"def f(x): return x + {n} - {n}", "f", check) for n in range(total - number)]
    with Sandbox(check_timeout=timeout) as sandbox:
        sandbox.run(honest[:8])
        start = time.monotonic()
        sandbox.run(honest)
        rest = time.monotonic() - start
        seconds = []
        for _ in range(2):  # the first time, helpers for the stuck programs are started; they stay
            start = time.monotonic()
            sandbox.run(loops + honest)
            seconds.append(time.monotonic() - start)
    first, later = seconds
    print(
        f"\n{total} programs, {number} endless: {first:.1f} s, then {later:.1f} s; "
        f"deadline {timeout:g} s, the rest {rest:.1f} s"
    )
    return {"first": first, "later": later, "deadline": timeout, "rest": rest}


def growth(count):
    """Resident memory and open files of all processes, early and late."""
    with Sandbox() as sandbox:

        def size():
            pids = [os.getpid(), *(process.pid for slot in sandbox._slots for process in slot.processes)]
            files = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
            pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
            return files, pages * os.sysconf("SC_PAGE_SIZE") / 2**20

        sizes, check = [], "assert f(3) == 9"
        size_of_batch = min(500, count // 2)
        for batch in range(count // size_of_batch):
            numbers = range(batch * size_of_batch, (batch + 1) * size_of_batch)
            verdicts = sandbox.run([Program(f"def f(x): return x * x + 0 * {n}", "f", check) for n in numbers])
            assert all(verdict.passed == 1 for verdict in verdicts)
            sizes.append(size())
    print(
        f"\nopen files, MiB after {size_of_batch} programs: {sizes[0]}; after {size_of_batch * len(sizes)}: "
        f"{sizes[-1]}"
    )
    return {"first": sizes[0], "last": sizes[-1]}


def hostile(corpus, tiers):
    """Names of the corpus' programs that each tier does not handle, with what went wrong."""
    missed = {}
    for tier in tiers:
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "-m", "benchmarks.code.hostile", "--jobs", "2", "--corpus", str(corpus)]
            command += ["--out", f"{out}/out.jsonl", "--base", f"{out}/run"]
            subprocess.run(command, env={**os.environ, "SBX_TIER": tier}, stdout=subprocess.DEVNULL)
            rows = [json.loads(line) for line in Path(out, "out.jsonl").read_text().splitlines()]
        missed[tier] = {row["id"]: row["flags"] for row in rows if row["flags"]}
        print(f"\nhostile corpus, tier {tier} at most: {len(rows) - len(missed[tier])} of {len(rows)} handled")
        if missed[tier]:
            print(f"tier {tier} cannot handle:")
        for name, flags in missed[tier].items():
            print(f"  {name:24s} {', '.join(flags)}")
    return missed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="HumanEval as a .jsonl file")
    parser.add_argument("--hostile", type=Path, default=HOSTILE, help="folder with a programs.jsonl")
    parser.add_argument("--tiers", nargs="*", default=["namespaces", "rlimits"], help="tiers to run the corpus at")
    parser.add_argument("--smoke", action="store_true", help="seconds: whether it runs; the numbers mean nothing")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--programs", type=int, default=20_000, help="programs that memory and files may not grow over"
    )
    parser.add_argument("--check-timeout", type=float, default=10.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    programs = load(args.data)
    if args.smoke:
        programs, args.repeats, args.programs, args.check_timeout = programs[:2], 1, 20, 0.2
    result = {"user": os.geteuid(), "cores": len(os.sched_getaffinity(0)), "python": sys.version.split()[0]}
    result["throughput"] = throughput(programs, args.repeats)
    result["endless_loops"] = endless_loops(args.check_timeout, *((2, 10) if args.smoke else (8, 64)))
    result["growth"] = growth(args.programs)
    if not args.smoke:  # the tests run the corpus anyway
        result["hostile"] = hostile(args.hostile.resolve() / "programs.jsonl", args.tiers)
    if args.output:
        args.output.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
