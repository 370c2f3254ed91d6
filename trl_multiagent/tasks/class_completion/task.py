"""Class completion as a task: its sections, its environment and its datasets."""

from dataclasses import dataclass
from functools import partial

from trl_multiagent.environments.dataset_rows import LOCAL_FILE, Datasets
from trl_multiagent.environments.embedded import SHORT_NAMES
from trl_multiagent.environments.task import Task, TaskSettings, setting
from trl_multiagent.tasks.class_completion.data import CLASSEVAL, load_class_dataset
from trl_multiagent.tasks.class_completion.demo import DEMO, demo_model, demo_prompt
from trl_multiagent.tasks.class_completion.division import DIVISIONS
from trl_multiagent.tasks.class_completion.environment import MODES, ClassCompletionEnvironment
from trl_multiagent.tasks.class_completion.prompts import first_prompt
from trl_multiagent.tasks.class_completion.reward import COMPAT, KINDS
from trl_multiagent.tasks.code_generation.task import CodeDataset
from trl_multiagent.tasks.sandbox_settings import SandboxSettings


@dataclass
class ClassDataset(CodeDataset):
    """The section `dataset`."""

    generated = (*SHORT_NAMES, DEMO)
    name: str | None = setting(
        f"'{CLASSEVAL}', which comes with the package; a Hub id; the path of a {LOCAL_FILE} in the same format; "
        "or 'demo'."
    )
    type: str | None = setting("The format of the rows; only 'classeval'.", choices=(CLASSEVAL, None))
    division: str = setting(
        "Who writes which methods: 'balanced', or 'parameter_count', which leaves an agent idle in half of the "
        "classes.",
        DIVISIONS[0],
        choices=DIVISIONS,
    )


@dataclass
class External:
    """The section `external`: the feedback between turns."""

    mode: str = setting(
        "Feedback that agents get between turns: 'code_feedback', or 'plain' for none.", MODES[0], choices=MODES
    )


@dataclass
class Reward:
    """The section `reward`."""

    kind: str = setting(
        "'compat' is CoMLRL's table; 'earned' pays for tests that no constant passes, equally for every method.",
        COMPAT,
        choices=KINDS,
    )


def make_environment(settings: TaskSettings) -> ClassCompletionEnvironment:
    """
    Makes the environment. Raises [`UnavailableError`] if the machine does not offer the protection `sandbox.min_tier`.
    """
    dataset: ClassDataset = settings.sections["dataset"]
    return ClassCompletionEnvironment(
        settings.num_agents,
        division=dataset.division,
        kind=settings.sections["reward"].kind,
        mode=settings.sections["external"].mode,
        make_prompt=demo_prompt if dataset.name == DEMO else first_prompt,
        sandbox=settings.sections["sandbox"].make_checked_sandbox(),
        keep_suspicious=settings.run_folder / "suspicious_programs",
    )


def load_datasets(settings: TaskSettings) -> Datasets:
    """
    Loads the training set and, if there is an `eval_split`, the evaluation set, with the errors of
    [`load_class_dataset`].
    """
    dataset: ClassDataset = settings.sections["dataset"]
    with settings.sections["sandbox"].make_sandbox() as sandbox:
        load = partial(load_class_dataset, str(dataset.name), sandbox=sandbox)
        return load(dataset.train_split), None if dataset.eval_split is None else load(dataset.eval_split)


TASK = Task(
    make_environment,
    load_datasets,
    models={DEMO: demo_model},
    settings={"dataset": ClassDataset, "external": External, "reward": Reward, "sandbox": SandboxSettings},
)
