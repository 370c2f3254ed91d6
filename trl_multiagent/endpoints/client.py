"""
Sends many requests to an endpoint at the same time.

The requests go through the providers' own clients, which repeat nothing themselves: what is tried again, and when, is
decided here alone.
"""

import asyncio
import contextlib
import email.utils
import importlib
import json
import random
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_multiagent.endpoints.endpoint import ANTHROPIC, EndpointError, EndpointSettings
from trl_multiagent.endpoints.files import Answer, AnswerCache, Ledger, Question


RETRIED = (408, 409, 425, 429)  # and every status from 500 on
CONCERNS_ALL = (401, 402, 403, 404)  # statuses with which every question would be refused
FIRST_WAIT, LONGEST_WAIT = 0.5, 16.0  # seconds between attempts, doubled each time
MAX_BODY = 8 * 2**20  # bytes of an answer; the longest ones of models have about one million
MAX_REASON = 300  # characters of an endpoint's error message
MIN_KEY = 6  # shorter texts are not keys, and occur in any answer
MAX_COUNT = 10**9  # tokens of one request
LONGEST_TOKEN = 200  # characters
CHARACTERS_PER_TOKEN = 3  # estimate, if the endpoint does not report the number


@dataclass
class Usage:
    """The use of an endpoint. `requests` includes repeated ones; `failures` and `cached` count questions."""

    requests: int = 0
    failures: int = 0
    cached: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0


class EndpointClient:
    """
    Sends questions to an endpoint, keeps the answers on the disk, and counts their cost.

    Args:
        endpoint ([`EndpointSettings`]): The endpoint.
        folder (`Path`): Folder of the record of used tokens.
        cache_folder (`Path`, *optional*): Where answers are kept; by default in `folder`. Runs may share it.
    """

    def __init__(self, endpoint: EndpointSettings, folder: Path, cache_folder: Path | None = None):
        self.endpoint = endpoint
        self.cache = AnswerCache(folder / "answers" if cache_folder is None else cache_folder)
        self.ledger = Ledger(folder)
        self.usage = Usage()  # since the last call of `take_usage`
        self._random = random.Random()  # the global one belongs to the training

    def take_usage(self) -> Usage:
        """Returns the usage since the last call of this method."""
        usage, self.usage = self.usage, Usage()
        return usage

    def ask(self, questions: Sequence[Question], stop_at_failure: bool = False) -> list[Answer | EndpointError]:
        """
        Sends all questions at the same time, as far as `concurrency` allows. A question that occurs twice is sent
        once.

        Args:
            questions (`Sequence[Question]`): The questions.
            stop_at_failure (`bool`, *optional*, defaults to `False`): Whether to send no more requests after a
                question got no answer. Requests that are under way are completed, and their answers kept.

        Returns:
            `list[Answer | EndpointError]`: The answer to each question, or the error that prevented it.
        """
        keys = [question.key(self.endpoint.parameters) for question in questions]
        results: dict[str, Answer | EndpointError] = {}
        missing: dict[str, Question] = {}
        for key, question in zip(keys, questions, strict=True):
            answer = self.cache.read(key)
            if answer is None:
                missing[key] = question
            else:
                results[key] = answer
                self.usage.cached += 1
        if missing:
            problem = self.endpoint.problem()
            if problem is None:
                results |= run_in_thread(_Call(self, stop_at_failure).ask(missing))
            else:
                results |= dict.fromkeys(missing, EndpointError(problem, concerns_all=True))
            self.usage.failures += sum(isinstance(results[key], EndpointError) for key in missing)
        return [results[key] for key in keys]

    def count(self, input_tokens: int, output_tokens: int) -> None:
        self.usage.input_tokens += input_tokens
        self.usage.output_tokens += output_tokens
        self.usage.cost += self.endpoint.cost(input_tokens, output_tokens)
        self.ledger.add(input_tokens, output_tokens)


