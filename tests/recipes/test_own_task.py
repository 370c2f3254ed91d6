"""Tasks that the user names in YAML or on the command line, and the task that `trl-multiagent init` writes."""

import json
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from transformers.utils import logging as transformers_logging

from trl_multiagent import AgentTeam, IACTrainer, cli
from trl_multiagent.configs.recipes.writing import demo as writing
from trl_multiagent.console import tell
from trl_multiagent.environments.base import describe_environment
from trl_multiagent.environments.task_errors import TaskError, UnavailableError
from trl_multiagent.folders import locked
from trl_multiagent.hub import rename_card

from endpoint_server import EndpointServer, Reply
from prepared import parse_recipe


FAMILY = Path(__file__).parents[1] / "family" / "task.py"
REWARDS = """
import asyncio

def short(completions, **columns):
    return [float(len(c["poet"]) < 6) for c in completions]

async def judge(completions, topic, **columns):
    await asyncio.sleep(0)
    return [float(bool(set(c["critic"]) & set(t))) + len(c["judge"]) for c, t in zip(completions, topic)]

def following(item, history):
    return {role: f"Again about {item['topic']}: " for role in history[-1].prompts}

number = 3
"""
SECTIONS = {
    "prompts": {"poet": "A line about {topic}: ", "critic": "A word on {topic}: ", "judge": "Was it {topic}? "},
    "reward_funcs": ["{module}.short", "{module}:judge"],
    "dataset": {"name": "topics.jsonl"},
}
SMALL = ["--max_steps", "2", "--max_completion_length", "6", "--save_strategy", "no", "--logging_steps", "1"]


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """Name of a module in the working directory that has tasks and rewards. Every test has its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = "own_" + re.sub(r"\W", "_", request.node.name)
    (tmp_path / f"{name}.py").write_text(FAMILY.read_text() + REWARDS)
    (tmp_path / "topics.jsonl").write_text("".join(json.dumps({"topic": topic}) + "\n" for topic in ["rain", "snow"]))
    return name


@pytest.fixture
def config(tmp_path, module, tiny_model):
    """Writes a configuration file of the task `functions`, and returns its path."""

    def config(changes=()):
        sections = {"agent_model": {"name": tiny_model}, **SECTIONS, **dict(changes)}
        text = yaml.safe_dump({name: body for name, body in sections.items() if body is not None}, sort_keys=False)
        (tmp_path / "config.yaml").write_text(text.replace("{module}", module))
        return str(tmp_path / "config.yaml")

    return config


@pytest.fixture
def script(tmp_path_factory):
    """The command `trl-multiagent`."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text("from trl_multiagent.cli import main\nmain()\n")
    return path


def plan(capsys, *argv) -> str:
    cli.main(["run", "magrpo", "--dry_run", *argv])
    return capsys.readouterr().out


@pytest.mark.parametrize("place", ["flag", "override", "file"])
def test_a_task_is_named_in_three_places(module, capsys, place):
    name = f"{module}:TASK"
    Path("config.yaml").write_text(yaml.safe_dump({"task": name if place == "file" else "functions", "poem": {}}))
    argv = {"flag": ["--task", name], "override": ["--override", f"task={name}"], "file": []}[place]
    out = plan(capsys, "--config", "config.yaml", "--model_name", "m", *argv)
    assert "poet: m, critic: m" in out and "6 items of the task" in out


def test_the_task_is_saved_with_the_settings(module):
    argv = ["--task", f"{module}.TASK", "--model_name", "m", "--override", "poem.letters=xyz"]
    recipe = parse_recipe("magrpo", None, argv)
    assert recipe.merged["task"] == f"{module}.TASK" and recipe.sections["poem"].letters == "xyz"
    Path("again.yaml").write_text(yaml.safe_dump(recipe.merged))
    assert parse_recipe("magrpo", None, ["--config", "again.yaml"]).sections["poem"].letters == "xyz"


def test_a_run_resumes_with_the_settings_of_its_task_alone(module):
    """Its reward functions may read them."""
    compared = []
    for letters in ("xyz", "abc"):
        argv = ["--task", f"{module}.TASK", "--model_name", "m", "--override", f"poem.letters={letters}"]
        environment = parse_recipe("magrpo", None, argv).make_environment()
        compared.append(describe_environment(environment)["environment settings"]["poem"])
    assert [poem["letters"] for poem in compared] == ["xyz", "abc"]


