"""The team mixin makes any TRL trainer train a team: here a `DPOTrainer`, in a few lines."""

import json
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, RewardConfig
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import add_fused_lm_head

from trl_multiagent import (
    AgentTeam,
    FunctionEnvironment,
    IACTrainer,
    JointRewardTrainer,
    MAACConfig,
    MADPOTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
    MARLOOTrainer,
)
from trl_multiagent.trainers.base.team_config import TeamConfig
from trl_multiagent.trainers.base.team_trainer import TeamTrainerMixin

from tiny import SHORT, byte_tokenizer, team_of, tiny_environment, tiny_llama, tiny_team


@dataclass
class TeamDPOConfig(TeamConfig, DPOConfig):
    pass


class TeamDPOTrainer(TeamTrainerMixin, DPOTrainer):
    """Every agent learns from its own preferences; the rows hold a dict of `prompt_ids`, ... per role."""

    _name = "TeamDPO"
    _card_settings = ["beta", "learning_rate"]

    def __init__(self, team, args, train_dataset):
        self._prepare_team(team, args)
        reference = team.frozen_copy()
        tokenizer = team.tokenizers[team.roles[0]]
        super().__init__(team, reference, args, Collator(team), train_dataset, processing_class=tokenizer)
        for policies in (team, reference):
            del policies.__dict__["forward"]
            for model in policies.base_models:
                add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
        self._set_up_agents()

    def _prepare_dataset(self, dataset, *args):
        return dataset  # it is tokenized

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(team_inputs={role: forward_inputs(inputs[role]) for role in inputs})
        loss = 0.0
        metrics = self._metrics
        for role in inputs:
            self._metrics = {mode: defaultdict(list) for mode in metrics}  # of this agent
            with self.ref_model.activate(role):
                loss = loss + self._compute_loss(lambda role=role, **_: outputs[role], inputs[role], False)
            for mode, of_agent in self._metrics.items():
                for name, values in of_agent.items():
                    metrics[mode][f"agents/{role}/{name}"].extend(values)
        self._metrics = metrics
        return loss


class Collator:
    def __init__(self, team):
        tokenizers = team.tokenizers.items()
        self.collators = {role: DataCollatorForPreference(tokenizer.pad_token_id) for role, tokenizer in tokenizers}

    def __call__(self, rows):
        return {role: collate([row[role] for row in rows]) for role, collate in self.collators.items()}


def forward_inputs(inputs):
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")} | {"labels": labels, "fused_lm_head": True}


def preferences(roles, number=12):
    def of_agent(row, shift):
        prompt = list(b"Task %d" % row)
        return {"prompt_ids": prompt, "chosen_ids": [70 + shift + row, 256], "rejected_ids": [90 + shift, 65, 256]}

    return Dataset.from_list([{role: of_agent(row, k) for k, role in enumerate(roles)} for row in range(number)])


def config(folder, cls=TeamDPOConfig, **changes):
    settings = {**SHORT, "max_steps": 4, "per_device_train_batch_size": 2, "remove_unused_columns": False}
    return cls(output_dir=str(folder), **{**settings, **changes})


def train(team, folder, resume=None, **changes):
    trainer = TeamDPOTrainer(team, config(folder, **changes), preferences(team.roles))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("form", ["full", "lora"])
def test_a_team_dpo_trainer_learns_and_logs_per_agent(tmp_path, form):
    team = team_of(form)
    before = {name: x.clone() for name, x in team.named_parameters()}
    trainer = train(team, tmp_path)
    first, last = trainer.state.log_history[0], trainer.state.log_history[-2]
    for role in team.roles:
        assert first[f"agents/{role}/rewards/margins"] == pytest.approx(0.0, abs=1e-5)
        assert last[f"agents/{role}/rewards/margins"] > 0.01
    for name, parameter in team.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


def test_one_agent_equals_trl_s_dpo(tmp_path):
    rows = preferences(["solo"])
    team = tiny_team(["solo"])
    TeamDPOTrainer(team, config(tmp_path / "team"), rows).train()
    model, own = tiny_llama(0), Dataset.from_list(rows["solo"])

    class Tokenized(DPOTrainer):
        def _prepare_dataset(self, dataset, *args):
            return dataset

    single = Tokenized(
        model, tiny_llama(0), config(tmp_path / "one", DPOConfig), train_dataset=own, processing_class=byte_tokenizer()
    )
    single.train()
    for name, x in model.state_dict().items():
        assert torch.allclose(team.agents["solo"].state_dict()[name], x, atol=1e-6), name


