"""
What the systems of `steps.py --model smollm2` are given: the questions and the reward of `hidden` of recipes/real.
Of one agent alone, it is a single question.
"""

import re

from benchmarks.comlrl.task import peak_memory, step_arguments


SPEAKER = "A {word} is hidden in a box. Write a short message that tells your friend what is in the box."
DECIDER = "Your friend says: {message}\nWhat is in the box: {options}? Answer with one word."
ALONE = "A {word} is hidden in a box. What is in the box: {options}? Answer with one word."
ADAPTER = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


def is_right(word: str, options: str, answer: str) -> float:
    """Whether an answer names the word and no other option."""
    return float({*options.split(", ")} & {*re.findall("[a-z]+", answer.lower())} == {word})


def arguments(settings: dict) -> dict:
    """The arguments that ours and TRL's trainer share."""
    return {**step_arguments(settings), "temperature": settings["temperature"], "bf16": settings["bf16"]}


def libraries() -> dict[str, float]:
    """What a step reports beside its times: called before a model is loaded."""
    return {"libraries_mb": peak_memory()}
