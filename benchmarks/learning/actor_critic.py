"""
For whom a critic is worth it: MAGRPO, MAREINFORCE, IAC and MAAC at the same number of env steps.

    python -m benchmarks.learning.actor_critic  # the two-turn task: about 15 minutes of one core
    python -m benchmarks.learning.actor_critic --part demo --methods iac --seeds 42  # one run of the demo: 3 minutes
    python -m benchmarks.learning.actor_critic --tune  # the choice of the learning rates below
    python -m benchmarks.learning.actor_critic --smoke  # seconds: whether it runs; its numbers mean nothing

Each run is a file in `--runs`, and a run whose file is there is not repeated: the command can be interrupted, and
continued with other methods or seeds. The table is made of all files that fit.

Part `two_turns`, a task with delayed reward made for this comparison ([`TwoTurns`]), in two variants.
With `spread` 0 the reward is the score, from 0 to 1. With `spread` 1 it also contains a part that depends on the item
alone, from 0 to 3. The curve is the mean score of the sampled joint actions of the second turn, and what is compared
is the number of env steps until its mean over five updates reaches a level. The intervals are 95 % t-intervals over
seeds.

Equal for all methods: the random model of a seed, the items in their order, 60 env steps per update, the number of env
steps, sampling, Adam and its constant learning rate, the clipping of gradients. The learning rate of each method was
chosen among [`RATES`] by the mean score of a run with another seed than those that are reported. A critic has five
times that of its agents.
- MAREINFORCE, IAC and MAAC sample one answer per prompt: 30 items an update, two env steps each. MAREINFORCE then has
  no baseline.
- MAGRPO samples trees of two siblings: 10 items an update, with two env steps at the first turn and four at the
  second.
- IAC and MAAC run with `gae_lambda` 1 and without standardized advantages, and, as `iac, defaults` and `maac,
  defaults`, with the defaults of these two settings. Every other setting of a method is its default.

Part `demo`: the demo's configurations, with rewards of kind `paper`, 80 updates of 64 env steps. MAREINFORCE, IAC and
MAAC answer each of 64 problems once, MAGRPO each of 16 problems four times. The result is the mean joint reward of
four sampled answers to each of the 96 held-out problems, see `preference.py`.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import statistics
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from benchmarks.comlrl.task import ARGUMENTS
from benchmarks.learning.preference import CONFIGS, QUIET, SMOKE, held_out_reward
from benchmarks.team_run import Clock, machine, save_model
from trl_multiagent import (
    AgentTeam,
    Environment,
    IACConfig,
    IACTrainer,
    MAACConfig,
    MAACTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
    MAREINFORCEConfig,
    MAREINFORCETrainer,
    Outcome,
)
from trl_multiagent.configs.recipes.demo.model import demo_model
from trl_multiagent.runs.run import run_recipe
from trl_multiagent.trainers.base.actor_critic_config import ActorCriticConfig


@dataclasses.dataclass
class Method:
    """
    Args:
        trainer, config: Its classes.
        items, num_generations: Items of an update, and answers to each prompt.
        rates: The learning rate for each spread.
        settings: Other settings that differ from the defaults.
    """

    trainer: type
    config: type
    items: int
    num_generations: int
    rates: dict[float, float]
    settings: dict = dataclasses.field(default_factory=dict)


RATES = (5e-4, 1e-3, 2e-3, 4e-3)
# A critic stands for the whole future, its advantages are not standardized, and it learns faster than its agents
CRITIC = {"gae_lambda": 1.0, "advantage_normalization": False}
METHODS = {
    "magrpo": Method(MAGRPOTrainer, MAGRPOConfig, 10, 2, {0: 1e-3, 1: 1e-3}),
    "mareinforce": Method(MAREINFORCETrainer, MAREINFORCEConfig, 30, 1, {0: 1e-3, 1: 2e-3}),
    "iac": Method(IACTrainer, IACConfig, 30, 1, {0: 1e-3, 1: 1e-3}, CRITIC),
    "maac": Method(MAACTrainer, MAACConfig, 30, 1, {0: 1e-3, 1: 1e-3}, CRITIC),
    "iac, defaults": Method(IACTrainer, IACConfig, 30, 1, {0: 1e-3, 1: 1e-3}),
    "maac, defaults": Method(MAACTrainer, MAACConfig, 30, 1, {0: 1e-3, 1: 1e-3}),
}
CRITIC_RATE = 5  # learning rate of a critic, as a multiple of that of the agents
DEMO_METHODS = {
    "magrpo": "magrpo",
    "mareinforce": "magrpo",
    "iac": "iac",
    "maac": "maac",
}  # and whose configuration each uses
SPREADS = (0, 1)
LEVELS = (0.3, 0.5, 0.7)
UPDATES = 120
ENV_STEPS = 60  # of an update
WINDOW = 5  # updates over which a curve is smoothed
SEEDS = {"two_turns": (0, 1, 2, 3, 4), "demo": (42, 43, 44)}
TUNING_SEED = 100
DEMO_TARGET = 3.3
T_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of 97.5 %, by the number of seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--part", choices=tuple(SEEDS), default="two_turns", help="what to run (default: two_turns)")
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), help="methods (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, help="seeds (default: 0 to 4, in the demo 42 to 44)")
    parser.add_argument(
        "--spreads", nargs="+", type=int, choices=SPREADS, default=SPREADS, help="variants of the task"
    )
    parser.add_argument("--tune", action="store_true", help="compare learning rates on the two-turn task")
    parser.add_argument("--smoke", action="store_true", help="seconds: two updates of each method")
    parser.add_argument("--runs", type=Path, default=Path("actor_critic_runs"), help="folder of the runs' files")
    parser.add_argument("--output", type=Path, default=Path("actor_critic.json"), help="where the JSON goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.smoke:
            options.runs, options.seeds, options.spreads = Path(scratch), [0], SPREADS[1:]
        options.runs.mkdir(parents=True, exist_ok=True)
        results = {"machine": machine()}
        for part, methods in (
            {"two_turns": ["magrpo", "maac"], "demo": ["mareinforce"]}
            if options.smoke
            else {options.part: options.methods}
        ).items():
            known = DEMO_METHODS if part == "demo" else METHODS
            methods = [name for name in methods or known if name in known]
            if part == "demo":
                results["demo"] = run_demo(options, methods)
                print_demo(results["demo"])
            elif options.tune:
                results["rates"] = tune(options, methods)
                print_rates(results["rates"])
            else:
                results["two_turns"] = run_two_turns(options, methods)
                results["summary"] = [summary(results["two_turns"], spread, methods) for spread in options.spreads]
                for each in results["summary"]:
                    print_curves(each)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nAll numbers: {options.output}")


def remembered(folder: Path, key: dict, run) -> dict:
    """The record of a run, from its file or by running it."""
    name = " ".join(f"{x:g}" if isinstance(x, int | float) else x for x in key.values() if not isinstance(x, dict))
    path = folder / f"{name}.json"
    if path.is_file() and (record := json.loads(path.read_text()))["key"] == key:
        return record
    clock = Clock()
    record = {"key": key, **run(), **clock.facts()}
    path.write_text(json.dumps(record) + "\n")
    print(f"{name}: {record['result']:.3f}, {record['cpu_seconds']:.0f} s of processor time", flush=True)
    return record


# The two-turn task


def run_two_turns(options: argparse.Namespace, methods: list[str]) -> list[dict]:
    updates = 2 if options.smoke else UPDATES
    return [
        two_turn_run(options.runs, name, spread, seed, METHODS[name].rates[spread], updates)
        for seed in options.seeds or SEEDS["two_turns"]
        for spread in options.spreads
        for name in methods
    ]


def tune(options: argparse.Namespace, methods: list[str]) -> list[dict]:
    return [
        two_turn_run(options.runs, name, spread, TUNING_SEED, rate, UPDATES)
        for spread in options.spreads
        for name in methods
        for rate in RATES
    ]


def two_turn_run(folder: Path, name: str, spread: int, seed: int, rate: float, updates: int) -> dict:
    method = METHODS[name]
    key = {"method": name, "spread": spread, "seed": seed, "rate": rate, "updates": updates}
    if method.settings:
        key |= {"settings": method.settings, "critic_rate": CRITIC_RATE}
    return remembered(folder, key, lambda: train_on_two_turns(method, spread, seed, rate, updates))


def train_on_two_turns(method: Method, spread: int, seed: int, rate: float, updates: int) -> dict:
    """
    Trains once, and returns the score of every update's joint actions of the second turn, and the mean of the last
    ones.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        save_two_turn_model(Path(folder) / "model", seed)
        args = method.config(
            output_dir=folder,
            seed=seed,
            num_turns=2,
            items_per_device=method.items,
            num_generations=method.num_generations,
            per_device_train_batch_size=ENV_STEPS,
            max_completion_length=1,
            max_steps=updates,
            learning_rate=rate,
            disable_tqdm=True,
            **ARGUMENTS,
            **method.settings,
        )
        if issubclass(method.config, ActorCriticConfig):
            args.critic_learning_rate = CRITIC_RATE * rate
        set_seed(seed)
        trainer = method.trainer(
            AgentTeam.from_pretrained(f"{folder}/model", roles=ROLES),
            TwoTurns(spread),
            args,
            two_turn_items(30 * updates, seed),
        )
        trainer.train()
    if trainer.env_step != ENV_STEPS * updates:
        raise RuntimeError(f"The run took {trainer.env_step} env steps, not {ENV_STEPS * updates}.")
    scores = [logs["turn_2/score"] for logs in trainer.state.log_history if "turn_2/score" in logs]
    return {"result": statistics.fmean(scores[-10:]), "scores": scores}


