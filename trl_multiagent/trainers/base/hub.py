"""Pushes a team trainer's output to the Hugging Face Hub, with a model card."""

import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers import Trainer
from transformers.integrations import is_wandb_available
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging
from transformers.utils.hub import hf_api
from trl.trainer.utils import get_trackio_space_url

from trl_multiagent.folders import CARD_FILE, RECIPE_FILE, TEAM_FILE
from trl_multiagent.hub import (
    access_error_with_advice,
    check_write_access,
    environment_name,
    push_command_advice,
    team_card,
    team_files,
    upload_error_with_advice,
)
from trl_multiagent.report.curves import run_table, series_of
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.team.files import AGENTS_FOLDER
from trl_multiagent.trainers.base.team_config import temporarily_set


if is_wandb_available():
    import wandb

logger = logging.get_logger(__name__)


class TeamHubMixin(Trainer):
    """Makes `push_to_hub` and every `hub_strategy` push a team. Part of [`TeamTrainerMixin`]."""

    team: AgentTeam
    environment: Any = None  # the `Environment` that an evaluation plays
    _card_settings: list[str] = []  # training arguments to show in the model card

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        # The trainer calls this when it is created. Without the check, missing write access to an existing public
        # repository would show only at the first upload, possibly at the end of the training
        with access_error_with_advice(self._hub_name):
            super().init_hf_repo(token, private)
            if self.is_world_process_zero():
                check_write_access(self.hub_model_id, token or self.args.hub_token, self.args.hub_revision)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """
        Writes the model card of the team, `README.md`, to the output folder.

        Args:
            model_name (`str`, *optional*): Name of the team.
            dataset_name (`str`, *optional*): Id on the Hub of the training dataset.
            tags (`str` or `list[str]`, *optional*): Additional tags.
        """
        if not self.is_world_process_zero() or not self._may_change_files():
            return
        args, folder = self.args, Path(self.args.output_dir)
        tags = [*self._tag_names, *([tags] if isinstance(tags, str) else tags or [])]
        folder.mkdir(parents=True, exist_ok=True)
        changes = [
            (x["step"], name, y["before"], y["after"]) for x in self._changes for name, y in x["changes"].items()
        ]
        training = {
            "algorithm": self._name,
            "paper": self._paper,
            "environment": None if self.environment is None else environment_name(self.environment),
            "settings": [
                ("setting", "value"),
                *self._card_facts().items(),
                ("processes", args.world_size),
                *((f"`{name}`", getattr(args, name)) for name in self._card_settings),
            ],
            "changes": [("step", "setting", "before", "after"), *changes],
            "has_recipe": (folder / RECIPE_FILE).is_file(),
            "best_metric": args.metric_for_best_model if args.load_best_model_at_end else None,
            "results": run_table(series_of(self.state.log_history)),
            "links": {
                "Weights & Biases": wandb.run.url if is_wandb_available() and wandb.run is not None else None,
                "Trackio": get_trackio_space_url(),
            },
        }
        place = self.hub_model_id or str(folder.absolute())  # a folder until the repository exists
        revision = args.hub_revision if self.hub_model_id else None
        card = team_card(self.team.summary(), place, model_name, dataset_name, tags, training, revision)
        card.save(folder / CARD_FILE)

    def _card_facts(self) -> dict[str, Any]:
        """Returns the numbers about the run that the model card shows, by name."""
        return {"optimizer steps": self.state.global_step}

    def push_to_hub(self, *args: Any, **kwargs: Any) -> CommitInfo | Future | None:
        """
        Pushes the team as [`~transformers.Trainer.push_to_hub`] does. Keyword arguments go to
        [`~TeamHubMixin.create_model_card`].
        """
        self._finish_current_push()  # a push in progress reads files that are replaced next
        advice = push_command_advice(self.args.output_dir, self._hub_name, self.args.hub_revision)
        with upload_error_with_advice(self._hub_name, advice), self._only_team_files():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        pushes = self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END
        if not pushes or not self._may_change_files():
            return
        # The inherited method copies the files of a single model, and its tokenizer, to the folder that it uploads
        source, target = Path(checkpoint_folder), Path(self.args.output_dir)
        shutil.copytree(source / AGENTS_FOLDER, target / AGENTS_FOLDER, dirs_exist_ok=True)
        shutil.copy(source / TEAM_FILE, target / TEAM_FILE)
        with self._only_team_files(), temporarily_set(self, processing_class=None):
            super()._push_from_checkpoint(checkpoint_folder)
        for job in self.push_in_progress.jobs:
            job.add_done_callback(report_failure)

    @contextlib.contextmanager
    def _only_team_files(self) -> Iterator[None]:
        """
        Limits uploads of the output folder to the team's files. Checkpoints, which have a `path_in_repo`, are uploaded
        whole.
        """
        upload = hf_api().upload_folder

        def upload_folder(*, folder_path: str, **kwargs: Any) -> CommitInfo | Future:
            if "path_in_repo" not in kwargs:
                kwargs["allow_patterns"] = team_files(folder_path)
            return upload(folder_path=folder_path, **kwargs)

        with temporarily_set(hf_api(), upload_folder=upload_folder):
            yield

    @property
    def _hub_name(self) -> str:
        """The repository's id on the Hub once it is known, else the user's `hub_model_id`, else the default name."""
        return self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name

    def _may_change_files(self) -> bool:
        """
        Returns whether no background upload reads the output folder. With `hub_always_push`, waits for the upload to
        end.
        """
        if self.hub_model_id is None:
            return True
        if self.args.hub_always_push:
            self._finish_current_push()
        return self.push_in_progress is None or self.push_in_progress.is_done()


def report_failure(job: Future) -> None:
    """Logs a warning if a background push failed. The training continues, and the next push sends the files again."""
    if job.exception() is not None:
        logger.warning(f"A push during the training failed; the next push sends its files again. {job.exception()}")