@pytest.mark.parametrize(
    ("task", "parts"),
    [
        ("{module}:TAKS", ["has no 'TAKS'"]),
        ("nowhere_at_all:TASK", ["importing nowhere_at_all", "No module named 'nowhere_at_all'"]),
        ("{module}:TOPICS", ["is of type tuple, neither a `trl_multiagent.Task` nor an environment"]),
        ("{module}:Poem", ["Poem', which is a class: name an object of it, such as `poem = Poem()`."]),
        ("broken:TASK", ["importing broken", "raised ZeroDivisionError: division by zero"]),
        ("code_generatoin", ["none of code_generation, bug_fixing, block_building, class_completion", "module:NAME"]),
        (":TASK", ["package.module:name"]),
        ("tasks/poem.py:TASK", ["names the file tasks/poem.py: write tasks.poem:name"]),
        ("poem.py", ["names the file poem.py: write poem:name"]),
    ],
)
def test_wrong_tasks_are_one_line(module, tmp_path, refused, task, parts):
    (tmp_path / "broken.py").write_text("1 / 0")
    line = refused(
        cli.main, ["train", "magrpo", "--model_name", "m", "--override", f"task={task.format(module=module)}"]
    )
    assert all(part in line for part in parts), line  # before a process is launched


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            "([{'topic': 'rain'}], None)",
            "must be a `datasets.Dataset`, got `list`: `Dataset.from_list(rows)` makes one",
        ),
        ("(load_datasets(settings)[0], [])", "must be a `datasets.Dataset`, got `list`"),
        ("load_dataset('json', data_files='broken.jsonl')", "(ArrowInvalid: JSON parse error: "),
        ("load_datasets(settings)[0]", "`load_datasets` must return two datasets"),
    ],
)
def test_data_of_a_wrong_kind_is_refused(module, refused, returned, message):
    Path("broken.jsonl").write_text("{")
    task = f"WRONG = Task(make_environment, lambda settings: {returned}, {{'poem': Poem}})"
    Path(f"{module}.py").write_text(f"from datasets import load_dataset\n{Path(f'{module}.py').read_text()}\n{task}\n")
    line = refused(cli.main, ["run", "magrpo", "--model_name", "m", "--task", f"{module}:WRONG", "--dry_run"])
    assert message in line


def test_a_task_may_have_several_evaluation_sets(module, capsys):
    data = (
        "lambda settings: (settings.dataset and load_datasets(settings)[0], dict.fromkeys('ab', load_datasets(0)[0]))"
    )
    with Path(f"{module}.py").open("a") as file:
        file.write(f"\nOWN = Task(make_environment, {data}, {{'poem': Poem}})\n")
    overrides = [
        "dataset.name=topics.jsonl",
        "dataset.eval_size=1",
        "magrpo.eval_strategy=steps",
        "magrpo.eval_steps=1",
    ]
    argv = ["--model_name", "m", "--override", *overrides, "--dry_run"]
    cli.main(["run", "magrpo", "--task", f"{module}:OWN", *argv])
    printed = capsys.readouterr()
    assert "2 items of split whole, every 1 steps" in printed.out and "are trained on, too (1)" in printed.err


def test_a_task_may_ask_for_its_data_as_for_the_entry_of_a_dictionary(module, capsys):
    data = "lambda settings: (settings.sections.get('dataset') and load_datasets(settings)[0], None)"
    with Path(f"{module}.py").open("a") as file:
        file.write(f"\nOWN = Task(make_environment, {data}, {{'poem': Poem}})\n")
    argv = ["--model_name", "m", "--override", "dataset.name=topics.jsonl", "--dry_run"]
    cli.main(["run", "magrpo", "--task", f"{module}:OWN", *argv])
    assert "topics.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["name=topics.jsonl", "train_split=train[:1]", "eval_split=test"])
