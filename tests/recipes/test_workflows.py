"""The recipes of workflows: their rewards, their demonstrations, and what is sampled and trained."""

import copy
import random
from collections import Counter

import pytest
import torch

from trl_multiagent import AgentTeam, FunctionEnvironment, Turn, cli
from trl_multiagent.configs.recipes.workflows import debate_judge, solver_critic, writer_editor
from trl_multiagent.environments.base import judge
from trl_multiagent.rollout.history import whole_prompt
from trl_multiagent.trainers.base.trace_files import read_trace

from tiny import FORMS, count_reward, team_of, tiny_team, tiny_trainer


WORKFLOWS = {"writer_editor": writer_editor, "solver_critic": solver_critic, "debate_judge": debate_judge}


def play(environment, item, *said):
    """Returns the outcomes of an episode with these joint actions, whose roles must be those that are asked."""
    history = []
    for joint_action in said:
        prompts = environment.prompts(item, history)
        assert list(prompts) == list(joint_action)
        (outcome,) = judge(environment, [item], [joint_action], [history])
        history.append(Turn(prompts, joint_action, outcome))
    assert environment.prompts(item, history) == {}
    return [turn.outcome for turn in history]


@pytest.mark.parametrize(
    ("sentence", "reward"),
    [
        ("The fox sings in the tower.", 1.0),
        ("The fox sleeps in the tower. ", 2 / 3),
        ("The sings fox in the tower.", 1 / 3),
        ("the fox sings in the tower.", 0.0),
        ("The fox sings in the tower", 0.0),
        ("The fox sings in the tower. The fox sings in the tower.", 0.0),
        ("fox sings tower", 0.0),
    ],
)
def test_the_reward_of_a_final_sentence(sentence, reward):
    item = {"noun": "fox", "verb": "sings", "place": "tower"}
    first, last = play(writer_editor.make_environment(None), item, {"writer": "any draft"}, {"editor": sentence})
    assert first.reward == 0.0 and last.reward == pytest.approx(reward) and not last.role_rewards


@pytest.mark.parametrize(
    ("answers", "rewards"),
    [
        ([" 5\n", "5"], (1.0, 1.5)),  # confirmed, so that the episode ends
        (["4", "4"], (0.0, 0.0)),
        (["4", "5", "5"], (1.0, 1.5)),
        (["4", "5", "4"], (0.0, 0.5)),
        (["5", "6", "5"], (1.0, 1.0)),
        (["5", "", "no"], (0.0, 0.0)),
    ],
)
def test_the_rewards_of_a_solver_and_a_critic(answers, rewards):
    said = [{role: text} for role, text in zip(("solver", "critic", "solver"), answers, strict=False)]
    outcomes = play(solver_critic.SolverCritic(), {"a": 2, "b": 3}, *said)
    assert tuple(sum(x.role_rewards[role] for x in outcomes) for role in ("solver", "critic")) == rewards


@pytest.mark.parametrize(
    ("verdict", "rewards"), [("Pro ", (1.0, -1.0, 1.0)), ("con", (-1.0, 1.0, 0.0)), ("both", (0.0, 0.0, 0.0))]
)
def test_the_rewards_of_a_debate(verdict, rewards):
    environment = debate_judge.Debate()
    item = {"dice": [6, 4, 1]}
    first, last = play(environment, item, {"pro": "6", "con": " 2"}, {"judge": verdict})
    assert set(first.role_rewards.values()) == {0.0} and first.metrics == {"true_dice": 0.5}
    assert tuple(last.role_rewards.values()) == rewards
    shown = environment.prompts(item, [Turn({}, {"pro": "6", "con": " 2"}, first)])["judge"]
    assert "names a 6." in shown and "names a ?." in shown  # no die shows a 2


def test_demonstrations_have_the_prompts_that_agents_get():
    """Those of a solver's second answer contain its first one, as the sampler writes it."""
    environment = solver_critic.SolverCritic()
    pairs = solver_critic.demonstrate(3000, random.Random(0))
    item, history, expected = {"a": 2, "b": 3}, [], []
    for role, answer in (("solver", "4"), ("critic", "5"), ("solver", "")):
        prompts = environment.prompts(item, history)
        expected.append(whole_prompt(role, history, prompts[role], as_chat=False))
        history.append(Turn(prompts, {role: answer}, None))
    assert len(pairs) == 3000 and set(expected) <= {prompt for prompt, _ in pairs}

    environment, item = writer_editor.make_environment(None), {"noun": "fox", "verb": "sings", "place": "tower"}
    prompts = {prompt for prompt, _ in writer_editor.demonstrate(9000, random.Random(0))}
    (draft,) = environment.prompts(item, ()).values()
    history = [Turn({"writer": draft}, {"writer": "a fox sings in the tower"}, None)]
    assert {draft, *environment.prompts(item, history).values()} <= prompts

    prompts = {prompt for prompt, _ in debate_judge.demonstrate(8000, random.Random(0))}
    environment, item = debate_judge.Debate(), {"dice": [6, 4, 1]}
    history = [Turn({}, {"pro": "6", "con": "1"}, None)]
    assert {*environment.prompts(item, ()).values(), *environment.prompts(item, history).values()} <= prompts


