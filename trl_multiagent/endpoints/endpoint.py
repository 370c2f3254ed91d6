"""
Settings of an endpoint: its model, its address, and the limits of its use.

A key is never a setting: [`EndpointSettings`] has the name of the environment variable that holds it.
"""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from trl_multiagent.console import printable
from trl_multiagent.limits import setting


OPENAI, ANTHROPIC = "openai", "anthropic"
APIS = (OPENAI, ANTHROPIC)
# Providers: a part of the model's name, the API, the base URL, the variable with the key. The first match counts
PROVIDERS = (
    ("claude", ANTHROPIC, "https://api.anthropic.com", "ANTHROPIC_API_KEY"),
    ("deepseek", OPENAI, "https://api.deepseek.com", "DEEPSEEK_API_KEY"),
    ("qwen3-coder", OPENAI, "https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY"),
    ("gpt-", OPENAI, "https://api.openai.com/v1", "OPENAI_API_KEY"),
)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Fields that every request has, so that `extra_body` must not have them
OWN_FIELDS = ("model", "messages", "system", "max_tokens", "max_completion_tokens", "temperature", "stream", "n")
SECRET = re.compile(r"api_?key|secret|password|authorization|access_token", re.IGNORECASE)


class EndpointError(RuntimeError):
    """
    Raised if a question gets no answer. The message says why, on one line and without the key. `retry`: another try
    may help, after `wait` seconds if the endpoint has sent a time. `concerns_all`: other questions would fail for the
    same reason.
    """

    def __init__(self, message: str, retry: bool = False, wait: float | None = None, concerns_all: bool = False):
        super().__init__(printable(" ".join(message.split())))
        self.retry, self.wait, self.concerns_all = retry, wait, concerns_all