def test_data_that_the_task_does_not_read_is_refused(module, refused, tiny_model, setting):
    argv = ["--task", f"{module}:TASK", "--override", f"dataset.{setting}", "--dry_run"]
    line = refused(cli.main, ["run", "magrpo", "--model_name", "m", *argv])
    name, _, value = setting.partition("=")
    assert f"`dataset.{name}` is {value!r}, but the task's `load_datasets` does not read it: remove it" in line
    if name == "eval_split":  # of an evaluation, whose flag sets both splits
        line = refused(cli.main, ["evaluate", tiny_model, "--split", "test", *argv[:2], "--dry_run"])
        assert "is 'test', but the task's `load_datasets` does not read it" in line


@pytest.mark.parametrize(
    ("splits", "shared"), [(("train", "test"), 2), ((None, "[1:]"), 1), (("train[:1]", "test[1:]"), 0)]
)
def test_splits_of_a_file_that_share_rows_are_noted(config, capsys, splits, shared):
    tell.cache_clear()
    rows = {"name": "topics.jsonl", "train_split": splits[0], "eval_split": splits[1]}
    cli.main(["run", "magrpo", "--dry_run", "--config", config({"dataset": rows})])
    err = capsys.readouterr().err
    assert (f"trained on, too ({shared}): topics.jsonl has one split" in err) == ("trained on" in err) == bool(shared)


def test_a_task_may_have_an_evaluation_set_that_is_no_split(module, capsys, refused):
    with Path(f"{module}.py").open("a") as file:
        file.write("\nimport dataclasses\nHELD_OUT = dataclasses.replace(TASK, load_datasets=lambda s: ")
        file.write("(load_datasets(s)[0],) * 2)\n")
    argv = ["--model_name", "m", "--eval_strategy", "steps", "--eval_steps", "2"]
    assert "  6 items of split whole, every 2 steps" in plan(capsys, "--task", f"{module}:HELD_OUT", *argv)
    line = refused(cli.main, ["run", "magrpo", "--dry_run", "--task", f"{module}:TASK", *argv])
    assert "`magrpo.eval_strategy` needs an evaluation set" in line


@pytest.mark.parametrize(
    ("algorithm", "function", "error"),
    [("magrpo", "make_environment", RuntimeError), ("madpo", "load_datasets", TaskError)],
)
def test_a_bug_in_a_task_keeps_its_traceback(module, algorithm, function, error):
    with Path(f"{module}.py").open("a") as file:
        file.write("\nimport dataclasses\nfrom trl_multiagent.environments.task_errors import TaskError\n")
        file.write(f"def broken(settings):\n    raise {error.__name__}('a bug')\n")
        file.write(f"BROKEN = dataclasses.replace(TASK, {function}=broken)\n")
    with pytest.raises(error, match="a bug") as raised:
        cli.main(["run", algorithm, "--dry_run", "--task", f"{module}:BROKEN", "--model_name", "org/model"])
    assert raised.traceback[-1].path.name == f"{module}.py"


@pytest.mark.parametrize("function", ["make_environment", "short"])
def test_a_library_that_is_missing_is_one_line(module, config, capsys, function):
    """At the start, and in the middle of a run."""
    missing, returned = "    import nowhere_at_all\n", '    return [float(len(c["poet"])'
    text = Path(f"{module}.py").read_text().replace(returned, missing + returned)
    late = f"def late(settings):\n{missing}LATE = dataclasses.replace(TASK, make_environment=late)\n"
    Path(f"{module}.py").write_text(f"{text}\nimport dataclasses\n{late}")
    argv = ["--config", config()] if function == "short" else ["--task", f"{module}:LATE", "--model_name", "m"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "magrpo", *argv, *SMALL])
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and "error: " in line and "No module named 'nowhere_at_all'" in line


def test_a_script_has_its_task_already(module, capsys):
    from trl_multiagent.configs.recipes.demo.task import TASK

    with pytest.raises(SystemExit) as exit_info:
        parse_recipe(
            "magrpo", TASK, ["--task", f"{module}:TASK", "--model_name", "demo", "--override", "dataset.name=demo"]
        )
    message = f"{exit_info.value.code} {capsys.readouterr().err}"
    assert "2 " in message and "trains on a task of its own" in message and "start `trl-multiagent`" in message
    assert parse_recipe("magrpo", writing.TASK, ["--config", "magrpo_writing_demo"]).task is writing.TASK
    with pytest.raises(SystemExit):
        parse_recipe("magrpo", writing.TASK, ["--task", "bug_fixing", "--model_name", "demo"])
    assert "`task` is 'bug_fixing'" in capsys.readouterr().err


