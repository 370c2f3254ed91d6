"""The plan that `--dry_run` prints: the size of a run, and the folders of its results."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from accelerate import PartialState
from datasets import Dataset

from trl_multiagent.environments.base import Environment
from trl_multiagent.runs.prepared import PreparedRun, check_templates
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.terminal import printable
from trl_multiagent.trainers.base.actor_critic_config import ActorCriticConfig
from trl_multiagent.trainers.base.rollout_config import RolloutConfig
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


HEADING = "Dry run: no model was loaded, nothing was written."


def print_plan(lines: Mapping[str, Any], heading: str = HEADING) -> None:
    """Prints the lines of a plan, each with its name, below a heading, in the main process."""
    if PartialState().is_main_process:
        print(heading, *(f"  {name:<15}  {printable(str(text))}" for name, text in lines.items()), sep="\n")


def rollout_lines(
    run: PreparedRun,
    roles: Sequence[str],
    environment: Environment | None = None,
    datasets: tuple[Dataset, Dataset | None] | None = None,
    team: AgentTeam | None = None,
) -> dict[str, Any]:
    """
    Returns the plan of a training on rollouts, made without loading a model. The environment may add lines. Without
    `datasets`, the function loads those of the recipe. `team`: the team without weights, if it is known.
    """
    args, dataset = run.training_args, run.dataset
    num_train = num_eval = None
    items: Sequence[dict] = ()
    try:
        train_dataset, eval_dataset = run.load_datasets() if datasets is None else datasets
        num_train, num_eval = len(train_dataset), len(eval_dataset or ())
        items = cast(Sequence[dict], train_dataset)
    except ConnectionError as error:
        print(f"The dataset could not be reached, so its size is unknown. {error}")
    if team is not None and environment is not None and len(items) > 0:
        check_templates(run, team, environment, items)

    nodes = sum(args.nodes_per_turn)
    joint_actions = nodes * args.joint_actions_per_node  # each is one env step
    env_steps = run.items_per_step * joint_actions  # of one optimizer step
    or_fewer = " at most" if args.early_termination_threshold is not None and args.num_turns > 1 else ""
    if args.max_steps > 0:
        steps, length = args.max_steps, "max_steps"
    else:
        length = f"{args.num_train_epochs:g} epochs of the training items"
        steps = None if num_train is None else math.ceil(args.num_train_epochs * args.steps_per_epoch(num_train))
    when = {"steps": f"every {args.eval_steps} steps", "epoch": "after every epoch"}.get(args.eval_strategy.value)
    batches = None if steps is None else -(-steps // args.num_iterations)
    lines: dict[str, Any] = {
        "algorithm": f"{run.algorithm}, {baseline(args)}",
        **collaboration(run),
        "agents": f"{agents(run.model_names, roles, args.frozen_agents or ())} ({run.form_in_words})",
        "training": f"{count(num_train, 'item')} of {dataset.name or 'the task'}, split {dataset.train_split or 'whole'}",
        "evaluation": f"{count(num_eval, 'item')} of split {dataset.eval_split}, {when}" if when else "none",
        "rollouts": rollouts(args),
        **workflow(run, environment, joint_actions),
        "tree of an item": f"{count(nodes, 'node')}, {joint_actions} joint actions = env steps, "
        f"{args.rows_per_item} rows{or_fewer}",
        "optimizer step": f"{count(args.items_per_device, 'item')} x {count(args.world_size, 'process', 'processes')}, "
        f"{env_steps} env steps{or_fewer}{f', {args.num_iterations} steps on each batch' * (args.num_iterations > 1)}",
        "optimizer steps": f"{'unknown' if steps is None else steps} ({length})",
        "env steps": "unknown" if batches is None else f"{batches * env_steps}{or_fewer}",
        "output folder": run.run_folder,
        "trained team": run.team_folder if run.saves_team else "not saved, as output.save_final_model is false",
        "reported to": ", ".join(args.report_to) or "none",
    }
    if environment is not None and steps is not None and batches is not None:
        asked = batches * run.items_per_step * later_prompts(args)
        if args.eval_strategy.value != "no" and num_eval is not None:
            asked += num_evaluations(args, steps) * num_eval * (args.num_turns - 1)
        lines |= environment.plan(items, asked, args.max_completion_length)
    return lines


def baseline(args: RolloutConfig) -> str:
    """Describes the baseline of a completion."""
    if not isinstance(args, ActorCriticConfig):
        return f"advantage_mode {cast(MAGRPOConfig, args).advantage_mode}"
    models = [args.critic_models] if isinstance(args.critic_models, str) else args.critic_models or []
    sources = f" from {', '.join(models)}" * bool(models)
    return f"critic_type {args.critic_type}, critic_form {args.critic_form}{sources}"


def rollouts(args: RolloutConfig) -> str:
    """Describes the rollouts of an item."""
    turns = count(args.num_turns, "turn")
    if args.num_episodes is not None:
        return f"{args.num_episodes} episodes per item, {turns} each"
    return f"{turns}, joint_mode {args.joint_mode}, handoff {args.handoff}, {args.num_generations} completions per agent and node"


def workflow(run: PreparedRun, environment: Environment | None, joint_actions: int) -> dict[str, str]:
    """Returns the lines of a plan about who acts when, who is not trained, and what counterfactual credit costs."""
    lines, credit = {}, vars(run.training_args).get("credit")
    if environment is not None and environment.order is not None:
        numbered = enumerate(environment.order, start=1)
        lines["order"] = "; ".join(f"turn {k}: {', '.join(roles)}" for k, roles in numbered)
    if run.seats:
        lines["not trained"] = ", ".join(f"{role}: {next(iter(seat), '')}" for role, seat in run.seats.items())
    if credit is not None:
        lines["credit"] = f"replaced by {credit}: at most {joint_actions} more rewards per item and agent"
    return lines


def collaboration(run: PreparedRun) -> dict[str, str]:
    """Returns the line of a plan about `collaboration_mode`, if one agent answers for all roles."""
    if not run.is_centralized:
        return {}
    length = run.arguments.get("max_completion_length", run.training_args.max_completion_length)
    return {"collaboration": f"centralized: one agent answers for all {run.num_agents} roles, in {length} tokens"}


def agents(names: str | list[str], roles: Sequence[str], frozen: Sequence[str] = ()) -> str:
    """Names the model of each agent."""
    names = names if isinstance(names, list) else [names] * len(roles)
    return ", ".join(f"{role}: {name}{', frozen' * (role in frozen)}" for role, name in zip(roles, names, strict=True))


def later_prompts(args: RolloutConfig) -> int:
    """Counts the later-turn prompts that an item's full tree requests."""
    nodes = args.nodes_per_turn
    if args.handoff is not None and isinstance(args, ActorCriticConfig):  # critics also value joint actions that end
        return sum(nodes[:-1]) * args.joint_actions_per_node
    return sum(nodes[1:])


def num_evaluations(args: RolloutConfig, steps: int) -> int:
    """Counts the evaluations in a number of optimizer steps."""
    if args.eval_strategy.value == "epoch":
        return math.ceil(args.num_train_epochs)
    return bool(args.eval_on_start) + steps // max(1, int(args.eval_steps or 1))


def count(number: int | None, one: str, many: str | None = None) -> str:
    """Formats a number with its noun: `1 item`, `2 items`."""
    if number is None:
        return f"unknown number of {many or one + 's'}"
    return f"{number} {one if number == 1 else many or one + 's'}"
