"""The settings of sampling."""

from dataclasses import dataclass

from trl_multiagent.limits import setting


# By keyword, so that a subclass decides what can be given by position
@dataclass(kw_only=True)
class SamplingOptions:
    """
    The settings of sampling, the same wherever agents sample.

    Args:
        max_completion_length (`int`, *optional*, defaults to `256`): Largest number of tokens of a completion.
        temperature (`float`, *optional*, defaults to `1.0`): Temperature of the sampling.
        top_p (`float`, *optional*, defaults to `1.0`): Sample from the most likely tokens that together have this
            probability.
        top_k (`int`, *optional*, defaults to `0`): Sample from this number of the most likely tokens; 0 for all.
        use_chat_template (`bool`, *optional*): Whether prompts and histories are rendered as chat messages. By
            default, they are for each agent whose tokenizer has a chat template.
    """

    max_completion_length: int = setting(default=256, ge=1, le=1048576)
    temperature: float = setting(default=1.0, gt=0, le=1000)
    top_p: float = setting(default=1.0, gt=0, le=1)
    top_k: int = setting(default=0, ge=0, le=1000000000)
    use_chat_template: bool | None = setting()
