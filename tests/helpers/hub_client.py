"""
A process that uses the test server of `hub_server.py` with the real client, which reads `HF_ENDPOINT` when it is
imported.

Run as a script it executes the snippets that come in, one JSON string per line, and answers each with the value of
`result` or with the traceback.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path


class HubClient:
    """Starts the process; call it with a snippet of code and values for the names in it."""

    def __init__(self, environment: dict[str, str]):
        environment = {**environment, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)

    def __call__(self, code: str, **names):
        print(json.dumps([code, names]), file=self.process.stdin, flush=True)
        reply = json.loads(self.process.stdout.readline())
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["result"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def main() -> None:
    from quick import make_libraries_quick

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the code prints goes elsewhere
    make_libraries_quick()
    for line in sys.stdin:
        code, names = json.loads(line)
        try:
            exec(code, names)
            reply = {"result": names.get("result")}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
