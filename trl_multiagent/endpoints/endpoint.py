"""
Which model to ask, where it is, and what its answers may cost.

A key is never a setting: an [`Endpoint`] has the name of the environment variable that holds it.
"""

import dataclasses
import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from trl_multiagent.terminal import printable


OPENAI, ANTHROPIC = "openai", "anthropic"
APIS = (OPENAI, ANTHROPIC)
# The provider of a model, found by its name. The first match counts: a part of the name, the API, the base URL, the variable with the key
PROVIDERS = (
    ("claude", ANTHROPIC, "https://api.anthropic.com", "ANTHROPIC_API_KEY"),
    ("deepseek", OPENAI, "https://api.deepseek.com", "DEEPSEEK_API_KEY"),
    ("qwen3-coder", OPENAI, "https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY"),
    ("gpt-", OPENAI, "https://api.openai.com/v1", "OPENAI_API_KEY"),
)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# The fields of an `Endpoint` that are settings of the same name, with a prefix, wherever there are settings of an endpoint
LIMITS = "extra_body timeout deadline tries concurrency token_budget input_price output_price".split()


class EndpointError(RuntimeError):
    """
    A question has no answer. The message says why, on one line and without the key. `retry`: asking again may help, after `wait` seconds if
    the endpoint has sent a time. `concerns_all`: other questions would fail for the same reason.
    """

    def __init__(self, message: str, retry: bool = False, wait: float | None = None, concerns_all: bool = False):
        super().__init__(printable(" ".join(message.split())))
        self.retry, self.wait, self.concerns_all = retry, wait, concerns_all


@dataclass(frozen=True)
class Endpoint:
    """
    A model that answers over the network, and the limits of its use. [`make_endpoint`] finds out the rest from its name.

    Args:
        model (`str`): The model's name, as the endpoint knows it.
        api (`str`): `"openai"` for any endpoint with OpenAI's chat completions, or `"anthropic"`.
        base_url (`str`): Where the endpoint is.
        key_env (`str`, *optional*): Environment variable that holds the key. Without it, no key is sent.
        max_tokens (`int`, *optional*, defaults to `2048`): Tokens of an answer at most.
        temperature, top_p (`float`, *optional*): Settings of the sampling. Without them, the endpoint's own apply.
        extra_body (`dict`, *optional*): More fields of the request.
        timeout (`float`, *optional*, defaults to `120.0`): Seconds that one request may take.
        deadline (`float`, *optional*, defaults to `600.0`): Seconds that all requests of a call may take together.
        tries (`int`, *optional*, defaults to `3`): Number of attempts per request if the endpoint fails. A request that was refused with a
            time to wait (429 with Retry-After) does not count.
        concurrency (`int`, *optional*, defaults to `16`): Requests at the same time.
        token_budget (`int`, *optional*): Prompt and answer tokens of all requests at most, see [`~endpoints.files.Ledger`].
        input_price, output_price (`float`, *optional*): Price of a million tokens.
    """

    model: str
    api: str
    base_url: str
    key_env: str | None = None
    max_tokens: int = 2048
    temperature: float | None = None
    top_p: float | None = None
    extra_body: dict[str, Any] | None = None
    timeout: float = 120.0
    deadline: float = 600.0
    tries: int = 3
    concurrency: int = 16
    token_budget: int | None = None
    input_price: float | None = None
    output_price: float | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The fields of a request on which its answer depends, besides the messages."""
        limit = "max_tokens"
        if self.api == OPENAI and urlsplit(self.base_url).hostname == "api.openai.com":
            limit = "max_completion_tokens"  # newer models refuse the other name, which other servers need
        # In the body, because not every release of the clients has arguments for the sampling
        sampling = {"temperature": self.temperature, "top_p": self.top_p}
        body = {name: value for name, value in sampling.items() if value is not None} | (self.extra_body or {})
        return {"model": self.model, limit: self.max_tokens} | ({"extra_body": body} if body else {})

    def with_temperature(self, temperature: float | None) -> "Endpoint":
        return dataclasses.replace(self, temperature=temperature)

    @property
    def is_local(self) -> bool:
        """Whether the endpoint is on this machine, where no proxy can reach it."""
        return urlsplit(self.base_url).hostname in LOOPBACK

    @property
    def has_price(self) -> bool:
        return self.input_price is not None or self.output_price is not None

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Price of some tokens, in the currency of the prices; 0 without prices."""
        return (input_tokens * (self.input_price or 0.0) + output_tokens * (self.output_price or 0.0)) / 1e6

    def problem(self) -> str | None:
        """Returns why this process cannot use the endpoint, or `None`. Nothing is contacted to find out."""
        if importlib.util.find_spec(self.api) is None:
            return f"the package {self.api} is not installed: pip install 'trl-multiagent[endpoints]'"
        try:
            self.read_key()
        except EndpointError as error:
            return str(error)
        return None

    def read_key(self) -> str | None:
        """Reads the key from its environment variable. One that is missing or cannot be a key is an [`EndpointError`]."""
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