# Functions


def test_three_roles_and_an_async_judge_train_from_one_file(config, script, forked, tmp_path):
    path = config({"transition": "{module}.following", "magrpo": {"output_dir": "run", "num_turns": 2}})
    assert parse_recipe("magrpo", None, ["--config", path]).num_agents == 3
    done = forked.run(script, "run", "magrpo", "--config", path, *SMALL, cwd=tmp_path)
    assert done.codes == [0], done.stderr[-3000:]
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert "turn_2/rewards/judge" in log and "rewards/short" in log
    assert AgentTeam.from_pretrained("run").roles == ("poet", "critic", "judge")


def test_a_plan_asks_no_seat(config, module, capsys):
    Path(f"{module}.py").write_text(GAME)
    sections = {"prompts": {"judge": "Name a rule for {topic}:", "a": "Write {topic} by {judge}:"}}
    sections |= {"reward_funcs": ["{module}.judged"], "functions": {"order": [["judge"], ["a"]]}}
    with EndpointServer(lambda request, number: "rule") as server:
        judge = {"endpoint": {"model": "m", "base_url": f"{server.url}/v1"}}
        path = config({**sections, "seats": {"judge": judge}})
        assert "optimizer step" in plan(capsys, "--config", path)
    assert server.requests == []


def test_a_plan_says_who_has_an_adapter(config, capsys):
    changes = {"peft": {"r": 4}, "magrpo": {"bf16": False}}
    for roles, form in ((None, "(LoRA of rank"), (["poet", "critic"], "(poet, critic: LoRA of rank")):
        out = plan(capsys, "--config", config({**changes, "agent_model": {"name": "m", "adapter_roles": roles}}))
        assert f"judge: m {form} 4 in float32 on a float32 base" in out
        assert ("; any other: float32 weights, computed in float32)" in out) == bool(roles)


def test_forms_of_the_functions(config, module, capsys):
    chat = [{"role": "system", "content": "Short."}, {"role": "user", "content": "On {topic}."}]
    prompts = {"poet": chat, "critic": "{topic}"}
    functions = {"prompts": prompts, "reward_funcs": f"{module}.short", "reward_weights": [2]}
    path = config({"task": "functions", "functions": functions, "prompts": None, "reward_funcs": None})
    recipe = parse_recipe("magrpo", None, ["--config", path])
    environment = recipe.make_environment()
    assert recipe.num_agents == 2 and environment.reward_weights == [2]
    assert environment.prompts({"topic": "rain"}, [])["poet"][1]["content"] == "On rain."
    assert environment.resume_settings()["prompts"] == prompts
    assert "poet: " in plan(capsys, "--config", path, "--model_name", "org/model")


GAME = """
def game(completions, **columns):
    signs = [float(c["a"].isascii()) - float(c["b"].isascii()) for c in completions]
    return [{"a": sign, "b": -sign} for sign in signs]

def judged(completions, **columns):
    return [float(c["judge"] == "good") for c in completions]

def say(item, prompt, history):
    return prompt

async def waits(item, prompt, history):
    return prompt
"""
PLAYERS = {"prompts": {"a": "Show {topic}:", "b": "Show {topic}:"}, "reward_funcs": ["{module}.game"]}
OWN = {**PLAYERS, "seats": {"b": {"population": "self", "agent": "a", "max_completion_length": 4}}}


