"""
Runs `trl-multiagent evaluate` and `cross-play`: makes the environment, the items and the policies, plays them, and
reports.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from datasets import Dataset

from trl_multiagent.console import hide_progress_bars, printable
from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.task import Task, TaskSettings
from trl_multiagent.evaluation.play import play_policy
from trl_multiagent.evaluation.players import CUT, SHUFFLED, LoadedTeam, MessageAblation, MixedTeam, Policy
from trl_multiagent.evaluation.statistics import compute_result
from trl_multiagent.folders import locked
from trl_multiagent.jobs.distributed import fail_together, start_processes
from trl_multiagent.jobs.fingerprint import checksum_of_weights, describe_agent
from trl_multiagent.jobs.signals import end_on_signal
from trl_multiagent.jobs.stage import chunks_of
from trl_multiagent.report.evaluation import Mix, Report, mixes
from trl_multiagent.rollout.sampler import check_stop_strings
from trl_multiagent.runs.evaluation_settings import Evaluation, TeamSource, parse_evaluation
from trl_multiagent.runs.matched_baseline import Control, cost_note, make_controls
from trl_multiagent.runs.models import Run, make_loader, seated
from trl_multiagent.runs.plan import print_plan
from trl_multiagent.runs.prepared import check_folder
from trl_multiagent.runs.run import end_on_wrong_input, end_with_one_line
from trl_multiagent.settings.derive import check_models, task_settings
from trl_multiagent.settings.read import ConfigError, config_errors


# What an ablation puts in place of an agent, with short names
NOTHING, UNTRAINED, OTHER_TEAM = "nothing", "the untrained agent", "another team's agent"
SHORT_NAMES = {NOTHING: "silent", UNTRAINED: "untrained", OTHER_TEAM: "other"}


def run_evaluation(
    task: Task | Mapping[str, str],
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
        config = evaluation.config
        if config.disable_tqdm:
            hide_progress_bars()
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
        state = start_processes()
    with end_on_signal(prog, list), end_with_one_line(prog), contextlib.ExitStack() as stack:
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
    logging.basicConfig(format="%(message)s")
    config, prog = evaluation.config, evaluation.settings.prog
    accelerator = Accelerator()
    if accelerator.is_main_process:
        for note in evaluation.notes:
            print(f"{prog}: note: {note}", file=sys.stderr)
    results = {}
    for policy in policies:
        with end_on_wrong_input(prog):
            records = play_policy(policy, items, config, accelerator)
        if accelerator.is_main_process:
            results[policy.name] = compute_result(policy, records, len(items), config)
    if accelerator.is_main_process:
        environment = policies[0].environment
        dataset = dataclasses.asdict(evaluation.settings.sections["dataset"])
        facts = {"dataset": json.loads(json.dumps(dataset, default=str)), "environment": repr(environment)}
        report = Report(config, list(results.values()), len(items), facts, cost_note(controls) if controls else "")
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
    lines: dict[str, Any] = {
        "items": f"{len(items)}, with {config.num_episodes} episodes of {num_turns} turns each",
        "temperature": config.temperature,
        "pass@k": ", ".join(map(str, config.pass_at)),
        "folder": config.output_dir,
    }
    for name, control in controls.items():
        state = "is there already" if control.is_trained else "is trained at the cost of the run"
        cost = f"{control.cost.env_steps} scored answers and {control.cost.generated_tokens} generated tokens"
        lines[f"{name}_control, training"] = f"{state}: {cost}, in {control.folder}"
    for policy in policies:
        calls = episodes * num_turns * len(policy.environment.roles)
        lines[policy.name] = f"{calls} completions, {calls * policy.max_completion_length} tokens at most"
        plan = policy.environment.plan([*items], episodes * (num_turns - 1), policy.max_completion_length)
        lines |= {f"{policy.name}: {name}": text for name, text in plan.items()}
    print_plan(lines)


# Policies


def settings_for_task(evaluation: Evaluation, **changes: Any) -> TaskSettings:
    return dataclasses.replace(task_settings(evaluation.settings, evaluation.output_dir), **changes)


def make_environment(evaluation: Evaluation) -> Environment:
    """
    Makes the task's environment. Raises `ConfigError` if a team has other roles, or it cannot play so many turns.
    """
    environment = evaluation.settings.task.environment(settings_for_task(evaluation))
    run = Run(Path(evaluation.teams[0].location), evaluation.base)
    arguments = {**evaluation.settings.arguments, "seed": evaluation.config.seed}  # not the seed of the training
    settings = dataclasses.replace(evaluation.settings, arguments=arguments)
    environment = seated(settings, environment, evaluation.output_dir, run)
    for team in evaluation.teams:
        if team.roles is not None and team.roles != tuple(environment.roles):
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
    if evaluation.arguments.dataset is not None and evaluation.arguments.split is None:
        items = train
    if not items:
        raise ConfigError(
            "There are no items to evaluate on: set `dataset.eval_split` or --split, such as --split 'test[:50]', "
            "or give --dataset, all of whose rows are played."
        )
    items = items.select(range(min(len(items), evaluation.settings.sections["dataset"].eval_size or len(items))))
    smallest = min(map(len, chunks_of(len(items), evaluation.config.items_per_batch)))
    if evaluation.config.ablate and smallest == 1:
        raise ConfigError(
            "`evaluation.ablate` exchanges messages between the items of a batch, but one batch has a single item: "
            "choose another `evaluation.items_per_batch`."
        )
    return items


def load_team(evaluation: Evaluation, names: str | list[str], roles: Sequence[str]) -> LoadedTeam:
    """Loads a team on the device of this process, see [`~team.load.load_player`]."""
    team = make_loader(evaluation.settings).load_player(names, roles)
    own, given = team.chat_template_kwargs, evaluation.config.chat_template_kwargs or {}
    team.chat_template_kwargs = {role: own[role] | given for role in team.roles}
    models = {id(model): model for model in team.policies.values()}
    checksums = {key: checksum_of_weights(model.parameters()) for key, model in models.items()}
    description = {
        f"agent {role}": f"{describe_agent(team.agents[role])}, weights {checksums[id(team.policies[role])]}, "
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
    load = functools.partial(load_team, evaluation, models, environment.roles)
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
        is_pipeline = name == "pipeline"
        policies.append(make_policy(evaluation, name, "baseline", own, names, limit, is_pipeline=is_pipeline))
    return policies


def control_policies(evaluation: Evaluation, controls: Mapping[str, Control]) -> list[Policy]:
    """Makes the policies of the trained controls, one per team."""
    if evaluation.config.control == "single_agent":
        environment = make_single_environment(evaluation, "control")
    else:
        environment = evaluation.settings.task.environment(settings_for_task(evaluation, is_centralized=True))
    policies = []
    for team, control in controls.items():
        name, folder = f"{team}_control", str(control.folder)
        length = control.num_agents * evaluation.max_completion_length
        compared = {"compared_with": team, "row": str(evaluation.config.control)}
        policies.append(make_policy(evaluation, name, "control", environment, folder, length, **compared))
    return policies


def ablated_policies(evaluation: Evaluation, environment: Environment) -> list[Policy]:
    """Makes the teams with one agent replaced: by nothing, by the untrained agent, and by the next team's agent."""
    teams, roles, base = evaluation.teams, environment.roles, baseline_model(evaluation)
    loaded = functools.cache(lambda location: load_team(evaluation, location, roles))
    untrained = functools.cache(lambda: load_team(evaluation, base, roles))

    def load(own: TeamSource, role: str, by: str, other_team: TeamSource) -> LoadedTeam:
        parts = {name: loaded(own.location) for name in roles}
        if by != NOTHING:  # otherwise the generator silences the team's own agent
            parts[role] = untrained() if by == UNTRAINED else loaded(other_team.location)
        return mix(parts)

    return [
        Policy(
            f"{team.name}_{role}_{SHORT_NAMES[by]}",
            "ablation",
            environment,
            functools.partial(load, team, role, by, teams[(k + 1) % len(teams)]),
            evaluation.max_completion_length,
            team.location,
            compared_with=team.name,
            row=f"{role} replaced by {by}",
            is_shown=False,
            silent_role=role if by == NOTHING else None,
        )
        for k, team in enumerate(teams)
        for role in roles
        for by in ((NOTHING, UNTRAINED, OTHER_TEAM) if len(teams) > 1 else (NOTHING, UNTRAINED))
    ]


