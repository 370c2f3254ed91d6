"""Settings: reading, merging and checking them, and what they mean for the trainer. No model is loaded here."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from trl import ModelConfig, get_peft_config

from trl_multiagent import AgentTeam, MAGRPOConfig
from trl_multiagent.code.sandbox import sandbox
from trl_multiagent.environments.task import Task
from trl_multiagent.environments.task_errors import UnavailableError
from trl_multiagent.limits import Setting
from trl_multiagent.runs import run as runs_run
from trl_multiagent.runs.plan import num_evaluations, print_plan, rollout_lines
from trl_multiagent.runs.prepared import prepare_run
from trl_multiagent.runs.run import run_recipe
from trl_multiagent.runs.training import set_up_wandb
from trl_multiagent.settings.algorithms import ALGORITHMS, import_class
from trl_multiagent.settings.derive import check_settings, make_training_args
from trl_multiagent.settings.read import OVERRULED, RENAMED, merge, parse_value
from trl_multiagent.settings.schema import AgentModel, Wandb, keys_of
from trl_multiagent.tasks.code_generation.data import TASK
from trl_multiagent.team.load import LoadError

from prepared import parse_recipe


@pytest.fixture
def parse(tmp_path, capsys):
    """Parses sections, as a YAML file, and arguments."""

    def parse(sections: dict | str = "", *argv: str, algorithm: str = "magrpo"):
        base = {"agent_model": {"name": "org/model"}, "dataset": {"name": "org/humaneval"}}
        text = yaml.safe_dump(merge([base, sections])) if isinstance(sections, dict) else sections
        (tmp_path / "config.yaml").write_text(text)
        recipe = parse_recipe(algorithm, TASK, ["--config", str(tmp_path / "config.yaml"), *argv])
        recipe.stderr = capsys.readouterr().err
        return recipe

    return parse


@pytest.fixture
def error_of(parse, capsys):
    """The line that wrong settings end with."""

    def error_of(*args, **kwargs) -> str:
        with pytest.raises(SystemExit) as exit_info:
            parse(*args, **kwargs)
        assert exit_info.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return error_of


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("1e-5", 1e-5),
        ("[1.5,0.5]", [1.5, 0.5]),
        ("(1, 2)", [1, 2]),
        ("'quoted'", "quoted"),
        ("test[33:163]", "test[33:163]"),
        ("[wandb,tensorboard]", ["wandb", "tensorboard"]),
        ("{main: 1e-5}", {"main": 1e-5}),
        ("[http://127.0.0.1:8000]", ["http://127.0.0.1:8000"]),
        ("[https://a/b?c=[1], localhost:8000]", "[https://a/b?c=[1], localhost:8000]"),
        ("[https://a/b, localhost:8000]", ["https://a/b", "localhost:8000"]),
        ("[:64]", "[:64]"),
        ("[10%:-5%]", "[10%:-5%]"),
        ("[:16]+[32:]", "[:16]+[32:]"),
        ("Answer: yes", "Answer: yes"),
        ("2024-01-01", "2024-01-01"),
    ],
)
def test_values_on_the_command_line(text, value):
    parsed = parse_value(text)
    assert parsed == value and type(parsed) is type(value)


def test_none_on_the_command_line_is_no_value_unless_it_is_a_choice(parse):
    recipe = parse({"magrpo": {"num_turns": 1}}, "--reasoning", "none", "--scale_rewards", "none", "--devices", "none")
    assert recipe.agent_model.reasoning == recipe.training_args.scale_rewards == "none"
    assert recipe.training_args.devices is None
    recipe = parse({}, "--override", "agent_model.reasoning=none", "peft.bias=none")
    assert recipe.agent_model.reasoning == recipe.peft_config.bias == "none"
    assert parse_value("none", "madpo_iter.preference_replay_mode") == "none"


def test_layers_win_in_order(parse):
    sections = {"magrpo": {"num_turns": 3, "num_generations": 5, "max_new_tokens": 7}, "output": {"base_dir": "a"}}
    recipe = parse(sections, "--override", "magrpo.num_turns=2", "magrpo.num_generations=6", "--num_generations", "8")
    args = recipe.training_args
    assert (args.num_turns, args.num_generations, args.max_completion_length) == (2, 8, 7)
    assert recipe.output.base_dir == "a"


def test_override_is_split_at_the_first_equals_sign_and_may_be_repeated(parse):
    recipe = parse({}, "--override", "dataset.name=m=2", "seed=5", "--override", "wandb.name=n")
    assert (recipe.dataset.name, recipe.training_args.seed, recipe.wandb.name) == ("m=2", 5, "n")


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--override", "grpo.learning_rate=3e-5"], "learning_rate", 3e-5),
        (["--num_turns", "2", "--turn_gradient_weights", "1.2", "0.8"], "turn_gradient_weights", [1.2, 0.8]),
        (["--agent_learning_rates", '{"main": 1e-5}'], "agent_learning_rates", {"main": 1e-5}),
        (["--stop_strings", r'{"main": ["\n\n", "x"]}'], "stop_strings", {"main": ["\n\n", "x"]}),
        (["--log_completions"], "log_completions", True),
        (["--gradient_checkpointing", "false"], "gradient_checkpointing", False),
    ],
)
def test_every_field_of_the_configuration_class_can_be_set(parse, argv, field, value):
    recipe = parse({"agent_model": {"temperature": 0.6}}, *argv, algorithm="grpo")
    assert getattr(recipe.training_args, field) == value


@pytest.mark.parametrize(
    ("sections", "field", "expected"),
    [
        ("magrpo: {agent_learning_rate: 0.5}", "learning_rate", 0.5),
        ("magrpo: {agent_learning_rate: 2e-5}", "learning_rate", 2e-5),  # YAML reads a text
        ("magrpo: {save_strategy: no}", "save_strategy", "no"),  # and here a truth value
        ("magrpo: {max_new_tokens: 99}", "max_completion_length", 99),
        ("magrpo: {normalize_advantage: true}", "advantage_normalization", True),
        ("magrpo: {joint_mode: crossed}", "joint_mode", "cross"),
        ("agent_model: {temperature: 0.7}", "temperature", 0.7),
        ("agent_model: {top_k: 50}", "top_k", 50),
        ("agent_model: {top_k: null}", "top_k", 0),
        ("reward_processor: {shift: -4}", "reward_shift", -4),
        ("reward_processor: {enabled: false, scale_factor: 2.0}", "reward_scale", 1.0),
        ("output: {verbose: true}", "log_completions", True),
        ("magrpo: {}", "items_per_device", 1),
        ("magrpo: {per_device_train_batch_size: 8}", "items_per_device", 2),  # 4 rows an item
        ("magrpo: {rollout_buffer_size: 4}", "items_per_device", 4),
        ("magrpo: {rollout_buffer_size: 4, num_turns: 2, handoff: best}", "items_per_device", 2),
        ("magrpo: {rollout_buffer_size: 34, num_turns: 2, joint_mode: crossed}", "items_per_device", 2),  # 17 nodes
        ("magrpo: {reference_kl_enabled: true}", "beta", 0.1),
        ("magrpo: {reference_kl_enabled: true, reference_kl_coef: 0.05}", "beta", 0.05),
        ("magrpo: {reference_kl_enabled: false, reference_kl_coef: 0.05}", "beta", 0.0),
        ("magrpo: {eval_interval: 16, items_per_device: 4}", "eval_steps", 4),
        ("magrpo: {eval_interval: 16, items_per_device: 4}", "eval_strategy", "steps"),
        ("magrpo: {eval_interval: 0}", "eval_strategy", "no"),
        ("magrpo: {}", "eval_strategy", "no"),
    ],
)
def test_settings_in_the_words_of_other_releases(parse, sections, field, expected):
    recipe = parse(f"model_name: m\ndataset: {{name: d, eval_split: 'test[:4]'}}\n{sections}")
    assert recipe.stderr == ""
    assert getattr(recipe.training_args, field) == expected


def test_other_names_of_the_model(parse):
    assert parse("model_name: a\ndataset: {name: d}").model_names == "a"
    assert parse("model: {name: a, dtype: bfloat16}\ndataset: {name: d}").agent_model.torch_dtype == "bfloat16"
    assert parse({"agents": ["a", "b"]}).model_names == ["a", "b"]
    assert parse({}, "--override", "model_name='bigcode/starcoder2-3b'").model_names == "bigcode/starcoder2-3b"


def test_two_names_of_one_setting_in_one_place_must_agree(parse, error_of):
    message = error_of({"magrpo": {"learning_rate": 1e-5, "agent_learning_rate": 2e-5}})
    assert "`magrpo.agent_learning_rate: 2e-05` and `magrpo.learning_rate: 1e-05`" in message
    assert parse({"magrpo": {"learning_rate": 1e-5, "agent_learning_rate": 1e-5}}).training_args.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("sections", "field", "value", "note"),
    [
        ("agent_model: {temperature: 0.7}\nmagrpo: {temperature: "
        "0.8}", "temperature", 0.8, "(`magrpo.temperature` is used)"),
        ("agent_model: {top_k: 40}\nmagrpo: {top_k: null}", "top_k", 0, "agent_model.top_k"),
        ("agent_model: {top_k: null}\nmagrpo: {top_k: 40}", "top_k", 40, ""),
        ("seed: 1\nmagrpo: {seed: 2}", "seed", 1, "magrpo.seed (`seed` is used)"),
        ("magrpo: {reward_shift: -1}\nreward_processor: {shift: "
        "-4}", "reward_shift", -1, "because `magrpo.reward_shift` is -1."),
        ("magrpo: {reward_shift: null}\nreward_processor: {shift: -4}", "reward_shift", -4, ""),
        ("magrpo: {original_prompt: false, num_turns: 2}\nexternal: {original_prompt: true}", "original_prompt", False,
         "external.original_prompt (`magrpo.original_prompt` is used)"),
    ],
)  # fmt: skip
def test_two_sections_of_a_file_that_set_the_same_thing(parse, sections, field, value, note):
    recipe = parse(f"model_name: m\ndataset: {{name: d}}\n{sections}")
    assert getattr(recipe.training_args, field) == value
    assert note in recipe.stderr and len(recipe.stderr.splitlines()) == (note != "")


def test_an_override_wins_over_the_algorithms_section_of_the_file(parse):
    recipe = parse({"magrpo": {"temperature": 0.8}}, "--override", "agent_model.temperature=0.2")
    assert recipe.training_args.temperature == 0.2 and recipe.stderr == ""


def test_the_first_rows(parse, monkeypatch):
    rows = Dataset.from_dict({"task_id": list(range(20))})
    sections = {"dataset": {"split": "test", "size": 7, "eval_split": "test", "eval_size": 5}}
    recipe = parse(merge([sections, {"magrpo": {"eval_num_samples": 9}}]))
    monkeypatch.setattr(
        recipe, "task", Task(lambda settings: None, lambda settings: settings.dataset and (rows, rows))
    )
    assert [len(dataset) for dataset in recipe.load_datasets()] == [7, 5] and recipe.dataset.train_split == "test"


def test_wandb(parse, monkeypatch):
    monkeypatch.setattr("trl_multiagent.runs.prepared.get_available_reporting_integrations", lambda: ["wandb"])
    recipe = parse({"wandb": {"project": "p", "run_name": "r", "tags": ["a", "b"], "dir": "d"}})
    assert recipe.training_args.report_to == ["wandb"]
    assert recipe.training_args.run_name == "r"
    assert recipe.wandb.tags == ["a", "b"]
    args = parse({"wandb": {"project": None, "name": "r"}}).training_args
    assert args.report_to == [] and args.run_name == "r"  # other trackers show it, too
    assert parse({"wandb": {"project": "p"}, "magrpo": {"report_to": "none"}}).training_args.report_to == []


def test_wandb_gets_its_section_as_environment_variables(monkeypatch):
    monkeypatch.setattr("os.environ", environment := {})
    set_up_wandb(Wandb(project="p", entity="e", dir="d", tags=["a", "b"], id="7", resume="allow"))
    expected = {"PROJECT": "p", "ENTITY": "e", "DIR": "d", "TAGS": "a,b", "RUN_ID": "7", "RESUME": "allow"}
    assert environment == {f"WANDB_{name}": value for name, value in expected.items()}


def test_wandb_that_is_not_installed_is_noticed_before_the_run(parse, error_of, monkeypatch):
    monkeypatch.setattr("trl_multiagent.runs.prepared.get_available_reporting_integrations", list)
    assert "not installed" in error_of({"wandb": {"project": "p"}})
    assert "not installed" in parse({"wandb": {"project": "p"}}, "--dry_run").stderr


def test_known_settings_without_effect_are_named_in_one_line(parse):
    sections = {"agent_model": {"type": "qwen", "max_length": 2048, "special_tokens": {}}}
    sections |= {"tokenizer": {"padding_side": "left"}, "external": {"expert_model": "deepseek-coder"}}
    section = {"parallel_training": "none", "agent_devices": ["cuda:0"], "reference_devices": None}
    recipe = parse({**sections, "magrpo": section})
    assert len(recipe.stderr.splitlines()) == 1
    for name in ("agent_model.type", "agent_model.max_length", "tokenizer", "magrpo.agent_devices"):
        assert name in recipe.stderr
    assert "special_tokens" not in recipe.stderr and "reference_devices" not in recipe.stderr


def test_sections_that_do_not_apply_may_be_empty(parse):
    assert parse({"peft": None, "critic_model": {}, "critics": None, "grpo": None, "wandb": None, "agents": None})


@pytest.mark.parametrize("algorithm", ["magrpo", "iac"])
@pytest.mark.parametrize("spelling", ["external.{}", "{algorithm}.external_{}", "{algorithm}.{}"])
def test_options_of_the_history_have_three_spellings(parse, spelling, algorithm):
    given = {"original_prompt": False, "previous_responses": True, "previous_prompts": False, "memory_mode": "last"}
    options = [spelling.format(name, algorithm=algorithm) + f"={value}" for name, value in given.items()]
    recipe = parse({algorithm: {"num_turns": 2}}, "--override", *options, algorithm=algorithm)
    args = recipe.training_args
    shown = (args.memory_mode, args.original_prompt, args.previous_prompts, args.previous_response)
    assert shown == ("last", False, False, True)
    assert recipe.stderr == ""


@pytest.mark.parametrize(("given", "alone"), [(None, True), (True, True), (False, False)])
def test_prompts_may_pass_through(parse, given, alone):
    for section in ("external", "magrpo"):
        recipe = parse({section: {"external_prompt_passthrough": given}})
        assert recipe.stderr == "" and recipe.make_environment().external_prompt_passthrough is alone


def test_folder_of_a_run(parse, monkeypatch):
    assert parse({"output": {"base_dir": "b"}}).run_folder.name.startswith("job_")
    assert parse({"magrpo": {"num_turns": 2}}).run_folder.name.startswith("mt_job_")
    assert parse({"magrpo": {"output_dir": "exactly/here"}}).run_folder == Path("exactly/here")
    monkeypatch.setenv("RUN_ID", "my run/7")
    recipe = parse({"output": {"base_dir": "b"}})
    assert recipe.run_folder == Path("b/job_my_run_7")
    assert recipe.team_folder == Path("b/job_my_run_7")
    recipe = parse({"output": {"save_path": "team", "save_final_model": True}})
    assert recipe.team_folder == Path("team")
    monkeypatch.setenv("HOME", "/home/me")
    recipe = parse({"output": {"save_path": "~/team", "base_dir": "~/runs"}}, "--dry_run")
    assert (recipe.team_folder, recipe.run_folder) == (Path("/home/me/team"), Path("/home/me/runs/job_my_run_7"))
    assert parse({}, "--dry_run", "--override", "magrpo.output_dir=~/x").run_folder == Path("/home/me/x")


# Where the results go


def test_a_place_that_cannot_be_written_to(parse, error_of, tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    write = runs_run.tempfile.TemporaryDirectory

    def refuse(dir):  # root may do anything
        if Path(dir).name == "locked":
            raise PermissionError(13, "Permission denied")
        return write(dir=dir)

    monkeypatch.setattr(runs_run.tempfile, "TemporaryDirectory", refuse)
    locked = str(tmp_path / "locked" / "team")
    section = {"output_dir": str(tmp_path / "run")}
    for argv in ([], ["--dry_run"]):
        message = error_of({"output": {"save_path": locked}, "magrpo": section}, *argv)
        assert "`output.save_path`" in message and "nothing can be written to" in message
    assert parse({"output": {"save_path": locked, "save_final_model": False}, "magrpo": section})
    assert "`magrpo.output_dir`" in error_of({"magrpo": {"output_dir": locked}})


def test_a_push_needs_a_token(parse, error_of, monkeypatch):
    monkeypatch.setattr("trl_multiagent.runs.prepared.get_token", lambda: None)
    section = {"push_to_hub": True, "hub_model_id": "me/team"}
    problem = "needs a token that may write: log in with `hf auth login`"
    assert problem in error_of({"magrpo": section})
    assert problem in parse({"magrpo": section}, "--dry_run").stderr  # a plan may be made elsewhere


def test_resuming(parse, error_of, tmp_path, monkeypatch):
    run = tmp_path / "runs" / "job_7"
    for step in (2, 10):
        (run / f"checkpoint-{step}").mkdir(parents=True)
    state = {"checksums": {}, "settings": {}, "weights_only": False}
    (run / "checkpoint-2" / "team_trainer_state.json").write_text(json.dumps(state))
    assert "RUN_ID" in error_of({}, "--resume_from_checkpoint")
    assert f"{run} is not a complete checkpoint" in error_of({}, "--resume_from_checkpoint", str(run), "--dry_run")
    recipe = parse({}, "--resume_from_checkpoint", str(run / "checkpoint-2"))
    assert recipe.resume_from_checkpoint == str(run / "checkpoint-2")
    assert recipe.run_folder == run
    assert recipe.merged["magrpo"] == {}
    monkeypatch.setenv("RUN_ID", "7")
    recipe = parse({"output": {"base_dir": str(run.parent)}}, "--resume_from_checkpoint", "true")
    assert recipe.resume_from_checkpoint == str(run / "checkpoint-10")
    assert recipe.run_folder == run
    monkeypatch.setenv("RUN_ID", "8")
    assert "no checkpoint" in error_of({"output": {"base_dir": str(run.parent)}}, "--resume_from_checkpoint", "true")
    assert parse({}).resume_from_checkpoint is None
    monkeypatch.chdir(run / "checkpoint-2")
    assert parse({}, "--resume_from_checkpoint", ".").run_folder == run


def test_the_merged_settings_are_the_same_recipe(parse, monkeypatch):
    monkeypatch.setenv("RUN_ID", "7")
    sections = {"agent_model": {"top_k": None}, "magrpo": {"rollout_buffer_size": 11, "num_turns": 2}}
    recipe = parse(sections, "--override", "magrpo.agent_learning_rate=3e-5", "--num_generations", "4")
    settings = check_settings("magrpo", TASK, yaml.safe_load(yaml.safe_dump(recipe.merged)))
    again = prepare_run(settings, make_training_args(settings))
    assert again.merged == recipe.merged
    assert again.training_args.to_dict() == recipe.training_args.to_dict()


def test_flags_win_over_the_section_of_the_algorithm(parse):
    sections = {"magrpo": {"chat_template_kwargs": {"enable_thinking": True}}}
    flags = ("--chat_template_kwargs", "{enable_thinking: false}")
    assert parse(sections, *flags).training_args.chat_template_kwargs == {"enable_thinking": False}


def test_the_size_of_an_update_is_shared_among_processes(parse, monkeypatch):
    monkeypatch.setattr(MAGRPOConfig, "world_size", 4)
    assert parse({"magrpo": {"rollout_buffer_size": 8}}).training_args.items_per_device == 2


def test_evaluations_at_shares_of_the_steps_are_counted(parse):
    args = parse({}, "--eval_strategy", "steps", "--eval_steps", "0.1", "--eval_on_start").training_args
    assert num_evaluations(args, 100) == 11


def test_torch_dtype_is_what_is_computed_in(parse):
    """On a CPU as on a GPU. The weights that are trained are float32; the base of a LoRA team has this type."""
    recipe = parse({"agent_model": {"torch_dtype": "bfloat16"}}, "--use_cpu")
    assert (recipe.dtype, recipe.compute_dtype, recipe.training_args.bf16) == ("float32", "bfloat16", True)
    (note,) = recipe.notes
    assert "`agent_model.torch_dtype: bfloat16` is the data type to compute in (`magrpo.bf16: true`)" in note
    assert recipe.form_in_words == "float32 weights, computed in bfloat16"
    recipe = parse({"agent_model": {"torch_dtype": "bfloat16"}, "peft": {"r": 4}}, "--use_cpu", "--bf16", "false")
    assert recipe.form_in_words == "LoRA of rank 4 in float32 on a bfloat16 base, computed in float32"
    assert not recipe.notes
    recipe = parse({"peft": {"r": 4}}, "--use_cpu", "--bf16")
    assert recipe.form_in_words == "LoRA of rank 4 in float32 on a bfloat16 base, computed in bfloat16"


PROCESSORS = {
    "AMD Zen 3": ({"cpu_name": "AMD EPYC 7R13", "avx512_bf16": False, "amx_tile": False}, "float32"),
    "AMD Zen 4": ({"cpu_name": "AMD EPYC 9R14", "avx512_bf16": True, "amx_tile": False}, "bfloat16"),
    "Intel with AMX": ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_tile": True}, "bfloat16"),
    "Intel, AMX is hidden": ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_tile": False}, "float32"),
    "a torch that does not name it": ({"avx512_bf16": True, "amx_tile": False}, "bfloat16"),
    "ARM": ({"architecture": "aarch64", "bf16": True}, "float32"),
}


@pytest.mark.parametrize(("found", "computed"), PROCESSORS.values(), ids=PROCESSORS)
def test_a_cpu_computes_in_bfloat16_where_it_is_quicker(parse, monkeypatch, caplog, found, computed):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    recipe = parse({"peft": {"r": 4}}, "--use_cpu")
    assert recipe.form_in_words == f"LoRA of rank 4 in float32 on a {computed} base, computed in {computed}"
    assert parse({}, "--use_cpu", "--bf16", "false").compute_dtype == "float32"
    assert not caplog.messages
    parse({}, "--use_cpu", "--bf16")
    warned = any("try `bf16: false`" in message for message in caplog.messages)
    assert warned == (computed == "float32")


@pytest.mark.parametrize(("words", "full"), [(["--help"], False), (["--help", "all"], True)])
def test_help(words, full, capsys):
    with pytest.raises(SystemExit) as exit_info:
        run_recipe("maremax", TASK, words, prog="train")
    text = capsys.readouterr().out
    assert exit_info.value.code == 0 and len(text.splitlines()) < (2000 if full else 110)
    for part in ("--override", "--dry_run", "--num_turns", "rollout_buffer_size", "external:"):
        assert part in text, part
    assert ("--push_to_hub" in text) == ("--max_joint_actions" in text) == full == ("--help all" not in text)
    assert text.count("  --num_turns ") == 1
    if full:  # texts of the docstrings
        assert 'it is `"last"` if one of the next three options is given' in " ".join(text.split())


def test_every_setting_has_a_help():
    for name, algorithm in ALGORITHMS.items():
        for field in dataclasses.fields(import_class(algorithm.config)):
            assert not isinstance(field, Setting) or field.metadata["help"], (name, field.name)


# The plan of --dry_run


def test_plan(parse, capsys):
    section = {"num_turns": 2, "num_generations": 3, "items_per_device": 4, "num_train_epochs": 2, "eval_interval": 8}
    recipe = parse({"magrpo": section, "dataset": {"eval_split": "test[:3]"}, "agents": ["a", "b"]})
    recipe.load_datasets = lambda: (range(10), range(3))
    print_plan(rollout_lines(recipe, recipe.make_environment()))
    plan = {line[:17].strip(): line[17:].strip() for line in capsys.readouterr().out.splitlines()}
    assert plan["agents"].startswith("aux: a, main: b")
    assert plan["training"].startswith("10 items of org/humaneval")
    assert plan["evaluation"] == "3 items of split test[:3], every 2 steps"
    assert plan["tree of an item"] == "4 nodes, 12 joint actions = env steps, 12 rows"
    assert plan["optimizer step"] == "4 items x 1 process, 48 env steps"
    assert plan["optimizer steps"].startswith("4 ")  # two whole batches of 4 in 10 items, twice
    assert plan["env steps"] == "192"
    recipe = parse({"magrpo": {"eval_steps": None}})
    recipe.load_datasets = lambda: (range(10), None)
    assert rollout_lines(recipe, recipe.make_environment())["evaluation"] == "none"


def test_the_sandbox_and_what_counts_as_collaboration(parse, tmp_path):
    environment = parse({}).make_environment()
    reward, sandbox = environment.reward, environment.sandbox
    assert (reward.collaboration, reward.adaptive_timeout, sandbox.min_tier) == ("executed", True, "seccomp")
    sections = {"reward": {"collaboration": "static"}, "sandbox": {"workers": 3, "memory_mb": 256, "check_timeout": 2}}
    recipe = parse({**sections, "output": {"base_dir": str(tmp_path)}})
    environment = recipe.make_environment()
    assert environment.reward.collaboration == "static"
    sandbox = environment.sandbox
    assert (sandbox.workers, sandbox.memory_mb, sandbox.check_timeout) == (3, 256, 2)
    assert environment.runner.keep_suspicious == recipe.run_folder / "suspicious_programs"
    assert not recipe.run_folder.exists()


def test_a_machine_below_the_minimal_tier_is_refused_before_anything_is_loaded(parse, monkeypatch):
    monkeypatch.setattr(sandbox, "TIERS", {**sandbox.TIERS, "namespaces": {"no such layer"}})
    with pytest.raises(UnavailableError, match=r"sandbox\.min_tier is 'namespaces'"):
        parse({"sandbox": {"min_tier": "namespaces"}}).make_environment()


def test_vllm_that_is_not_installed(error_of, monkeypatch):
    monkeypatch.setattr("trl_multiagent.trainers.base.vllm.is_vllm_available", lambda: False)
    assert "section `magrpo`: `use_vllm=True` needs vLLM" in error_of({"magrpo": {"use_vllm": True}})


@pytest.mark.parametrize("section", [{}, {"r": 16, "lora_alpha": 32}, {"lora_r": 16, "target_modules": ["q_proj"]}])
def test_the_section_peft(parse, section):
    config = parse({"peft": section}).peft_config
    assert config.r == (16 if section else 8)
    assert config.target_modules == ({"q_proj"} if "target_modules" in section else "all-linear")
    assert parse({"peft": None}).peft_config is None
    assert parse({}, "--override", "peft.target_modules=all-linear", "peft.use_dora=true").peft_config.use_dora is True


def test_the_fields_of_trl_model_config_are_settings():
    known = [f"agent_model.{name}" for name in keys_of(AgentModel)]
    renamed = list({**RENAMED, **OVERRULED})
    for field in dataclasses.fields(ModelConfig):
        assert f"agent_model.{field.name}" in [*known, *renamed], field.name


def test_adapters_and_models_as_trl_describes_them(parse, tiny_model):
    flags = ["--model_name_or_path", tiny_model, "--use_peft", "--lora_r", "4"]
    flags += ["--lora_target_modules", "q_proj", "v_proj"]
    recipe = parse({"agent_model": {"name": None}}, *flags, "--attn_implementation", "eager", "--dtype", "float32")
    expected = get_peft_config(ModelConfig(use_peft=True, lora_r=4, lora_target_modules=["q_proj", "v_proj"]))
    assert recipe.peft_config == expected and recipe.peft_config.lora_alpha == 32
    team = recipe.load_team(["aux", "main"])
    assert team.has_adapters and team.agents["aux"].config._attn_implementation == "eager"
    mixed = parse({"agent_model": {"name": tiny_model, "adapter_roles": ["aux"]}, "peft": {}})
    assert mixed.load_team(["aux", "main"]).adapted_roles == ("aux",)
    sections = {"agent_model": {"name": tiny_model}, "magrpo": {"model_init_kwargs": {"use_safetensors": False}}}
    with pytest.raises(LoadError, match="pytorch_model"):  # the arguments reach `from_pretrained`
        parse(sections).load_team(["aux", "main"])


def test_quantization_as_trl_describes_it(parse, monkeypatch):
    loaded = {}

    def from_pretrained(name, roles, peft_config, *args, **kwargs):
        loaded.update(kwargs, peft_config=peft_config)

    monkeypatch.setattr(AgentTeam, "from_pretrained", from_pretrained)
    sections = {"agent_model": {"load_in_4bit": True, "use_bnb_nested_quant": True, "revision": "2", "use_peft": True}}
    parse({**sections, "magrpo": {"trust_remote_code": True}}).load_team(["aux", "main"])
    config = loaded["quantization_config"]
    assert config.load_in_4bit and config.bnb_4bit_use_double_quant and config.bnb_4bit_quant_type == "nf4"
    assert loaded["revision"] == "2" and loaded["trust_remote_code"] is True and loaded["peft_config"]["aux"].r == 16


def test_references_to_other_settings(parse, error_of, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.setenv("RUN_ID", "7")
    recipe = parse({"output": {"base_dir": "runs-${seed}"}, "seed": 5, "wandb": {"name": "a \\${b}"}})
    assert recipe.run_folder == Path("runs-5/job_7") and recipe.wandb.name == "a ${b}"
    assert recipe.merged["output"]["base_dir"] == "runs-${seed}"
    assert "`output.base_dir`" in error_of({"output": {"base_dir": "${nowhere}"}})


def test_settings_that_have_no_effect_in_this_run(parse):
    stderr = parse({"magrpo": {"discount": 0.5}, "agents": ["a", "b"]}).stderr
    assert len(stderr.splitlines()) == 1
    assert "agent_model.name (`agents` is used)" in stderr and "magrpo.discount (there is one turn)" in stderr
    stderr = parse({"magrpo": {"num_turns": 2, "handoff": "best", "discount": 0.5}}).stderr
    assert "magrpo.discount (in a chain, a return is the reward of its turn)" in stderr
    assert parse({"magrpo": {"num_turns": 2, "discount": 0.5, "num_iterations": 2, "epsilon": 0.3}}).stderr == ""


def test_the_seed_decides_fresh_adapters(parse, tiny_model):
    def weights(seed):
        sections = {"peft": {"r": 4}, "seed": seed, "agent_model": {"name": tiny_model}}
        return parse(sections).load_team(["aux", "main"]).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    differing = {name.partition(".lora_")[2] for name, x in first.items() if not torch.equal(x, other[name])}
    assert differing == {"A.aux.weight", "A.main.weight"}
    assert all(torch.equal(x, again[name]) for name, x in first.items())