def steps_to(scores: list[float], level: float) -> int | None:
    """Env steps until the mean of the last [`WINDOW`] updates is at least `level`."""
    for end in range(WINDOW, len(scores) + 1):
        if statistics.fmean(scores[end - WINDOW : end]) >= level:
            return ENV_STEPS * end
    return None


def interval(numbers: list[float]) -> list[float] | None:
    """Mean and half the width of its 95 % interval over seeds."""
    if not 2 <= len(numbers) <= max(T_QUANTILES):
        return None
    width = T_QUANTILES[len(numbers)] * statistics.stdev(numbers) / math.sqrt(len(numbers))
    return [statistics.fmean(numbers), width]


def summary(runs: list[dict], spread: int, methods: list[str], points: int = 6) -> dict:
    """The curves and the env steps to each level, per method."""
    result = {"spread": spread, "methods": {}}
    for name in methods:
        own = [run for run in runs if (run["key"]["method"], run["key"]["spread"]) == (name, spread)]
        curves = [run["scores"] for run in own]
        updates = len(curves[0])
        ends = [round(updates * k / points) for k in range(1, points + 1)]
        result["env_steps"] = [ENV_STEPS * end for end in ends]
        parts = [(start, end) for start, end in zip([0, *ends], ends, strict=False) if end > start]
        result["methods"][name] = {
            "rate": own[0]["key"]["rate"],
            "curve": [statistics.fmean(x for scores in curves for x in scores[start:end]) for start, end in parts],
            "final": [run["result"] for run in own],
            "interval": interval([run["result"] for run in own]),
            "steps_to": {str(level): [steps_to(scores, level) for scores in curves] for level in LEVELS},
            "cpu_seconds": statistics.fmean(run["cpu_seconds"] for run in own),
        }
    return result


