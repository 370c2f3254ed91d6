"""
Rollout trees as a table: one row per joint action. All code that shows or stores completions reads these rows.

| column | content |
| --- | --- |
| `step` | The optimizer step that the tree is for; in an evaluation, the number of steps before it. |
| `split` | `"train"`, or the prefix of the evaluation: `"eval"`, or `"eval_<name>"` for one of several sets. |
| `process`, `tree` | The process, and the number of the tree, or of the group of episodes, in its batch. |
| `episode` | In a group of episodes, the number of the episode among its item's. |
| `item` | The item's column `id`, `task_id` or `item_id`; without one, a hash of its columns. |
| `name` | What people call the item: that column if it has text, else its first text. |
| `node`, `parent` | Paths in the tree: the root is `"/"`, the node after joint action 2 is `"/2"`. |
| `turn`, `action` | The turn, counted from 1, and the number of the joint action at its node. |
| `prompt/<role>`, `completion/<role>` | The agent's new prompt and its completion; `None` if it does not act. |
| `reward`, `return` | The processed reward and the return, of the team. |
| `reward/<role>`, `return/<role>` | The reward and the return of a role, if each role has its own. |
| `advantage/<role>` | The completion's advantage; `None` in evaluations and for agents that are not trained. |
| `metrics/<name>` | The metrics of the outcome, such as the parts of the reward. |
| `extra/<name>` | The values that a reward function passed to `log_extra`. |
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trl_multiagent.console import one_line
from trl_multiagent.environments.base import ID_COLUMNS, Prompt, item_id
from trl_multiagent.rollout.tree import Trees


if TYPE_CHECKING:
    import torch


NAME_LENGTH = 60  # characters
TraceRow = dict[str, Any]


def item_name(item: dict) -> str:
    """Returns a short name of an item for people, which other items may have, too."""
    texts = [item[name] for name in (*ID_COLUMNS, *item) if isinstance(item.get(name), str)]
    return one_line(texts[0])[:NAME_LENGTH] if texts else item_id(item)


def trace_rows(
    turns: Trees,
    roles: Sequence[str],
    advantages: "list[list[dict[str, torch.Tensor]]] | None" = None,
    *,
    step: int,
    split: str = "train",
    process: int = 0,
) -> list[TraceRow]:
    """
    Makes the rows of a batch of trees: one per joint action, turn by turn. Their values are plain: texts, numbers and
    `None`. All `roles` have columns. `turns` and `advantages` have an entry per turn and node; the advantages of a
    trained agent at a node have the shape `(G,)`. `step`, `split` and `process` are columns of all rows.
    """
    rows = []
    for turn, nodes in enumerate(turns):
        for k, node in enumerate(nodes):
            path = f"/{'/'.join(map(str, node.path))}"
            values = {role: x.tolist() for role, x in (advantages[turn][k] if advantages else {}).items()}
            prompts = {role: _plain(prompt_text(prompt)) for role, prompt in node.prompts.items()}
            common = {
                "step": step,
                "split": split,
                "process": process,
                "tree": node.tree,
                "node": path,
                "parent": (path.rpartition("/")[0] or "/") if node.path else "",
                "item": _plain(item_id(node.item)),
                "name": item_name(node.item),
                "turn": turn + 1,
                **({} if node.episode is None else {"episode": node.episode}),
                **{f"prompt/{role}": prompts.get(role) for role in roles},
            }
            for action, index in enumerate(node.indices):
                outcome = node.outcomes[action]
                row = {**common, "action": action}
                texts = node.completions(index)
                row |= {f"completion/{role}": _plain(texts.get(role)) for role in roles}
                row |= {"reward": node.rewards[action], "return": node.returns[action]}
                row |= {f"reward/{role}": node.rewards_of(role)[action] for role in node.role_returns}
                row |= {f"return/{role}": returns[action] for role, returns in node.role_returns.items()}
                g = dict(zip(node.samples, index, strict=True))
                row |= {f"advantage/{role}": values[role][g[role]] if role in values else None for role in roles}
                row |= {f"metrics/{name}": value for name, value in outcome.metrics.items()}
                row |= {f"extra/{name}": _plain(value) for name, value in outcome.extra.items()}
                rows.append(row)
    return rows


def roles_of(rows: list[TraceRow]) -> list[str]:
    """Returns the roles that have columns in these rows."""
    return [name.removeprefix("completion/") for name in rows[0] if name.startswith("completion/")]


def prompt_text(prompt: Prompt) -> str:
    """Returns a prompt as one text. Chat messages are preceded by their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"[{message['role']}] {message['content']}" for message in prompt)


def _plain(value: Any) -> Any:
    """Returns a number, `None`, or a text without lone surrogates, which files cannot hold."""
    if value is None or isinstance(value, int | float):
        return value
    return str(value).encode("utf-8", "replace").decode()
