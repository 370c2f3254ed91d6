"""The recipe scripts, run as users run them."""

import json
import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import scripts
import yaml
from accelerate.commands import launch
from safetensors import safe_open
from scripts import algorithm_of

from trl_multiagent import AgentTeam, cli
from trl_multiagent.configs.recipes.code_generation import demo, prompts
from trl_multiagent.configs.recipes.demo.problems import demo_dataset
from trl_multiagent.models.adapter_config import read_adapter_config
from trl_multiagent.runs.models import make_loader
from trl_multiagent.runs.prepared import PreparedRun
from trl_multiagent.tasks.code_generation.data import TASK, load_code_dataset
from trl_multiagent.team.files import read_team_file

from prepared import parse_recipe
from tiny import byte_tokenizer, tiny_llama


ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes" / "code_generation"
# Those of MADPO are in tests/preferences/test_preference_run.py, those of MARLHF in test_marlhf.py
CONFIGS = sorted(
    path for path in (RECIPES / "configs").glob("*.yaml") if not path.stem.startswith(("madpo", "reward_model"))
)
OF_PEER = (Path(__file__).parent / "peer_configs").glob("*.yaml")
PEER_CONFIGS = sorted(path for path in OF_PEER if not path.stem.startswith(("madpo", "marlhf")))
FILES = {"he": "humaneval.jsonl", "che": "coophumaneval.jsonl", "mbpp": "mbpp_sanitized.jsonl"}


run_script = partial(scripts.run_script, "code_generation")


