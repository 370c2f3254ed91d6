"""
Models behind OpenAI-compatible endpoints. OpenAI's own client sends and repeats the requests. Whatever a server sends
becomes an answer or an [`EndpointError`].
"""

import asyncio
import dataclasses
import hashlib
import importlib.util
import ipaddress
import json
import os
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import pydantic
from pydantic_core import from_json

from trl_multiagent.console import install_command, one_line, tell
from trl_multiagent.folders import write_json
from trl_multiagent.limits import STRICT, setting


OPENAI, ANTHROPIC = "openai", "anthropic"
# Providers: a part of the model's name, the base URL, the variable with the key. The first match counts
PROVIDERS = (
    ("claude", "https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
    ("deepseek", "https://api.deepseek.com", "DEEPSEEK_API_KEY"),
    ("qwen3-coder", "https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY"),
    ("gpt-", "https://api.openai.com/v1", "OPENAI_API_KEY"),
)
CHARACTERS_PER_TOKEN = 3  # estimate
MAX_MESSAGE = 500  # characters of an error
MAX_BODY = 8 * 2**20  # bytes of an answer
SHORTEST_KEY = 6  # characters; a shorter text may occur in any answer
SENT = ("content-type", "accept", "user-agent")  # the client's headers that are sent


class EndpointError(RuntimeError):
    """A question got no answer. The message says why, on one line."""

    def __init__(self, message: str):
        super().__init__(one_line(message[: 9 * MAX_MESSAGE])[:MAX_MESSAGE])


# Settings


@dataclass(frozen=True)
class EndpointSettings:
    """
    A model behind an endpoint. [`make_endpoint`] derives missing settings from the model's name. [`endpoint_section`]
    adds them to a section that has other settings, too.
    """

    model: str = setting("The model's name, at its provider or at `base_url`.")
    api: str = setting(
        "'openai' or 'anthropic', both with an OpenAI-compatible endpoint; by default decided by the model's name.",
        choices=(OPENAI, ANTHROPIC),
    )
    base_url: str = setting("URL of the endpoint; by default the model provider's.")
    key_env: str | None = setting(
        "Environment variable that holds the key; by default the provider's, such as DEEPSEEK_API_KEY. With a URL "
        "and without this, no key is sent."
    )
    max_tokens: int = setting("Maximum number of tokens of an answer.", 2048, ge=1)
    temperature: float | None = setting("Sampling temperature; by default the endpoint's own.", ge=0, le=2)
    top_p: float | None = setting("Nucleus sampling probability; by default the endpoint's own.", gt=0, le=1)
    extra_body: dict[str, Any] | None = setting("Additional fields of each request.")
    timeout: float = setting("Seconds that one request may take.", 120.0, gt=0)
    tries: int = setting("Number of attempts per request if the endpoint fails.", 3, ge=1)
    concurrency: int = setting("Number of parallel requests in each process.", 16, ge=1)

    @property
    def parameters(self) -> dict[str, Any]:
        """The arguments of a request, other than the messages, on which its answer depends."""
        limit = "max_tokens"
        if urlsplit(self.base_url).hostname == "api.openai.com":
            limit = "max_completion_tokens"  # newer models refuse the other name, which other servers need
        given = {"temperature": self.temperature, "top_p": self.top_p, "extra_body": self.extra_body}
        return {"model": self.model, limit: self.max_tokens} | {x: y for x, y in given.items() if y is not None}

    def parameters_for(self, question: "Question") -> dict[str, Any]:
        """Returns the `parameters`, with the question's limit of its answer if that is lower."""
        return replace(self, max_tokens=min(self.max_tokens, question.max_tokens or self.max_tokens)).parameters

    def problem(self) -> str | None:
        """Returns why this process cannot use the endpoint, or `None`. This contacts nothing."""
        if importlib.util.find_spec("openai") is None:
            return f"the package openai is not installed: {install_command('endpoints')}"
        if self.key_env and not self.key:
            return f"the environment variable {self.key_env}, which must hold the key for {self.model}, is not set"
        if not (self.key.isascii() and self.key.isprintable()):
            return f"the environment variable {self.key_env} has characters that no key has"
        try:
            limited_client(self)
        except Exception as error:  # of many kinds
            return f"the proxies or certificates that the environment names cannot be used: {error}"
        return None

    @property
    def key(self) -> str:
        """The key in the environment; empty without one."""
        return os.environ.get(self.key_env or "", "").strip()

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
        ValueError: The provider does not follow from the name and there is no `base_url`; or a value is no URL, or
            would put a key into saved settings.
    """
    name = "claude" if api == ANTHROPIC else model.lower()
    provider = next((provider for provider in PROVIDERS if provider[0] in name), None)
    if key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", key_env):
        # The value is not shown, because it may be the key itself
        raise ValueError(
            f"`{called('key_env')}` must be the name of an environment variable in capital letters, such as "
            "DEEPSEEK_API_KEY: keys do not belong in settings."
        )
    if base_url is None:
        if provider is None:
            raise ValueError(f"The endpoint of the model {model!r} is not known: set `{called('base_url')}`.")
        _, base_url, own_key = provider
        key_env = key_env or own_key
    else:
        check_url(called("base_url"), base_url, key_env)
    base_url = re.sub(r"/(chat/completions|messages)/?$", "", base_url)  # as CoMLRL's files have it
    api = api or (ANTHROPIC if provider is PROVIDERS[0] else OPENAI)
    return EndpointSettings(model, api, base_url, key_env, **settings)


def check_url(name: str, url: str, key_env: str | None = None) -> None:
    """
    Raises a `ValueError` that names the setting if its value is not the URL of a server, or has a secret in it. Says
    once if a key would go to another machine unencrypted. Servers of a cluster are often reached so.
    """
    host = r"[\w.-]*[a-zA-Z][\w.-]*|[\d.]+|\[[\da-fA-F:.]+\]"
    match = re.fullmatch(rf"(https?)://({host})(:\d{{1,5}})?(/[\w.~!$&'()*+,;=:%/-]{{0,999}})?", url, re.ASCII)
    try:
        is_far = not is_loopback(match[2]) if match and int((match[3] or ":80")[1:]) < 2**16 else None
    except ValueError:  # no address
        is_far = None
    if match is None or is_far is None:  # not shown, because it may hold a key
        raise ValueError(
            f"`{name}` must be a URL such as http://localhost:8000/v1, without a user, a password or a query, because "
            "settings are saved with the run."
        )
    if key_env and match[1] == "http" and is_far:
        tell(f"The key in {key_env} is sent to {match[2]} unencrypted, because `{name}` begins with http.")


def is_loopback(host: str) -> bool:
    """Returns whether the host of a URL is this machine. Raises `ValueError` if it is an address that cannot exist."""
    if re.search("[a-zA-Z]", host) and ":" not in host:
        return host.lower() == "localhost"
    return ipaddress.ip_address(host.strip("[]")).is_loopback


# Requests


@dataclass(frozen=True)
class Question:
    """A request to a model."""

    messages: tuple[dict[str, str], ...]  # chat messages with `role` and `content`; the first may be a system message
    sample: str = ""  # distinguishes questions with the same messages that need different answers
    max_tokens: int | None = None  # of the answer, if the endpoint has no lower limit

    def key(self, parameters: dict[str, Any]) -> str:
        """Returns the name of the answer's file. It depends on the messages, the parameters and the sample."""
        parts = [list(self.messages), parameters, self.sample]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


Count = Annotated[int, pydantic.Field(ge=0, le=10**9)]


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Answer:
    """
    The answer of a model. The numbers of tokens are 0 if the endpoint does not report them. Values that are no texts
    or counts raise a `ValueError`.
    """

    text: str
    input_tokens: Count
    output_tokens: Count


@dataclass
class Usage:
    """The use of an endpoint, in questions and tokens."""

    requests: int = 0
    failures: int = 0
    cached: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(eq=False)
class EndpointClient:
    """
    Sends questions to an endpoint, and keeps the answers on the disk.

    Args:
        endpoint ([`EndpointSettings`]): The endpoint.
        folder (`Path`): Where answers are kept. Several processes and runs may share it.
    """

    endpoint: EndpointSettings
    folder: Path
    usage: Usage = field(default_factory=Usage)  # since the last call of `take_usage`

    def take_usage(self) -> Usage:
        """Returns the usage since the last call of this method."""
        usage, self.usage = self.usage, Usage()
        return usage

    def ask(self, questions: Sequence[Question], stop_at_failure: bool = False) -> list[Answer | EndpointError]:
        """
        Sends all questions at the same time, as far as `concurrency` allows. A question that occurs twice is sent
        once. With `stop_at_failure`, no more requests are sent after a question got no answer.

        Returns:
            `list[Answer | EndpointError]`: The answer to each question, or the error that prevented it.
        """
        keys = [question.key(self.endpoint.parameters_for(question)) for question in questions]
        kept = {key: answer for key in dict.fromkeys(keys) if (answer := self.read(key)) is not None}
        missing = {key: question for key, question in zip(keys, questions, strict=True) if key not in kept}
        self.usage.cached += sum(key in kept for key in keys)
        results = self._request(missing, stop_at_failure) if missing else {}
        answers = [result for result in results.values() if isinstance(result, Answer)]
        self.usage.failures += len(missing) - len(answers)
        self.usage.input_tokens += sum(answer.input_tokens for answer in answers)
        self.usage.output_tokens += sum(answer.output_tokens for answer in answers)
        return [(kept | results)[key] for key in keys]

    def _request(self, missing: dict[str, Question], stop_at_failure: bool) -> dict[str, Answer | EndpointError]:
        problem, state = self.endpoint.problem(), random.getstate()
        if problem:
            return dict.fromkeys(missing, EndpointError(problem))
        self.usage.requests += len(missing)
        ends: list[EndpointError] = []  # why no more requests are sent
        thread = ThreadPoolExecutor(1)  # a notebook has an event loop of its own
        try:
            return thread.submit(asyncio.run, self._ask_all(missing, stop_at_failure, ends)).result()
        finally:
            ends.append(EndpointError("interrupted"))
            thread.shutdown(wait=False)  # a signal to a command does not wait for requests that are under way
            random.setstate(state)  # the client's retries draw random numbers

    async def _ask_all(
        self, missing: dict[str, Question], stop_at_failure: bool, ends: list[EndpointError]
    ) -> dict[str, Answer | EndpointError]:
        from openai import AsyncOpenAI

        endpoint, slots = self.endpoint, asyncio.Semaphore(self.endpoint.concurrency)

        async def answer(key: str) -> Answer | EndpointError:
            async with slots:
                if ends:
                    return ends[0]
                try:
                    result = await self._ask_one(sdk, missing[key])
                except EndpointError as error:
                    ends.extend([error] if stop_at_failure else [])
                    return error
            self.write(key, result)
            return result

        async with AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.key or "none",  # so that the client reads none from the environment
            max_retries=endpoint.tries - 1,
            http_client=limited_client(endpoint),
        ) as sdk:
            return dict(zip(missing, await asyncio.gather(*map(answer, missing)), strict=True))

    async def _ask_one(self, sdk: Any, question: Question) -> Answer:
        from openai import APIStatusError, OpenAIError

        endpoint = self.endpoint
        try:
            create = sdk.chat.completions.with_raw_response.create
            parameters = endpoint.parameters_for(question)
            body = (await create(messages=list(question.messages), **parameters)).http_response.content
        except (OpenAIError, ValueError, OverflowError) as error:  # of a text no UTF-8 can write, and of a date
            reason = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
            if isinstance(error, APIStatusError):
                reason = f"status {error.status_code}: {error.response.text}"
            raise EndpointError(f"{endpoint} gave no answer: {self._without_key(reason)}") from None
        try:
            values = from_json(body)
            used, message = values.get("usage") or {}, values["choices"][0]["message"]
            tokens = (used.get("prompt_tokens") or 0, used.get("completion_tokens") or 0)
            content = message.get("content")
            return Answer("" if content is None else self._without_key(content), *tokens)
        except (AttributeError, LookupError, TypeError, ValueError):
            raise EndpointError(f"{endpoint} gave no answer: it is no chat completion of OpenAI's interface") from None

    def _without_key(self, text: str) -> str:
        """Removes the key from a text, because an endpoint may repeat it, and it must not get into logs and files."""
        key = self.endpoint.key
        return text.replace(key, "[key]") if len(key) >= SHORTEST_KEY else text

    # The answers on the disk

    def read(self, key: str) -> Answer | None:
        """Returns a kept answer; `None` if there is none, or if its file is damaged."""
        path = self._path(key)
        try:
            return Answer(**from_json(path.read_bytes())) if path.is_file() else None
        except (ValueError, TypeError):
            return None

    def write(self, key: str, answer: Answer) -> None:
        """Keeps an answer. Other processes may write the same one."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(answer))

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


def limited_client(endpoint: EndpointSettings) -> Any:
    """
    Makes the HTTP client of an endpoint. It follows no redirect, which could send prompts to another host. A request
    has no headers from the environment, such as `OPENAI_ORG_ID`, and an answer only those that decide on retries. An
    answer is not compressed, has at most `MAX_BODY` bytes, and takes at most the endpoint's `timeout`.
    """
    import httpx2  # of OpenAI's client
    from openai import DefaultAsyncHttpxClient

    class LimitedClient(DefaultAsyncHttpxClient):
        async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
            own = {"accept-encoding": "identity"}
            if endpoint.key:
                own["authorization"] = f"Bearer {endpoint.key}"
            sent = httpx2.Request(
                request.method,
                request.url,
                headers={x: y for x, y in request.headers.items() if x in SENT} | own,
                content=request.content,
                extensions=request.extensions,  # its timeouts
            )
            try:
                async with asyncio.timeout(endpoint.timeout):
                    response = await super().send(sent, **{**options, "stream": True})
                    try:
                        body = await read_body(response)
                    finally:
                        await response.aclose()
            except TimeoutError:
                raise httpx2.ReadTimeout(f"no answer within {endpoint.timeout:g} s", request=request) from None
            headers = {x: y for x, y in response.headers.items() if x == "retry-after"}
            return httpx2.Response(response.status_code, headers=headers, content=body, request=request)

    async def read_body(response: httpx2.Response) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.ReadError("the answer is compressed, which the request excluded")
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            if len(body) > MAX_BODY:
                raise httpx2.ReadError(f"the answer has more than {MAX_BODY} bytes")
        return bytes(body)

    # No proxy can reach this machine itself
    trust_env = not is_loopback(urlsplit(endpoint.base_url).hostname or "")
    return LimitedClient(follow_redirects=False, timeout=endpoint.timeout, trust_env=trust_env)
