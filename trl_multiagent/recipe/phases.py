"""
The function behind the recipes in phases: `madpo` and `marlhf`, and their iterative forms.

It is not in the modules of the phases, because these import torch, datasets and TRL: `--help` and wrong settings are answered before
that.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trl_multiagent.environments.task import Task
from trl_multiagent.recipe.algorithms import PREFERENCE_ALGORITHMS
from trl_multiagent.recipe.run import end_on_wrong_input, read_settings


def run_preferences(
    algorithm: str, task: Task | Mapping[str, str], argv: Sequence[str] | None = None, prog: str | None = None
) -> None:
    """
    Collects preferences and trains a team on them, or prints the plan of the run if `--dry_run` is given. MARLHF trains a reward model
    in between. Wrong settings end the program.

    If it is started again with the same folder, it skips complete phases and continues the interrupted one.

    Args:
        algorithm (`str`): `"madpo"` or `"marlhf"` for one round, `"madpo_iter"` or `"marlhf_iter"` for several.
        task ([`~trl_multiagent.environments.task.Task`] or `Mapping[str, str]`):
            What to train on; or, if the user chooses that, the tasks that have a name, see
            [`~trl_multiagent.recipe.tasks.choose_task`].
        argv (`list[str]`, *optional*): Arguments; by default those of the command line.
        prog (`str`, *optional*): Name of the program in messages; by default that of the script.
    """
    prog = prog or Path(sys.argv[0]).name
    with end_on_wrong_input(prog):
        settings, dry_run = read_settings(algorithm, task, argv, prog)
        from trl_multiagent.recipe.preference_run import PreferenceRun, run_phases

        run_class: type[PreferenceRun]
        if algorithm in PREFERENCE_ALGORITHMS:
            from trl_multiagent.recipe.preference_recipe import make_recipe

            recipe, run_class = make_recipe(settings, dry_run), PreferenceRun
        else:
            from trl_multiagent.recipe.marlhf import RewardRun, make_reward_recipe

            recipe, run_class = make_reward_recipe(settings, dry_run), RewardRun
    recipe.prog = prog
    run_phases(recipe, run_class)


run_marlhf = run_preferences  # the algorithm decides about the phases