class _Call:
    """One call of [`EndpointClient.ask`]. Its coroutines share an event loop in a thread of their own."""

    def __init__(self, client: EndpointClient, stop_at_failure: bool):
        self.client, self.endpoint, self.stop_at_failure = client, client.endpoint, stop_at_failure
        self.key = self.endpoint.read_key()
        self.library: Any = importlib.import_module(self.endpoint.api)  # the provider's package has the API's name
        self.end = time.monotonic() + self.endpoint.deadline
        self.slots = asyncio.Semaphore(self.endpoint.concurrency)
        self.problem: EndpointError | None = None  # why no more requests are sent
        self.reserved = 0  # tokens of the requests that are under way, at most
        self.changed = asyncio.Condition()  # of `reserved`
        client.ledger.update()

    async def ask(self, questions: dict[str, Question]) -> dict[str, Answer | EndpointError]:
        deadline = self.endpoint.deadline
        async with self.connect() as sdk:
            tasks = {key: asyncio.create_task(self.answer(sdk, key, x)) for key, x in questions.items()}
            _, late = await asyncio.wait(tasks.values(), timeout=deadline)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        too_late = EndpointError(f"{self.endpoint} has not answered all questions within {deadline:g} s")
        return {key: too_late if task.cancelled() else task.result() for key, task in tasks.items()}

    def connect(self) -> AbstractAsyncContextManager[Any]:
        """
        Returns the provider's client. It reads no key from the environment, repeats no request, reads at most
        `MAX_BODY` bytes of an answer, and follows no redirect, because a redirect could send prompts to another host.
        """
        endpoint, library = self.endpoint, self.library
        settings: dict[str, Any] = {"follow_redirects": False, "event_hooks": {"response": [read_body]}}
        settings["headers"] = {"Accept-Encoding": "identity"}  # a short compressed text could become a very long one
        if endpoint.is_local:  # no proxy can reach this machine itself
            settings |= {"trust_env": False, "mounts": {"all://": None, "http://": None, "https://": None}}
        client_class = library.AsyncAnthropic if endpoint.api == ANTHROPIC else library.AsyncOpenAI
        return client_class(
            http_client=library.DefaultAsyncHttpxClient(**settings),
            base_url=endpoint.base_url,
            api_key=self.key or "none",
            max_retries=0,
            timeout=endpoint.timeout,
        )

    async def answer(self, sdk: Any, key: str, question: Question) -> Answer | EndpointError:
        """Returns the answer to a question and caches it, or returns the error that prevented it."""
        async with self.slots:
            try:
                answer = await self.answer_with_retries(sdk, question)
            except EndpointError as error:
                if error.concerns_all or self.stop_at_failure:
                    self.problem = self.problem or error
                return error
        self.client.cache.write(key, answer)
        return answer

    async def answer_with_retries(self, sdk: Any, question: Question) -> Answer:
        tries = waits = 0
        while True:
            if self.problem is not None:
                raise self.problem
            try:
                return await self.request(sdk, question)
            except EndpointError as error:
                tries += error.wait is None
                if not error.retry or tries >= self.endpoint.tries:
                    raise
                wait = min(FIRST_WAIT * 2 ** min(waits, 9), LONGEST_WAIT) * self.client._random.uniform(0.5, 1.0)
                wait, waits = max(wait, error.wait or 0.0), waits + 1
                if time.monotonic() + wait >= self.end:
                    raise EndpointError(f"{error}; the next try would be after the deadline of the call") from None
            await asyncio.sleep(wait)

    async def request(self, sdk: Any, question: Question) -> Answer:
        """Sends one request, if the budget allows it."""
        endpoint = self.endpoint
        most = question.num_characters // CHARACTERS_PER_TOKEN + endpoint.max_tokens
        async with self.changed:
            await self.changed.wait_for(lambda: self.reserved == 0 or self.is_affordable(most))
            if not self.is_affordable(most):
                raise EndpointError(
                    f"the token budget of {endpoint.token_budget} is used up: {self.client.ledger.tokens} tokens "
                    "were used, and the "
                    f"next request may use {most}",
                    concerns_all=True,
                )
            self.reserved += most
        self.client.usage.requests += 1
        try:
            body = await asyncio.wait_for(self.send(sdk, question), endpoint.timeout)
            return self.read(body, question)
        except asyncio.TimeoutError:
            raise EndpointError(f"{endpoint} has not answered within {endpoint.timeout:g} s", retry=True) from None
        finally:
            async with self.changed:
                self.reserved -= most
                self.changed.notify_all()

    def is_affordable(self, tokens: int) -> bool:
        budget = self.endpoint.token_budget
        return budget is None or self.client.ledger.tokens + self.reserved + tokens <= budget

    async def send(self, sdk: Any, question: Question) -> str:
        """Sends one request and returns the body of the answer. Raises [`EndpointError`] if there is none."""
        endpoint, library = self.endpoint, self.library
        messages = list(question.messages)
        arguments: dict[str, Any] = dict(endpoint.parameters)
        if endpoint.api == ANTHROPIC:
            create, base_error = sdk.messages.with_raw_response.create, library.AnthropicError
            system = [message["content"] for message in messages if message["role"] == "system"]
            messages = [message for message in messages if message["role"] != "system"]
            arguments |= {"system": "\n\n".join(system)} if system else {}
        else:
            create, base_error = sdk.chat.completions.with_raw_response.create, library.OpenAIError
        try:
            raw = await create(messages=messages, **arguments)
        except library.APIStatusError as error:
            raise self.refused(error.status_code, error.response.headers, error.response.text) from None
        except library.APITimeoutError:
            raise EndpointError(f"{endpoint} has not answered within {endpoint.timeout:g} s", retry=True) from None
        except library.APIConnectionError as error:
            cause = error.__cause__ or error
            reason = self.without_key(f"{type(cause).__name__}: {cause}")
            raise EndpointError(f"{endpoint} cannot be reached, or broke off: {reason}", retry=True) from None
        except base_error as error:
            raise EndpointError(f"{endpoint}: {self.without_key(str(error))}") from None
        return raw.http_response.text

    def refused(self, status: int, headers: Any, body: str) -> EndpointError:
        retry = status in RETRIED or status >= 500
        return EndpointError(
            f"{self.endpoint} answered with status {status}: {self.excerpt(body)}",
            retry=retry,
            wait=retry_after(headers.get("retry-after")) if status in (429, 503) else None,
            concerns_all=status in CONCERNS_ALL,
        )

    def read(self, received: str, question: Question) -> Answer:
        """Reads the body of an answer, and counts its tokens. Raises [`EndpointError`] if it has no text."""
        try:
            body = json.loads(received)
        except (ValueError, RecursionError):
            raise self.garbage("no valid JSON", received) from None
        try:
            usage = body.get("usage") or {}
            if self.endpoint.api == ANTHROPIC:
                texts = [block["text"] for block in body["content"] if block["type"] == "text"]
                truncated = body.get("stop_reason") == "max_tokens"
                counts = usage.get("input_tokens"), usage.get("output_tokens")
            else:
                content = body["choices"][0]["message"]["content"]
                texts = [part["text"] for part in content] if isinstance(content, list) else [content or ""]
                truncated = body["choices"][0].get("finish_reason") == "length"
                counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
            text = "".join(texts)
            text.encode()  # lone surrogates, which JSON can hold, would fail later
        except (AttributeError, LookupError, TypeError, UnicodeEncodeError):
            raise self.garbage("JSON without an answer", received) from None
        input_tokens = as_count(counts[0]) or question.num_characters // CHARACTERS_PER_TOKEN
        output_tokens = as_count(counts[1]) or len(text) // CHARACTERS_PER_TOKEN + 1
        self.client.count(input_tokens, output_tokens)
        if len(text) > LONGEST_TOKEN * self.endpoint.max_tokens:
            raise self.garbage("a longer text than was allowed", text)
        if not text.strip():
            limit = self.endpoint.max_tokens
            advice = f" after {output_tokens} tokens: raise the limit of {limit}" if truncated else ""
            raise EndpointError(f"{self.endpoint} answered with an empty text{advice}", retry=not truncated)
        return Answer(self.without_key(text), input_tokens, output_tokens, truncated)

    def garbage(self, what: str, text: str) -> EndpointError:
        return EndpointError(f"{self.endpoint} answered with {what}: {self.excerpt(text)}", retry=True)

    def excerpt(self, text: str) -> str:
        text = " ".join(self.without_key(text).split()) or "(nothing)"
        return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."

    def without_key(self, text: str) -> str:
        """
        Removes the key from a received text. An endpoint may repeat the key, which must not get into logs and files.
        """
        return text.replace(self.key, "[key]") if self.key is not None and len(self.key) >= MIN_KEY else text


