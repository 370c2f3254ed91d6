"""What all recipe scripts share: a checked plan of a run, made of the settings, and how it begins and ends."""

import dataclasses
import importlib.util
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig, Trainer
from transformers.integrations import is_deepspeed_zero3_enabled, is_wandb_available
from transformers.trainer_utils import get_last_checkpoint

from trl_multiagent.demo import demo_dataset, demo_model
from trl_multiagent.demo.report import DemoReport
from trl_multiagent.environments.base import Environment
from trl_multiagent.hub.model_card import hub_id
from trl_multiagent.recipe.results import check_folder, check_push, check_team_folder, try_folders
from trl_multiagent.recipe.sections import (
    PEFT_DEFAULTS,
    SECTIONS,
    AgentModel,
    AlgorithmExtras,
    DatasetSource,
    External,
    Output,
    Reward,
    RewardProcessor,
    SandboxSettings,
    Wandb,
)
from trl_multiagent.recipe.settings import ConfigError, check, make_parser, merge, nearest, read_layers, take
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.team.files import AGENTS_FOLDER, SHARED_FOLDER
from trl_multiagent.trainers.base.checkpoint_files import check_files, read_checkpoint
from trl_multiagent.trainers.base.distribution import OtherProcessError, fail_together
from trl_multiagent.trainers.base.rescue import SaveError
from trl_multiagent.trainers.base.run_settings import (
    check_changes,
    check_steps,
    describe_environment,
    describe_run,
    differences,
)
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


DEFAULT_KL_COEF = 0.1
EXTRAS = [field.name for field in dataclasses.fields(AlgorithmExtras)]


