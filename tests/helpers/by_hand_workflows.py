"""The gradients of workflows, computed in plain PyTorch, one sequence at a time."""

from statistics import fmean, pstdev

from by_hand import log_probability


def role_value(node, j, role, discount):
    """The return of a role for joint action j, from the outcomes alone."""
    outcome = node.outcomes[j]
    reward = outcome.role_rewards.get(role, outcome.reward)
    if j not in node.children:
        return reward
    child = node.children[j]
    return reward + discount * fmean(role_value(child, k, role, discount) for k in range(len(child.outcomes)))


def baseline(values, g, mode):
    others = values[:g] + values[g + 1 :]
    return {"mean": fmean(values), "rloo": fmean(others or values), "max": max(values), "raw": 0.0}[mode]


def expected_gradients(turns, team, mode="mean", discount=1.0, less=lambda node, j, role: 0.0, standardized=False):
    """
    The gradients of the mean over an agent's own completions of -A sum log pi, with siblings at a node or across the
    episodes of an item.
    """
    first = turns[0][0]
    size = sum(len(node.samples[node.roles[0]].texts) for node in turns[0] if node.tree == first.tree)
    for role in team.trained_roles:
        rows = []  # advantage, log-probability
        for nodes in turns:
            sets = {}
            for k, node in enumerate(nodes):
                if role not in node.prompts:
                    continue
                key = k if node.episode is None else node.tree
                by_completion = {}
                for j, index in enumerate(node.indices):
                    value = role_value(node, j, role, discount) - less(node, j, role)
                    by_completion.setdefault(index[list(node.prompts).index(role)], []).append(value)
                for g, values in sorted(by_completion.items()):
                    sets.setdefault(key, []).append((fmean(values), node.samples[role], g))
            for siblings in sets.values():
                values = [value for value, *_ in siblings]
                for g, (value, samples, k) in enumerate(siblings):
                    with team.activate(role) as agent:
                        log_p = log_probability(agent, samples.prompt_ids, samples.completion_ids[k])
                    if len(siblings) == 1 and mode != "raw":
                        advantage = 0.0
                    elif mode == "mean":  # the scale of a complete set
                        advantage = (size - 1) / size * (value - baseline(values, g, "rloo"))
                    else:
                        advantage = value - baseline(values, g, mode)
                    rows.append((advantage, log_p.sum()))
        if standardized:
            mean, std = fmean(a for a, _ in rows), pstdev(a for a, _ in rows)
            rows = [((a - mean) / std, log_p) for a, log_p in rows]
        if rows:
            (sum(-a * log_p for a, log_p in rows) / len(rows)).backward()
    return {name: x.grad for name, x in team.named_parameters() if x.grad is not None}


def nonzero(gradients):
    return {name: x for name, x in gradients.items() if x.abs().sum() > 0}
