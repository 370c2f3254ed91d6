from collections.abc import Sequence
from dataclasses import dataclass

from trl_multiagent.trainers.base.actor_critic_config import ActorCriticConfig


CENTRAL = "central"  # name of the critic


@dataclass
class MAACConfig(ActorCriticConfig):
    r"""
    Configuration class for the [`MAACTrainer`].

    For a full list of training arguments, please refer to [`ActorCriticConfig`] (the critic), [`RolloutConfig`]
    (rollout trees, rewards, batches), [`TeamConfig`] (agents), [`~trl.GRPOConfig`] and
    [`~transformers.TrainingArguments`].
    """

    def critic_names(self, trained_roles: Sequence[str]) -> list[str]:
        return [CENTRAL]

    def _check_values(self) -> None:
        super()._check_values()
        if self.critic_form == "head" and self.critic_trains_trunk:
            raise ValueError(
                "A central critic reads all agents' prompts, so its loss must not train one agent's model: set "
                "`critic_trains_trunk` to False, or `critic_form` to 'adapter' or 'model'."
            )
