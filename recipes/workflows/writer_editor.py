"""
A writer drafts a sentence from three words. The editor sees only the draft and writes the final text, for which both
are rewarded.

    trl-multiagent train magrpo --config writer_editor
"""

import re

from trl_multiagent import workflow
from trl_multiagent.configs.recipes.workflows.demos import careless_writing, demo_task, three_words


SENTENCE = re.compile(r"The (\w+) (\w+) in the (\w+)\.")


@workflow(roles=("writer", "editor"), metric_ranges={"reward": (0.0, 1.0)})
async def writer_editor(item, agents):
    words = [item["noun"], item["verb"], item["place"]]
    draft = await agents.writer(f"Draft a sentence with the words {', '.join(words)}:\n")
    text = await agents.editor(
        "Write this draft as one sentence, with a capital and a full stop, and nothing else.\n"
        f"Draft: {draft}\nSentence:\n"
    )
    sentence = SENTENCE.fullmatch(text.strip())
    kept = sum(map(str.__eq__, sentence.groups(), words)) if sentence else 0  # words in their places
    agents.log("passed", kept == 3)
    return kept / 3


TASK = demo_task(writer_editor, three_words, careless_writing, steps=300)
