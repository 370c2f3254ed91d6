"""
Runs `trl-multiagent evaluate` and `cross-play`: makes the environment, the items and the policies, trains controls,
plays all of them, and reports.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from accelerate import Accelerator
from datasets import Dataset
from transformers import SchedulerType, TrainerCallback, TrainerControl, TrainerState

from trl_multiagent.console import printable
from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.frames import shows_task
from trl_multiagent.environments.task import Task, TaskSettings
from trl_multiagent.evaluation.play import play_policy
from trl_multiagent.evaluation.players import CUT, SHUFFLED, LoadedTeam, MessageAblation, MixedTeam, Policy
from trl_multiagent.evaluation.statistics import compute_result
from trl_multiagent.folders import COST_FILE, locked, read_json
from trl_multiagent.jobs.distributed import fail_together, start_processes
from trl_multiagent.jobs.fingerprint import checksum_of_weights, describe_agent
from trl_multiagent.jobs.signals import end_on_signal
from trl_multiagent.jobs.stage import Stage
from trl_multiagent.report.evaluation import Report, mixes
from trl_multiagent.rollout.sampler import check_stop_strings
from trl_multiagent.runs.evaluation_settings import Evaluation, parse_evaluation, safe_settings
from trl_multiagent.runs.models import Run, make_loader, seated
from trl_multiagent.runs.plan import print_plan
from trl_multiagent.runs.prepared import (
    PreparedRun,
    check_folder,
    check_run,
    check_team,
    first_rows,
    prepare_training,
    start_logging,
)
from trl_multiagent.runs.run import algorithm_of, end_on_wrong_input, end_with_one_line, settings_of
from trl_multiagent.runs.training import train
from trl_multiagent.settings.algorithms import ALGORITHMS, ROLLOUTS
from trl_multiagent.settings.derive import Settings, check_models
from trl_multiagent.settings.read import ConfigError, config_errors, read_yaml
from trl_multiagent.settings.schema import AUTO, algorithm_keys
from trl_multiagent.trainers.base.rollout_trainer import RolloutTrainer


# What an ablation puts in place of an agent, by short names
REPLACEMENTS = {"silent": "nothing", "untrained": "the untrained agent", "other": "another team's agent"}
CONTROL_FILE = "control.json"  # in the folder of a control that is complete
MOST_STEPS = 4  # limit as a multiple of these steps, if the learning rate does not depend on their number


@shows_task
def run_evaluation(
    task: Task | None,
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    cross_play: bool = False,
) -> None:
    """
    Evaluates saved teams, or prints the cost if `--dry_run` is given. An interrupted evaluation is resumed. With
    `cross_play`, the agents of the teams play with each other. For the other arguments, see
    [`~trl_multiagent.runs.run.run_recipe`].
    """
    prog = prog or Path(sys.argv[0]).name
    with end_on_wrong_input(prog):
        evaluation = parse_evaluation(task, argv, prog, cross_play)
        config, state = evaluation.config, start_processes()
        start_logging(evaluation.settings, config.disable_tqdm)
        check_folder("`evaluation.output_dir`", evaluation.output_dir)
        environment = make_environment(evaluation)
        controls = {} if config.control is None else make_controls(evaluation, config.control, task)
        policies = (
            mixed_policies(evaluation, environment) if cross_play else make_policies(evaluation, environment, controls)
        )
        items = load_items(evaluation)
        untrained = [control for control in controls.values() if not control.is_trained]
        for control in untrained:
            control.read_run()  # reports errors before any control is trained
        if evaluation.arguments.dry_run:
            return print_cost(evaluation, controls, policies, items)
        for policy in policies:
            policy.environment.prepare(cast(int, config.num_turns))
    with end_on_signal(prog, []), end_with_one_line(prog), contextlib.ExitStack() as stack:
        with end_on_wrong_input(prog):
            with fail_together(state):
                if state.is_main_process:
                    stack.enter_context(locked(evaluation.output_dir, "choose another `evaluation.output_dir`"))
            for control in untrained:
                control.train()
        play_and_report(evaluation, controls, policies, items)
    state.destroy_process_group()


def play_and_report(
    evaluation: Evaluation, controls: Mapping[str, Control], policies: Sequence[Policy], items: Dataset
) -> None:
    """Plays all policies, writes and prints the report. If a policy cannot be loaded or played, the program ends."""
    config, prog = evaluation.config, evaluation.settings.prog
    accelerator = Accelerator()
    results = []
    for policy in policies:
        with end_on_wrong_input(prog):
            records = play_policy(policy, items, config, accelerator)
        if accelerator.is_main_process:
            results.append(compute_result(policy, records, len(items), config))
    if accelerator.is_main_process:
        facts = {"dataset": asdict(evaluation.settings.dataset), "environment": repr(policies[0].environment)}
        report = Report(config, results, len(items), facts, cost_note(controls) if controls else "")
        with end_on_wrong_input(prog):  # such as a full disk
            paths = report.write(evaluation.output_dir)
        print(report.table())
        saved = f"{', '.join(map(str, paths))}, and the transcripts in {evaluation.output_dir / 'transcripts'}"
        print(f"\nSaved {printable(saved)}", flush=True)
    accelerator.wait_for_everyone()


def print_cost(
    evaluation: Evaluation, controls: Mapping[str, Control], policies: Sequence[Policy], items: Dataset
) -> None:
    """Prints the cost of an evaluation, without loading a model."""
    config, num_turns = evaluation.config, cast(int, evaluation.config.num_turns)
    episodes = len(items) * config.num_episodes
    lines = {
        "items": f"{len(items)}, with {config.num_episodes} episodes of {num_turns} turns each",
        "temperature": config.temperature,
        "pass@k": ", ".join(map(str, config.pass_at)),
        "folder": config.output_dir,
    }
    for name, control in controls.items():
        state = "is there already" if control.is_trained else "is trained at the cost of the run"
        lines[f"{name}_control, training"] = (
            f"{state}: {control.cost.env_steps} scored answers and {control.cost.generated_tokens} generated tokens, "
            f"in {control.folder}"
        )
    for policy in policies:
        calls = episodes * num_turns * len(policy.environment.roles)
        lines[policy.name] = f"{calls} completions, {calls * policy.max_completion_length} tokens at most"
        plan = policy.environment.plan([*items], episodes * (num_turns - 1), policy.max_completion_length)
        lines |= {f"{policy.name}: {name}": text for name, text in plan.items()}
    print_plan(lines)


# Policies


def settings_for_task(evaluation: Evaluation, **changes: Any) -> TaskSettings:
    return replace(evaluation.settings.for_task(evaluation.output_dir), **changes)


def make_environment(evaluation: Evaluation) -> Environment:
    """
    Makes the task's environment. Raises `ConfigError` if a team has other roles, or it cannot play so many turns.
    """
    environment = evaluation.settings.task.environment(settings_for_task(evaluation))
    run = Run(Path(evaluation.teams[0].location), evaluation.base)
    arguments = evaluation.settings.arguments | {"seed": evaluation.config.seed}  # not the seed of the training
    environment = seated(replace(evaluation.settings, arguments=arguments), environment, evaluation.output_dir, run)
    for team in evaluation.teams:
        if team.roles and team.roles != tuple(environment.roles):
            raise ConfigError(
                f"The team in {team.location} has the roles {', '.join(team.roles)}, but the task has "
                f"{', '.join(environment.roles)}: choose the config of its training, or set "
                f"{evaluation.settings.algorithm}.num_agents."
            )
    with config_errors():
        check_stop_strings(evaluation.config.stop_strings, environment.roles)
        evaluation.config.num_turns = environment.check_turns(evaluation.config.num_turns)
    return environment


def make_single_environment(evaluation: Evaluation, purpose: str) -> Environment:
    """
    Makes the task's environment for one agent. `purpose`: what needs it, for the message if the task has no such form.
    """
    problem = f"The {purpose} needs the task for one agent"
    with config_errors(f"{problem}. "):
        settings = settings_for_task(evaluation, num_agents=1, is_centralized=False)
        environment = evaluation.settings.task.environment(settings)
    if len(environment.roles) != 1:
        raise ConfigError(f"{problem}, but it always has the roles {', '.join(environment.roles)}: leave it out.")
    return environment


def load_items(evaluation: Evaluation) -> Dataset:
    """
    Loads the items: the evaluation set, or its first `dataset.eval_size` rows. Raises `ConfigError` if there are none
    to play.
    """
    train, items = evaluation.settings.task.datasets(settings_for_task(evaluation))
    if evaluation.arguments.dataset and not evaluation.arguments.split:
        items = train
    if isinstance(items, dict):
        raise ConfigError(f"The task has the evaluation sets {', '.join(items)}; an evaluation plays one of them.")
    if not items:
        raise ConfigError(
            "There are no items to evaluate on: set `dataset.eval_split` or --split, such as --split 'test[:50]', "
            "or give --dataset, to play all of its rows."
        )
    items = first_rows(items, evaluation.settings.dataset.eval_size)
    if evaluation.config.ablate and (len(items) - 1) % evaluation.config.items_per_batch == 0:
        raise ConfigError(
            "`evaluation.ablate` exchanges messages between the items of a batch, but one batch has a single item: "
            "choose another `evaluation.items_per_batch`."
        )
    return items


def load_team(evaluation: Evaluation, names: str | list[str], roles: Sequence[str]) -> LoadedTeam:
    """Loads a team on the device of this process, see [`~team.load.load_player`]."""
    team = make_loader(evaluation.settings).load_player(names, roles)
    given = evaluation.config.chat_template_kwargs or {}
    team.chat_template_kwargs = {role: team.chat_template_kwargs[role] | given for role in team.roles}
    checksum = cache(lambda model: checksum_of_weights(model.parameters()))  # agents may share a model
    description = {
        f"agent {role}": f"{describe_agent(team.agents[role])}, weights {checksum(team.policies[role])}, "
        f"reasoning {team.reasoning[role]}, chat template {team.chat_template_kwargs[role]}"
        for role in team.roles
    }
    return LoadedTeam(team, description)


def make_policies(evaluation: Evaluation, environment: Environment, controls: Mapping[str, Control]) -> list[Policy]:
    """
    Makes the policies to play: the teams, in order, then the policies to compare them with. Raises `ConfigError` if
    one is impossible.
    """
    policies = [make_policy(evaluation, team.name, "team", environment, team.location) for team in evaluation.teams]
    policies += baseline_policies(evaluation, environment)
    policies += control_policies(evaluation, controls) if controls else []
    policies += ablated_policies(evaluation, environment) if evaluation.config.contributions else []
    policies += message_policies(evaluation, environment) if evaluation.config.ablate else []
    names = [policy.name for policy in policies]
    for name in names:
        if names.count(name) > 1:  # they would share a folder of transcripts
            raise ConfigError(f"Two of the policies to evaluate are called {name!r}: rename the folder of this team.")
    return policies


def make_policy(
    evaluation: Evaluation,
    name: str,
    kind: str,
    environment: Environment,
    models: str | list[str],
    length: int | None = None,
    **others: Any,
) -> Policy:
    """
    Makes the policy of a saved team or of models. `length`: tokens of a completion; `others`: more arguments of
    [`Policy`].
    """
    load = partial(load_team, evaluation, models, environment.roles)
    source = models if isinstance(models, str) else ", ".join(models)
    return Policy(name, kind, environment, load, length or evaluation.max_completion_length, source, **others)


def baseline_model(evaluation: Evaluation) -> str | list[str]:
    """Returns the model of the baselines. Raises `ConfigError` if it is not known, or does not exist."""
    names = evaluation.config.baseline_model or evaluation.base
    if names is None:
        raise ConfigError("The model of the baselines is not known: give `--baseline_model`.")
    check_models("baseline_model", names, evaluation.settings.task.models)
    return names


def baseline_policies(evaluation: Evaluation, environment: Environment) -> list[Policy]:
    """Makes the baselines that the settings ask for."""
    policies = []
    for name in evaluation.config.baselines or ():
        names, own, limit = baseline_model(evaluation), environment, evaluation.max_completion_length
        if name == "raw_single_agent":
            own = make_single_environment(evaluation, "baseline raw_single_agent")
            limit *= len(environment.roles)  # all answers of a turn together have the same limit as the team's
            if isinstance(names, list):
                (role,) = own.roles
                names = names[environment.roles.index(role) if role in environment.roles else 0]
        policies.append(make_policy(evaluation, name, "baseline", own, names, limit, is_pipeline=name == "pipeline"))
    return policies


def control_policies(evaluation: Evaluation, controls: Mapping[str, Control]) -> list[Policy]:
    """Makes the policies of the trained controls, one per team."""
    if evaluation.config.control == "single_agent":
        environment = make_single_environment(evaluation, "control")
    else:
        environment = evaluation.settings.task.environment(settings_for_task(evaluation, is_centralized=True))
    return [
        make_policy(
            evaluation,
            f"{team}_control",
            "control",
            environment,
            str(control.folder),
            control.num_agents * evaluation.max_completion_length,
            compared_with=team,
            row=str(evaluation.config.control),
        )
        for team, control in controls.items()
    ]


def ablated_policies(evaluation: Evaluation, environment: Environment) -> list[Policy]:
    """Makes the teams with one agent replaced: by nothing, by the untrained agent, and by the next team's agent."""
    teams, roles, base = evaluation.teams, environment.roles, baseline_model(evaluation)
    mix, policies = mixer(evaluation, roles), []
    for k, team in enumerate(teams):
        # The generator silences the team's own agent
        replaced = {"silent": team.location, "untrained": base if isinstance(base, str) else (*base,)}
        if len(teams) > 1:
            replaced["other"] = teams[(k + 1) % len(teams)].location
        policies += [
            Policy(
                f"{team.name}_{role}_{by}",
                "ablation",
                environment,
                partial(mix, {**dict.fromkeys(roles, team.location), role: models}),
                evaluation.max_completion_length,
                team.location,
                compared_with=team.name,
                row=f"{role} replaced by {REPLACEMENTS[by]}",
                is_shown=False,
                silent_role=role if by == "silent" else None,
            )
            for role in roles
            for by, models in replaced.items()
        ]
    return policies


