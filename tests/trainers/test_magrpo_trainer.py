"""What a trainer must do around the update: sampling, evaluation, logging, checkpoints, TRL's own features."""

import inspect
import json
import math
import sys
import traceback
from dataclasses import dataclass, replace

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import EarlyStoppingCallback, TrainerCallback
from trl import RichProgressCallback

from trl_multiagent import (
    AgentTeam,
    FunctionEnvironment,
    MAGRPOConfig,
    MAGRPOTrainer,
    MAREINFORCEConfig,
    MAREINFORCETrainer,
    MAReMaxConfig,
    MAReMaxTrainer,
    MARLOOConfig,
    MARLOOTrainer,
    Task,
    role_reward,
)
from trl_multiagent.environments import TaskError
from trl_multiagent.environments.base import scoring_context
from trl_multiagent.report.trace_files import read_trace
from trl_multiagent.runs.run import run_recipe
from trl_multiagent.trainers.base.rollout_config import RolloutConfig
from trl_multiagent.trainers.base.rollout_trainer import RolloutTrainer

from by_hand import one_update
from tiny import (
    EVALUATED,
    SAVED,
    Workflow,
    byte_tokenizer,
    count_reward,
    tiny_environment,
    tiny_items,
    tiny_team,
    tiny_trainer,
)


CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</{{ message['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def weights(team):
    return {name: x.clone() for name, x in team.state_dict().items()}


def test_one_generate_call_per_turn_and_agent(tmp_path, monkeypatch):
    team = tiny_team()
    calls = dict.fromkeys(team.roles, 0)
    for role, agent in team.agents.items():

        def counted(*args, role=role, generate=agent.generate, **kwargs):
            calls[role] += 1
            return generate(*args, **kwargs)

        monkeypatch.setattr(agent, "generate", counted)
    settings = {"num_turns": 2, "joint_mode": "cross", "num_agents": 2, "items_per_device": 4, "num_generations": 3}
    tiny_trainer(tmp_path, team, **settings).train()
    assert calls == {"aux": 2, "main": 2}


def test_learns(tmp_path):
    """Two agents that must write letters of one kind each, together."""

    def reward(completions, **columns):
        return [
            sum(c in "abcdefgh" for c in x["aux"]) * sum(c in "ABCDEFGH" for c in x["main"]) / 16 for x in completions
        ]

    settings = {"items_per_device": 12, "num_generations": 6, "max_completion_length": 4, "max_steps": 30}
    settings |= {"learning_rate": 2e-2, "per_device_train_batch_size": 72, "max_grad_norm": 1.0}
    trainer = tiny_trainer(tmp_path, environment=tiny_environment(reward=reward), **settings)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert sum(rewards[:5]) / 5 < 0.1
    assert sum(rewards[-5:]) / 5 > 0.6


def test_metrics(tmp_path):
    trainer = tiny_trainer(tmp_path, num_turns=2, max_steps=2, beta=0.1, max_grad_norm=0.01)
    trainer.train()
    first, second = trainer.state.log_history[:2]
    nodes = [node for of_turn in trainer._turns for node in of_turn]
    rewards = [reward for node in nodes for reward in node.rewards]
    mean = sum(rewards) / len(rewards)
    assert second["reward"] == pytest.approx(mean)
    assert second["reward_std"] == pytest.approx(torch.tensor(rewards).std().item(), rel=1e-4)
    for turn, of_turn in enumerate(trainer._turns, start=1):
        own = [reward for node in of_turn for reward in node.rewards]
        returns = [value for node in of_turn for value in node.returns]
        assert second[f"turn_{turn}/reward_mean"] == pytest.approx(sum(own) / len(own))
        assert second[f"turn_{turn}/expected_return"] == pytest.approx(sum(returns) / len(returns))
        assert second[f"turn_{turn}/early_terminated"] == 0.0
        assert second[f"turn_{turn}/rewards/count_reward"] == pytest.approx(second[f"turn_{turn}/reward_mean"])
    assert 0 <= second["frac_reward_zero_std"] < 1
    assert (first["env_step"], second["env_step"]) == (40, 80)
    for role in ("aux", "main"):
        lengths = [len(ids) for node in nodes for ids in node.samples[role].completion_ids]
        assert second[f"agents/{role}/completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
        ended = [ids[-1] == 256 for node in nodes for ids in node.samples[role].completion_ids]
        assert second[f"agents/{role}/completions/clipped_ratio"] == pytest.approx(1 - sum(ended) / len(ended))
        assert second[f"agents/{role}/kl"] > first[f"agents/{role}/kl"] == 0.0
        assert 4 < second[f"agents/{role}/entropy"] < math.log(258)
        assert math.isfinite(second[f"agents/{role}/loss"])
    # The agents' norms are those before clipping, and so is the team's
    norms = [second[f"agents/{role}/grad_norm"] for role in ("aux", "main")]
    assert math.hypot(*norms) == pytest.approx(second["grad_norm"], rel=1e-3)
    assert second["grad_norm"] > 0.01
    losses = [second[f"agents/{role}/loss"] for role in ("aux", "main")]
    assert sum(losses) == pytest.approx(second["loss"], abs=1e-5)
    for phase in ("generate", "reward", "update"):
        assert second[f"time/{phase}"] > 0
    assert not [name for name in second if "clip_ratio/" in name]


def test_numbers_about_scoring_are_logged_once_per_step_and_evaluation(tmp_path):
    class Counting(FunctionEnvironment):
        scored = 0

        def score(self, items, joint_actions, histories):
            self.scored += len(joint_actions)
            return super().score(items, joint_actions, histories)

        def metrics(self):
            scored, self.scored = self.scored, 0
            return {"sandbox/scored": scored}

    environment = Counting({"aux": "{x}", "main": "{x}"}, count_reward)
    settings = {"max_steps": 2, "logging_steps": 2, "per_device_eval_batch_size": 3}
    trainer = tiny_trainer(tmp_path, environment=environment, eval_dataset=tiny_items(3), **settings)
    trainer.train()
    args = trainer.args
    assert trainer.state.log_history[0]["reward/sandbox/scored"] == args.items_per_device * args.num_generations
    assert trainer.evaluate()["eval_reward/sandbox/scored"] == 3 * args.num_generations_eval


def test_rewards_are_scaled_then_shifted(tmp_path):
    trainer = tiny_trainer(tmp_path, reward_scale=2.0, reward_shift=-4.0)
    trainer.train()
    node = trainer._turns[0][0]
    assert node.rewards == pytest.approx([2 * outcome.reward - 4 for outcome in node.outcomes])
    assert trainer.state.log_history[0]["reward"] < -3


def test_evaluation_plays_sampled_episodes(tmp_path):
    environment = tiny_environment()
    scored = []
    score = environment.score
    environment.score = lambda *args: scored.append(len(args[0])) or score(*args)
    settings = {"eval_dataset": tiny_items(4), "num_turns": 2, "num_generations_eval": 3}
    settings["early_termination_threshold"] = -1.0  # ends every branch in training
    trainer = tiny_trainer(tmp_path, environment=environment, **settings)
    metrics = trainer.evaluate()
    # 4 items x 3 episodes of two turns. The first turn of a training step has 2 items x 4 completions, so 3 items with
    # theirs make a batch
    assert scored == [9, 9, 3, 3]
    rewards = metrics["eval_turn_1/reward_mean"] + metrics["eval_turn_2/reward_mean"]
    assert metrics["eval_turn_1/expected_return"] == pytest.approx(rewards)
    assert metrics["eval_reward"] == pytest.approx(rewards / 2)
    assert "eval_loss" not in metrics
    assert trainer.env_step == 0


def test_collaborate(tmp_path):
    trainer = tiny_trainer(tmp_path, num_turns=2)
    episodes = trainer.collaborate([{"x": "first"}, {"x": "second"}], num_episodes=3)
    assert len(episodes) == 6 and all(len(turns) == 2 for turns in episodes)
    assert [turns[0].prompts["aux"] for turns in episodes] == ["Task first, part aux:"] * 3 + [
        "Task second, part aux:"
    ] * 3
    assert set(episodes[0][1].joint_action) == {"aux", "main"}
    assert episodes[4][1].outcome.reward == count_reward([episodes[4][1].joint_action])[0]
    assert trainer.model.training and trainer.env_step == 0


def test_the_trainer_follows_the_options_of_the_history(tmp_path):
    options = {"memory_mode": "full", "previous_response": False, "max_history_length": 40}
    trainer = tiny_trainer(tmp_path, num_turns=3, num_generations=2, joint_mode="cross", num_agents=2, **options)
    trainer.train()
    log, tokenizer = trainer.state.log_history[0], trainer.team.tokenizers["main"]
    for role in ("aux", "main"):
        later = [node for nodes in trainer._turns[1:] for node in nodes]
        mean = sum(node.samples[role].dropped_turns for node in later) / len(later)
        assert log[f"agents/{role}/history/dropped_turns"] == pytest.approx(mean) and 0 < mean < 1
    for node in trainer._turns[2]:
        second = node.history[1]
        # Two past prompts are more than 40 tokens, one is fewer
        assert (
            tokenizer.decode(node.samples["main"].prompt_ids) == f"{second.prompts['main']}\n\n{node.prompts['main']}"
        )


def test_chat_prompts_of_the_environment(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]
    environment = FunctionEnvironment({"solo": lambda item: messages}, count_reward)
    trainer = tiny_trainer(tmp_path, tiny_team(("solo",), CHAT_TEMPLATE), environment)
    trainer.train()
    prompt = trainer.team.tokenizers["solo"].decode(trainer._turns[0][0].samples["solo"].prompt_ids)
    assert prompt == "<system>Be brief.</system><user>Go.</user><assistant>"
    with pytest.raises(ValueError, match="no chat template"):  # before the training, where it is one line
        tiny_trainer(tmp_path, tiny_team(("solo",)), environment)
    with pytest.raises(ValueError, match=r"tokenizer.chat_template is not set"):
        tiny_trainer(tmp_path, tiny_team(("solo",)), use_chat_template=True)


def test_the_trace_has_the_advantages_that_are_trained(tmp_path):
    settings = {"trace_steps": 1, "num_turns": 2, "joint_mode": "cross", "num_agents": 2}
    made = tiny_trainer(tmp_path, trainer=MAReMaxTrainer, config=MAReMaxConfig, num_generations=2, **settings)
    made.train()
    trace = read_trace(tmp_path / "trace")
    assert len(trace) == made.env_step and set(trace["step"]) == {1}
    trained = made.advantages(made._turns)
    roots = trace[trace["turn"] == 1]
    for k, role in enumerate(("aux", "main")):
        expected = [
            of_node[role][index[k]].item()
            for node, of_node in zip(made._turns[0], trained[0], strict=True)
            for index in node.indices
        ]
        assert list(roots[f"advantage/{role}"]) == pytest.approx(expected)
    assert list(roots["metrics/rewards/count_reward"]) == pytest.approx(list(roots["reward"]))


class ReturnTrainer(RolloutTrainer):
    """An algorithm without a baseline, as a new one is written."""

    _name, _tag_names, _config_class = "Return", ["trl"], RolloutConfig
    _paper = None

    def node_advantages(self, node):
        return {role: torch.tensor(node.agent_returns(role)) for role in self.team.roles}


def test_an_algorithm_needs_one_method(tmp_path):
    settings = {"num_turns": 2, "num_generations": 2, "max_steps": 2, "optim": "sgd"}
    own = tiny_trainer(tmp_path / "own", trainer=ReturnTrainer, config=RolloutConfig, **settings)
    raw = tiny_trainer(tmp_path / "raw", trainer=MAREINFORCETrainer, config=MAREINFORCEConfig, **settings)
    before = weights(own.team)
    for trainer in (own, raw):
        trainer.train()
        trainer.create_model_card()
    after = weights(own.team)
    assert max((after[name] - x).abs().max() for name, x in before.items()) > 1e-4
    # MAREINFORCE leaves out rows without an effect, which changes the rounding
    torch.testing.assert_close(after, weights(raw.team), rtol=0, atol=1e-6)


def test_an_environment_knows_where_rewards_are_only_compared(tmp_path):
    seen = []

    def spy(completions, **columns):
        seen.append(scoring_context().compared)
        return count_reward(completions)

    class Ranks(MAGRPOTrainer):
        def node_advantages(self, node):
            return super().node_advantages(node)

    tiny = tiny_environment()
    environment = FunctionEnvironment(tiny.templates, spy, transition=tiny.transition)
    arguments = {"environment": environment, "eval_dataset": tiny_items(), "max_steps": 1}
    algorithms = {
        "magrpo": {},
        "ranks": {"trainer": Ranks},
        "turns": {"num_turns": 2},
        "credit": {"credit": "nothing"},
    }
    algorithms["raw"] = {"trainer": MAREINFORCETrainer, "config": MAREINFORCEConfig}
    for name, settings in algorithms.items():
        trainer = tiny_trainer(tmp_path / name, **arguments, **settings)
        seen.clear()
        trainer.train()
        assert any(seen) == (name == "magrpo"), name
    seen.clear()
    trainer.evaluate()
    assert seen and not any(seen)


def test_reward_functions_get_what_the_trainer_knows(tmp_path):
    seen = []

    def spy(completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
        seen.append((trainer_state.global_step, [len(ids["aux"]) for ids in completion_ids]))
        log_metric("longest", max(len(ids["aux"]) for ids in completion_ids))
        log_extra("verdict", [f"verdict {k}" for k in range(len(completions))])
        return count_reward(completions)

    roles = {}

    def of_main(prompts, completions, completion_ids, **columns):
        roles["main"] = (prompts[0], completions[0])
        return [0.0] * len(completions)

    environment = tiny_environment()
    environment = FunctionEnvironment(environment.templates, [spy, role_reward("main", of_main)])
    team = tiny_team(chat_template=CHAT_TEMPLATE)
    settings = {"max_steps": 2, "logging_steps": 2, "trace_steps": 1, "eval_dataset": tiny_items(2)}
    trainer = tiny_trainer(tmp_path, team, environment, **settings)
    trainer.collaborate([{"x": "1"}])  # what is logged here belongs to no step
    trainer.train()
    assert [step for step, _ in seen] == [0, 0, 1] and all(len(lengths) == 8 for _, lengths in seen[1:])
    assert trainer.state.log_history[0]["longest"] == pytest.approx(sum(max(x) for _, x in seen[1:]) / 2)
    trace = read_trace(tmp_path / "trace")
    assert list(trace["extra/verdict"]) == 2 * [f"verdict {k}" for k in range(8)]
    assert [message["role"] for message in (roles["main"][0][0], roles["main"][1][0])] == ["user", "assistant"]
    assert "eval_longest" in trainer.evaluate()


def test_two_evaluation_sets_keep_two_names(tmp_path):
    sets = {"easy": tiny_items(2), "hard": tiny_items(4)}
    settings = {"num_turns": 2, "max_steps": 2, "trace_steps": 1, **SAVED, **EVALUATED}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_hard_return"}
    trainer = tiny_trainer(tmp_path, eval_dataset=sets, greater_is_better=True, **settings)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "eval_hard_return" in entry]
    assert len(logs) == 2 and trainer.state.best_metric == max(entry["eval_hard_return"] for entry in logs)
    metrics = trainer.evaluate()
    for name in ("easy", "hard"):
        assert metrics[f"eval_{name}_return"] == metrics[f"eval_{name}_turn_1/expected_return"]
        assert metrics[f"eval_{name}_final_turn/reward"] == metrics[f"eval_{name}_turn_2/reward_mean"]
    assert not [key for key in metrics if key.startswith(("eval_reward", "eval_return"))]
    assert set(read_trace(tmp_path / "trace")["split"]) == {"train", "eval_easy", "eval_hard"}
    assert "eval_return" in trainer.evaluate(sets["easy"])


@dataclass
class EvaluateTrain(TrainerCallback):
    """Evaluates the rows that are trained on, after the first step."""

    trainer: MAGRPOTrainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.trainer.evaluate(self.trainer.train_dataset, metric_key_prefix="train")


def test_the_metrics_of_an_evaluation_have_the_prefix_that_it_was_given(tmp_path):
    """A test set is no evaluation of the training: the model card leaves it out."""
    environment = tiny_environment(reward=lambda completions, x, **columns: [float(len(value)) for value in x])
    settings = {"environment": environment, "train_dataset": items("1", "2"), "eval_dataset": items("12")}
    trainer = tiny_trainer(tmp_path, max_steps=2, trace_steps=1, eval_strategy="steps", eval_steps=1, **settings)
    trainer.add_callback(EvaluateTrain(trainer))
    trainer.train()
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["step"] == 2
    metrics = trainer.evaluate({"a": items("123"), "b": items("12345")}, metric_key_prefix="test")
    assert (metrics["test_a_reward"], metrics["test_b_reward"]) == (3.0, 5.0)
    assert trainer.evaluate(items("1234"), metric_key_prefix="test")["test_return"] == 4.0
    assert trainer.predict(items("1")).metrics["test_reward"] == 1.0
    logs = trainer.state.log_history
    assert [log["eval_return"] for log in logs if "eval_return" in log] == [2.0]
    assert [log["test_return"] for log in logs if "test_return" in log] == [4.0]
    assert {*read_trace(tmp_path / "trace")["split"]} == {"train", "eval", "test_a", "test_b", "test"}
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "| eval_return | 2.000 | 2.000 (step 2) | 2.000 |" in card and "test_return" not in card


def test_an_evaluation_that_fails_leaves_nothing_behind(tmp_path):
    def fails_on_the_last(completions, x, **columns):
        if "9" in x:
            raise RuntimeError("no judge")
        return [float(len(c["aux"])) for c in completions]

    trainer = tiny_trainer(
        tmp_path, environment=tiny_environment(reward=fails_on_the_last), train_dataset=items("1", "2")
    )
    with pytest.raises(TaskError, match="no judge"):
        trainer.evaluate({"first": items("1"), "second": items("1", "9")})
    assert trainer.team.training and not trainer._metrics["eval"]
    assert "eval_reward" in trainer.evaluate(items("1")) and trainer.team.training


def items(*values):
    return Dataset.from_dict({"x": list(values)})


def test_agents_learn_at_their_own_rates(tmp_path):
    team = tiny_team()
    before = weights(team)
    trainer = tiny_trainer(
        tmp_path, team, agent_learning_rates={"aux": 0.0}, max_steps=2, lr_scheduler_type="linear", learning_rate=0.01
    )
    trainer.train()
    moved = {name for name, x in team.state_dict().items() if not torch.equal(x, before[name])}
    assert moved == {name for name in before if name.startswith("models.main")}
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {0.0, 0.01}
    assert trainer.state.log_history[1]["learning_rate"] in (0.0, 0.005)


def test_trackers_get_a_group_per_agent(tmp_path, reports, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    options = {"log_completions": True, "num_completions_to_print": 1, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"eval_dataset": {"easy": tiny_items(4)}, "callbacks": [RichProgressCallback()]}
    tiny_trainer(tmp_path, environment=Workflow(), report_to="tensorboard", num_turns=2, **options).train()
    found = EventAccumulator(str(tmp_path / "runs")).Reload()
    tags = set(found.Tags()["scalars"])
    assert {"main/train/loss", "train/turn_1/reward_mean", "aux/eval/easy_completions/mean_length"} <= tags
    assert not any("agents/" in tag for tag in tags)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_one_bar_in_a_terminal_and_a_line_per_log_elsewhere(tmp_path, tiny_model, monkeypatch, capsys, is_terminal):
    class Passed(FunctionEnvironment):
        def score(self, items, *args):
            return [replace(outcome, metrics={"passed": 0.25}) for outcome in super().score(items, *args)]

    prompts = {"aux": "Help with {x}:", "main": "Do {x}:"}
    task = Task(lambda settings: Passed(prompts, count_reward), lambda settings: (tiny_items(6), None))
    argv = f"--model_name {tiny_model} --output_dir {tmp_path}/run --disable_tqdm false --report_to none".split()
    argv += "--max_steps 2 --logging_steps 1 --max_completion_length 6".split()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    run_recipe("magrpo", task, argv, "train")
    output = capsys.readouterr()
    _, last, *_ = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").open()]
    shown = "reward {reward:.2f}, return {return:.2f}, solved 0.25"
    assert "loss" in last and "'loss':" not in output.out + output.err
    assert shown.format(**last) in (output.err if is_terminal else output.out)
    assert ("Training" in output.err) == is_terminal and ("step 1 of 2: reward" in output.out) != is_terminal


@pytest.mark.parametrize("where", ["reward", "loss"])
def test_a_number_that_is_not_finite_ends_the_run(tmp_path, where):
    team = tiny_team()

    def reward(completions, **columns):
        if where == "loss":
            with torch.no_grad():
                team.agents["main"].model.norm.weight.fill_(float("nan"))
        return [1.0] * 5 + [float("nan") if where == "reward" else 0.0] * (len(completions) - 5)

    trainer = tiny_trainer(tmp_path, team, tiny_environment(reward=reward))
    message = "failure_step0_process0" if where == "reward" else "loss of agent 'main'"
    with pytest.raises(FloatingPointError, match=message) as ended:
        trainer.train()
    frames = [frame.name for frame in traceback.extract_tb(ended.tb)]
    assert frames == ["test_a_number_that_is_not_finite_ends_the_run", "run"]  # and none of the trainer's
    report = json.loads((tmp_path / "failure_step0_process0.json").read_text())
    assert report["agents"] == ["aux", "main"] and (where == "reward" or len(report["joint_actions"]) == 8)
    assert report["joint_actions"][0]["item"]["x"] in tiny_items()["x"]
    assert set(report["joint_actions"][0]["completions"]) == {"aux", "main"}


def test_an_empty_prompt(tmp_path):
    environment = FunctionEnvironment({"aux": "{x}", "main": ""}, count_reward)
    with pytest.raises(ValueError, match="prompt of agent 'main' has no tokens"):
        tiny_trainer(tmp_path, environment=environment).train()


def test_a_stream_trains_and_resumes_as_a_dataset_does(tmp_path):
    """Each batch is read once, and used for two steps. A resumed run goes on where it stopped reading."""
    read = []

    def rows():
        for row in tiny_items(12):
            read.append(row)
            yield row

    def train(data, folder, **resume):
        settings = {
            "items_per_device": 2,
            "num_iterations": 2,
            "max_steps": 6,
            "save_steps": 4,
            "save_strategy": "steps",
        }
        trainer = tiny_trainer(tmp_path / folder, train_dataset=data, shuffle_dataset=False, **settings)
        trainer.train(**resume)
        return trainer.team.state_dict()

    expected = train(tiny_items(12), "dataset")
    stream = IterableDataset.from_generator(rows)
    whole = train(stream, "stream")
    assert len(read) <= 2 + 6 + 2  # the first item is also looked at before, and the loader is one batch ahead
    resumed = train(stream, "stream", resume_from_checkpoint=str(tmp_path / "stream" / "checkpoint-4"))
    for name, value in expected.items():
        assert torch.equal(whole[name], value) and torch.equal(resumed[name], value)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_that_has_begun_again_resumes_where_it_stopped(tmp_path, shuffle):
    """Each pass has an order of its own, without its incomplete last batch, and ends with an evaluation."""

    def train(steps=8, **resume):
        stream = IterableDataset.from_generator(lambda: (row for row in tiny_items(7)))
        settings = {"max_steps": steps, "save_steps": 1, "save_strategy": "no" if resume else "steps"}
        settings |= {"eval_strategy": "epoch", "eval_dataset": tiny_items(1), "items_per_device": 2}
        trainer = tiny_trainer(tmp_path, train_dataset=stream, shuffle_dataset=shuffle, **settings)
        trainer.train(**resume)
        logs = [log for log in trainer.state.log_history if "eval_reward" in log]
        return trainer.team.state_dict(), [(log["step"], log["epoch"]) for log in logs]

    expected, evaluations = train()
    assert [step for step, _ in evaluations] == [3, 6, 8]
    for step in (3, 5, 7) if shuffle else (5,):  # at the end of the first pass, and in others
        weights, resumed = train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert all(torch.equal(weights[name], value) for name, value in expected.items()) and resumed == evaluations
    if shuffle:
        train(steps=5)  # a longer run goes on from it
        weights, _ = train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"team": tiny_team(("a", "b")), "environment": tiny_environment(("b", "a"))}, r"roles \['a', 'b'\], the"),
        ({"items_per_device": 13}, "12 items, fewer than the 13 .* Give more, or lower"),
        ({"train_dataset": DatasetDict(train=tiny_items(4))}, r"got `DatasetDict`: choose a split of \['train'\]"),
        ({"train_dataset": [{"x": "a"}]}, r"got `list`: `Dataset.from_list\(rows\)` makes one"),
        ({"train_dataset": "org/data"}, r"got `str`: `load_dataset\('org/data', split=...\)` loads one"),
        ({"train_dataset": tiny_items(4).to_iterable_dataset(), "max_steps": -1}, "is a stream, .* set `max_steps`"),
        ({"equal_episodes": True}, "needs `branching: episodes`"),
        ({"advantage_normalization": "rewards", "credit": "nothing"}, "both replace the return"),
        ({"callbacks": [EarlyStoppingCallback()]}, "needs `eval_strategy` and a `metric_for_best_model`"),
        ({"eval_dataset": tiny_items(4).to_iterable_dataset()}, r"got `IterableDataset`: `Dataset.from_list\("),
    ],
)
def test_refusals(tmp_path, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        tiny_trainer(tmp_path, **arguments)


@pytest.mark.parametrize(
    ("callee", "name", "message"),
    [
        (MAGRPOTrainer, "model", r"give `team=AgentTeam.from_pretrained\(model, roles\)`"),
        (MAGRPOTrainer, "reward_funcs", "give `environment=FunctionEnvironment"),
        (MAGRPOTrainer, "train_data", "did you mean `train_dataset`"),
        (MAGRPOConfig, "max_new_tokens", "did you mean `max_completion_length`"),
        (MAGRPOConfig, "num_generation", "did you mean `num_generations`"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(callee, name, message):
    with pytest.raises(TypeError, match=rf"{callee.__name__} has no argument `{name}`: {message}"):
        callee(**{name: "x"})
    assert "train_dataset" in inspect.signature(MAGRPOTrainer).parameters  # of the class itself


def config(**settings):
    return MAGRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **{"report_to": "none"} | settings)


def test_config_sizes():
    args = config(num_turns=2, items_per_device=3, per_device_train_batch_size=8)
    assert (args.rows_per_item, args.gradient_accumulation_steps, args.rows_per_device) == (20, 1, 60)
    args = config(num_turns=3, joint_mode="crossed", num_agents=2, num_generations=2, items_per_device=1)
    assert args.nodes_per_turn == [1, 4, 16] and args.rows_per_item == 42
    args = config(per_device_train_batch_size=8, gradient_accumulation_steps=3)
    assert args.items_per_device == 6
    assert config(learning_rate="1e-5").learning_rate == 1e-5  # as YAML reads it
    shares = {"save_steps": 0.1, "eval_steps": 0.1, "save_strategy": "steps", "eval_strategy": "steps"}
    assert config(load_best_model_at_end=True, metric_for_best_model="reward", **shares).save_steps == 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_turns": 2, "gradient_accumulation_steps": 4}, "Set `items_per_device`"),
        ({"num_turns": 2, "joint_mode": "cross", "items_per_device": 1}, "needs `num_agents`"),
        ({"max_steps": 0}, "`max_steps` is 0"),
        (
            {"advantage_mode": "raw", "num_generations": 1, "advantage_normalization": True},
            "`advantage_normalization` compares siblings",
        ),
        ({"max_steps": -5}, "`max_steps` is -5; it must be at least -1"),
        (
            {"num_iterations": 2, "load_best_model_at_end": True, "save_steps": 5, "eval_steps": 5}
            | {"eval_strategy": "steps", "save_strategy": "steps", "metric_for_best_model": "reward"},
            "`save_steps` is 5; .* a multiple of `num_iterations`, 2",
        ),
    ],
)
def test_config_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_the_default_configuration_is_that_of_the_algorithm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    team = tiny_team()
    trainer = MARLOOTrainer(team, tiny_environment(team.roles), train_dataset=tiny_items())
    assert isinstance(trainer.args, MARLOOConfig) and trainer.args.advantage_mode == "rloo"
    assert trainer.args.output_dir == "main-MARLOO"


def test_tokenizer_without_a_padding_token(tmp_path):
    team = tiny_team()
    tokenizers = {role: byte_tokenizer() for role in team.roles}
    for tokenizer in tokenizers.values():
        tokenizer.pad_token = None
    team = AgentTeam(dict(team.agents), tokenizers)
    assert tokenizers["aux"].pad_token == "<eos>"
    gradients, *_ = one_update(tmp_path, team)
    reference, *_ = one_update(tmp_path, tiny_team())
    assert all(torch.allclose(gradients[name], reference[name], atol=1e-6) for name in gradients)
