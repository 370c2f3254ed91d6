"""Trains a team, and saves its settings, the team, its model card and its learning curve."""

import os
import shutil
from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from omegaconf import OmegaConf
from transformers import Trainer, TrainerCallback

from trl_multiagent.environments.base import Environment
from trl_multiagent.folders import CARD_FILE, RECIPE_FILE, write_text
from trl_multiagent.hub import rename_card
from trl_multiagent.jobs.distributed import fail_together
from trl_multiagent.jobs.signals import end_on_signal, ending_later
from trl_multiagent.models.pretrained import hub_id
from trl_multiagent.runs.plan import print_plan, rollout_lines
from trl_multiagent.runs.prepared import PreparedRun, check_run, check_team, prepare_training
from trl_multiagent.runs.run import end_on_wrong_input, end_with_one_line
from trl_multiagent.settings.algorithms import ALGORITHMS, import_class
from trl_multiagent.settings.derive import Settings
from trl_multiagent.settings.schema import Wandb
from trl_multiagent.trainers.base.checkpoints import writing


def train_on_rollouts(settings: Settings) -> None:
    """Trains a team with an algorithm that learns from rollouts, or prints the plan."""
    run = prepare_training(settings)
    run.introduce()
    with end_on_signal(run.prog), run.reservation:
        with end_on_wrong_input(run.prog):
            environment = run.make_environment()
            outline = check_team(run, environment.roles)
            if run.dry_run:
                return print_plan(rollout_lines(run, environment, team=outline))
            environment.prepare(run.training_args.num_turns)
            train_dataset, eval_dataset = run.load_datasets()
        check_run(run, environment, train_dataset)
        train(run, environment, train_dataset, eval_dataset)
    PartialState().destroy_process_group()


def train(
    run: PreparedRun,
    environment: Environment,
    train_dataset: Dataset,
    eval_dataset: Dataset | None,
    callback: Callable[[Any], TrainerCallback] | None = None,
) -> None:
    """Loads a team, trains it and saves it. `callback` makes an additional callback from the trainer."""
    with end_on_wrong_input(run.prog):
        trainer = import_class(ALGORITHMS[run.algorithm].trainer)(
            team=run.load_team(environment.roles),
            environment=environment,
            args=run.training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
        )
    if callback:
        trainer.add_callback(callback(trainer))
    with end_with_one_line(run.prog):
        train_and_save(run, trainer)
    trainer.accelerator.wait_for_everyone()  # a process that exits while another one still communicates would abort it


def train_and_save(run: PreparedRun, trainer: Trainer) -> None:
    """
    Trains the team. Saves the merged settings in the run's folder and, unless `output.save_final_model` is false, the
    team, its model card and its learning curve in the team's folder. Raises `WriteError`, or in other processes
    `OtherProcessError`, if the team could not be saved there.
    """
    set_up_wandb(run.wandb)
    with fail_together(trainer.accelerator):
        if trainer.is_world_process_zero():
            write_settings(run)
    if run.task.callbacks:
        for callback in run.task.callbacks(run.task_settings, trainer):
            trainer.add_callback(callback)
    with ending_later():  # so that a complete training is also saved
        trainer.train(resume_from_checkpoint=run.resume_from_checkpoint)
        save_results(run, trainer)


def write_settings(run: PreparedRun) -> None:
    """Writes the merged settings to the folder of the run."""
    run.run_folder.mkdir(parents=True, exist_ok=True)
    write_text(run.run_folder / RECIPE_FILE, OmegaConf.to_yaml(OmegaConf.create(run.merged)))


def save_results(run: PreparedRun, trainer: Trainer) -> None:
    """Saves and pushes the trained team if the settings ask for it, see [`train_and_save`]."""
    # A push uploads saved files
    if not run.output.save_final_model and not run.training_args.push_to_hub:
        return
    name = run.dataset.name
    dataset_name = hub_id(name) if name and run.dataset.may_be_hub_id else None
    with fail_together(trainer.accelerator):
        trainer.save_model(str(run.team_folder), _internal_call=True)  # this does not push
    with fail_together(trainer.accelerator), writing("The team is saved; its card", run.run_folder):
        trainer.create_model_card(dataset_name=dataset_name)
        source, target = run.run_folder.resolve(), run.team_folder.resolve()
        if trainer.is_world_process_zero() and source != target:
            for file in (RECIPE_FILE, CARD_FILE):
                if (source / file).is_file():
                    shutil.copy(source / file, target / file)
            rename_card(run.team_folder, str(target))
    if run.training_args.push_to_hub:  # last, so that nothing is lost if the push fails
        trainer.push_to_hub(dataset_name=dataset_name)


def set_up_wandb(wandb: Wandb) -> None:
    """Sets the environment variables that Weights & Biases reads."""
    variables = {
        "WANDB_PROJECT": wandb.project,
        "WANDB_ENTITY": wandb.entity,
        "WANDB_DIR": wandb.dir,
        "WANDB_TAGS": ",".join(wandb.tags or []),
        "WANDB_RUN_ID": wandb.id,
        "WANDB_RESUME": "auto" if wandb.resume is True else wandb.resume,
    }
    os.environ.update({name: value for name, value in variables.items() if value})
