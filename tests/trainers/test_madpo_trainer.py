"""MADPOTrainer: forms of team, reference policies, evaluation, checkpoints, and what it says about bad input."""

import json

import pytest
import torch
from datasets import load_from_disk
from pairs import pair_config, pair_trainer, pairs
from transformers.utils import logging

from trl_multiagent import AgentTeam, JointRewardConfig, JointRewardTrainer, MADPOConfig, MADPOTrainer
from trl_multiagent.environments import role_reward
from trl_multiagent.environments.base import scoring_context

from pages import read_page
from tiny import FORMS, team_of, tiny_environment, tiny_items, tiny_team


def train(folder, team=None, resume=None, **settings):
    trainer = pair_trainer(folder, team, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer):
    return {name: x.detach().clone() for name, x in trainer.team.named_parameters() if x.requires_grad}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_team_learns_and_is_saved(tmp_path, reports, form):
    team = team_of(form)
    before = {name: x.clone() for name, x in team.named_parameters() if x.requires_grad}
    trainer = train(tmp_path, team)
    first, *_, last = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3) and last["loss"] < first["loss"]
    assert last["rewards/margins"] > 0.01 and last["rewards/accuracies"] > 0.5
    margins = sum(last[f"agents/{role}/rewards/margins"] for role in team.roles)
    assert last["rewards/margins"] == pytest.approx(margins, rel=1e-3)
    assert last["logps/chosen"] == pytest.approx(sum(last[f"agents/{role}/logps/chosen"] for role in team.roles))
    assert last["env_step"] == 3 * 4 * 2 and last["num_tokens"] > 0
    page = read_page(tmp_path / "report.html")
    assert page["metrics"]["rewards/margins"][0]["mean"][-1] == pytest.approx(last["rewards/margins"], rel=1e-4)
    assert not any(torch.equal(x, before[name]) for name, x in weights(trainer).items())
    if not team.has_adapters:
        trainer.save_model(str(tmp_path / "saved"))
        loaded = AgentTeam.from_pretrained(str(tmp_path / "saved"))
        for name, x in loaded.state_dict().items():
            assert torch.equal(x, team.state_dict()[name]), name


@pytest.mark.parametrize(("form", "settings"), [("lora", {}), ("full", {"reference_free": True})])
def test_a_resumed_run_continues_exactly(tmp_path, form, settings):
    """In the middle of an epoch, with metrics that have not been logged."""
    settings = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 2, **settings}
    settings |= {"save_strategy": "steps", "save_steps": 4, "logging_steps": 3, "gradient_accumulation_steps": 2}
    settings |= {"train_dataset": pairs(number=11)}
    whole = train(tmp_path / "whole", team_of(form), **settings)
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    resumed = train(tmp_path / "resumed", team_of(form), resume=str(checkpoint), **settings)
    assert whole.state.global_step == 6
    for name, x in weights(whole).items():
        assert torch.equal(x, weights(resumed)[name]), name
    for one, other in zip(whole.state.log_history[:-1], resumed.state.log_history[:-1], strict=True):
        assert one == other
    assert whole.env_step == resumed.env_step == 2 * 2 * 11
    saved = json.loads((checkpoint / "team_trainer_state.json").read_text())["settings"]
    assert saved["trainer"] == "MADPO" and "temperature" not in saved
    with pytest.raises(ValueError, match=r"checkpoint of another run: `?beta`?"):
        train(tmp_path / "other", team_of(form), resume=str(checkpoint), **settings, beta=0.5)
    with pytest.raises(ValueError, match=r"checkpoint of another run: pairs of a step: 4 .* 8 in this run"):
        larger = settings | {"gradient_accumulation_steps": 4}
        train(tmp_path / "other", team_of(form), resume=str(checkpoint), **larger)
    final = train(tmp_path / "over", team_of(form), resume=str(tmp_path / "whole" / "checkpoint-6"), **settings)
    assert final.state.global_step == 6  # no further step


def test_evaluation_on_preferences_and_in_the_environment(tmp_path):
    settings = {"environment": tiny_environment(), "max_completion_length": 6, "num_turns": 2}
    settings |= {"eval_dataset": {"pairs": pairs(number=5), "items": tiny_items(3)}}
    trainer = train(tmp_path, eval_strategy="steps", eval_steps=3, **settings)
    (log,) = [entry for entry in trainer.state.log_history if "eval_pairs_loss" in entry]
    (played,) = [entry for entry in trainer.state.log_history if "eval_items_reward" in entry]
    assert 0.0 < log["eval_pairs_rewards/accuracies"] <= 1.0 and "eval_pairs_agents/aux/rewards/margins" in log
    assert played["eval_items_turn_2/reward_mean"] >= 0.0
    assert played["eval_items_agents/main/completions/mean_length"] <= 6
    both = trainer.evaluate({"a": pairs(number=3), "b": tiny_items(2)})
    assert {"eval_a_loss", "eval_a_rewards/margins", "eval_b_reward"} <= both.keys()
    assert "eval_reward" in trainer.evaluate(tiny_items(2)) and "eval_loss" in trainer.evaluate(pairs(number=3))
    assert "eval_train_reward" in trainer.evaluate({"train": tiny_items(2)})
    tested = trainer.evaluate({"a": pairs(number=3), "b": tiny_items(2)}, metric_key_prefix="test")
    assert {"test_a_loss", "test_a_rewards/margins", "test_b_reward"} <= tested.keys()
    assert not [name for name in tested if name.startswith("eval_")]
    predicted = trainer.predict(pairs(number=3)).metrics
    assert predicted["test_loss"] == trainer.evaluate(pairs(number=3))["eval_loss"]
    trainer.create_model_card(model_name="pair")
    card = (tmp_path / "README.md").read_text()
    for text in ("MADPO", "`beta` | 0.1", "preference pairs | 12", "env steps | 24", "FunctionEnvironment", "madpo"):
        assert text in card, text
    assert "None" not in card.replace("`loss_weights` | None", "")


