"""
Trains two agents that write code together on preferences between their joint answers, which it collects first.

    accelerate launch recipes/code_generation/train_madpo.py \
        --config recipes/code_generation/configs/madpo_demo.yaml

A run that was interrupted goes on if it is started again with the same RUN_ID or `output_dir`. `--dry_run` checks the
settings and prints the plan, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.demo.task import TASK  # code generation, with the demo under the name `demo`
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("madpo", TASK, argv)


if __name__ == "__main__":
    main()
