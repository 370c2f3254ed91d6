"""The mode `expert_edits`: what the expert is asked, what its answers mean, and what each agent gets of them."""

import json
from pathlib import Path

import pytest

from trl_multiagent.code.sandbox import Check, Verdict
from trl_multiagent.environments.base import Outcome, Turn
from trl_multiagent.tasks.code_generation import CodeGenerationEnvironment
from trl_multiagent.tasks.code_generation.data import External
from trl_multiagent.tasks.code_generation.expert import MAX_EDITS, Expert, expert_question, parse_edits
from trl_multiagent.tasks.code_generation.reward import CodeResult, analyze

from endpoint_server import EndpointServer


ITEM = {
    "task_id": "Toy/0",
    "prompt": 'import math\n\ndef solve(xs):\n    """Solves it."""\n',
    "entry_point": "solve",
    "test": "def check(candidate):\n    assert candidate([421]) == 421\n",
}
AUX = "def aux(x):\n    return x\n"
MAIN = "def solve(xs):\n    return aux(xs)[0]\n"
ROLES = ("aux", "main")


def turn(aux=AUX, main=MAIN):
    action = {"main": main} if aux is None else {"aux": aux, "main": main}
    verdict = Verdict(Check("passed", ""), (Check("failed", "assert candidate([421]) == 421"),))
    result = CodeResult(analyze(ITEM["prompt"], "solve", aux, main), verdict)
    return Turn(dict.fromkeys(action, "first"), action, Outcome(1.0, info=result))


def make_environment(folder, roles=ROLES, **settings):
    external = External(mode="expert_edits", **settings)
    return CodeGenerationEnvironment(len(roles), "expert_edits", expert=Expert(external, roles, Path(folder)))


def at(server, **settings):
    return {"expert_model": "m", "expert_base_url": f"{server.url}/v1", "expert_tries": 1, **settings}


def plain(roles=ROLES):
    environment = CodeGenerationEnvironment(len(roles), "plain")
    return environment.prompts(ITEM, [turn(AUX if len(roles) == 2 else None)])


def test_the_expert_sees_problem_and_code_and_no_test():
    text = expert_question(ITEM, turn(), ROLES)
    assert ITEM["prompt"].strip() in text and AUX.strip() in text and MAIN.strip() in text
    assert '{"aux": "what to change in `aux`", "main": "what to change in `solve`"}' in text
    assert "421" not in text and "assert" not in text
    alone = expert_question(ITEM, turn(None), ("main",))
    assert "aux" not in alone.replace(MAIN.strip(), "")
    lost = expert_question(ITEM, turn(main="I do not know."), ROLES)
    assert "For `solve` there is no code, but this answer:\n\nI do not know." in lost


@pytest.mark.parametrize(
    ("text", "edits"),
    [
        ('Sure!\n```json\n{"aux": "a",\n "main": "m"}\n```\nDone {x}.', {"aux": "a", "main": "m"}),
        ('<think>{"aux": "no", "main": "no"}</think>{"aux": "a", "main": "m"}', {"aux": "a", "main": "m"}),
        ('<think>A draft: {"aux": "no", "main": "no"}', {}),
        ('{"edits": {"aux": "a", "main": "m"}}', {"aux": "a", "main": "m"}),
        ('{"aux": "a", "solve": "m"}', {"aux": "a", "main": "m"}),
        ('{"aux": 3, "main": true}', {}),
        ('{"aux": "a", "main": "cut o', {}),
        ("", {}),
        ('{"a":' * 3000, {}),
        (json.dumps({"aux": "x" * 9999}), {"aux": "x" * MAX_EDITS + "..."}),
    ],
)
def test_edits_are_read_from_any_answer(text, edits):
    assert parse_edits(text, ROLES, ITEM) == edits
    assert parse_edits(text, ("main",), ITEM) == {role: text for role, text in edits.items() if role == "main"}


def test_a_turn_is_asked_at_once_and_each_agent_gets_its_own_part(tmp_path):
    def answer(request, number):
        assert server.wait_for(6)
        text = request["messages"][0]["content"]
        k = text[text.index("number") + 6]
        return {"4": '{"main": "only main 4"}', "5": "nothing"}.get(k, json.dumps({"aux": f"a{k}", "main": f"m{k}"}))

    with EndpointServer(answer) as server:
        environment = make_environment(tmp_path, **at(server))
        turns = [turn(f"def aux(x):\n    return number{k}\n") for k in range(6)]
        histories = [[x] for x in turns] + [[]]
        prompts = environment.next_prompts([ITEM] * 7, histories)
        metrics = environment.metrics()
        assert environment.next_prompts([ITEM] * 7, histories) == prompts and len(server.requests) == 6
    for k in range(4):
        assert f"a{k}\n" in prompts[k]["aux"] and f"m{k}" not in prompts[k]["aux"]
        assert f"m{k}\n" in prompts[k]["main"] and f"a{k}\n" not in prompts[k]["main"]
    assert prompts[4]["aux"] == plain()["aux"] and "only main 4" in prompts[4]["main"]
    assert prompts[5] == plain() and prompts[6] == environment.prompts(ITEM, [])
    expected = {"requests": 6, "failures": 0, "cached": 0, "missing_parts": 3, "input_tokens": 60, "output_tokens": 30}
    assert {name: metrics[f"expert/{name}"] for name in expected} == expected
    again = environment.metrics()
    assert (again["expert/requests"], again["expert/cached"], again["expert/input_tokens"]) == (0, 6, 0)


def test_the_temperature_is_the_peers_except_for_claude():
    assert External().expert_endpoint().temperature == 0.3
    claude = External(mode="edits", expert_model="claude-x").expert_endpoint()  # CoMLRL's other name of the mode
    assert claude.temperature is None and claude.base_url == "https://api.anthropic.com/v1"
    assert External(expert_model="claude-x", expert_temperature=0.7).expert_endpoint().temperature == 0.7
