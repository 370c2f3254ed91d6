from trl_multiagent.rollout.tree import Node
from trl_multiagent.trainers.base.actor_critic_config import IACConfig
from trl_multiagent.trainers.base.actor_critic_trainer import ActorCriticTrainer


class IACTrainer(ActorCriticTrainer):
    """
    Trainer for Independent Actor-Critic (IAC): every trained agent has a critic that reads only the agent's own prompt
    and history. With one agent it is the plain actor-critic.

    Each optimizer step samples one batch of rollout trees. With the critic's value V_i(h) of agent i's prompt at a
    node, when the batch was sampled, and the target y_j of a joint action j (see [`compute_targets`]):

        A_i,g = mean over the joint actions j with completion g of y_j  -  V_i(h)
        L_i   = mean over rows of -A_i,g * sum over tokens t of log pi_i(t)
        L_V,i = value_loss_coef * mean over joint actions j of (y_j - V_i(h))^2

    It takes the arguments of [`MAGRPOTrainer`]; `args` is an [`IACConfig`].
    """

    _tag_names = ["trl", "trl-multiagent", "iac"]
    _name = "IAC"
    args: IACConfig
    _config_class = IACConfig

    def critic_text(self, critic: str, node: Node, joint_action: int | None) -> list[int]:
        ids = node.samples[critic].prompt_ids
        if joint_action is not None:
            ids = ids + node.samples[critic].completion_ids[node.completion_of(critic)[joint_action]]
        backbone = self.critics.backbones[critic]
        if backbone.shares_vocabulary:
            return ids
        return backbone.tokenizer(self.team.tokenizers[critic].decode(ids, skip_special_tokens=True))["input_ids"]