def message_policies(evaluation: Evaluation, environment: Environment) -> list[Policy]:
    """
    Makes the teams of agents that do not read each other's answers. Raises `ConfigError` if the task has no messages.
    """
    if len(environment.roles) == 1 or evaluation.config.num_turns == 1:
        raise ConfigError("`evaluation.ablate: messages` is for several agents and turns: leave it out.")
    if evaluation.settings.seats:  # a seated environment keeps the messages of an episode itself
        raise ConfigError("`evaluation.ablate: messages` cannot be combined with `seats`: leave one of them out.")
    if getattr(environment.unwrapped, "live", False):
        raise ConfigError(
            "`evaluation.ablate: messages` cannot be combined with `live=True`: it replays episodes. Leave it out."
        )
    return [
        make_policy(
            evaluation,
            f"{team.name}_messages_{how}",
            "ablation",
            MessageAblation(environment, how),
            team.location,
            compared_with=team.name,
            row=f"messages {how}",
        )
        for team in evaluation.teams
        for how in (CUT, SHUFFLED)
    ]


def mixer(evaluation: Evaluation, roles: Sequence[str]) -> Callable[[Mapping[str, str | tuple[str, ...]]], LoadedTeam]:
    """
    Returns a function that makes a team of agents of several teams, each of which is loaded once. It takes the folder,
    the id or the models of each role's team, in the order of the roles.
    """
    loaded = cache(lambda names: load_team(evaluation, names if isinstance(names, str) else [*names], roles))

    def mix(names: Mapping[str, str | tuple[str, ...]]) -> LoadedTeam:
        parts = {role: loaded(own) for role, own in names.items()}
        description = {f"agent {role}": part.description[f"agent {role}"] for role, part in parts.items()}
        return LoadedTeam(MixedTeam({role: part.team for role, part in parts.items()}), description)

    return mix


