"""The prompts of the writers. Neither sees what the other writes."""

from collections.abc import Sequence


SUMMARY, DETAIL, BACKGROUND, METHOD, WRITER = "summary", "detail", "background", "method", "writer"
ROLES = {"tldr": (SUMMARY, DETAIL), "arxiv": (BACKGROUND, METHOD)}
SPLIT = "[PARAGRAPH_SPLIT]"  # between the two texts of a single agent. Without it, the second is empty
UNSEEN = "You cannot see each other's texts."
_LINKED = "link the sentences with words such as however, therefore, first, although, for example"
TASKS = {
    SUMMARY: "a short summary of this post, in one or two sentences. Name the facts that matter most",
    DETAIL: "a longer summary of this post, two to three times as long as a short one of one or two sentences. Add details of the post that "
    f"a short one leaves out, use many different words, and {_LINKED}",
    BACKGROUND: f"the background of the work in this abstract and the reasons for it, in 130 to 140 words; {_LINKED}",
    METHOD: f"the method of the work in this abstract and what follows from its results, in 170 to 190 words; {_LINKED}",
}
RULES = {
    "tldr": "Use your own words, and write nothing that the post does not say. Answer with the summary alone.",
    "arxiv": "Use your own words, and stay with the subject of the abstract. Answer with the text alone.",
}


def first_prompts(source: str, kind: str, roles: Sequence[str], brief: bool) -> dict[str, str]:
    """Returns the prompts of all agents. The `brief` ones of the demo leave to its model what a role writes."""
    if brief:
        return {role: f"{source}\n\n{role}:\n" for role in roles}
    first, second = (TASKS[role] for role in ROLES[kind])
    works = {
        role: f"Write {TASKS[role]}. Your partner writes the part `{other}`. {UNSEEN}"
        for role, other in (ROLES[kind], ROLES[kind][::-1])
    }
    works[WRITER] = f"Write two texts, with a line {SPLIT} between them. One is {first}. The other is {second}."
    return {role: f"{works[role]} {RULES[kind]}\n\n{source}\n\nYour answer:\n" for role in roles}