@pytest.mark.parametrize("config", [*CONFIGS, *PEER_CONFIGS], ids=lambda path: path.stem)
def test_every_configuration_has_a_plan(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_script(algorithm_of(config), "--config", str(config), "--dry_run")
    out, err = capsys.readouterr()
    assert "Dry run" in out and "env steps" in out and "joint actions" in out
    computed_in = "float32" if config.stem.endswith("demo") else "bfloat16"
    weights = (
        "LoRA of rank 16"
        if config.stem.endswith(("smollm2", "coder"))
        else f"(float32 weights, computed in {computed_in})"
    )
    assert config not in CONFIGS or weights in out
    assert err.count("is the data type to compute in") == ("dtype: bfloat16" in config.read_text())
    assert list(tmp_path.iterdir()) == []


def test_what_peer_files_give_the_loaders():
    path = Path(__file__).parent / "peer_configs" / "model_kwargs_generation_config.yaml"
    argv = ["--config", str(path), "--override", "agent_model.tokenizer_kwargs.use_fast=true"]
    recipe = parse_recipe("magrpo", TASK, [*argv, "agent_model.model_kwargs.use_safetensors=true"])
    assert recipe.agent_model.torch_dtype == "bfloat16"
    assert make_loader(recipe).arguments == {
        "trust_remote_code": True, "use_safetensors": True, "tokenizer_kwargs": {"use_fast": True},
        "reasoning": None, "chat_template_kwargs": None,
    }  # fmt: skip
    assert recipe.sections["external"].expert_model == "deepseek-coder"
    for section in ("agent_model", "magrpo"):
        recipe = parse_recipe("magrpo", TASK, [*argv, f"{section}.chat_template_kwargs={{effort: high}}"])
        assert make_loader(recipe).arguments["chat_template_kwargs"] == {"effort": "high"}


@pytest.mark.parametrize(("config", "argv", "parts"), [
    ("magrpo_he", "--override agent_model.name=bigcode/starcoder2-3b magrpo.num_turns=1", ["aux: bigcode/"]),
    ("magrpo_he", "--override model_name='bigcode/starcoder2-3b'", ["aux: bigcode/starcoder2-3b"]),
    ("grpo_che", "--override grpo.num_train_epochs=20 grpo.learning_rate=3e-5", ["20 epochs"]),
    ("mt_magrpo_che", "--override dataset.train_split='test[16:]'", ["split test[16:]"]),
    ("mt_magrpo_che", "--override magrpo.num_turns=2 magrpo.turn_gradient_weights=[1.5,0.5]", ["handoff random"]),
    ("magrpo_he", "--model_name Qwen/Qwen2.5-Coder-7B", ["main: Qwen/Qwen2.5-Coder-7B"]),
    ("mt_magrpo_he", "--num_epochs 10 --num_turns 2 --turn_gradient_weights 1.2 0.8", ["10 epochs", "random"]),
    ("mt_magrpo_che", "--override external.mode='level_feedback' external.sandbox_slice=-2", ["2 turns"]),
    ("iac_he", "--override critic_model.name=Qwen/Qwen2.5-0.5B", ["critic_form model from Qwen/Qwen2.5-0.5B"]),
    ("iac_he", "--override peft.r=4 iac.critic_form=adapter", ["_form adapter\n"]),
    ("maac_he", "--override maac.critic_type=q maac.num_generations=2 maac.joint_mode=cross", ["type q", "4 joint"]),
    ("iac_he", "--override iac.num_iterations=3 iac.max_steps=9", ["3 steps on each batch", "env steps        12"]),
    ("ac_he", "--override ac.critic_form=head ac.value_head_hidden_dim=64", ["critic_form head", "   main:"]),
])  # fmt: skip
def test_command_lines(config, argv, parts, capsys):
    """Those of other releases, and settings of critics."""
    path = RECIPES / "configs" / f"{config}_config.yaml"
    run_script(algorithm_of(path), "--config", str(path), "--dry_run", *shlex.split(argv))
    captured = capsys.readouterr()
    assert all(part in captured.out for part in parts)
    assert "ac_he" not in config or "no effect" not in captured.err


@pytest.mark.parametrize(
    ("algorithm", "config"),
    [("magrpo", "mt_magrpo_che"), ("grpo", "grpo_che")],
)
def test_scripts_train_a_tiny_team(algorithm, config, tiny_model, shared_data, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ID", "7")
    path = str(RECIPES / "configs" / f"{config}_config.yaml")
    data = shared_data / FILES[config.rpartition("_")[2]]
    run_script(
        *(algorithm, "--config", path, "--override", f"agent_model.name={tiny_model}", f"dataset.name={data}"),
        *(f"output.base_dir={tmp_path}", "output.save_final_model=false", "--eval_interval", "0"),
        *("--max_steps", "1", "--max_completion_length", "8", "--save_strategy", "no", "--disable_tqdm"),
    )
    folder = tmp_path / ("mt_job_7" if config.startswith("mt_") else "job_7")
    merged = yaml.safe_load((folder / "config.yaml").read_text())
    assert merged["agent_model"]["name"] == tiny_model
    assert merged[algorithm]["max_steps"] == 1
    assert not (folder / "team.json").exists()


# Prompts for small models, and what they write


@pytest.mark.parametrize("name", ["humaneval", "coophumaneval", "mbpp"])
def test_prompts_for_small_models_tell_the_task_in_prose_after_solved_problems(name):
    """A small model completes any header that it sees, and copies what a prompt shows."""
    items = load_code_dataset(name)
    assert {call.partition("(")[0] for call, *_ in prompts.SOLVED}.isdisjoint(items["entry_point"])
    for item in items:
        chats = [prompts.aux(item), prompts.main(item), prompts.alone(item)]
        assert all([x["role"] for x in chat] == ["user", "assistant"] * 2 + ["user"] for chat in chats)
        # Without the function that a task names, it cannot be solved
        others = [x for x in re.findall(r"^def (\w+)", item["prompt"], re.MULTILINE) if x != item["entry_point"]]
        assert all(re.findall(r"def (\w+)", chat[-1]["content"]) == others for chat in chats)
        assert all(chat[-1]["content"].strip().count("\n") for chat in chats)  # the task, and what to do
        assert all(f"`{item['entry_point']}(" in chat[-1]["content"] for chat in chats)
    told = prompts.main(PROBLEM)[-1]["content"]
    assert told.startswith("Double x.\n") and "`f(x)` with calls of `aux(x)`" in told
    for feedback in ("Result: it fails", "Wrong", "def g(x):\n    return x"):
        assert prompts.main({**PROBLEM, "prompt": feedback})[-1]["content"].startswith(f"{feedback}\n")


def test_prompts_for_small_problems_leave_out_examples():
    for item in demo_dataset("test"):
        for chat in (prompts.list_aux(item), prompts.list_main(item), prompts.list_alone(item)):
            task, asked = chat[-1]["content"].split("\n")
            assert task in item["prompt"] and f"`{item['entry_point']}(" in asked


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (([6, 8, 28], 2000, [21, 5, 30], [8, 3, 12, 4]), ([6, 28], 366, 510, 6)),
        (([0, 1], 1900, [], [4]), ([], 365, 0, 2)),
        (([], 2023, [20], [2, 16]), ([], 365, 0, 8)),
    ],
)
def test_the_solved_problems_are_right(values, expected):
    for (_, _, aux, main), value, right in zip(prompts.SOLVED + prompts.LISTS, values, expected, strict=True):
        names = {}
        exec(f"{aux}\n{main}", names)
        assert names[main[4 : main.index("(")]](value) == right


