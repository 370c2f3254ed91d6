"""
Collects joint preferences: samples joint answers to every item, scores them, pairs them, and writes an ordinary
dataset.

Items are collected in chunks. The candidates of an item depend only on the seed, the round and the item, and the
random numbers of the environment only on the chunk. So neither an interruption nor the number of processes changes the
result.
"""

import contextlib
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset, Features, Value, load_from_disk
from transformers import set_seed
from transformers.utils import logging

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.dataset_rows import item_ids
from trl_multiagent.folders import (
    CARD_FILE,
    DATASET_STATE,
    PREFERENCES_FILE,
    replacing,
    write_json,
    write_text,
)
from trl_multiagent.jobs.distributed import fail_together, start_processes
from trl_multiagent.jobs.fingerprint import (
    checksum_of_weights,
    describe_agent,
    describe_environment,
    digest_of_rows,
)
from trl_multiagent.jobs.stage import Stage, chunks_of, progress_bar
from trl_multiagent.preferences.comparators import Comparator, Sampler, make_comparator, team_sampler
from trl_multiagent.preferences.config import CANDIDATES_FOLDER, PAIRING_FIELDS, SAMPLING_FIELDS, PreferenceConfig
from trl_multiagent.preferences.pairs import Candidate, Pair, all_pairs, matched_pairs, select_pairs
from trl_multiagent.preferences.report import PICTURE_FILE, draw_rewards, preference_card, summarize, warn_if_few_pairs
from trl_multiagent.preferences.rows import (
    CHOSEN_BY,
    CHOSEN_REWARD,
    ITEM_ID,
    REJECTED_BY,
    REJECTED_REWARD,
    ROUND,
    check_preferences,
    check_prompt,
    make_row,
    text_columns,
)
from trl_multiagent.rollout.episodes import derive_seed
from trl_multiagent.rollout.history import uses_chat_template, whole_prompt
from trl_multiagent.rollout.tree import Node, Samples, grow_trees, judge_nodes
from trl_multiagent.team.agent_team import AgentTeam


logger = logging.get_logger(__name__)

CHUNK_FILE = CANDIDATES_FOLDER + "/chunk_{:05d}.jsonl"
STATE_FILE = CANDIDATES_FOLDER + "/environment_{:05d}.pt"  # the state of the environment after a chunk


