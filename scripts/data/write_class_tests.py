"""
Writes `trl_multiagent/data/classeval_tests.json.gz`: which test methods of the package's ClassEval count. To be run
after a change of the data, or of how answers are merged. Takes about a minute, on a machine whose sandbox can give
programs a folder.
"""

import gzip
import json
from pathlib import Path

import trl_multiagent
from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.environments.embedded import read_embedded
from trl_multiagent.tasks.class_completion.data import find_tests, key_of, make_item


LEFT_OUT = {"ClassEval_17", "ClassEval_58"}  # whose tests depend on today's date, or on chance


def main() -> None:
    items = [make_item(row, row["task_id"]) for row in read_embedded("classeval", "test")]
    with Sandbox(check_timeout=10.0) as sandbox:
        assert sandbox.has_folders()
        found = dict(zip(map(key_of, items), find_tests(items, sandbox), strict=True))
    table = found | {key_of(item): None for item in items if item["task_id"] in LEFT_OUT}
    path = Path(trl_multiagent.__file__).parent / "data" / "classeval_tests.json.gz"
    path.write_bytes(gzip.compress(json.dumps(table, separators=(",", ":")).encode(), 9, mtime=0))
    print(f"{sum(found is not None for found in table.values())} of {len(table)} classes, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