@pytest.mark.parametrize("name", WORKFLOWS)
def test_recipes_train_offline(name, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--model_name", tiny_model, "--max_steps", "2", "--items_per_device", "2", "--num_generations", "2"]
    small += ["--max_completion_length", "4", "--trace_steps", "1", "--trace_format", "jsonl", "--disable_tqdm"]
    cli.main(["run", "magrpo", "--config", name, *small, "--output_dir", "run"])
    task = WORKFLOWS[name].TASK
    assert AgentTeam.from_pretrained("run").roles == tuple(task.roles)
    trace = read_trace("run/trace")
    acted = {
        turn: [role for role in task.roles if rows[f"completion/{role}"].notna().all()]
        for turn, rows in trace.groupby("turn")
    }
    expected = {
        "writer_editor": {1: ["writer"], 2: ["editor"]},
        "solver_critic": {1: ["solver"], 2: ["critic"], 3: ["solver"]},
        "debate_judge": {1: ["pro", "con"], 2: ["judge"]},
    }[name]
    assert acted == expected
    written = trace[[f"completion/{role}" for role in task.roles]].notna().sum().sum()
    assert written == sum(len(expected[turn]) for turn in trace["turn"])


def positive(completions, **columns):
    return [1.0 + reward for reward in count_reward(completions)]


def test_every_sampled_token_of_writer_and_editor_is_used(tmp_path):
    """Each draft is read by editors, and each answer, which only one agent gives, is a row of the update."""
    environment = FunctionEnvironment(writer_editor.PROMPTS, positive, order=[["writer"], ["editor"]])
    items, _ = writer_editor.load_datasets(None)
    settings = {"num_turns": 2, "num_generations": 3, "advantage_mode": "raw", "trace_steps": 1}
    trainer = tiny_trainer(tmp_path, tiny_team(environment.roles), environment, train_dataset=items, **settings)
    batches, make = [], trainer._make_batches
    trainer._make_batches = lambda *args: batches.extend(made := make(*args)) or made
    trainer.train()
    levels = trainer._levels
    sampled = Counter()
    for role, nodes in zip(environment.roles, levels, strict=True):
        assert all(list(node.samples) == [role] for node in nodes)
        sampled[role] = sum(len(ids) for node in nodes for ids in node.samples[role].completion_ids)
        assert sum(int(x.agents[role].completion_mask.sum()) for x in batches) == sampled[role]
    assert trainer.generated_tokens == sampled.total() > 0
    for draft in levels[0]:
        shown = [draft.children[g].prompts["editor"] for g in range(3)]
        assert all(text in prompt for text, prompt in zip(draft.samples["writer"].texts, shown, strict=True))
    trace = read_trace(tmp_path / "trace")
    assert len(trace) == 2 * 3 + 2 * 9
    assert (trace["completion/writer"].isna() != trace["completion/editor"].isna()).all()
    assert (trace["completion/writer"].isna() == trace["advantage/writer"].isna()).all()


class Decided(debate_judge.Debate):
    """A debate whose judge may write anything: the first byte is the verdict."""

    def decide(self, item, joint_action, history):
        if "judge" in joint_action:
            is_pro = sum(joint_action["judge"].encode()) % 2
            joint_action = {"judge": "pro" if is_pro else "con"}
        return super().decide(item, joint_action, history)


@pytest.mark.parametrize("form", FORMS)
def test_a_debate_trains_in_every_form_of_team(tmp_path, form):
    team, roles = team_of(form, Decided.roles), Decided.roles
    frozen = [] if team.has_shared_weights else ["con"]
    before = copy.deepcopy(team)
    settings = {"num_turns": 2, "max_steps": 2, "frozen_agents": frozen}
    items, _ = debate_judge.load_datasets(None)
    trainer = tiny_trainer(tmp_path, team, Decided(), train_dataset=items, **settings)
    trainer.train()
    (log,) = (x for x in trainer.state.log_history if x.get("step") == 1 and "reward" in x)
    assert log["agents/pro/return"] == -log["agents/con/return"]
    assert log["return"] == pytest.approx(log["agents/judge/return"] / 3)
    for node in trainer._levels[0]:
        assert node.role_returns["pro"] == [-x for x in node.role_returns["con"]]
        shares = [sum(child.role_rewards["pro"]) / 4 for child in node.children.values()]
        assert node.role_returns["pro"] == pytest.approx(shares)

    changed = {id(x) for x, y in zip(team.parameters(), before.parameters(), strict=True) if not torch.equal(x, y)}
    own = {role: {id(x) for x in team.agent_parameters(role)} for role in roles}
    assert changed <= set().union(*(own[role] for role in roles if role not in frozen))
    assert all(own[role] & changed for role in roles if role not in frozen)
