"""
The base class of all trainers with critics, which are trained together with the agents and provide their advantages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from transformers.utils import logging
from trl.trainer.utils import pad

from trl_multiagent.folders import CRITICS_FOLDER, read_json
from trl_multiagent.jobs.distributed import fail_together
from trl_multiagent.models.packing import can_pack, num_shared
from trl_multiagent.models.pretrained import base_of, check_length
from trl_multiagent.rollout.tree import Node, Trees, acting, grouped
from trl_multiagent.team.agent_team import AgentTeam, critic_key
from trl_multiagent.team.critics import CRITICS_FILE, Critics, CriticSettings, Scale, make_critics
from trl_multiagent.trainers.base.actor_critic_config import ActorCriticConfig
from trl_multiagent.trainers.base.batch import Batch, CriticTensors, Row, critic_inputs
from trl_multiagent.trainers.base.metrics import Total, totals_of_all
from trl_multiagent.trainers.base.rollout_trainer import RolloutTrainer


logger = logging.get_logger(__name__)

LEAST_COMMON = 0.2  # share of the tokens of critics' texts from which reading them once pays
ROUNDING = 1e-6  # relative error of numbers that were computed in float32


@dataclass
class CriticRow:
    """
    One sequence that a critic reads. Its value belongs to some joint actions of the node.
    """

    node: Node
    joint_actions: list[int]
    input_ids: list[int]


class ActorCriticTrainer(RolloutTrainer):
    """
    Base class of the trainers with a critic as a baseline. Agents and critics are parts of one module, so one forward,
    one backward and one optimizer step train them all. A subclass defines the critic of each agent
    ([`~ActorCriticTrainer.critic_of`]), and the text that a critic reads ([`~ActorCriticTrainer.critic_text`]).

    A critic of states reads a node once. Its value has the targets of all joint actions of the node, so each joint
    action enters the value loss of a critic exactly once per pass over the batch, for any number of agents.
    """

    args: ActorCriticConfig
    _trains_critics = True
    # Of the current batch
    _advantages: dict[tuple[str, int], Total]  # by role and turn
    _value_scales: dict[str, tuple[float, float]]  # by critic
    _num_joint_actions: dict[str, int]  # that each critic judges, in all processes
    _config_class = ActorCriticConfig  # of the default configuration
    _card_settings = [
        *RolloutTrainer._card_settings,
        *"critic_form critic_type gae_lambda critic_learning_rate value_loss_coef".split(),
    ]

    # Methods that an algorithm defines

    def critic_of(self, role: str) -> str:
        """Returns the critic that judges an agent. By default, each agent has one of its own."""
        return role

    def critic_text(self, critic: str, node: Node, joint_action: int | None) -> list[int]:
        """
        Returns the tokens that a critic reads at a node, including the completions of a `joint_action` if one is
        given.
        """
        raise NotImplementedError

    # The critics as a part of the team

    @property
    def critics(self) -> Critics:
        return cast(Critics, self.team.critics)

    def _prepare_team(self, team: AgentTeam, args: ActorCriticConfig) -> None:
        self._num_joint_actions = {}
        team.freeze(args.frozen_agents or ())
        add_critics(team, args)
        team.train(team.training)
        if args.process_index == 0 and args.critic_type == "q" and args.completions_per_node == 1:
            logger.warning(
                "`critic_type='q'` with one completion per prompt: the advantage vanishes as the critic learns. Set "
                "`num_generations` to 2 or more in a tree, or `critic_type` to 'v'."
            )
        super()._prepare_team(team, args)

    def _learning_rates(self) -> dict[str, float]:
        rate = self.args.critic_learning_rate
        rate = self.args.learning_rate if rate is None else rate
        return super()._learning_rates() | {critic_key(name): rate for name in self.critics.names}

    def _trained_parameters(self) -> dict[str, list[torch.nn.Parameter]]:
        critics = self.critics
        own = {critic_key(name): critics.parameters_of(name) for name in critics.names}
        return super()._trained_parameters() | own

    # The batch

    def node_advantages(self, node: Node) -> dict[str, torch.Tensor]:
        """Returns the advantages of each completion, see [`critic_advantages`] and `advantage_normalization`."""
        advantages = {}
        for role in self.team.trained_roles:
            if role in node.prompts:
                values = torch.tensor(critic_advantages(node, self.critic_of(role), role), dtype=torch.float64)
                total = self._advantages[role, len(node.history)]
                if self.args.advantage_normalization and total.count > 1:
                    values = total.standardize(values)
                advantages[role] = values.float()
        return advantages

    def _judge(self, turns: Trees) -> None:
        critics = self.critics
        with fail_together(self.accelerator):
            self._rows = {name: self._critic_rows(name, turns) for name in critics.names}
        self._value_scales = {name: critics.scales[name].shift_and_factor for name in critics.names}
        for name in critics.names:
            self._predict(name)
            compute_targets(turns, name, self.args.discount, self.args.gae_lambda)
            self._log_critic(name)
        self._log_advantages(turns)

    def _make_batches(self, all_rows: list[Row]) -> list[Batch]:
        batches = super()._make_batches(all_rows)
        for name, rows in self._rows.items():
            size = max(1, -(-len(rows) // len(batches)))
            for k, batch in enumerate(batches):
                batch.critics[name] = self._critic_tensors(name, rows[k * size : (k + 1) * size])
        return batches

    def _critic_rows(self, critic: str, turns: Trees) -> list[CriticRow]:
        """
        Returns the sequences that a critic reads, in an order in which the rows of a micro-batch begin alike, or, if
        they have little in common, need little padding.
        """
        rows, is_q = [], self.args.critic_type == "q"
        for node in chain(*turns):
            if critic in map(self.critic_of, node.roles):
                joint_actions = [*range(len(node.indices))]
                # Joint actions with the same text are one row
                texts = (
                    grouped((tuple(self.critic_text(critic, node, j)), j) for j in joint_actions)
                    if is_q
                    else {tuple(self.critic_text(critic, node, None)): joint_actions}
                )
                rows += [CriticRow(node, own, [*ids]) for ids, own in texts.items()]
        longest = max((len(row.input_ids) for row in rows), default=0)
        model = base_of(self.critics.backbones[critic].model)
        check_length(f"A text of the critic {critic!r}", model, longest)
        alike = sorted(rows, key=lambda row: row.input_ids)
        common = sum(num_shared(one.input_ids, other.input_ids) for one, other in pairwise(alike))
        if can_pack(model, longest) and common > LEAST_COMMON * sum(len(row.input_ids) for row in rows):
            return alike
        return sorted(rows, key=lambda row: len(row.input_ids))

    def _critic_tensors(self, critic: str, rows: list[CriticRow]) -> CriticTensors:
        """Builds the tensors of a critic. Without rows, they have one row of padding."""
        backbone = self.critics.backbones[critic]
        pad_token_id = backbone.tokenizer.pad_token_id
        sequences = [row.input_ids for row in rows] or [[pad_token_id]]
        inputs = critic_inputs(base_of(backbone.model), sequences, pad_token_id)
        numbers = [
            torch.tensor([(row.node.targets[critic][j], 1.0, row.node.values[critic][j]) for j in row.joint_actions])
            for row in rows
        ]
        padded = pad([x.reshape(-1, 3) for x in numbers] or [torch.zeros(1, 3)])
        return CriticTensors(*padded.unbind(-1), inputs=inputs).to(self.accelerator.device)

    def _predict(self, critic: str) -> None:
        """
        Stores a critic's values on the nodes. All processes run the same number of forwards, because ZeRO-3 requires
        it.
        """
        rows = self._rows[critic]
        for row in rows:
            row.node.values[critic], row.node.targets[critic] = ([0.0] * len(row.node.indices) for _ in range(2))
        most = max(1, self._most(len(rows)))
        forwards = -(-most // self.args.rows_per_forward)
        size = -(-most // forwards)  # not a whole batch, which would be padding
        shift, factor = self._value_scales[critic]
        with self._without_training():
            for k in range(forwards):
                part = rows[k * size : (k + 1) * size]
                inputs = self._critic_tensors(critic, part).inputs
                outputs = self.model_wrapped(team_inputs={}, critic_inputs={critic: inputs})
                values = (shift + factor * outputs[critic_key(critic)]).tolist()
                for row, value in zip(part, values, strict=False):  # without rows, there is one of padding
                    for j in row.joint_actions:
                        row.node.values[critic][j] = value

    def _log_advantages(self, turns: Trees) -> None:
        """Adds the mean and deviation of the advantages to the next log entry, before they are standardized."""
        values = {}
        for role, (turn, nodes) in product(self.team.trained_roles, enumerate(turns)):
            own = (critic_advantages(node, self.critic_of(role), role) for node in acting(role, nodes))
            values[role, turn] = [*chain.from_iterable(own)]
        self._advantages = totals_of_all(values)
        for role in self.team.trained_roles:
            whole = sum((self._advantages[role, turn] for turn in range(len(turns))), Total())
            if whole.count:  # the agent has acted
                self._metrics["train"][f"agents/{role}/advantage_mean"].append(whole.mean)
                self._metrics["train"][f"agents/{role}/advantage_std"].append(whole.population_std)

    def _log_critic(self, name: str) -> None:
        """Adds the metrics of a critic before the update to the next log entry, and updates its scale."""
        judged = [(row.node, j) for row in self._rows[name] for j in row.joint_actions]
        gathered = gather_object([(node.targets[name][j], node.values[name][j]) for node, j in judged])
        self._num_joint_actions[name] = max(1, len(gathered))
        if not gathered:  # no agent of this critic acted
            return
        targets, values = zip(*gathered, strict=True)
        explained, mean = explained_variance(targets, values), fmean(targets)
        numbers = {"explained_variance": explained, "value_mean": fmean(values), "target_mean": mean}
        for metric, number in numbers.items():
            self._metrics["train"][f"{critic_key(name)}/{metric}"].append(number)
        self.critics.scales[name].update(mean, fmean(target * target for target in targets))

    # Checkpoints: the scales of the critics, which DeepSpeed does not load

    def _load_process_state(self, state: dict[str, Any]) -> None:
        super()._load_process_state(state)
        self._load_scales(self._resumed)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_scales(self.state.best_model_checkpoint)

    def _load_scales(self, checkpoint: Any) -> None:
        scales = read_json(Path(checkpoint, CRITICS_FOLDER, CRITICS_FILE))["scales"]
        self.critics.scales = {name: Scale(**scale) for name, scale in scales.items()}

    # The value loss

    def _critic_losses(self, outputs: dict[str, Any], batch: Batch) -> dict[str, torch.Tensor]:
        losses = {}
        for name, tensors in batch.critics.items():
            key = critic_key(name)
            shift, factor = self._value_scales[name]
            values = shift + factor * outputs[key]
            errors = value_errors(values, tensors.targets, tensors.old_values, self.args.value_clip_range)
            loss = (errors * tensors.target_mask).sum() / self._num_joint_actions[name]
            self.observer.sums[key, "value_loss"] += loss.detach()
            # A sum over processes, but gradients are averaged over processes
            losses[key] = self.args.value_loss_coef * loss * self.accelerator.num_processes
        return losses


def add_critics(team: AgentTeam, args: ActorCriticConfig) -> None:
    """
    Makes the critics of a team. A critic starts from the first agent that it judges. Raises `ValueError` if the team
    has other critics.
    """
    settings = CriticSettings(
        form=args.critic_form,
        models=args.critic_models,
        head_hidden_dim=args.critic_value_head_hidden_dim,
        lora_r=args.critic_lora_r,
        seed=args.seed,
    )
    roles = dict(zip(args.critic_names(team.trained_roles), team.trained_roles, strict=False))
    if team.critics is None:
        team.add_critics(make_critics(team, roles, settings))
    elif (team.critics.names, team.critics.settings) != (tuple(roles), settings):
        raise ValueError(
            "The team has critics of an earlier trainer with other settings: save it, and load its agents."
        )


def value_errors(
    values: torch.Tensor, targets: torch.Tensor, old_values: torch.Tensor, clip_range: float | None
) -> torch.Tensor:
    """
    Computes (y - V)², or max((y - V)², (y - clip(V, V_old ± clip_range))²) if `clip_range` is not `None`, for every
    target y of each value V. `values` have the shape `(num_rows,)`, `targets` and `old_values` `(num_rows,
    num_targets)`.
    """
    values = values.unsqueeze(1)
    errors = (targets - values) ** 2
    if clip_range is None:
        return errors
    clipped = values.clamp(old_values - clip_range, old_values + clip_range)
    return torch.max(errors, (targets - clipped) ** 2)


# Targets and advantages. A critic has stored its values on the nodes that it reads, in `node.values[critic]`, one
# value for each joint action. The values of a critic of states, V(h), are equal at a node; the values of a critic of
# actions, Q(h, a), differ, and their mean counts as V(h). A critic of one agent is named after the agent's role, and
# reads the nodes at which the agent acts. Its rewards are the role's.


def compute_targets(turns: Sequence[Sequence[Node]], critic: str, discount: float, gae_lambda: float) -> None:
    """
    Computes the targets of a critic, and stores them in `node.targets[critic]`, one number per joint action:

        y_j = r_j                                                               if the episode ends with j
        y_j = r_j + discount * ((1 - lambda) * V(h') + lambda * mean of y(h'))  otherwise

    h' is the node that follows the joint action j, and the mean is over the joint actions there. With `gae_lambda` 0
    this is the target of one step, with 1 the return of the tree. y_j - V(h) is the generalized advantage estimate. If
    the critic does not read h', the mean of y(h') replaces V(h').

    `turns` are the nodes of each turn, with their rewards and this critic's values.
    """
    for nodes in reversed(turns):
        for node in nodes:
            node.targets[critic] = list(node.rewards_of(critic))
            for joint_action, child in node.children.items():
                future = fmean(child.targets[critic])
                if critic in child.values:
                    future = (1 - gae_lambda) * fmean(child.values[critic]) + gae_lambda * future
                node.targets[critic][joint_action] += discount * future


def critic_advantages(node: Node, critic: str, role: str) -> list[float]:
    """
    Computes the advantages of an agent's completions at a node:

        A_g = mean over the joint actions j with completion g of y_j  -  baseline_g

    The baseline of a critic of states is V(h). The baseline of a critic of actions is the mean of Q(h, j) over the
    joint actions *without* completion g, because Q of the completion itself predicts y_j, so that y_j - Q would vanish
    as the critic learns. If there is a single completion, Q of its own joint actions is the baseline. The agent of
    `role` acts at the node.
    """
    advantages = []
    rows = list(zip(node.completion_of(role), node.targets[critic], node.values[critic], strict=True))
    for completion in range(1 + max(node.completion_of(role))):
        targets, own = zip(*((y, v) for other, y, v in rows if other == completion), strict=True)
        others = [v for other, _, v in rows if other != completion]
        advantages.append(fmean(targets) - fmean(others or own))
    return advantages


def explained_variance(targets: Sequence[float], values: Sequence[float]) -> float:
    """
    Computes 1 - Var(y - V) / Var(y): 1 for a perfect critic, 0 for a critic that predicts the mean, negative for a
    worse critic. It is 0 if all targets are equal, up to rounding errors.
    """
    if max(targets) - min(targets) <= ROUNDING * max(map(abs, targets)):
        return 0.0
    return 1.0 - pvariance(y - v for y, v in zip(targets, values, strict=True)) / pvariance(targets)
