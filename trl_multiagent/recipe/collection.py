"""The function behind `trl-multiagent collect`: it reads and checks the settings, then plans or collects preferences."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_multiagent.environments.task import Task
from trl_multiagent.jobs.stopping import end_on_signal
from trl_multiagent.quiet import hide_progress_bars
from trl_multiagent.recipe.run import end_on_wrong_input, end_with_one_line, read_settings
from trl_multiagent.recipe.tasks import make_environment, task_settings
from trl_multiagent.settings.derive import Settings, check_names
from trl_multiagent.settings.read import ConfigError


if TYPE_CHECKING:
    from datasets import Dataset

    from trl_multiagent.environments.base import Environment
    from trl_multiagent.preferences.config import PreferenceConfig


SECTION = "madpo"
FOLDER = "preferences"  # in the folder of the run, unless `preference_dataset` names another one
CHARACTERS_PER_TOKEN = 3  # about; for the plan, which loads no tokenizer


@dataclasses.dataclass
class Collection:
    """
    The checked settings of a collection.

    Args:
        settings ([`~trl_multiagent.settings.derive.Settings`]): All settings.
        config ([`~trl_multiagent.preferences.PreferenceConfig`]): Those of the collection.
        dry_run (`bool`): Whether to print the plan and stop.
        prog (`str`): Name of the program in messages.
    """

    settings: Settings
    config: PreferenceConfig
    dry_run: bool
    prog: str

    @property
    def task(self) -> Task:
        return self.settings.task

    def make_environment(self) -> Environment:
        """Makes the environment, see [`~trl_multiagent.recipe.tasks.make_environment`]."""
        return make_environment(self.settings, Path(self.config.output_dir))

    def load_items(self) -> Dataset:
        """Loads the items to collect preferences for: the task's training set, or its first `dataset.size` rows."""
        from trl_multiagent.recipe.recipe import first_rows

        dataset, _ = self.task.load_datasets(task_settings(self.settings, Path(self.config.output_dir)))
        return first_rows(dataset, self.settings.sections["dataset"].size)


