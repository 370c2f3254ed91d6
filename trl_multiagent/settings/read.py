"""
Reads, merges and checks settings. A YAML file, `--override` and flags are layers: dicts of sections. Later layers win.
"""

import ast
import contextlib
import copy
import difflib
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import trl_multiagent
from trl_multiagent.console import one_line
from trl_multiagent.environments.task import Task
from trl_multiagent.limits import TYPED, check_value, short
from trl_multiagent.settings.algorithms import ACTOR_CRITICS, ALGORITHMS, ITERATIVE
from trl_multiagent.settings.schema import TRL_FLAGS, AgentModel, algorithm_keys, known_settings


CONFIGS = Path(trl_multiagent.__file__).parent / "configs"  # links in a checkout, copies in an installed package
RECIPES = "recipes/*/configs/*.yaml"
ACCELERATE = "accelerate/*.yaml"
MISSING = object()  # in place of a setting that is not given

Layer = dict[str, Any]  # settings by section and name


# Names in configurations that were written for CoMLRL. `{algorithm}` is the section of the algorithm

# Settings of the algorithm that select the visible past turns of an agent. They have no effect with one turn
HISTORY = ("memory_mode", "original_prompt", "previous_prompts", "previous_response")

# Alternative names of our settings. They are replaced in this order
RENAMED = {
    "model": "agent_model",
    "model_name": "agent_model.name",
    "agent_model.model_kwargs.dtype": "agent_model.torch_dtype",
    "agent_model.model_kwargs.torch_dtype": "agent_model.torch_dtype",
    "agent_model.model_kwargs.revision": "agent_model.revision",
    "agent_model.model_kwargs.attn_implementation": "agent_model.attn_implementation",
    "agent_model.model_kwargs.trust_remote_code": "agent_model.trust_remote_code",
    "agent_model.tokenizer_kwargs.trust_remote_code": "agent_model.trust_remote_code",
    "agent_model.model_kwargs": "agent_model.model_init_kwargs",
    "critic_model.model_name_or_path": "critic_model.name",
    "peft.lora_r": "peft.r",
    "peft.lora_target_modules": "peft.target_modules",
    "{algorithm}.agent_learning_rate": "{algorithm}.learning_rate",
    "{algorithm}.num_epochs": "{algorithm}.num_train_epochs",
    "madpo.dpo_beta": "madpo.beta",
    "madpo_iter.dpo_beta": "madpo_iter.beta",
    "{algorithm}.max_new_tokens": "{algorithm}.max_completion_length",
    "{algorithm}.eval_batch_size": "{algorithm}.per_device_eval_batch_size",
    "{algorithm}.normalize_advantage": "{algorithm}.advantage_normalization",
    "{algorithm}.termination_threshold": "{algorithm}.early_termination_threshold",
    **{f"{{algorithm}}.external_{name}": f"{{algorithm}}.{name}" for name in HISTORY},
    "{algorithm}.previous_responses": "{algorithm}.previous_response",
    "{algorithm}.external_previous_responses": "{algorithm}.previous_response",
    "{algorithm}.expert_model": "external.expert_model",
    "marlhf.critic_model_name": "marlhf.critic_models",
    "marlhf_iter.critic_model_name": "marlhf_iter.critic_models",
    "block_building.block_agent1": "block_building.palettes.builder_1",
    "block_building.block_agent2": "block_building.palettes.builder_2",
    "prompt.provide_graph": "block_building.provide_graph",
    "prompt.use_chat_template": "{algorithm}.use_chat_template",
    # Short forms of our own
    "prompts": "functions.prompts",
    "reward_funcs": "functions.reward_funcs",
    "reward_weights": "functions.reward_weights",
    "transition": "functions.transition",
    "order": "functions.order",
    # Names of TRL's scripts
    "agent_model.model_name_or_path": "agent_model.name",
    "agent_model.model_revision": "agent_model.revision",
    "{algorithm}.trust_remote_code": "agent_model.trust_remote_code",
    "{algorithm}.model_init_kwargs": "agent_model.model_init_kwargs",
}

# More of them. If one file sets both names to different values, ours is used, and a note says so. For the names above,
# this is an error
OVERRULED = {
    "agent_model.dtype": "agent_model.torch_dtype",
    "agent_model.temperature": "{algorithm}.temperature",
    "agent_model.top_p": "{algorithm}.top_p",
    "agent_model.top_k": "{algorithm}.top_k",
    "wandb.run_name": "wandb.name",
    "{algorithm}.seed": "seed",
    **{f"external.{name}": f"{{algorithm}}.{name}" for name in HISTORY},
    "external.previous_responses": "{algorithm}.previous_response",
    "{algorithm}.external_prompt_passthrough": "external.external_prompt_passthrough",
    "dataset.split": "dataset.train_split",
}

