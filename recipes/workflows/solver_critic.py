"""
A solver answers, a critic confirms the answer or writes another one, and if it does not confirm, the solver answers
again.

    trl-multiagent train magrpo --config solver_critic

The environment ends the episode if the critic confirms. Both are rewarded for the final answer, the critic also for a
verdict that is right.
"""

from trl_multiagent import Environment, Outcome, Task, Turn
from trl_multiagent.models.imitation import ImitationModel


NUMBERS = range(6)


class SolverCritic(Environment):
    roles = ("solver", "critic")

    def prompts(self, item, history):
        question = f"{item['a']} + {item['b']} ="
        if not history:
            return {"solver": f"{question} ? Answer with a number only:\n"}
        answer = self.final_answer(history)
        if len(history) == 1:
            return {"critic": f"{question} {answer} ? Repeat the number if it is right, else write the right one:\n"}
        verdict = history[1].joint_action["critic"].strip()
        if len(history) == 2 and verdict != answer:
            return {"solver": f"A critic says {verdict}. Answer again:\n"}
        return {}  # the episode ends

    def final_answer(self, history):
        """Returns the solver's last answer so far."""
        return next(x.joint_action["solver"].strip() for x in reversed(history) if "solver" in x.joint_action)

    def score(self, items, joint_actions, histories):
        return [self.judge(*branch) for branch in zip(items, joint_actions, histories, strict=True)]

    def judge(self, item, joint_action, history):
        """Pays both for the final answer, at the end of the episode, and the critic for its own number."""
        turns = [*history, Turn({}, joint_action, Outcome(0.0))]
        total, answer = str(item["a"] + item["b"]), self.final_answer(turns)
        final = float(answer == total) if self.prompts(item, turns) == {} else 0.0
        metrics = {"passed": float(answer == total)}
        verdict = joint_action.get("critic", "").strip()
        if len(turns) == 2:
            metrics |= {"verdict_is_right": float(verdict == total), "confirmed": float(verdict == answer)}
        return Outcome({"solver": final, "critic": final + 0.5 * (verdict == total)}, metrics)


def make_environment(settings):
    return SolverCritic()


def load_datasets(settings):
    from datasets import Dataset

    # All sums are for both: the small model of the run learns them as a table, in which a sum that it has not seen is
    # missing
    items = Dataset.from_list([{"a": a, "b": b} for a in NUMBERS for b in NUMBERS])
    return items, items


# The base model of the run without a download: it has seen careless solvers and critics


def demonstrate(number, rng):
    """Draws pairs of a prompt and an answer. Three sums of ten are wrong."""
    environment, pairs = SolverCritic(), []
    for _ in range(number):
        item = {"a": rng.choice(NUMBERS), "b": rng.choice(NUMBERS)}
        total = item["a"] + item["b"]
        first, verdict, second = (str(total + (rng.random() < 0.3) * rng.choice((-1, 1))) for _ in range(3))
        history, text = [], ""
        for role, answer in (("solver", first), ("critic", verdict), ("solver", second)):
            prompt = environment.prompts(item, history).get(role)
            if prompt is None:
                break
            history.append(Turn({}, {role: answer}, Outcome(0.0)))
            pairs.append((text + prompt if role == "solver" else prompt, answer))
            text = text or f"{prompt}{answer}\n\n"  # a solver sees its first turn
    rng.shuffle(pairs)
    return pairs[:number]


DEMO = ImitationModel("solver-critic-demo", demonstrate, steps=700)
TASK = Task(make_environment, load_datasets, models={"demo": DEMO.path}, roles=SolverCritic.roles)
