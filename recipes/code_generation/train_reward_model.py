"""
Trains a joint reward model on preferences of two agents that write code together, see collect_preferences.py.

    accelerate launch recipes/code_generation/train_reward_model.py \
        --config recipes/code_generation/configs/reward_model_demo.yaml

`--dry_run` checks the settings, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.demo.task import TASK  # code generation, with the demo under the name `demo`
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("reward_model", TASK, argv)


if __name__ == "__main__":
    main()
