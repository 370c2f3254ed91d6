import itertools
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from trl_multiagent import MAGRPOConfig, Outcome
from trl_multiagent.trainers.base.metrics import WINDOW, Alarms, is_cliff

from tiny import EVALUATED, SAVED, tiny_environment, tiny_items, tiny_trainer


HEALTHY = {
    "reward": 1.0,
    "frac_reward_zero_std": 0.3,
    "team/reward_variance": 0.5,
    "turn_1/aux_used": 0.4,
    "turn_1/reward_mean": 0.1,
    "turn_2/reward_mean": 0.5,
    **{f"agents/{role}/completions/most_common_ratio": 0.2 for role in ("aux", "main")},
    **{f"agents/{role}/completions/repetition": 0.1 for role in ("aux", "main")},
    **{f"agents/{role}/completions/clipped_ratio": 0.1 for role in ("aux", "main")},
    **{f"agents/{role}/total_contribution": 0.2 for role in ("aux", "main")},
}


def run(folder, logs, every=1, **settings):
    """Feeds log entries to the callback and returns what it wrote, and the control."""
    alarms = Alarms(
        ("aux", "main"),
        **{"has_siblings": True, "is_chain": True, "watched_metrics": {"aux_used": "aux is idle"}, **settings},
    )
    args, state = (
        SimpleNamespace(output_dir=str(folder), max_completion_length=64),
        TrainerState(is_world_process_zero=True),
    )
    control = TrainerControl()
    alarms.on_train_begin(args, state, control)
    for step, log in zip(itertools.count(every, every), logs, strict=False):
        state.global_step = step
        state.log_history.append({**log, "step": step})
        alarms.on_log(args, state, control)
        if any(name.startswith("eval_") for name in log):
            alarms.on_evaluate(args, state, control, metrics=log)
    path = folder / "alarms.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else [], control


def test_a_cliff_is_found_in_each_of_several_evaluation_sets_and_raised_when_it_begins(tmp_path):
    logs = [{"eval_easy_reward": 1.0}, {"eval_hard_reward": 0.5}, {"eval_easy_reward": 1.0}, {"eval_hard_reward": 0.1}]
    alarms, control = run(tmp_path, [*logs, *logs[2:], *logs])
    assert [alarm["step"] for alarm in alarms] == [4, 10]  # at the sixth step, it still holds
    assert "eval_hard_reward" in alarms[0]["message"]
    assert not control.should_training_stop
    _, control = run(tmp_path / "stop", logs, on_cliff="stop")
    assert control.should_training_stop


def test_a_line_that_was_written_in_part_is_dropped(tmp_path):
    path = tmp_path / "alarms.jsonl"
    path.write_text(json.dumps({"step": 0, "alarm": "cliff", "message": ""}) + '\n{"step": 0, "al')
    alarms, _ = run(tmp_path, [])
    assert [alarm["alarm"] for alarm in alarms] == ["cliff"] and path.read_text().endswith("}\n")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"frac_reward_zero_std": 1.0}, "no_signal"),
        ({"agents/aux/completions/most_common_ratio": 0.95}, "collapse/aux"),
        ({"agents/main/total_contribution": 0.004}, "no_contribution/main"),
        ({"turn_1/aux_used": 0.0}, "low/aux_used"),
        ({"turn_1/reward_mean": 0.0}, "chain"),
    ],
)
def test_an_alarm_is_raised_once_when_its_condition_has_held_for_a_window(tmp_path, caplog, change, name):
    with caplog.at_level(logging.WARNING):
        alarms, control = run(tmp_path, [HEALTHY] * 5 + [HEALTHY | change] * (WINDOW + 10))
    assert [(alarm["step"], alarm["alarm"]) for alarm in alarms] == [(5 + WINDOW, name)]
    assert caplog.messages == [f"Step {5 + WINDOW}: {alarms[0]['message']}"]
    assert not control.should_training_stop


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"agents/aux/completions/repetition": 0.9}, "repetition/aux"),
        ({"agents/main/completions/clipped_ratio": 1.0}, "cut_off/main"),
    ],
)
@pytest.mark.parametrize(("every", "raised"), [(1, 21), (10, 40), (50, 200)])
def test_broken_completions_raise_an_alarm_soon(tmp_path, change, name, every, raised):
    """They must be broken in 20 steps and in three entries: one entry of a broken run is a mean with healthy steps."""
    logs = [HEALTHY] + [HEALTHY | change] * (40 // every + 5)
    alarms, _ = run(tmp_path, logs, every)
    assert [(alarm["step"], alarm["alarm"]) for alarm in alarms] == [(raised, name)]


def test_an_alarm_is_raised_again_after_a_pause(tmp_path):
    bad = HEALTHY | {"turn_1/aux_used": 0.0}
    alarms, _ = run(tmp_path, [bad] * WINDOW + [HEALTHY] + [bad] * WINDOW)
    assert [alarm["step"] for alarm in alarms] == [WINDOW, 2 * WINDOW + 1]


def test_a_healthy_team_and_one_without_these_metrics_raise_none(tmp_path):
    assert run(tmp_path, [HEALTHY] * (WINDOW + 5))[0] == []
    assert run(tmp_path, [{"reward": 0.0}] * (WINDOW + 5))[0] == []
    unanimous = HEALTHY | {"team/reward_variance": 0.0, "agents/aux/total_contribution": 0.0}
    assert run(tmp_path, [unanimous] * (WINDOW + 5))[0] == []  # nobody can contribute to nothing
    without_siblings = HEALTHY | {"frac_reward_zero_std": 1.0}
    assert run(tmp_path, [without_siblings] * (WINDOW + 5), has_siblings=False)[0] == []


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([3.0], False), ([3.0, 2.2], False), ([3.0, 2.0], True), ([-1.0, -1.2], False), ([-1.0, -1.4], True)],
)
def test_cliff(rewards, expected):
    assert is_cliff(rewards, 0.3) is expected


