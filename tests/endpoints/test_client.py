"""OpenAI's client against local servers that answer, fail, stall and refuse."""

import errno
import gzip
import json
import random
import time
from pathlib import Path

import pytest

from trl_multiagent.endpoints import MAX_BODY, Answer, EndpointClient, EndpointError, Question, make_endpoint

from endpoint_server import EndpointServer, Reply


KEY = "sk-secret-0123456789"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def question(text="Why?", sample=""):
    return Question(({"role": "system", "content": "Be brief."}, {"role": "user", "content": text}), sample)


def make_client(server, folder, **settings):
    return EndpointClient(make_endpoint("some-model", f"{server.url}/v1", "TEST_KEY", **settings), Path(folder))


def test_an_answer(tmp_path):
    with EndpointServer(lambda request, number: "Because.") as server:
        client = make_client(server, tmp_path, temperature=0.5, extra_body={"seed": 7})
        assert client.ask([question()]) == [Answer("Because.", 10, 5)]
        (request,), (headers,) = server.requests, server.headers
    assert headers["authorization"] == f"Bearer {KEY}"
    expected = {"model": "some-model", "max_tokens": 2048, "temperature": 0.5, "seed": 7}
    assert request == {**expected, "messages": list(question().messages)}
    usage = client.take_usage()
    assert (usage.requests, usage.failures, usage.input_tokens, usage.output_tokens) == (1, 0, 10, 5)
    assert client.take_usage().requests == 0


def test_all_questions_are_asked_at_the_same_time(tmp_path):
    def answer(request, number):
        assert server.wait_for(8)  # nobody is answered before all have asked
        return request["messages"][-1]["content"]

    with EndpointServer(answer) as server:
        client = make_client(server, tmp_path, concurrency=8)
        questions = [question(f"{k % 8}") for k in range(12)]  # some twice
        assert [x.text for x in client.ask(questions)] == [f"{k % 8}" for k in range(12)]
        assert len(server.requests) == 8
    with EndpointServer(lambda request, number: time.sleep(0.05) or "x") as server:
        make_client(server, tmp_path, concurrency=3).ask([question(f"other {k}") for k in range(9)])
        assert 1 <= server.most_active <= 3


def test_what_was_answered_is_not_asked_again(tmp_path):
    with EndpointServer(lambda request, number: f"answer {number}") as server:
        client = make_client(server, tmp_path)
        (first,) = client.ask([question()])
        assert make_client(server, tmp_path).ask([question()]) == [first]  # of another process, or after a restart
        assert len(server.requests) == 1
        client.take_usage()
        others = [question(sample="2"), question("What?")]
        assert len({x.text for x in client.ask([question(), *others])}) == 3
        assert client.take_usage().cached == 1
        hot = make_client(server, tmp_path, temperature=1.0)
        assert hot.ask([question()])[0].text == "answer 3"  # other parameters
        for path in tmp_path.glob("*/*.json"):
            path.write_text('{"text": "cut o')
        assert client.ask([question()])[0].text == "answer 4"
    # The folder is complete without the server, and does not depend on where it was
    assert client.ask([question()])[0].text == "answer 4"


def test_an_interrupted_call_keeps_what_was_answered(tmp_path):
    def answer(request, number):
        return "ok" if number < 3 else Reply("no", status=500)

    with EndpointServer(answer) as server:
        client = make_client(server, tmp_path, tries=1, concurrency=1)
        results = client.ask([question(str(k)) for k in range(6)], stop_at_failure=True)
        assert [isinstance(x, Answer) for x in results] == [True] * 3 + [False] * 3
        assert len(server.requests) == 4  # nothing is asked after the failure
        server.answer = lambda request, number: "later"
        texts = [x.text for x in make_client(server, tmp_path).ask([question(str(k)) for k in range(6)])]
    assert texts == ["ok"] * 3 + ["later"] * 3


TEXT = EndpointServer.completion("late")
NO_COMPLETION = "no chat completion of OpenAI's interface"


def changed(**values):
    return Reply(json.dumps({**json.loads(TEXT), **values}))


def with_content(content):
    return changed(choices=[{"message": {"content": content}}])