def mixed_policies(evaluation: Evaluation, environment: Environment) -> list[Policy]:
    """Makes the teams of a cross-play. Every agent is loaded once. Raises `ConfigError` if the task has one role."""
    teams, roles = evaluation.teams, environment.roles
    if len(roles) == 1:
        raise ConfigError("A cross-play needs several roles: `trl-multiagent evaluate` compares single agents.")
    mix, policies = mixer(evaluation, roles), []
    for runs in mixes(len(teams), roles):
        trained_together = len(set(runs)) == 1
        name = teams[runs[0]].name if trained_together else f"mix_{'_'.join(map(str, runs))}"
        source = " + ".join(teams[run].location for run in dict.fromkeys(runs))
        kind, length = "team" if trained_together else "pair", evaluation.max_completion_length
        load = partial(mix, {role: teams[run].location for role, run in zip(roles, runs, strict=True)})
        policies.append(Policy(name, kind, environment, load, length, source, mix=runs))
    return policies


# Controls: one agent that answers alone, or for all roles, trained at the cost of a team. It has the settings of the
# team's run, and an answer may have as many tokens as all of the team's together. The training ends when its trainer
# has counted the same cost. A schedule of the learning rate has as many steps as the team's scored answers need


class TrainingCost(NamedTuple):
    """The cost of a training: scored joint answers, and tokens that all agents generated."""

    env_steps: int
    generated_tokens: int


