"""Entry of the helper processes."""

import json
import os
import sys


def main():
    _, _, role, fds, config = sys.argv
    if role == "probe":
        from .kernel import probe as body
    elif role == "verifier":
        from .verifier import main as body
    else:
        # modules want to repair locks and reseed after a fork, which costs more than the fork; a zygote has one thread
        os.register_at_fork = lambda **hooks: None
        from .zygote import main as body
    body(*json.loads(fds), json.loads(config))
