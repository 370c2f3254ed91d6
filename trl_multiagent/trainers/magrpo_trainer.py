import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl.trainer.utils import FusedCausalLMOutput

from trl_multiagent.environments.base import Environment
from trl_multiagent.rollout.advantages import sibling_advantages
from trl_multiagent.rollout.tree import Node
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.rollout_trainer import RolloutTrainer
from trl_multiagent.trainers.base.rows import Row
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


class MAGRPOTrainer(RolloutTrainer):
    """
    Trainer for Multi-Agent Group Relative Policy Optimization (MAGRPO), introduced in [LLM Collaboration With
    Multi-Agent Reinforcement Learning](https://huggingface.co/papers/2508.04652).

    Every optimizer step plays one batch of rollout trees with the current team and uses all of it. For agent i the loss
    is the mean over the batch's rows (items, nodes and siblings) of -A_g * sum over the completion's tokens of log pi_i,
    with the advantage A_g of [`~rollout.advantages.sibling_advantages`].

    Args:
        team ([`AgentTeam`]):
            The agents, one per role of the environment and in its order.
        environment ([`Environment`]):
            Prompts and joint reward of the task.
        args ([`MAGRPOConfig`], *optional*):
            Configuration. If `None`, a default configuration is used.
        train_dataset ([`~datasets.Dataset`]):
            The items. Every column reaches the environment.
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Items to evaluate on: `num_generations_eval` sampled episodes each, without early termination.
        callbacks (`list[TrainerCallback]`, *optional*):
            Callbacks, as in any `Trainer`.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler for the parameters of the whole team.

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
    _card_settings = [
        "num_turns",
        "num_generations",
        "joint_mode",
        "handoff",
        "advantage_mode",
        "discount",
        "reward_scale",
        "reward_shift",
        "items_per_device",
        "max_completion_length",
        "temperature",
        "learning_rate",
        "beta",
        "seed",
    ]
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

    def __init__(
        self,
        team: AgentTeam,
        environment: Environment,
        args: MAGRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        if args is None:
            args = MAGRPOConfig(f"{environment.roles[-1]}-{self._name}")
        super().__init__(team, environment, args, train_dataset, eval_dataset, callbacks, optimizers)

    def advantages(self, levels: list[list[Node]]) -> list[list[dict[str, torch.Tensor]]]:
        """
        A_g = R_g - baseline, over the sibling set of each node. R_g is the mean return of the joint actions that contain the
        agent's completion g.
        """
        return [[self._sibling_advantages(node) for node in nodes] for nodes in levels]

    def _sibling_advantages(self, node: Node) -> dict[str, torch.Tensor]:
        roles = self.team.trained_roles
        returns = torch.tensor([node.agent_returns(self.team.roles.index(role)) for role in roles])
        advantages = sibling_advantages(returns, self.args.advantage_mode, self.args.advantage_normalization)
        return dict(zip(roles, advantages, strict=True))

    def rows_to_train(self, rows: list[Row]) -> list[Row]:
        """
        Leaves out rows whose advantage is zero for all agents, because they add nothing to the policy gradient. A reference
        penalty or a router loss needs all rows.
        """
        if self.beta != 0.0 or self._router_loss_coefs:
            return rows
        return [row for row in rows if any(row.advantages.values())]

    def agent_loss(self, role: str, outputs: FusedCausalLMOutput, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """
        The loss of agent i, which only its own completions enter:

            L_i = mean over rows (items, nodes, siblings g) of  -w_turn * A_g * sum over tokens t of log pi_i(t)

        Its gradient is that of TRL's GRPO loss, see [`~RolloutTrainer.policy_loss`], which also adds the reference penalty.
        w_turn is 1, or in a chain one of `turn_gradient_weights`.
        """
        if not self.args.weighs_turns:
            return self.policy_loss(role, outputs, rows)
        loss = 0.0
        for turn, weight in enumerate(self.args.turn_gradient_weights):
            mask = rows["completion_mask"] * (rows["turns"] == turn).unsqueeze(1)
            loss = loss + weight * self.policy_loss(role, outputs, {**rows, "completion_mask": mask})
        return loss
