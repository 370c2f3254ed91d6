import random

from trl_multiagent.configs.recipes.demo import model as demo
from trl_multiagent.configs.recipes.demo.model import write_aux, write_main
from trl_multiagent.configs.recipes.demo.problems import demo_dataset, demo_prompts, problem_of
from trl_multiagent.models.imitation import ImitationModel


ITEM = demo_dataset("train")[0]
PROBLEM = problem_of(ITEM)


def drawn(monkeypatch, aux, main, change=0.0):
    """The revisions of first answers with these conventions and faults."""
    styles = iter([aux, main])
    monkeypatch.setattr(demo, "draw_style", lambda role, rng: next(styles))
    monkeypatch.setattr(demo, "CHANGE_OF_CONVENTION", change)
    monkeypatch.setattr(demo, "REMAINING_FAULT", 0.0)
    return dict(zip(("aux", "main"), demo.make_revisions([ITEM], random.Random(0)), strict=True))


def test_the_prompt_has_first_answer_and_feedback(monkeypatch):
    revision = drawn(monkeypatch, ("A", "syntax"), ("A", ""))
    prompt, answer = revision["aux"]
    first = write_aux(PROBLEM, "A", "syntax")
    assert prompt.startswith(f"{demo_prompts(ITEM)['aux']}{first}\n\nResult of your last answer:\n")
    assert "- Syntax: ERROR" in prompt
    assert prompt.endswith("Revise your function `aux`. Answer with the Python code of the function alone.\n")
    assert answer == write_aux(PROBLEM, "A")
    assert "- Tests: not run" in revision["main"][0]


def test_a_program_that_passes_is_kept(monkeypatch):
    revision = drawn(monkeypatch, ("B", ""), ("B", ""), change=1.0)
    assert "- Tests: 1/1 passed" in revision["main"][0]
    assert revision["aux"][1] == write_aux(PROBLEM, "B")
    assert revision["main"][1] == write_main(PROBLEM, "B")


def test_agents_that_disagree_change_their_convention_or_keep_it(monkeypatch):
    revision = drawn(monkeypatch, ("A", ""), ("B", ""), change=1.0)
    assert "the assertion is false" in revision["aux"][0]
    assert (revision["aux"][1], revision["main"][1]) == (write_aux(PROBLEM, "B"), write_main(PROBLEM, "A"))
    revision = drawn(monkeypatch, ("A", ""), ("B", ""), change=0.0)
    assert (revision["aux"][1], revision["main"][1]) == (write_aux(PROBLEM, "A"), write_main(PROBLEM, "B"))


def test_both_models_have_their_place_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_MULTIAGENT_CACHE", str(tmp_path))
    asked = []

    def build(self, folder, progress):
        folder.mkdir()
        asked.append(self.steps)

    monkeypatch.setattr(ImitationModel, "build", build)
    folders = {demo.demo_model(num_turns=turns) for turns in (1, 2, 1, 2)}
    assert len(folders) == 2 and asked == [600, 1000]