def run_collection(task: Task | Mapping[str, str], argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """
    Collects preferences for a task, or prints what that will cost if `--dry_run` is given. Wrong settings end the program.

    A collection that was interrupted is continued if the program is started again with the same settings.

    Args:
        task ([`~trl_multiagent.environments.task.Task`] or `Mapping[str, str]`):
            What the preferences are about; or, if the user chooses that, the tasks that have a name, see
            [`~trl_multiagent.recipe.tasks.choose_task`].
        argv (`list[str]`, *optional*): Arguments; by default those of the command line.
        prog (`str`, *optional*): Name of the program in messages; by default that of the script.
    """
    prog = prog or Path(sys.argv[0]).name
    with end_on_wrong_input(prog):
        collection = parse_collection(task, argv, prog)
        environment = collection.make_environment()
        from trl_multiagent.recipe.folders import check_folder
        from trl_multiagent.recipe.plan import print_plan  # takes as long as TRL, like the one before

        check_folder("`preference_dataset`", Path(collection.config.output_dir))
        if collection.dry_run:
            return print_plan(plan_of(collection, environment))
        items = collection.load_items()
        check_comparator(collection.config)

        from trl_multiagent.jobs.processes import start_processes
        from trl_multiagent.preferences.collection import collect_preferences
        from trl_multiagent.recipe.models import make_loader, make_peft_config
        from trl_multiagent.team.load import build

        state = start_processes()
    logging.basicConfig(format="%(message)s")
    if collection.config.disable_tqdm:
        hide_progress_bars()
    if state.is_main_process:
        for note in collection.settings.notes:
            print(f"{prog}: note: {note}", file=sys.stderr)
    with end_on_signal(prog, list), end_with_one_line(prog), end_on_wrong_input(prog):
        loader = make_loader(collection.settings, make_peft_config(collection.settings))
        team = loader.load_to_sample(environment.roles, collection.config.seed)
        comparator = build(collection.config.comparator_model_name, collection.task.models)
        config = dataclasses.replace(collection.config, comparator_model_name=comparator)
        preferences = collect_preferences(team, environment, items, config)
    if state.is_main_process:
        print(f"Saved {len(preferences)} preferences in {collection.config.output_dir}", flush=True)
    state.wait_for_everyone()
    state.destroy_process_group()


def parse_collection(task: Task | Mapping[str, str], argv: Sequence[str] | None, prog: str) -> Collection:
    """
    Reads and checks the settings of a collection, without loading a model or data.

    Args:
        task ([`~trl_multiagent.environments.task.Task`] or `Mapping[str, str]`):
            What the preferences are about; or, if the user chooses that, the tasks that have a name, see
            [`~trl_multiagent.recipe.tasks.choose_task`].
        argv (`list[str]` or `None`): Arguments; by default those of the command line.
        prog (`str`): Name of the program in the help.

    Raises:
        ConfigError: a setting is wrong.
    """
    settings, dry_run = read_settings(SECTION, task, argv, prog)
    return Collection(settings, make_config(settings), dry_run, prog)


def make_config(settings: Settings, **changes: Any) -> PreferenceConfig:
    """
    The settings of the collection. Those of the trainer are left out.

    Args:
        settings ([`~trl_multiagent.settings.derive.Settings`]): All settings.
        **changes: Values that replace those of the settings.

    Raises:
        ConfigError: they contradict each other.
    """
    from trl_multiagent.preferences.config import PreferenceConfig

    given = settings.arguments
    mode = given.get("comparator_generation_mode", "decentralized")
    if settings.is_centralized and mode == "sequential":
        raise ConfigError(
            f"`{settings.algorithm}.comparator_generation_mode: sequential` answers role by role, but with "
            "`collaboration_mode: centralized` there is one answer for all roles. Remove it."
        )
    # The only agent gets the assignments of all roles anyway
    mode_of_one = {"comparator_generation_mode": "decentralized"} if settings.is_centralized else {}
    for setting in ("comparator_model_name", "comparator_agents"):
        models = given.get(setting) or []
        own = [name for name in ([models] if isinstance(models, str) else models) if name not in settings.task.models]
        check_names(own, None, f"{settings.algorithm}.{setting}")
    folder = given.get("preference_dataset") or str(
        Path(given.get("output_dir") or settings.sections["output"].base_dir) / FOLDER
    )
    return settings.part(PreferenceConfig, **{"output_dir": folder, **mode_of_one, **changes})


def check_comparator(config: PreferenceConfig) -> None:
    """
    Checks, before anything is loaded, that the endpoint of a comparator can be used. Sends nothing.

    Raises:
        ConfigError: a package or the key is missing.
    """
    problem = config.comparator_endpoint(1).problem() if config.comparator_policy == "api" else None
    if problem is not None:
        raise ConfigError(f"`comparator_policy: api` cannot use the endpoint: {problem}.")


def plan_of(collection: Collection, environment: Environment) -> dict[str, Any]:
    """
    What a collection will cost, as lines of a plan, found without loading a model.

    Args:
        collection ([`Collection`]): The settings.
        environment ([`~trl_multiagent.environments.Environment`]): The task's environment.
    """
    from trl_multiagent.recipe.plan import agents

    settings = collection.settings
    lines = {"section": settings.algorithm, "agents": agents(settings.model_names, environment.roles)}
    return {**lines, **cost(collection.config, environment, collection.load_items)}


def cost(config: PreferenceConfig, environment: Environment, load_items: Callable[[], Dataset]) -> dict[str, Any]:
    """
    What a collection will cost, as lines of a plan.

    Args:
        config ([`~trl_multiagent.preferences.PreferenceConfig`]): Its settings.
        environment ([`~trl_multiagent.environments.Environment`]): The task's environment.
        load_items (`Callable`): Loads the items. If it raises a `ConnectionError`, their number is unknown.
    """
    from trl_multiagent.environments.base import ask
    from trl_multiagent.jobs.stage import chunks_of
    from trl_multiagent.preferences.collection import finished_chunks
    from trl_multiagent.recipe.plan import count

    roles = environment.roles
    lines: dict[str, Any] = {}
    if config.comparator_policy is not None:
        lines["comparator"] = (
            f"{config.comparator_policy}, {count(config.num_comparator_candidates, 'candidate')} per item"
        )
    lines["candidates"] = f"{config.candidates_per_item} per item, each of {count(len(roles), 'completion')}"
    limit = (
        "all pairs" if config.preference_pairs_per_sample is None else f"{config.preference_pairs_per_sample} at most"
    )
    lines["pairs"] = f"{limit} per item, {config.pair_selection}"
    try:
        items = load_items()
    except ConnectionError as error:
        lines["items"] = f"unknown, because the dataset could not be reached. {error}"
    else:
        chunks = chunks_of(len(items), config.items_per_chunk)
        rows = [items[k] for k in range(len(items))]
        prompts = ask(environment, rows, [()] * len(rows))
        candidates = len(items) * config.candidates_per_item
        lines["items"] = f"{len(items)}, in {count(len(chunks), 'chunk')}"
        lines["to score"] = (
            f"{candidates} joint answers, in {len(chunks) * (1 + bool(config.comparator_policy))} calls"
        )
        lines["generate calls"] = f"about {generate_calls(config, chunks, prompts, roles)}"
        lines["tokens"] = f"{candidates * len(roles) * config.max_completion_length} sampled at most"
        if config.comparator_policy == "api":
            lines["endpoint"] = endpoint_cost(config, prompts, roles)
        done = finished_chunks(Path(config.output_dir), len(chunks))
        if done:
            lines["done already"] = f"{done} of {count(len(chunks), 'chunk')}, if the settings have not changed"
    lines["folder"] = config.output_dir
    return lines


def endpoint_cost(config: PreferenceConfig, prompts: list[dict[str, Any]], roles: Sequence[str]) -> str:
    """The largest number of requests to the endpoint of a comparator, and their cost, in words."""
    endpoint, mode = config.comparator_endpoint(len(roles)), config.comparator_generation_mode
    length = sum(len(str(prompt)) for of_item in prompts for prompt in of_item.values()) // CHARACTERS_PER_TOKEN
    number = config.num_comparator_candidates
    requests = len(prompts) * number * (1 if mode == "centralized" else len(roles))
    asked = length * number * (len(roles) if mode == "sequential" else 1)  # every request has all assignments
    answered = requests * endpoint.max_tokens
    price = f", cost {endpoint.cost(asked, answered):.2f}" if endpoint.has_price else ""
    budget = "" if endpoint.token_budget is None else f", token budget {endpoint.token_budget}"
    problem = endpoint.problem()
    return (
        f"{requests} requests with about {asked} prompt tokens and {answered} answer tokens at most{price}{budget}, at "
        f"{endpoint.base_url}{f' ({problem})' if problem else ''}"
    )


def generate_calls(
    config: PreferenceConfig, chunks: list[range], prompts: list[dict[str, Any]], roles: Sequence[str]
) -> int:
    """Estimates the number of `generate` calls from the lengths of the prompts, for a team and a comparator of equal size."""
    from trl_multiagent.models.generation import plan_calls

    calls = 0
    others = 0 if config.comparator_policy == "api" else config.num_comparator_candidates
    for number in (config.preference_num_candidates, others):
        for chunk in chunks if number else ():
            for role in roles:
                lengths = [len(str(prompts[k][role])) // CHARACTERS_PER_TOKEN for k in chunk]
                ids = [[0] * length for length in lengths]
                calls += len(plan_calls(ids, number, config.max_completion_length, config.generation_token_budget))
    return calls
