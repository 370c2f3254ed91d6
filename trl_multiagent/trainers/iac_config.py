from collections.abc import Sequence
from dataclasses import dataclass

from trl_multiagent.trainers.base.actor_critic_config import ActorCriticConfig


@dataclass
class IACConfig(ActorCriticConfig):
    r"""
    Configuration class for the [`IACTrainer`].

    For a full list of training arguments, please refer to [`ActorCriticConfig`] (critics), [`RolloutConfig`] (rollout
    trees, rewards, batches), [`TeamConfig`] (agents), [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`].
    """

    def critic_names(self, trained_roles: Sequence[str]) -> list[str]:
        return list(trained_roles)
