"""Rollouts that are sampled while the update of the step before is computed."""

import asyncio
import threading

import pytest
import torch

from trl_multiagent import IACConfig, MAGRPOConfig, MAGRPOTrainer, workflow
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.report.trace_files import read_trace
from trl_multiagent.rollout.seats import training_step
from trl_multiagent.rollout.tree import RolloutCallback
from trl_multiagent.trainers.base.ahead import Ahead

from tiny import EVALUATED, SAVED, count_reward, tiny_config, tiny_environment, tiny_items, tiny_team, tiny_trainer


AHEAD = {"rollouts_ahead": 1, "max_steps": 3, "learning_rate": 0.05, "num_generations": 3}
SOME_ROWS = {"per_device_train_batch_size": 3}  # two micro-batches


class Played(RolloutCallback):
    """The prompts, completions and rewards of every batch."""

    def __init__(self):
        self.batches = []

    def on_rollout(self, args, state, split, turns, rows):
        nodes = [node for nodes in turns for node in nodes]
        texts = [(x.prompt_ids, x.completion_ids) for node in nodes for x in node.samples.values()]
        self.batches.append((split, texts, [node.rewards for node in nodes]))


class Interleaved(MAGRPOTrainer):
    """A loss waits until the tool of the next step has begun, and that tool until the loss has been computed."""

    def __init__(self, *args, **kwargs):
        self.begun, self.computed = ([threading.Event() for _ in range(4)] for _ in range(2))
        super().__init__(*args, **kwargs)

    def compute_loss(self, *args, **kwargs):
        step = self.state.global_step
        assert step + 1 == self.state.max_steps or self.begun[step + 1].wait(60)
        loss = super().compute_loss(*args, **kwargs)
        self.computed[step].set()
        return loss


def tool_workflow(use_tool):
    @workflow(roles=("aux", "main"), max_turns=2, timeout=60)
    async def run(item, agents):
        text = await agents.aux(f"Help with {item['x']}:", stop="e")
        await use_tool()
        return sum(map(text.count, "aeiou,.")) + len(await agents.main(f"Use {text}:")) / 10

    return run


def test_the_trace_names_the_step_that_learns_from_a_tree(tmp_path):
    tiny_trainer(tmp_path, trace_steps=1, **AHEAD).train()
    trace = read_trace(tmp_path / "trace")
    assert [*trace.step.value_counts().sort_index().items()] == [(k, len(trace) // 3) for k in (1, 2, 3)]


@pytest.mark.parametrize("settings", [{}, SOME_ROWS, {"branching": "episodes", "num_turns": 2}])
def test_the_next_step_is_sampled_during_the_update(tmp_path, settings):
    async def use_tool():
        step = training_step()
        trainer.begun[step].set()
        while step and not trainer.computed[step - 1].is_set():
            await asyncio.sleep(0)

    settings = {**AHEAD, "num_turns": 2, "num_generations": 2, **settings}
    trainer = tiny_trainer(tmp_path, environment=tool_workflow(use_tool), trainer=Interleaved, **settings)
    trainer.train()
    first, second, last, _ = trainer.state.log_history
    assert "time/overlapped" in first and "time/overlapped" not in last
    for role in ("aux", "main"):
        name = f"agents/{role}/sampling_ratio"
        assert first[name] == pytest.approx(1, abs=1e-4) and abs(second[name] - 1) > 1e-3


class Compared(MAGRPOTrainer):
    """Compares the log-probabilities of the sampling with those of the current and of the last policy."""

    weights, differences = None, ()

    def training_step(self, *args, **kwargs):
        self.older, self.weights = self.weights, {k: x.clone() for k, x in self.team.state_dict().items()}
        return super().training_step(*args, **kwargs)

    def compute_loss(self, model, batch, *args, **kwargs):
        for role, rows in batch.agents.items():
            for name, weights in (("older", self.older or self.weights), ("current", self.weights)):
                self.team.load_state_dict(weights)
                difference = (self._logps(self.team, role, rows) - rows.sampling_logps) * rows.completion_mask
                self.differences = [*self.differences, (self.state.global_step, name, difference.abs().max().item())]
        return super().compute_loss(model, batch, *args, **kwargs)


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2, "max_steps": 6}])
def test_the_policy_is_one_step_old(tmp_path, settings):
    trainer = tiny_trainer(tmp_path, trainer=Compared, **{**AHEAD, **SOME_ROWS, **settings})
    trainer.train()
    iterations = settings.get("num_iterations", 1)
    for step, name, difference in trainer.differences:
        if step % iterations == 0:
            assert (difference < 1e-4) == (name == "older" or step == 0)


@pytest.mark.parametrize(
    "settings", [{"num_iterations": 2}, {**EVALUATED, "eval_steps": 4, "eval_dataset": tiny_items(3)}]
)
def test_the_same_items_and_draws(tmp_path, settings):
    """Without learning, both runs sample the same, also from one epoch to the next, and evaluate the same."""
    found = []
    for ahead in (0, 1):
        played = Played()
        arguments = {
            **AHEAD,
            "rollouts_ahead": ahead,
            "max_steps": 8,
            "learning_rate": 0.0,
            "train_dataset": tiny_items(6),
        }
        trainer = tiny_trainer(tmp_path, callbacks=[played], **{**arguments, **settings})
        trainer.train()
        found.append([[x for x in played.batches if x[0] == split] for split in ("train", "eval")])
        assert trainer.env_step == 6 * 8 // arguments.get("num_iterations", settings.get("num_iterations", 1))
    assert found[0] == found[1] and len(found[0][0]) == 8 // settings.get("num_iterations", 1)


