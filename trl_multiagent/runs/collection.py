"""
The function behind `trl-multiagent collect`: it reads and checks the settings, then plans or collects preferences.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.frames import shows_task
from trl_multiagent.environments.task import Task
from trl_multiagent.jobs.signals import end_on_signal
from trl_multiagent.runs.run import end_on_wrong_input, end_with_one_line, read_settings
from trl_multiagent.settings.derive import Settings, check_models
from trl_multiagent.settings.read import ConfigError


if TYPE_CHECKING:
    from datasets import Dataset

    from trl_multiagent.preferences.config import PreferenceConfig


SECTION = "madpo"
FOLDER = "preferences"  # in the folder of the run, unless `preference_dataset` names another one


@shows_task
def run_collection(task: Task | None, argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """
    Collects preferences, or prints their cost if `--dry_run` is given. An interrupted collection is resumed. For the
    arguments, see [`~trl_multiagent.runs.run.run_recipe`].
    """
    prog = prog or Path(sys.argv[0]).name
    with end_on_wrong_input(prog):
        settings = read_settings(SECTION, task, argv, prog)
        from trl_multiagent.jobs.distributed import start_processes
        from trl_multiagent.preferences.collection import collect_preferences
        from trl_multiagent.runs.models import make_environment, make_loader, make_peft_config
        from trl_multiagent.runs.plan import agents, print_plan  # imports TRL
        from trl_multiagent.runs.prepared import check_folder, first_rows, start_logging
        from trl_multiagent.team.load import build

        config = make_config(settings)
        folder = Path(config.output_dir)
        environment = make_environment(settings, folder)

        def load_items() -> Dataset:
            dataset, _ = settings.task.datasets(settings.for_task(folder))
            return first_rows(dataset, settings.dataset.size)

        check_folder("`preference_dataset`", folder)
        if settings.dry_run:
            names = agents(settings.model_names, environment.roles)
            return print_plan({"section": SECTION, "agents": names, **cost(config, environment, load_items)})
        items = load_items()
        check_comparator(config)
        state = start_processes()
    start_logging(settings, config.disable_tqdm)
    with end_on_signal(prog, []), end_with_one_line(prog), end_on_wrong_input(prog):
        team = make_loader(settings, make_peft_config(settings)).load_to_sample(environment.roles, config.seed)
        comparator = build(config.comparator_model_name, settings.builders)
        config = dataclasses.replace(config, comparator_model_name=comparator)
        preferences = collect_preferences(team, environment, items, config)
    if state.is_main_process:
        print(f"Saved {len(preferences)} preferences in {config.output_dir}", flush=True)
    state.wait_for_everyone()
    state.destroy_process_group()


def make_config(settings: Settings, **changes: Any) -> PreferenceConfig:
    """Returns the settings of the collection with `changes`. Raises `ConfigError` if they contradict each other."""
    from trl_multiagent.preferences.config import PreferenceConfig

    given = settings.arguments
    if settings.is_centralized:
        changes["comparator_generation_mode"] = "decentralized"  # the only agent gets the assignments of all roles
    for setting in ("comparator_model_name", "comparator_agents"):
        check_models(f"{settings.algorithm}.{setting}", given.get(setting) or [], settings.task.models)
    folder = Path(given.get("output_dir") or settings.output.base_dir) / FOLDER
    return settings.part(PreferenceConfig, **{"output_dir": given.get("preference_dataset") or str(folder), **changes})


def check_comparator(config: PreferenceConfig) -> None:
    """Raises `ConfigError` if the endpoint of a comparator lacks a package or a key. Sends nothing."""
    problem = config.comparator_endpoint(1).problem() if config.comparator_policy == "api" else None
    if problem:
        raise ConfigError(f"`comparator_policy: api` cannot use the endpoint: {problem}.")


def cost(config: PreferenceConfig, environment: Environment, load_items: Callable[[], Dataset]) -> dict[str, Any]:
    """
    Returns the cost of a collection, as lines of a plan. It is unknown if `load_items` raises a `ConnectionError`.
    """
    from trl_multiagent.runs.plan import count

    roles, policy = environment.roles, config.comparator_policy
    candidates = config.preference_num_candidates + config.num_comparator_candidates
    lines = {
        "comparator": f"{policy or 'none'}, {count(config.num_comparator_candidates, 'candidate')} per item",
        "candidates": f"{candidates} per item, each of {count(len(roles), 'completion')}",
        "pairs": f"{config.preference_pairs_per_sample or 'all'} at most per item, {config.pair_selection}",
        "folder": config.output_dir,
    }
    try:
        items = len(load_items())
    except ConnectionError as error:
        return lines | {"items": f"unknown, because the dataset could not be reached. {error}"}
    lines["items"] = f"{items}, in chunks of {config.items_per_chunk}"
    tokens = items * candidates * len(roles) * config.max_completion_length
    lines["to score"] = f"{items * candidates} joint answers, of {tokens} tokens at most"
    if policy == "api":
        texts = 1 if config.comparator_generation_mode == "centralized" else len(roles)
        requests = items * config.num_comparator_candidates * texts
        lines["endpoint"] = f"{count(requests, 'request')} to {config.comparator_api_model}"
    return lines
