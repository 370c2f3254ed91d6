import torch
from trl.trainer.utils import FusedCausalLMOutput

from trl_multiagent.rollout.advantages import sibling_advantages
from trl_multiagent.rollout.tree import Node
from trl_multiagent.trainers.base.batch import AgentTensors, Row
from trl_multiagent.trainers.base.rollout_trainer import RolloutTrainer
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


class MAGRPOTrainer(RolloutTrainer):
    """
    Trainer for Multi-Agent Group Relative Policy Optimization (MAGRPO), introduced in [LLM Collaboration With
    Multi-Agent Reinforcement Learning](https://huggingface.co/papers/2508.04652).

    Each optimizer step samples one batch of rollout trees with the current team and uses it once (with `num_iterations`, for
    that many steps). The returns of the trees become advantages in [`~MAGRPOTrainer.node_advantages`], and the advantages enter
    the loss in [`~MAGRPOTrainer.agent_loss`].

    Args:
        team ([`AgentTeam`]): The agents, one per role of the environment and in its order.
        environment ([`Environment`]): The task: its prompts and its joint reward.
        args ([`MAGRPOConfig`], *optional*): Configuration. If `None`, the algorithm's default configuration is used.
        train_dataset ([`~datasets.Dataset`]): The items. The environment receives all columns.
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Items for evaluation. For each, `num_generations_eval` episodes are sampled, without early termination.
        callbacks (`list[TrainerCallback]`, *optional*): Callbacks, as in any `Trainer`.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and learning rate scheduler for the parameters of the whole team.

    Example:

    ```python
    from datasets import Dataset
    from trl_multiagent import AgentTeam, FunctionEnvironment, MAGRPOConfig, MAGRPOTrainer

    environment = FunctionEnvironment(
        prompts={"poet": "Write a line about {topic}.", "critic": "Name one word for {topic}."},
        reward_funcs=lambda completions, **columns: [float(c["critic"] in c["poet"]) for c in completions],
    )
    trainer = MAGRPOTrainer(
        team=AgentTeam.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", roles=environment.roles),
        environment=environment,
        args=MAGRPOConfig(output_dir="poets", items_per_device=4),
        train_dataset=Dataset.from_dict({"topic": ["rain", "iron", "bees", "tides"]}),
    )
    trainer.train()
    ```
    """

    _tag_names = ["trl", "trl-multiagent", "magrpo"]
    _name = "MAGRPO"
    _card_settings = ["advantage_mode", *RolloutTrainer._card_settings]
    _paper = {
        "title": "LLM Collaboration With Multi-Agent Reinforcement Learning",
        "id": "2508.04652",
        # docstyle-ignore
        "citation": """\
@misc{liu2025llm,
    title         = {{LLM Collaboration With Multi-Agent Reinforcement Learning}},
    author        = {Shuo Liu and Tianle Chen and Zeyu Liang and Xueguang Lyu and Christopher Amato},
    year          = 2025,
    eprint        = {arXiv:2508.04652},
}""",
    }

    args: MAGRPOConfig
    _config_class = MAGRPOConfig  # of the default configuration

    def node_advantages(self, node: Node) -> dict[str, torch.Tensor]:
        """
        Computes the advantage of each completion over its siblings, which are the agent's other completions at the node:

            A_g = R_g - baseline(R)

        R_g is the mean return of the joint actions that contain the agent's completion g. The baseline depends on
        `advantage_mode`, see [`~rollout.advantages.sibling_advantages`].
        """
        roles = self.team.trained_roles
        returns = torch.tensor([node.agent_returns(self.team.roles.index(role)) for role in roles])
        advantages = sibling_advantages(returns, self.args.advantage_mode, self.args.advantage_normalization)
        return dict(zip(roles, advantages, strict=True))

    def rows_to_train(self, rows: list[Row]) -> list[Row]:
        """
        Drops the rows whose advantage is zero for all agents, because they add nothing to the policy gradient. All
        rows are kept if there is a reference penalty or a router loss.
        """
        if self.args.beta != 0.0 or self._router_loss_coefs:
            return rows
        return [row for row in rows if any(row.advantages.values())]

    def agent_loss(self, role: str, outputs: FusedCausalLMOutput, rows: AgentTensors) -> torch.Tensor:
        """
        Computes the loss of agent i on its own completions:

            L_i = mean over rows (items, nodes, siblings g) of  -w_turn * A_g * sum over tokens t of log pi_i(t)

        w_turn is 1, or in a chain the turn's entry of `turn_gradient_weights`. See [`~trainers.base.loss`] for further terms of the
        loss, such as the reference penalty, to which w_turn applies too.
        """
        loss = super().agent_loss
        if not self.args.weighs_turns:
            return loss(role, outputs, rows)
        weights = enumerate(self.args.turn_weights)
        return sum(weight * loss(role, outputs, rows.of_turn(turn)) for turn, weight in weights)