@pytest.mark.parametrize("on_cliff", [None, "stop", "rollback"])
def test_a_cliff_ends_the_training_if_that_is_asked_for(tmp_path, on_cliff):
    alarms, control = run(tmp_path, [{"eval_reward": 3.0}, {"eval_reward": 1.0}], on_cliff=on_cliff)
    assert [alarm["alarm"] for alarm in alarms] == ["cliff"]
    assert control.should_training_stop is (on_cliff is not None)


def test_a_resumed_run_drops_the_alarms_that_it_will_raise_again(tmp_path):
    bad = HEALTHY | {"turn_1/aux_used": 0.0}
    first, _ = run(tmp_path, [bad] * (WINDOW + 3))
    again, _ = run(tmp_path, [bad] * (WINDOW + 3))  # from step 0
    assert again == first


def test_rollback_needs_checkpoints(tmp_path):
    settings = {"output_dir": str(tmp_path), "on_cliff": "rollback", "eval_strategy": "steps", "eval_steps": 2}
    with pytest.raises(ValueError, match="needs checkpoints to go back to: set `save_strategy`"):
        MAGRPOConfig(**settings, save_strategy="no")
    args = MAGRPOConfig(**settings, save_strategy="steps", save_steps=2)
    assert args.load_best_model_at_end and args.metric_for_best_model == "reward" and args.greater_is_better


@pytest.mark.parametrize("metric", ["eval_easy_reward", "hard_return"])
def test_rollback_follows_the_metric_of_one_evaluation_set(tmp_path, metric):
    settings = {**EVALUATED, **SAVED, "max_steps": 1}
    sets = {"easy": tiny_items(1), "hard": tiny_items(2)}
    settings |= {"on_cliff": "rollback", "metric_for_best_model": metric, "eval_dataset": sets}
    trainer = tiny_trainer(tmp_path, **settings)
    trainer.train()
    assert trainer.state.best_global_step == 1


def test_rollback_ends_with_the_weights_of_the_best_checkpoint(tmp_path):
    environment = tiny_environment()
    rewards = iter([1.0, 3.0, 0.0])
    environment.evaluate = lambda items, actions, histories: [Outcome(rewards_now[0]) for _ in items]
    rewards_now = [next(rewards)]

    class Next(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            saved[state.global_step] = {name: x.clone() for name, x in trainer.team.state_dict().items()}
            rewards_now[0] = next(rewards, 0.0)

    saved = {}
    settings = {"max_steps": 6, **EVALUATED, **SAVED, "on_cliff": "rollback", "eval_dataset": tiny_items(2)}
    trainer = tiny_trainer(tmp_path, environment=environment, callbacks=[Next()], **settings)
    trainer.train()
    assert trainer.state.global_step == 3
    for name, x in trainer.team.state_dict().items():
        assert torch.equal(x, saved[2][name]), name
    (alarm,) = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert alarm["step"] == 3 and alarm["alarm"] == "cliff"