def test_self_play_resumes_exactly_and_is_evaluated(config, module, script, forked, tmp_path):
    """
    The partner is drawn from the checkpoints of the run up to the step, also by a run that is resumed beside later
    ones.
    """
    Path(f"{module}.py").write_text(GAME)
    small = ["--max_steps", "4", "--save_steps", "1", "--max_completion_length", "4", "--items_per_device", "2"]
    path = config({**OWN, "magrpo": {"output_dir": "run", "learning_rate": 0.01, "trace_steps": 1}, "seed": 4})
    done = forked.run(script, "run", "magrpo", "--config", path, *small, cwd=tmp_path)
    assert done.codes == [0], done.stderr[-3000:]
    assert "with/b/start" in done.stdout and "with/b/checkpoint-" in done.stdout
    weights = AgentTeam.from_pretrained("run").agents["a"].state_dict()
    again = forked.run(
        script, "run", "magrpo", "--config", path, *small, "--resume_from_checkpoint", "run/checkpoint-2", cwd=tmp_path
    )
    assert again.codes == [0], again.stderr[-3000:]
    resumed = AgentTeam.from_pretrained("run").agents["a"].state_dict()
    assert all((weights[name] == resumed[name]).all() for name in weights)
    assert AgentTeam.from_pretrained("run").roles == ("a",)
    flags = ["--split", "train", "--num_episodes", "4", "--seed", "7", "--output_dir", "results"]
    flags += ["--config", "run/config.yaml"]
    done = forked.run(script, "evaluate", "run", *flags, cwd=tmp_path)
    assert done.codes == [0] and re.search(r"with/b/(start|checkpoint-[1-4])", done.stdout), done.stderr[-3000:]
    (manifest,) = (tmp_path / "results").rglob("stage.json")
    # Partners are drawn with the seed of the evaluation
    assert json.loads(manifest.read_text())["settings"]["environment settings"]["seats"]["b"]["seed"] == 7


def test_an_endpoint_plays_a_role(config, module, script, forked, tmp_path):
    """An endpoint that fails ends the run with one line. The run goes on with the answers that it has received."""
    Path(f"{module}.py").write_text(GAME)

    def answer(request, number):
        return Reply(status=400) if number == 6 else "good"

    sections = {"prompts": {"a": "Write {topic}:", "judge": "Judge {a}"}, "reward_funcs": ["{module}.judged"]}
    sections |= {"functions": {"order": [["a"], ["judge"]]}, "magrpo": {"output_dir": "run", "save_steps": 1}}
    small = ["--max_steps", "2", "--max_completion_length", "6", "--items_per_device", "1", "--logging_steps", "1"]
    with EndpointServer(answer) as server:
        judge = {"model": "m", "base_url": f"{server.url}/v1", "tries": 1, "concurrency": 1}
        path = config({**sections, "seats": {"judge": {"endpoint": judge}}})
        done = forked.run(script, "run", "magrpo", "--config", path, *small, cwd=tmp_path)
        assert done.codes == [2] and "The model that plays 'judge' gave no answer" in done.stderr.splitlines()[-1]
        number = len(server.requests)
        argv = [*small, "--resume_from_checkpoint", "run/checkpoint-1"]
        done = forked.run(script, "run", "magrpo", "--config", path, *argv, cwd=tmp_path)
    assert done.codes == [0], done.stderr[-3000:]
    assert (number, len(server.requests)) == (7, 9)  # four answers in each step: two of them were kept
    assert all(x["messages"][-1]["content"].startswith("Judge ") for x in server.requests)


def test_the_model_of_a_seat_is_not_looked_for_in_the_file_of_the_run_s(config, module, tiny_model, tmp_path):
    Path(f"{module}.py").write_text(GAME)
    run = shutil.copytree(tiny_model, tmp_path / "model")
    (run / "m.gguf").write_text("damaged")
    models = {"name": str(run), "gguf_file": "m.gguf", "revision": "v2"}
    for team, fits in ((tiny_model, True), (str(run), False)):
        path = config({**PLAYERS, "agent_model": models, "seats": {"b": {"team": team}}})
        seat = parse_recipe("magrpo", None, ["--config", path, "--task", "functions"]).make_environment().seats["b"]
        with nullcontext() if fits else pytest.raises(UnavailableError, match=r"m\.gguf"):
            seat.load("b")


