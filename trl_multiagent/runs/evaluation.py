"""
Runs `trl-multiagent evaluate` and `cross-play`: reads the settings, plays the teams, and reports. What imports torch
is imported after the command line is read, so that help is quick.
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

from trl_multiagent.console import hide_progress_bars, printable
from trl_multiagent.environments.task import Task
from trl_multiagent.jobs.signals import end_on_signal
from trl_multiagent.runs.evaluation_settings import Evaluation, parse_evaluation
from trl_multiagent.runs.run import end_on_wrong_input, end_with_one_line


if TYPE_CHECKING:
    from datasets import Dataset

    from trl_multiagent.evaluation.players import Policy
    from trl_multiagent.runs.matched_baseline import Control


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
        from trl_multiagent.folders import locked
        from trl_multiagent.jobs.distributed import fail_together, start_processes
        from trl_multiagent.runs.policies import load_items, make_environment, make_policies, mixed_policies
        from trl_multiagent.runs.prepared import check_folder

        check_folder("`evaluation.output_dir`", evaluation.output_dir)
        environment = make_environment(evaluation)
        controls = {}
        if config.control is not None:
            from trl_multiagent.runs.matched_baseline import make_controls

            controls = make_controls(evaluation, config.control, task)
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
            policy.environment.prepare(policy.num_turns(config))
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
    from accelerate import Accelerator

    from trl_multiagent.evaluation.play import play_policy
    from trl_multiagent.evaluation.statistics import compute_result
    from trl_multiagent.report.evaluation import Report

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
        note = ""
        if controls:
            from trl_multiagent.runs.matched_baseline import cost_note

            note = cost_note(controls)
        report = Report(config, list(results.values()), len(items), facts, note)
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
    from trl_multiagent.evaluation.play import transcripts_folder
    from trl_multiagent.runs.plan import print_plan

    config = evaluation.config
    episodes = len(items) * config.num_episodes
    lines: dict[str, Any] = {
        "items": f"{len(items)}, with {config.num_episodes} episodes of {config.num_turns} turns each",
        "temperature": config.temperature,
        "pass@k": ", ".join(map(str, config.pass_at)),
        "folder": config.output_dir,
    }
    for name, control in controls.items():
        state = "is there already" if control.is_trained else "is trained at the cost of the run"
        cost = f"{control.cost.env_steps} scored answers and {control.cost.generated_tokens} generated tokens"
        lines[f"{name}_control, training"] = f"{state}: {cost}, in {control.folder}"
    for policy in policies:
        calls = episodes * policy.num_turns(config) * len(policy.environment.roles)
        transcripts = transcripts_folder(config, policy).glob("*.jsonl")
        done = sum(path.read_bytes().count(b"\n") for path in transcripts)
        already = f"; {done} episodes are there already, if the settings have not changed" if done else ""
        lines[policy.name] = f"{calls} completions, {calls * policy.max_completion_length} tokens at most{already}"
        later = episodes * (policy.num_turns(config) - 1)
        plan = policy.environment.plan([*items], later, policy.max_completion_length)
        lines |= {f"{policy.name}: {name}": text for name, text in plan.items()}
    print_plan(lines)
