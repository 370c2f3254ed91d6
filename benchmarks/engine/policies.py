"""
Measures what trees and episodes themselves cost: processor time of a workflow and of an `Environment`, with agents
that answer at once. Beside them stands a whole training step of two agents in the shape of the demo's model, with
weights of their own or an adapter each, and with the default settings.

    python -m benchmarks.engine.policies [--beside CHECKOUT]

With another checkout of the package, its times stand beside. Both run in turn, in processes of their own, and the
smallest of several times counts.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


ROUNDS, RUNS = 3, 10
SETTINGS = {
    "tree of 4 turns": {"num_turns": 4, "num_generations": 3},
    "96 episodes of 6 turns": {"num_turns": 6, "num_generations": 1, "num_episodes": 16},
}


def measure(root, runs, model):
    """Returns the smallest time of each case in milliseconds. The agents of the steps are copies of a model."""
    sys.path.insert(0, root)
    from trl_multiagent import Environment, Outcome, workflow
    from trl_multiagent.rollout.tree import Samples, acting, grow_trees, judge_nodes

    roles = ("left", "right")

    def draw(*place):
        return hashlib.sha256("/".join(map(str, place)).encode()).hexdigest()

    def number(text):
        return int(draw(text)[:6], 16) % 7

    def sample(nodes, number):
        def texts(role, node):
            return [draw(role, node.tree, node.episode, node.path, g)[:4] for g in range(number)]

        return {
            role: [Samples([1], [[2]] * number, texts(role, node)) for node in acting(role, nodes)] for role in roles
        }

    @workflow(roles=roles)
    async def talk(item, agents):
        said = await agents.left(f"A {item['x']}")
        for k in range(5):
            said = await agents[roles[1 - k % 2]](f"{k} {said}")
        return float(number(said))

    class Talk(Environment):
        roles = ("left", "right")

        def prompts(self, item, history):
            return {role: f"{item['x']} {[turn.joint_action for turn in history[-1:]]}" for role in self.roles}

        def score(self, items, joint_actions, histories):
            return [Outcome(number(str(sorted(action.items()))), {"m": 1.0}) for action in joint_actions]

    times = {}
    for name, task in (("workflow", talk), ("environment", Talk())):
        for form, settings in SETTINGS.items():
            for _ in range(runs):
                start = time.process_time()
                grow_trees(
                    [{"x": k} for k in range(6)],
                    task,
                    sample,
                    lambda nodes, x=task: judge_nodes(x, nodes),
                    **settings,
                )
                spent = 1000 * (time.process_time() - start)
                times[f"{name}, {form}"] = min(spent, times.get(f"{name}, {form}", spent))

    # Not before: Python's garbage collection takes longer with what they make
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback

    from trl_multiagent import AgentTeam, MAGRPOConfig, MAGRPOTrainer

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.start = time.process_time()

        def on_step_end(self, args, state, control, **kwargs):
            spent = 1000 * (time.process_time() - self.start)
            times[form] = min(spent, times.get(form, spent))

    torch.set_num_threads(1)
    dataset = Dataset.from_list([{"x": f"{k} " + "What does the other agent need? " * 3} for k in range(64)])
    for form, adapter in (("step, full", None), ("step, LoRA", LoraConfig(r=8, target_modules="all-linear"))):
        with tempfile.TemporaryDirectory() as folder:
            args = MAGRPOConfig(
                folder,
                **{"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True},
                **{"items_per_device": 8, "num_generations": 4, "max_completion_length": 40},
                **{"max_steps": runs, "logging_steps": 1},
            )
            team = AgentTeam.from_pretrained(model, roles, adapter)
            trainer = MAGRPOTrainer(team, Talk(), args, dataset, callbacks=[Clock()])
            trainer.train()
            updates = [1000 * log["time/update"] for log in trainer.state.log_history if "time/update" in log]
            times[f"update of a {form}"] = min(updates)  # wall-clock time, of one thread
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--smoke", action="store_true", help="seconds: every case once")
    parser.add_argument("--beside", help="another checkout of this repository")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # a checkout, the number of runs, and a model
    parser.add_argument("--output", type=Path, default=Path("policies.json"), help="where the JSON goes")
    options = parser.parse_args()
    if options.measure:
        root, runs, model = options.measure
        print(json.dumps(measure(root, int(runs), model)))
        return
    from benchmarks.team_run import save_model

    roots = [str(Path(__file__).parents[2]), *([options.beside] if options.beside else ())]
    times = {root: {} for root in roots}
    runs, rounds = (1, 1) if options.smoke else (RUNS, ROUNDS)
    with tempfile.TemporaryDirectory() as model:
        save_model(Path(model), hidden_size=128, num_layers=2)
        for root in roots * rounds:
            command = [sys.executable, __file__, "--measure", root, str(runs), model]
            *_, line = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()
            for name, spent in json.loads(line).items():
                times[root][name] = min(spent, times[root].get(name, spent))
    for name, spent in times[roots[0]].items():
        other = times[roots[-1]][name]
        beside = f", there {other:.1f} ms: {spent / other:.2f}" if options.beside else ""
        print(f"{name}: {spent:.1f} ms{beside}")
    options.output.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