IN_ORDER = {**PLAYERS, "functions": {"order": [["a"], ["b"]]}, "magrpo": {"num_turns": 2}}
WRONG_SEATS = [
    ({"b": {"population": "self"}}, "`seats.b.agent` is 'b', but this run trains a."),
    ({"a": {"population": "self"}, "b": {"team": "x"}}, "trains no role: leave one out of `seats`."),
    ({"b": {"function": "os.getcwd"}}, "names 'os.getcwd', which must be a function of item, prompt, history."),
    ({"b": {"function": "{module}.waits"}}, "waits', which is `async`: it must be a plain function."),
    ({"b": {}}, "`seats.b`: give exactly one of function, team, population and endpoint."),
    ({"b": {"team": "x", "agnet": "a"}}, "`seats.b.agnet` is not a known setting"),
    ({"b": {"team": "."}}, "`seats.b` is '.', a folder with none of config.json"),
    ({"b": {"population": ["org/model", "my model"]}}, "`seats.b`: 'my model' is not a valid name of a repository"),
    ({"b": {"team": "damaged"}}, "damaged/team.json: the `reasoning` of 'x' is 'loud'; it must be"),
    ({"b": {"population": ["team"]}}, "`seats.b`: team has the roles x, y, not 'b'."),
    ({"b": {"population": ["/nowhere/team"]}}, "`seats.b` is '/nowhere/team', but there is no such folder."),
    ({"b": {"population": "selff"}}, "`seats.b`: population is 'selff'; it must be a list of saved teams, or 'self'."),
    ({"c": {"function": "{module}.say"}}, "The task has the roles a, b: 'c' is none of them."),
    ({"a": {"team": "x"}, "b": {"team": "x"}}, "The task has the roles a, b: none is left to train."),
    ({"b": {"endpoint": {"model": "gpt-5", "api_key": "sk-1"}}}, "`seats.b.endpoint.api_key` is not a known setting"),
    ({"b": {"endpoint": {"base_url": "http://h"}}}, "`seats.b.endpoint.model` is missing"),
]
WRONG = [
    ({"prompts": {"poet": "{subject}"}}, "The prompt of `poet` needs the column 'subject'; items have topic."),
    ({"prompts": {"poet": "A brace { alone"}}, "The prompt template of `poet` cannot be filled"),
    ({**IN_ORDER, "prompts": {"a": "Show {topic}:", "b": "{c}"}}, "A prompt needs the column 'c'; "),
    ({**IN_ORDER, "prompts": {"a": "Show {topic}:", "b": "{a} {"}}, "The prompt template of `b` cannot be filled"),
    ({**IN_ORDER, "prompts": {"a": "Show {topic}:", "b": "{}"}}, "A prompt needs the column ''; topics.jsonl"),
    ({**IN_ORDER, "magrpo": {"num_turns": 2, "stop_strings": {"c": ["."]}}},
     "`magrpo.stop_strings` names 'c', which is not a role of the task: a, b."),
    ({"magrpo": {"num_agents": 2}}, "`magrpo.num_agents` is 2, but the task has 3 roles: poet, critic, judge."),
    *(({**PLAYERS, "seats": seat}, message) for seat, message in WRONG_SEATS),
    ({"reward_funcs": ["{module}.shrt"]}, "has no 'shrt'"),
    ({"reward_funcs": ["short"]}, "`functions.reward_funcs` names 'short'; it must have the form package.module:name"),
    ({"reward_funcs": None}, "`functions.reward_funcs` is missing"),
    ({"reward_funcs": ["json.__doc__"]}, "`functions.reward_funcs` names 'json.__doc__'"),
    ({"reward_funcs": ["os.getcwd"]}, "The reward function `getcwd` takes no arguments"),
    ({"reward_weights": [1]}, "`reward_weights` has 1 entries for 2 reward functions"),
    ({"prompts": None}, "`functions.prompts` is missing"),
    ({"prompts": {"a b": "x"}}, "'a b' must be a Python identifier"),
    ({"prompts": {"a": [{"role": "user"}]}}, "`functions.prompts.a`"),
    ({"dataset": {"name": "nowhere.jsonl"}}, "`dataset.name` is 'nowhere.jsonl'"),
    ({"dataset": {"name": __file__}}, f"`dataset.name` is {__file__}; give a Hub id or a path of a .jsonl"),
    ({"dataset": {"name": "."}}, "`dataset.name` is .; give a Hub id"),
    ({"dataset": {"name": "mixed.jsonl"}}, "mixed.jsonl cannot be read as a table, in which a field has one type"),
    ({"dataset": {"name": "null.jsonl"}}, "row 2: field `topic` is missing or null"),
    ({"external": {"mode": "plain"}}, "`external` is not a known setting"),
    ({"magrpo": {"frozen_agents": 3}}, "`magrpo.frozen_agents`"),
    ({"magrpo": {"num_turns": 2}}, "no `transition`"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_a_plan_refuses_is_one_line(config, module, refused, changes, message):
    Path(f"{module}.py").write_text(REWARDS + GAME)
    Path("mixed.jsonl").write_text('{"topic": "a"}\n{"topic": [1]}')
    Path("null.jsonl").write_text('{"topic": "a"}\n{"topic": null}')
    agents = [{"role": role, "folder": "agents"} for role in "xy"]
    for name, agent in (("team", {}), ("damaged", {"reasoning": "loud"})):
        Path(name).mkdir()
        text = json.dumps({"format_version": 1, "form": "full", "agents": [{**x, **agent} for x in agents]})
        Path(name, "team.json").write_text(text)
    line = refused(cli.main, ["run", "magrpo", "--config", config(changes), "--dry_run"])
    assert message in line and "sk-1" not in line, line


def test_a_metric_that_no_evaluation_has_ends_the_run_after_its_step_is_saved(config, refused):
    """The metrics of reward functions are known once they are called."""
    best = {"metric_for_best_model": "rewards/shrt", "load_best_model_at_end": True, "save_strategy": "steps"}
    best |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "output_dir": "run", "disable_tqdm": True}
    rows = {"name": "topics.jsonl", "train_split": "[1:]", "eval_split": "[:1]"}
    path = config({"magrpo": best, "dataset": rows})
    line = refused(cli.main, ["run", "magrpo", "--config", path, *SMALL[:4]])
    assert "`metric_for_best_model` is 'rewards/shrt', but an evaluation has " in line and "rewards/short, " in line
    assert line.endswith("The last complete checkpoint is run/checkpoint-1.")


# The task that `init` writes


def test_init_writes_a_task_that_trains_and_leaves_a_complete_folder(script, forked, tmp_path, capsys, refused):
    folder = tmp_path / "own"
    cli.main(["init", str(folder)])
    assert f"cd {folder} && trl-multiagent train magrpo --config config.yaml" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "task.py"]
    done = forked.run(script, "run", "magrpo", "--config", "config.yaml", *SMALL, "--bf16", "false", cwd=folder)
    assert done.codes == [0], done.stderr[-3000:]
    (run,) = (folder / "outputs").iterdir()
    assert f"Saved team       {run.relative_to(folder)}" in done.stdout

    names = {path.name for path in run.iterdir()}
    assert {"team.json", "agents", "README.md", "config.yaml", "training_args.bin"} <= names
    card = (run / "README.md").read_text()
    for target in re.findall(r"\]\((\./[^)]+)\)", card):
        assert (run / target).exists(), target
    for snippet in re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL):
        exec(snippet, {})
    # From another folder: the module of the task is found beside the file that --config names
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = forked.run(script, "evaluate", run, "--dry_run", cwd=elsewhere)
    assert done.codes == [2] and "asks for `task: 'task:TASK'`; pass `--config" in done.stderr.splitlines()[-1]
    small = ("--num_episodes", "2", "--max_completion_length", "4", "--disable_tqdm")
    small += ("--config", folder / "config.yaml")
    for command, runs in (("evaluate", [run]), ("cross-play", [run, shutil.copytree(run, run.with_name("second"))])):
        done = forked.run(script, command, *runs, *small, "--output_dir", elsewhere / command, cwd=elsewhere)
        assert done.codes == [0], done.stderr[-3000:]
        name = {"evaluate": "evaluation.json", "cross-play": "cross_play.json"}[command]
        assert json.loads((elsewhere / command / name).read_text())["items"] == 19

    moved = shutil.copytree(run, tmp_path / "moved")
    rename_card(moved, "user/letters")
    card = (moved / "README.md").read_text()
    assert 'AgentTeam.from_pretrained("user/letters")' in card and 'from_pretrained("user/letters", subfolder=' in card
    assert "# Model Card for letters\n" in card and "model_name: letters\n" in card and run.name not in card

    assert "would be overwritten" in refused(cli.main, ["init", str(folder)])


