"""
Two debaters see three dice and argue for opposite sides, and a judge who does not see them decides.

    trl-multiagent train magrpo --config debate_judge

Each role has a reward of its own: the judge is paid for being right, and a debater for the verdict, whatever is right.
"""

import random
from itertools import product

from trl_multiagent import Environment, Outcome, Task
from trl_multiagent.models.imitation import ImitationModel


CLAIMS = {"pro": "the sum is 11 or more", "con": "the sum is 10 or less"}


class Debate(Environment):
    roles = ("pro", "con", "judge")
    order = (("pro", "con"), ("judge",))  # who acts at each turn; the plan of a run shows it

    def prompts(self, item, history):
        if not history:  # the debaters speak at the same time
            dice = " ".join(map(str, item["dice"]))
            return {role: f"The dice show {dice}. Name one to argue that {claim}:\n" for role, claim in CLAIMS.items()}
        if len(history) > 1:
            return {}
        shown = {role: self.shown(item, text) for role, text in history[0].joint_action.items()}
        sides = " ".join(f"{role} says that {claim} and names a {shown[role]}." for role, claim in CLAIMS.items())
        return {"judge": f"There are three dice. {sides} Who is right, pro or con?\n"}

    def shown(self, item, text):
        """Returns the number that a debater names, if there is a die that shows it."""
        return text.strip() if text.strip() in map(str, item["dice"]) else "?"

    def score(self, items, joint_actions, histories):
        return [self.decide(*branch) for branch in zip(items, joint_actions, histories, strict=True)]

    def decide(self, item, joint_action, history):
        if not history:
            honest = sum(self.shown(item, text) != "?" for text in joint_action.values()) / 2
            return Outcome(dict.fromkeys(self.roles, 0.0), {"true_dice": honest})
        verdict = joint_action["judge"].strip().lower()
        right = float(verdict == ("pro" if sum(item["dice"]) >= 11 else "con"))
        won = {"pro": 1.0, "con": -1.0}.get(verdict, 0.0)
        return Outcome({"pro": won, "con": -won, "judge": right}, {"passed": right, "pro_wins": float(won > 0)})


def make_environment(settings):
    return Debate()


def load_datasets(settings):
    from datasets import Dataset

    items = [{"dice": list(dice)} for dice in product(range(1, 7), repeat=3)]
    random.Random(0).shuffle(items)
    return Dataset.from_list(items[36:]), Dataset.from_list(items[:36])


# The base model of the run without a download: it has seen careless debaters and judges


def demonstrate(number, rng):
    """Draws pairs of a prompt and an answer. Debaters name any die, and judges often guess."""
    from trl_multiagent import Turn

    environment, pairs = Debate(), []
    for _ in range(number):
        item = {"dice": [rng.randint(1, 6) for _ in range(3)]}
        debate = environment.prompts(item, ())
        answers = {role: str(rng.choice(item["dice"])) for role in CLAIMS}
        judge = environment.prompts(item, [Turn(debate, answers, Outcome(0.0))])["judge"]
        total = rng.choice((2, 12)) if rng.random() < 0.4 else sum(map(int, answers.values()))
        role = rng.choice(("pro", "con", "judge", "judge"))
        pairs.append((judge, "pro" if total > 7 else "con") if role == "judge" else (debate[role], answers[role]))
    return pairs


DEMO = ImitationModel("debate-judge-demo", demonstrate, steps=600)
TASK = Task(make_environment, load_datasets, models={"demo": DEMO.path}, roles=Debate.roles)