FAILURES = {  # reply, message, number of requests with two tries
    "not JSON": (Reply("once upon a time"), "gave no answer", 1),
    "a page": (Reply("<html>", content_type="text/html"), NO_COMPLETION, 1),
    "another object": (Reply('{"error": "overloaded"}'), NO_COMPLETION, 1),
    "cut": (Reply(TEXT, missing_bytes=50), "some-model at http://127", 2),
    "an error": (Reply(f"overloaded,\n{KEY}", status=500), "status 500: overloaded, [key]", 2),
    "a late date": (Reply("no", 429, {"Retry-After": f"Mon, 1 Jan 2020 {10**399}:00:00"}), "no answer", 1),
    "refused": (Reply(f"bad key {KEY}", status=401), "status 401: bad key [key]", 1),
    "too late": (Reply(TEXT, stall=30.0), "timed out", 2),
    "a header without end": (Reply(drips=True), "timed out", 2),
    "huge": (Reply(TEXT + " " * MAX_BODY), f"more than {MAX_BODY} bytes", 2),
    "compressed": (Reply(gzip.compress(TEXT.encode()), headers={"Content-Encoding": "gzip"}), "compressed", 2),
    "another encoding": (Reply("no", status=400, content_type="text/plain; charset=hex"), "status 400: no", 1),
    "deep": (Reply("[" * 200_000), NO_COMPLETION, 1),
    "no choice": (changed(choices=[]), NO_COMPLETION, 1),
    "choices that are null": (changed(choices=[None]), NO_COMPLETION, 1),
    "choices that are a text": (changed(choices="abc"), NO_COMPLETION, 1),
    "parts": (with_content([{"type": "text", "text": "x"}]), NO_COMPLETION, 1),
    "a number": (with_content(0), NO_COMPLETION, 1),
    "half a character": (with_content("\ud800"), NO_COMPLETION, 1),
    "tokens as a text": (changed(usage={"prompt_tokens": "10"}), NO_COMPLETION, 1),
    "negative tokens": (changed(usage={"completion_tokens": -5}), NO_COMPLETION, 1),
    "too many tokens": (Reply(TEXT.replace("10", "1" * 5000)), NO_COMPLETION, 1),
    "usage that is a list": (changed(usage=[1]), NO_COMPLETION, 1),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_one_line_and_concerns_its_question(name, tmp_path):
    reply, message, number = FAILURES[name]
    state = random.getstate()
    with EndpointServer(lambda request, number: reply if "bad" in str(request) else "fine") as server:
        client = make_client(server, tmp_path, tries=2, timeout=1.0 if reply.stall or reply.drips else 20.0)
        error, good = client.ask([question("bad"), question("good")])
        assert isinstance(error, EndpointError) and message in str(error) and "\n" not in str(error)
        assert KEY not in str(error) and good.text == "fine" and len(server.requests) == 1 + number
        assert client.take_usage().failures == 1
        server.answer = lambda request, number: "fine"
        assert [x.text for x in client.ask([question("bad")])] == ["fine"]
    assert random.getstate() == state  # the training's random numbers


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_no_redirect_is_followed(status, tmp_path):
    with EndpointServer(lambda request, number: "x") as other:
        away = Reply("moved", status, {"Location": f"{other.url}/v1/chat/completions"})
        with EndpointServer(lambda request, number: away) as server:
            (error,) = make_client(server, tmp_path).ask([question()])
        assert f"status {status}: moved" in str(error) and len(server.requests) == 1 and other.requests == []


def test_a_full_disk_is_an_error_of_one_line(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with EndpointServer(lambda request, number: "x") as server, pytest.raises(OSError, match="No space") as error:
        monkeypatch.setattr("os.fsync", full)
        make_client(server, tmp_path).ask([question()])
    assert str(tmp_path) in error.value.filename and not list(tmp_path.rglob("*.json"))


def test_no_other_key_is_sent(tmp_path, monkeypatch):
    for name in "OPENAI_API_KEY OPENAI_ADMIN_KEY ANTHROPIC_API_KEY DEEPSEEK_API_KEY".split():
        monkeypatch.setenv(name, KEY)
    with EndpointServer(lambda request, number: "x") as server:
        for model in ("deepseek-coder", "claude-x", "gpt-4o", "m"):
            EndpointClient(make_endpoint(model, f"{server.url}/v1"), tmp_path / model).ask([question()])
        assert len(server.requests) == 4 and KEY not in str(server.headers)


def test_headers_are_those_of_the_settings_alone(tmp_path, monkeypatch):
    for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "private")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: private\nX-Team: private")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # it could not reach this machine
    with EndpointServer(lambda request, number: "x") as server:
        assert make_client(server, tmp_path).ask([question()]) == [Answer("x", 10, 5)]
    (headers,) = server.headers
    expected = {"host", "content-length", "accept", "content-type", "user-agent"}
    assert headers.keys() == {*expected, "accept-encoding", "authorization"}
    assert headers["authorization"] == f"Bearer {KEY}" and "private" not in str(headers)


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "SSL_CERT_FILE"])
def test_an_environment_that_cannot_be_used_is_one_line(name, tmp_path, monkeypatch):
    monkeypatch.setenv(name, "foo://x")
    (error,) = EndpointClient(make_endpoint("m", "https://node7/v1"), tmp_path).ask([question()])
    assert "the proxies or certificates that the environment names cannot be used" in str(error)


def test_a_repeated_key_is_not_kept(tmp_path):
    with EndpointServer(lambda request, number: f"It is {KEY}.") as server:
        (answer,) = make_client(server, tmp_path).ask([question()])
    assert answer.text == "It is [key]."
    assert not [path for path in tmp_path.rglob("*.json") if KEY in path.read_text()]


