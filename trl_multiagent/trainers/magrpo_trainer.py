import torch
from trl.trainer.utils import FusedCausalLMOutput

from trl_multiagent.jobs.distributed import fail_together
from trl_multiagent.rollout.tree import Node, Trees, acting, groups_of
from trl_multiagent.trainers.base.batch import Advantages, AgentTensors, Row
from trl_multiagent.trainers.base.rollout_trainer import RolloutTrainer
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig, MAREINFORCEConfig, MAReMaxConfig, MARLOOConfig


class MAGRPOTrainer(RolloutTrainer):
    """
    Trainer for Multi-Agent Group Relative Policy Optimization (MAGRPO), introduced in [LLM Collaboration With
    Multi-Agent Reinforcement Learning](https://huggingface.co/papers/2508.04652).

    Each optimizer step samples one batch of rollout trees with the current team. With `num_iterations`, a batch is
    used for that many steps. [`~MAGRPOTrainer.node_advantages`] turns the returns of the trees into advantages, and
    [`~MAGRPOTrainer.agent_loss`] computes the loss with them.

    Args:
        team ([`AgentTeam`]): The agents, one per role of the environment and in its order.
        environment ([`Environment`]): The task: its prompts and its joint reward.
        args ([`MAGRPOConfig`], *optional*): Configuration. If `None`, the algorithm's default configuration is used.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]): The items. The environment receives
            all columns. With a stream, `max_steps` has to be set.
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
    _config_class = MAGRPOConfig

    def node_advantages(self, node: Node) -> dict[str, torch.Tensor]:
        """
        Computes the advantage of each completion over its siblings, which are the agent's other completions at the
        node:

            A_g = R_g - baseline(R)

        R_g is the mean return of the joint actions that contain the agent's completion g. The baseline depends on
        `advantage_mode`, see [`sibling_advantages`].
        """
        roles = [role for role in self.team.trained_roles if role in node.prompts]
        if not roles:
            return {}
        returns = torch.tensor([node.agent_returns(role) for role in roles])
        return dict(zip(roles, self._over_siblings(returns), strict=True))

    def advantages(self, turns: Trees) -> Advantages:
        """
        Computes the advantages of all nodes. In groups of episodes, the siblings of a completion are the agent's
        completions in the same turn of the item's other episodes. Without siblings, the advantage is 0. For the
        settings that depend on more than a group, see [`~trainers.advantages`].
        """
        if self.args.num_episodes is None:
            advantages = super().advantages(turns)
        else:
            advantages = [self._episode_advantages(nodes) for nodes in turns]
        if isinstance(self.args.advantage_normalization, str) or self.args.equal_episodes:
            from trl_multiagent.trainers.advantages import weigh

            weigh(self.args, self.environment, self.team.trained_roles, turns, advantages)
        return advantages

    def _judge(self, turns: Trees) -> None:
        """Scores counterfactual joint actions, see `credit`."""
        if self.args.credit is None:
            return
        from trl_multiagent.rollout.credit import add_counterfactuals

        # A workflow that is replayed with another answer has as many turns as it had
        playing = self.environment.playing(self.args.num_turns, are_episodes=False)
        with fail_together(self.accelerator), self.observer.timed("reward"), playing:
            for nodes in turns:
                add_counterfactuals(
                    nodes,
                    self.environment,
                    self.team.trained_roles,
                    self.args.credit,
                    self._process_reward,
                    chat_roles=self.sampler.chat_roles,
                    trainer_state=self.state,
                    reward_none=self.args.reward_none,
                )

    @property
    def _only_compares_rewards(self) -> bool:
        args, own = self.args, type(self)
        changed = own.node_advantages, own.advantages  # of an algorithm that a user derived from this one
        is_own = changed == (MAGRPOTrainer.node_advantages, MAGRPOTrainer.advantages)
        return is_own and args.num_turns == 1 and args.credit is None and args.advantage_mode != "raw"

    def _over_siblings(self, returns: torch.Tensor) -> torch.Tensor:
        """Computes advantages of the shape of `returns`, `(..., G)`."""
        normalize, size = self.args.advantage_normalization is True, self.args.num_generations
        return sibling_advantages(returns, self.args.advantage_mode, normalize, size)

    def _episode_advantages(self, nodes: list[Node]) -> list[dict[str, torch.Tensor]]:
        """Computes the advantages at the nodes of one turn of groups of episodes, of shape `(1,)` each."""
        advantages: dict[int, dict[str, torch.Tensor]] = {id(node): {} for node in nodes}
        for role in self.team.trained_roles:
            for group in groups_of(acting(role, nodes)):
                returns = torch.tensor([node.agent_returns(role)[0] for node in group])
                for node, advantage in zip(group, self._over_siblings(returns).split(1), strict=True):
                    advantages[id(node)][role] = advantage
        return [*advantages.values()]

    def rows_to_train(self, rows: list[Row]) -> list[Row]:
        """
        Drops rows that add nothing to the gradient: their advantages are zero, and there is no reference penalty or
        router loss.
        """
        if self.args.beta != 0.0 or self._router_loss_coefs:
            return rows
        return [row for row in rows if any(row.advantages.values())]

    def agent_loss(self, role: str, outputs: FusedCausalLMOutput, rows: AgentTensors) -> torch.Tensor:
        """
        Computes the loss of agent i on its own completions:

            L_i = mean over rows (items, nodes, siblings g) of  -w_turn * A_g * sum over tokens t of log pi_i(t)

        w_turn is 1, or in a chain the turn's entry of `turn_gradient_weights`. It also applies to further terms of the
        loss, such as the reference penalty, see [`~trainers.base.loss`].
        """
        loss, weights = super().agent_loss, self.args.turn_gradient_weights or ()
        if set(weights) == {1.0}:
            return loss(role, outputs, rows)
        return sum(weight * loss(role, outputs, rows.of_turn(turn)) for turn, weight in enumerate(weights))


def sibling_advantages(
    returns: torch.Tensor, mode: str, normalize: bool = False, num_generations: int | None = None
) -> torch.Tensor:
    """
    Computes the advantage of each sibling over the baseline of its group.

    | `mode` | algorithm | A_g |
    | --- | --- | --- |
    | `"mean"` | MAGRPO ([Dr. GRPO](https://huggingface.co/papers/2503.20783)) | R_g - mean(R) |
    | `"rloo"` | MARLOO ([RLOO](https://huggingface.co/papers/2402.14740)) | R_g - mean of the other siblings |
    | `"max"` | MAReMax ([ReMax](https://huggingface.co/papers/2310.10505)) | R_g - max(R) |
    | `"raw"` | MAREINFORCE | R_g |

    Args:
        returns (`torch.Tensor`):
            Returns R of shape `(..., G)`, siblings in the last dimension. Equal siblings have advantages of exactly
            zero, except in mode `"raw"`. Siblings that are NaN have no reward: they count in no baseline, and their
            advantages are NaN.
        mode (`str`): One of the modes above.
        normalize (`bool`, *optional*, defaults to `False`):
            Whether to subtract the mean of the advantages and divide by their (population) standard deviation. A
            group of equal members gets zeros.
        num_generations (`int`, *optional*): Size G of a complete group, by default the size in `returns`. A sibling
            without others has an advantage of zero, except in mode `"raw"`. The baseline of `"mean"` contains the
            sibling's own return, which scales the expected update by (G - 1) / G. A smaller set gets the same scale.

    Returns:
        `torch.Tensor` of the shape of `returns`.
    """
    if returns.isnan().any():
        advantages = returns.clone()
        for row in advantages.view(-1, returns.size(-1)):
            is_known = ~row.isnan()
            if is_known.any():
                row[is_known] = sibling_advantages(row[is_known], mode, normalize, num_generations or len(row))
        return advantages
    equal = (returns == returns[..., :1]).all(-1, keepdim=True)
    mean = torch.where(equal, returns, returns.mean(-1, keepdim=True))  # exact for equal siblings, without rounding
    size = returns.size(-1)
    if mode == "mean":
        full = num_generations or size
        advantages = (returns - mean) * (size * (full - 1) / max(1, full * (size - 1)))
    elif mode == "rloo":
        advantages = (returns - mean) * size / max(1, size - 1)
    elif mode == "max":
        advantages = returns - returns.max(-1, keepdim=True).values
    else:
        advantages = returns.clone()
    if normalize:
        centered = advantages - advantages.mean(-1, keepdim=True)
        std = centered.pow(2).mean(-1, keepdim=True).sqrt()
        advantages = torch.where(std > 1e-6, centered / std.clamp(min=1e-6), 0.0)
    return advantages


class MARLOOTrainer(MAGRPOTrainer):
    """
    Trainer for Multi-Agent REINFORCE Leave-One-Out (MARLOO).

    The baseline of a completion is the mean return of its siblings, without its own
    ([RLOO](https://huggingface.co/papers/2402.14740)). Everything else is as in [`MAGRPOTrainer`]; `args` is a
    [`MARLOOConfig`].
    """

    _tag_names = ["trl", "trl-multiagent", "marloo"]
    _name = "MARLOO"
    _config_class = MARLOOConfig


class MAReMaxTrainer(MAGRPOTrainer):
    """
    Trainer for Multi-Agent REINFORCE with group max (MAReMax).

    The baseline is the highest return in the group, the completion's own included (a variant of
    [ReMax](https://huggingface.co/papers/2310.10505)). Everything else is as in [`MAGRPOTrainer`]; `args` is a
    [`MAReMaxConfig`].
    """

    _tag_names = ["trl", "trl-multiagent", "maremax"]
    _name = "MAReMax"
    _config_class = MAReMaxConfig


class MAREINFORCETrainer(MAGRPOTrainer):
    """
    Trainer for Multi-Agent REINFORCE (MAREINFORCE).

    The advantage of a completion is its return, without a baseline. Everything else is as in [`MAGRPOTrainer`]; `args`
    is a [`MAREINFORCEConfig`].
    """

    _tag_names = ["trl", "trl-multiagent", "mareinforce"]
    _name = "MAREINFORCE"
    _config_class = MAREINFORCEConfig