@dataclasses.dataclass
class Recipe:
    """
    The checked settings of one run.

    Args:
        algorithm (`str`): Name of the algorithm's section.
        merged (`dict`): All settings as they were given, under the names of this release; the run's `config.yaml`.
        training_args ([`MAGRPOConfig`]): The trainer's arguments. `output_dir` is the folder of the run.
        agents (`list[str]`, *optional*): One model id per agent. If `None`, all start from `agent_model.name`.
        peft_config ([`~peft.LoraConfig`], *optional*): The adapter of every agent of a LoRA team.
        agent_model ([`~trl_multiagent.recipe.sections.AgentModel`]): The section of that name, as are the next six.
        eval_num_samples (`int`, *optional*): Evaluate on the first n items only.
        dry_run (`bool`): Whether to print the plan and stop.
        resume_from_checkpoint (`str`, *optional*): Folder of the checkpoint to continue from.
        notes (`list[str]`): What the user should know about the settings.
        report ([`~trl_multiagent.demo.report.DemoReport`], *optional*): Shows a run of the demo.
        prog (`str`): Name of the program in messages.
    """

    algorithm: str
    merged: dict[str, Any]
    training_args: MAGRPOConfig
    agents: list[str] | None
    peft_config: LoraConfig | None
    agent_model: AgentModel
    dataset: DatasetSource
    output: Output
    external: External
    reward: Reward
    sandbox: SandboxSettings
    wandb: Wandb
    eval_num_samples: int | None
    dry_run: bool
    resume_from_checkpoint: str | None
    notes: list[str]
    report: DemoReport | None = None
    prog: str = "recipe"

    @property
    def num_agents(self) -> int:
        return self.training_args.num_agents

    @property
    def run_folder(self) -> Path:
        return Path(self.training_args.output_dir)

    @property
    def team_folder(self) -> Path:
        """Where the trained team is saved. A push uploads the run's folder, in which it must stand at the top, once."""
        if self.output.save_path and self.output.save_final_model:
            return Path(self.output.save_path)
        return self.run_folder if self.training_args.push_to_hub else self.run_folder / "final_model"

    @property
    def saves_team(self) -> bool:
        """Whether the trained team is saved. A push uploads files, so it is saved for that too."""
        return self.output.save_final_model or self.training_args.push_to_hub

    @property
    def dtype(self) -> str:
        """Data type to load the weights in."""
        if self.training_args.device.type == "cpu":
            return "float32"
        return self.agent_model.torch_dtype or "auto"

    @property
    def items_per_step(self) -> int:
        """Items of one optimizer step, over all processes."""
        return self.training_args.items_per_device * self.training_args.world_size

    def models(self) -> str | list[str]:
        """The `name` for `AgentTeam.from_pretrained`. Builds the demo's model if it is asked for and not cached."""
        if self.agents is not None:
            return self.agents
        if self.agent_model.name == "demo":
            with self.training_args.main_process_first(desc="building the demo's model"):
                return demo_model()
        return self.agent_model.name

    def load_team(self, roles: Sequence[str]) -> AgentTeam:
        """The team to train: full models, one model for all, or LoRA adapters."""
        model, frozen = self.agent_model, self.training_args.frozen_agents or []
        if not set(frozen) <= set(roles):
            raise ValueError(f"`{self.algorithm}.frozen_agents` is {frozen}, but the roles are {list(roles)}.")
        quantization = {}
        if model.load_in_4bit or model.load_in_8bit:
            quantization["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=model.load_in_4bit,
                load_in_8bit=model.load_in_8bit,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype="bfloat16" if self.training_args.bf16 else "float32",
            )
        return AgentTeam.from_pretrained(
            self.models(),
            roles,
            peft_config=self.peft_config,
            share_weights=model.share_weights,
            seed=self.training_args.seed,
            dtype=self.dtype,
            **quantization,
        )

    def outline(self, roles: Sequence[str]) -> AgentTeam | None:
        """The team to train without its weights; `None` if it cannot be told without them."""
        model = self.agent_model
        if model.load_in_4bit or model.load_in_8bit or is_deepspeed_zero3_enabled():
            return None
        team = AgentTeam.from_pretrained(
            self.models(), roles, peft_config=self.peft_config, share_weights=model.share_weights, device_map="meta"
        )
        if team.has_adapters and self.peft_config is None:  # trained before: they are the reference policies too
            return None
        team.freeze(self.training_args.frozen_agents or ())
        return team

    def check_run(self, environment: Environment, train_dataset: Dataset) -> None:
        """
        Checks what can be checked before any model is loaded: that a checkpoint to continue is whole and belongs to this
        run, and that what the end of the run needs can be written. What cannot work ends the program, on all processes.

        Args:
            environment ([`Environment`]): The run's environment.
            train_dataset ([`~datasets.Dataset`]): The items to train on.
        """
        problems = []
        try:
            if self.resume_from_checkpoint is not None:
                self.check_checkpoint(environment, train_dataset)
            if self.training_args.process_index == 0:
                folder = SHARED_FOLDER if self.agent_model.share_weights else None
                try_folders(
                    self.run_folder,
                    self.team_folder if self.saves_team else None,
                    [f"{AGENTS_FOLDER}/{folder or role}" for role in environment.roles],
                    has_report=self.report is not None,
                )
        except ValueError as error:
            problems = [str(error)]
        problems = list(dict.fromkeys(gather_object(problems)))
        if problems:
            sys.exit(f"{self.prog}: error: {' '.join(problems)}")

    def check_checkpoint(self, environment: Environment, train_dataset: Dataset) -> None:
        """
        Compares the run with the checkpoint that it continues, in all but the weights that are not trained.

        Raises:
            ValueError: the checkpoint is damaged, belongs to another run, or has taken all steps.
        """
        args, folder = self.training_args, self.resume_from_checkpoint
        saved = check_files(folder)
        check_steps(folder, saved["global_step"], len(train_dataset), args)
        trainer_name = type(args).__name__.removesuffix("Config")
        roles = environment.roles
        here = describe_run(trainer_name, roles, self.outline(roles), train_dataset, args)
        here |= describe_environment(environment)
        check_changes(folder, differences(saved["settings"], here), args)

    def train_and_save(self, trainer: Trainer) -> None:
        """
        Trains, and writes to the run's folder: the merged settings, and the team if `output.save_final_model`.

        The team is saved first. If that fails, it is saved in another place ([`SaveError`] says where), the rest is done
        all the same, and the error comes at the end, on all processes.

        Raises:
            RuntimeError: some result could not be saved.
        """
        accelerator = trainer.accelerator
        set_up_wandb(self.wandb)
        with fail_together(accelerator):
            if trainer.is_world_process_zero():
                self.run_folder.mkdir(parents=True, exist_ok=True)
                (self.run_folder / "config.yaml").write_text(yaml.safe_dump(self.merged, sort_keys=False))
        if self.report is not None:
            self.report.before(trainer)
        trainer.train(resume_from_checkpoint=self.resume_from_checkpoint)
        problems = []
        if self.saves_team:
            try:
                with fail_together(accelerator):
                    trainer.save_model(str(self.team_folder), _internal_call=True)  # without a push of its own
            except (SaveError, OtherProcessError) as error:
                problems.append(error)
        is_saved = self.saves_team and not problems
        if self.report is not None:
            self.report.after(trainer)
            try:
                with fail_together(accelerator):
                    self.report.show(trainer, self.team_folder if is_saved else None)
            except Exception as error:
                problems.append(error)
        if self.training_args.push_to_hub and is_saved:  # at the very end: a push that fails loses nothing
            trainer.push_to_hub(dataset_name=hub_id(self.dataset.name) if self.dataset.type != "demo" else None)
        if problems:
            raise RuntimeError(" ".join(map(str, problems))) from problems[0]


