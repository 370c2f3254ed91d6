"""
Recipes whose end fails. Run by `test_bad_endings.py`: `bad_endings.py FAILURE FOLDER ARGUMENTS...`, the last of the
recipe.

The one line that each process ends with is written to `<FOLDER>/<process>.txt`.
"""

import contextlib
import io
import os
import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "code_generation"))
import train_magrpo

from trl_multiagent import AgentTeam, MAGRPOTrainer
from trl_multiagent.trainers import magrpo_trainer


FAILURE, FOLDER = sys.argv[1], Path(sys.argv[2])


class BadEnding(MAGRPOTrainer):
    def train(self, **kwargs):
        super().train(**kwargs)
        if FAILURE == "a file in the way":
            (FOLDER / "team").write_text("I was here first.")
        if FAILURE == "a full disk":
            save_pretrained = AgentTeam.save_pretrained

            def full(team, folder, state_dict=None):
                save_pretrained(team, folder, state_dict)
                if FOLDER in Path(folder).parents:
                    raise OSError(28, "No space left on device")

            AgentTeam.save_pretrained = full


if __name__ == "__main__":
    magrpo_trainer.MAGRPOTrainer = BadEnding
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            train_magrpo.main(sys.argv[3:])
    except SystemExit:
        rank = int(os.environ["RANK"])
        (FOLDER / f"{rank}.txt").write_text(errors.getvalue().splitlines()[-1].partition(": error: ")[2])
        while not (FOLDER / f"{1 - rank}.txt").exists():  # the launcher ends the others with the first that fails
            time.sleep(0.02)
        sys.exit(3)
