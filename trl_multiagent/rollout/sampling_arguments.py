"""The arguments for sampling of `AgentTeam.collaborate` and the like."""

from typing import Any

from transformers import GenerationConfig

from trl_multiagent.limits import similar_name


# Arguments of `GenerationConfig` that would change the inputs or outputs of `generate`, and the alternatives
REFUSED = {
    "eos_token_id": "set the tokenizer's `eos_token`, or `stop_strings`",
    "min_length": "it would count a batch's padding; set `min_new_tokens`",
    "num_return_sequences": "pass an item several times for several episodes",
    "return_dict_in_generate": "episodes contain texts only",
    "stop_strings": "they are an argument of their own, by role",
}
RANGES = {"temperature": (0, 1e6), "top_p": (0, 1), "top_k": (0, 1e9)}
# Without these values, `generate` would use the model's own generation configuration
DEFAULTS = {"max_new_tokens": 256, "repetition_penalty": 1.0}
SAMPLING_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
SAMPLING = "temperature top_p top_k min_p top_h typical_p epsilon_cutoff eta_cutoff".split()
OTHER_NAMES = {"max_completion_length": "max_new_tokens", "max_tokens": "max_new_tokens", "n": "num_return_sequences"}


def sampling_arguments(generation_kwargs: dict[str, Any]) -> dict[str, Any]:
    """
    Checks arguments for sampling, which are fields of [`~transformers.GenerationConfig`], and adds the defaults: at
    most 256 tokens at temperature 1. `temperature=0` means greedy decoding.

    Raises:
        TypeError: An argument is unknown.
        ValueError: An argument has an impossible value, or cannot be used here.
    """
    fields = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    for name, value in generation_kwargs.items():
        if name in REFUSED:
            raise ValueError(f"`{name}` cannot be set here: {REFUSED[name]}.")
        if name not in fields:
            similar = OTHER_NAMES.get(name) or similar_name(name, fields)
            advice = f"did you mean `{similar}`?" if similar else "use a field of `transformers.GenerationConfig`."
            raise TypeError(f"Unknown argument `{name}={value!r}`: {advice}")
    for name, (minimum, maximum) in RANGES.items():
        value = generation_kwargs.get(name)
        if value is not None and not (isinstance(value, int | float) and minimum <= value <= maximum):
            raise ValueError(f"`{name}` is {value!r}; it must be a number from {minimum} to {maximum}.")
    arguments = {**DEFAULTS, **{name: value for name, value in generation_kwargs.items() if value is not None}}
    if generation_kwargs.get("temperature") == 0:
        if generation_kwargs.get("do_sample"):
            raise ValueError("`temperature=0` is greedy decoding, which `do_sample=True` contradicts: leave one out.")
        arguments = {name: value for name, value in arguments.items() if name not in SAMPLING} | {"do_sample": False}
    elif arguments.get("do_sample", True):
        arguments = {**SAMPLING_DEFAULTS, "do_sample": True, **arguments}
    GenerationConfig(**arguments)  # refuses impossible values
    return arguments


def sampling_of(settings: Any, max_new_tokens: int) -> dict[str, Any]:
    """Returns the [`sampling_arguments`] that the settings of an evaluation, a collection or a training give."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: value for name, value in vars(settings).items() if name in names and value is not None}
    return sampling_arguments({"max_new_tokens": max_new_tokens, "disable_compile": True, **given})
