"""The command line of a recipe."""

import argparse
import dataclasses
from typing import Any

from trl_multiagent.environments.task import Task
from trl_multiagent.recipe.algorithms import ACTOR_CRITICS, SECTION_CLASSES
from trl_multiagent.recipe.fields import class_names, read_fields
from trl_multiagent.recipe.sections import TRL_FLAGS, AgentModel, extras_of, sections_of


def make_parser(algorithm: str, task: Task, prog: str | None = None) -> argparse.ArgumentParser:
    """The command line of a recipe. Every field of the algorithm's configuration class is a flag."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s --config FILE [--override KEY=VALUE ...] [--dry_run] [--FIELD VALUE ...]",
        description=f"Trains a team with the settings of the section '{algorithm}'. A flag wins over --override, and "
        "--override over the file.",
        epilog=describe_sections(algorithm, task),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument("--config", metavar="FILE", default=None, help="YAML file with the sections listed below.")
    recipe.add_argument(
        "--override",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help=f"Single settings, such as agent_model.name=Qwen/Qwen2.5-0.5B {algorithm}.num_turns=2.",
    )
    recipe.add_argument(
        "--dry_run", action="store_true", default=False, help="Check everything, print the plan, stop."
    )
    recipe.add_argument(
        "--task",
        metavar="TASK",
        help="What to train on: package.module:NAME of a `Task`, or a name of `trl-multiagent`.",
    )
    recipe.add_argument("--model_name", metavar="NAME", help="Short for --override agent_model.name=NAME.")
    recipe.add_argument("--output_base_dir", metavar="FOLDER", help="Short for --override output.base_dir=FOLDER.")
    recipe.add_argument("--num_epochs", nargs="*", metavar="N", help="Short for --num_train_epochs N.")

    trl = parser.add_argument_group("flags for the model and the data, named as in TRL's scripts")
    for flag, path in TRL_FLAGS.items():
        trl.add_argument(f"--{flag}", metavar="VALUE", help=f"Short for --override {path}=VALUE.")
    for setting in dataclasses.fields(AgentModel):
        if setting.name not in ("name", "model_init_kwargs", "tokenizer_kwargs", "trust_remote_code"):
            help = f"Short for --override agent_model.{setting.name}=VALUE. {setting.metadata['help']}"
            trl.add_argument(f"--{setting.name}", nargs="*", metavar="VALUE", help=help)

    config = SECTION_CLASSES[algorithm]
    # By class. A field is listed under the most derived class that defines it or changes its default
    flags: dict[str, dict[str, tuple[str, Any]]] = {"AlgorithmExtras": {}}
    for extra in dataclasses.fields(extras_of(algorithm)):
        flags["AlgorithmExtras"][extra.name] = (extra.metadata["help"], extra.default)
    for name, field in read_fields(config).items():
        if name not in flags["AlgorithmExtras"]:
            flags.setdefault(field.owner, {})[name] = (field.help, field.default)
    for owner in ["AlgorithmExtras", *class_names(config)]:
        group = parser.add_argument_group(f"flags from {owner}, also keys of the section '{algorithm}'")
        for name, (help, default) in flags.get(owner, {}).items():
            text = f"{help} (default: {default})".replace("%%", "%").replace("%", "%%")
            group.add_argument(f"--{name}", nargs="*", metavar="VALUE", help=text)
    return parser


def describe_sections(algorithm: str, task: Task) -> str:
    """The list of all sections and their settings, for the end of `--help`."""
    lines = ["sections of the YAML file:", "  agents: list of model ids, one per agent, instead of agent_model.name"]
    lines += ["  task: the same as --task", "  seed: random seed", f"  {algorithm}: every flag of the groups above"]
    if algorithm in ACTOR_CRITICS:
        lines.append("  critics: list of model ids, one per critic, instead of critic_model.name")
    for section, cls in sections_of(task).items():
        if section == "critic_model" and algorithm not in ACTOR_CRITICS:
            continue
        lines.append(f"  {section}:")
        lines += [f"    {field.name}: {field.metadata.get('help', '')}" for field in dataclasses.fields(cls)]
    lines += [
        "  peft:",
        "    Gives every agent a LoRA adapter on a common base. Fields of peft.LoraConfig: r, lora_alpha,",
        "    lora_dropout, target_modules ('all-linear' by default), ... {} takes the defaults.",
    ]
    if task.models:
        lines.append(f"agent_model.name also takes models that this task builds: {', '.join(task.models)}.")
    return "\n".join(lines)
