"""The rows of a forward of the update, and checkpointing, are chosen from memory."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.state import GradientState
from torch.utils.data import DataLoader

from trl_multiagent import MAGRPOConfig, MAGRPOTrainer
from trl_multiagent.trainers.base import memory
from trl_multiagent.trainers.base.memory import Size, choose_rows, size_of
from trl_multiagent.trainers.base.team_trainer import num_own_rows

from by_hand import distance, one_update
from tiny import SAVED, team_of, tiny_environment, tiny_items, tiny_llama, tiny_team, tiny_trainer


OPEN = {"per_device_train_batch_size": "auto", "gradient_checkpointing": None}
LARGE = {"0.5B": (896, 4864, 24, 14, 152e3, 494e6), "7B": (3584, 18944, 28, 28, 152e3, 7.6e9)}


def chosen(model, gigabytes, on_gpu=True, **settings):
    """The choice for two LoRA agents with 32 rows each."""
    hidden, inner, layers, heads, words, number = LARGE[model]
    config = tiny_llama().config
    config.update({"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": 128})
    config.update({"num_attention_heads": heads, "num_key_value_heads": 4, "vocab_size": int(words)})
    tokens = {"prompt": 300, "common": 0, "agents": 2, "acting": 2, "joint": 2}
    base = {"base": int(number), "base_bytes": 2.0, "largest": int(number)}
    size = Size(trained=int(number / 25), frozen=0, dimensions=config, **base, **tokens)
    sizes = {"items_per_device": 4, "num_generations": 8, "max_completion_length": 256}
    args = MAGRPOConfig("unused", bf16=True, use_cpu=True, report_to="none", **{**sizes, **OPEN, **settings})
    return choose_rows(args, size, 0, 1, gigabytes * 1e9, on_gpu)


def test_the_choice():
    assert chosen("0.5B", 80) == (32, False)
    assert chosen("0.5B", 80, gradient_checkpointing=True) == (32, True)
    assert chosen("0.5B", 80, per_device_train_batch_size=8) == (8, False)
    # On a GPU, a small model is not worth a launch for fewer rows; a large one is
    rows, checkpoints = chosen("0.5B", 16)
    assert rows > 8 and checkpoints
    rows, checkpoints = chosen("7B", 80)
    assert 4 <= rows < 32 and not checkpoints
    assert chosen("0.5B", 16, on_gpu=False)[1] is False
    # What cannot fit is left to the run
    assert chosen("7B", 10) == (1, True)
    assert chosen("7B", 10, gradient_checkpointing=False, per_device_train_batch_size=4) == (4, False)


@pytest.mark.parametrize(("drop_last", "skipped"), [(False, 0), (True, 0), (False, 1)])
def test_every_row_of_a_batch_counts_unless_it_is_repeated(drop_last, skipped):
    rows, counted = range(21), []
    for process in range(2):
        loader = DataLoader(rows, batch_size=4, drop_last=drop_last, collate_fn=list)
        loader = prepare_data_loader(loader, num_processes=2, process_index=process, put_on_device=False)
        if skipped:  # as in an epoch that is resumed
            loader = skip_first_batches(loader, skipped)
        accelerator = SimpleNamespace(gradient_state=GradientState(), num_processes=2, process_index=process)
        counted += [x for batch in loader for x in batch[: num_own_rows(accelerator, len(batch))]]
    assert sorted(counted) == [*rows[8 * skipped : 16 if drop_last else 21]]


def test_a_fifth_of_the_memory_stays_free():
    gigabytes = next(x / 4 for x in range(1, 400) if chosen("0.5B", x / 4) == (32, False))
    assert chosen("0.5B", 0.8 * gigabytes) != (32, False)


@pytest.mark.parametrize("form", ["full", "lora", "shared"])
def test_the_team_is_measured(tmp_path, monkeypatch, form):
    """As `plan` counts it, and on the prompts of its first batch. What it holds already is not counted twice."""
    sizes, memories = [], []
    monkeypatch.setattr(memory, "size_of", lambda *args: sizes.append(size_of(*args)) or sizes[0])
    monkeypatch.setattr(memory, "free_memory", lambda device: 8e9)
    monkeypatch.setattr(memory, "choose_rows", lambda *args: memories.append(args[4]) or choose_rows(*args))
    _, trainer, _ = one_update(tmp_path, team_of(form), beta=0.1, **OPEN)
    (size,) = sizes
    models = [trainer.team, *filter(None, [trainer.ref_model])]
    assert memories == [8e9 + sum(x.nbytes for model in models for x in model.parameters())]
    trained = sum(x.numel() for x in trainer.team.parameters() if x.requires_grad)
    number = tiny_llama().num_parameters()
    assert (size.trained, size.agents, size.acting) == (trained, 2, 2)
    assert (size.base, size.frozen) == (number if form == "lora" else 0, trained)
    assert size.joint == (1 if form == "full" else 2)
    assert size.prompt == max(len(x.prompt_ids) for node in trainer._turns[0] for x in node.samples.values())


def test_a_step_of_a_large_card_is_one_forward(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda _: 80e9)
    team, forwards = team_of("lora", num_hidden_layers=24), []
    team.register_forward_hook(lambda *_: forwards.append(team.is_gradient_checkpointing))
    one_update(tmp_path, team, items_per_device=4, num_generations=8, **OPEN)
    assert forwards == [False]


def test_a_resumed_run_takes_the_choice_of_its_checkpoint(tmp_path, monkeypatch):
    trainers = []
    for gigabytes, resumed in ((0, None), (80, tmp_path / "checkpoint-1")):
        monkeypatch.setattr(memory, "free_memory", lambda _, free=gigabytes: free * 1e9)
        trainers.append(tiny_trainer(tmp_path, team_of("lora"), max_steps=2, **SAVED, **OPEN))
        trainers[-1].train(resume_from_checkpoint=resumed and str(resumed))
        assert (trainers[-1].args.rows_per_forward, trainers[-1].team.is_gradient_checkpointing) == (1, True)
    first, second = (trainer.team.state_dict() for trainer in trainers)
    assert all(torch.equal(x, second[name]) for name, x in first.items())


@pytest.mark.parametrize("form", ["full", "lora"])
def test_checkpointing_is_on_if_a_training_before_had_it_off(tmp_path, monkeypatch, form):
    """One with the same arguments, or of the same trainer, which then resumes a run that had less memory."""

    def check(trainer, gigabytes, checkpoint=None):
        monkeypatch.setattr(memory, "free_memory", lambda _: gigabytes * 1e9)
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        layers = [x for x in trainer.team.modules() if hasattr(x, "gradient_checkpointing")]
        return trainer.args.gradient_checkpointing, {x.gradient_checkpointing for x in layers}

    first, other = (
        tiny_trainer(tmp_path / name, team_of(form), max_steps=2, **SAVED, **OPEN) for name in ("first", "other")
    )
    assert check(first, 80) == check(other, 80) == (False, {False})
    second = MAGRPOTrainer(team_of(form), tiny_environment(), first.args, tiny_items())
    assert check(second, 0) == (True, {True})
    assert check(other, 80, tmp_path / "first" / "checkpoint-1") == (True, {True})


class Cramped(MAGRPOTrainer):
    """Has memory for `room` rows in a forward, or in a backward."""

    room, in_backward = 3, False

    def agent_loss(self, role, outputs, rows):
        self.rows = len(rows)
        if self.rows > self.room and not self.in_backward:
            raise torch.OutOfMemoryError("no room")
        return super().agent_loss(role, outputs, rows)

    def training_step(self, *args, **kwargs):
        backward = self.accelerator.backward

        def crowded(loss, **options):
            backward(loss, **options)  # some gradients are there when the memory runs out
            if self.rows > self.room:
                raise torch.OutOfMemoryError("no room")

        self.accelerator.backward = crowded
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self.accelerator.backward = backward


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_without_enough_memory_runs_again(tmp_path, monkeypatch, in_backward):
    said = []
    monkeypatch.setattr(memory.logger, "warning", said.append)
    monkeypatch.setattr(Cramped, "in_backward", in_backward)
    settings = {"max_steps": 2, "items_per_device": 2, "num_generations": 6, "beta": 0.1}
    found, trainer, _ = one_update(tmp_path, tiny_team(), trainer=Cramped, **settings, **OPEN)
    expected, other, _ = one_update(tmp_path, tiny_team(), per_device_train_batch_size=12, **settings)
    assert said == [f"Out of memory with {n} rows in a forward: step 1 runs again with {n // 2}." for n in (12, 6)]
    assert trainer.args.rows_per_forward == 3 and distance(found, expected) < 1e-5
    names = ["loss", "agents/main/entropy", "agents/aux/grad_norm"]
    for one, two in zip(trainer.state.log_history[:2], other.state.log_history[:2], strict=True):
        assert [one[name] for name in names] == pytest.approx([two[name] for name in names], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("settings", [{"per_device_train_batch_size": 12}, {"num_generations": 1}])
def test_memory_that_cannot_suffice_ends_the_run(tmp_path, monkeypatch, settings):
    """The rows are the user's, or there is only one."""
    monkeypatch.setattr(Cramped, "room", 0)
    arguments = {**OPEN, "items_per_device": 1, "advantage_mode": "raw", **settings}
    trainer = tiny_trainer(tmp_path, trainer=Cramped, **arguments)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