def parse_recipe(
    algorithm: str, config_class: type[MAGRPOConfig], argv: Sequence[str] | None = None, prog: str | None = None
) -> Recipe:
    """
    Reads and checks the settings of a run, without loading a model or data. Wrong settings end the program.

    Args:
        algorithm (`str`): Name of the algorithm's section.
        config_class (`type`): Configuration class of its trainer, [`MAGRPOConfig`] or a subclass.
        argv (`list[str]`, *optional*): Arguments; by default those of the command line.
        prog (`str`, *optional*): Name of the program in messages; by default that of the script.

    Returns:
        [`Recipe`]
    """
    parser = make_parser(algorithm, config_class, prog)
    arguments, unknown = parser.parse_known_args(argv)
    try:
        if unknown:
            flags = [flag for action in parser._actions for flag in action.option_strings]
            raise ConfigError(f"unknown argument {unknown[0]!r}{nearest(unknown[0], flags)}")
        recipe = build_recipe(algorithm, config_class, merge(read_layers(algorithm, arguments)), arguments.dry_run)
    except ConfigError as error:
        sys.exit(f"{parser.prog}: error: {error}")
    logging.basicConfig(format="%(message)s")
    recipe.prog = parser.prog
    if recipe.training_args.process_index == 0:
        logging.getLogger("trl_multiagent").setLevel(logging.INFO)
        for note in recipe.notes:
            print(f"{parser.prog}: note: {note}", file=sys.stderr)
    if recipe.dataset.type == "demo" and recipe.num_agents == 2 and not recipe.dry_run:
        recipe.report = DemoReport(demo_dataset("test"))  # its introduction comes before everything else
    return recipe


def build_recipe(
    algorithm: str, config_class: type[MAGRPOConfig], merged: dict[str, Any], dry_run: bool = False
) -> Recipe:
    """
    Makes a recipe of the merged settings.

    Raises:
        ConfigError: a setting is unknown, has the wrong type, or does not go with another one.
    """
    values, without_effect = check(algorithm, config_class, merged)
    sections = {name: cls(**values[name]) for name, cls in SECTIONS.items()}
    notes = [f"these settings have no effect here: {', '.join(without_effect)}."] if without_effect else []

    dataset = sections["dataset"]
    if dataset.name is None:
        raise ConfigError("`dataset.name` is missing: a Hub id or the path of a .jsonl, .json or .parquet file.")
    if dataset.name.endswith((".jsonl", ".json", ".parquet")) and not Path(dataset.name).is_file():
        raise ConfigError(f"`dataset.name` is {dataset.name!r}, but there is no such file in {Path.cwd()}.")
    if dataset.name == "demo":
        dataset.type = "demo"
    if sections["external"].mode == "expert_edits":
        raise ConfigError("`external.mode: expert_edits` is for a later release; 'level_feedback' needs no expert.")

    try:
        sections["sandbox"].make_sandbox()  # knows which values make sense
    except ValueError as error:
        raise ConfigError(f"{error}.") from error

    training_args = make_training_args(algorithm, config_class, values, notes)
    agents = values[""].get("agents")
    if agents is not None and len(agents) != training_args.num_agents:
        raise ConfigError(f"`agents` has {len(agents)} entries for {training_args.num_agents} agents (`num_agents`).")
    if agents is None and sections["agent_model"].name is None:
        raise ConfigError("`agent_model.name` is missing: a model id or folder that every agent starts from.")
    has_peft = merged.get("peft") is not None
    check_team_form(sections["agent_model"], agents, has_peft)
    if "wandb" in training_args.report_to and not is_wandb_available():
        missing = "`wandb` is not installed: pip install wandb, or set `wandb.project` to null"
        if not dry_run:
            raise ConfigError(missing + ".")
        notes.append(missing + ".")

    training_args.output_dir, resume_from_checkpoint = choose_folder(
        output_dir=values[algorithm].get("output_dir"),
        base_dir=sections["output"].base_dir,
        prefix="mt_job" if training_args.num_turns > 1 else "job",
        resume=values[algorithm].get("resume_from_checkpoint"),
    )
    run_folder = Path(training_args.output_dir)
    check_folder(f"`{algorithm}.output_dir`" if "output_dir" in values[algorithm] else "`output.base_dir`", run_folder)
    if sections["output"].save_path and sections["output"].save_final_model:
        check_folder("`output.save_path`", Path(sections["output"].save_path))
        check_team_folder(Path(sections["output"].save_path), run_folder)
    if training_args.push_to_hub:
        missing = check_push(algorithm, training_args)
        if missing is not None and not dry_run:
            raise ConfigError(missing)
        notes += [missing] if missing else []
    take(merged, f"{algorithm}.resume_from_checkpoint")  # config.yaml describes the run, not how it was continued
    take(merged, f"{algorithm}.resume_changes")
    take(merged, f"{algorithm}.hub_token")  # nor is it the place for secrets: it is pushed
    return Recipe(
        algorithm=algorithm,
        merged=merged,
        training_args=training_args,
        agents=agents,
        peft_config=LoraConfig(**{**PEFT_DEFAULTS, **values["peft"]}) if has_peft else None,
        agent_model=sections["agent_model"],
        dataset=dataset,
        output=sections["output"],
        external=sections["external"],
        reward=sections["reward"],
        sandbox=sections["sandbox"],
        wandb=sections["wandb"],
        eval_num_samples=values[algorithm].get("eval_num_samples"),
        dry_run=dry_run,
        resume_from_checkpoint=resume_from_checkpoint,
        notes=notes,
    )


