import itertools
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from trl_multiagent import MAGRPOConfig, Outcome
from trl_multiagent.report.alarms import STEPS, Alarms, is_cliff

from tiny import EVALUATED, SAVED, tiny_environment, tiny_items, tiny_trainer


HEALTHY = {
    "reward": 1.0,
    "frac_reward_zero_std": 0.3,
    "turn_1/aux_used": 0.4,
    **{f"agents/{role}/completions/most_common_ratio": 0.2 for role in ("aux", "main")},
    **{f"agents/{role}/completions/repetition": 0.1 for role in ("aux", "main")},
    **{f"agents/{role}/completions/clipped_ratio": 0.1 for role in ("aux", "main")},
}


def run(folder, logs, every=1, max_steps=1000, **settings):
    """Feeds log entries to the callback and returns what it wrote, and the control."""
    alarms = Alarms(("aux", "main"), {"aux_used": "aux is idle"})
    defaults = {"max_completion_length": 64, "num_generations": 4, "on_cliff": None, "cliff_drop": 0.3}
    defaults["num_turns"] = 1
    args, state = (
        SimpleNamespace(output_dir=str(folder), **{**defaults, **settings}),
        TrainerState(max_steps=max_steps),
    )
    control = TrainerControl()
    alarms.on_train_begin(args, state, control)
    for step, log in zip(itertools.count(every, every), logs, strict=False):
        state.global_step = step
        state.log_history.append({**log, "step": step})
        alarms.on_log(args, state, control)
        if any(name.startswith(("eval_", "test_")) for name in log):
            alarms.on_evaluate(args, state, control, metrics=log)
    path = folder / "alarms.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else [], control


def test_a_cliff_is_found_in_each_of_several_evaluation_sets_and_raised_when_it_begins(tmp_path):
    logs = [{"eval_easy_reward": 1.0}, {"eval_hard_reward": 0.5}, {"eval_easy_reward": 1.0}, {"eval_hard_reward": 0.1}]
    alarms, control = run(tmp_path, [*logs, *logs[2:], *logs])
    assert [(alarm["step"], alarm["alarm"]) for alarm in alarms] == [(4, "cliff"), (10, "cliff")]  # it holds at step 6
    assert "eval_hard_reward" in alarms[0]["message"]
    assert not control.should_training_stop
    _, control = run(tmp_path / "stop", logs, on_cliff="stop")
    assert control.should_training_stop
    alarms, _ = run(tmp_path / "test", [{"eval_reward": 1.0}, {"eval_reward": 0.1}, {"test_reward": 0.0}])
    assert [alarm["step"] for alarm in alarms] == [2]  # a test set is none of the training


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"frac_reward_zero_std": 1.0}, "no_signal"),
        ({"agents/aux/completions/most_common_ratio": 0.95}, "collapse/aux"),
        ({"agents/aux/completions/repetition": 0.9}, "repetition/aux"),
        ({"agents/main/completions/clipped_ratio": 1.0}, "cut_off/main"),
        ({"turn_1/aux_used": 0.0}, "low/aux_used"),
        ({"turn_1/out_of_turns": 1.0}, "out_of_turns"),
    ],
)
@pytest.mark.parametrize(("every", "raised"), [(1, 21), (10, 40), (50, 200)])
def test_an_alarm_is_raised_once_when_its_condition_has_held(tmp_path, caplog, change, name, every, raised):
    """It must hold in 20 steps and in three entries: one entry of a broken run is a mean with healthy steps."""
    with caplog.at_level(logging.WARNING):
        alarms, control = run(tmp_path, [HEALTHY] + [HEALTHY | change] * (40 // every + 5), every)
    assert [(alarm["step"], alarm["alarm"]) for alarm in alarms] == [(raised, name)]
    assert caplog.messages == [f"Step {raised}: {alarms[0]['message']}"]
    assert not control.should_training_stop


def test_in_a_short_training_a_condition_of_completions_holds_for_half_of_it(tmp_path):
    """Equal returns may be the highest, as in twelve steps of `hidden`."""
    bad = HEALTHY | {"frac_reward_zero_std": 1.0, "agents/aux/completions/repetition": 0.9}
    alarms, _ = run(tmp_path, [HEALTHY] * 2 + [bad] * 10, max_steps=12)
    assert [(alarm["step"], alarm["alarm"]) for alarm in alarms] == [(8, "repetition/aux")]
    alarms, _ = run(tmp_path / "endless", [HEALTHY | {"episode/out_of_turns": 1.0}] * 12, max_steps=12, num_turns=2)
    assert [(alarm["step"], alarm["alarm"]) for alarm in alarms] == [(6, "out_of_turns")]


@pytest.mark.parametrize(
    ("rise", "fall", "found"), [(0.5, 0.3, [20]), (-0.5, 0.3, []), (0.5, -0.3, []), (0.5, 0.0, [])]
)
def test_a_reward_that_rises_while_fewer_answers_pass_raises_an_alarm(tmp_path, rise, fall, found):
    """Other items in each step make both noisy."""
    noise = itertools.cycle([0.1, -0.1, 0.0])
    early = [HEALTHY | {"reward": 1 + x, "turn_1/passed": 0.4 - x} for x in itertools.islice(noise, 10)]
    late = [HEALTHY | {"reward": 1 + rise + x, "turn_1/passed": 0.4 - fall - x} for x in itertools.islice(noise, 10)]
    alarms, _ = run(tmp_path, early + late, max_steps=40)
    assert [(alarm["alarm"], alarm["step"]) for alarm in alarms] == [("fewer_pass", step) for step in found]


def test_an_alarm_is_raised_again_after_a_pause_and_after_a_resume(tmp_path):
    bad = HEALTHY | {"turn_1/aux_used": 0.0}
    logs = [bad] * STEPS + [HEALTHY] + [bad] * STEPS
    first, _ = run(tmp_path, logs)
    assert [alarm["step"] for alarm in first] == [STEPS, 2 * STEPS + 1]
    with (tmp_path / "alarms.jsonl").open("a") as file:
        file.write('{"step": 0, "al')  # of a process that was killed
    assert run(tmp_path, logs)[0] == first  # from step 0


def test_a_healthy_team_and_one_without_these_metrics_raise_none(tmp_path):
    assert run(tmp_path, [HEALTHY] * (STEPS + 5))[0] == []
    assert run(tmp_path, [{"reward": 0.0}] * (STEPS + 5))[0] == []
    without_siblings = HEALTHY | {"frac_reward_zero_std": 1.0}
    assert run(tmp_path, [without_siblings] * (STEPS + 5), num_generations=1)[0] == []
    short = HEALTHY | {"agents/main/completions/clipped_ratio": 1.0}
    assert run(tmp_path, [short] * (STEPS + 5), max_completion_length=8)[0] == []


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([3.0], False), ([3.0, 2.2], False), ([3.0, 2.0], True), ([-1.0, -1.2], False), ([-1.0, -1.4], True)],
)
def test_cliff(rewards, expected):
    assert is_cliff(rewards, 0.3) is expected


