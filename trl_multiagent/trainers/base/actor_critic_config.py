from collections.abc import Sequence
from dataclasses import dataclass

from trl_multiagent.limits import explained, setting
from trl_multiagent.trainers.base.rollout_config import RolloutConfig


CENTRAL = "central"  # name of the critic of MAAC


@dataclass
class ActorCriticConfig(RolloutConfig):
    r"""
    Arguments of the trainers with critics.

    For a full list of training arguments, please refer to [`RolloutConfig`] (rollout trees, rewards, batches),
    [`TeamConfig`] (agents), [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`].

    Parameters:
        critic_form (`str`, *optional*, defaults to `"model"`): `"model"`: a critic is a model of its own, all of which
            is trained. `"adapter"`: a LoRA adapter on the base of LoRA agents. `"head"`: a value
            head on the agent's own model.
        critic_models (`str` or `list[str]`, *optional*): Model id or folder that all critics start from, or one per
            critic. By default, a critic starts from its agent's model; a central one from the first agent's. A folder
            of a saved critic, `critics/<name>/`, also has its head.
        critic_type (`str`, *optional*, defaults to `"v"`): `"v"`: a critic of states, which reads prompts and
            histories. `"q"`: a critic of actions, which also reads the completions.
        critic_learning_rate (`float`, *optional*): Learning rate of the critics; by default `learning_rate`.
        critic_value_head_hidden_dim (`int`, *optional*): Size of a hidden layer of the value head. By default, the
            head is linear.
        critic_lora_r (`int`, *optional*, defaults to `8`): Rank of the adapters of `critic_form="adapter"`, which
            cover all linear layers. Their `lora_alpha` is twice the rank.
        value_loss_coef (`float`, *optional*, defaults to `0.6`): Factor of the value loss. An optimizer such as Adam
            divides gradients by their size, so for parameters that only the value loss trains, the factor has nearly
            no effect. It matters where the loss also trains an agent.
        value_clip_range (`float`, *optional*): If set, the value loss is max((y - V)², (y - clip(V, V_old ±
            value_clip_range))²). It has no effect in the first optimizer step on a batch, where V is V_old.
        gae_lambda (`float`, *optional*, defaults to `0.0`):
            Weight of longer returns in the targets: 0 is the target of one step, 1 the return of the tree.
        advantage_normalization (`bool`, *optional*, defaults to `True`): Whether to standardize the advantages of an
            agent's completions at a turn, over the whole batch. A single advantage is left as it is.

    > [!NOTE]
    > `num_generations` defaults to `1`: the critic is the baseline, so siblings are not needed.
    """

    reward_none: str = setting("Only 'error': every target needs a reward.", "error", choices=("error",))
    rollouts_ahead: int = setting("Only 0: values and advantages are those of the current critic.", 0, ge=0, le=0)
    critic_form: str = setting(default="model", choices=("model", "adapter", "head"))
    critic_models: list[str] | str | None = setting()  # `HfArgumentParser` reads the second type
    critic_type: str = setting(default="v", choices=("v", "q"))
    critic_learning_rate: float | None = setting(ge=0)
    critic_value_head_hidden_dim: int | None = setting(ge=1)
    critic_lora_r: int = setting(default=8, ge=1)
    value_loss_coef: float = setting(default=0.6, ge=0)
    value_clip_range: float | None = setting(gt=0)
    gae_lambda: float = setting(default=0.0, ge=0, le=1)
    advantage_normalization: bool = setting(default=True)
    num_generations: int = setting("Completions that each agent samples at a node, G in the formulas.", 1, ge=1)

    def _check_values(self) -> None:
        super()._check_values()
        if self.critic_form != "model" and self.critic_models is not None:
            raise ValueError(f"`critic_form='{self.critic_form}'` uses the agents' models: leave out `critic_models`.")
        if self.handoff is not None and self.num_turns > 1 and self.num_generations > 1:
            raise ValueError("`handoff` follows one joint action, but a critic needs all: set `num_generations` to 1.")


@explained
@dataclass
class IACConfig(ActorCriticConfig):
    r"""
    Configuration class for the [`IACTrainer`].

    For a full list of training arguments, please refer to [`ActorCriticConfig`] (critics), [`RolloutConfig`] (rollout
    trees, rewards, batches), [`TeamConfig`] (agents), [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`].
    """

    def critic_names(self, roles: Sequence[str]) -> list[str]:
        return [role for role in roles if role not in (self.frozen_agents or ())]


@explained
@dataclass
class MAACConfig(ActorCriticConfig):
    r"""
    Configuration class for the [`MAACTrainer`].

    For a full list of training arguments, please refer to [`ActorCriticConfig`] (the critic), [`RolloutConfig`]
    (rollout trees, rewards, batches), [`TeamConfig`] (agents), [`~trl.GRPOConfig`] and
    [`~transformers.TrainingArguments`].
    """

    def critic_names(self, roles: Sequence[str]) -> list[str]:
        return [CENTRAL]

    def _check_values(self) -> None:
        super()._check_values()
        if self.critic_form == "head":
            raise ValueError(
                "A central critic reads all agents' prompts, so its loss must not train one agent's model: set "
                "`critic_form` to 'model' or 'adapter'."
            )
