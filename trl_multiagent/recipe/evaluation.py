"""
The function behind `trl-multiagent evaluate` and `trl-multiagent cross-play`: it prints what an evaluation will cost, or plays and
reports it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_multiagent.environments.task import Task
from trl_multiagent.jobs.stopping import end_on_signal
from trl_multiagent.quiet import hide_progress_bars
from trl_multiagent.recipe.evaluation_settings import Evaluation, parse_evaluation
from trl_multiagent.recipe.run import end_on_wrong_input, end_with_one_line
from trl_multiagent.settings.read import ConfigError


if TYPE_CHECKING:
    from datasets import Dataset

    from trl_multiagent.environments.base import Environment
    from trl_multiagent.evaluation.policies import Policy
    from trl_multiagent.evaluation.report import Comparison, Report


NOTHING_NOTE = (
    "Replaced by nothing, an agent answers with an empty text. Where no answer is right without its part, the loss is the whole pass rate by "
    "construction: it shows that the part is needed, not that the agent does it well."
)


def run_evaluation(
    task: Task | Mapping[str, str],
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    cross_play: bool = False,
) -> None:
    """
    Evaluates saved teams, or prints what that will cost if `--dry_run` is given. Wrong settings end the program.

    An evaluation that was interrupted is continued if the program is started again with the same settings.

    Args:
        task ([`~trl_multiagent.environments.task.Task`] or `Mapping[str, str]`):
            What the teams answer; or, if the user chooses that, the tasks that have a name, see
            [`~trl_multiagent.recipe.tasks.choose_task`].
        argv (`list[str]`, *optional*): Arguments; by default those of the command line.
        prog (`str`, *optional*): Name of the program in messages; by default that of the script.
        cross_play (`bool`, *optional*, defaults to `False`): Whether the agents of the teams play with each other.
    """
    prog = prog or Path(sys.argv[0]).name
    with end_on_wrong_input(prog):
        evaluation = parse_evaluation(task, argv, prog, cross_play)
        if evaluation.config.disable_tqdm:
            hide_progress_bars()
        from trl_multiagent.recipe.folders import check_folder  # takes as long as TRL

        check_folder("`evaluation.output_dir`", evaluation.output_dir)
        environment = evaluation.make_environment()
        mixed = evaluation.mixed_policies(environment) if cross_play else {}
        policies = list(mixed.values()) or evaluation.make_policies(environment)
        check_policy_names(policies)
        items = evaluation.load_items()
        for control in evaluation.controls.values():
            if not control.is_trained:
                control.read_run()  # what is wrong with it must not show after the training of another one
        if evaluation.dry_run:
            return print_cost(evaluation, policies, items)
        for policy in policies:
            policy.environment.prepare(policy.num_turns(evaluation.config))

        from trl_multiagent.folders import locked
        from trl_multiagent.jobs.processes import fail_together, start_processes

        state = start_processes()
    with end_on_signal(prog, list), end_with_one_line(prog), contextlib.ExitStack() as stack:
        with end_on_wrong_input(prog), fail_together(state):
            if state.is_main_process:
                stack.enter_context(locked(evaluation.output_dir, "choose another `evaluation.output_dir`"))
        train_controls(evaluation)
        play_and_report(evaluation, environment, mixed, policies, items)
    state.destroy_process_group()


def train_controls(evaluation: Evaluation) -> None:
    """Trains the controls that are not there yet. If one cannot be trained, the program ends."""
    with end_on_wrong_input(evaluation.prog):
        for control in evaluation.controls.values():
            if not control.is_trained:
                control.train(control.check())


def play_and_report(
    evaluation: Evaluation,
    environment: Environment,
    mixed: Mapping[tuple[int, ...], Policy],
    policies: Sequence[Policy],
    items: Dataset,
) -> None:
    """
    Plays all policies, writes and prints the report. If a policy cannot be loaded or played, the program ends.

    Args:
        evaluation ([`~recipe.evaluation_settings.Evaluation`]): The settings.
        environment ([`Environment`]): That of the teams.
        mixed (`Mapping[tuple[int, ...], Policy]`): The teams of a cross-play, or nothing.
        policies (`Sequence[Policy]`): What is played.
        items (`Dataset`): The items.
    """
    from accelerate import Accelerator

    from trl_multiagent.evaluation.play import play_policy
    from trl_multiagent.evaluation.results import compute_result

    logging.basicConfig(format="%(message)s")
    config = evaluation.config
    accelerator = Accelerator()
    prog = evaluation.prog
    if accelerator.is_main_process:
        for note in evaluation.notes:
            print(f"{prog}: note: {note}", file=sys.stderr)
    results = {}
    for policy in policies:
        with end_on_wrong_input(prog):
            records = play_policy(policy, items, config, accelerator)
        if accelerator.is_main_process:
            results[policy.name] = compute_result(
                policy.name,
                policy.kind,
                policy.source,
                records,
                len(items),
                config,
                policy.rounds,
                policy.environment.unwrapped.metric_ranges,
                policy.is_pipeline,
            )
    if accelerator.is_main_process:
        report = make_report(evaluation, environment, mixed, policies, results, len(items))
        with end_on_wrong_input(prog):  # such as a full disk
            paths = report.write(evaluation.output_dir)
        print(report.table())
        print(
            f"\nSaved {', '.join(map(str, paths))}, and the transcripts in {evaluation.output_dir / 'transcripts'}",
            flush=True,
        )
    accelerator.wait_for_everyone()


def check_policy_names(policies: Sequence[Policy]) -> None:
    """
    Refuses policies with the same name, which would share a folder of transcripts: a team may have the name of another one's control.

    Raises:
        ConfigError: a name occurs twice.
    """
    names = [policy.name for policy in policies]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"Two of the policies to evaluate are called {name!r}: rename the folder of this team.")


def make_report(
    evaluation: Evaluation,
    environment: Environment,
    mixed: Mapping[tuple[int, ...], Policy],
    policies: Sequence[Policy],
    results: Mapping[str, Any],
    num_items: int,
) -> Report:
    """Summarizes the results of all policies."""
    from trl_multiagent.evaluation.cross_play import summarize_cross_play
    from trl_multiagent.evaluation.report import Report

    cross_plays = []
    if mixed:
        of_mixes = {mix: results[policy.name] for mix, policy in mixed.items()}
        runs = [team.name for team in evaluation.teams]
        for metric in ("return", "pass@1"):
            summary = summarize_cross_play(of_mixes, runs, environment.roles, metric, evaluation.config)
            cross_plays += [] if summary is None else [summary]
    dataset = dataclasses.asdict(evaluation.settings.sections["dataset"])
    facts = {"dataset": json.loads(json.dumps(dataset, default=str)), "environment": repr(environment)}
    comparisons = make_comparisons(evaluation, policies, results)
    return Report(evaluation.config, list(results.values()), num_items, facts, cross_plays, comparisons)


def make_comparisons(
    evaluation: Evaluation, policies: Sequence[Policy], results: Mapping[str, Any]
) -> list[Comparison]:
    """The teams beside their controls, and beside themselves with agents replaced."""
    from trl_multiagent.evaluation.report import Comparison

    comparisons = []
    if evaluation.controls:
        pairs = [(results[x.compared_with], results[x.name]) for x in policies if x.kind == "control"]
        comparisons.append(
            Comparison(
                "control",
                "the team minus the trained control",
                {str(evaluation.config.control): pairs},
                cost_line(evaluation),
            )
        )
    rows: dict[str, list[tuple[Any, Any]]] = {}
    for policy in policies:
        if policy.replaced is not None:
            name = f"{policy.replaced.role} replaced by {policy.replaced.by}"
            rows.setdefault(name, []).append((results[policy.compared_with], results[policy.name]))
    if rows:
        comparisons.append(Comparison("contributions", "the team minus the team with", rows, NOTHING_NOTE))
    return comparisons


def cost_line(evaluation: Evaluation) -> str:
    """What the trainings of the teams and of their controls cost."""
    from trl_multiagent.recipe.control import read_cost

    costs = [(control.check(), read_cost(control.folder)) for control in evaluation.controls.values()]
    answers, tokens = (
        " and ".join(f"{sum(getattr(pair[k], name) for pair in costs):,}" for k in (0, 1))
        for name in ("env_steps", "generated_tokens")
    )
    return (
        f"Trainings of team and control: {answers} scored answers, {tokens} generated tokens. The reward of a single agent may have "
        "another maximum than that of a team, so compare what passes."
    )


def print_cost(evaluation: Evaluation, policies: Sequence[Policy], items: Dataset) -> None:
    """Prints what an evaluation will cost, without loading a model."""
    from trl_multiagent.evaluation.play import count_episodes, transcripts_folder
    from trl_multiagent.recipe.plan import print_plan

    config = evaluation.config
    assert config.num_turns is not None
    episodes = len(items) * config.num_episodes
    lines: dict[str, Any] = {
        "items": f"{len(items)}, with {config.num_episodes} episodes of {config.num_turns} turns each",
        "temperature": config.temperature,
        "pass@k": ", ".join(map(str, config.pass_at)),
        "folder": config.output_dir,
    }
    for name, control in evaluation.controls.items():
        cost = control.check()
        state = (
            "is there already"
            if control.is_trained
            else f"is trained at the cost of the run, {cost.env_steps} scored answers"
        )
        lines[f"{name}_control, training"] = (
            f"{state} and {cost.generated_tokens} generated tokens, in {control.folder}"
        )
    for policy in policies:
        calls = episodes * policy.num_turns(config) * len(policy.environment.roles)
        done = count_episodes(transcripts_folder(config, policy))
        already = f"; {done} episodes are there already, if the settings have not changed" if done else ""
        lines[policy.name] = f"{calls} completions, {calls * policy.max_completion_length} tokens at most{already}"
        later = episodes * (policy.num_turns(config) - 1)
        plan = policy.environment.plan([*items], later, policy.max_completion_length)
        lines |= {f"{policy.name}: {name}": text for name, text in plan.items()}
    print_plan(lines)
