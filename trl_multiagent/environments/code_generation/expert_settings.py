"""The settings of the expert, a part of the section `external`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_multiagent.endpoints.endpoint import ANTHROPIC, APIS, LIMITS, Endpoint, make_endpoint
from trl_multiagent.environments.task import setting
from trl_multiagent.folders import MODEL_FILES, holds_model


DEFAULT_MODEL = "deepseek-coder"
DEFAULT_TEMPERATURE = 0.3
LOCAL = "local"
OWN_FIELDS = ("model", "messages", "system", "max_tokens", "max_completion_tokens", "temperature", "stream", "n")
SECRET = re.compile(r"api_?key|secret|password|authorization|access_token", re.IGNORECASE)


@dataclass
class ExpertSettings:
    """The model that proposes edits with `external.mode: expert_edits`. Other modes ignore these settings."""

    expert_model: str | None = setting(
        "With expert_edits, the model that proposes edits: its name at a provider or at `expert_base_url`; or a folder or Hub id of a "
        "model or a saved team, which then runs on this machine.",
        DEFAULT_MODEL,
    )
    expert_api: str | None = setting(
        "'openai' for any OpenAI-compatible endpoint, 'anthropic', or 'local' for a model on this machine; by default decided by the "
        "model's name.",
        choices=(*APIS, LOCAL),
    )
    expert_base_url: str | None = setting("Where the endpoint is; by default at the provider of the model's name.")
    expert_api_key_env: str | None = setting(
        "Environment variable that holds the key; by default the provider's, such as DEEPSEEK_API_KEY. With `expert_base_url` and "
        "without this, no key is sent."
    )
    expert_max_tokens: int = setting("Tokens of the expert's answer at most.", 2048, ge=1)
    expert_temperature: float | None = setting(
        f"Temperature of the expert; {DEFAULT_TEMPERATURE} by default, and the provider's own for Anthropic.",
        ge=0,
        le=2,
    )
    expert_timeout: float = setting("Seconds that one request may take.", 120.0, gt=0)
    expert_deadline: float = setting("Seconds that all requests of a turn may take together.", 600.0, gt=0)
    expert_tries: int = setting("Number of attempts per request if the endpoint fails.", 3, ge=1)
    expert_concurrency: int = setting("Requests at the same time, in each process.", 16, ge=1)
    expert_token_budget: int | None = setting("Tokens of all requests and answers of the run at most.", ge=1)
    expert_input_price: float | None = setting("Price of a million prompt tokens, to log the cost.", ge=0)
    expert_output_price: float | None = setting("Price of a million answer tokens.", ge=0)
    expert_extra_body: dict[str, Any] | None = setting("More fields of each request.")
    expert_cache_dir: str | None = setting("Folder of the answers, which runs may share; by default in the run's.")
    expert_on_failure: str = setting(
        "What happens without an answer: 'error' ends the run, 'plain' gives the agents the prompt of the mode plain.",
        "error",
        choices=("error", "plain"),
    )

    @property
    def expert_is_local(self) -> bool:
        """Whether the expert runs on this machine. A name with a slash is a folder or an id on the Hub, unless an endpoint is given."""
        assert self.expert_model is not None
        if self.expert_api is not None:
            return self.expert_api == LOCAL
        return self.expert_base_url is None and ("/" in self.expert_model or Path(self.expert_model).is_dir())

    def expert_endpoint(self) -> Endpoint:
        """Makes the endpoint to ask. Raises `ValueError` if a setting is impossible, or it is not known where the model is."""
        assert self.expert_model is not None
        endpoint = make_endpoint(
            self.expert_model,
            self.expert_base_url,
            self.expert_api_key_env,
            self.expert_api,
            names=("external.expert_base_url", "external.expert_api_key_env", "external.expert_api"),
            max_tokens=self.expert_max_tokens,
            **{name: getattr(self, f"expert_{name}") for name in LIMITS},
        )
        temperature = self.expert_temperature
        if temperature is None and endpoint.api != ANTHROPIC:
            temperature = DEFAULT_TEMPERATURE
        return endpoint.with_temperature(temperature)

    def check_expert(self) -> None:
        """
        Checks the settings that the mode `expert_edits` needs. Raises `ValueError` if one is missing or impossible, would make every request
        fail, or would put a key into the saved settings.
        """
        if self.expert_model is None:
            raise ValueError("`external.mode: expert_edits` needs `external.expert_model`, which proposes edits.")
        if self.expert_is_local:
            self._check_local(self.expert_model)
        else:
            self.expert_endpoint()
            self._check_requests()

    def _check_local(self, model: str) -> None:
        folder = Path(model)
        if not folder.is_dir() and (model.startswith(("/", "./", "../", "~")) or model.count("/") > 1):
            raise ValueError(f"`external.expert_model` is {model!r}, but there is no such folder.")
        if folder.is_dir() and not holds_model(folder):
            raise ValueError(
                f"`external.expert_model` is {model!r}, but this folder holds no model and no saved team: it has none of "
                f"{', '.join(MODEL_FILES)}."
            )
        for name in ("expert_base_url", "expert_api_key_env", "expert_token_budget", "expert_extra_body"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"`external.{name}` is for an endpoint, but the expert {model!r} runs on this machine. Remove it, or "
                    "set `external.expert_api: openai`."
                )

    def _check_requests(self) -> None:
        budget, limit = self.expert_token_budget, self.expert_max_tokens
        if budget is not None and budget <= limit:
            raise ValueError(
                f"`external.expert_token_budget` is {budget}, which is not enough for one request: an answer may have {limit} tokens "
                "(`external.expert_max_tokens`), and the question has some, too."
            )
        for name in self.expert_extra_body or {}:
            if name in OWN_FIELDS:
                raise ValueError(f"`external.expert_extra_body` has {name!r}, which a request has anyway: remove it.")
            if SECRET.search(name):
                raise ValueError(
                    f"`external.expert_extra_body` has {name!r}, which looks like a key: settings are saved with the run. Name the "
                    "environment variable that holds it in `external.expert_api_key_env`."
                )
        if self.expert_cache_dir is not None and Path(self.expert_cache_dir).is_file():
            raise ValueError(f"`external.expert_cache_dir` must be a folder, but {self.expert_cache_dir} is a file.")
