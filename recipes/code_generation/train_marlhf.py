"""
Trains two agents that write code together with the reward of a model that learned from their preferences: it collects
joint preferences, trains a joint reward model on them, and trains the team with its reward.

    accelerate launch recipes/code_generation/train_marlhf.py \
        --config recipes/code_generation/configs/marlhf_he_config.yaml

`--dry_run` checks the settings and prints the plan, `--help` lists them. Started again with the same `output_dir` or
RUN_ID, it continues with the first phase that is not complete.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.demo.task import TASK  # code generation, with the demo under the name `demo`
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("marlhf", TASK, argv)


if __name__ == "__main__":
    main()
