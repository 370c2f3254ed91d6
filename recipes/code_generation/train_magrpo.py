"""
Trains two agents that write code together: one writes a helper `aux`, the other the function that may call it.

    accelerate launch recipes/code_generation/train_magrpo.py \
        --config recipes/code_generation/configs/magrpo_he_config.yaml

`--dry_run` checks the settings and prints the plan, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent import MAGRPOConfig, MAGRPOTrainer
from trl_multiagent.recipe import parse_recipe, print_plan
from trl_multiagent.recipe.code_generation import code_generation_datasets, code_generation_environment


def main(argv: Sequence[str] | None = None) -> None:
    recipe = parse_recipe("magrpo", MAGRPOConfig, argv)
    environment = code_generation_environment(recipe)
    if recipe.dry_run:
        return print_plan(recipe, environment.roles, code_generation_datasets)
    train_dataset, eval_dataset = code_generation_datasets(recipe)
    recipe.check_run(environment, train_dataset)
    trainer = MAGRPOTrainer(
        team=recipe.load_team(environment.roles),
        environment=environment,
        args=recipe.training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
    )
    recipe.train_and_save(trainer)


if __name__ == "__main__":
    main()
