"""The examples that need nothing of the package, beside the package."""

import importlib.util
from pathlib import Path

from by_hand import distance, one_update


def minimal_magrpo():
    path = Path(__file__).resolve().parents[1] / "examples" / "minimal_magrpo.py"
    spec = importlib.util.spec_from_file_location("minimal_magrpo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_minimal_example_computes_the_gradients_of_the_trainer(tmp_path):
    example = minimal_magrpo()
    gradients, trainer, before = one_update(tmp_path, num_turns=1, items_per_device=2, num_generations=3)
    nodes = trainer._turns[0]
    advantages = [example.advantages_of(node.rewards) for node in nodes]
    for role in before.roles:
        samples = [node.samples[role] for node in nodes]
        prompts, groups = [x.prompt_ids for x in samples], [x.completion_ids for x in samples]
        example.loss_of(before.agents[role], prompts, groups, advantages).backward()
    expected = {name: x.grad for name, x in before.named_parameters() if x.grad is not None}
    assert distance(gradients, expected) < 1e-6


def test_the_minimal_example_runs(capsys):
    example = minimal_magrpo()
    assert 0 <= example.main(steps=10, items_per_step=1, group_size=2) <= 1
    assert "step  10  reward" in capsys.readouterr().out
    assert example.reward({"caller": "ab", "echo": "a"}) == 1.0 and example.reward({"caller": "e", "echo": "u"}) == 0.5
    assert example.reward({"caller": "", "echo": "u"}) == 0.25 and example.reward({"caller": "b", "echo": "b"}) == 0.0