KEPT = {
    "cut": '{"text": "cut o',
    "deep": "[" * 200_000,
    "no object": "[1]",
    "a number": '{"text": 5, "input_tokens": 1, "output_tokens": 1}',
    "a text": '{"text": "x", "input_tokens": "1", "output_tokens": 1}',
    "negative": '{"text": "x", "input_tokens": -1, "output_tokens": 1}',
}


@pytest.mark.parametrize("name", KEPT)
def test_a_damaged_kept_answer_is_asked_again(name, tmp_path):
    with EndpointServer(lambda request, number: f"answer {number}") as server:
        client = make_client(server, tmp_path)
        client.ask([question()])
        (path,) = tmp_path.glob("*/*.json")
        path.write_text(KEPT[name])
        assert client.ask([question()]) == client.ask([question()]) == [Answer("answer 1", 10, 5)]


def test_a_key_that_is_sent_unencrypted_is_told(capfd):
    for url in ("http://127.0.0.1/v1", "http://localhost:8000/v1", "http://[::1]/v1", "https://node7/v1"):
        make_endpoint("m", url, "TEST_KEY")
    make_endpoint("m", "http://node7/v1")
    assert capfd.readouterr().err == ""
    for _ in range(2):
        make_endpoint("m", "http://node7:8000/v1", "TEST_KEY")
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "The key in TEST_KEY is sent to node7 unencrypted, because `base_url` begins with http."


@pytest.mark.parametrize("key", ["two\nlines", "Schlüssel"])
def test_a_text_that_is_no_key_is_not_sent(key, tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_KEY", key)
    with EndpointServer(lambda request, number: "x") as server:
        (error,) = make_client(server, tmp_path).ask([question()])
        assert "TEST_KEY has characters that no key has" in str(error) and key not in str(error)
        assert server.requests == []


@pytest.mark.parametrize("key", [None, "", "  "])
def test_without_a_key_nothing_is_sent(key, tmp_path, monkeypatch):
    monkeypatch.delenv("TEST_KEY")
    if key is not None:
        monkeypatch.setenv("TEST_KEY", key)
    with EndpointServer(lambda request, number: "x") as server:
        client = make_client(server, tmp_path)
        (error,) = client.ask([question()])
        assert "TEST_KEY" in str(error) and str(error) == client.endpoint.problem() and server.requests == []


@pytest.mark.parametrize(
    ("model", "api", "base_url", "key_env"),
    [
        ("deepseek-coder", "openai", "https://api.deepseek.com", "DEEPSEEK_API_KEY"),
        ("claude-3-5-sonnet", "anthropic", "https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
        ("qwen3-coder-plus", "openai", "https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY"),
        ("gpt-4o-mini", "openai", "https://api.openai.com/v1", "OPENAI_API_KEY"),
    ],
)
def test_a_name_says_where_the_model_is(model, api, base_url, key_env, tmp_path, monkeypatch):
    endpoint = make_endpoint(model)
    assert (endpoint.api, endpoint.base_url, endpoint.key_env) == (api, base_url, key_env)
    limit = "max_completion_tokens" if "gpt" in model else "max_tokens"
    assert endpoint.parameters == {"model": model, limit: 2048}
    # A stand-in for the provider gets the request, and its key
    monkeypatch.setenv(key_env, f"key of {model}")
    with EndpointServer(lambda request, number: "Hello.") as server:
        stand_in = make_endpoint(model, f"{server.url}/v1", key_env)
        (answer,) = EndpointClient(stand_in, tmp_path).ask([question()])
        assert answer.text == "Hello." and server.headers[0]["authorization"] == f"Bearer key of {model}"
        assert server.requests[0]["messages"] == list(question().messages)


def test_a_url_may_be_that_of_the_requests():
    for url in ("http://h/v1", "http://h/v1/chat/completions", "http://h/v1/messages"):
        assert make_endpoint("m", url).base_url == "http://h/v1"


NO_URLS = ["localhost:8000", "ftp://h/v1", "file:///etc/passwd", "http://", "http:///v1", "http://h:99999/v1"]
NO_URLS += ["http://[:1]/", "http://999.1.1.1/", "http://h/v1\n", "http://h\r\nX: y/v1", "http://h/v1\0"]
NO_URLS += ["http://h/v 1", "http://h\\@o/v1", "http://hö/", "http://h/" + "a" * 70_000]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"model": "llama"}, "The endpoint of the model 'llama' is not known: set `base_url`"),
        ({"model": "claude", "key_env": KEY}, "`key_env` must be the name of an environment variable"),
        ({"model": "claude", "key_env": "gsk_abcdef"}, "capital letters"),
        ({"model": "x", "base_url": f"http://me:{KEY}@host/v1"}, "without a user"),
        ({"model": "x", "base_url": f"http://host/v1?key={KEY}"}, "or a query"),
        *(({"model": "x", "base_url": url}, "`base_url` must be a URL") for url in NO_URLS),
    ],
)
def test_impossible_endpoints(arguments, problem):
    with pytest.raises(ValueError, match=problem) as error_info:
        make_endpoint(**arguments)
    assert KEY not in str(error_info.value) and "gsk_abcdef" not in str(error_info.value)
