"""
Checkpoints: written atomically, compared with their checksums, refused by another run, and resumed exactly.

A checkpoint is written to a folder for unfinished ones, and moved to its final place once every process has written
its part, so a crash at any time leaves the previous checkpoint intact. Its last file has the settings of the run and
the checksums of all other files.
"""

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, TrainOutput, sort_checkpoints
from transformers.utils import logging

from trl_multiagent.environments.task_errors import UnavailableError, describe
from trl_multiagent.folders import checksum_of_file, is_machine_fault, last_checkpoint, write_json
from trl_multiagent.jobs.distributed import (
    OtherProcessError,
    OverdueElsewhere,
    check_agreement,
    fail_together,
    is_asked_to_stop,
    is_lost_process,
)
from trl_multiagent.jobs.fingerprint import (
    Changes,
    checksum_of_weights,
    describe_agent,
    describe_dataset,
    differences,
    format_value,
)
from trl_multiagent.jobs.signals import Overdue, Stopped, ending_later
from trl_multiagent.models.pretrained import adapter_parameters, temporarily_set
from trl_multiagent.rollout.tree import RolloutCallback
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.team_config import TeamConfig


logger = logging.get_logger(__name__)

STATE_FILE = "team_trainer_state.json"  # written last: the settings of the run, and the checksums of all other files
PROCESS_FILE = "team_process_{}.json"  # the state of one process
ENVIRONMENT_FILE = "environment_{}.pt"  # the state of the environment, of one process
# Folder of checkpoints that are being written or removed. It is not uploaded, and its folders do not count as
# checkpoints
UNFINISHED_FOLDER = "_unfinished"
ADVICE = "Copy it again, or resume from an earlier checkpoint."

# These are in the optimizer's state, which replaces other values when a run resumes
OPTIMIZER_ARGUMENTS = """
    optim optim_args learning_rate agent_learning_rates critic_learning_rate weight_decay adam_beta1 adam_beta2
    adam_epsilon frozen_agents
""".split()
# The arguments of `TrainingArguments` that a resumed run must share with its checkpoint
DECISIVE_ARGUMENTS = """
    seed lr_scheduler_type lr_scheduler_kwargs warmup_steps bf16 fp16 max_grad_norm
""".split()
DECISIVE_ARGUMENTS += OPTIMIZER_ARGUMENTS
# Options that are not compared. The base is compared by its weights; the others depend on how the adapter was loaded
UNCOMPARED_ADAPTER_OPTIONS = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}


class CheckpointError(ValueError):
    """A run cannot resume from a checkpoint. The message has one line."""


class WriteError(RuntimeError):
    """Files could not be written, for example because the disk is full. A recipe shows only the message."""


# Files


def read_checkpoint(folder: str | Path) -> dict[str, Any]:
    """
    Reads the last file of a checkpoint.

    Returns:
        `dict`: The keys are `weights_only`, `checksums` and `settings`.

    Raises:
        CheckpointError: The folder holds no complete checkpoint.
    """
    path = Path(folder, STATE_FILE)
    try:
        state = json.loads(path.read_text())
        return {
            "checksums": dict(state["checksums"]),
            "settings": dict(state["settings"]),
            "weights_only": bool(state["weights_only"]),
        }
    except FileNotFoundError:
        what = "a complete checkpoint of trl_multiagent" if path.parent.is_dir() else "a folder"
        problem = f"is not {what}: there is no"
    except (ValueError, LookupError, TypeError):
        problem = "is damaged:"
    raise CheckpointError(f"{folder} {problem} {path}. {ADVICE}")


def verify_checkpoint(folder: str | Path) -> dict[str, Any]:
    """
    Reads the last file of a checkpoint, and compares all other files with their checksums. No configuration may have
    been added, because it would decide how the weights are read.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged, or holds only weights. The message names the files.
    """
    state = read_checkpoint(folder)
    saved, root = state["checksums"], Path(folder)
    names = sorted({*saved, *(path.relative_to(root).as_posix() for path in root.rglob("*config.json"))})
    here = checksums_of(root, names)
    damaged = ", ".join(name for name in names if here.get(name) != saved.get(name))
    if damaged:
        raise CheckpointError(f"{folder} is damaged: missing, or changed since it was saved: {damaged}. {ADVICE}")
    if state["weights_only"]:
        raise CheckpointError(
            f"{folder} was saved with `save_only_model`: it holds only weights, so no run can resume from it. Start a "
            "new run from the weights."
        )
    return state