def make_endpoint(
    model: str,
    base_url: str | None = None,
    key_env: str | None = None,
    api: str | None = None,
    names: tuple[str, str, str] = ("base_url", "key_env", "api"),
    **settings: Any,
) -> Endpoint:
    """
    Makes an endpoint from a model's name, and completes what is not given.

    Args:
        model (`str`): The model's name. If it contains `claude`, `deepseek`, `qwen3-coder` or `gpt-`, the provider follows from it.
        base_url (`str`, *optional*): Where the endpoint is; by default at the provider. A key is only sent to an endpoint that is given
            here if `key_env` is given, too.
        key_env (`str`, *optional*): Environment variable that holds the key; by default the provider's.
        api (`str`, *optional*): `"openai"` or `"anthropic"`; by default the provider's, and `"openai"` for other names.
        names (`tuple[str, str, str]`, *optional*): What the settings `base_url`, `key_env` and `api` are called in messages.
        **settings: The other fields of [`Endpoint`].

    Raises:
        ValueError: the name says nothing about the provider and there is no `base_url`, or a value is impossible.
    """
    url_name, key_name, api_name = names
    provider = next((provider for provider in PROVIDERS if provider[0] in model.lower()), None)
    if api is not None and api not in APIS:
        raise ValueError(f"`{api_name}` is {api!r}, it must be one of {', '.join(map(repr, APIS))}.")
    if key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", key_env):
        # The value is not shown, because it may be the key itself
        raise ValueError(
            f"`{key_name}` must be the name of an environment variable in capital letters, such as DEEPSEEK_API_KEY: keys do not "
            "belong into settings."
        )
    if base_url is not None:
        check_url(url_name, base_url)
        api = api or (OPENAI if provider is None else provider[1])
        return Endpoint(model, api, base_url, key_env, **settings)
    if provider is None or api not in (None, provider[1]):
        raise ValueError(f"Nothing is known about where the model {model!r} is: set `{url_name}`.")
    return Endpoint(model, provider[1], provider[2], key_env or provider[3], **settings)


def check_url(name: str, url: str) -> None:
    """Raises a `ValueError` that names the setting if a URL is not the address of an endpoint, or has a secret in it."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if "@" in parts.netloc or parts.query or parts.fragment:  # not shown, because it may hold a key
        raise ValueError(f"`{name}` must not have a user, password or anything after a `?`: it is saved with the run.")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"`{name}` must be a URL such as http://localhost:8000/v1.")


def describe_requests(endpoint: Endpoint | None, requests: int, input_tokens: int, output_tokens: int) -> str:
    """Describes the largest number of requests to an endpoint, or to this machine if it is `None`, and their cost, for a plan."""
    text = f"{requests} requests with about {input_tokens} prompt tokens and {output_tokens} answer tokens at most"
    if endpoint is None:
        return f"{text}, on this machine"
    price = f", cost {endpoint.cost(input_tokens, output_tokens):.2f}" if endpoint.has_price else ""
    budget = "" if endpoint.token_budget is None else f", token budget {endpoint.token_budget}"
    problem = endpoint.problem()
    return f"{text}{price}{budget}, at {endpoint.base_url}{f' ({problem})' if problem else ''}"


def describe_endpoint(endpoint: Endpoint) -> dict[str, Any]:
    """Returns what an endpoint's answers depend on, as plain values. The place is no part of it: a server may move."""
    return {"api": endpoint.api, **endpoint.parameters}