def test_rollback_needs_checkpoints(tmp_path):
    settings = {"output_dir": str(tmp_path), "on_cliff": "rollback", "eval_strategy": "steps", "eval_steps": 2}
    with pytest.raises(ValueError, match="needs checkpoints to go back to: set `save_strategy`"):
        MAGRPOConfig(**settings, save_strategy="no")


def test_rollback_ends_with_the_weights_of_the_best_checkpoint(tmp_path):
    """It follows the metric of one of two evaluation sets."""
    environment = tiny_environment()
    rewards = iter([1.0, 3.0, 0.0])
    environment.evaluate = lambda items, actions, histories: [Outcome(rewards_now[0]) for _ in items]
    rewards_now = [next(rewards)]

    class Next(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            saved[state.global_step] = {name: x.clone() for name, x in trainer.team.state_dict().items()}
            if "eval_hard_reward" in metrics:
                rewards_now[0] = next(rewards, 0.0)

    saved = {}
    settings = {"max_steps": 6, **EVALUATED, **SAVED, "on_cliff": "rollback", "metric_for_best_model": "hard_return"}
    settings["eval_dataset"] = {"easy": tiny_items(1), "hard": tiny_items(2)}
    trainer = tiny_trainer(tmp_path, environment=environment, callbacks=[Next()], **settings)
    assert trainer.args.load_best_model_at_end and trainer.args.greater_is_better
    trainer.train()
    assert trainer.state.global_step == 3 and trainer.state.best_global_step == 2
    for name, x in trainer.team.state_dict().items():
        assert torch.equal(x, saved[2][name]), name
    alarms = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert {(alarm["step"], alarm["alarm"]) for alarm in alarms} == {(3, "cliff")}
