"""The examples in the documents run."""

import ast
import dataclasses
import json
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pandas as pd
import pytest
from datasets import Dataset
from matplotlib.image import imread
from pairs import pairs
from transformers import AutoModelForCausalLM, AutoTokenizer, DefaultFlowCallback, TrainerCallback
from trl import GRPOConfig

import trl_multiagent.environments.function_environment
from trl_multiagent import MAGRPOConfig, Task, cli
from trl_multiagent.configs.recipes.demo.task import TASK
from trl_multiagent.environments.base import judge
from trl_multiagent.preferences import load_preferences
from trl_multiagent.rollout.tree import Node, Samples
from trl_multiagent.runs.run import run_recipe

from prepared import parse_recipe
from tiny import PROBLEM, tiny_environment, tiny_items, tiny_team, tiny_trainer


ROOT = Path(__file__).resolve().parents[1]


def python_blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


class OneStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


@pytest.fixture
def run_example(tiny_model, tmp_path, monkeypatch):
    """
    Runs an example as it is written and returns its names. The models that it names are folders with a tiny one,
    relative to the current folder, and trainers stop after one step.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.trainer.DEFAULT_CALLBACKS", [DefaultFlowCallback, OneStep])
    monkeypatch.setattr("trl_multiagent.models.packaged.copy_folder", lambda: tmp_path / "no copy of a real model")

    def run(code, names=None):
        for name in set(re.findall(r'"((?:Qwen|HuggingFaceTB)/[^"]+)"', code)):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).symlink_to(tiny_model)
        names = {} if names is None else names
        exec(code, names)
        return names

    return run


def test_the_table_of_trl_arguments_is_current():
    names = {"__file__": str(ROOT / "docs" / "trl_arguments.py"), "__name__": "trl_arguments"}
    exec((ROOT / "docs" / "trl_arguments.py").read_text(), names)
    page = names["PAGE"].read_text()
    assert names["updated"](page) == page, "run `python docs/trl_arguments.py`"
    for field in dataclasses.fields(GRPOConfig):
        assert f"`{field.name}`" in names["table"](), field.name


def test_readme_example(run_example, tmp_path, capsys):
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    install, set_up = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)[:2]
    assert "git clone" in install and text.index(install) < text.index("```python")
    commands = [line.partition("#")[0].strip() for line in set_up.splitlines()]
    # Nothing else is needed for the demos and the tests
    assert commands == ["make demo-real", "make demo-code", "make demo", "make test"]
    (example,) = python_blocks(ROOT / "README.md")
    assert len(example.strip().splitlines()) <= 24
    run_example(example)
    assert (tmp_path / "hidden" / "agents" / "speaker" / "adapter_config.json").is_file()
    assert "reward" in capsys.readouterr().out


def test_example_for_users_of_trl(run_example, tmp_path):
    (example,) = python_blocks(ROOT / "docs" / "from_trl.md")
    names = run_example(example)
    assert (tmp_path / "poets" / "agents" / "critic" / "config.json").is_file()
    rewards = names["reward"](
        [{"poet": "rain falls", "critic": " falls"}, {"poet": "it", "critic": "it"}], ["rain"] * 2
    )
    assert rewards == [1.0, 0.0]


def test_example_of_an_algorithm(run_example):
    (example,) = python_blocks(ROOT / "docs" / "algorithms.md")
    trainer = run_example(example)["trainer"]
    indices = [(0, 0), (1, 1), (2, 2)]
    samples = {role: Samples([1], [[2], [3], [4]], ["a", "b", "c"]) for role in ("poet", "critic")}
    node = Node({}, (), {"poet": "", "critic": ""}, samples, indices, returns=[0.0, 9.0, 2.0])
    advantages = trainer.node_advantages(node)
    assert {role: x.tolist() for role, x in advantages.items()} == {"poet": [-1, 1, 0], "critic": [-1, 1, 0]}
    assert trainer.state.global_step == 1


def test_migration_example(run_example):
    transition, wrapper = python_blocks(ROOT / "docs" / "migrating.md")
    names = run_example(transition)
    run_example(wrapper, names)
    turn = trl_multiagent.Turn({}, {"first": "a", "second": "b"}, trl_multiagent.Outcome(0.5))
    assert names["transition"]({}, [turn])["first"] == "It earned 0.5. Write it again:"

    def lengths(first, second):
        return [len(a) - len(b) for a, b in zip(first, second, strict=True)]

    wrapped = names["per_agent"](lengths, ["first", "second"])
    assert wrapped([{"first": "aa", "second": "b"}, {"first": "", "second": "b"}], topic=["x", "y"]) == [1, -1]
    assert wrapped.__name__ == "lengths"


@pytest.mark.parametrize("name", ["rollout_tree", "workflows"])
def test_a_picture_is_drawn_by_its_script(tmp_path, name):
    script = ROOT / "docs" / "images" / f"make_{name}.py"
    names = {"__name__": "script", "__file__": str(script)}
    exec(script.read_text(), names)
    names["draw"](tmp_path / "picture.png")
    assert imread(tmp_path / "picture.png").shape == imread(script.with_name(f"{name}.png")).shape


def test_the_picture_of_a_conversation_is_drawn_by_its_script(tmp_path):
    said = {"prompt/speaker": "A cup is hidden.", "completion/speaker": "a\ncup", "completion/decider": "cup"}
    rows = [
        {"step": step, "item": str(item), "turn": turn, "reward": 1.0, **said}
        for step in (0, 12)
        for item in (0, 21, 42)
        for turn in (1, 2)
    ]
    script = ROOT / "docs" / "images" / "make_hidden.py"
    drawn = {"__name__": "script", "__file__": str(script)}
    exec(script.read_text(), drawn)
    drawn["PICTURES"] = {tmp_path / path.name: look for path, look in drawn["PICTURES"].items()}
    drawn["save"](pd.DataFrame(rows).groupby("step"))
    for name in ("hidden.png", "hidden_phone.png"):
        assert imread(tmp_path / name).shape == imread(script.with_name(name)).shape


def test_the_picture_of_the_trainers_is_drawn_by_its_script(tmp_path):
    script = ROOT / "docs" / "images" / "make_trainers.py"
    names = {"__name__": "script", "__file__": str(script)}
    exec(script.read_text(), names)
    names["draw"]({name: [[0.5] * names["STEPS"]] * 3 for name in names["NAMES"]}, tmp_path / "picture.png")
    assert imread(tmp_path / "picture.png").shape == imread(script.with_name("trainers.png")).shape


def test_the_picture_of_code_is_drawn_by_its_script(tmp_path):
    metrics = {"passed": 1.0, "tests_passed": 8.0, "tests_total": 8.0}
    said = {"aux": "def aux(xs):\n    return xs", "main": "def f(xs):\n    return aux(xs)"}
    turn = {"prompts": {"main": [{"content": "Return xs.\nWrite it."}]}, "completions": said, "metrics": metrics}
    for row in ("small_untrained", "small_trained"):
        folder = tmp_path / row / "transcripts" / "run"
        folder.mkdir(parents=True)
        (folder / "transcripts.jsonl").write_text(f"{json.dumps({'turns': [turn]})}\n" * 4)
    (tmp_path / "small_trained" / "run").mkdir()
    (tmp_path / "small_trained" / "run" / "log.jsonl").write_text('{"reward": 1.5}\n{"reward": 2.5}\n{"loss": 0}\n')
    script = ROOT / "docs" / "images" / "make_code.py"
    names = {"__name__": "script", "__file__": str(script)}
    exec(script.read_text(), names)
    names["draw"](tmp_path, tmp_path / "picture.png")
    assert imread(tmp_path / "picture.png").shape == imread(script.with_name("code.png")).shape


SHOWN = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
SHOWN += [path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".md", ".yaml", ".py")]


@pytest.mark.parametrize("path", sorted(SHOWN), ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_are_python_and_links_and_commands_name_files_that_exist(path):
    text = path.read_text()
    for block in python_blocks(path):
        compile(textwrap.dedent(block), str(path), "exec")
    prose = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else text
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", prose):
        assert (path.parent / target).exists(), target
    named = re.findall(r"(?<![\w/])(?:recipes|accelerate_configs|benchmarks|docs)/[\w/]+\.(?:py|yaml|md)\b", text)
    for target in named:
        assert (ROOT / target).exists(), target


def words_of(text):
    """Returns the words that a reader meets: not those of code, comments, targets of links and folded parts."""
    text = re.sub(
        r"^ *```.*?^ *```|<!--.*?-->|<details.*?</details>|(?<=\])\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE
    )
    return [word for word in text.split() if re.search(r"\w", word)]


def test_pages_for_users_are_short():
    """Those of the chapter of references may be long."""
    index = (ROOT / "docs" / "index.md").read_text()
    guides, _, reference = index.partition("## Reference\n")
    pages = ["index.md", *re.findall(r"^- \[.+?\]\((?!http)(.+?\.md)\)", guides, re.MULTILINE)]
    assert len(pages) > 40 and "magrpo_formulas.md" in reference
    long = {page: n for page in pages if (n := len(words_of((ROOT / "docs" / page).read_text()))) > 1000}
    assert not long
    for page in ("workflows", "tools", "games", "partners"):
        assert len((ROOT / "docs" / f"{page}.md").read_text().splitlines()) <= 200


async def grade(left, right):
    return len(left)


def blocks(page):
    return python_blocks(ROOT / "docs" / f"{page}.md")


def test_examples_of_rewards_and_templates(run_example, tmp_path, capsys):
    (_, functions, _), (rewards,) = blocks("workflows"), blocks("reward_functions")
    names = run_example(functions, {"grade": grade})
    drafts, texts = names["trainer"]._turns
    assert {node.roles for node in drafts} == {("writer",)} and {node.roles for node in texts} == {("editor",)}
    texts = ["rain rain, Rain!", "Rain fell on the roof all night.", "rain roof night " * 8]
    found = names["short_and_complete"]([{"editor": text} for text in texts], ["rain roof night"] * 3)
    assert found == pytest.approx([1 / 3, 1.0, 0.5])
    run_example(rewards, names)
    actions = [{"writer": "green", "editor": "<think>x</think>tides"}, {"writer": "abc", "editor": "moon"}]
    for _ in range(2):
        outcomes = names["judged"].score([{"words": "tides moon"}] * 2, actions, [[], []])
        assert [outcome.reward for outcome in outcomes] == [0.5 + 2.5 + 1.0, 0.5 + 1.5 + 0.0]
        assert [outcome.extra for outcome in outcomes] == [{"grade": 5}, {"grade": 3}]

    (settings,) = re.findall(
        r"```yaml\n(# editor.yaml\n.*?)```", (ROOT / "docs" / "workflows.md").read_text(), flags=re.DOTALL
    )
    (tmp_path / "editor.yaml").write_text(settings)
    (tmp_path / "rewards.py").write_text("def short_and_complete(completions, words, **columns):\n    return [0.0]\n")
    (tmp_path / "words.jsonl").write_text('{"words": "rain roof night"}\n' * 8)
    cli.main(["run", "magrpo", "--config", "editor.yaml", "--dry_run"])
    out = capsys.readouterr().out
    assert "writer: Qwen/Qwen2.5-0.5B-Instruct, editor: Qwen/Qwen2.5-0.5B-Instruct" in out


def test_examples_of_a_function_and_a_class(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    coroutine, _, guess = blocks("workflows")
    names = {}
    exec(coroutine + guess, names)
    taboo, item = names["taboo"], {"word": "milk", "options": "milk, sun"}
    first = trl_multiagent.Turn(taboo.prompts(item, []), {"describer": "White"}, trl_multiagent.Outcome(0.0))
    assert [x.reward for x in taboo.score([item], [{"guesser": "Milk!"}], [[first]])] == [1.0]
    assert [x.reward for x in taboo.score([item], [{"describer": "It is milk"}], [[]])] == [0.0]
    numbers = names["GuessTheNumber"]()
    items, settings = Dataset.from_dict({"number": [10, 50, 90]}), {"num_turns": 2, "trace_steps": 1, "max_steps": 2}
    trainer = tiny_trainer("outputs/job_7", tiny_team(numbers.roles), numbers, train_dataset=items, **settings)
    trainer.train()
    assert trainer.state.log_history[0]["turn_2/error"] > 0
    (reading,) = python_blocks(ROOT / "docs" / "output.md")
    exec(reading, names)
    assert len(names["trace"]) == trainer.env_step and len(names["best"]) == len(set(names["trace"]["item"]))


def test_examples_of_seats_and_tools(run_example):
    (seat,), (tools,) = blocks("partners"), blocks("tools")
    names: dict = {}
    exec(seat, names)
    (outcome,) = judge(names["environment"], [{"words": "rain roof"}], [{"writer": "Rain"}], [()])
    assert outcome.extra == {"answer/reader": "Missing: roof"}
    names = run_example(tools)
    assert {node.roles for nodes in names["trainer"]._turns for node in nodes} == {("agent",)}


class Client:
    """Stands for a client of the package `mcp`, which is not installed where tests run."""

    tools: ClassVar[dict] = {}

    def __init__(self, server):
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def list_tools(self):
        tools = [SimpleNamespace(model_dump_json=lambda include, name=name: name) for name in self.tools]
        return SimpleNamespace(tools=tools)

    async def call_tool(self, name, arguments):
        return SimpleNamespace(content=[SimpleNamespace(type="text", text=self.tools[name](**arguments))])


def test_examples_of_an_mcp_server(monkeypatch):
    class Server:
        def __init__(self, name):
            pass

        def tool(self):
            return lambda tool: Client.tools.update({tool.__name__: tool}) or tool

    parts = {"Client": Client, "MCPError": OSError, "StdioServerParameters": dict}
    monkeypatch.setitem(sys.modules, "mcp", SimpleNamespace(**parts))
    monkeypatch.setitem(sys.modules, "mcp.server", SimpleNamespace(MCPServer=Server))
    monkeypatch.setattr(Client, "tools", {})
    server, client = blocks("mcp")
    names = {"__name__": "my_mcp"}
    exec(server + client, names)
    ask, item = names["ask"], {"question": "Which day?", "answer": "Sunday"}
    assert ask.live
    ask.live = False  # so that single turns can be played
    asked, history = ask.prompts(item, []), []
    assert "weekday" in asked["agent"] and asked["agent"].endswith("Which day?")
    for arguments, result in (('{"date": "2026-03-01"}', "Sunday"), ('{"date": 1}', "error"), ("{", "error")):
        call = f'<tool_call>{{"name": "weekday", "arguments": {arguments}}}</tool_call>'
        if arguments == '{"date": 1}':
            call = call.replace("weekday", "month")
        history.append(trl_multiagent.Turn(asked, {"agent": call}, trl_multiagent.Outcome(0.0)))
        asked = ask.prompts(item, history)
        assert result in asked["agent"]
    assert [x.reward for x in ask.score([item], [{"agent": "A Sunday."}], [history])] == [1.0]


def test_the_numbers_of_joint_actions_on_the_page_of_trees():
    text = (ROOT / "docs" / "trees_and_episodes.md").read_text()
    turns = (2, 3, 5)
    sizes = {
        name: ", ".join(str(MAGRPOConfig("x", num_turns=T, **settings).rows_per_item) for T in turns)
        for name, settings in (("tree", {}), ("episodes", {"branching": "episodes"}))
    }
    assert f"| G = 4: T = 2, T = 3, T = 5 | {sizes['tree']} | {sizes['episodes']} |" in text


def test_team_examples(run_example, tmp_path):
    forms, use = python_blocks(ROOT / "docs" / "teams.md")
    names = run_example(forms)
    assert all(names[x].form == x for x in ("full", "shared", "lora", "mixed")) and names["two_sizes"].form == "full"

    names["lora"].save_pretrained("outputs/job_7")
    names["item"] = PROBLEM
    run_example(use, names)
    assert len(names["turns"]) == 2 and names["turns"][1].outcome.reward >= 0.0

    (settings,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "teams.md").read_text(), flags=re.DOTALL)
    config = tmp_path / "config.yaml"
    config.write_text(settings + "dataset:\n  name: demo\n")
    recipe = parse_recipe("magrpo", TASK, ["--config", str(config), "--dry_run"])
    assert recipe.peft_config.r == 16 and recipe.agent_model.share_weights is False


def test_examples_of_a_curriculum():
    order, callback, stream = python_blocks(ROOT / "docs" / "curricula.md")
    names: dict = {}
    exec(order + callback, names)
    assert names["easy_first"]["level"] == [1, 2] and names["args"].shuffle_dataset is False
    names["Harder"]().on_log(None, None, None, logs={"reward": 0.9})
    assert names["rules"] == {"words": 4}
    exec(stream, names)
    assert next(iter(names["stream"]))["prompt"] == "Name 1 rivers."


def test_examples_of_a_trained_team(run_example):
    plays, alone = python_blocks(ROOT / "docs" / "in_an_app.md")
    prompts = {"decider": "Which of {options}?"}
    environment = trl_multiagent.FunctionEnvironment(prompts, lambda completions, **columns: [1.0])
    tiny_team(environment.roles).save_pretrained("outputs/my_run")
    tiny_team(["main"]).save_pretrained("outputs/other")
    names = run_example(plays, {"AgentTeam": trl_multiagent.AgentTeam, "hidden": environment})
    assert names["turns"][0].joint_action.keys() == {"decider"}
    classes = {"AutoModelForCausalLM": AutoModelForCausalLM, "AutoTokenizer": AutoTokenizer}
    run_example(alone.replace("my_run", "other"), classes)


def test_examples_of_the_sandbox_and_of_one_agent(run_example, capsys):
    first, second = blocks("sandbox")
    run_example(second, run_example(first))
    assert capsys.readouterr().out.splitlines()[0] == "2 of 2"
    (single,), (configs,), (reasoning,) = blocks("controls"), blocks("trainers"), blocks("reasoning")
    names = {"environment": tiny_environment(["poet", "critic"]), "AgentTeam": trl_multiagent.AgentTeam}
    assert run_example(single, names)["team"].roles == names["environment"].roles == ("team",)
    assert run_example(configs)["critics"].num_generations == 1
    review = run_example(reasoning)["review"]
    asked = review.prompts({"question": "Rain?"}, [])
    assert asked == {"solver": "Rain?"}


def test_actor_critic_example(run_example):
    (example,) = python_blocks(ROOT / "docs" / "actor_critic.md")
    log = run_example(example)["trainer"].state.log_history
    assert log[0]["critics/central/value_loss"] >= 0.0 and "agents/poet/advantage_std" in log[0]


def test_code_reward_example(run_example, monkeypatch):
    (example,) = python_blocks(ROOT / "docs" / "reward.md")
    problem = {"task_id": "T/1", **PROBLEM}
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: Dataset.from_list([problem] * 4))
    log = run_example(example)["trainer"].state.log_history
    assert log[0]["rewards/code_reward/mean"] >= 0.0


def test_preference_examples(run_example):
    training, evaluation = python_blocks(ROOT / "docs" / "madpo.md")
    names = run_example(training)
    assert trl_multiagent.AgentTeam.from_pretrained("poets").roles == ("poet", "critic")
    names |= {"held_out_pairs": names["preferences"], "environment": tiny_environment(["poet", "critic"])}
    names["held_out_items"] = tiny_items(2)
    run_example(evaluation, names)
    assert {"eval_pairs_loss", "eval_items_reward"} <= names["trainer"].evaluate().keys()


def test_reward_model_example(run_example, tmp_path):
    (example,) = python_blocks(ROOT / "docs" / "reward_models.md")
    pairs(("poet", "critic")).save_to_disk("outputs/preferences")
    names = run_example(example)
    (outcome,) = names["environment"].score([{"topic": "rain"}], [{"poet": "grey", "critic": "wet"}], [()])
    assert set(outcome.metrics) == {"rewards/judge"} and (tmp_path / "judge" / "held_out.json").is_file()


def test_collection_examples(run_example, tiny_model, monkeypatch):
    collect, own_task, replay = python_blocks(ROOT / "docs" / "preferences.md")
    names = run_example(collect, {"items": Dataset.from_dict({"topic": ["rain", "snow", "wind"]})})
    assert len(names["preferences"]) > 3 and names["preferences"].column_names[0] == "poet_prompt"

    names["TASK"] = Task(lambda settings: names["environment"], lambda settings: (names["items"], None))
    argv = ["collect", "--model_name", tiny_model, "--preference_num_candidates", "3", "--max_completion_length", "4"]
    monkeypatch.setattr("sys.argv", [*argv, "--output_dir", "own"])
    run_example(own_task, names)
    assert load_preferences("own/preferences", ("poet", "critic")).num_rows > 0

    run_example(replay, names)
    assert len(names["drawn"]) == 125 and {number for number, _ in names["drawn"]} == {0, 1, 2}


def test_task_example(tmp_path, capsys):
    (task,) = blocks("task_settings")
    (tmp_path / "topics.json").write_text('[{"topic": "rain"}, {"topic": "snow"}]')
    names = {}
    exec(task, names)
    argv = ["--model_name", "m", "--dry_run", "--override"]
    run_recipe("magrpo", names["TASK"], [*argv, f"dataset.name={tmp_path}/topics.json"])
    out = capsys.readouterr().out
    assert "poet: m, critic: m" in out and "2 items of" in out
    with pytest.raises(SystemExit):
        run_recipe("magrpo", names["TASK"], [*argv, "haiku.max_words=0"])
    assert "`haiku.max_words` is 0; it must be at least 1." in capsys.readouterr().err