def test_reward_functions_of_an_evaluation_get_what_those_of_a_training_get(tmp_path):
    seen = []

    def reward(completions, log_metric, trainer_state, **columns):
        seen.append((completions[0][0]["role"], trainer_state.global_step))
        log_metric("mine", 3.0)
        return [1.0] * len(completions)

    environment = tiny_environment(reward=role_reward("main", reward))
    asked, next_prompts = [], environment.next_prompts
    environment.next_prompts = lambda *args: asked.append(scoring_context().trainer_state) or next_prompts(*args)
    team = tiny_team(chat_template="{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    trainer = pair_trainer(tmp_path, team, environment=environment, eval_dataset=tiny_items(3))
    asked.clear()
    assert [value for name, value in trainer.evaluate().items() if "mine" in name] == [3.0]
    assert seen[0] == ("assistant", 0) and asked[0] is trainer.state


def test_the_best_model_has_the_lowest_loss_by_default(tmp_path):
    settings = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    trainer = pair_trainer(tmp_path, eval_dataset=pairs(number=3), eval_steps=1, save_steps=1, **settings)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.state.best_metric == min(losses)
    for evaluated in (tiny_items(2), {"a": pairs(number=3), "b": tiny_items(2)}):
        with pytest.raises(ValueError, match="'reward' for items of the environment"):
            pair_trainer(tmp_path, eval_dataset=evaluated, environment=tiny_environment(), **settings)


def test_rows_without_rewards_take_no_env_steps(tmp_path):
    rows = pairs().remove_columns(["chosen_reward", "rejected_reward"])
    assert "env_step" not in train(tmp_path, train_dataset=rows).state.log_history[0]
    assert "env_step" not in train(tmp_path, use_environment_step=False).state.log_history[0]


def test_a_loss_that_is_not_finite_ends_the_run_with_a_report(tmp_path):
    team = tiny_team()
    team.agents["aux"].model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"The loss is nan at step 0\. Items and completions are in .*json"):
        train(tmp_path, team)
    (report,) = tmp_path.glob("failure_step0_process0.json")
    assert "good" in json.loads(report.read_text())["pairs"][0]["main chosen"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"loss_type": ["sigmoid", "aot"]}, r"`loss_type` is \['sigmoid', 'aot'\]; a team has the losses sigmoid, "),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "`loss_weights` must have the same length"),
        ({"ld_alpha": 0.5}, "`ld_alpha` is 0.5, which teams do not support"),
        ({"beta": 0.0}, "`beta` is 0.0; it must be greater than 0"),
        ({"truncation_mode": "keep_end"}, "`truncation_mode` is 'keep_end'"),
        ({"sync_ref_model": True}, "`sync_ref_model` is True, which teams do not support"),
        ({"remove_unused_columns": True}, "teams do not support"),
    ],
)
def test_impossible_settings_are_refused(tmp_path, settings, problem):
    with pytest.raises(ValueError, match=problem):
        pair_config(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"train_dataset": None}, "`train_dataset` must be a `datasets.Dataset`"),
        ({"train_dataset": pairs(["aux", "critic"])}, "no column 'main_prompt'"),
        ({"eval_dataset": pairs(["aux"])}, "`eval_dataset` has no column 'main_prompt'"),
        ({"eval_dataset": {"a": tiny_items(2)}}, r"`eval_dataset\['a'\]` has no column 'aux_prompt'"),
        ({"max_length": 20}, "Row 2 of `train_dataset`: 'main_prompt' has 20 tokens, which leaves no token"),
        ({"train_dataset": pairs(chat=True)}, "'aux_prompt' has chat messages, but the tokenizer of 'aux' has no"),
        ({"environment": tiny_environment(["aux"])}, r"The team has the roles \['aux', 'main'\], the environment"),
        ({"environment": "task"}, "`environment` must be an `Environment`"),
    ],
)
def test_data_that_does_not_fit_is_refused(tmp_path, settings, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        pair_trainer(tmp_path, **settings)


def test_settings_that_do_not_fit_the_team_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`router_aux_loss_coef` is 0\.5, but no trained agent"):
        pair_trainer(tmp_path, router_aux_loss_coef=0.5)


def test_preferences_of_another_form_than_the_prompts_are_reported(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("trl_multiagent"), "propagate", True)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    for setting, number in ((None, 2), (False, 0)):
        caplog.clear()
        team = tiny_team(chat_template=template)
        pair_trainer(tmp_path, team, environment=tiny_environment(), use_chat_template=setting)
        assert sum("sees other prompts than the evaluation" in message for message in caplog.messages) == number


def test_the_folder_of_the_preferences_stays_as_it_is(tmp_path, tiny_model):
    pairs().save_to_disk(tmp_path / "pairs")
    before = sorted((tmp_path / "pairs").iterdir())
    pair_trainer(tmp_path / "madpo", train_dataset=load_from_disk(tmp_path / "pairs"))
    args = pair_config(tmp_path / "judge", JointRewardConfig)
    JointRewardTrainer(tiny_model, args, load_from_disk(tmp_path / "pairs"))
    assert sorted((tmp_path / "pairs").iterdir()) == before


def test_the_configuration_has_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = MADPOTrainer(tiny_team(), train_dataset=pairs())
    assert isinstance(trainer.args, MADPOConfig) and trainer.args.output_dir == "main-MADPO"
