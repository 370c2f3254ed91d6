"""Trains the family of `task.py` with MAGRPO."""

from task import TASK

from trl_multiagent.runs.run import run_recipe


def main(argv=None):
    run_recipe("magrpo", TASK, argv)


if __name__ == "__main__":
    main()
