"""
Agents on several devices. The CPU has no second one: what is copied between devices is checked with tensors that have
no data.
"""

import pytest
import torch
from accelerate.utils import recursively_apply

from trl_multiagent import IACConfig, IACTrainer, MAGRPOTrainer
from trl_multiagent.team import agent_team
from trl_multiagent.trainers.base.batch import collect_rows

from tiny import team_of, tiny_environment, tiny_items, tiny_trainer


DEVICES = {"aux": 0, "main": 1}


def test_an_agent_computes_on_its_device_and_its_outputs_return(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path)
    for model in trainer.team.base_models:
        model.set_attn_implementation("eager")  # that of torch looks at the mask, which has no data here
    turns = trainer._play_trees(trainer.train_dataset.select(range(2)).to_list())
    tensors = trainer._make_batches(collect_rows(turns, trainer.advantages(turns)))[0].agents["main"]
    trainer.team.place({"aux": torch.device("cpu"), "main": torch.device("meta")})

    def move(x, device):  # what has no data stands for what comes back from another device
        return torch.zeros_like(x, device=device) if x.is_meta else x.to(device)

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)  # which does not know such a device
    monkeypatch.setattr(agent_team, "send_to_device", lambda data, device: recursively_apply(move, data, device))
    logps = trainer._logps(trainer.team, "main", tensors)
    assert logps.device == tensors.completion_ids.device == torch.device("cpu")
    assert logps.shape == tensors.completion_ids.shape


def test_a_training_with_devices_is_that_without(tmp_path, caplog):
    weights = []
    for devices in (None, DEVICES):
        trainer = tiny_trainer(tmp_path / str(devices), devices=devices, beta=0.1, gradient_checkpointing=True)
        trainer.train()
        trainer.evaluate(tiny_items(2))
        assert trainer.team.devices.keys() == (devices or {}).keys()
        weights.append(trainer.team.state_dict())
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    assert any("`devices` has no effect: this machine has no GPU" in message for message in caplog.messages)
    assert trainer.is_model_parallel and not trainer.place_model_on_device  # as transformers calls it


@pytest.mark.parametrize(
    ("form", "trainer", "devices", "message"),
    [
        ("lora", "magrpo", DEVICES, "agents with a model each"),
        ("shared", "magrpo", DEVICES, "agents with a model each"),
        ("full", "iac", DEVICES, "without critics"),
        ("full", "magrpo", {"aux": 0}, r"must have the team's: \['aux', 'main'\]"),
    ],
)
def test_other_teams_are_refused(tmp_path, form, trainer, devices, message):
    trainer_class, changes = (IACTrainer, {"config": IACConfig}) if trainer == "iac" else (MAGRPOTrainer, {})
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, team_of(form), tiny_environment(), trainer_class, devices=devices, **changes)