def print_curves(result: dict) -> None:
    print(f"\nTwo-turn task, spread {result['spread']}: mean score until that many env steps")
    levels = "".join(f"{f'{level:g} after':>16}" for level in LEVELS)
    print(
        f"{'':16}{'rate':>7}" + "".join(f"{steps:>7}" for steps in result["env_steps"]) + f"{'at the end':>15}{levels}"
    )
    for name, method in result["methods"].items():
        curve = "".join(f"{value:7.2f}" for value in method["curve"]).rjust(7 * len(result["env_steps"]))
        final = f"{statistics.fmean(method['final']):.2f}"
        if method["interval"] is not None:
            final += f" +- {method['interval'][1]:.2f}"
        cells = "".join(f"{steps_in_words(steps):>16}" for steps in method["steps_to"].values())
        print(f"{name:16}{method['rate']:>7g}{curve}{final:>15}{cells}")


def steps_in_words(steps: list[int | None]) -> str:
    """The mean with its interval, or how many seeds reached the level."""
    reached = [x for x in steps if x is not None]
    if len(reached) < len(steps):
        return f"{len(reached)} of {len(steps)} seeds"
    found = interval(reached)
    return f"{statistics.fmean(reached):.0f}" if found is None else f"{found[0]:.0f} +- {found[1]:.0f}"


def print_rates(runs: list[dict]) -> None:
    print(f"\nSeed {TUNING_SEED}: mean score of the whole run and of its last ten updates, by learning rate")
    for spread in sorted({run["key"]["spread"] for run in runs}):
        for name in METHODS:
            own = [run for run in runs if (run["key"]["method"], run["key"]["spread"]) == (name, spread)]
            cells = [
                f"{run['key']['rate']:g}: {statistics.fmean(run['scores']):.3f} {run['result']:.2f}" for run in own
            ]
            if own:
                print(f"spread {spread}, {name:16}" + "".join(f"{cell:>22}" for cell in cells))


# The demo


def run_demo(options: argparse.Namespace, methods: list[str]) -> list[dict]:
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            save_model(Path(folder), hidden_size=64, num_layers=1)
        model = folder if options.smoke else demo_model()
        for seed in options.seeds or SEEDS["demo"]:
            for name in methods:
                key = {"method": name, "part": "demo", "seed": seed}
                runs.append(
                    remembered(options.runs, key, lambda: train_on_demo(name, seed, model, options.smoke))  # noqa: B023
                )
    return runs