def test_checkpoints_resume_exactly_and_refuse_another_run(tmp_path):
    whole = train(tiny_team(), tmp_path / "whole", save_strategy="steps", save_steps=2)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    resumed = train(tiny_team(), tmp_path / "resumed", resume=str(checkpoint))
    for name, x in whole.team.state_dict().items():
        assert torch.equal(x, resumed.team.state_dict()[name]), name
    saved = json.loads((checkpoint / "team_trainer_state.json").read_text())["settings"]
    assert saved["trainer"] == "TeamDPO" and "environment" not in saved
    assert "beta" in saved and "resume_changes" not in saved
    with pytest.raises(ValueError, match=r"checkpoint of another run: `?beta`?"):
        train(tiny_team(), tmp_path / "other", resume=str(checkpoint), beta=0.5)
    team = tiny_team()
    team.reasoning["main"] = "keep"
    with pytest.raises(ValueError, match=r"checkpoint of another run: `?reasoning`?"):
        train(team, tmp_path / "other", resume=str(checkpoint))


def test_the_model_card_needs_no_environment(tmp_path):
    trainer = train(tiny_team(), tmp_path, max_steps=1)
    trainer.create_model_card(model_name="pair")
    card = (tmp_path / "README.md").read_text()
    assert "TeamDPO" in card and "`beta`" in card and "None" not in card
    assert "joint reward of the environment" not in card


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"team": "some/model"}, r"`team` is 'some/model' \(str\), not an `AgentTeam`: load it with `AgentTeam.from_"),
        ({"team": None}, "`team` is None, not an `AgentTeam`"),
        ({"args": GRPOConfig("x", use_cpu=True, bf16=False)}, "`args` is a `GRPOConfig`: give a `{config}`"),
        ({"args": MAACConfig("x", use_cpu=True)}, "`args` is a `MAACConfig`: give a `{config}`"),
        ({"args": {"output_dir": "x"}}, "`args` is a `dict`: give a `{config}`"),
        ({"environment": len}, "`environment` must be an `Environment`, got `builtin_function_or_method`"),
    ],
)
@pytest.mark.parametrize("trainer", [MAGRPOTrainer, MADPOTrainer, IACTrainer])
def test_arguments_of_a_wrong_type_are_refused(trainer, arguments, message):
    config = trainer.__name__.replace("Trainer", "Config")
    with pytest.raises(TypeError, match=message.replace("{config}", config)):
        trainer(**{"team": tiny_team(), "environment": tiny_environment(), **arguments})


def test_wrong_arguments_without_names_are_told_the_right_way():
    with pytest.raises(ValueError, match=r"`name` has models for \['aux'\], but the roles are \['aux', 'main'\]"):
        AgentTeam.from_pretrained({"aux": "model"}, roles=["aux", "main"])
    for name in (tiny_llama(), {"aux": tiny_llama(), "main": "model"}, [tiny_llama()], 5):
        with pytest.raises(ValueError, match=r"`name` is .*; it must be a model's name or folder, or a list with one"):
            AgentTeam.from_pretrained(name, roles=["aux", "main"])
    with pytest.raises(ValueError, match=r"The adapter of an agent is 8; it must be a `LoraConfig`"):
        AgentTeam.from_pretrained("model", ["aux"], peft_config={"r": 8})
    with pytest.raises(TypeError, match=r"must be dicts by role; `AgentTeam.from_pretrained"):
        AgentTeam(tiny_llama(), byte_tokenizer())
    for prompts in ("Write {words}", ["Write {words}"]):
        with pytest.raises(
            TypeError, match=r"`prompts` is .*; it must be a dict with a template or a function per role"
        ):
            FunctionEnvironment(prompts, len)


def test_the_configuration_of_another_algorithm_is_refused(tmp_path):
    """MARLOO would train with the baseline of MAGRPO."""
    with pytest.raises(TypeError, match="`args` is a `MAGRPOConfig`: give a `MARLOOConfig`"):
        MARLOOTrainer(tiny_team(), tiny_environment(), MAGRPOConfig(tmp_path, use_cpu=True))
    with pytest.raises(TypeError, match="`args` is a `RewardConfig`: give a `JointRewardConfig`"):
        JointRewardTrainer("model", RewardConfig(tmp_path, use_cpu=True, bf16=False))