def collect_preferences(
    team: AgentTeam,
    environment: Environment,
    dataset: Dataset,
    config: PreferenceConfig,
    *,
    round: int = 0,
    comparator: Comparator | None = None,
) -> Dataset:
    """
    Collects joint preferences with the current team and writes them to `config.output_dir`.

    For each item every agent samples `preference_num_candidates` completions; the c-th completions of all agents are
    one joint answer. The environment scores all of them, and pairs of answers with different rewards become rows. With
    a comparator, the c-th answer of the team is paired with the c-th of the comparator.

    An interrupted collection in the folder is resumed, with the same result as without the interruption. If only
    settings of the pairing have changed, new pairs are made of the same candidates. All processes must call this
    function, with the same arguments.

    Args:
        team ([`AgentTeam`]): The team. It stays on its device and is not changed.
        environment ([`Environment`]): Provides the prompts and the joint reward. Only the first turn is played.
        dataset ([`~datasets.Dataset`]): The items.
        config ([`PreferenceConfig`]): The settings.
        round (`int`, *optional*, defaults to 0): Number of the round, which the rows contain. It changes the random
            numbers.
        comparator ([`Comparator`], *optional*): Samples the other answers. By default, [`make_comparator`] makes it.

    Returns:
        `datasets.Dataset`: The preferences, see [`~trl_multiagent.preferences.rows`] for the columns.

    Raises:
        TypeError: `dataset` is not a `datasets.Dataset`. ValueError: the roles differ, the weights are sharded, the
        folder holds another collection, or another program is writing to it. TaskError: the environment failed, see
        [`~environments.base.judge`]. UnavailableError: the endpoint of a comparator gives no answers.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(f"`dataset` must be a `datasets.Dataset`, got `{type(dataset).__name__}`.")
    if len(dataset) == 0:
        raise ValueError("`dataset` has no items.")
    if team.roles != tuple(environment.roles):
        raise ValueError(f"The team has the roles {list(team.roles)}, the environment {list(environment.roles)}.")
    if any(parameter.numel() == 0 for parameter in team.parameters()):
        raise ValueError("The team is sharded (ZeRO-3), so it cannot sample: save it, and load it from its folder.")
    state = start_processes()
    comparator = comparator or make_comparator(team, config, round)
    collection = _Collection(team, environment, dataset, config, round, comparator, state)
    if not collection.is_complete():
        with collection.stage.open():
            with fail_together(state):
                collection.sample_chunks()
            with fail_together(state):
                if state.is_main_process:
                    collection.write_dataset()
    preferences = load_from_disk(collection.folder)
    if state.is_main_process:
        warn_if_few_pairs(collection.stage.result(PREFERENCES_FILE)["numbers"])
    return preferences


@dataclass
class _Collection:
    """One call of [`collect_preferences`]: its arguments, its chunks and its files."""

    team: AgentTeam
    environment: Environment
    dataset: Dataset
    config: PreferenceConfig
    round: int
    comparator: Comparator | None
    state: PartialState

    def __post_init__(self) -> None:
        self.folder = Path(self.config.output_dir)
        self.chunks = chunks_of(len(self.dataset), self.config.items_per_chunk)
        self.item_ids = item_ids(self.dataset)
        self.stage = Stage(self.folder, "collection", self._describe(), self.state)

    def _describe(self) -> dict[str, Any]:
        """Returns the settings that must be the same when the collection is resumed."""
        team = self.team
        settings: dict[str, Any] = {"round": self.round, "roles": list(team.roles)}
        settings |= {f"agent {role}": describe_agent(agent) for role, agent in team.agents.items()}
        settings |= {"weights of the team": checksum_of_weights(team.parameters())}
        settings |= {} if self.comparator is None else self.comparator.describe()
        settings |= {"rows of the dataset": digest_of_rows(self.dataset), **describe_environment(self.environment)}
        if self.environment.state_dict():  # each process has an environment of its own
            settings["number of processes"] = self.state.num_processes
        return settings | self.config.values(SAMPLING_FIELDS)

    def is_complete(self) -> bool:
        """Returns whether the folder holds the result of these settings."""
        if not (self.stage.has(PREFERENCES_FILE) and self.stage.has(DATASET_STATE)):
            return False
        facts = self.stage.result(PREFERENCES_FILE)
        return facts["sampling"] == self.stage.settings and facts["pairing"] == self.config.values(PAIRING_FIELDS)

    # Sampling

    def sample_chunks(self) -> None:
        """Samples, scores and writes the missing chunks of this process."""
        config, index, count = self.config, self.state.process_index, self.state.num_processes
        (self.folder / CANDIDATES_FOLDER).mkdir(exist_ok=True)
        own = range(index, len(self.chunks), count)
        missing = [number for number in own if not self.stage.has(CHUNK_FILE.format(number))]
        if missing and self.stage.has(STATE_FILE.format(missing[0] - count)):
            path = self.folder / STATE_FILE.format(missing[0] - count)
            self.environment.load_state_dict(torch.load(path, weights_only=True))
        sampler = team_sampler(self.team, self.config, f"{self.config.seed}/{self.round}/team")
        sampler.check_items([self.dataset[k] for number in missing for k in self.chunks[number]], self.environment)
        parts, left = ([self.chunks[number] for number in numbers] for numbers in (own, missing))
        silent = config.disable_tqdm or not self.state.is_main_process
        with progress_bar("Collecting preferences", parts, left, silent) as bar:
            for number in missing:
                lines = self.sample_chunk(number, sampler)
                state = self.environment.state_dict()
                if state:
                    with replacing(self.folder / STATE_FILE.format(number)) as path:
                        torch.save(state, path)
                self.stage.save(CHUNK_FILE.format(number), lines)
                bar.update(len(lines))

    def sample_chunk(self, number: int, sampler: Sampler) -> list[dict[str, Any]]:
        """Samples and scores one chunk. Returns one record per item, as plain values."""
        chunk, config, comparator = self.chunks[number], self.config, self.comparator

        def sample_team(nodes: list[Node], num_candidates: int) -> dict[str, list[Samples]]:
            for item, node in zip(chunk, nodes, strict=True):
                idle = [role for role in self.team.roles if role not in node.prompts]
                if idle:
                    raise ValueError(
                        f"Preferences compare the answers of all roles at the first turn, but {', '.join(idle)} "
                        "does not act there. Use "
                        "an algorithm that learns from rollouts, such as MAGRPO."
                    )
                for role, prompt in self._prompts(node).items():
                    check_prompt(prompt, f"The prompt of {role!r} for item {item}")
            return sampler(nodes, num_candidates)

        nodes = self._play(number, "team", sample_team, config.preference_num_candidates)
        records: list[dict[str, Any]] = [
            {
                "index": k,
                "item_id": self.item_ids[k],
                "prompts": self._prompts(node),
                "candidates": joint_answers(node, "current"),
                "tokens": count_tokens(node),
                "truncated": self._count_truncated(node),
            }
            for k, node in zip(chunk, nodes, strict=True)
        ]
        if comparator is not None:
            # The comparator has random numbers of its own, or a copy of the team would repeat the team's answers
            nodes = self._play(number, "comparator", comparator.sample, config.num_comparator_candidates)
            for record, node in zip(records, nodes, strict=True):
                record |= {"comparator": joint_answers(node, comparator.name), "comparator_tokens": count_tokens(node)}
        return records

    def _play(self, chunk: int, stream: str, sample: Sampler, num_candidates: int) -> list[Node]:
        """Samples and scores the candidates of one policy, with random numbers that depend on the chunk."""
        items = [self.dataset[k] for k in self.chunks[chunk]]
        with seeded(derive_seed(self.config.seed, self.round, chunk, stream), self.team.device):
            (nodes,) = grow_trees(
                items,
                self.environment,
                sample,
                lambda nodes: judge_nodes(self.environment, nodes),
                num_turns=1,
                num_generations=num_candidates,
                process_reward=self.config.process_reward,
                numbers=self.chunks[chunk],
            )
        if any(node.role_rewards for node in nodes):
            raise ValueError(
                "Preferences compare joint answers by one reward, but the environment gives each role its own."
            )
        return nodes

    def _prompts(self, node: Node) -> dict[str, Any]:
        """Returns the prompt of each role in the form in which the agent saw it: a text or chat messages."""
        prompts = {}
        for role in self.team.roles:
            as_chat = uses_chat_template(self.team.tokenizers[role], self.config.use_chat_template)
            prompt = whole_prompt(role, (), node.prompts[role], as_chat)
            if not isinstance(prompt, str):  # all rows have the same form, so other keys of messages are left out
                prompt = [{"role": message["role"], "content": message["content"]} for message in prompt]
            prompts[role] = prompt
        return prompts

    def _count_truncated(self, node: Node) -> int:
        """Counts the agents' completions that have no end-of-sequence token."""
        return sum(
            not ids or ids[-1] not in self.team.end_tokens(role)
            for role, samples in node.samples.items()
            for ids in samples.completion_ids
        )

    # The dataset

    def read_chunk(self, number: int) -> list[dict[str, Any]]:
        """Reads the candidates of a chunk. Raises `ValueError` if the chunk is missing or damaged."""
        path = CHUNK_FILE.format(number)
        lines = self.stage.read(path)
        if [line.get("index") for line in lines] != list(self.chunks[number]):
            raise ValueError(f"{self.folder / path} is damaged: it lacks items. Remove it, and start again.")
        return lines

    def write_dataset(self) -> None:
        """Pairs the candidates, and writes the dataset, its card and the picture."""
        config, roles = self.config, self.team.roles
        records = [record for number in range(len(self.chunks)) for record in self.read_chunk(number)]
        pairs = [pairs_of(record) for record in records]
        limit, selected = config.preference_pairs_per_sample, []
        rows = []
        for record, item_pairs in zip(records, pairs, strict=True):
            seed = derive_seed(config.seed, self.round, record["index"], "pairs")
            selected.append(select_pairs(item_pairs, config.pair_selection, limit, seed))
            rows += [self._row(record, pair) for pair in selected[-1]]
        preferences = make_dataset(rows, roles, records[0]["prompts"])
        if rows:
            check_preferences(preferences, roles, "the collected preferences")

        for name in (PREFERENCES_FILE, DATASET_STATE):  # from here on, a crash leaves no dataset that looks complete
            (self.folder / name).unlink(missing_ok=True)
        save_dataset(preferences, self.folder)
        numbers = summarize(records, pairs, selected, config)
        facts = {
            "environment": repr(self.environment),
            "sampling": self.stage.settings,
            "pairing": config.values(PAIRING_FIELDS),
            "numbers": {**numbers, **({} if self.comparator is None else self.comparator.numbers())},
        }
        (self.folder / PICTURE_FILE).unlink(missing_ok=True)
        if config.log_reward_distribution:
            draw_rewards(records, selected, self.folder / PICTURE_FILE)
        write_text(self.folder / CARD_FILE, preference_card(facts, roles, preferences.column_names, config))
        write_json(self.folder / PREFERENCES_FILE, facts)

    def _row(self, record: dict[str, Any], pair: Pair) -> dict[str, Any]:
        chosen, rejected = pair.chosen, pair.rejected
        origin = {ITEM_ID: record["item_id"], ROUND: self.round, CHOSEN_BY: chosen.by, REJECTED_BY: rejected.by}
        row = make_row(record["prompts"], chosen.texts, rejected.texts, chosen.reward, rejected.reward, **origin)
        for side, candidate in (("chosen", chosen), ("rejected", rejected)):
            for name, value in candidate.metrics.items():
                column = f"{side}_{name}"
                row[column if column not in row else f"{side}_metric_{name}"] = value
        return row