def test_the_demo_shows_answers_before_and_after(tmp_path, monkeypatch, capsys):
    """The demo of recipes/real starts processes, here its commands run in this one."""
    monkeypatch.setattr(launch, "launch_command", lambda options: cli.main(options.training_script_args))
    monkeypatch.chdir(tmp_path)
    tiny_llama().save_pretrained("model")
    byte_tokenizer(chat_template="{% for m in messages %}{{ m.content }}<eos>{% endfor %}").save_pretrained("model")
    settings = ["magrpo.max_steps=1", "magrpo.max_completion_length=4", "magrpo.num_generations=2"]
    demo.main(str(tmp_path / "model"), ["--override", *settings], tmp_path / "run", items=1)
    shown = capsys.readouterr().out.partition("Before and after")[2]
    words = [
        "sum_negate_threes",
        "--- before: 0 of 8 tests pass, no test that passes needs aux",
        "--- after: ",
        "# aux",
        "minutes",
        "report.html",
    ]
    assert all(word in shown for word in words), shown
    with pytest.raises(SystemExit, match="nothing to show"):  # the earlier run is another one
        demo.main(str(tmp_path / "model"), ["--override", *settings, "--dry_run"], tmp_path / "run")
    # Adapters that were trained before, on a base that has another name here
    (run,) = (path.parent for path in Path("run").glob("*/team.json"))
    kept = shutil.ignore_patterns("tokenizer*", "chat_template*", "*.html", "evaluation*", "trees", "checkpoint-*")
    shutil.copytree(run, "kept", ignore=kept)
    shutil.move("model", "renamed")
    for _ in range(2):
        demo.main(str(tmp_path / "renamed"), folder=tmp_path / "shown", trained=tmp_path / "kept", items=1)
    shown = capsys.readouterr().out.partition("Before and after")[2]
    assert all(word in shown for word in words), shown


