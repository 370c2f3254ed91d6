"""The model card of a team: who is in it, how it was trained, what came of it, and how to load it."""

import os
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import fmean

from huggingface_hub import ModelCard, ModelCardData
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from trl.trainer.utils import get_config_model_id

import trl_multiagent
from trl_multiagent.environments.base import Environment
from trl_multiagent.team.agent_team import AgentTeam


CURVE_FILE = "reward_curve.png"
RECIPE_FILE = "config.yaml"
TEMPLATE = Path(__file__).parent / "templates" / "team_card.md"
TAGS = ["trl", "trl-multiagent", "multi-agent"]
PACKAGES = {"TRL": "trl", "Transformers": "transformers", "Pytorch": "torch"}
PACKAGES |= {"Datasets": "datasets", "Tokenizers": "tokenizers", "PEFT": "peft"}
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
WINDOW = 10  # at most so many log entries of training in one mean


@dataclass
class TrainingSummary:
    """
    What a card says about the training.

    Args:
        algorithm (`str`): Name of the algorithm.
        paper (`dict[str, str]`): `title`, `id` on arXiv and BibTeX `citation` of its paper, or empty.
        environment (`str`, *optional*): The environment, see [`environment_name`].
        settings (`dict[str, str | int | float]`): The settings to show.
        has_recipe (`bool`): Whether the folder has the settings of a recipe.
        best_metric (`str`, *optional*): Name of the metric whose best checkpoint was loaded at the end.
        log_history (`list[dict]`): The trainer's logs, `trainer.state.log_history`.
        changes (`list[dict]`): What was changed when the training was resumed: `step`, and `changes` with `before` and `after`.
        links (`dict[str, str | None]`): Addresses of the run at `wandb`, `trackio` and `comet`.
    """

    algorithm: str
    paper: dict[str, str]
    environment: str | None
    settings: dict[str, str | int | float]
    has_recipe: bool
    best_metric: str | None
    log_history: list[dict]
    changes: list[dict]
    links: dict[str, str | None]


def team_card(
    team: AgentTeam,
    repo_id: str,
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: list[str] | None = None,
    training: TrainingSummary | None = None,
) -> ModelCard:
    """
    The card of a team.

    Args:
        team ([`AgentTeam`]):
            The team.
        repo_id (`str`):
            Where it can be loaded from.
        model_name (`str`, *optional*):
            Name of the team; by default that of the repository.
        dataset_name (`str`, *optional*):
            Id on the Hub of the dataset that it was trained on.
        tags (`list[str]`, *optional*):
            Tags besides those that every team has.
        training (`TrainingSummary`, *optional*):
            How it was trained; without it the card only says what the team is.

    Returns:
        [`~huggingface_hub.ModelCard`]
    """
    agents = [
        {"role": role, "base_model": hub_id(get_config_model_id(agent.config)), "folder": team.folder(role)}
        for role, agent in team.agents.items()
    ]
    base_models = [agent["base_model"] for agent in agents if agent["base_model"] is not None]
    model_name = model_name or repo_id.split("/")[-1]
    card_data = ModelCardData(
        base_model=list(dict.fromkeys(base_models)) or None,
        datasets=dataset_name,
        library_name="trl-multiagent",
        model_name=model_name,
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys([*TAGS, *(tags or []), *(["generated_from_trainer"] if training else [])])),
    )
    versions = {name: metadata.version(package) for name, package in PACKAGES.items()}
    one = "One language model"
    several = (
        f"A team of {len(agents)} language models that answer one task together, each with a completion of its own"
    )
    return ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        model_name=model_name,
        repo_id=repo_id,
        dataset_name=dataset_name,
        summary=one if len(agents) == 1 else several,
        agents=agents,
        adapters=team.has_adapters,
        training=training,
        results=summarize(training.log_history) if training else None,
        curve_file=CURVE_FILE,
        recipe_file=RECIPE_FILE,
        versions={"trl_multiagent": trl_multiagent.__version__, **versions},
    )