async def read_body(response: Any) -> None:
    """
    Reads the body of an answer with any status. Raises `ReadError` if it is compressed or longer than `MAX_BODY`.
    """
    from httpx2 import ByteStream, ReadError  # the HTTP library of the providers' clients

    if response.headers.get("content-encoding", "identity") != "identity":
        raise ReadError("the answer is compressed, which the request did not allow")
    body = bytearray()
    async with contextlib.aclosing(response.stream):
        async for chunk in response.stream:
            body += chunk
            if len(body) > MAX_BODY:
                raise ReadError(f"the answer is longer than {MAX_BODY} bytes")
    response.stream = ByteStream(bytes(body))
    response.encoding = "utf-8"  # JSON's encoding; the header could name a codec that does not decode text


def as_count(value: Any) -> int | None:
    """
    Returns a value as a number of tokens, or `None` if it is not one. 0 is not, because it would never use up a
    budget.
    """
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT else None


def retry_after(value: str | None) -> float | None:
    """Returns the seconds to wait by the header Retry-After, a number or a date; `None` if it has neither."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


def run_in_thread(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine to its end, even if an event loop already runs, as in a notebook. Ctrl-C cancels it."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)
    with contextlib.closing(loop), ThreadPoolExecutor(1, thread_name_prefix="endpoint") as pool:
        result = pool.submit(loop.run_until_complete, task)
        try:
            return result.result()
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
            raise
