"""Checks and collates the tokens of all agents for MADPO."""

import math
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging
from trl.trainer.dpo_trainer import DataCollatorForPreference

from trl_multiagent.models.positions import TooLongError, learned_positions, padded
from trl_multiagent.preferences.rows import reference_columns, text_columns
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.madpo_config import MADPOConfig


logger = logging.get_logger(__name__)

TOKENS = ("prompt_ids", "chosen_ids", "rejected_ids")  # an agent's columns from TRL's tokenization

# The result of `DataCollatorForPreference` for one agent, and "weights": 1 for a pair, 0 for a repeated one
AgentBatch = dict[str, torch.Tensor]


def check_form(dataset: Dataset, role: str, tokenizer: PreTrainedTokenizerBase, name: str, chat_prompts: bool) -> None:
    """
    Raises `ValueError` for chat messages without a chat template. Warns about texts if the environment's prompts are
    chat messages.
    """
    prompt = text_columns(role)[0]
    is_text = isinstance(dataset[0][prompt], str)
    if not is_text and tokenizer.chat_template is None:
        raise ValueError(
            f"`{name}`: {prompt!r} has chat messages, but the tokenizer of {role!r} has no chat template. Write texts "
            "instead, or give the tokenizer a template."
        )
    if is_text and chat_prompts:
        logger.warning(
            f"`{name}`: {prompt!r} has texts, but the prompts of {role!r} in the environment are chat messages, "
            "so the "
            "training sees other prompts than the evaluation. Write messages, or set `use_chat_template=False`."
        )


def check_lengths(dataset: Dataset, name: str, team: AgentTeam, args: MADPOConfig) -> None:
    """
    Raises `ValueError` if a row has no tokens to train on, or more than a model can read. Warns if `max_length` cuts
    answers.
    """
    num_cut, limit = 0, args.max_length or math.inf
    for role in team.roles:
        positions = learned_positions(team.agents[role]) or math.inf
        columns = [f"{role}/{token_ids}" for token_ids in TOKENS]
        for index, row in enumerate(dataset.select_columns(columns)):
            prompt, *answers = lengths = [len(row[column]) for column in columns]
            whole, place = prompt + max(answers), f"Row {index} of `{name}`"
            if 0 in lengths:
                raise ValueError(f"{place}: {text_columns(role)[lengths.index(0)]!r} has no tokens.")
            if padded(min(whole, limit), args.pad_to_multiple_of) > positions:
                raise TooLongError(
                    f"{place}: prompt and answer of {role!r} have {whole} tokens, but its model has only "
                    f"{positions} positions, which "
                    f"are learned. Lower `max_length` to {positions}, so that the ends of long answers are not "
                    "trained, or remove the row."
                )
            if prompt >= limit:
                raise ValueError(
                    f"{place}: {text_columns(role)[0]!r} has {prompt} tokens, which leaves no token of the "
                    "answers within the `max_length` "
                    f"of {limit}. Raise it, or remove the row."
                )
            num_cut += whole > limit
    if num_cut > 0:
        logger.warning(
            f"{num_cut} pairs of answers in `{name}` are longer than the `max_length` of {limit} "
            "tokens, including their prompts: what exceeds it, and the end of the answer, is not trained. Raise it."
        )


class TeamCollator:
    """
    Makes a batch of tokenized preferences with TRL's collator for the columns of every role. Items of a task stay a
    list.
    """

    def __init__(self, team: AgentTeam, args: MADPOConfig):
        self.stored_references = args.precompute_ref_log_probs
        lengths = {"max_length": args.max_length, "pad_to_multiple_of": args.pad_to_multiple_of}
        self.collators = {
            role: DataCollatorForPreference(pad_token_id=tokenizer.pad_token_id, **lengths)
            for role, tokenizer in team.tokenizers.items()
        }

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, AgentBatch] | list[dict[str, Any]]:
        if not all(f"{role}/{name}" in rows[0] for role in self.collators for name in TOKENS):
            return rows
        return {
            role: {**collate([self._columns_of_agent(row, role) for row in rows]), "weights": torch.ones(len(rows))}
            for role, collate in self.collators.items()
        }

    def _columns_of_agent(self, row: dict[str, Any], role: str) -> dict[str, Any]:
        columns = {name: row[f"{role}/{name}"] for name in TOKENS}
        if self.stored_references and reference_columns(role)[0] in row:
            names = ("ref_chosen_logps", "ref_rejected_logps")
            columns |= {name: row[column] for name, column in zip(names, reference_columns(role), strict=True)}
        return columns