def hub_id(name: str) -> str | None:
    """A model's name if it is an id on the Hub; `None` for a folder, and for a model that was never loaded."""
    return name if HUB_ID.fullmatch(name) and not os.path.exists(name) else None


def environment_name(environment: Environment) -> str:
    """The `repr` of an environment, which may name a version of its reward; its class if it has no `repr` of its own."""
    cls = type(environment)
    return cls.__qualname__ if cls.__repr__ is object.__repr__ else repr(environment)


def reward_series(log_history: list[dict]) -> dict[str, tuple[list[int], list[float]]]:
    """Optimizer steps and mean joint rewards of the training, and of each evaluation set."""
    series = {}
    for entry in log_history:
        for key, value in entry.items():
            if match := re.fullmatch(r"(?:(eval)_(?:([^/]+)_)?)?reward", key):
                kind, dataset = match.groups()
                name = "training" if kind is None else f"evaluation, {dataset}" if dataset else "evaluation"
                steps, values = series.setdefault(name, ([], []))
                steps.append(entry["step"])
                values.append(value)
    return series


def window_of(values: list[float]) -> int:
    """How many log entries of training are averaged: a fifth of them, [`WINDOW`] at most."""
    return max(1, min(WINDOW, len(values) // 5))


def summarize(log_history: list[dict]) -> dict:
    """The tables of a card: first, best and final rewards, and the last values of the environment's other metrics."""
    series = reward_series(log_history)
    window = window_of(series["training"][1]) if "training" in series else 1
    rewards = []
    for name, (steps, values) in series.items():
        width = window if name == "training" else 1
        means = [fmean(values[k : k + width]) for k in range(len(values) - width + 1)]
        best = max(range(len(means)), key=means.__getitem__)
        row = {"name": name, "first": means[0], "best": means[best], "final": means[-1]}
        rewards.append(
            {k: f"{v:.3f}" if k != "name" else v for k, v in row.items()} | {"best_step": steps[best + width - 1]}
        )

    metrics = {}
    for prefix in ("", "eval_"):
        column = {}
        for entry in log_history:
            for key, value in entry.items():
                if re.fullmatch(rf"{prefix}turn_\d+/.+", key):
                    column.setdefault(key.removeprefix(prefix), []).append(value)
        width = window if prefix == "" else 1
        for name, values in column.items():
            metrics.setdefault(name, {})[prefix] = f"{fmean(values[-width:]):.3f}"
    prefixes = {
        prefix: title
        for prefix, title in {"": "training", "eval_": "evaluation"}.items()
        if any(prefix in x for x in metrics.values())
    }
    return {
        "rewards": rewards,
        "window": window,
        "columns": list(prefixes.values()),
        "metrics": {name: [x.get(prefix, "") for prefix in prefixes] for name, x in sorted(metrics.items())},
    }


def draw_reward_curve(log_history: list[dict], path: str | Path) -> None:
    """
    Draws the joint reward against the optimizer step: every log entry of training, their moving mean, evaluations.

    Args:
        log_history (`list[dict]`): The trainer's logs; at least one has a reward.
        path (`str` or `Path`): The PNG to write.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    colors = iter(["tab:orange", "tab:green", "tab:red", "tab:purple"] * 4)
    for name, (steps, values) in reward_series(log_history).items():
        if name == "training":
            window = window_of(values)
            if window > 1:
                axes.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=1, label="training, every log entry")
            smooth = [fmean(values[max(0, k - window + 1) : k + 1]) for k in range(len(values))]
            label = f"training, mean of the last {window} entries" if window > 1 else "training"
            axes.plot(
                steps, smooth, color="tab:blue", linewidth=2, marker="o" if len(values) < 3 else None, label=label
            )
        else:
            axes.plot(steps, values, color=next(colors), linewidth=1.5, marker="o", markersize=5, label=name)
    axes.set(xlabel="optimizer step", ylabel="mean joint reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=150)
