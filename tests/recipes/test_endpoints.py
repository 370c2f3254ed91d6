"""Recipes that ask another model, run as users run them: an expert between turns, and a comparator of preferences."""

import importlib.util
import json
import socket
from pathlib import Path

import pytest

from trl_multiagent import cli
from trl_multiagent.configs.recipes.demo.task import TASK
from trl_multiagent.runs.run import run_recipe

from endpoint_server import EndpointServer, Reply


KEY = "sk-secret-0123456789"
EDITS = '{"aux": "Return a list.", "main": "Use aux."}'


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXPERT_KEY", KEY)
    monkeypatch.delenv("DEEPSEEK_API_KEY", raising=False)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


@pytest.fixture
def train(tiny_model, shared_data):
    def run(url, *argv, **external):
        settings = {"mode": "expert_edits", "expert_model": "m", "expert_base_url": f"{url}/v1", **external}
        settings = {"expert_api_key_env": "EXPERT_KEY", "expert_tries": 1, **settings}
        arguments = [
            *("--override", f"agent_model.name={tiny_model}", f"dataset.name={shared_data / 'humaneval.jsonl'}"),
            *("dataset.train_split=test[:2]", "magrpo.num_turns=2", "magrpo.num_generations=2"),
            *(f"external.{name}={value}" for name, value in settings.items()),
            *("--max_completion_length", "6", "--logging_steps", "1", "--disable_tqdm", "--output_dir", "run"),
            *("--max_steps", "2", "--save_steps", "1", *argv),
        ]
        run_recipe("magrpo", TASK, arguments, prog="train")

    return run


