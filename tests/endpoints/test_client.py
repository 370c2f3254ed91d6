"""The providers' real clients against local servers that answer, fail, stall, refuse, and send garbage."""

import itertools
import json
import multiprocessing
import random
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from trl_multiagent.endpoints import Answer, EndpointClient, EndpointError, Question, make_endpoint
from trl_multiagent.endpoints import client as client_module
from trl_multiagent.endpoints.files import Ledger

from endpoint_server import EndpointServer, Reply, endpoint_server


KEY = "sk-secret-0123456789"
APIS = ["openai", "anthropic"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)
    monkeypatch.setattr(client_module, "FIRST_WAIT", 0.01)


def question(text="Why?", sample=""):
    return Question(({"role": "system", "content": "Be brief."}, {"role": "user", "content": text}), sample)


def make_client(server, folder, api="openai", **settings):
    base = server.url if api == "anthropic" else f"{server.url}/v1"
    endpoint = make_endpoint("some-model", base, "TEST_KEY", api, **settings)
    return EndpointClient(endpoint, Path(folder))


@pytest.mark.parametrize("api", APIS)
def test_an_answer(api, tmp_path):
    with endpoint_server(lambda request, number: "Because.") as server:
        client = make_client(
            server, tmp_path, api, temperature=0.5, extra_body={"seed": 7}, input_price=1e6, output_price=2e6
        )
        assert client.ask([question()]) == [Answer("Because.", 10, 5)]
        (request,), (headers,) = server.requests, server.headers
    assert headers["authorization"] == f"Bearer {KEY}"
    assert {name: request[name] for name in ("model", "max_tokens", "temperature", "seed")} == {
        "model": "some-model", "max_tokens": 2048, "temperature": 0.5, "seed": 7
    }  # fmt: skip
    if api == "anthropic":
        assert request["system"] == "Be brief." and request["messages"] == [{"role": "user", "content": "Why?"}]
    else:
        assert request["messages"] == list(question().messages)
    usage = client.take_usage()
    assert (usage.requests, usage.failures, usage.input_tokens, usage.output_tokens, usage.cost) == (1, 0, 10, 5, 20.0)
    assert client.take_usage().requests == 0


def test_all_questions_are_asked_at_the_same_time(tmp_path):
    def answer(request, number):
        assert server.wait_for(8)  # nobody is answered before all have asked
        return request["messages"][-1]["content"]

    state = random.getstate()
    with endpoint_server(answer) as server:
        client = make_client(server, tmp_path, concurrency=8)
        questions = [question(f"{k % 8}") for k in range(12)]  # some twice
        assert [x.text for x in client.ask(questions)] == [f"{k % 8}" for k in range(12)]
        assert len(server.requests) == 8
    with endpoint_server(lambda request, number: time.sleep(0.05) or "x") as server:
        make_client(server, tmp_path, concurrency=3).ask([question(f"other {k}") for k in range(9)])
        assert 1 <= server.most_active <= 3
    assert random.getstate() == state  # the training's random numbers


def test_what_was_answered_is_not_asked_again(tmp_path):
    with endpoint_server(lambda request, number: f"answer {number}") as server:
        client = make_client(server, tmp_path)
        (first,) = client.ask([question()])
        assert make_client(server, tmp_path).ask([question()]) == [first]  # of another process, or after a restart
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) == 2 and not any(path.stat().st_mode & 0o077 for path in files)  # nobody else reads them
        assert len(server.requests) == 1
        client.take_usage()
        others = [question(sample="2"), question("What?")]
        assert len({x.text for x in client.ask([question(), *others])}) == 3
        assert client.take_usage().cached == 1
        hot = make_client(server, tmp_path, temperature=1.0)
        assert hot.ask([question()])[0].text == "answer 3"  # other parameters
        for path in tmp_path.glob("answers/*/*.json"):
            path.write_text('{"text": "cut o')
        assert client.ask([question()])[0].text == "answer 4"
    # The cache is complete without the server, and does not depend on where it was
    assert client.ask([question()])[0].text == "answer 4"
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".tmp"]


