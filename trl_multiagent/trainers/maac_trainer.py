from trl_multiagent.jobs.distributed import fail_together
from trl_multiagent.rollout.tree import Node, Trees
from trl_multiagent.trainers.base.actor_critic_config import CENTRAL, MAACConfig
from trl_multiagent.trainers.base.actor_critic_trainer import ActorCriticTrainer


class MAACTrainer(ActorCriticTrainer):
    """
    Trainer for Multi-Agent Actor-Critic (MAAC): one central critic reads the prompts and histories of all agents, each
    marked with its role, and with `critic_type="q"` also their completions. The agents still act on their own prompts
    alone.

    Each optimizer step samples one batch of rollout trees. With the critic's value V(h) of a node when the batch was
    sampled, and the target y_j of a joint action j (see [`compute_targets`]):

        A_i,g = mean over the joint actions j with agent i's completion g of y_j  -  V(h)
        L_i   = mean over rows of -A_i,g * sum over tokens t of log pi_i(t)
        L_V   = value_loss_coef * mean over joint actions j of (y_j - V(h))^2

    It takes the arguments of [`MAGRPOTrainer`]; `args` is a [`MAACConfig`].
    """

    _tag_names = ["trl", "trl-multiagent", "maac"]
    _name = "MAAC"
    args: MAACConfig
    _config_class = MAACConfig

    def critic_of(self, role: str) -> str:
        return CENTRAL

    def _judge(self, turns: Trees) -> None:
        with fail_together(self.accelerator):
            if any(node.role_rewards for nodes in turns for node in nodes):
                raise ValueError(
                    "The central critic estimates one return, but the environment gives each role a reward of its "
                    "own: use IAC."
                )
        super()._judge(turns)

    def critic_text(self, critic: str, node: Node, joint_action: int | None) -> list[int]:
        prompts, answers = [], []
        for role in node.roles:
            prompt = self.team.tokenizers[role].decode(node.samples[role].prompt_ids, skip_special_tokens=True)
            prompts.append(f"[{role}]\n{prompt}")
            if joint_action is not None:
                completion = node.samples[role].texts[node.completion_of(role)[joint_action]]
                answers.append(f"[{role} answers]\n{completion}")
        return self.critics.backbones[critic].tokenizer("\n\n".join(prompts + answers))["input_ids"]
