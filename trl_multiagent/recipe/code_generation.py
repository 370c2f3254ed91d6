"""What the recipes' settings mean for code generation: the environment and the datasets."""

from datasets import Dataset

from trl_multiagent.demo import demo_dataset, demo_prompts
from trl_multiagent.environments.code_generation.data import load_code_dataset
from trl_multiagent.environments.code_generation.environment import CodeGenerationEnvironment
from trl_multiagent.recipe.recipe import Recipe
from trl_multiagent.recipe.settings import ConfigError


def code_generation_environment(recipe: Recipe) -> CodeGenerationEnvironment:
    """
    The environment of the sections `external`, `dataset`, `reward` and `sandbox`.

    Raises:
        SandboxError: the machine does not allow `sandbox.min_tier`.
    """
    external = recipe.external
    sandbox = recipe.sandbox.make_sandbox()
    sandbox.run([])  # looks at what the machine allows, before anything is loaded
    return CodeGenerationEnvironment(
        num_agents=recipe.num_agents,
        mode=external.mode,
        sandbox_slice=external.sandbox_slice,
        reward_kind=recipe.reward.kind,
        collaboration=recipe.reward.collaboration,
        adaptive_timeout=recipe.sandbox.adaptive_timeout,
        sandbox=sandbox,
        keep_suspicious=recipe.run_folder / "suspicious_programs",
        first_prompts=demo_prompts if recipe.dataset.type == "demo" and recipe.num_agents == 2 else None,
    )


def code_generation_datasets(recipe: Recipe) -> tuple[Dataset, Dataset | None]:
    """
    The training set and, if the section `dataset` has an `eval_split`, the evaluation set.

    Raises:
        ConfigError: there are fewer items than one optimizer step takes.
        ValueError: a row or a split is malformed.
        ConnectionError: the dataset is on the Hub, and cannot be reached.
    """

    def load(split: str | None) -> Dataset:
        if recipe.dataset.type == "demo":
            return demo_dataset(split or "train")
        return load_code_dataset(
            recipe.dataset.name, split=split, type=recipe.dataset.type, num_agents=recipe.num_agents
        )

    train_dataset = load(recipe.dataset.train_split)
    if len(train_dataset) < recipe.items_per_step:
        raise ConfigError(
            f"`dataset.train_split` selects {len(train_dataset)} items, fewer than the {recipe.items_per_step} of one "
            f"optimizer step. Lower `{recipe.algorithm}.items_per_device`."
        )
    eval_dataset = load(recipe.dataset.eval_split) if recipe.dataset.eval_split is not None else None
    if eval_dataset is not None and recipe.eval_num_samples is not None:
        eval_dataset = eval_dataset.select(range(min(recipe.eval_num_samples, len(eval_dataset))))
    return train_dataset, eval_dataset