def texts_in(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_team_is_trained_with_an_expert(train, capsys):
    def answer(request, number):
        return Reply(f"Bearer {KEY}", status=500) if number == 0 else EDITS

    with EndpointServer(answer) as server:
        train(server.url, "--log_completions", expert_on_failure="plain")
        assert 2 <= len(server.requests) <= 4
        assert all(headers["authorization"] == f"Bearer {KEY}" for headers in server.headers)
        logged = json.loads(Path("run/checkpoint-2/trainer_state.json").read_text())["log_history"]
        steps = [entry for entry in logged if "reward/expert/requests" in entry]
        assert sum(entry["reward/expert/failures"] for entry in steps) >= 1
        assert sum(entry["reward/expert/input_tokens"] for entry in steps) == 10 * (len(server.requests) - 1)
    out, err = capsys.readouterr()
    assert "expert_edits" in Path("run/config.yaml").read_text()
    files = texts_in("run")
    assert len(files) > 10 and any("_expert" in str(path) for path in files)
    assert not [path for path, text in files.items() if KEY.encode() in text]
    assert KEY not in out + err and "EXPERT_KEY" in Path("run/config.yaml").read_text()


def test_without_an_expert_the_run_ends_with_one_line_and_nothing_is_lost(train, capsys):
    """The expert is gone in the second step. The run goes on from its checkpoint as if nothing had happened."""
    gone = Reply(f"no {KEY}", status=503)

    def answer(request, number):
        return EDITS if number < 2 else gone

    with EndpointServer(answer) as server:
        with pytest.raises(SystemExit) as exit_info:
            train(server.url)
        err = capsys.readouterr().err
        (line,) = [line for line in err.splitlines() if "error:" in line]
        assert exit_info.value.code == 2 and "status 503: no [key]" in line and "Traceback" not in err
        assert line.startswith("train: error: The expert proposed no edits for 2 of 2 answers")
        assert line.endswith("The last complete checkpoint is run/checkpoint-1.")
        server.answer = lambda request, number: EDITS
        train(server.url, "--resume_from_checkpoint", "run/checkpoint-1")
        train(server.url, "--output_dir", "other")
    assert json.loads(Path("run/checkpoint-2/trainer_state.json").read_text())["global_step"] == 2
    weights = [Path(folder, "agents", "main", "model.safetensors").read_bytes() for folder in ("run", "other")]
    assert weights[0] == weights[1]
    assert not [path for path, text in texts_in("run").items() if KEY.encode() in text]


@pytest.mark.parametrize(
    ("external", "problem"),
    [
        ({"expert_api_key_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY, which must hold the key for m"),
        ({"expert_api_key_env": KEY}, "`external.expert_api_key_env` must be the name of an environment variable"),
        ({"expert_api_key": KEY}, "`external.expert_api_key` cannot be used"),
        ({"expert_base_url": f"http://{KEY}@h/v1"}, "`external.expert_base_url` must be a URL"),
    ],
)
def test_wrong_settings_are_one_line(external, problem, train, refused, monkeypatch):
    monkeypatch.setattr("trl_multiagent.runs.prepared.PreparedRun.load_team", lambda *args: pytest.fail("loaded"))
    line = refused(train, "http://127.0.0.1:9", **external)
    assert problem in line and KEY not in line
    assert not Path("run").exists()


def test_a_missing_package_is_one_line_before_anything_is_loaded(train, refused, monkeypatch):
    monkeypatch.setattr("trl_multiagent.runs.prepared.PreparedRun.load_team", lambda *args: pytest.fail("loaded"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *args: None if name == "openai" else find_spec(name, *args)
    )
    line = refused(train, "http://127.0.0.1:9")
    assert 'the package openai is not installed: pip install "openai>=' in line


def test_a_dry_run_says_what_would_be_asked_and_contacts_nobody(train, capsys, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("contacted"))
    train("http://127.0.0.1:9", "--dry_run", expert_api_key_env="NO_SUCH_KEY", expert_max_tokens=100)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  expert ")]
    # Two steps of one item, with two joint actions to continue
    assert "m, 4 requests with about" in line and "400 answer tokens at most" in line and "NO_SUCH_KEY" in line
    assert not Path("run").exists()


# Preferences


def collect(tiny_model, shared_data, url, *argv, code=None):
    arguments = [
        *("collect", "--override", f"agent_model.name={tiny_model}"),
        f"dataset.name={shared_data / 'humaneval.jsonl'}",
        *("dataset.train_split=test[:3]", "--preference_num_candidates", "2", "--max_completion_length", "40"),
        *("--comparator_policy", "api", "--comparator_api_model", "m", "--comparator_api_url", f"{url}/v1"),
        *("--comparator_api_key_env", "EXPERT_KEY", "--items_per_chunk", "1", "--preference_dataset", "data"),
        *("--comparator_api_tries", "1", "--disable_tqdm", *argv),
    ]
    if code is None:
        return cli.main(arguments)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == code


def test_preferences_against_an_endpoint(tiny_model, shared_data, capsys):
    from datasets import load_from_disk

    def answer(request, number):
        if number >= 9:
            return Reply(f"no {KEY}", status=500)
        text = request["messages"][0]["content"]
        is_aux = "You write a helper" in text
        return "def aux(x):\n    return x" if is_aux else f"def f(x):\n    return aux(x) + {number}"

    with EndpointServer(answer) as server:
        collect(tiny_model, shared_data, server.url, code=2)  # the third chunk fails
        assert "The comparator gave no answer to" in capsys.readouterr().err
        server.answer = lambda request, number: answer(request, 0)
        number = len(server.requests)
        collect(tiny_model, shared_data, server.url)
        assert 12 <= len(server.requests) <= number + 4  # the first two chunks were there
        collect(tiny_model, shared_data, server.url)  # complete
        assert len(server.requests) <= number + 4
    rows = load_from_disk("data")
    assert len(rows) > 0 and {*rows["chosen_by"], *rows["rejected_by"]} == {"current", "api:m"}
    assert any("def aux" in row["aux_chosen"] for row in rows)
    facts = json.loads(Path("data/collection.json").read_text())
    assert facts["sampling"]["comparator endpoint"] == {"model": "m", "max_tokens": 40}
    assert not [path for path, text in texts_in("data").items() if KEY.encode() in text]


def test_one_model_at_an_endpoint_for_all_roles(tiny_model, shared_data):
    from datasets import load_from_disk

    def answer(request, number):
        text = request["messages"][0]["content"]
        assert "<assignment of aux>" in text and "<assignment of main>" in text
        return "<aux>\ndef aux(x):\n    return x\n</aux>\n<main>\ndef f(x):\n    return aux(x)\n</main>"

    with EndpointServer(answer) as server:
        argv = ("--comparator_generation_mode", "centralized", "--override", "dataset.train_split=test[:1]")
        collect(tiny_model, shared_data, server.url, *argv, "madpo.top_p=0.9")
        assert len(server.requests) == 2
        assert {request["max_tokens"] for request in server.requests} == {80}
        assert all(request["top_p"] == 0.9 and "temperature" not in request for request in server.requests)
    rows = load_from_disk("data")
    assert {*rows["chosen_by"], *rows["rejected_by"]} <= {"current", "api:m:centralized"}


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--comparator_api_model", "null"], "needs `comparator_api_model`"),
        (["--override", f"madpo.comparator_api_key={KEY}"], "`madpo.comparator_api_key` cannot be used"),
        (["--comparator_api_key_env", KEY], "`comparator_api_key_env` must be the name of an environment variable"),
        (["--comparator_api_key_env", "NO_SUCH_KEY"], "the environment variable NO_SUCH_KEY"),
    ],
)
def test_wrong_comparators_are_one_line(argv, problem, tiny_model, shared_data, capsys):
    with pytest.raises(SystemExit) as exit_info:
        collect(tiny_model, shared_data, "http://127.0.0.1:9", *argv)
    message = f"{exit_info.value} {capsys.readouterr().err}"
    assert problem in message and KEY not in message and not Path("data").exists()


def test_the_plan_of_a_collection_contacts_nobody(tiny_model, shared_data, capsys, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("contacted"))
    collect(tiny_model, shared_data, "http://127.0.0.1:9", "--dry_run")
    out = capsys.readouterr().out
    assert "api, 2 candidates" in out and "12 requests to m" in out
