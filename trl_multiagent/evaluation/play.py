"""Plays the episodes of an evaluation, and writes one line per episode into its transcripts."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from datasets import Dataset
from transformers import PreTrainedModel

from trl_multiagent.environments.base import describe_environment, scoring_metrics
from trl_multiagent.environments.dataset_rows import item_ids
from trl_multiagent.evaluation.config import SAMPLING_FIELDS, EvaluationConfig
from trl_multiagent.evaluation.players import LoadedTeam, PipelineSampler, Policy
from trl_multiagent.evaluation.statistics import CALL, Records
from trl_multiagent.jobs.distributed import fail_together
from trl_multiagent.jobs.fingerprint import digest_of_rows
from trl_multiagent.jobs.stage import Chunks, Stage
from trl_multiagent.models.generation import Completion, Sampled
from trl_multiagent.models.grouped_lora import Stacked
from trl_multiagent.rollout.sampler import SamplingTeam, TeamSampler, TransformersGenerator, TurnPrompts
from trl_multiagent.rollout.sampling_arguments import sampling_of
from trl_multiagent.rollout.trace import item_name
from trl_multiagent.rollout.tree import Node, judge_nodes, nodes_of_episode, play_episodes


TRANSCRIPTS = "transcripts.jsonl"  # one line of JSON per episode, from which all numbers are computed
PART = "items_{1.start:06d}_to_{1.stop:06d}.jsonl"  # the episodes of a batch


class EpisodeGenerator(TransformersGenerator):
    """
    Samples episodes, and measures the time. Neither the other episodes of a batch nor the number of processes changes
    a completion, up to rounding.
    """

    def __init__(self, policy: Policy, team: SamplingTeam, config: EvaluationConfig):
        arguments = sampling_of(config, policy.max_completion_length)
        super().__init__(team, arguments, config.generation_token_budget, config.stop_strings, config.seed)
        self.silent_role = policy.silent_role
        self.generation_seconds: list[dict[str, float]] = []  # of each generate call, for every turn

    def generate(self, turn: TurnPrompts) -> Sampled:
        number = max((len(node.history) for nodes in turn.nodes.values() for node in nodes), default=-1)
        if number == len(self.generation_seconds):  # the first call of a turn
            self.generation_seconds.append({})
        return super().generate(turn)

    def sample(self, model: PreTrainedModel, group: Stacked | None, roles: list[str], turn: TurnPrompts) -> Sampled:
        acting = [role for role in roles if turn.nodes[role]]
        if not acting:
            return {role: [] for role in roles}
        call = CALL.join(acting)
        if acting == [self.silent_role]:
            self.generation_seconds[-1][call] = 0.0
            return {role: [[Completion(self.team.end_tokens(role)[:1])] for _ in turn.nodes[role]] for role in roles}
        start = time.perf_counter()
        completions = super().sample(model, group, roles, turn)
        self.generation_seconds[-1][call] = time.perf_counter() - start
        return completions


def play_policy(policy: Policy, dataset: Dataset, config: EvaluationConfig, accelerator: Accelerator) -> Records:
    """
    Plays all episodes of a policy that its transcripts do not have yet. Returns the transcripts in the order of the
    items in the main process, and an empty list in the others.

    Raises `ValueError` if the roles do not match, or the folder holds the transcripts of another evaluation.
    """
    with fail_together(accelerator):
        loaded = policy.load()
        own, roles = loaded.team.roles, policy.environment.roles
        if own != tuple(roles):
            raise ValueError(f"The team in {policy.source} has the roles {[*own]}, the environment {[*roles]}.")
    decisive = {
        **{name: getattr(config, name) for name in SAMPLING_FIELDS},
        "max_completion_length": policy.max_completion_length,
        "pipeline": policy.is_pipeline,
        "rows of the dataset": digest_of_rows(dataset),
        **({"ablation": policy.row} if policy.kind == "ablation" else {}),
        **describe_environment(policy.environment),
        **loaded.description,
    }
    stage = Stage(Path(str(config.output_dir)) / "transcripts" / policy.name, "evaluation", decisive, accelerator)
    batches = Chunks(stage, len(dataset), config.items_per_batch, PART)
    with stage.open():
        with fail_together(accelerator):
            if not stage.has(TRANSCRIPTS):
                _play_batches(policy, loaded, dataset, config, batches)
        with fail_together(accelerator):
            return _join_batches(batches, config) if accelerator.is_main_process else []


def _play_batches(
    policy: Policy, loaded: LoadedTeam, dataset: Dataset, config: EvaluationConfig, batches: Chunks
) -> None:
    """
    Plays the missing batches of this process, and makes a record of each episode. Its `timing` is about the batch: the
    wall time in seconds with scoring, the number of episodes, and for every turn the seconds of each generate call,
    which makes the answers of all these episodes.
    """
    environment, num_turns, names = policy.environment, cast(int, config.num_turns), item_ids(dataset)
    generator = EpisodeGenerator(policy, loaded.team, config)
    asked = (loaded.team, generator, config.use_chat_template, config)
    sampler = PipelineSampler(environment, *asked) if policy.is_pipeline else TeamSampler(*asked)
    sampler.check_items([dataset[0]], environment, num_turns)

    def play(number: int) -> Records:
        start = time.perf_counter()
        generator.generation_seconds = []
        turns = play_episodes(
            [dataset[item] for item in batches.items[number]],
            environment,
            sampler,
            lambda nodes: judge_nodes(
                environment,
                nodes,
                evaluation=True,
                chat_roles=sampler.chat_roles,
                reward_none=config.reward_none or "error",
            ),
            num_turns=num_turns,
            num_episodes=config.num_episodes,
            numbers=batches.items[number],
        )
        scoring_metrics(environment)  # resets the environment's counts
        timing = {
            "batch_seconds": time.perf_counter() - start,
            "batch_episodes": len(turns[0]),
            "generation_seconds": generator.generation_seconds,
        }
        return [
            {
                "item": root.tree,
                "id": names[root.tree],
                "name": item_name(root.item),
                "episode": root.episode,
                "timing": timing,
                "turns": [turn_record(node, sampler) for node in nodes_of_episode(root)],
            }
            for root in turns[0]
        ]

    batches.play(f"Evaluating {policy.name}", play, config.disable_tqdm)


def _join_batches(batches: Chunks, config: EvaluationConfig) -> Records:
    """
    Joins the files of all batches into one, and returns the episodes by item. Raises `ValueError` if some are missing.
    """
    stage = batches.stage
    if not stage.has(TRANSCRIPTS):
        stage.save(TRANSCRIPTS, batches.read())
    for path in stage.folder.glob("items_*.jsonl"):
        path.unlink()
    records = stage.read(TRANSCRIPTS)
    if len(records) != sum(map(len, batches.items)) * config.num_episodes:
        raise ValueError(f"{stage.folder / TRANSCRIPTS} is damaged: it lacks episodes. Remove it, and start again.")
    return records


def turn_record(node: Node, sampler: TeamSampler) -> dict[str, Any]:
    """Returns the record of one turn of an episode, as plain values. Metrics that are not finite are left out."""
    (outcome,) = node.outcomes
    return {
        "prompts": dict(node.prompts),
        "completions": node.completions(node.indices[0]),
        "reward": outcome.reward,
        **({"role_rewards": outcome.role_rewards} if outcome.role_rewards else {}),
        "metrics": {name: value for name, value in outcome.metrics.items() if math.isfinite(value)},
        "prompt_tokens": {role: len(x.prompt_ids) for role, x in node.samples.items()},
        "tokens": {role: len(x.completion_ids[0]) for role, x in node.samples.items()},
        "finished": {role: x.is_finished(0, sampler.team.end_tokens(role)) for role, x in node.samples.items()},
    }
