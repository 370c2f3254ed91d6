"""
Collects joint preferences of two agents that write code together, for MADPO.

    accelerate launch recipes/code_generation/collect_preferences.py \
        --config recipes/code_generation/configs/madpo_demo.yaml

`--dry_run` says what it will cost, `--help` lists the settings.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.demo.task import TASK  # code generation, with the demo under the name `demo`
from trl_multiagent.runs.collection import run_collection


def main(argv: Sequence[str] | None = None) -> None:
    run_collection(TASK, argv)


if __name__ == "__main__":
    main()