def test_trained_adapters_are_those_of_the_demo():
    files = [path for path in demo.TRAINED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10e6
    assert read_team_file(demo.TRAINED / "team.json").roles == ("aux", "main")
    for role in ("aux", "main"):
        adapter = read_adapter_config(str(demo.TRAINED / "agents" / role))
        assert adapter.base_model_name_or_path == demo.HUB
        with safe_open(demo.TRAINED / "agents" / role / "adapter_model.safetensors", "pt") as weights:
            assert len(weights.keys()) == 2 * 7 * 24  # of each linear layer


# A run that continues a checkpoint


PROBLEM = {"prompt": 'def f(x):\n    """Double x."""\n', "entry_point": "f"}
PROBLEM["test"] = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 4\n"


def write_problems(path, prompt=PROBLEM["prompt"]):
    rows = [{"task_id": f"T/{k}", **PROBLEM} for k in range(3)]
    rows[2]["prompt"] = prompt
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def saved_run(tiny_model, tmp_path_factory):
    """Arguments of a recipe, and the folder of its run of two steps."""
    folder = tmp_path_factory.mktemp("saved")
    write_problems(folder / "humaneval.jsonl")
    tiny_llama(hidden_size=16).save_pretrained(folder / "other_model")
    byte_tokenizer().save_pretrained(folder / "other_model")
    arguments = [
        *("--override", f"agent_model.name={tiny_model}", f"dataset.name={folder}/humaneval.jsonl"),
        *("peft.r=4", "magrpo.num_turns=2", "magrpo.num_generations=2"),
        *("--max_completion_length", "4", "--save_steps", "1", "--disable_tqdm", "--output_dir", str(folder / "run")),
    ]
    run_script("magrpo", *arguments, "--max_steps", "2")
    return arguments, folder


def error_line(capsys):
    """The one line on stderr that says why the program ended."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    return line


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ("external.mode=plain", ["environment mode: 'level_feedback' in the checkpoint, 'plain' in this run"]),
        ("magrpo.learning_rate=0.5 seed=3", ["learning_rate: ", "seed: 42 in the checkpoint, 3 in this run"]),
        ("peft.r=8", ["adapter aux r: 4 in the checkpoint, 8 in this run", "agent main: "]),
        ("peft=null", ["agent aux: 'llama, 22944 parameters, 4352 trained' in the checkpoint, 'llama, 18592"]),
        ("dataset.train_split=test[:2]", ["train_dataset: '3 items with", "'2 items with"]),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_before_models_are_loaded(
    saved_run, monkeypatch, capsys, changes, differences
):
    arguments, folder = saved_run
    monkeypatch.setattr(PreparedRun, "load_team", lambda *args: pytest.fail("a team was loaded"))
    changes = changes.format(folder=folder).split()
    resume = ["--max_steps", "3", "--resume_from_checkpoint", str(folder / "run" / "checkpoint-2")]
    with pytest.raises(SystemExit):
        run_script("magrpo", *arguments, "--override", *changes, *resume)
    message = error_line(capsys)
    assert "checkpoint-2 is a checkpoint of another run: " in message
    assert all(difference in message for difference in differences), message
    assert "peft" in " ".join(changes) or message.count(" in the checkpoint, ") <= 3


def test_the_rest_of_what_is_known_of_a_checkpoint_before_models_are_loaded(saved_run, tmp_path, monkeypatch, capsys):
    arguments, folder = saved_run
    copy = shutil.copytree(folder / "run", tmp_path / "run")
    arguments = [str(copy) if x == str(folder / "run") else x.replace(str(folder), str(tmp_path)) for x in arguments]
    monkeypatch.setattr(PreparedRun, "load_team", lambda *args: pytest.fail("a team was loaded"))

    def refusal(*argv):
        with pytest.raises(SystemExit):
            run_script("magrpo", *arguments, "--max_steps", "3", "--resume_from_checkpoint", *argv)
        return error_line(capsys)

    write_problems(tmp_path / "humaneval.jsonl", prompt=PROBLEM["prompt"].replace("Double", "Twice"))
    assert "train_dataset: '3 items with entry_point, prompt, task_id, test, digest " in refusal("true")
    write_problems(tmp_path / "humaneval.jsonl")
    changes = ["--override", "magrpo.learning_rate=0.5", "external.mode=plain", "magrpo.resume_changes=allow"]
    message = refusal("true", *changes)
    assert "is a checkpoint of another run: learning_rate: " in message and "environment mode" not in message
    monkeypatch.undo()
    weights = copy / "checkpoint-2" / "agents" / "aux" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    message = refusal("true")
    assert (
        "checkpoint-2 is damaged: missing, or changed since it was saved: agents/aux/adapter_model.safetensors."
        in message
    )


def test_allowed_changes_of_a_recipe(saved_run, tmp_path):
    arguments, folder = saved_run
    arguments = [*arguments, "--override", "external.mode=plain", "magrpo.resume_changes=allow", "--max_steps", "3"]
    arguments = [str(tmp_path / "run") if x == str(folder / "run") else x for x in arguments]
    run_script("magrpo", *arguments, "--resume_from_checkpoint", str(folder / "run" / "checkpoint-2"))
    assert AgentTeam.from_pretrained(str(tmp_path / "run")).has_adapters
    merged = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert merged["external"]["mode"] == "plain" and "resume_changes" not in merged["magrpo"]


def test_notes_on_critics(capsys):
    """Settings of a separate critic have no effect on a head."""
    path = Path(__file__).parent / "peer_configs" / "iac_shared_config.yaml"
    run_script("iac", "--config", str(path), "--dry_run")
    captured = capsys.readouterr()
    assert "critic_form head" in captured.out
    assert "`critic_model` and `critics` have no effect" in captured.err and "critic_devices" in captured.err

    settings = ["iac.critic_lora_r=4"]
    path = RECIPES / "configs" / "iac_he_config.yaml"
    run_script("iac", "--config", str(path), "--dry_run", "--override", *settings)
    note = capsys.readouterr().err
    assert "no effect here" in note and all(setting.partition("=")[0] in note for setting in settings)


# Several turns on real problems


@pytest.mark.parametrize("mode", ["level_feedback", "expert_edits"])
def test_each_mode_plays_two_turns_of_real_problems(mode, tiny_model, shared_data, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ID", mode)
    template = tmp_path / "aux.txt"
    template.write_text("Help with {entry_point}:\n{prompt}")
    run_script(
        *("magrpo", "--config", str(RECIPES / "configs" / "mt_magrpo_he_config.yaml"), "--override"),
        *(f"agent_model.name={tiny_model}", f"dataset.name={shared_data / FILES['he']}"),
        *("dataset.train_split=test[33:37]", f"output.base_dir={tmp_path}", f"prompt_files.aux={template}"),
        *(f"external.mode={mode}", "external.sandbox_slice=all", "external.hidden_tests=2"),
        *("external.expert_model=m", "external.expert_base_url=http://127.0.0.1:9/v1", "external.expert_tries=1"),
        "external.expert_on_failure=plain",
        *("magrpo.external_original_prompt=True", "magrpo.max_history_length=20"),
        *("--max_steps", "1", "--max_completion_length", "8", "--save_strategy", "no", "--disable_tqdm"),
        *("--num_generations", "2", "--eval_interval", "0", "--trace_steps", "1"),
    )
    template.unlink()
    folder = tmp_path / f"mt_job_{mode}"
    rows = pd.read_parquet(folder / "trace").to_dict("records")
    items = {json.loads(line)["task_id"]: json.loads(line) for line in (shared_data / FILES["he"]).open()}
    assert {row["turn"] for row in rows} == {1, 2}
    for row in rows:
        if row["turn"] == 1:
            assert row["prompt/aux"].startswith("Help with ")
        else:
            assert "Revise your function" in row["prompt/main"]
            last = items[row["item"]]["test"].strip().splitlines()[-1].strip()
            assert not any(last in row[f"prompt/{role}"] for role in ("aux", "main"))
    # The saved settings, with the text of the template, are those of a run of its own
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["prompt_files"] == {"aux": "Help with {entry_point}:\n{prompt}"}
    run_script("magrpo", "--config", str(folder / "config.yaml"), "--dry_run")
    with pytest.raises(SystemExit):
        run_script("magrpo", "--config", folder / "config.yaml", "--dry_run", "--override", "prompt_files.main=no.txt")