def train_on_demo(name: str, seed: int, model: str, smoke: bool) -> dict:
    """Trains once, and returns the reward on the held-out problems."""
    section = DEMO_METHODS[name]
    with tempfile.TemporaryDirectory() as folder:
        config = (CONFIGS / f"{section}_demo.yaml").read_text()
        path = Path(folder) / "config.yaml"
        path.write_text(config.replace(f"\n{section}:\n", f"\n{name}:\n"))
        changes = [f"agent_model.name={model}", f"seed={seed}", "reward.kind=paper", "dataset.eval_split=null"]
        changes += [f"{name}.output_dir={folder}/team", f"{name}.disable_tqdm=true", f"{name}.logging_steps=1000"]
        if name == "mareinforce":
            changes += ["mareinforce.items_per_device=64", "mareinforce.num_generations=1"]
        if smoke:
            changes += [f"{name}.max_steps=2", f"{name}.max_completion_length=8", f"{name}.items_per_device=4"]
        task = SMOKE if smoke else QUIET
        clock = Clock()
        with contextlib.redirect_stdout(io.StringIO()):
            run_recipe(name, task, ["--config", str(path), "--override", *changes], "benchmark")
        training = clock.facts()
        reward = held_out_reward(task, f"{folder}/team", None, 2 if smoke else None)
    return {"result": reward, "training": training}


def print_demo(runs: list[dict]) -> None:
    print(f"\n{'demo, 5120 env steps':24}{'held-out reward':>18}{'seeds':>7}{'training, wall s':>18}{'cpu s':>8}")
    for name in DEMO_METHODS:
        own = [run for run in runs if run["key"]["method"] == name]
        if own:
            rewards = [run["result"] for run in own]
            found = interval(rewards)
            cell = f"{rewards[0]:.2f}" if found is None else f"{found[0]:.2f} +- {found[1]:.2f}"
            times = [statistics.fmean(run["training"][key] for run in own) for key in ("seconds", "cpu_seconds")]
            print(f"{name:24}{cell:>18}{len(own):>7}{times[0]:>18.0f}{times[1]:>8.0f}")
    print(f"aim of iac and maac, mean of three seeds: {DEMO_TARGET}", flush=True)


# The two-turn task


ROLES = ("aux", "main")
LETTERS = "abcd"
WORTH = (0.25, 0.5, 1.0)
SHARE = (0.25, 0.5, 1.0)
WORDS = (*LETTERS, "see", "now", ":", "[", "]", *ROLES, "answers")


class TwoTurns(Environment):
    """
    Two turns with a delayed reward, where the first turn decides what the second can earn.

    At both turns every agent sees one of [`LETTERS`] and answers with one token. The right answer is a letter, too: it
    depends on the agent and on the letter that it sees, and nobody tells the agent which one it is.

    - At the first turn both agents see the item's first letter. There is no reward. [`WORTH`][k] is what the second
      turn is worth, where k is the number of agents who are right. The agents do not learn k.
    - At the second turn both see the item's second letter, after their own first prompt and answer. The score is the
      worth times [`SHARE`][m], where m is the number of agents who are right now. It is 1 if all four answers are
      right, and 0.08 for random ones.
    - The reward, which is given at the second turn only, is the score plus the `spread` times the position of the
      first letter in the alphabet (0 to 3). As in most data sets, some items then earn more than others whatever the
      agents do.
    """

    roles = ROLES

    def __init__(self, spread: float):
        self.spread = spread

    def prompts(self, item, history):
        return dict.fromkeys(ROLES, f"now {item['second']} :" if history else f"see {item['first']} :")

    def score(self, items, joint_actions, histories):
        return [self.outcome(*each) for each in zip(items, joint_actions, histories, strict=True)]

    def outcome(self, item: dict, joint_action: dict[str, str], history: list) -> Outcome:
        if not history:
            return Outcome(0.0)
        worth = WORTH[number_right(history[0].joint_action, item["first"])]
        score = worth * SHARE[number_right(joint_action, item["second"])]
        return Outcome(self.spread * LETTERS.index(item["first"]) + score, {"score": score})


def number_right(joint_action: dict[str, str], seen: str) -> int:
    """
    How many agents are right: the first one says the letter after the one that it sees, the second one the letter
    after that.
    """
    position = LETTERS.index(seen)
    right = {role: LETTERS[(position + k) % len(LETTERS)] for k, role in enumerate(ROLES, start=1)}
    return sum(joint_action[role].strip() == right[role] for role in ROLES)


def two_turn_items(number: int, seed: int) -> Dataset:
    """Items with random letters."""
    letters = torch.randint(len(LETTERS), (number, 2), generator=torch.Generator().manual_seed(seed))
    return Dataset.from_list([{"first": LETTERS[a], "second": LETTERS[b]} for a, b in letters.tolist()])


def save_two_turn_model(folder: Path, seed: int) -> None:
    """
    Writes a random Llama of about 50,000 parameters and its tokenizer, whose 16 tokens are the letters and the words
    of the prompts.
    """
    vocabulary = {word: k for k, word in enumerate((*WORDS, "<unk>", "<eos>", "<pad>"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.1,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
