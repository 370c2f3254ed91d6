"""
Collects joint preferences: samples joint answers to every item, scores them, pairs them, and writes an ordinary
dataset with a card. Loads and pushes such datasets.

Items are collected in chunks. The candidates of an item depend only on the seed, the round and the item, and the
random numbers of the environment only on the chunk. So neither an interruption nor the number of processes changes the
result.
"""

import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset, Features, Value, load_from_disk
from huggingface_hub import CommitInfo, DatasetCardData
from transformers import set_seed
from transformers.utils import logging

from trl_multiagent.console import markdown_table
from trl_multiagent.environments.base import Environment, check_all_act, describe_environment, scoring_metrics
from trl_multiagent.environments.dataset_rows import (
    LOCAL_FILE,
    LOCAL_SUFFIXES,
    item_ids,
    load_file,
    load_from_hub,
    select_rows,
)
from trl_multiagent.folders import (
    CARD_FILE,
    DATASET_STATE,
    PREFERENCES_FILE,
    is_collection,
    read_json,
    replacing,
    write_json,
    write_text,
)
from trl_multiagent.hub import open_repo, push_command_advice, upload_folder
from trl_multiagent.jobs.distributed import fail_together, start_processes
from trl_multiagent.jobs.fingerprint import checksum_of_weights, describe_agent, digest_of_rows
from trl_multiagent.jobs.stage import Chunks, Stage
from trl_multiagent.limits import check_dataset
from trl_multiagent.preferences.comparators import Comparator, make_comparator, team_sampler
from trl_multiagent.preferences.config import CANDIDATES_FOLDER, PAIRING_FIELDS, SAMPLING_FIELDS, PreferenceConfig
from trl_multiagent.preferences.pairs import Candidate, Pair, all_pairs, matched_pairs, select_pairs
from trl_multiagent.preferences.rows import (
    CHOSEN_BY,
    ITEM_ID,
    REJECTED_BY,
    ROUND,
    PairRow,
    answer_columns,
    check_preferences,
    check_prompt,
    ids_columns,
    make_row,
    text_columns,
)
from trl_multiagent.rollout.tree import ByRole, Node, Sample, derive_seed, grow_trees, judge_nodes
from trl_multiagent.team.agent_team import AgentTeam


logger = logging.get_logger(__name__)

CHUNK_FILE = CANDIDATES_FOLDER + "/chunk_{:05d}.jsonl"
STATE_FILE = CANDIDATES_FOLDER + "/environment_{:05d}.pt"  # the state of the environment after a chunk
HUB_FILE = "data/train-00000-of-00001.parquet"  # of a dataset on the Hub
FEW_ITEMS = 0.1  # a smaller share of items with pairs causes a warning
CARD = """---
{data}
---

# Joint preferences

Pairs of joint answers of the agents {roles}. Each row compares two joint answers to one item; the chosen one has the
greater joint reward. Made with trl_multiagent, which extends [TRL](https://github.com/huggingface/trl) to teams of
models.

| column | contents |
| --- | --- |
| `<role>_prompt`, `<role>_chosen`, `<role>_rejected` | prompt, chosen and rejected answer of a role |
| `item_id`, `round` | the item, and the round of the collection |
| `chosen_reward`, `rejected_reward` | the joint rewards |
| `chosen_by`, `rejected_by` | the policies that sampled the answers |
| `chosen_<name>`, `rejected_<name>` | components of the rewards |
| `<role>_chosen_answer`, `<role>_rejected_answer` | the answer, if the role reasons before it |
| `<role>_chosen_token_ids`, `<role>_rejected_token_ids` | the token ids that were sampled |

```python
from trl_multiagent.preferences import load_preferences

preferences = load_preferences("FOLDER_OR_REPOSITORY", roles={roles})
```

The environment that ranked the answers by its joint reward:

{environment}
`env_steps` is the number that CoMLRL charges for the pairs. The actual cost is `candidates_scored`, the number of
answers that were sampled and scored; all of them are in the folder `candidates` of a collection.

{table}"""