def check_team_form(model: AgentModel, agents: list[str] | None, has_peft: bool) -> None:
    """Refuses settings that describe no form of team."""
    if model.share_weights and has_peft:
        raise ConfigError(
            "`agent_model.share_weights` is one model for all; `peft` gives every agent an adapter. Choose."
        )
    if model.share_weights and agents is not None and len(set(agents)) > 1:
        raise ConfigError("`agent_model.share_weights` is one model for all; `agents` lists several.")
    if not (model.load_in_4bit or model.load_in_8bit):
        return
    if model.load_in_4bit and model.load_in_8bit:
        raise ConfigError("`agent_model.load_in_4bit` and `load_in_8bit` are both true; choose one.")
    if not has_peft:
        raise ConfigError("Quantized weights cannot be trained: with `load_in_4bit` or `load_in_8bit`, set `peft`.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "`load_in_4bit` and `load_in_8bit` need bitsandbytes: pip install trl-multiagent[quantization]."
        )


def make_training_args(
    algorithm: str, config_class: type[MAGRPOConfig], values: dict[str, dict[str, Any]], notes: list[str]
) -> MAGRPOConfig:
    """The trainer's arguments: the fields in the algorithm's section, and what the other settings amount to."""
    extras = AlgorithmExtras(**{k: v for k, v in values[algorithm].items() if k in EXTRAS})
    kwargs = {k: v for k, v in values[algorithm].items() if k not in EXTRAS}

    def set_once(name: str, value: Any, source: str) -> None:
        if name in kwargs and kwargs[name] != value:
            raise ConfigError(f"`{source}` sets `{algorithm}.{name}` to {value}, which is {kwargs[name]}; give one.")
        kwargs[name] = value

    if values[""].get("seed") is not None:
        kwargs["seed"] = values[""]["seed"]
    kwargs.setdefault("num_agents", 1 if algorithm == "grpo" else 2)
    if algorithm == "grpo" and kwargs["num_agents"] != 1:
        raise ConfigError(
            f"`grpo.num_agents` is {kwargs['num_agents']}: GRPO trains one agent; MAGRPO trains several."
        )
    for name, null in {"top_k": 0, "report_to": "none"}.items():  # what null is in TRL
        if kwargs.get(name, null) is None:
            kwargs[name] = null
    if "handoff" not in kwargs and set(kwargs.get("turn_gradient_weights") or [1.0]) != {1.0}:
        kwargs["handoff"] = "random"
        notes.append(f"`{algorithm}.turn_gradient_weights` weigh a chain of turns: `{algorithm}.handoff` is 'random'.")
    if extras.reference_kl_enabled:
        coefficient = DEFAULT_KL_COEF if extras.reference_kl_coef is None else extras.reference_kl_coef
        set_once("beta", coefficient, f"{algorithm}.reference_kl_coef")

    processor = RewardProcessor(**values["reward_processor"])
    if processor.enabled and processor.scale_factor is not None:
        set_once("reward_scale", processor.scale_factor, "reward_processor.scale_factor")
    if processor.enabled and processor.shift is not None:
        set_once("reward_shift", processor.shift, "reward_processor.shift")
    if values["output"].get("verbose"):
        kwargs.setdefault("log_completions", True)
    if values["wandb"].get("project") is not None:
        kwargs.setdefault("report_to", ["wandb"])
        kwargs.setdefault("run_name", values["wandb"].get("name"))

    if extras.rollout_buffer_size is not None and "items_per_device" in kwargs:
        raise ConfigError(f"`{algorithm}.rollout_buffer_size` sets `{algorithm}.items_per_device`; give one of them.")
    if extras.rollout_buffer_size is not None and extras.rollout_buffer_size < 1:
        raise ConfigError(f"`{algorithm}.rollout_buffer_size` is {extras.rollout_buffer_size}, it must be at least 1.")
    if extras.train_batch_size not in (None, extras.rollout_buffer_size):
        notes.append(
            f"`{algorithm}.train_batch_size` has no effect: a batch is used for one optimizer step, as a whole."
        )
    if extras.eval_interval is not None and ("eval_strategy" in kwargs or "eval_steps" in kwargs):
        raise ConfigError(f"`{algorithm}.eval_interval` sets `eval_strategy` and `eval_steps`; give one or the other.")
    if "gradient_accumulation_steps" not in kwargs and kwargs.get("per_device_train_batch_size", 1) == 1:
        kwargs.setdefault("items_per_device", 1)
    try:
        args = config_class(**kwargs)  # knows the size of a tree and the number of processes
        if extras.rollout_buffer_size is not None:
            kwargs["items_per_device"] = max(1, extras.rollout_buffer_size // sum(args.nodes_per_turn))
        if extras.eval_interval is not None:
            items_per_step = kwargs.get("items_per_device", args.items_per_device) * args.world_size
            kwargs["eval_strategy"] = "steps" if extras.eval_interval > 0 else "no"
            kwargs["eval_steps"] = max(1, extras.eval_interval // items_per_step)
        args = config_class(**kwargs)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"section `{algorithm}`: {error}") from error
    if args.eval_strategy != "no" and values["dataset"].get("eval_split") is None:
        raise ConfigError(f"section `{algorithm}` asks for evaluation, but there is no `dataset.eval_split`.")
    return args


def choose_folder(
    output_dir: str | None, base_dir: str, prefix: str, resume: str | bool | None
) -> tuple[str, str | None]:
    """The folder of the run, the same on all processes, and the checkpoint to continue from."""
    run_id = os.environ.get("RUN_ID") or os.environ.get("JOB_ID")
    names = [re.sub(r"[^\w.-]", "_", run_id) if run_id else f"{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}"]
    broadcast_object_list(names)
    folder = output_dir or str(Path(base_dir) / f"{prefix}_{names[0]}")
    if not resume:
        return folder, None
    if isinstance(resume, str):
        if not Path(resume).is_dir():
            raise ConfigError(f"`resume_from_checkpoint` is {resume!r}, but there is no such folder.")
        check_complete(resume)
        return output_dir or str(Path(resume).parent), resume
    if output_dir is None and run_id is None:
        raise ConfigError(
            "`resume_from_checkpoint: true` continues the run that the environment variable RUN_ID or `output_dir` "
            "names; set one of them, or give the folder of a checkpoint."
        )
    checkpoint = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    if checkpoint is None:
        raise ConfigError(f"`resume_from_checkpoint: true`, but there is no checkpoint in {folder}.")
    check_complete(checkpoint)
    return folder, checkpoint


def check_complete(checkpoint: str) -> None:
    try:
        read_checkpoint(checkpoint)
    except ValueError as error:
        raise ConfigError(f"`resume_from_checkpoint`: {error}") from error


def set_up_wandb(wandb: Wandb) -> None:
    """Hands the section to Weights & Biases, which reads environment variables."""
    variables = {
        "WANDB_PROJECT": wandb.project,
        "WANDB_ENTITY": wandb.entity,
        "WANDB_DIR": wandb.dir,
        "WANDB_TAGS": ",".join(wandb.tags or []),
        "WANDB_RUN_ID": wandb.id,
        "WANDB_RESUME": wandb.resume,
    }
    os.environ.update({name: value for name, value in variables.items() if value})
