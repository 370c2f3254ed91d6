"""Bug fixing as a task: its sections, its environment and its datasets."""

from dataclasses import dataclass

from trl_multiagent.environments.dataset_rows import LOCAL_FILE, Dataset, Datasets
from trl_multiagent.environments.embedded import SHORT_NAMES
from trl_multiagent.environments.task import Task, TaskSettings, setting
from trl_multiagent.tasks.bug_fixing.data import QUIXBUGS, load_bug_dataset
from trl_multiagent.tasks.bug_fixing.demo import DEMO, demo_model
from trl_multiagent.tasks.bug_fixing.environment import BugFixingEnvironment
from trl_multiagent.tasks.code_generation.task import CodeDataset
from trl_multiagent.tasks.sandbox_settings import SandboxSettings


@dataclass
class BugDataset(CodeDataset):
    """The section `dataset`."""

    generated = (*SHORT_NAMES, DEMO)
    name: str | None = setting(
        f"'humaneval', 'mbpp', '{QUIXBUGS}' or '{DEMO}', which come with the package; a Hub id; or the path of a "
        f"{LOCAL_FILE}."
    )
    eval_name: str | None = setting("The same for the evaluation set; by default that of `name`.")
    mutants: int = setting(
        "Mutants of each function, besides its faulty version, on which the tests are tried.", 3, ge=0, le=20
    )
    mutants_seed: int = setting("Selects the mutants.", 0, ge=0)


def make_environment(settings: TaskSettings) -> BugFixingEnvironment:
    """
    Makes the environment. Raises [`UnavailableError`] if the machine does not offer the protection `sandbox.min_tier`.
    """
    sandbox = settings.sections["sandbox"].make_checked_sandbox()
    return BugFixingEnvironment(settings.num_agents, sandbox, settings.run_folder / "suspicious_programs")


def load_datasets(settings: TaskSettings) -> Datasets:
    """
    Loads the training set and, if there is an `eval_split`, the evaluation set, with the errors of
    [`load_bug_dataset`].
    """
    dataset: BugDataset = settings.sections["dataset"]
    name = str(dataset.name)
    with settings.sections["sandbox"].make_sandbox() as sandbox:

        def load(source: str, split: str | None) -> Dataset:
            type = dataset.type if source == name else None
            return load_bug_dataset(source, split, dataset.mutants, dataset.mutants_seed, sandbox, type)

        train_dataset = load(name, dataset.train_split)
        eval_dataset = None if dataset.eval_split is None else load(dataset.eval_name or name, dataset.eval_split)
        return train_dataset, eval_dataset


TASK = Task(
    make_environment,
    load_datasets,
    settings={"dataset": BugDataset, "sandbox": SandboxSettings},
    models={DEMO: demo_model},
)
