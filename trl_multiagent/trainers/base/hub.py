"""What a trainer of a team sends to the Hub: its model card, and the files of the team."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers.integrations import is_wandb_available
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging
from transformers.utils.hub import hf_api
from trl.trainer.utils import get_trackio_space_url

from trl_multiagent.folders import CARD_FILE, RECIPE_FILE, TEAM_FILE
from trl_multiagent.hub import push_command_advice, team_card, team_files, upload_error_with_advice
from trl_multiagent.models.pretrained import temporarily_set
from trl_multiagent.report.curves import run_table, series_of
from trl_multiagent.report.run_report import environment_name
from trl_multiagent.team.card import facts_of
from trl_multiagent.team.files import AGENTS_FOLDER


if is_wandb_available():
    import wandb

logger = logging.get_logger(__name__)


def write_card(trainer: Any, model_name: str | None, dataset_name: str | None, tags: str | list[str] | None) -> None:
    """
    Writes the card of a trainer's team to its output folder. Takes the arguments of the trainer's `create_model_card`.
    """
    args, folder = trainer.args, Path(trainer.args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    training = {
        "algorithm": trainer._name,
        "paper": trainer._paper,
        "environment": environment_name(trainer.environment),
        "settings": [
            ("setting", "value"),
            *trainer._card_facts().items(),
            ("processes", args.world_size),
            *((f"`{name}`", getattr(args, name)) for name in trainer._card_settings),
        ],
        "has_recipe": (folder / RECIPE_FILE).is_file(),
        "best_metric": args.metric_for_best_model if args.load_best_model_at_end else None,
        "results": run_table(series_of(trainer.state.log_history)),
        "links": {
            "Weights & Biases": wandb.run.url if is_wandb_available() and wandb.run is not None else None,
            "Trackio": get_trackio_space_url(),
        },
    }
    place = trainer.hub_model_id or str(folder.absolute())  # a folder until the repository exists
    revision = args.hub_revision if trainer.hub_model_id else None
    tags = [*trainer._tag_names, *([tags] if isinstance(tags, str) else tags or [])]
    card = team_card(facts_of(trainer.team), place, model_name, dataset_name, tags, training, revision)
    card.save(folder / CARD_FILE)


def hub_name(trainer: Any) -> str:
    """Returns the repository's id on the Hub once it is known, else `hub_model_id`, else the default name."""
    return trainer.hub_model_id or trainer.args.hub_model_id or Path(trainer.args.output_dir).absolute().name


@contextmanager
def pushing(trainer: Any) -> Iterator[None]:
    """Prepares a push of the team, and adds advice if it is interrupted."""
    trainer._finish_current_push()  # a push in progress reads files that are replaced next
    advice = push_command_advice(trainer.args.output_dir, hub_name(trainer), trainer.args.hub_revision)
    with upload_error_with_advice(hub_name(trainer), advice), only_team_files():
        yield


@contextmanager
def only_team_files() -> Iterator[None]:
    """
    Limits a trainer's uploads of its output folder to the team's files. Checkpoints, which have a `path_in_repo`, are
    uploaded whole.
    """
    upload = hf_api().upload_folder

    def upload_folder(*, folder_path: str, **kwargs: Any) -> CommitInfo | Future:
        if "path_in_repo" not in kwargs:
            kwargs["allow_patterns"] = team_files(folder_path)
        return upload(folder_path=folder_path, **kwargs)

    with temporarily_set(hf_api(), upload_folder=upload_folder):
        yield


def push_checkpoint(trainer: Any, folder: str, push: Callable[[str], None]) -> None:
    """
    Pushes a checkpoint of a trainer, and the team in it. `push`: the method of transformers, which would copy the
    files of a single model, and its tokenizer, to the folder that it uploads.
    """
    pushes = trainer.is_world_process_zero() and trainer.args.hub_strategy != HubStrategy.END
    if not pushes or not trainer._may_change_files():
        return
    source, target = Path(folder), Path(trainer.args.output_dir)
    shutil.copytree(source / AGENTS_FOLDER, target / AGENTS_FOLDER, dirs_exist_ok=True)
    shutil.copy(source / TEAM_FILE, target / TEAM_FILE)
    with only_team_files(), temporarily_set(trainer, processing_class=None):
        push(folder)
    for job in trainer.push_in_progress.jobs:
        job.add_done_callback(report_failure)


def report_failure(job: Future) -> None:
    """Logs a warning if a background push failed. The training continues, and the next push sends the files again."""
    if job.exception() is not None:
        logger.warning(f"A push during the training failed; the next push sends its files again. {job.exception()}")
