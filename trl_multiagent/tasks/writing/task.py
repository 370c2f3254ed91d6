"""Writing as a task: its sections, its environment, its datasets, and the base model of its demo."""

from dataclasses import dataclass
from functools import partial

from trl_multiagent.environments.dataset_rows import LOCAL_FILE, Datasets
from trl_multiagent.environments.functions import Rows
from trl_multiagent.environments.task import Task, TaskSettings, setting
from trl_multiagent.tasks.writing.data import DEMO, KINDS, infer_kind, load_writing_dataset
from trl_multiagent.tasks.writing.demo import demo_model
from trl_multiagent.tasks.writing.environment import WritingEnvironment
from trl_multiagent.tasks.writing.reward import REWARDS


@dataclass
class WritingDataset(Rows):
    """The section `dataset`."""

    generated = (DEMO,)
    name: str | None = setting(f"Hub id; path of a {LOCAL_FILE}; or '{DEMO}' for generated posts.")
    type: str | None = setting("'tldr' or 'arxiv'; by default inferred from the name.", choices=KINDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.type = self.type or infer_kind(str(self.name))


@dataclass
class Reward:
    """The section `reward`."""

    kind: str = setting(
        "'grounded' pays for texts that say what their source says; 'compat' is CoMLRL's reward, which does not "
        "read it.",
        REWARDS[0],
        choices=REWARDS,
    )
    rouge: bool = setting("Whether to log ROUGE of the first text if there is a reference; needs rouge-score.", False)


def make_environment(settings: TaskSettings) -> WritingEnvironment:
    dataset, reward = settings.sections["dataset"], settings.sections["reward"]
    return WritingEnvironment(dataset.type, settings.num_agents, reward.kind, reward.rouge, brief=dataset.name == DEMO)


def load_datasets(settings: TaskSettings) -> Datasets:
    """
    Loads the training set and, if there is an `eval_split`, the evaluation set, with the errors of
    [`load_writing_dataset`].
    """
    dataset: WritingDataset = settings.sections["dataset"]
    load = partial(load_writing_dataset, str(dataset.name), type=dataset.type, config=dataset.config)
    return load(dataset.train_split), None if dataset.eval_split is None else load(dataset.eval_split)


TASK = Task(make_environment, load_datasets, {"dataset": WritingDataset, "reward": Reward}, {DEMO: demo_model})
