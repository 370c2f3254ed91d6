"""Writes the model card of a team: its agents, its training, its results, and how to load it."""

import os
import re
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from trl_multiagent.file_names import CARD_FILE, RECIPE_FILE


CURVE_FILE = "reward_curve.png"
TEMPLATE = Path(__file__).parent / "templates" / "team_card.md"
TAGS = ["trl", "trl-multiagent", "multi-agent"]
PACKAGES = {"trl_multiagent": "trl-multiagent", "TRL": "trl", "Transformers": "transformers", "Pytorch": "torch"}
PACKAGES |= {"Datasets": "datasets", "Tokenizers": "tokenizers", "PEFT": "peft"}
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
MAX_WINDOW = 10  # log entries


@dataclass
class AgentSummary:
    """
    One agent of a team, as a card describes it.

    Args:
        role (`str`): The agent's role.
        base_model (`str`): Name of the model that the agent started from: a Hub id, a folder, or empty.
        folder (`str`): The agent's folder within the team's folder.
        base_revision (`str`, *optional*): Branch, tag or commit of the base model of an adapter.
    """

    role: str
    base_model: str
    folder: str
    base_revision: str | None = None


@dataclass
class TeamSummary:
    """
    A team, as a card describes it.

    Args:
        agents (`list[AgentSummary]`): The agents, in the order of their roles.
        has_adapters (`bool`): Whether the agents are LoRA adapters.
    """

    agents: list[AgentSummary]
    has_adapters: bool


@dataclass
class TrainingSummary:
    """
    The training of a team, as a card describes it.

    Args:
        algorithm (`str`): Name of the algorithm.
        paper (`dict[str, str]`): `title`, `id` on arXiv and BibTeX `citation` of its paper, or empty.
        environment (`str`, *optional*): The environment, see [`environment_name`].
        settings (`dict[str, str | int | float]`): The settings to show.
        has_recipe (`bool`): Whether the folder contains the settings of a recipe.
        best_metric (`str`, *optional*): Name of the metric that chose the best checkpoint, if that was loaded at the end.
        log_history (`list[dict]`): The trainer's logs, `trainer.state.log_history`.
        changes (`list[dict]`): Settings that changed when the training was resumed. Each entry has the `step`, and
            `changes` with the value `before` and `after` by setting.
        links (`dict[str, str | None]`): URLs of the run at `wandb`, `trackio` and `comet`.
    """

    algorithm: str
    paper: dict[str, str]
    environment: str | None
    settings: dict[str, str | int | float]
    has_recipe: bool
    best_metric: str | None
    log_history: list[dict[str, Any]]
    changes: list[dict[str, Any]]
    links: dict[str, str | None]


