"""
Writes `trl_multiagent/data/quixbugs.jsonl.gz` from the rows of QuixBugs: a JSON Lines file, compressed or not, with
`task_id`, `entry_point`, `correct_program`, `buggy_program` and `testcases`, pairs of arguments and results. To be run
with the path of that file.
"""

import ast
import gzip
import json
import sys
from pathlib import Path

import trl_multiagent


# JSON has no tuples, and some functions yield their result
PLAIN = """def plain(value):
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) or hasattr(value, "__next__") else value
"""
# Tests for which the reference needs more than a second, or the sandbox's memory
HEAVY = {"knapsack": (9,), "levenshtein": (2, 3)}
TOLERANCE = {"sqrt"}  # functions whose last argument is the tolerance of their result


def convert(row: dict) -> dict:
    """Returns the fields of a `bug_fixing.data.Function`."""
    name = row["entry_point"]
    checks = []
    for number, (arguments, expected) in enumerate(row["testcases"]):
        call = f"plain(candidate({', '.join(map(repr, arguments))}))"
        close = f"abs({call} - {expected!r}) <= {arguments[-1]!r}"
        if number not in HEAVY.get(name, ()):
            checks.append(f"    assert {close if name in TOLERANCE else f'{call} == {expected!r}'}\n")
    # The text after the faulty function, which explains it, becomes its docstring
    tree = ast.parse(row["buggy_program"])
    texts = [node for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    tree.body = [node for node in tree.body if node not in texts]
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    function.body[:0] = texts[:1]
    return {
        "task_id": row["task_id"],
        "entry_point": name,
        "test": f"{PLAIN}\n\ndef check(candidate):\n{''.join(checks)}",
        "source": row["correct_program"],
        "own_fault": ast.unparse(tree),
    }


def main() -> None:
    content = Path(sys.argv[1]).read_bytes()
    lines = (gzip.decompress(content) if sys.argv[1].endswith(".gz") else content).decode().splitlines()
    rows = "".join(json.dumps(convert(json.loads(line))) + "\n" for line in lines)
    path = Path(trl_multiagent.__file__).parent / "data" / "quixbugs.jsonl.gz"
    path.write_bytes(gzip.compress(rows.encode(), 9, mtime=0))
    print(f"{len(lines)} functions, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