Record = dict[str, Any]  # an item with its candidates, as plain values


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
        TypeError: `dataset` is not a `datasets.Dataset`. ValueError: the roles differ, the weights are sharded, a
        `group_reward` has a comparator, the folder is of another collection or in use. TaskError: the environment
        failed, see [`~environments.base.judge`]. UnavailableError: the endpoint of a comparator gives no answers.
    """
    check_dataset("dataset", dataset)
    if len(dataset) == 0:
        raise ValueError("`dataset` has no items.")
    team.check_roles_of(environment)
    if any(parameter.numel() == 0 for parameter in team.parameters()):
        raise ValueError("The team is sharded (ZeRO-3), so it cannot sample: save it, and load it from its folder.")
    state = start_processes()
    comparator = comparator or make_comparator(team, config, round)
    if comparator and getattr(environment.unwrapped, "group_reward", None):
        raise ValueError(
            "`group_reward` compares the answers of one policy, not those of two: set `comparator_policy: null` and, "
            "in rounds, another `pair_selection`, such as `reward_gap`."
        )
    collection = _Collection(team, environment, dataset, config, round, comparator, state)
    if not collection.is_complete():
        with collection.stage.open():
            with fail_together(state):
                collection.sample_chunks()
            with fail_together(state):
                if state.is_main_process:
                    collection.write_dataset()
    preferences = load_from_disk(collection.folder)
    numbers = read_json(collection.folder / PREFERENCES_FILE)["numbers"]
    if state.is_main_process and numbers["items_with_pairs"] < FEW_ITEMS * numbers["items"]:
        # A training on such a dataset learns nothing about the other items
        logger.warning(
            f"Only {numbers['items_with_pairs']} of {numbers['items']} items have answers with different rewards. "
            "Sample more candidates or at a higher temperature, or use items that are neither too easy nor too hard."
        )
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
        self.item_ids = item_ids(self.dataset)
        self.stage = Stage(self.folder, "collection", self._describe(), self.state)
        self.chunks = Chunks(self.stage, len(self.dataset), self.config.items_per_chunk, CHUNK_FILE)

    def _describe(self) -> dict[str, Any]:
        """Returns the settings that must be the same when the collection is resumed."""
        team = self.team
        return {
            "round": self.round,
            "roles": list(team.roles),
            "reasoning": team.reasoning,
            "arguments of chat templates": team.chat_template_kwargs,
            **{f"agent {role}": describe_agent(agent) for role, agent in team.agents.items()},
            "data types of the weights": sorted({str(parameter.dtype) for parameter in team.parameters()}),
            "weights of the team": checksum_of_weights(team.parameters()),
            **(self.comparator.facts if self.comparator else {}),
            "rows of the dataset": digest_of_rows(self.dataset),
            **describe_environment(self.environment),
            # An environment with a state is another one in each process
            **({"number of processes": self.state.num_processes} if self.environment.state_dict() else {}),
            **self.config.values(SAMPLING_FIELDS),
        }

    def is_complete(self) -> bool:
        """Returns whether the folder holds the result of these settings."""
        if not is_collection(self.folder):
            return False
        facts = read_json(self.folder / PREFERENCES_FILE)
        return (facts["sampling"], facts["pairing"]) == (self.stage.settings, self.config.values(PAIRING_FIELDS))

    # Sampling

    def sample_chunks(self) -> None:
        """Samples, scores and writes the missing chunks of this process."""
        config, missing = self.config, self.chunks.missing()
        (self.folder / CANDIDATES_FOLDER).mkdir(exist_ok=True)
        path = self.folder / STATE_FILE.format(missing[0] - self.state.num_processes if missing else -1)
        if path.is_file():
            self.environment.load_state_dict(torch.load(path, weights_only=True))
        self.sampler = team_sampler(self.team, config, f"{config.seed}/{self.round}/team")
        self.sampler.check_items([self.dataset[0]], self.environment, num_turns=1)
        self.chunks.play("Collecting preferences", self.sample_chunk, config.disable_tqdm)

    def sample_chunk(self, number: int) -> list[Record]:
        """Samples and scores one chunk. Returns one record per item."""
        comparator = self.comparator

        def sample_team(nodes: list[Node], num_candidates: int) -> ByRole:
            for node in nodes:
                check_all_act("A preference", node.prompts, self.team.roles)
                for role, prompt in node.prompts.items():
                    check_prompt(prompt, f"The prompt of {role!r} for item {node.tree}")
            return self.sampler(nodes, num_candidates)

        nodes = self._play(number, "team", sample_team, self.config.preference_num_candidates)
        records: list[Record] = [
            {
                "index": node.tree,
                "item_id": self.item_ids[node.tree],
                "prompts": prompts_of(node),
                "tokens": num_tokens(node),
                "candidates": answers_of(node, node, "current"),
                "comparator": [],
            }
            for node in nodes
        ]
        if comparator is not None:
            # The comparator has its own random numbers, or a copy of the team would repeat the team's answers
            others = self._play(number, "comparator", comparator.sample, self.config.num_comparator_candidates)
            for record, other, node in zip(records, others, nodes, strict=True):
                record["tokens"] += num_tokens(other)
                record["comparator"] = answers_of(other, node, comparator.name)
        scoring_metrics(self.environment)  # resets the environment's counts
        state = self.environment.state_dict()
        if state:
            with replacing(self.folder / STATE_FILE.format(number)) as file:
                torch.save(state, file)
        return records

    def _play(self, chunk: int, stream: str, sample: Sample, num_candidates: int) -> list[Node]:
        """Samples and scores the candidates of one policy, with random numbers that depend on the chunk."""
        numbers = self.chunks.items[chunk]
        items = [self.dataset[k] for k in numbers]
        with seeded(derive_seed(self.config.seed, self.round, chunk, stream)):
            (nodes,) = grow_trees(
                items,
                self.environment,
                sample,
                lambda nodes: judge_nodes(self.environment, nodes, chat_roles=self.sampler.chat_roles),
                num_turns=1,
                num_generations=num_candidates,
                process_reward=self.config.process_reward,
                numbers=numbers,
            )
        if any(node.role_rewards for node in nodes):
            raise ValueError("A preference needs one joint reward, but the environment gives each role its own.")
        return nodes

    # The dataset

    def write_dataset(self) -> None:
        """Pairs the candidates, and writes the dataset and its card."""
        config, roles = self.config, self.team.roles
        records = self.chunks.read()
        rows, num_pairs = [], []  # the latter: possible ones of each item
        for record in records:
            own, others = ([Candidate(**x) for x in record[side]] for side in ("candidates", "comparator"))
            pairs = all_pairs(own) if self.comparator is None else matched_pairs(own, others)
            num_pairs.append(len(pairs))
            seed = derive_seed(config.seed, self.round, record["index"], "pairs")
            pairs = select_pairs(pairs, config.pair_selection, config.preference_pairs_per_sample, seed)
            rows += [self._row(record, pair) for pair in pairs]
        preferences = dataset_of_rows(rows, roles, records[0]["prompts"])
        for name in (PREFERENCES_FILE, DATASET_STATE):  # from here on, a crash leaves no dataset that looks complete
            (self.folder / name).unlink(missing_ok=True)
        for path in self.folder.glob("data-*.arrow"):
            path.unlink()
        rewards = [candidate["reward"] for record in records for candidate in record["candidates"]]
        # An empty dataset needs a shard to load
        preferences.save_to_disk(self.folder, num_shards=None if rows else 1)
        facts = {
            "environment": repr(self.environment),
            "sampling": self.stage.settings,
            "pairing": config.values(PAIRING_FIELDS),
            "numbers": {
                "items": len(records),
                "items_with_pairs": sum(map(bool, num_pairs)),
                "candidates_scored": len(rewards) + sum(len(record["comparator"]) for record in records),
                "tokens_sampled": sum(record["tokens"] for record in records),
                "pairs_possible": sum(num_pairs),
                "pairs": len(rows),
                # The count of CoMLRL, which charges pairs and not samples
                "env_steps": len(rows) * config.environment_steps_per_pair * config.use_environment_step,
                "mean_reward": fmean(rewards),
            },
        }
        write_text(self.folder / CARD_FILE, preference_card(facts, roles))
        write_json(self.folder / PREFERENCES_FILE, facts)

    def _row(self, record: Record, pair: Pair) -> PairRow:
        chosen, rejected = pair.chosen, pair.rejected
        origin = {ITEM_ID: record["item_id"], ROUND: self.round, CHOSEN_BY: chosen.by, REJECTED_BY: rejected.by}
        row = make_row(record["prompts"], chosen.texts, rejected.texts, chosen.reward, rejected.reward, **origin)
        for k, (side, candidate) in enumerate((("chosen", chosen), ("rejected", rejected))):
            for name, value in candidate.metrics.items():
                column = f"{side}_{name}"
                row[column if column not in row else f"{side}_metric_{name}"] = value
            row |= {answer_columns(role)[k]: answer for role, answer in candidate.answers.items()}
            row |= {ids_columns(role)[k]: ids for role, ids in candidate.ids.items()}
        return row


def prompts_of(node: Node) -> dict[str, Any]:
    """Returns the prompt of each role as the agent saw it: a text, or chat messages with the same keys in all rows."""
    seen: dict[str, Any] = {role: samples.prompt for role, samples in node.samples.items()}
    return {
        role: x if isinstance(x, str) else [{key: message[key] for key in ("role", "content")} for message in x]
        for role, x in seen.items()
    }


def answers_of(node: Node, team_node: Node, by: str) -> list[dict[str, Any]]:
    """
    Returns the joint answers at a node as fields of [`Candidate`]. `team_node`: the team's node of the same item. If a
    prompt has other token ids there, the answer's token ids are left out, because they come from another tokenizer.
    `by`: the policy that sampled the answers.
    """
    found = []
    for index, reward, outcome in zip(node.indices, node.rewards, node.outcomes, strict=True):
        whole = node.completions(index)
        answers = {role: str(answer) for role, answer in node.texts(index).items() if answer != whole[role]}
        ids = {
            role: samples.completion_ids[g]
            for role, (samples, g) in node.chosen(index).items()
            if samples.prompt_ids == team_node.samples[role].prompt_ids
        }
        found.append(asdict(Candidate(whole, reward, outcome.metrics, by, answers, ids)))
    return found


def num_tokens(node: Node) -> int:
    """Returns the number of tokens that were sampled at a node."""
    return sum(len(ids) for samples in node.samples.values() for ids in samples.completion_ids)


def dataset_of_rows(rows: list[PairRow], roles: Sequence[str], prompts: dict[str, Any]) -> Dataset:
    """
    Makes a dataset of rows, possibly none. Their metrics may differ. A role's columns are texts if its prompt in
    `prompts` is one.
    """
    text = Value("string")
    messages = [{"role": text, "content": text}]
    features: dict[str, Any] = {}
    for role in roles:
        features |= dict.fromkeys(text_columns(role), text if isinstance(prompts[role], str) else messages)
    features |= dict.fromkeys((ITEM_ID, CHOSEN_BY, REJECTED_BY), text) | {ROUND: Value("int64")}
    answers = {column for role in roles for column in answer_columns(role)}
    features |= {name: text for row in rows for name in row if name in answers}
    features |= {column: [Value("int32")] for role in roles for column in ids_columns(role)}
    features |= {name: Value("float64") for row in rows for name in row if name not in features}
    columns = {name: [row.get(name) for row in rows] for name in features}
    return Dataset.from_dict(columns, features=Features(features))


# Random numbers


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global random generators within the block. Afterwards they continue as if nothing had been drawn."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def preference_card(facts: dict[str, Any], roles: Sequence[str]) -> str:
    """Writes the card of the dataset. `facts`: the contents of [`~folders.PREFERENCES_FILE`]."""
    data = DatasetCardData(
        tags=["trl-multiagent", "preference"],
        pretty_name="Joint preferences",
        configs=[{"config_name": "default", "data_files": [{"split": "train", "path": HUB_FILE}]}],
    )
    rows = [("number or setting", "value")]
    for part in ("numbers", "pairing", "sampling"):
        rows += facts[part].items()
    return CARD.format(
        data=data.to_yaml(),
        roles=list(roles),
        environment="".join(f"    {line}\n" for line in facts["environment"].splitlines()),
        table=markdown_table(rows),
    )


# Loading and pushing


def load_preferences(name: str, roles: Sequence[str], split: str | None = None) -> Dataset:
    """
    Loads joint preferences of a collection or from another source, and checks every row.

    Args:
        name (`str`): Folder of a collection or of another dataset that `Dataset.save_to_disk` wrote, a `.jsonl`,
            `.json` or `.parquet` file, or the id of a dataset on the Hub.
        roles (`Sequence[str]`): The roles of the team that is to be trained.
        split (`str`, *optional*): The rows, such as `"train[:100]"`. By default, all rows, or the split
            `train` of a dataset on the Hub.

    Raises:
        FileNotFoundError: there is no such file or folder. OSError: the Hub cannot be reached. ValueError: the file is
            of another kind, the collection is not complete, or a column or row is malformed; the message names the row
            and the field.
    """
    path = Path(name)
    if path.suffix in LOCAL_SUFFIXES:
        preferences = load_file(name, split)
    elif path.is_dir():
        if not (path / DATASET_STATE).is_file():
            raise ValueError(f"{path} holds no dataset, or an unfinished collection: start that again to finish it.")
        preferences = select_rows(load_from_disk(path), split, name)
    elif path.is_file() or path.is_absolute() or name.count("/") != 1:
        raise FileNotFoundError(
            f"There are no preferences in {name}. Give a folder that `trl-multiagent collect` wrote, a {LOCAL_FILE}, "
            "or an id on the Hub."
        )
    else:
        preferences = load_from_hub(name, None, split or "train")
    check_preferences(preferences, roles, name)
    return preferences


def push_preferences(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload preferences",
    create_pr: bool = False,
) -> CommitInfo:
    """
    Uploads collected preferences and their card to a dataset repository. The candidates stay on this machine.

    Args:
        folder (`str` or `Path`): Folder of a collection.
        repo_id (`str`): Repository, created if it does not exist.
        private, token, revision, commit_message, create_pr: See [`AgentTeam.push_to_hub`].

    Raises:
        ValueError: the folder holds no complete collection.
        RuntimeError: the Hub cannot be reached, it refuses the upload, or the upload is interrupted.
    """
    folder = Path(folder)
    if not is_collection(folder):
        raise ValueError(f"{folder} holds no complete collection of preferences.")
    repo_id = open_repo(repo_id, private, token, revision, create_pr, repo_type="dataset")
    with tempfile.TemporaryDirectory() as upload:
        shutil.copy(folder / CARD_FILE, upload)
        file = Path(upload) / HUB_FILE
        file.parent.mkdir()
        load_from_disk(folder).to_parquet(file)
        return upload_folder(
            upload,
            repo_id,
            push_command_advice(folder, repo_id, revision, create_pr),
            repo_type="dataset",
            token=token,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
        )