def test_the_order_of_the_threads_changes_nothing(tmp_path, monkeypatch):
    def weights(**settings):
        trainer = tiny_trainer(tmp_path, **{**AHEAD, **SOME_ROWS, "num_turns": 2, "num_generations": 2, **settings})
        trainer.train()
        return [*trainer.team.state_dict().values()]

    found = weights()
    monkeypatch.setattr(Ahead, "serve", lambda self: None)  # the second turn is sampled after the update
    assert all(map(torch.equal, found, weights()))
    assert not all(map(torch.equal, found, weights(rollouts_ahead=0)))


async def no_tool():
    """Needs no time."""


@pytest.mark.parametrize("environment", [tool_workflow(no_tool), tiny_environment()], ids=["workflow", "function"])
def test_a_run_resumes_with_what_its_checkpoint_has_sampled(tmp_path, environment):
    """Questions with settings of their own, and answers in the prompts."""
    settings = {**AHEAD, **SAVED, "num_turns": 2, "num_generations": 2, "save_steps": 2}
    runs = []
    for folder, checkpoint in (("whole", None), ("resumed", str(tmp_path / "whole" / "checkpoint-2"))):
        team = tiny_team(chat_template="{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
        runs.append(tiny_trainer(tmp_path / folder, team, environment, **settings))
        runs[-1].train(resume_from_checkpoint=checkpoint)
    assert (tmp_path / "whole" / "checkpoint-2" / "rows_ahead_0.pt").is_file()
    assert not (tmp_path / "whole" / "checkpoint-3" / "rows_ahead_0.pt").exists()
    one, two = (trainer.team.state_dict() for trainer in runs)
    assert all(torch.equal(x, two[name]) for name, x in one.items()) and runs[0].env_step == runs[1].env_step


def test_an_error_of_the_environment_ends_the_run(tmp_path):
    def reward(completions, **columns):
        if trainer.env_step:
            raise KeyError("no such tool")
        return count_reward(completions)

    trainer = tiny_trainer(tmp_path, environment=tiny_environment(reward=reward), **AHEAD)
    with pytest.raises(TaskError, match="KeyError: 'no such tool'"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_what_the_environment_holds_is_closed_if_the_update_fails(tmp_path):
    closed = []

    async def use_tool():
        if training_step():
            try:
                begun.set()
                await asyncio.sleep(1000)
            finally:
                closed.append(True)

    class Failing(MAGRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            assert begun.wait(60)
            return super().compute_loss(*args, **kwargs) * torch.nan

        def agent_loss(self, *args):
            return super().agent_loss(*args) * torch.nan

    begun = threading.Event()
    settings = {**AHEAD, "branching": "episodes", "num_turns": 2, "num_generations": 2}
    trainer = tiny_trainer(tmp_path, environment=tool_workflow(use_tool), trainer=Failing, **settings)
    with pytest.raises(FloatingPointError, match="at step 0"):
        trainer.train()
    assert closed == [True] * 4


def test_a_reward_that_takes_too_long_ends_the_run(tmp_path):
    def reward(completions, **columns):
        if trainer.env_step:
            ended.wait(60)
        return count_reward(completions)

    ended = threading.Event()
    environment = tiny_environment(reward=reward)
    environment.reward_timeout = 0.5
    trainer = tiny_trainer(tmp_path, environment=environment, **AHEAD)
    finish = trainer._ahead._finish

    def late():
        try:
            return finish()
        finally:
            ended.set()

    trainer._ahead._finish = late
    with pytest.raises(TaskError, match=r"did not answer within 0\.5 seconds"):
        trainer.train()


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (MAGRPOConfig, {"use_vllm": True}, "set `vllm_mode: server`"),
        (IACConfig, {}, "`rollouts_ahead`"),
        (MAGRPOConfig, {"rollouts_ahead": 2}, "`rollouts_ahead`"),
        (MAGRPOConfig, {"top_p": 0.9}, "sample with `temperature` alone"),
        (MAGRPOConfig, {"top_k": 50}, "sample with `temperature` alone"),
        (MAGRPOConfig, {"generation_kwargs": {"typical_p": 0.3}}, "sample with `temperature` alone"),
    ],
)
def test_what_is_refused(tmp_path, config, settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, config, **{"rollouts_ahead": 1, **settings})


def test_a_stream_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`train_dataset` is a stream"):
        tiny_trainer(tmp_path, train_dataset=tiny_items().to_iterable_dataset(), **AHEAD)


@pytest.mark.parametrize(
    ("variables", "message"), [({"use_vllm": True, "vllm_mode": "server"}, "vLLM server"), ({}, "ZeRO-3")]
)
def test_several_processes_that_would_wait_for_each_other_are_refused(variables, message):
    from types import SimpleNamespace

    from trl_multiagent.trainers.base.ahead import check_ahead

    args = {"use_vllm": False, "vllm_mode": "colocate", "world_size": 2, "zero_stage": 3}
    with pytest.raises(ValueError, match=message):
        check_ahead(SimpleNamespace(**{**args, **variables}))