@dataclass(eq=False)
class StopWhenSpent(TrainerCallback):
    """Ends a training as soon as its trainer has counted at least as many env steps and generated tokens as `cost`."""

    trainer: RolloutTrainer
    cost: TrainingCost

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        cost, trainer = self.cost, self.trainer
        has_spent = trainer.env_step >= cost.env_steps and trainer.generated_tokens >= cost.generated_tokens
        if has_spent and state.global_step % args.num_iterations == 0:  # all steps of a batch of trees are taken
            state.max_steps = state.global_step
            control.should_training_stop = True


def read_cost(run_folder: Path) -> TrainingCost:
    """Reads the cost of a run. Raises `ConfigError` if the folder has no record of it."""
    with config_errors("The control needs the cost of a complete run of an online algorithm: ", (OSError, ValueError)):
        numbers = read_json(run_folder / COST_FILE)
        return TrainingCost(numbers["env_steps"], numbers["generated_tokens"])


@dataclass(frozen=True)
class Control:
    """The control of one run."""

    run_config: str  # file with the settings of the run
    cost: TrainingCost  # of the run
    folder: Path  # of the control
    num_agents: int  # of the team
    settings: Settings  # of the control's training, without the number of its optimizer steps
    stage: Stage  # the training, which depends on the control's kind, its model and the cost of the run

    @property
    def is_trained(self) -> bool:
        return self.stage.has(CONTROL_FILE)

    def read_run(self) -> tuple[PreparedRun, Environment, Dataset]:
        """
        Checks the settings and the items of the control's training, without loading a model. A wrong setting ends the
        program.
        """
        run = prepare_training(self.settings)
        environment = run.make_environment()
        check_team(run, environment.roles)
        train_dataset, _ = run.load_datasets()
        return run, environment, train_dataset

    def train(self) -> None:
        """Trains the control and saves it in its folder."""
        run, environment, train_dataset = self.read_run()
        args = run.training_args
        with run.reservation:
            check_run(run, environment, train_dataset)
            answers = args.rows_per_item * run.items_per_step  # of one batch of trees, in all processes
            args.max_steps = math.ceil(self.cost.env_steps / answers) * args.num_iterations
            if args.lr_scheduler_type == SchedulerType.CONSTANT:
                args.max_steps *= MOST_STEPS
            run.merged[run.algorithm]["max_steps"] = args.max_steps
            if self.stage.state.is_main_process:
                self.stage.begin()
                print(
                    f"Training the control of {self.run_config} until it has cost {self.cost}, for {args.max_steps} "
                    "steps at most.",
                    flush=True,
                )
            train(run, environment, train_dataset, None, partial(StopWhenSpent, cost=self.cost))
        self.stage.save_result(CONTROL_FILE, self.stage.settings)


