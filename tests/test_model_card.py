import pytest
import yaml

import trl_multiagent
from trl_multiagent import FunctionEnvironment, MAGRPOTrainer
from trl_multiagent.hub import team_card
from trl_multiagent.models.pretrained import hub_id
from trl_multiagent.report.curves import run_table, series_of
from trl_multiagent.report.run_report import environment_name
from trl_multiagent.tasks.code_generation import CodeGenerationEnvironment
from trl_multiagent.team.card import facts_of

from tiny import count_reward, team_of, tiny_team, tiny_trainer


def metadata(card) -> dict:
    return yaml.safe_load(str(card).split("---")[1])


def test_only_base_models_on_the_hub_are_named(tmp_path):
    team = tiny_team(("a", "b", "c", "d"))
    for role, name in zip("abcd", ["Qwen/Qwen2.5-0.5B", "gpt2", "Qwen/Qwen2.5-0.5B", str(tmp_path)], strict=True):
        team.agents[role].config._name_or_path = name
    card = team_card(facts_of(team), "user/team", dataset_name="openai/openai_humaneval", tags=["mine"])
    data = metadata(card)
    assert data["base_model"] == ["Qwen/Qwen2.5-0.5B", "gpt2"]
    assert data["datasets"] == "openai/openai_humaneval"
    assert {"trl", "trl-multiagent", "mine"} <= set(data["tags"])
    assert "generated_from_trainer" not in data["tags"]
    assert "| `b` | [gpt2](https://huggingface.co/gpt2) | [`agents/b`](./agents/b) |" in str(card)
    assert "| `d` | a model that is not on the Hub | [`agents/d`](./agents/d) |" in str(card)
    assert str(tmp_path) not in str(card)


@pytest.mark.parametrize("name", ["", "/gone/model", "./model", "a/b/c", "a b"])
def test_names_that_are_not_hub_ids(name):
    assert hub_id(name) is None


def test_the_card_shows_how_to_load_one_agent():
    team = tiny_team(("main",))
    card = str(team_card(facts_of(team), "user/team"))
    assert 'AutoModelForCausalLM.from_pretrained("user/team", subfolder="agents/main")' in card and "peft" not in card
    assert "One language model." in card and "team of" not in card and "apply_chat_template" not in card
    team.reasoning["main"], team.chat_template_kwargs["main"] = "none", {"effort": "low"}
    card = str(team_card(facts_of(team), "user/team"))
    assert "_generation_prompt=True, **{'enable_thinking': False, 'effort': 'low'})`" in card
    team = team_of("lora", ("main",))
    team.agents["main"].config._name_or_path = "Qwen/Qwen2.5-0.5B"
    card = str(team_card(facts_of(team), "user/team"))
    assert 'base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")' in card
    assert 'PeftModel.from_pretrained(base, "user/team", subfolder="agents/main")' in card


def test_an_own_trainer_has_the_tags_of_its_class_and_may_add_to_them(tmp_path):
    class Renamed(MAGRPOTrainer):
        _name = "Renamed"

    class Tagged(Renamed):
        _tag_names = [*MAGRPOTrainer._tag_names, "ranks"]  # as a subclass of TRL's trainers writes them

    common = {"trl", "trl-multiagent", "multi-agent", "magrpo", "generated_from_trainer"}
    for trainer_class, own in ((Renamed, set()), (Tagged, {"ranks"})):
        trainer = tiny_trainer(tmp_path, trainer=trainer_class)
        trainer.create_model_card()
        assert set(metadata((tmp_path / "README.md").read_text())["tags"]) == common | own
    trainer._tag_names = ["other"]
    trainer.create_model_card()
    assert {"other"} < set(metadata((tmp_path / "README.md").read_text())["tags"])


def test_a_card_of_a_team_that_was_trained_without_an_environment():
    team = facts_of(tiny_team())
    training = {"algorithm": "MADPO", "environment": None, "settings": [("setting", "value")], "links": {}}
    card = str(team_card(team, "user/team", training={**training, "rewards": [], "changes": []}))
    assert "A team of 2 language models. It was made" in card and 'AgentTeam.from_pretrained("user/team")' in card
    assert "task" not in card.partition("## Training")[0].partition("# Model Card")[2] and "collaborate" not in card
    assert "environment" not in card
    card = str(team_card(team, "user/team"))
    assert "that solve one task together" in card and "`team.collaborate(item, environment)`" in card


def test_environments_are_shown_by_their_repr():
    class Own:
        roles = ("a",)

    environment = FunctionEnvironment({"a": "{x}"}, [count_reward], [0.5])
    assert environment_name(environment) == "FunctionEnvironment(reward_funcs=[count_reward], reward_weights=[0.5])"
    assert environment_name(Own()).endswith("Own")
    name = environment_name(CodeGenerationEnvironment(1, mode="plain"))
    assert "CodeGenerationEnvironment(roles=('main',), mode='plain'" in name and "reward_version=16" in name


def test_results_of_training_and_evaluation():
    log = [{"step": step, "reward": float(step % 7), "turn_1/tests": step / 10} for step in range(1, 11)]
    log[5:5] = [{"step": 5, "eval_reward": 2.5, "eval_turn_1/tests": 0.25, "eval_runtime": 1.0}]
    log += [{"step": 10, "eval_easy_reward": 1.5}, {"step": 10, "train_loss": 0.1}]
    assert run_table(series_of(log)) == [
        ["metric", "first", "best", "last"],
        ["reward", "1.000", "6.000 (step 6)", "3.000"],
        ["eval_reward", "2.500", "2.500 (step 5)", "2.500"],
        ["eval_easy_reward", "1.500", "1.500 (step 10)", "1.500"],
    ]


def test_the_card_of_a_trainer(tmp_path):
    trainer = tiny_trainer(tmp_path / "run", num_turns=2, items_per_device=1, max_steps=2, reward_scale=0.5)
    trainer.create_model_card("nothing yet")
    assert "### Results" not in (tmp_path / "run" / "README.md").read_text()
    trainer.train()
    trainer.create_model_card("collectors", "some/data", tags="one")
    card = (tmp_path / "run" / "README.md").read_text()
    assert {"magrpo", "one", "generated_from_trainer"} <= set(yaml.safe_load(card.split("---")[1])["tags"])
    assert "# Model Card for collectors" in card and "huggingface.co/datasets/some/data" in card
    assert "reward_funcs=[count_reward]" in card
    assert "| `num_turns` | 2 |" in card and "| `reward_scale` | 0.5 |" in card
    assert f"| env steps | {trainer.env_step} |" in card
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    best = max(range(2), key=rewards.__getitem__)
    assert f"| reward | {rewards[0]:.3f} | {rewards[best]:.3f} (step {best + 1}) | {rewards[1]:.3f} |" in card
    assert "arxiv" not in card and "huggingface.co/papers/2508.04652" in card and "@misc{liu2025llm," in card
    assert "vonwerra2020trl" in card and "- TRL: 1.16" in card
    assert f"- trl_multiagent: {trl_multiagent.__version__}" in card
    assert "{{" not in card.replace("{{TRL:", "").replace("{{LLM", "") and "{%" not in card
    assert "config.yaml" not in card
    (tmp_path / "run" / "config.yaml").touch()
    trainer.create_model_card("collectors")
    assert "config.yaml" in (tmp_path / "run" / "README.md").read_text()
