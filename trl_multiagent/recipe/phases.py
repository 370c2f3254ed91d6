"""
The functions behind the recipes in phases: `madpo` and `marlhf`, and their iterative forms.

They are not in the modules of the phases, because these import torch, datasets and TRL: `--help` and wrong settings are answered before
that.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trl_multiagent.environments.task import Task
from trl_multiagent.recipe.arguments import make_training_args
from trl_multiagent.recipe.run import end_on_wrong_input, read_settings


def run_preferences(
    algorithm: str, task: Task | Mapping[str, str], argv: Sequence[str] | None = None, prog: str | None = None
) -> None:
    """
    Collects preferences and trains a team on them, or prints the plan of the run if `--dry_run` is given. Wrong settings end the
    program.

    Args:
        algorithm (`str`): `"madpo"` for one round, `"madpo_iter"` for several.
        task ([`~trl_multiagent.environments.task.Task`] or `Mapping[str, str]`):
            What to train on; or, if the user chooses that, the tasks that have a name, see
            [`~trl_multiagent.recipe.tasks.choose_task`].
        argv (`list[str]`, *optional*): Arguments; by default those of the command line.
        prog (`str`, *optional*): Name of the program in messages; by default that of the script.
    """
    prog = prog or Path(sys.argv[0]).name
    with end_on_wrong_input(prog):
        settings, dry_run = read_settings(algorithm, task, argv, prog)
        training_args = make_training_args(settings)
        from trl_multiagent.recipe.preference_recipe import PreferenceRecipe, preference_fields, print_plan
        from trl_multiagent.recipe.preference_run import PreferenceRun, run_phases

        recipe = PreferenceRecipe(**preference_fields(settings, training_args, dry_run))
    recipe.prog = prog
    run_phases(recipe, PreferenceRun, print_plan)


def run_marlhf(
    algorithm: str, task: Task | Mapping[str, str], argv: Sequence[str] | None = None, prog: str | None = None
) -> None:
    """
    Runs MARLHF on a task, or prints the plan if `--dry_run` is given. Wrong settings end the program.

    If it is started again with the same folder, it skips complete phases and continues the interrupted one.

    Args:
        algorithm (`str`): `"marlhf"`, or `"marlhf_iter"` for several rounds.
        task ([`~trl_multiagent.environments.task.Task`] or `Mapping[str, str]`):
            What to train on; or, if the user chooses that, the tasks that have a name, see
            [`~trl_multiagent.recipe.tasks.choose_task`].
        argv (`list[str]`, *optional*): Arguments; by default those of the command line.
        prog (`str`, *optional*): Name of the program in messages; by default that of the script.
    """
    prog = prog or Path(sys.argv[0]).name
    with end_on_wrong_input(prog):
        settings, dry_run = read_settings(algorithm, task, argv, prog)
        from trl_multiagent.recipe.marlhf import RewardRun, make_recipe, print_phases
        from trl_multiagent.recipe.preference_run import run_phases

        recipe = make_recipe(settings, dry_run)
    recipe.prog = prog
    run_phases(recipe, RewardRun, print_phases)
