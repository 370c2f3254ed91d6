"""
A task family in one file: a poet writes a line, a critic answers, and both are rewarded for the vowels they share.
"""

from dataclasses import dataclass

from trl_multiagent import FunctionEnvironment, Task
from trl_multiagent.environments.task import setting


TOPICS = ("rain", "snow", "wind", "night", "river", "stone")


@dataclass
class Poem:
    letters: str = setting("Letters that earn a reward.", "aeiou")
    style: str = setting("How the poet writes.", "plain", choices=("plain", "ornate"))

    def __post_init__(self):
        if not self.letters:
            raise ValueError("`poem.letters` is empty: give at least one letter.")


def make_environment(settings):
    poem = settings.sections["poem"]

    def shared_letters(completions, **columns):
        return [
            float(sum(letter in c["poet"] and letter in c["critic"] for letter in poem.letters)) for c in completions
        ]

    prompts = {"poet": f"Write a {poem.style} line about {{topic}}: ", "critic": "A word on {topic}: "}
    return FunctionEnvironment(prompts, shared_letters)


def load_datasets(settings):
    from datasets import Dataset

    return Dataset.from_dict({"topic": list(TOPICS)}), None


TASK = Task(make_environment, load_datasets, settings={"poem": Poem})