def finished_chunks(folder: Path, number: int) -> int:
    """Counts the first `number` chunks that a folder already holds."""
    return sum((folder / CHUNK_FILE.format(k)).is_file() for k in range(number))


def joint_answers(node: Node, by: str) -> list[dict[str, Any]]:
    """Returns the joint answers of a node as fields of [`Candidate`]. `by`: the policy that sampled them."""
    actions = zip(node.joint_actions, node.rewards, node.outcomes, strict=True)
    return [asdict(Candidate(action, reward, outcome.metrics, by)) for action, reward, outcome in actions]


def count_tokens(node: Node) -> int:
    """Counts the tokens that were sampled at a node."""
    return sum(len(ids) for samples in node.samples.values() for ids in samples.completion_ids)


def pairs_of(record: dict[str, Any]) -> list[Pair]:
    """Makes all pairs of an item."""
    candidates = [Candidate(**candidate) for candidate in record["candidates"]]
    if "comparator" not in record:
        return all_pairs(candidates)
    return matched_pairs(candidates, [Candidate(**candidate) for candidate in record["comparator"]])


def make_dataset(rows: list[dict[str, Any]], roles: Sequence[str], prompts: dict[str, Any]) -> Dataset:
    """
    Makes a dataset of rows, possibly none, whose metrics may differ. A role's columns are texts if its prompt in
    `prompts` is one.
    """
    messages = [{"role": Value("string"), "content": Value("string")}]
    features: dict[str, Any] = {}
    for role in roles:
        features |= dict.fromkeys(text_columns(role), Value("string") if isinstance(prompts[role], str) else messages)
    features |= dict.fromkeys((CHOSEN_REWARD, REJECTED_REWARD), Value("float64"))
    features |= {ITEM_ID: Value("string"), ROUND: Value("int64")}
    features |= {CHOSEN_BY: Value("string"), REJECTED_BY: Value("string")}
    features |= {name: Value("float64") for row in rows for name in row if name not in features}
    columns = {name: [row.get(name) for row in rows] for name in features}
    return Dataset.from_dict(columns, features=Features(features))


def save_dataset(dataset: Dataset, folder: Path) -> None:
    """Writes a dataset into a folder with other files. The file that marks the dataset as complete is written last."""
    unfinished = folder / "_unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    for path in folder.glob("data-*.arrow"):
        path.unlink()
    dataset.save_to_disk(unfinished, num_shards=None if len(dataset) else 1)  # an empty dataset needs a shard to load
    for path in sorted(unfinished.iterdir(), key=lambda path: path.name == DATASET_STATE):
        path.replace(folder / path.name)
    unfinished.rmdir()


# Random numbers


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the global random generators within the block. Afterwards they continue as if nothing had been drawn."""
    python, arrays = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
