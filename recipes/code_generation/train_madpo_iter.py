"""
Trains two agents that write code together in rounds: each one collects preferences between joint answers and trains on
them.

    accelerate launch recipes/code_generation/train_madpo_iter.py \
        --config recipes/code_generation/configs/madpo_iter_demo.yaml

A run that was interrupted goes on if it is started again with the same RUN_ID or `output_dir`. `--dry_run` checks the
settings and prints the plan, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.demo.task import TASK  # code generation, with the demo under the name `demo`
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("madpo_iter", TASK, argv)


if __name__ == "__main__":
    main()
