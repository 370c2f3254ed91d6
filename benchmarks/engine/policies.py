"""
Measures what trees and episodes themselves cost: processor time of a workflow and of an `Environment`, with agents
that answer at once.

    python -m benchmarks.engine.policies [--beside CHECKOUT]

With another checkout of the package, its times stand beside. Both run in turn, in processes of their own, and the
smallest of several times counts.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path


ROUNDS, RUNS = 3, 10
SETTINGS = {
    "tree of 4 turns": {"num_turns": 4, "num_generations": 3},
    "96 episodes of 6 turns": {"num_turns": 6, "num_generations": 1, "num_episodes": 16},
}


def measure(root, runs):
    """Returns the smallest processor time of each case in milliseconds."""
    sys.path.insert(0, root)
    from trl_multiagent import Environment, Outcome, workflow
    from trl_multiagent.rollout.tree import Samples, acting, grow_trees, judge_nodes

    def draw(*place):
        return hashlib.sha256("/".join(map(str, place)).encode()).hexdigest()

    def number(text):
        return int(draw(text)[:6], 16) % 7

    def sample(nodes, number):
        def texts(role, node):
            return [draw(role, node.tree, node.episode, node.path, g)[:4] for g in range(number)]

        return {
            role: [Samples([1], [[2]] * number, texts(role, node)) for node in acting(role, nodes)]
            for role in ("a", "b")
        }

    @workflow(roles=("a", "b"))
    async def talk(item, agents):
        said = await agents.a(f"A {item['x']}")
        for k in range(5):
            said = await agents["ba"[k % 2]](f"{k} {said}")
        return float(number(said))

    class Talk(Environment):
        roles = ("a", "b")

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
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--smoke", action="store_true", help="a second: every case once")
    parser.add_argument("--beside", help="another checkout of this repository")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)  # a checkout and the number of runs
    parser.add_argument("--output", type=Path, default=Path("policies.json"), help="where the JSON goes")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], int(options.measure[1]))))
        return
    roots = [str(Path(__file__).parents[2]), *([options.beside] if options.beside else ())]
    times = {root: {} for root in roots}
    for _ in range(1 if options.smoke else ROUNDS):
        for root in roots:
            command = [sys.executable, __file__, "--measure", root, "1" if options.smoke else str(RUNS)]
            for name, spent in json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout).items():
                times[root][name] = min(spent, times[root].get(name, spent))
    for name, spent in times[roots[0]].items():
        other = times[roots[-1]][name]
        beside = f", there {other:.1f} ms: {spent / other:.2f}" if options.beside else ""
        print(f"{name}: {spent:.1f} ms{beside}")
    options.output.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