def message_policies(evaluation: Evaluation, environment: Environment) -> list[Policy]:
    """
    Makes the teams whose agents do not read each other's answers. Raises `ConfigError` if the task has no messages.
    """
    if len(environment.roles) == 1 or evaluation.config.num_turns == 1:
        raise ConfigError("`evaluation.ablate: messages` is for several agents and turns: leave it out.")
    if evaluation.settings.seats:  # a seated environment keeps the messages of an episode itself
        raise ConfigError("`evaluation.ablate: messages` does not go with `seats`: leave one of them out.")
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


def mix(parts: Mapping[str, LoadedTeam]) -> LoadedTeam:
    """
    Makes a team of agents that come from several teams. `parts`: the team of each role's agent, in the order of the
    roles.
    """
    description = {f"agent {role}": part.description[f"agent {role}"] for role, part in parts.items()}
    return LoadedTeam(MixedTeam({role: part.team for role, part in parts.items()}), description)


def mixed_policies(evaluation: Evaluation, environment: Environment) -> list[Policy]:
    """Makes the teams of a cross-play. Every agent is loaded once."""
    teams, roles = evaluation.teams, environment.roles
    loaded = functools.cache(lambda run: load_team(evaluation, teams[run].location, roles))

    def load(runs: Mix) -> LoadedTeam:
        return mix({role: loaded(run) for role, run in zip(roles, runs, strict=True)})

    policies = []
    for runs in mixes(len(teams), roles):
        trained_together = len(set(runs)) == 1
        name = teams[runs[0]].name if trained_together else "mix_" + "_".join(map(str, runs))
        source = " + ".join(teams[run].location for run in dict.fromkeys(runs))
        kind, length = "team" if trained_together else "pair", evaluation.max_completion_length
        policies.append(Policy(name, kind, environment, functools.partial(load, runs), length, source, mix=runs))
    return policies
