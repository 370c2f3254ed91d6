"""The table of algorithms, by the name of their section. A class is imported when it is needed."""

import importlib
from typing import Any, NamedTuple


RUN_RECIPE = "trl_multiagent.recipe.run.run_recipe"  # trains on rollouts


class Algorithm(NamedTuple):
    """
    Args:
        config (`str`): Import path of the class of the trainer's arguments.
        trainer (`str`): Import path of the trainer's class.
        run (`str`): Import path of the function that trains with it: `(algorithm, task, argv, prog) -> None`.
    """

    config: str
    trainer: str
    run: str = RUN_RECIPE

    def config_class(self) -> type:
        return import_class(self.config)

    def trainer_class(self) -> type:
        return import_class(self.trainer)


TRAINERS = "trl_multiagent.trainers"
MADPO = Algorithm(
    f"{TRAINERS}.madpo_config.MADPOConfig",
    f"{TRAINERS}.madpo_trainer.MADPOTrainer",
    "trl_multiagent.recipe.phases.run_preferences",
)
MARLHF = Algorithm(  # `rl_algorithm` chooses the trainer, by default this one
    f"{TRAINERS}.magrpo_config.MAGRPOConfig",
    f"{TRAINERS}.magrpo_trainer.MAGRPOTrainer",
    "trl_multiagent.recipe.phases.run_marlhf",
)
# GRPO is MAGRPO with a team of one, AC is IAC with a team of one
ALGORITHMS = {
    "grpo": Algorithm(f"{TRAINERS}.magrpo_config.MAGRPOConfig", f"{TRAINERS}.magrpo_trainer.MAGRPOTrainer"),
    "magrpo": Algorithm(f"{TRAINERS}.magrpo_config.MAGRPOConfig", f"{TRAINERS}.magrpo_trainer.MAGRPOTrainer"),
    "marloo": Algorithm(f"{TRAINERS}.marloo_config.MARLOOConfig", f"{TRAINERS}.marloo_trainer.MARLOOTrainer"),
    "maremax": Algorithm(f"{TRAINERS}.maremax_config.MAReMaxConfig", f"{TRAINERS}.maremax_trainer.MAReMaxTrainer"),
    "mareinforce": Algorithm(
        f"{TRAINERS}.mareinforce_config.MAREINFORCEConfig", f"{TRAINERS}.mareinforce_trainer.MAREINFORCETrainer"
    ),
    "ac": Algorithm(f"{TRAINERS}.iac_config.IACConfig", f"{TRAINERS}.iac_trainer.IACTrainer"),
    "iac": Algorithm(f"{TRAINERS}.iac_config.IACConfig", f"{TRAINERS}.iac_trainer.IACTrainer"),
    "maac": Algorithm(f"{TRAINERS}.maac_config.MAACConfig", f"{TRAINERS}.maac_trainer.MAACTrainer"),
    "madpo": MADPO,
    "madpo_iter": MADPO,
    "marlhf": MARLHF,
    "marlhf_iter": MARLHF,
    "reward_model": Algorithm(
        f"{TRAINERS}.joint_reward_config.JointRewardConfig",
        f"{TRAINERS}.joint_reward_trainer.JointRewardTrainer",
        "trl_multiagent.recipe.reward_model.run_reward_model",
    ),
}
PREFERENCE_ALGORITHMS = ("madpo", "madpo_iter")  # they learn from pairs of answers, not from rollout trees
ITERATIVE = {"madpo_iter": "madpo", "marlhf_iter": "marlhf"}  # algorithms in rounds, and what each round is

ACTOR_CRITICS = ("ac", "iac", "maac")  # algorithms with critics
SINGLE_AGENT = {"grpo": "MAGRPO", "ac": "IAC"}  # algorithms for one agent, and the same for several
# The class whose fields are the keys of each section. Preferences are collected with the section of the algorithm that learns from them
SECTION_CLASSES = {name: algorithm.config for name, algorithm in ALGORITHMS.items()}
SECTION_CLASSES["madpo"] = "trl_multiagent.recipe.preference_section.MADPOSection"
SECTION_CLASSES["madpo_iter"] = "trl_multiagent.recipe.preference_section.MADPOIterSection"
SECTION_CLASSES["marlhf"] = "trl_multiagent.recipe.reward_section.MARLHFSection"
SECTION_CLASSES["marlhf_iter"] = "trl_multiagent.recipe.reward_section.MARLHFIterSection"
SECTION_CLASSES["reward_model"] = "trl_multiagent.recipe.reward_section.RewardModelSection"


def import_class(path: str) -> Any:
    """Imports a class, or another object of a module, by a path such as `package.module.Class`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