def checksums_of(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Computes the checksums of those files in a folder that exist, several at a time."""
    names = [name for name in names if (folder / name).is_file()]
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: checksum_of_file(folder / name), names), strict=True))


def step_of(checkpoint: str | Path) -> int:
    """Returns the optimizer step in the name of a checkpoint, or 0."""
    step = Path(checkpoint).name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(step) if step.isdecimal() else 0


def publish(unfinished: Path, finished: Path, **entries: Any) -> None:
    """
    Writes the last file of a checkpoint, with the checksums of all others and further entries, and moves the folder to
    its final place. Only then does it count as a checkpoint.
    """
    names = sorted(path.relative_to(unfinished).as_posix() for path in unfinished.rglob("*"))
    write_json(unfinished / STATE_FILE, {**entries, "checksums": checksums_of(unfinished, names)})
    for path in (*unfinished.rglob("*"), unfinished):
        flush(path)
    if finished.exists():
        remove(finished)
    os.replace(unfinished, finished)
    flush(finished.parent)


def flush(path: Path) -> None:
    """Flushes a file, or the list of names in a folder, to the disk, so that it survives a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def rotate(run_folder: Path, limit: int | None, protected: list[str | Path | None]) -> None:
    """
    Removes the unprotected checkpoints of the first steps until at most `limit` checkpoints are left, if possible.
    """
    if not limit:
        return
    names = [Path(path).name for path in sort_checkpoints(str(run_folder))]
    kept = {Path(path).name for path in protected if path is not None}
    for name in [name for name in names if name not in kept][: max(0, len(names) - limit)]:
        remove(run_folder / name)


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that a partly removed folder never counts as a checkpoint."""
    renamed = checkpoint.parent / UNFINISHED_FOLDER / f"removed-{checkpoint.name}"
    renamed.parent.mkdir(exist_ok=True)
    os.replace(checkpoint, renamed)
    shutil.rmtree(renamed)


def remove_unfinished(run_folder: str | Path) -> None:
    """Removes the unfinished checkpoints that an interrupted run has left."""
    folder = Path(run_folder) / UNFINISHED_FOLDER
    if folder.exists():
        shutil.rmtree(folder)


@contextlib.contextmanager
def writing(what: str, folder: Path, advice: str = "") -> Iterator[None]:
    """
    Turns any exception within the block into a [`WriteError`] that names `what` was being written, and the folder.
    """
    try:
        yield
    except (WriteError, OtherProcessError):
        raise
    except Exception as error:  # on a full disk, the libraries raise errors of many kinds
        if is_lost_process(error):
            raise
        existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        problem = f"{describe(error)}; {shutil.disk_usage(existing).free / 1e6:.1f} MB are free there"
        raise WriteError(f"{what} could not be written in {folder} ({problem}). {advice}".rstrip()) from error


# The settings of a run, which are compared with the checkpoint from which it resumes


def describe_run(
    algorithm: str, roles: Sequence[str], team: AgentTeam | None, train_dataset: Dataset, args: TeamConfig
) -> dict[str, Any]:
    """
    Returns the settings that a checkpoint must match, as plain values. Without a `team`, settings of agents and
    adapters are left out.
    """
    uncompared = {field.name for field in fields(TrainingArguments)} - {*DECISIVE_ARGUMENTS}
    of_team: dict[str, Any] = {}
    if team is not None:
        of_team = {
            f"agent {role}": describe_agent(agent, other_adapters(team.policies[role], team.roles))
            for role, agent in team.agents.items()
        }
        configs = {role: team.policies[role].peft_config[role].to_dict() for role in team.adapted_roles}
        of_team |= {
            f"adapter {role} {name}": sorted(value) if isinstance(value, set) else value
            for role, config in configs.items()
            for name, value in config.items()
            if name not in UNCOMPARED_ADAPTER_OPTIONS
        }
        of_team |= {"reasoning": team.reasoning, "arguments of chat templates": team.chat_template_kwargs}
    settings = {
        "trainer": algorithm,
        "roles": list(roles),
        "critics": args.critic_names(roles),
        **of_team,
        "train_dataset": describe_dataset(train_dataset),
        "number of processes": args.world_size,
        "DeepSpeed ZeRO stage": getattr(args.deepspeed_plugin, "zero_stage", None),
        **{
            name: value
            for name, value in args.to_dict().items()
            if name not in uncompared and not name.startswith(args.free_on_resume)
        },
    }
    return json.loads(json.dumps(settings, default=str))


def other_adapters(model: PreTrainedModel | PeftModel, roles: Collection[str]) -> list[torch.nn.Parameter]:
    """Returns the parameters of a model's adapters that no agent with these roles has."""
    names = [name for name in model.peft_config if name not in roles] if isinstance(model, PeftModel) else []
    return [parameter for name in names for parameter in adapter_parameters(model, name)]


def check_changes(folder: str, changes: Changes, args: TeamConfig) -> None:
    """Raises [`CheckpointError`] if there are changes since a checkpoint, unless `resume_changes` allows them."""
    in_optimizer = {name: change for name, change in changes.items() if name in OPTIMIZER_ARGUMENTS}
    allows = getattr(args, "resume_changes", "") == "allow"  # a reward model has no such setting
    refused = in_optimizer if allows else changes
    if refused:
        allowing = "" if in_optimizer else "allow the changes with `resume_changes: allow`, "
        raise CheckpointError(
            f"{folder} is a checkpoint of another run: {format_changes(refused)}. Give the run the checkpoint's "
            f"settings, {allowing}or start a run from the checkpoint's weights: AgentTeam.from_pretrained({folder!r})."
        )


def format_changes(changes: Changes) -> str:
    """Lists changed settings on one line, with both values."""
    return "; ".join(
        f"{name}: {format_value(old)} in the checkpoint, {format_value(new)} in this run"
        for name, (old, new) in changes.items()
    )


class CheckpointMixin(Trainer):
    """
    Makes a trainer write its checkpoints atomically, resume exactly, and end after a step when it gets a signal.

    In addition to what `Trainer` saves, a checkpoint holds the metrics that have not been logged yet and the settings
    of the run. A subclass adds [`CheckpointCallback`].
    """

    optimizer: Any
    ref_model: Any = None  # the reference policy, if it is a separate model
    env_step = 0  # joint actions scored in training, over all processes
    _metrics: Any  # by mode and name: the values that have not been logged yet
    _tr_loss: Any  # sum of the losses since the last log
    _resumed: Path | None = None  # the checkpoint from which this run resumes
    _may_stop = True  # whether a checkpoint of the current step can be saved now
    _saving = False  # whether a checkpoint is being written, to the folder for unfinished ones

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """
        Trains the model, as `Trainer.train` does.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                Folder of the checkpoint to continue from, or `True` for the last one in `args.output_dir`.
            trial, ignore_keys_for_eval: See `Trainer.train`.

        Raises:
            ValueError: The checkpoint is incomplete or damaged, or belongs to another run; or the processes have
                different settings, data or models.
            WriteError: A file could not be written, or there was too little memory.
            UnavailableError: An endpoint or a vLLM server is gone.
        """
        folder = last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        if resume_from_checkpoint and not folder:
            raise CheckpointError(f"There is no checkpoint in {self.args.output_dir} to resume from.")
        with fail_together(self.accelerator):
            frozen = None if is_deepspeed_zero3_enabled() else checksum_of_weights(self._frozen_weights())
            self._settings = {**self._run_settings(), "weights that are not trained": frozen}
        self._resumed = Path(folder) if folder else None
        # Nodes with folders of their own may hold different checkpoints
        check_agreement({**self._settings, "checkpoint": self._resumed and self._resumed.name})
        if self._resumed is not None:
            with fail_together(self.accelerator):
                self._check_checkpoint(self._resumed)
        if self.args.should_save:
            remove_unfinished(self.args.output_dir)
        try:
            with ending_later():
                return super().train(self._resumed and str(self._resumed), trial, ignore_keys_for_eval)
        except (Overdue, OverdueElsewhere):
            if self.state.global_step and self._may_stop and not self.control.should_evaluate:
                self._stop()
            raise Stopped(
                f"in the code of the task. {self._last_complete()}", last_checkpoint(self.args.output_dir)
            ) from None
        except (UnavailableError, WriteError) as error:
            error.args = (f"{str(error).rstrip('.')}. {self._last_complete()}",)
            raise
        except (OSError, RuntimeError, MemoryError) as error:
            if is_machine_fault(error):
                advice = "Later steps are lost: mend the disk or free memory, and resume."
                raise WriteError(
                    f"The training ended with {describe(error)}. {self._last_complete()} {advice}"
                ) from error
            if is_lost_process(error):
                reason = f"Another process has ended, or cannot be reached: {describe(error).partition('. ')[0]}"
                raise OtherProcessError(f"{reason}. {self._last_complete()}") from error
            raise
        finally:
            for callback in self.rollout_callbacks:
                callback.on_exit(self.args)

    @property
    def rollout_callbacks(self) -> list[RolloutCallback]:
        """The callbacks that read rollout trees."""
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, RolloutCallback)]

    def _last_complete(self) -> str:
        """Returns a sentence naming the last complete checkpoint."""
        last = last_checkpoint(self.args.output_dir)
        return "There is no checkpoint." if last is None else f"The last complete checkpoint is {last}."

    # Saving

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, UNFINISHED_FOLDER) if self._saving else folder

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        # transformers writes the weights on the first process only. With `save_on_each_node`, every node needs them
        with temporarily_set(PreTrainedModel, should_save_on_this_rank=lambda model, is_main_process: is_main_process):
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        run_folder = Path(self._get_output_dir(trial))
        finished = run_folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        unfinished = run_folder / UNFINISHED_FOLDER / finished.name
        with writing(f"The checkpoint of step {self.state.global_step}", unfinished):
            if self.args.should_save:
                remove_unfinished(run_folder)
            self.accelerator.wait_for_everyone()  # no process may write before the folder is removed
            # An unfinished checkpoint is pushed later, when it is complete
            with temporarily_set(self, _saving=True, _push_from_checkpoint=lambda folder: None):
                super()._save_checkpoint(model, trial)
            if self.state.best_global_step:
                best = run_folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
                if best == finished or best.is_dir():
                    self.state.best_model_checkpoint = str(best)
            if self.args.should_save:
                # again, with the final path of the best checkpoint
                self.state.save_to_json(unfinished / TRAINER_STATE_NAME)
            self.accelerator.wait_for_everyone()  # every process has written its part
            if self.args.should_save:
                publish(unfinished, finished, weights_only=self.args.save_only_model, settings=self._settings)
        if self.args.should_save:
            rotate(run_folder, self.args.save_total_limit, [finished, self.state.best_model_checkpoint])
            remove_unfinished(run_folder)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(finished))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        (Path(output_dir) / self._process_file).write_text(json.dumps(self._process_state()) + "\n")

    @property
    def _process_file(self) -> str:
        return PROCESS_FILE.format(self.args.process_index)

    def _process_state(self) -> dict[str, Any]:
        """Returns the counts of this process, and its metrics that are not yet logged, as plain values."""
        return {
            "metrics": self._metrics,
            "loss": self._tr_loss.item(),
            "logged_loss": self._total_loss_scalar,
            "last_logged_step": self._globalstep_last_logged,
            "seconds": time.monotonic() - self._start_time,
            "env_step": self.env_step,
        }

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Ends the training after the step if the program got a signal. The last step ends it anyway."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if not self.control.should_training_stop and self._may_stop and is_asked_to_stop(self.accelerator):
            self._stop()

    def _stop(self) -> NoReturn:
        """Saves a checkpoint of the last step if there is none, and ends the training."""
        step = f"after step {self.state.global_step} of {self.state.max_steps}"
        if self.args.save_strategy == SaveStrategy.NO:
            raise Stopped(f"{step}, without a checkpoint, because `save_strategy` is 'no'")
        folder = Path(self._get_output_dir(None)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if not folder.is_dir():
            self._save_checkpoint(self.model, None)
        raise Stopped(f"{step}, which is saved", str(folder))

    # Resuming

    def _run_settings(self) -> dict[str, Any]:
        """
        Returns the settings that must be the same in the run and in a checkpoint that it resumes from, as plain
        values.
        """
        return {}

    def _frozen_weights(self) -> Sequence[torch.nn.Parameter]:
        """Returns the weights that are not trained."""
        return []

    def _check_checkpoint(self, folder: Path) -> None:
        """
        Verifies that this run can resume from a checkpoint, and warns about allowed changes. Raises
        [`CheckpointError`] if the checkpoint is damaged or belongs to another run.
        """
        saved = verify_checkpoint(folder) if self.accelerator.is_local_main_process else read_checkpoint(folder)
        changes = differences(saved["settings"], self._settings)
        check_changes(str(folder), changes, self.args)
        if not (folder / self._process_file).is_file():
            raise CheckpointError(
                f"{folder} has no {self._process_file}, the part of process {self.args.process_index}. Resume with as "
                "many processes as before. If the nodes have no common output folder, save with "
                "`save_on_each_node=True`."
            )
        if changes and self.is_world_process_zero():
            logger.warning(f"The run continues {folder} with changed settings: {format_changes(changes)}.")

    def _init_training_state(self, max_steps: int, epoch_steps: int, num_epochs: int, *args: Any) -> tuple[int, int]:
        position = super()._init_training_state(max_steps, epoch_steps, num_epochs, *args)
        if self._resumed is None:
            return position
        state, metric = self.state, f"eval_{(self.args.metric_for_best_model or '').removeprefix('eval_')}"
        best = self._resumed.parent / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        if state.best_metric not in [log.get(metric) for log in state.log_history]:  # of another metric
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        elif best.is_dir():
            state.best_model_checkpoint = str(best)  # in a folder that was moved, too
        if state.global_step < max_steps:
            return position
        logger.warning(f"{self._resumed} has taken {self.state.global_step} of {max_steps} steps: none is left.")
        return num_epochs, 0  # `Trainer` would train in the rest of an epoch in which the last step was taken

    def _begin_training(self) -> None:
        """Restores the state of this process. Called after the trainer has reset its counters."""
        self._start_time = time.monotonic()
        self._metrics["train"].clear()  # an interrupted training has left some
        # The intervals of saving, logging and evaluating come from this run, not from the checkpoint
        self.state.compute_steps(self.args, self.state.max_steps)
        if self._resumed is not None:
            self._load_process_state(json.loads((self._resumed / self._process_file).read_text()))

    def _is_between_batches(self) -> bool:
        """Returns whether the next optimizer step begins with a new batch."""
        return True

    def _load_process_state(self, state: dict[str, Any]) -> None:
        for mode, metrics in state["metrics"].items():
            self._metrics[mode].clear()
            self._metrics[mode].update(metrics)
        self._tr_loss.fill_(state["loss"])
        self._total_loss_scalar = state["logged_loss"]
        self._globalstep_last_logged = state["last_logged_step"]
        self._start_time -= state["seconds"]
        self.env_step = state["env_step"]

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        if skip_scheduler and self._resumed is not None:  # `eval_on_start` does not apply to a resumed run
            return {}
        metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
        best = self.args.metric_for_best_model
        metric = f"eval_{(best or '').removeprefix('eval_')}"
        is_known = any(metric in log for log in (metrics, *self.state.log_history))
        is_dropped = any(name.endswith("/reward_none") for name in metrics) and "eval_reward" not in metrics
        if not best or is_known or is_dropped:
            if best and metrics.get(metric) is None:  # all rewards were dropped, or a logged metric is NaN
                metrics[metric] = math.nan  # never the best, and no step of a scheduler
                skip_scheduler = True
            with temporarily_set(self, evaluate=lambda **_: metrics):
                return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        if self.state.global_step and self.args.save_strategy != SaveStrategy.NO and self._is_between_batches():
            self._save_checkpoint(self.model, trial)  # no step is lost
        names = ", ".join(name.removeprefix("eval_") for name in metrics)
        raise UnavailableError(f"`metric_for_best_model` is {best!r}, but an evaluation has {names}.")

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput:
        best = self.state.best_model_checkpoint
        if self.args.should_save and self.args.save_total_limit == 1 and best is not None:
            rotate(Path(self._get_output_dir(trial)), 1, [best])  # `Trainer` would not remove checkpoints atomically
        # The loss of the steps since the last log, averaged over processes as a log does
        self._tr_loss = self.accelerator.reduce(self._tr_loss, "mean")
        # The mean loss, the time and the speed cover the whole run, whatever happened to the clock
        self._initial_global_step = 0
        return super()._finalize_training(trial, num_train_samples, time.time() - time.monotonic() + self._start_time)


@dataclass
class CheckpointCallback(TrainerCallback):
    """
    Restores the state of a resumed run, and postpones some saves.

    A save at the last step of an epoch is postponed to the end of the epoch, after the epoch's evaluation and log. So
    a run that resumes there begins with the next epoch. If a batch is used for several optimizer steps, a save is
    postponed to the last of them, because a checkpoint has no batch. A run that ends because of a signal waits for the
    same moment.
    """

    trainer: CheckpointMixin
    save_is_due: bool = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer._begin_training()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        ends_epoch = state.epoch == int(state.epoch) or control.should_training_stop
        self.trainer._may_stop = not ends_epoch and self.trainer._is_between_batches()
        if control.should_save or self.save_is_due:
            self.save_is_due = not self.trainer._may_stop
            control.should_save = not self.save_is_due

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        control.should_save |= self.save_is_due
        self.save_is_due, self.trainer._may_stop = False, True
