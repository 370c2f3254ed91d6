"""Entry of both helper processes."""

import json
import sys


def main():
    _, _, role, fds, config = sys.argv
    if role == "probe":
        from .kernel import main as body
    elif role == "verifier":
        from .verifier import main as body
    else:
        from .zygote import main as body
    body(*json.loads(fds), json.loads(config))
