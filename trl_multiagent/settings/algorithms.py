"""The table of algorithms, by the name of their section. A class is imported when it is needed."""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple


ROLLOUTS = "trl_multiagent.runs.training.train_on_rollouts"
PREFERENCES = "trl_multiagent.runs.rounds.run_preferences"
REWARD_MODEL = "trl_multiagent.runs.rounds.run_reward_model"


class Algorithm(NamedTuple):
    """An algorithm. Classes and functions are given by their import paths."""

    config: str  # the class of the trainer's arguments; its fields are keys of the section
    trainer: str  # the trainer's class
    run: str = ROLLOUTS  # the function that trains with it: `(settings) -> None`
    # More dataclasses with keys of the section as fields. If two have a field of the same name, the first one counts
    parts: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}  # of the section, where they differ from the classes' defaults


def import_class(path: str) -> Any:
    """Imports a class, or another object of a module, by a path such as `package.module.Class`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _algorithm(module: str, name: str, *more: Any, configs: str | None = None) -> Algorithm:
    """
    Returns the algorithm with the trainer `name` in the module `<module>_trainer`, and its configuration in `configs`,
    by default `<module>_config`.
    """
    trainer = f"trl_multiagent.trainers.{module}_trainer.{name}Trainer"
    return Algorithm(f"{configs or f'trl_multiagent.trainers.{module}_config'}.{name}Config", trainer, *more)


SCHEMA = "trl_multiagent.settings.schema"
CRITIC_CONFIGS = "trl_multiagent.trainers.base.actor_critic_config"
COLLECTION = "trl_multiagent.preferences.config.PreferenceConfig"
REPLAY = "trl_multiagent.preferences.pairs.ReplayConfig"
# Defaults of CoMLRL's algorithms in rounds
ROUNDS = {
    "num_iterations": 6,
    "num_train_epochs": 1,
    "preference_num_candidates": 20,
    "preference_pairs_per_sample": 4,
    "pair_selection": "comparator_reward",
    "comparator_policy": "current",
}
REWARD_ROUNDS = {**ROUNDS, "num_train_epochs": 2, "reward_num_train_epochs": 2.0}
PAIRS = (f"{SCHEMA}.PairSettings", COLLECTION)
PAIR_ROUNDS = (f"{SCHEMA}.RoundSettings", REPLAY, *PAIRS)
# Of two fields with a name, MAGRPO's takes more values; the configuration of the chosen trainer checks them again
GROUP_CONFIG = "trl_multiagent.trainers.magrpo_config.MAGRPOConfig"
REWARD = (f"{SCHEMA}.RewardSettings", COLLECTION, GROUP_CONFIG, f"{CRITIC_CONFIGS}.IACConfig")
MODEL_ROUNDS = (f"{SCHEMA}.RewardRoundSettings", REPLAY, *REWARD)
# GRPO is MAGRPO with a team of one, AC is IAC with a team of one. `rl_algorithm` chooses the trainer of MARLHF
ALGORITHMS = {
    "grpo": _algorithm("magrpo", "MAGRPO"),
    "magrpo": _algorithm("magrpo", "MAGRPO"),
    "marloo": _algorithm("magrpo", "MARLOO"),
    "maremax": _algorithm("magrpo", "MAReMax"),
    "mareinforce": _algorithm("magrpo", "MAREINFORCE"),
    "ac": _algorithm("iac", "IAC", configs=CRITIC_CONFIGS),
    "iac": _algorithm("iac", "IAC", configs=CRITIC_CONFIGS),
    "maac": _algorithm("maac", "MAAC", configs=CRITIC_CONFIGS),
    "madpo": _algorithm("madpo", "MADPO", PREFERENCES, PAIRS),
    "madpo_iter": _algorithm("madpo", "MADPO", PREFERENCES, PAIR_ROUNDS, ROUNDS),
    "marlhf": _algorithm("magrpo", "MAGRPO", PREFERENCES, REWARD),
    "marlhf_iter": _algorithm("magrpo", "MAGRPO", PREFERENCES, MODEL_ROUNDS, REWARD_ROUNDS),
    "reward_model": _algorithm("joint_reward", "JointReward", REWARD_MODEL, (f"{SCHEMA}.PreferenceSource",)),
}
PREFERENCE_ALGORITHMS = ("madpo", "madpo_iter")  # they learn from pairs of answers, not from rollout trees
ITERATIVE = {"madpo_iter": "madpo", "marlhf_iter": "marlhf"}  # algorithms in rounds, and the algorithm of a round
ACTOR_CRITICS = ("ac", "iac", "maac")  # algorithms with critics
SINGLE_AGENT = {"grpo": "MAGRPO", "ac": "IAC"}  # algorithms for one agent, and their names for several
RL_ALGORITHMS = ("magrpo", "marloo", "maremax", "mareinforce", "iac", "maac")  # choices of `rl_algorithm`
