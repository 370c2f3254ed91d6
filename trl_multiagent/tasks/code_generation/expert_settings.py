"""The settings of the expert, a part of the section `external`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from trl_multiagent.endpoints.endpoint import (
    ANTHROPIC,
    APIS,
    FIELDS,
    EndpointSettings,
    endpoint_section,
    make_endpoint,
)
from trl_multiagent.environments.task import setting
from trl_multiagent.folders import MODEL_FILES, holds_model


DEFAULT_MODEL = "deepseek-coder"
DEFAULT_TEMPERATURE = 0.3
LOCAL = "local"
# The keys of the fields of `EndpointSettings`
KEYS = {field: f"expert_{field}" for field in FIELDS if field != "top_p"} | {"key_env": "expert_api_key_env"}


@dataclass
class ExpertSettings(endpoint_section(KEYS, own=("model", "api", "temperature"))):  # type: ignore[misc]
    """The model that proposes edits with `external.mode: expert_edits`. Other modes ignore these settings."""

    expert_model: str | None = setting(
        "With expert_edits, the model that proposes edits: its name at a provider or at `expert_base_url`; or a "
        "folder or Hub id of a "
        "model or a saved team, which then runs on this machine.",
        DEFAULT_MODEL,
    )
    expert_api: str | None = setting(
        "'openai' for any OpenAI-compatible endpoint, 'anthropic', or 'local' for a model on this machine; by "
        "default decided by the "
        "model's name.",
        choices=(*APIS, LOCAL),
    )
    expert_temperature: float | None = setting(
        f"Temperature of the expert; {DEFAULT_TEMPERATURE} by default, and the provider's own for Anthropic.",
        ge=0,
        le=2,
    )
    expert_cache_dir: str | None = setting("Folder of the answers, which runs may share; by default in the run's.")
    expert_on_failure: str = setting(
        "What happens without an answer: 'error' ends the run, 'plain' gives the agents the prompt of the mode plain.",
        "error",
        choices=("error", "plain"),
    )

    @property
    def expert_is_local(self) -> bool:
        """
        Whether the expert runs on this machine. A name with a slash is a folder or an id on the Hub, unless an
        endpoint is given.
        """
        assert self.expert_model is not None
        if self.expert_api is not None:
            return self.expert_api == LOCAL
        return self.expert_base_url is None and ("/" in self.expert_model or Path(self.expert_model).is_dir())

    def expert_endpoint(self) -> EndpointSettings:
        """
        Makes the endpoint to ask. Raises `ValueError` if a setting is impossible, or it is not known where the model
        is.
        """
        given = {field: getattr(self, key) for field, key in KEYS.items()}
        endpoint = make_endpoint(**given, called=lambda field: f"external.{KEYS[field]}")
        if endpoint.temperature is None and endpoint.api != ANTHROPIC:
            return dataclasses.replace(endpoint, temperature=DEFAULT_TEMPERATURE)
        return endpoint

    def check_expert(self) -> None:
        """
        Checks the settings that the mode `expert_edits` needs. Raises `ValueError` if one is missing or impossible,
        would make every request fail, or would put a key into the saved settings.
        """
        if self.expert_model is None:
            raise ValueError("`external.mode: expert_edits` needs `external.expert_model`, which proposes edits.")
        if self.expert_is_local:
            self._check_local(self.expert_model)
        else:
            self.expert_endpoint()
            if self.expert_cache_dir is not None and Path(self.expert_cache_dir).is_file():
                raise ValueError(
                    f"`external.expert_cache_dir` must be a folder, but {self.expert_cache_dir} is a file."
                )

    def _check_local(self, model: str) -> None:
        folder = Path(model)
        if not folder.is_dir() and (model.startswith(("/", "./", "../", "~")) or model.count("/") > 1):
            raise ValueError(f"`external.expert_model` is {model!r}, but there is no such folder.")
        if folder.is_dir() and not holds_model(folder):
            raise ValueError(
                f"`external.expert_model` is {model!r}, but this folder holds no model and no saved team: it has "
                "none of "
                f"{', '.join(MODEL_FILES)}."
            )
        for name in ("expert_base_url", "expert_api_key_env", "expert_token_budget", "expert_extra_body"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"`external.{name}` is for an endpoint, but the expert {model!r} runs on this machine. Remove "
                    "it, or "
                    "set `external.expert_api: openai`."
                )