def make_controls(evaluation: Evaluation, kind: str, task: Task | None) -> dict[str, Control]:
    """
    Makes the controls of the teams that the settings ask for, by the names of the teams. Raises `ConfigError` if one
    is impossible.
    """
    settings, base = evaluation.settings, evaluation.base
    if settings.is_centralized or settings.num_agents == 1:
        raise ConfigError("`evaluation.control` is for teams, but this run has one agent: leave it out.")
    model = evaluation.config.control_model or (base[-1] if isinstance(base, list) and base else base)
    if not isinstance(model, str):
        raise ConfigError("The model that the control starts from is not known: give `--control_model`.")
    check_models("control_model", model, settings.task.models)
    controls = {}
    for team in evaluation.teams:
        if team.run_config is None:
            raise ConfigError(f"The control of {team.location} needs the folder of a run, with its config.yaml.")
        cost = read_cost(Path(team.run_config).parent)
        folder = evaluation.output_dir / "controls" / team.name
        decisive = {"control": kind, "control_model": model, **cost._asdict()}
        stage = Stage(folder, "control", decisive, start_processes(), advice="choose another `evaluation.output_dir`")
        if stage.has(CONTROL_FILE):
            stage.check()
        algorithm = algorithm_of(read_yaml(team.run_config))
        if algorithm is None or ALGORITHMS[algorithm].run != ROLLOUTS:
            raise ConfigError(
                "The control needs a run of an algorithm that learns from rollouts; "
                f"{team.run_config} has {algorithm or 'none'}."
            )
        num_agents = len(team.roles or ()) or settings.num_agents
        written = safe_settings(algorithm, task, team.run_config, evaluation.arguments)
        section = written.get(algorithm, {})
        length = section.get("max_completion_length", algorithm_keys(algorithm)["max_completion_length"].default)
        changes = {
            **({"num_agents": 1} if kind == "single_agent" else {"collaboration_mode": "centralized"}),
            "early_termination_threshold": None,  # the reward of one agent may have another maximum
            "max_completion_length": num_agents * length,
            "output_dir": str(folder),
            "resume_from_checkpoint": AUTO,
            "report_to": "none",
            "push_to_hub": False,
        }
        changes |= {
            name: None
            for name in ("frozen_agents", "agent_learning_rates", "critic_models", "stop_strings")
            if name in section
        }
        own = {
            algorithm: changes,
            "agents": None,
            "agent_model": {"name": model, "adapter_roles": None},
            "output": {"save_path": None, "save_final_model": True},
        }
        own_settings = settings_of(algorithm, task, [written, own], settings.prog, evaluation.arguments.config)
        controls[team.name] = Control(team.run_config, cost, folder, num_agents, own_settings, stage)
    return controls


def cost_note(controls: Mapping[str, Control]) -> str:
    """Describes the cost of the trainings of the teams and of their controls."""
    answers, tokens = map(sum, zip(*(control.cost for control in controls.values()), strict=True))
    own_answers, own_tokens = map(sum, zip(*(read_cost(x.folder) for x in controls.values()), strict=True))
    return (
        f"Trainings of team and control: {answers:,} and {own_answers:,} scored answers, {tokens:,} and "
        f"{own_tokens:,} generated tokens. The reward of one agent may have another maximum: compare what passes."
    )
