"""
Writes `trl_multiagent/data/faults.json.gz`: for all mutants of the package's benchmarks, how many hidden tests they
pass. To be run after a change of the benchmarks, of the operators of `Mutants`, or of the tests that
`write_quixbugs.py` makes. Takes minutes.
"""

import gzip
import json
from pathlib import Path

import trl_multiagent
from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.tasks.bug_fixing.data import QUIXBUGS, find_results, read_functions


def main() -> None:
    table = {}
    with Sandbox() as sandbox:
        for name, split in (("humaneval", "test"), ("mbpp", "prompt+test+validation+train"), (QUIXBUGS, "test")):
            functions = read_functions(name, split)
            found = find_results(functions, [[*range(len(function.mutants))] for function in functions], sandbox)
            for function, results in zip(functions, found, strict=True):
                number = len(function.mutants) + (function.own_fault is not None)
                table[function.key] = [results.get(k) for k in range(number)]
    path = Path(trl_multiagent.__file__).parent / "data" / "faults.json.gz"
    path.write_bytes(gzip.compress(json.dumps(table, separators=(",", ":")).encode(), 9, mtime=0))
    print(f"{len(table)} functions, {sum(map(len, table.values()))} programs, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