def test_a_team_that_is_saved_elsewhere_has_its_card_beside_it(config, script, forked, tmp_path):
    path = config({"output": {"save_path": "team"}, "peft": {"r": 4}, "magrpo": {"output_dir": "run"}})
    done = forked.run(script, "run", "magrpo", "--config", path, *SMALL, "--max_steps", "1", cwd=tmp_path)
    assert done.codes == [0], done.stderr[-3000:]
    names = {path.name for path in (tmp_path / "team").iterdir()}
    assert {"team.json", "agents", "README.md", "config.yaml"} <= names
    card = (tmp_path / "team" / "README.md").read_text()
    assert f'AgentTeam.from_pretrained("{tmp_path}/team")' in card
    for snippet in re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL):
        exec(snippet, {})

    (tmp_path / "link").symlink_to("run")  # the folder of the run by another name
    argv = [*SMALL, "--max_steps", "2", "--resume_from_checkpoint", "auto", "--output.save_path", "link"]
    done = forked.run(script, "run", "magrpo", "--config", path, *argv, cwd=tmp_path)
    assert done.codes == [0], done.stderr[-3000:]


def test_a_run_that_was_killed_while_it_saved_its_team_saves_it(module, tiny_model, monkeypatch, capsys):
    """The last step is in the middle of an epoch, and the best checkpoint is not the last one."""
    argv = ["iac", "--task", f"{module}:EVALUATED", "--model_name", tiny_model, *SMALL[2:], "--max_steps", "4"]
    argv += ["--items_per_device", "2", "--save_strategy", "steps", "--save_steps", "1", "--learning_rate", "0.01"]
    argv += ["--eval_strategy", "steps", "--eval_steps", "1", "--load_best_model_at_end", "--disable_tqdm"]
    argv += ["--metric_for_best_model", "reward", "--report_to", "none"]
    argv += ["--output_dir"]
    Path(f"{module}.py").write_text(
        Path(f"{module}.py").read_text() + "\ndef bytes_of(completions, **columns):\n"
        "    return [sum(c['poet'].encode() + c['critic'].encode()) % 5 for c in completions]\n"
        "PROMPTS = {'poet': '{topic}: ', 'critic': '{topic}! '}\n"
        "EVALUATED = Task(lambda s: FunctionEnvironment(PROMPTS, bytes_of), lambda s: (load_datasets(s)[0],) * 2)\n"
    )
    transformers_logging.enable_progress_bar()
    with locked(Path("whole"), ""), pytest.raises(SystemExit):
        cli.main(["run", *argv, "whole"])
    assert "Another program is writing to whole: wait until it ends" in capsys.readouterr().err
    cli.main(["run", *argv, "whole"])
    captured = capsys.readouterr()
    assert "Writing model shards" not in captured.err and "Loading weights" not in captured.err
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("trl_multiagent.runs.training.save_results", interrupted)
        cli.main(["run", *argv, "killed"])
    assert not Path("killed/team.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(IACTrainer, "training_step", interrupted)  # no step is taken again
        cli.main(["run", *argv, "killed", "--resume_from_checkpoint", "killed/checkpoint-4"])
    names = [sorted(str(path.relative_to(run)) for path in Path(run).rglob("*")) for run in ("whole", "killed")]
    assert names[0] == names[1]
    weights = [path for path in names[0] if path.endswith("safetensors") and "checkpoint" not in path]
    assert len(weights) == 6  # of two agents, their critics and these ones' heads
    for path in [*weights, "training_cost.json"]:
        assert Path("whole", path).read_bytes() == Path("killed", path).read_bytes()
    best = json.loads(Path("whole/checkpoint-4/trainer_state.json").read_text())["best_global_step"]
    assert best < 4
    assert Path(f"whole/checkpoint-{best}", weights[0]).read_bytes() == Path("whole", weights[0]).read_bytes()
    assert Path("whole/checkpoint-4", weights[0]).read_bytes() != Path("whole", weights[0]).read_bytes()


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt
