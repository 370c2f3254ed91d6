"""Plays the episodes of an evaluation, and computes its numbers from the transcripts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from datasets import Dataset
from tqdm.auto import tqdm

from trl_multiagent.environments.base import scoring_metrics
from trl_multiagent.environments.dataset_rows import item_ids
from trl_multiagent.evaluation.config import SAMPLING_FIELDS, EvaluationConfig
from trl_multiagent.evaluation.policies import NOTHING, EpisodeGenerator, LoadedTeam, PipelineSampler, Policy
from trl_multiagent.jobs.identity import describe_environment, digest_of_rows
from trl_multiagent.jobs.processes import fail_together
from trl_multiagent.jobs.stage import Stage, chunks_of
from trl_multiagent.rollout.episodes import play_episodes
from trl_multiagent.rollout.sampler import TeamSampler, sampling_arguments
from trl_multiagent.rollout.tree import Node, judge_nodes


Records = list[dict[str, Any]]
TRANSCRIPTS = "transcripts.jsonl"  # one line of JSON per episode, from which all numbers are computed
TRANSCRIPT_FORMAT = 2  # increased when the records change


def play_policy(policy: Policy, dataset: Dataset, config: EvaluationConfig, accelerator: Accelerator) -> Records:
    """
    Plays all episodes of a policy that its transcripts do not have yet.

    Items are played in batches that do not depend on the number of processes, each by one process. A batch that was
    interrupted is played again as a whole.

    Args:
        policy ([`Policy`]): What answers.
        dataset ([`~datasets.Dataset`]): The items.
        config ([`EvaluationConfig`]): The settings, without a sampling field that is `None`.
        accelerator ([`~accelerate.Accelerator`]): Of this process. All processes must call this function.

    Returns:
        `list[dict]`: The transcripts, in the order of the items; empty in all processes but the main one.

    Raises:
        StageChanged: the folder holds the transcripts of another evaluation.
        ValueError: the roles do not match.
        TaskError: the environment failed, see [`~environments.base.judge`].
    """
    with fail_together(accelerator):
        loaded = policy.load()
        if loaded.team.roles != tuple(policy.environment.roles):
            raise ValueError(
                f"The team in {policy.source} has the roles {list(loaded.team.roles)}, the environment "
                f"{list(policy.environment.roles)}."
            )
    settings = describe_policy(policy, loaded, dataset, config)
    stage = Stage(transcripts_folder(config, policy), "evaluation", settings, accelerator)
    with stage.open():
        with fail_together(accelerator):
            _play_batches(policy, loaded, dataset, config, accelerator, stage)
        with fail_together(accelerator):
            return _join_batches(stage, len(dataset), config) if accelerator.is_main_process else []


def transcripts_folder(config: EvaluationConfig, policy: Policy) -> Path:
    """The folder of a policy's transcripts."""
    assert config.output_dir is not None
    return Path(config.output_dir) / "transcripts" / policy.name


def describe_policy(policy: Policy, loaded: LoadedTeam, dataset: Dataset, config: EvaluationConfig) -> dict[str, Any]:
    """Returns what must be the same when an evaluation is continued."""
    settings = {name: getattr(config, name) for name in SAMPLING_FIELDS}
    settings |= {"max_completion_length": policy.max_completion_length, "rounds": policy.rounds}
    settings |= {
        "format": TRANSCRIPT_FORMAT,
        "pipeline": policy.is_pipeline,
        "rows of the dataset": digest_of_rows(dataset),
    }
    if policy.replaced is not None:
        settings["replaced"] = f"{policy.replaced.role} by {policy.replaced.by}"
    return {**settings, **describe_environment(policy.environment), **loaded.description}


def _play_batches(
    policy: Policy,
    loaded: LoadedTeam,
    dataset: Dataset,
    config: EvaluationConfig,
    accelerator: Accelerator,
    stage: Stage,
) -> None:
    """Plays the batches of this process that are not there yet, and writes each of them."""
    if stage.has(TRANSCRIPTS):
        return
    own = chunks_of(len(dataset), config.items_per_batch)[accelerator.process_index :: accelerator.num_processes]
    missing = [batch for batch in own if not stage.has(part_of(batch))]
    generator = make_generator(policy, loaded, config)
    sampler = make_sampler(policy, loaded, generator, config)
    sampler.check_items([dataset[k] for batch in missing for k in batch], policy.environment)
    names = item_ids(dataset)
    bar = tqdm(
        desc=f"Evaluating {policy.name}",
        unit=" items",
        total=sum(map(len, own)),
        initial=sum(map(len, own)) - sum(map(len, missing)),
        disable=config.disable_tqdm or not accelerator.is_main_process,
    )
    with bar:
        for batch in missing:
            stage.save(part_of(batch), play_batch(policy, sampler, generator, dataset, batch, names, config))
            bar.update(len(batch))


def part_of(batch: range) -> str:
    """Returns the name of the file with the episodes of a batch."""
    return f"items_{batch.start:06d}_to_{batch.stop:06d}.jsonl"


def _join_batches(stage: Stage, num_items: int, config: EvaluationConfig) -> Records:
    """
    Joins the files of all batches into one, and returns the episodes in the order of the items.

    Raises:
        ValueError: episodes are missing or damaged.
    """
    if not stage.has(TRANSCRIPTS):
        batches = chunks_of(num_items, config.items_per_batch)
        stage.save(TRANSCRIPTS, [record for batch in batches for record in stage.read(part_of(batch))])
    for path in stage.folder.glob("items_*.jsonl"):
        path.unlink()
    records = stage.read(TRANSCRIPTS)
    if len(records) != num_items * config.num_episodes:
        raise ValueError(f"{stage.folder / TRANSCRIPTS} is damaged: it lacks episodes. Remove it, and start again.")
    return records


def count_episodes(folder: Path) -> int:
    """Returns the number of episodes in a folder of transcripts."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl"))


def make_generator(policy: Policy, loaded: LoadedTeam, config: EvaluationConfig) -> EpisodeGenerator:
    """Makes the generator of a policy."""
    arguments: dict[str, Any] = {
        "max_new_tokens": policy.max_completion_length,
        "temperature": config.temperature,
        "repetition_penalty": config.repetition_penalty,
    }
    if config.temperature != 0:
        arguments |= {"top_p": config.top_p, "top_k": config.top_k or 0, "min_p": config.min_p}
    arguments = sampling_arguments({name: value for name, value in arguments.items() if value is not None})
    generator = EpisodeGenerator(loaded.team, arguments, config.generation_token_budget, config.seed)
    if policy.replaced is not None and policy.replaced.by == NOTHING:
        generator.silent_role = policy.replaced.role
    return generator


def make_sampler(
    policy: Policy, loaded: LoadedTeam, generator: EpisodeGenerator, config: EvaluationConfig
) -> TeamSampler:
    """Makes the sampler of a policy."""
    if policy.is_pipeline:
        return PipelineSampler(
            policy.environment, loaded.team, generator, config.use_chat_template, config.history_options
        )
    return TeamSampler(loaded.team, generator, config.use_chat_template, config.history_options)


def play_batch(
    policy: Policy,
    sampler: TeamSampler,
    generator: EpisodeGenerator,
    dataset: Dataset,
    batch: Sequence[int],
    names: Sequence[str],
    config: EvaluationConfig,
) -> Records:
    """
    Plays the episodes of some items. Returns one record per episode.

    The `timing` of a record is about its batch: the wall time in seconds with scoring, the number of episodes, and for every turn the seconds of
    each role's generate call, which makes the answers of all these episodes.
    """
    start = time.perf_counter()
    generator.episodes = [(item, episode) for item in batch for episode in range(config.num_episodes)]
    generator.generation_seconds = []
    levels = play_episodes(
        [dataset[item] for item in batch],
        policy.environment,
        sampler,
        lambda nodes: judge_nodes(policy.environment, nodes, evaluation=True, chat_roles=sampler.chat_roles),
        num_turns=policy.num_turns(config),
        num_episodes=config.num_episodes,
    )
    scoring_metrics(policy.environment)  # they are about the last call; reading them starts the next count
    timing = {
        "batch_seconds": time.perf_counter() - start,
        "batch_episodes": len(generator.episodes),
        "generation_seconds": generator.generation_seconds,
    }
    return [
        {
            "item": item,
            "id": names[item],
            "episode": episode,
            "timing": timing,
            "turns": [turn_record(nodes[k], sampler) for nodes in levels],
        }
        for k, (item, episode) in enumerate(generator.episodes)
    ]


def turn_record(node: Node, sampler: TeamSampler) -> dict[str, Any]:
    """What happened in one turn of an episode, as plain values. Numbers that are not finite are left out."""
    (outcome,) = node.outcomes
    samples = {role: (sample.prompt_ids, sample.completion_ids[0]) for role, sample in node.samples.items()}
    return {
        "prompts": dict(node.prompts),
        "completions": node.joint_actions[0],
        "reward": outcome.reward,
        "metrics": {name: value for name, value in outcome.metrics.items() if math.isfinite(value)},
        "prompt_tokens": {role: len(prompt) for role, (prompt, _) in samples.items()},
        "tokens": {role: len(ids) for role, (_, ids) in samples.items()},
        "finished": {
            role: bool(ids) and ids[-1] in sampler.team.end_tokens(role) for role, (_, ids) in samples.items()
        },
    }
