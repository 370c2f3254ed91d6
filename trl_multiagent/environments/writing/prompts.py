"""The prompts of the writers. Neither sees what the other writes."""

SUMMARY, DETAIL = "summary", "detail"
BACKGROUND, METHOD = "background", "method"
WRITER = "writer"
ROLES = {"tldr": (SUMMARY, DETAIL), "arxiv": (BACKGROUND, METHOD)}
SPLIT = "[PARAGRAPH_SPLIT]"  # between the two texts of a single agent
UNSEEN = "You cannot see each other's texts."

_LINKED = "link the sentences with words such as however, therefore, first, although, for example"
_SHORT = "a short summary of this post, in one or two sentences. Name the facts that matter most"
_LONG = (
    "a longer summary of this post, two to three times as long as a short one of one or two sentences. Add details of the post that a "
    f"short one leaves out, use many different words, and {_LINKED}"
)
_WHY = f"the background of the work in this abstract and the reasons for it, in 130 to 140 words; {_LINKED}"
_HOW = f"the method of the work in this abstract and what follows from its results, in 170 to 190 words; {_LINKED}"
TASKS = {SUMMARY: _SHORT, DETAIL: _LONG, BACKGROUND: _WHY, METHOD: _HOW}
PARTNER = {SUMMARY: "a longer summary", DETAIL: "a short one", BACKGROUND: "the method", METHOD: "the background"}
RULES = "Use your own words, and write nothing that the text does not say. Answer with the summary alone."
ARXIV_RULES = "It is for an introduction, so explain the abstract in your own words and stay with its subject. Answer with the text alone."


def writer_prompt(source: str, role: str, kind: str) -> str:
    """Returns the prompt of one of two agents."""
    return f"Write {TASKS[role]}. Your partner writes {PARTNER[role]}. {UNSEEN} {_rules(kind)}\n\n{source}\n\nYour text:\n"


def single_prompt(source: str, kind: str) -> str:
    """Returns the prompt of a single agent, which writes both texts."""
    first, second = (TASKS[role] for role in ROLES[kind])
    return (
        f"Write two texts, and between them a line with {SPLIT} alone. The first is {first}. The second is {second}. {_rules(kind)}\n\n"
        f"{source}\n\nYour texts:\n"
    )


def brief_prompt(source: str, role: str) -> str:
    """Returns the prompt of any agent of the demo, whose model knows by the role what to write."""
    return f"{source}\n\n{role}:\n"


def split_texts(answer: str) -> tuple[str, str]:
    """Returns the two texts in the answer of a single agent. Without the line between them, the second is empty."""
    first, _, second = answer.partition(SPLIT)
    return first.strip(), second.strip()


def _rules(kind: str) -> str:
    return RULES if kind == "tldr" else ARXIV_RULES