@dataclass
class RewardSeries:
    """
    Mean joint rewards of the training or of one evaluation set.

    Args:
        steps (`list[int]`): Optimizer steps.
        values (`list[float]`): The mean joint reward at each of them.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def team_card(
    team: TeamSummary,
    repo_id: str,
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: list[str] | None = None,
    training: TrainingSummary | None = None,
    revision: str | None = None,
) -> ModelCard:
    """
    Writes the card of a team.

    Args:
        team ([`TeamSummary`]):
            The team.
        repo_id (`str`):
            The repository or the folder that the team is loaded from.
        model_name (`str`, *optional*):
            Name of the team; by default that of the repository.
        dataset_name (`str`, *optional*):
            Hub id of the dataset that the team was trained on.
        tags (`list[str]`, *optional*):
            Tags in addition to those that every team has.
        training ([`TrainingSummary`], *optional*):
            The training. Without it, the card describes the team alone.
        revision (`str`, *optional*):
            The branch that the team is loaded from.

    Returns:
        [`~huggingface_hub.ModelCard`]
    """
    # A card names only base models that a reader can load
    agents = [
        {
            "role": agent.role,
            "base_model": hub_id(agent.base_model),
            "base_revision": agent.base_revision,
            "folder": agent.folder,
        }
        for agent in team.agents
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
    one = "One language model"
    several = f"A team of {len(agents)} language models"
    has_environment = training is None or training.environment is not None
    if has_environment:
        several += " that solve one task together, each with its own completion"
    return ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        model_name=model_name,
        place=place(repo_id, revision),
        dataset_name=dataset_name,
        description=one if len(agents) == 1 else several,
        has_environment=has_environment,
        agents=agents,
        adapters=team.has_adapters,
        training=training,
        results=summarize(training.log_history) if training else None,
        curve_file=CURVE_FILE,
        recipe_file=RECIPE_FILE,
        versions={name: metadata.version(package) for name, package in PACKAGES.items()},
    )


def place(repo_id: str, revision: str | None = None) -> str:
    """The arguments of `from_pretrained` for a repository or a folder, as code. A pull request is meant to become `main`."""
    named = revision is not None and revision != "main" and not revision.startswith("refs/")
    return f'"{repo_id}", revision="{revision}"' if named else f'"{repo_id}"'


def rename_card(folder: str | Path, repo_id: str, revision: str | None = None) -> None:
    """
    Changes the card in a folder, if there is one that [`team_card`] wrote, so that it loads the team from another place.

    Args:
        folder (`str` or `Path`): The folder of the card.
        repo_id (`str`): The repository or the folder that the team is loaded from.
        revision (`str`, *optional*): The branch that the team is loaded from.
    """
    path = Path(folder) / CARD_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    loading = re.search(r'AgentTeam\.from_pretrained\(("([^"\n]+)"(?:, revision="[^"\n]+")?)\)', text)
    if loading is None:
        return
    name, new_name = (path_or_id.split("/")[-1] for path_or_id in (loading[2], repo_id))
    text = text.replace(loading[1], place(repo_id, revision))
    text = re.sub(
        rf"^(# Model Card for |model_name: ){re.escape(name)}$", rf"\g<1>{new_name}", text, flags=re.MULTILINE
    )
    path.write_text(text, encoding="utf-8")


def hub_id(name: str) -> str | None:
    """The name of a model if it is a Hub id. `None` for a folder, and for the empty name of a model that was not loaded."""
    return name if HUB_ID.fullmatch(name) and not os.path.exists(name) else None


def environment_name(environment: object) -> str:
    """The `repr` of an environment, or the name of its class if the class defines no `__repr__`."""
    cls = type(environment)
    return cls.__qualname__ if cls.__repr__ is object.__repr__ else repr(environment)


def reward_series(log_history: list[dict[str, Any]]) -> dict[str, RewardSeries]:
    """The mean joint rewards of the training, as `"training"`, and of each evaluation set, as `"evaluation, <set>"`."""
    series: dict[str, RewardSeries] = {}
    for entry in log_history:
        for key, value in entry.items():
            if match := re.fullmatch(r"(?:(eval)_(?:([^/]+)_)?)?reward", key):
                kind, dataset = match.groups()
                name = "training" if kind is None else f"evaluation, {dataset}" if dataset else "evaluation"
                rewards = series.setdefault(name, RewardSeries())
                rewards.steps.append(entry["step"])
                rewards.values.append(value)
    return series


def averaging_window(values: list[float]) -> int:
    """Number of consecutive log entries to average: a fifth of all entries, but at most [`MAX_WINDOW`]."""
    return max(1, min(MAX_WINDOW, len(values) // 5))


def summarize(log_history: list[dict[str, Any]]) -> dict[str, Any]:
    """
    Makes the tables of a card.

    Args:
        log_history (`list[dict]`): The trainer's logs.

    Returns:
        `dict` with these entries, all numbers formatted:

        - `rewards`: one row with `name`, `first`, `best`, `best_step` and `final` per series of [`reward_series`];
        - `window`: the number of log entries of training that are averaged;
        - `columns`: `"training"`, `"evaluation"` or both, the columns of `metrics`;
        - `metrics`: the last values of the environment's other metrics, by name.
    """
    series = reward_series(log_history)
    window = averaging_window(series["training"].values) if "training" in series else 1
    reward_rows = []
    for name, rewards in series.items():
        width = window if name == "training" else 1
        means = [fmean(rewards.values[k : k + width]) for k in range(len(rewards.values) - width + 1)]
        best = max(range(len(means)), key=means.__getitem__)
        reward_rows.append(
            {
                "name": name,
                "first": f"{means[0]:.3f}",
                "best": f"{means[best]:.3f}",
                "best_step": rewards.steps[best + width - 1],
                "final": f"{means[-1]:.3f}",
            }
        )

    columns = {"": "training", "eval_": "evaluation"}  # by the prefix of a metric's name in the logs
    metrics: dict[str, dict[str, str]] = {}
    for prefix in columns:
        values_by_name: dict[str, list[float]] = {}
        for entry in log_history:
            for key, value in entry.items():
                if re.fullmatch(rf"{prefix}turn_\d+/.+", key):
                    values_by_name.setdefault(key.removeprefix(prefix), []).append(value)
        width = window if prefix == "" else 1
        for name, values in values_by_name.items():
            metrics.setdefault(name, {})[prefix] = f"{fmean(values[-width:]):.3f}"
    used = [prefix for prefix in columns if any(prefix in row for row in metrics.values())]
    return {
        "rewards": reward_rows,
        "window": window,
        "columns": [columns[prefix] for prefix in used],
        "metrics": {name: [row.get(prefix, "") for prefix in used] for name, row in sorted(metrics.items())},
    }


def draw_reward_curve(log_history: list[dict[str, Any]], path: str | Path) -> None:
    """
    Draws the mean joint reward against the optimizer step: the training, its moving mean, and the evaluations.

    Args:
        log_history (`list[dict]`): The trainer's logs, at least one of them with a reward.
        path (`str` or `Path`): The PNG file to write.
    """
    from matplotlib.figure import Figure  # takes long to import
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    colors = iter(["tab:orange", "tab:green", "tab:red", "tab:purple"] * 4)
    for name, rewards in reward_series(log_history).items():
        steps, values = rewards.steps, rewards.values
        if name == "training":
            window = averaging_window(values)
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
