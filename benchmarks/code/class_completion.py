"""
What the sandbox and the rewards of class completion make of ClassEval: how many classes and test methods can be used,
what the references earn in teams of one to three agents and under both divisions, and what constants earn. Every agent
writes the whole class, so `compat` is 1 less for teams: all methods overlap.

    python -m benchmarks.code.class_completion            # all 100 classes, some minutes
    python -m benchmarks.code.class_completion --smoke    # one of them
"""

import argparse
import json
import resource
from pathlib import Path
from statistics import mean

from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.tasks.class_completion import ClassCompletionEnvironment, load_class_dataset
from trl_multiagent.tasks.class_completion.environment import DIVISIONS


CONSTANTS = ("None", "True", "0", "''", "[]")  # that every method returns


def constant(item: dict, value: str) -> str:
    return "".join(f"def {name}(*args, **kwargs):\n    return {value}\n" for name in item["methods"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="test", help="classes to use")
    parser.add_argument("--smoke", action="store_true", help="run for seconds")
    parser.add_argument("--output", type=Path, default=Path("class_completion.json"))
    args = parser.parse_args()
    rows = []

    def report(name, values):
        rows.append({"name": name, **values})
        print(f"{name:36s}" + "  ".join(f"{key} {value:.4g}" for key, value in values.items()))

    with Sandbox() as sandbox:
        items = load_class_dataset("classeval", "test[2:3]" if args.smoke else args.split, sandbox).to_list()
        tests = {name: sum(len(item[name]) for item in items) for name in ("tests", "counting")}
        report("usable", {"classes": len(items), "methods": sum(len(item["methods"]) for item in items), **tests})
        answers = {"reference": lambda item: item["reference"]}
        answers |= {value: lambda item, value=value: constant(item, value) for value in CONSTANTS}
        teams = [(1, DIVISIONS[0]), *((n, division) for n in (2, 3) for division in DIVISIONS)]
        for answer, (num_agents, division) in [
            *(("reference", team) for team in teams),
            *((x, teams[0]) for x in CONSTANTS),
        ]:
            environment = ClassCompletionEnvironment(num_agents, division, sandbox=sandbox)
            actions = [dict.fromkeys(environment.roles, answers[answer](item)) for item in items]
            metrics = [outcome.metrics for outcome in environment.score(items, actions, [()] * len(items))]
            shown = ("passed", "tests_passed", "earned_reward", "compat_reward")
            report(
                f"{answer}, {num_agents} agents, {division}", {name: mean(m[name] for m in metrics) for name in shown}
            )
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    report("processor time", {"seconds": usage.ru_utime + usage.ru_stime})
    args.output.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