@dataclass(frozen=True)
class EndpointSettings:
    """
    A model that answers over the network, and the limits of its use. [`make_endpoint`] checks the settings, and
    derives missing ones from the model's name. [`endpoint_section`] adds them to a section that has other settings,
    too.
    """

    model: str = setting("The model's name, at its provider or at `base_url`.")
    api: str = setting(
        "'openai' for any OpenAI-compatible endpoint, or 'anthropic'; by default decided by the model's name.",
        choices=APIS,
    )
    base_url: str = setting("URL of the endpoint; by default that of the model's provider.")
    key_env: str | None = setting(
        "Environment variable that holds the key; by default the provider's, such as DEEPSEEK_API_KEY. With a URL "
        "and without "
        "this, no key is sent."
    )
    max_tokens: int = setting("Maximum number of tokens of an answer.", 2048, ge=1)
    temperature: float | None = setting("Sampling temperature; by default the endpoint's own.", ge=0, le=2)
    top_p: float | None = setting("Nucleus sampling probability; by default the endpoint's own.", gt=0, le=1)
    extra_body: dict[str, Any] | None = setting("Additional fields of each request.")
    timeout: float = setting("Seconds that one request may take.", 120.0, gt=0, le=1000000)
    deadline: float = setting("Seconds that all requests of a turn may take together.", 600.0, gt=0, le=1000000)
    tries: int = setting("Number of attempts per request if the endpoint fails.", 3, ge=1, le=1000)
    concurrency: int = setting("Number of parallel requests in each process.", 16, ge=1, le=10000)
    token_budget: int | None = setting(
        "Maximum number of tokens of all requests and answers, over all processes and restarts.", ge=1
    )
    input_price: float | None = setting("Price of a million prompt tokens, to log the cost.", ge=0, le=1000000000)
    output_price: float | None = setting("Price of a million answer tokens.", ge=0, le=1000000000)

    @property
    def parameters(self) -> dict[str, Any]:
        """The fields of a request, other than the messages, on which its answer depends."""
        limit = "max_tokens"
        if self.api == OPENAI and urlsplit(self.base_url).hostname == "api.openai.com":
            limit = "max_completion_tokens"  # newer models refuse the other name, which other servers need
        # In the body, because not every release of the clients has arguments for the sampling
        sampling = {"temperature": self.temperature, "top_p": self.top_p}
        body = {name: value for name, value in sampling.items() if value is not None} | (self.extra_body or {})
        return {"model": self.model, limit: self.max_tokens} | ({"extra_body": body} if body else {})

    @property
    def is_local(self) -> bool:
        """Whether the endpoint is on this machine, where no proxy can reach it."""
        return urlsplit(self.base_url).hostname in LOOPBACK

    @property
    def has_price(self) -> bool:
        return self.input_price is not None or self.output_price is not None

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Computes the price of some tokens, in the currency of the prices; 0 without prices."""
        return (input_tokens * (self.input_price or 0.0) + output_tokens * (self.output_price or 0.0)) / 1e6

    def problem(self) -> str | None:
        """Returns why this process cannot use the endpoint, or `None`. This contacts nothing."""
        if importlib.util.find_spec(self.api) is None:
            return f"the package {self.api} is not installed: pip install 'trl-multiagent[endpoints]'"
        try:
            self.read_key()
        except EndpointError as error:
            return str(error)
        return None

    def read_key(self) -> str | None:
        """
        Reads the key from its environment variable. Raises [`EndpointError`] if it is missing or cannot be a key.
        """
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env, "").strip()
        if not key:
            raise EndpointError(
                f"the environment variable {self.key_env}, which must hold the key for {self.model}, is not set",
                concerns_all=True,
            )
        if not (key.isascii() and key.isprintable()):
            raise EndpointError(f"the variable {self.key_env} holds characters that no key has", concerns_all=True)
        return key

    def __str__(self) -> str:
        return f"{self.model} at {self.base_url}"


FIELDS = {field.name: field for field in dataclasses.fields(EndpointSettings)}


def endpoint_section(keys: Mapping[str, str], own: Collection[str]) -> Any:
    """
    Makes a base class for a section that has settings of an endpoint among others. It is a dataclass with those fields
    of [`EndpointSettings`] that are in `keys`, each under its name there. Fields in `own` are left out: the section
    defines them itself.
    """
    fields = []
    for name, key in keys.items():
        if name not in own:
            field: Any = FIELDS[name]
            hint = field.type | None if field.default is None else field.type
            fields.append((key, hint, setting(field.metadata["help"], field.default, **field.limits)))
    return dataclasses.make_dataclass("EndpointSection", fields, kw_only=True)  # see `SamplingOptions`


def make_endpoint(
    model: str,
    base_url: str | None = None,
    key_env: str | None = None,
    api: str | None = None,
    called: Callable[[str], str] = str,
    **settings: Any,
) -> EndpointSettings:
    """
    Makes the settings of an endpoint. Missing ones follow from the model's name.

    Args:
        model (`str`): The model's name. If it contains `claude`, `deepseek`, `qwen3-coder` or `gpt-`, the provider
            follows from it.
        base_url, key_env, api (`str`, *optional*): See [`EndpointSettings`]. A key is only sent to a URL that is given
            here if `key_env` is given, too.
        called (`Callable[[str], str]`, *optional*): Returns the name of a field in messages.
        **settings: The other fields of [`EndpointSettings`].

    Raises:
        ValueError: The provider does not follow from the name and there is no `base_url`; or a value is impossible,
        would make every request
            fail, or would put a key into saved settings.
    """
    provider = next((provider for provider in PROVIDERS if provider[0] in model.lower()), None)
    if api is not None and api not in APIS:
        raise ValueError(f"`{called('api')}` is {api!r}; it must be one of {', '.join(map(repr, APIS))}.")
    if key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", key_env):
        # The value is not shown, because it may be the key itself
        raise ValueError(
            f"`{called('key_env')}` must be the name of an environment variable in capital letters, such as "
            "DEEPSEEK_API_KEY: keys do "
            "not belong in settings."
        )
    if base_url is not None:
        check_url(called("base_url"), base_url)
        api = api or (OPENAI if provider is None else provider[1])
    elif provider is None or api not in (None, provider[1]):
        raise ValueError(f"The endpoint of the model {model!r} is not known: set `{called('base_url')}`.")
    else:
        _, api, base_url, own_key = provider
        key_env = key_env or own_key
    endpoint = EndpointSettings(model, api, base_url, key_env, **settings)
    check_requests(endpoint, called)
    return endpoint


def check_requests(endpoint: EndpointSettings, called: Callable[[str], str]) -> None:
    """
    Raises a `ValueError` if the settings of an endpoint would make every request fail, or would put a key into the
    saved settings.
    """
    budget, limit = endpoint.token_budget, endpoint.max_tokens
    if budget is not None and budget <= limit:
        raise ValueError(
            f"`{called('token_budget')}` is {budget}, which is not enough for one request: an answer may have "
            f"{limit} tokens, and the "
            "question has some, too."
        )
    for name in endpoint.extra_body or {}:
        if name in OWN_FIELDS:
            raise ValueError(f"`{called('extra_body')}` has {name!r}, which every request has: remove it.")
        if SECRET.search(name):
            raise ValueError(
                f"`{called('extra_body')}` has {name!r}, which looks like a key: settings are saved with the run. "
                "Name the environment "
                f"variable that holds it in `{called('key_env')}`."
            )


def check_url(name: str, url: str) -> None:
    """
    Raises a `ValueError` that names the setting if a URL is not the address of an endpoint, or has a secret in it.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if "@" in parts.netloc or parts.query or parts.fragment:  # not shown, because it may hold a key
        raise ValueError(f"`{name}` must not have a user, password or anything after a `?`: it is saved with the run.")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"`{name}` must be a URL such as http://localhost:8000/v1.")


def describe_requests(endpoint: EndpointSettings | None, requests: int, input_tokens: int, output_tokens: int) -> str:
    """
    Describes the largest number of requests to an endpoint, or to this machine if it is `None`, and their cost, for a
    plan.
    """
    text = f"{requests} requests with about {input_tokens} prompt tokens and {output_tokens} answer tokens at most"
    if endpoint is None:
        return f"{text}, on this machine"
    price = f", cost {endpoint.cost(input_tokens, output_tokens):.2f}" if endpoint.has_price else ""
    budget = "" if endpoint.token_budget is None else f", token budget {endpoint.token_budget}"
    problem = endpoint.problem()
    return f"{text}{price}{budget}, at {endpoint.base_url}{f' ({problem})' if problem else ''}"


def describe_endpoint(endpoint: EndpointSettings) -> dict[str, Any]:
    """
    Returns the settings on which an endpoint's answers depend, as plain values. The URL is not one of them: a server
    may move.
    """
    return {"api": endpoint.api, **endpoint.parameters}