# CoMLRL has the settings of this section in a mapping `task`. Here, `task` is a name
TASK_MAPPING = "block_building"

# Other spellings of values
VALUES = {"agent_model.torch_dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}}

# Arguments of the trainer for which null means the default
NULL_IS_DEFAULT = """
    temperature top_p top_k reward_scale reward_shift beta discount advantage_normalization preference_replay_k
""".split()

# Endings of the paths of settings for which `none` on the command line is a choice
NONE_IS_A_CHOICE = ("reasoning", "scale_rewards", "preference_replay_mode", "peft.bias")

# Settings that may be blank if another one is given
BLANK_IS_NULL = {"agent_model.name": "agents", "critic_model.name": "critics"}

# Settings without an effect, by section, unless the algorithm or the task has them. They are accepted, and a run
# prints one note that lists them
NO_EFFECT = {
    "": "tokenizer",
    "agent_model": "type max_length special_tokens",
    "critic_model": "type max_length special_tokens torch_dtype dtype temperature top_p top_k",
    "dataset": "private csv_path json_path",
    "external": "external_prompt_passthrough",
    "wandb": "config_sections output_dir",
    "marlhf": "dpo_beta reward_model_device use_separate_critic value_head_hidden_dim",
    "marlhf_iter": "dpo_beta reward_model_device use_separate_critic value_head_hidden_dim",
    "{algorithm}": """
        memory_mode original_prompt previous_prompts previous_response discount advantage_mode advantage_normalization
        early_termination_threshold early_termination_weight epsilon_clip save_epochs parallel_training agent_devices
        critic_devices reference_devices reference_kl_devices preference_replay_dir log_reward_distribution
        comparator_devices comparator_centralized_agent_index comparator_api_max_n_per_request
        comparator_api_key_header comparator_api_key_prefix comparator_api_response_field
    """,
}

# Settings that would hold a key. They must be empty, because settings are saved with the run; the value is never shown
SECRETS = {
    "{algorithm}.comparator_api_key": "{algorithm}.comparator_api_key_env",
    "{algorithm}.comparator_api_headers": "{algorithm}.comparator_api_key_env",
    "external.expert_api_key": "external.expert_api_key_env",
}


# Names that people type, beside those in `TYPED`, for settings of other sections
OF_SECTIONS = {"model": "agent_model.name", "dataset": "dataset.name", "use_lora": "use_peft"}
MOST_SIMILAR = 5  # files of the package that an error names


class ConfigError(ValueError):
    """A setting is wrong; the message names it and says what to do, on one line."""

    def __init__(self, message: object):
        super().__init__(" ".join(str(message).split()))


@contextlib.contextmanager
def config_errors(where: str = "", kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Turns errors within the block into a [`ConfigError`] with a message that begins with `where`."""
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{where}{error}") from error


def fail(prog: str, error: Exception | str, status: int = 2) -> NoReturn:
    """Ends the program with one line, by default with the status of `argparse` after a wrong argument."""
    print(f"{prog}: error: {one_line(str(error))}", file=sys.stderr)
    sys.exit(status)


# Layers


def config_file(flag: str, name: str, pattern: str) -> str:
    """
    Finds a file by its path, or by its name in the package, such as `magrpo_he`. Raises a `ConfigError` that names
    similar ones.
    """
    path = Path(name)
    if path.is_file():
        return name
    inside = [*path.glob("*.yaml")]
    if inside:
        raise ConfigError(f"{flag} {name!r} is a folder; did you mean `{min(inside)}`?")
    packaged = {path.stem.removesuffix("_config"): path for path in sorted(CONFIGS.glob(pattern))}
    short_name = path.stem.removesuffix("_config")
    if short_name in packaged and path.name == name:
        return str(packaged[short_name])
    raise ConfigError(
        f"{flag} {name!r}: there is no such file. The package has {len(packaged)} by name, such as "
        f"{', '.join(difflib.get_close_matches(short_name, packaged, MOST_SIMILAR, cutoff=0.0))}."
    )


def read_yaml(path: str | None) -> Layer:
    """Reads the layer of the YAML file."""
    if path is None:
        return {}
    if path.endswith(".py"):
        raise ConfigError(f"--config {path} is Python; it takes a YAML file, in which `task` may name a module.")
    kinds = (UnicodeDecodeError, YAMLError, OmegaConfBaseException, OSError)
    with config_errors(f"--config {path} is not valid YAML in UTF-8: ", kinds):
        layer = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(layer, dict):
        raise ConfigError(f"--config {path} must hold sections, each a name with keys below it, not a list.")
    return {str(name): body for name, body in layer.items()}


def parse_overrides(overrides: list[str]) -> Layer:
    """Reads the layer of `--override`."""
    layer: Layer = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigError(f"--override {override!r} must have the form section.key=value.")
        set_path(layer, path, parse_value(text, path))
    return layer


def flag_layer(algorithm: str, flags: Mapping[str, list[str]]) -> Layer:
    """Reads the layer of the flags, each a name with the texts that follow it."""
    layer: Layer = {}
    for name, texts in flags.items():
        values = [parse_value(text, name) for text in texts] or [True]  # a flag without a value means true
        value = values if len(values) > 1 else values[0]
        if name in ("gpus", "num_gpus", "nproc_per_node"):
            raise ConfigError(f"--{name}: the number of processes, one per GPU, is --num_processes.")
        is_own = name == "chat_template_kwargs" and name in algorithm_keys(algorithm)  # which wins over the model's
        section = "agent_model" if name in vars(AgentModel()) and not is_own else algorithm
        path = name if "." in name else f"{section}.{name}"
        set_once(layer, f"--{name}", TRL_FLAGS.get(name, path), value)
    return layer


def parse_value(text: str, path: str = "") -> Any:
    """
    Reads the value of a setting on the command line: true, false, none or null in any case, a Python literal, a list
    such as `[a,b]` or a mapping such as `{a: 1}` as in YAML, or the text itself. Rows of a split, such as `[16:]`, are
    text, and so is `none` where it is a choice.
    """
    constants = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in constants and not (text == "none" and path.endswith(NONE_IS_A_CHOICE)):
        return constants[text.lower()]
    with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.loads(json.dumps(ast.literal_eval(text)))  # fails for types that YAML does not have, such as sets
    if re.fullmatch(r"(?!\[[\d\s%_-]*:[\d\s%_-]*\])\[.*\]|\{.*\}", text, re.DOTALL):
        with contextlib.suppress(YAMLError, OmegaConfBaseException):
            return OmegaConf.to_container(OmegaConf.create(text))
    return text


def set_path(layer: Layer, path: str, value: Any) -> None:
    """Sets `layer["a"]["b"]` for the path `a.b`."""
    *parents, name = path.split(".")
    for parent in parents:
        if not isinstance(layer.get(parent), dict):
            layer[parent] = {}
        layer = layer[parent]
    layer[name] = value


def set_once(layer: Layer, name: str, path: str, value: Any) -> None:
    """Sets a path to the value of its alternative `name`. Raises `ConfigError` if the path has another value."""
    other = pop_path(layer, path)
    if other not in (MISSING, value):
        raise ConfigError(f"`{name}: {value}` and `{path}: {other}` are the same setting; give only one of them.")
    set_path(layer, path, value)


def pop_path(layer: Layer, path: str) -> Any:
    """Removes `layer["a"]["b"]` for the path `a.b`, and returns its value, or `MISSING`."""
    *parents, name = path.split(".")
    for parent in parents:
        layer = layer.get(parent, {})
        if not isinstance(layer, dict):
            return MISSING
    return layer.pop(name, MISSING)


def rename(algorithm: str, layer: Layer) -> Layer:
    """
    Replaces alternative names of settings by ours in a layer, and returns it. If ours has another value, an unused
    value stays under its alternative name, and [`check`] reports it. The section of an algorithm in rounds may have
    the name of the algorithm of a round.
    """
    moved = {ITERATIVE[algorithm]: algorithm} if algorithm in ITERATIVE else {}
    if isinstance(layer.get("task"), dict):
        moved["task"] = TASK_MAPPING
    for old, new in moved.items():
        body = layer.pop(old, None)
        if not isinstance(body, dict | None):
            raise ConfigError(f"`{old}` is {short(body)}; it must be a section with keys below it.")
        for name, value in (body or {}).items():
            set_once(layer, f"{old}.{name}", f"{new}.{name}", value)
    overruled = named(OVERRULED, algorithm)
    for old, new in (named(RENAMED, algorithm) | overruled).items():
        value = pop_path(layer, old)
        if value is MISSING:
            continue
        if layer.get(section := old.partition(".")[0]) == {}:
            del layer[section]
        if old not in overruled:
            set_once(layer, old, new, value)
            continue
        other = pop_path(layer, new)
        set_path(layer, new, value if other is MISSING else other)
        if other not in (MISSING, value) and value is not None:
            set_path(layer, old, value)
    for path, spellings in VALUES.items():
        value = pop_path(layer, path)
        if value is not MISSING:
            set_path(layer, path, spellings.get(str(value), value))
    return layer


def named(names: Mapping[str, str], algorithm: str) -> dict[str, str]:
    """Returns a table of names with `{algorithm}` replaced by the algorithm's section."""
    return {old.format(algorithm=algorithm): new.format(algorithm=algorithm) for old, new in names.items()}


def renamed(algorithm: str, layers: Iterable[Layer]) -> Layer:
    """Merges layers under the names of this release. Two names of a setting may differ in different layers."""
    return merge(rename(algorithm, layer) for layer in layers)


def merge(layers: Iterable[Layer]) -> Layer:
    """Merges layers. Dicts are merged recursively; other values come from the last layer that has them."""
    merged: Layer = {}
    for layer in layers:
        for name, value in layer.items():
            both = [merged.get(name), value]
            merged[name] = merge(both) if all(isinstance(x, dict) for x in both) else copy.deepcopy(value)
    return merged


def resolve(merged: Layer, path: str | None = None) -> Any:
    """
    Replaces references to other settings, such as `${seed}` or `${oc.env:HOME}`, by their values, in all settings or
    in the one at `path`, which is returned alone. Raises `ConfigError` if there is no such value.
    """
    try:
        config = OmegaConf.create(merged)
        if path:
            return OmegaConf.select(config, path)
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        problem = str(error).split("\n")[0]
        name, advice = error.full_key or "a setting", "Correct it, or write \\${ for text"
        raise ConfigError(f"`{name}` refers to a value that is not there: {problem}. {advice}.") from error


# Checks


def check(algorithm: str, task: Task, merged: Layer) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """
    Checks names and types of all settings. Returns them by section, with top-level settings under `""`, and the paths
    of the given settings that have no effect. Raises `ConfigError` if a name is unknown, a value has the wrong type,
    or a feature is not available.
    """
    sections = known_settings(algorithm, task)
    known = {f"{section}.{name}".lstrip("."): key for section, keys in sections.items() for name, key in keys.items()}
    # Many settings of an evaluation have the same name as one of the training. The latter is suggested first
    known = dict(sorted(known.items(), key=lambda item: item[0].startswith("evaluation.")))
    overruled, secrets = named(OVERRULED, algorithm), named(SECRETS, algorithm)
    other_names = named(RENAMED, algorithm) | overruled
    no_effect = {
        f"{section}.{name}".format(algorithm=algorithm).lstrip(".")
        for section, names in NO_EFFECT.items()
        for name in names.split()
    } - known.keys()
    values: dict[str, dict[str, Any]] = {section: {} for section in sections}
    without_effect, resolved = [], resolve(merged)
    for path, value in paths(algorithm, sections, resolved):
        section, _, name = path.rpartition(".")
        if str(value).startswith("~/"):
            value = os.path.expanduser(value)
        is_default = value is None and section == algorithm and name in NULL_IS_DEFAULT
        is_blank = value == "" and path in BLANK_IS_NULL and resolved.get(BLANK_IS_NULL[path])
        if path in secrets:
            if value not in (None, {}, ""):
                raise ConfigError(
                    f"`{path}` cannot be used, because settings are saved with the run: put the key into an "
                    f"environment variable, and its name into `{secrets[path]}`."
                )
        elif path in no_effect:
            without_effect += [path] if value not in (None, {}, []) else []
        elif path in overruled:
            without_effect.append(f"{path} (`{overruled[path]}` is used)")
        elif path not in known:
            usable = [old for old, new in other_names.items() if new in known or new in sections]
            raise ConfigError(f"`{path}` is not a known setting{suggestion(path, [*sections, *known, *usable])}")
        elif not is_blank and not is_default:
            names = [path, *(old for old, new in other_names.items() if new == path)]
            with config_errors():
                values[section][name] = check_value("` or `".join(names), value, known[path])
    return values, without_effect


def paths(algorithm: str, sections: Collection[str], resolved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """
    Yields the paths of the given settings and their values. Raises `ConfigError` if this run cannot have a section.
    """
    for section, body in resolved.items():
        if body and section in ("critic_model", "critics") and algorithm not in ACTOR_CRITICS:
            raise ConfigError(f"`{section}` cannot be used: `{algorithm}` has no critics. Remove it.")
        if section in ALGORITHMS and section != algorithm:
            if body:
                raise ConfigError(f"the section `{section}` cannot be used: rename it, this run reads `{algorithm}`.")
        elif section not in sections:
            yield section, body
        elif isinstance(body, dict | None):
            yield from ((f"{section}.{name}", value) for name, value in (body or {}).items())
        else:
            raise ConfigError(f"`{section}` is {short(body)}; it must be a section with keys below it.")


def suggestion(path: str, known: Iterable[str]) -> str:
    """Returns the end of an error message, which suggests the same name in another section, or a similar name."""
    known, (section, _, name) = list(known), path.rpartition(".")
    name = {**TYPED, **OF_SECTIONS}.get(name, name)
    typed = f"{section}.{name}".lstrip(".")
    candidates = [typed] if typed in known and typed != path else []
    candidates += [other for other in known if name in (other, other.rpartition(".")[2])]
    candidates += difflib.get_close_matches(path, known, n=1) + difflib.get_close_matches(name, known, n=1)
    return f"; did you mean `{candidates[0]}`?" if candidates else "; see --help all, or set the `task` that has it."
