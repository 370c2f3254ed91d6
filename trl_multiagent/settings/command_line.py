"""The command line of a recipe, and its help."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from trl_multiagent.environments.task import Task
from trl_multiagent.settings.algorithms import ACTOR_CRITICS, ALGORITHMS, COLLECTION
from trl_multiagent.settings.read import RECIPES, ConfigError, config_file, flag_layer, parse_overrides, read_yaml
from trl_multiagent.settings.schema import (
    TRL_FLAGS,
    AgentModel,
    TopLevel,
    algorithm_keys,
    extras_of,
    keys_of,
    sections_of,
)


# The settings of an algorithm that `--help` shows; `--help all` shows all of them
USUAL = {
    "learning_rate": "Learning rate of every agent.",
    "num_train_epochs": "Passes over the training items.",
    "max_steps": "Optimizer steps, instead of num_train_epochs.",
    "num_turns": "Turns of an episode, 1 by default; of a workflow, until it ends.",
    "num_generations": "Completions that each agent samples at a node.",
    "items_per_device": "Items, each with its whole tree, per device and optimizer step.",
    "max_completion_length": "Maximum number of tokens of a completion.",
    "temperature": "Sampling temperature, 1 by default.",
    "beta": "Coefficient of the KL penalty; of the loss, with preferences.",
    "output_dir": "Folder of the run.",
    "report_to": "Where metrics go: none, wandb, tensorboard, ...",
    "resume_from_checkpoint": "Checkpoint to resume from; true for the last one of the folder; auto: if there is one.",
}
OF_ROLLOUTS = ("num_turns", "num_generations", "items_per_device")
OF_COLLECTIONS = {
    "preference_num_candidates": "Joint answers that are sampled per item.",
    "preference_pairs_per_sample": "Maximum number of pairs of an item.",
    "pair_selection": "Which pairs of an item are kept: reward_gap, comparator_reward, random or all.",
    "comparator_policy": "Policy that samples the other answer of each pair, such as history or current.",
}

MOST_KEYS = 8  # of a section of the task that `--help` describes


def make_parser(algorithm: str, prog: str | None = None) -> argparse.ArgumentParser:
    """
    Makes the parser of a recipe. Flags that it does not list are keys of the algorithm's section, or of `agent_model`.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s --config FILE [--override KEY=VALUE ...] [--dry_run] [--FIELD VALUE ...]",
        description=f"Trains a team with the settings of the section '{algorithm}'. A flag wins over --override, and "
        "--override over the file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    recipe = parser.add_argument_group("recipe")
    help_help = "Show the usual settings; with 'all', every one."
    levels = ("usual", "all")
    recipe.add_argument("-h", "--help", nargs="?", const="usual", choices=levels, metavar="all", help=help_help)
    recipe.add_argument("--config", metavar="FILE", help="YAML file with the sections listed below.")
    override_help = f"Single settings, such as agent_model.name=Qwen/Qwen2.5-0.5B {algorithm}.num_turns=2."
    recipe.add_argument("--override", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help=override_help)
    recipe.add_argument("--dry_run", action="store_true", help="Check everything, print the plan, stop.")
    return parser


def read_layers(algorithm: str, arguments: argparse.Namespace, rest: Sequence[str]) -> list[dict[str, Any]]:
    """
    Reads the layers of the file, the overrides and the flags. `rest`: flags that are not the parser's own, with their
    values.
    """
    flags: dict[str, list[str]] = {}
    for text in rest:
        if text.startswith("--"):
            name, has_value, value = text[2:].partition("=")
            values = flags[name] = [value] if has_value else []
        elif not flags or (values and re.match(r"[\w.]+=", text)):
            advice = f"give it as --override {text}" if "=" in text else "see --help"
            raise ConfigError(f"unknown argument {text!r}; {advice}.")
        else:
            values.append(text)
    # A configuration of the package is replaced by its path
    arguments.config = arguments.config and config_file("--config", arguments.config, RECIPES)
    return [read_yaml(arguments.config), parse_overrides(arguments.override), flag_layer(algorithm, flags)]


def print_help(parser: argparse.ArgumentParser, algorithm: str, task: Task, full: bool) -> None:
    """
    Prints the help of a recipe: common settings; with `full`, all of them (imports TRL).
    """
    flags = {flag: f"Short for --override {path}=VALUE." for flag, path in TRL_FLAGS.items()}
    usual = USUAL
    if COLLECTION in ALGORITHMS[algorithm].parts:
        usual = {name: text for name, text in USUAL.items() if name not in OF_ROLLOUTS} | OF_COLLECTIONS
    if full:
        own = keys_of(AgentModel).items()
        flags |= {name: f"Short for --override agent_model.{name}=VALUE. {key.help}" for name, key in own}
        keys = algorithm_keys(algorithm).items()
        usual = {name: f"{key.help} (default: {key.default})" for name, key in keys if name not in flags}
    for title, texts in (
        ("flags for the model and the data, named as in TRL's scripts", flags),
        (f"flags that are also keys of the section '{algorithm}'", usual),
    ):
        group = parser.add_argument_group(title)
        for name, text in texts.items():
            group.add_argument(f"--{name}", metavar="VALUE", help=text.replace("%%", "%").replace("%", "%%"))
    parser.epilog = "\n".join(describe_sections(algorithm, task, full))
    print(parser.format_help(), end="", file=sys.stdout)


def describe_sections(algorithm: str, task: Task, full: bool) -> Iterator[str]:
    """
    Yields the sections of the YAML file and their keys, line by line. Small sections of the task are always described
    in full.
    """
    yield "keys of the YAML file:"
    for name, key in keys_of(TopLevel).items():
        if name != "critics" or algorithm in ACTOR_CRITICS:
            yield f"  {name}: {key.help}"
    more = "" if full else f", {', '.join(keys_of(extras_of(algorithm)))} and more, see --help all"
    yield f"  {algorithm}: every flag of the last group{more}"
    for section, cls in sections_of(task).items():
        if section == "critic_model" and algorithm not in ACTOR_CRITICS:
            continue
        keys = keys_of(cls)
        if full or (section in task.settings and len(keys) <= MOST_KEYS):
            yield f"  {section}:"
            yield from (f"    {name}: {key.help}" for name, key in keys.items())
        else:
            yield f"  {section}: {', '.join(keys)}"
    yield (
        "  peft: Gives every agent a LoRA adapter on a common base. Fields of peft.LoraConfig: r, lora_alpha, "
        "lora_dropout,"
    )
    yield "    target_modules ('all-linear' by default), ... {} takes the defaults."
    if task.models:
        yield f"agent_model.name also takes models that this task builds: {', '.join(task.models)}."
    if not full:
        yield (
            "Every field of the trainer's configuration class, TRL's and transformers' included, is a flag and "
            "a key, too. --help all"
        )
        yield "describes them, and docs/configuration.md has a table of TRL's arguments."