def test_an_interrupted_call_keeps_what_was_answered(tmp_path):
    def answer(request, number):
        return "ok" if number < 3 else Reply("no", status=500)

    with endpoint_server(answer) as server:
        client = make_client(server, tmp_path, tries=1, concurrency=1)
        results = client.ask([question(str(k)) for k in range(6)], stop_at_failure=True)
        assert [isinstance(x, Answer) for x in results] == [True] * 3 + [False] * 3
        assert len(server.requests) == 4  # nothing is asked after the failure
        server.answer = lambda request, number: "later"
        texts = [x.text for x in make_client(server, tmp_path).ask([question(str(k)) for k in range(6)])]
    assert texts == ["ok"] * 3 + ["later"] * 3


OPENAI_TEXT = EndpointServer.completion("/v1/chat/completions", "late")
GARBAGE = {
    "empty": (Reply(), "no valid JSON"),
    "not JSON": (Reply("once upon a time"), "no valid JSON: once upon"),
    "another object": (Reply('{"choices": []}'), "JSON without an answer"),
    "blank": (Reply('{"choices": [{"message": {"content": " "}}]}'), "answered with an empty text"),
    "surrogates": (Reply('{"choices": [{"message": {"content": "\\ud800"}}]}'), "JSON without an answer"),
    "long": (Reply(EndpointServer.completion("", "x" * 2**20)), "a longer text than was allowed"),
    "deep": (Reply("[" * 200_000), "no valid JSON: [[["),
    "a huge number": (Reply('{"usage": {"prompt_tokens": ' + "9" * 5000 + "}}"), "no valid JSON: {"),
    "compressed": (Reply(OPENAI_TEXT, headers={"Content-Encoding": "gzip"}), "the answer is compressed"),
    "escapes": (Reply("\x1b]0;x\x07\x9b2J\u202e"), "no valid JSON: ·]0;x··2J·"),
    "cut": (Reply(OPENAI_TEXT, missing_bytes=50), "broke off"),
    "an error": (Reply('{"error": "overloaded"}', status=500), 'status 500: {"error": "overloaded"}'),
    "too late": (Reply(OPENAI_TEXT, stall=30.0), "has not answered within 0.3 s"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_an_error_of_its_request_and_is_asked_again(name, tmp_path):
    reply, message = GARBAGE[name]
    timeout = 0.3 if reply.stall else 20.0
    with endpoint_server(lambda request, number: reply) as server:
        client = make_client(server, tmp_path, tries=2, timeout=timeout)
        (error,) = client.ask([question()])
        assert isinstance(error, EndpointError) and message in str(error) and len(str(error)) < 500
        assert len(server.requests) == 2 and "\n" not in str(error)
        assert client.take_usage().failures == 1

        def recovers(request, number):
            return reply if number == 2 and "bad" in str(request) else "fine"

        server.answer = recovers
        answers = client.ask([question("bad"), question("good")])
    assert [x.text for x in answers] == ["fine", "fine"]


@pytest.mark.parametrize("charset", ["zlib_codec", "rot13", "undefined", "utf-16"])
def test_an_answer_is_utf_8_whatever_it_says(charset, tmp_path):
    reply = Reply(OPENAI_TEXT.replace("late", "é"), content_type=f"application/json; charset={charset}")
    with endpoint_server(lambda request, number: reply) as server:
        assert [x.text for x in make_client(server, tmp_path).ask([question()])] == ["é"]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("status", [200, 500])
def test_no_more_of_an_answer_is_read_than_the_limit(api, status, tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_BODY", 100_000)
    with endpoint_server(lambda request, number: Reply(" " * 100_001, status=status)) as server:
        (error,) = make_client(server, tmp_path, api, tries=1).ask([question()])
        assert str(error).endswith("the answer is longer than 100000 bytes")
        assert [headers["accept-encoding"] for headers in server.headers] == ["identity"]
        server.answer = lambda request, number: "x" * 99_000
        assert len(make_client(server, tmp_path, api).ask([question()])[0].text) == 99_000


@pytest.mark.parametrize("api", APIS)
def test_a_redirect_leads_no_prompt_to_another_host(api, tmp_path):
    with endpoint_server(lambda request, number: "Hello.") as other, endpoint_server(None) as server:
        server.answer = lambda request, number: Reply("moved", status=307, headers={"Location": f"{other.url}/v1"})
        (error,) = make_client(server, tmp_path, api).ask([question()])
        assert "status 307: moved" in str(error) and len(server.requests) == 1 and other.requests == []


@pytest.mark.parametrize("counts", [(0, 0), (10**4000, 10**4000), (-1, True), (None, "3")])
def test_impossible_numbers_of_tokens_are_estimated_and_spend_the_budget(counts, tmp_path):
    def answer(request, number):
        usage = dict(zip(("prompt_tokens", "completion_tokens"), counts, strict=True))
        return Reply(json.dumps({"choices": [{"message": {"content": "x" * 300}}], "usage": usage}))

    with endpoint_server(answer) as server:
        client = make_client(server, tmp_path, token_budget=190, max_tokens=90, input_price=1.0, output_price=1.0)
        results = [client.ask([question(sample=str(k))])[0] for k in range(3)]
        assert [type(x) for x in results] == [Answer, EndpointError, EndpointError] and len(server.requests) == 1
        assert client.ledger.tokens == 4 + 101


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("status", [400, 401, 404])
def test_what_is_refused_is_not_asked_again(api, status, tmp_path):
    with endpoint_server(lambda request, number: Reply(f"bad key {KEY}", status=status)) as server:
        client = make_client(server, tmp_path, api, concurrency=1)
        errors = client.ask([question(str(k)) for k in range(3)])
        assert len(server.requests) == (1 if status in (401, 403, 404) else 3)
    assert all(f"status {status}: bad key [key]" in str(error) and KEY not in str(error) for error in errors)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("after", ["0.2", "date"])
def test_rate_limits_are_waited_for(api, after, tmp_path):
    start = []

    def answer(request, number):
        start.append(time.monotonic())
        wait, waits = (formatdate(time.time() + 1, usegmt=True), 1) if after == "date" else (after, 3)
        return Reply("slow down", status=429, headers={"Retry-After": wait}) if number < waits else "at last"

    with endpoint_server(answer) as server:
        client = make_client(server, tmp_path, api, tries=1)
        assert client.ask([question()])[0].text == "at last"
    if after == "0.2":
        assert all(late - early >= 0.19 for early, late in itertools.pairwise(start))


def test_a_rate_limit_beyond_the_deadline_is_an_error_at_once(tmp_path):
    reply = Reply("tomorrow", status=429, headers={"Retry-After": "86400"})
    with endpoint_server(lambda request, number: reply) as server:
        (error,) = make_client(server, tmp_path).ask([question()])
    assert "status 429: tomorrow; the next try would be after the deadline" in str(error)


def test_a_call_has_a_deadline_and_keeps_what_came_in_time(tmp_path):
    def answer(request, number):
        return "quick" if "quick" in str(request) else Reply(stall=30.0)

    with endpoint_server(answer) as server:
        client = make_client(server, tmp_path, deadline=1.0)
        late, quick = client.ask([question("slow"), question("quick")])
        assert quick.text == "quick" and "has not answered all questions within 1 s" in str(late)
        assert client.ask([question("quick")])[0].text == "quick"


def test_nobody_is_there(tmp_path):
    with endpoint_server(lambda request, number: "x") as server:
        client = make_client(server, tmp_path)
    (error,) = client.ask([question()])
    assert "cannot be reached" in str(error) and client.take_usage().requests == 3


def test_a_token_budget_holds_over_requests_processes_and_restarts(tmp_path):
    with endpoint_server(lambda request, number: "x" * 30) as server:
        settings = {"max_tokens": 20, "token_budget": 100}  # a request is at most 24 tokens, and uses 15
        client = make_client(server, tmp_path, **settings)
        results = client.ask([question(str(k)) for k in range(10)])
        spent = sum(isinstance(x, Answer) for x in results)
        assert spent == len(server.requests) == 6  # 90 tokens; the next request could exceed 100
        assert "token budget of 100 is used up: 90 tokens were used" in str(results[-1])
        again = make_client(server, tmp_path, **settings)
        assert isinstance(again.ask([question("more")])[0], EndpointError)
        assert [x.text for x in again.ask([question("0")])] == ["x" * 30]  # what is there costs nothing
        assert len(server.requests) == 6


def ask_in_process(url, folder):
    endpoint = make_endpoint("some-model", f"{url}/v1")
    client = EndpointClient(endpoint, Path(folder))
    assert all(x.text == "same" for x in client.ask([question(str(k)) for k in range(20)]))


def test_several_processes_share_a_folder(tmp_path):
    with endpoint_server(lambda request, number: "same") as server:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=ask_in_process, args=(server.url, tmp_path)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
        client = make_client(server, tmp_path)
        client.ledger.update()
        assert client.ledger.requests == len(server.requests) and client.ledger.tokens == 15 * len(server.requests)
    assert len(list(tmp_path.glob("answers/*/*"))) == 20


@pytest.mark.parametrize("api", APIS)
def test_the_key_stays_in_the_process(api, tmp_path, caplog):
    caplog.set_level("DEBUG")

    def answer(request, number):
        return f"your key is {KEY}" if number else Reply(KEY, status=500)

    with endpoint_server(answer) as server:
        client = make_client(server, tmp_path, api)
        assert client.ask([question()])[0].text == "your key is [key]"
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2 and not any(KEY in text for text in [*files, caplog.text, repr(vars(client))])


def test_no_other_key_is_sent(tmp_path, monkeypatch):
    for name in "OPENAI_API_KEY OPENAI_ADMIN_KEY ANTHROPIC_API_KEY ANTHROPIC_AUTH_TOKEN DEEPSEEK_API_KEY".split():
        monkeypatch.setenv(name, KEY)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    with endpoint_server(lambda request, number: "x") as server:
        for model, api in (("deepseek-coder", None), ("claude-x", None), ("m", "anthropic"), ("m", None)):
            EndpointClient(make_endpoint(model, server.url, api=api), tmp_path / model).ask([question(str(api))])
        assert len(server.requests) == 4 and KEY not in json.dumps(server.headers)


@pytest.mark.parametrize("key", [None, "", "  ", "schl\u00fcssel", "a\nb"])
def test_without_a_key_nothing_is_sent(key, tmp_path, monkeypatch):
    monkeypatch.delenv("TEST_KEY")
    if key is not None:
        monkeypatch.setenv("TEST_KEY", key)
    with endpoint_server(lambda request, number: "x") as server:
        client = make_client(server, tmp_path)
        (error,) = client.ask([question()])
        assert "TEST_KEY" in str(error) and str(error) == client.endpoint.problem() and server.requests == []


def test_works_where_an_event_loop_runs(tmp_path):
    import asyncio

    async def in_a_notebook():
        return client.ask([question()])

    with endpoint_server(lambda request, number: "x") as server:
        client = make_client(server, tmp_path)
        assert asyncio.run(in_a_notebook())[0].text == "x"


@pytest.mark.parametrize(
    ("model", "api", "base_url", "key_env"),
    [
        ("deepseek-coder", "openai", "https://api.deepseek.com", "DEEPSEEK_API_KEY"),
        ("claude-3-5-sonnet", "anthropic", "https://api.anthropic.com", "ANTHROPIC_API_KEY"),
        ("qwen3-coder-plus", "openai", "https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY"),
        ("gpt-4o-mini", "openai", "https://api.openai.com/v1", "OPENAI_API_KEY"),
    ],
)
def test_a_name_says_where_the_model_is(model, api, base_url, key_env):
    endpoint = make_endpoint(model)
    assert (endpoint.api, endpoint.base_url, endpoint.key_env) == (api, base_url, key_env)
    limit = "max_completion_tokens" if "gpt" in model else "max_tokens"
    assert endpoint.parameters == {"model": model, limit: 2048}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"model": "llama"}, "The endpoint of the model 'llama' is not known: set `base_url`"),
        ({"model": "deepseek-coder", "api": "grpc"}, "`api` is 'grpc'; it must be one of 'openai', 'anthropic'"),
        ({"model": "claude", "key_env": KEY}, "`key_env` must be the name of an environment variable"),
        ({"model": "claude", "key_env": "gsk_abcdef"}, "capital letters"),
        ({"model": "x", "base_url": f"http://me:{KEY}@host/v1"}, "`base_url` must not have a user"),
        ({"model": "x", "base_url": f"http://host/v1?key={KEY}"}, "anything after a `\\?`"),
        ({"model": "x", "base_url": "localhost:8000"}, "`base_url` must be a URL"),
    ],
)
def test_impossible_endpoints(arguments, problem):
    with pytest.raises(ValueError, match=problem) as error_info:
        make_endpoint(**arguments)
    assert KEY not in str(error_info.value) and "gsk_abcdef" not in str(error_info.value)


def test_a_damaged_line_of_the_ledger_does_not_stop_a_run(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.path.write_text("[200, 2")  # the disk was full, or the machine stopped
    ledger.add(10, 1)
    ledger.add(20, 2)
    assert (ledger.tokens, Ledger(tmp_path).tokens) == (33, 0)
    again = Ledger(tmp_path)
    again.update()
    assert again.tokens == 33
