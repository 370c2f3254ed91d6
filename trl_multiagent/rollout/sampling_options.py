"""How agents sample."""

from dataclasses import dataclass

from trl_multiagent.limits import setting


# By keyword, so that a subclass decides what can be given by position
@dataclass(kw_only=True)
class SamplingOptions:
    """
    The settings of sampling, the same wherever agents sample.

    Args:
        max_completion_length (`int`, *optional*, defaults to `256`): Tokens of a completion at most.
        temperature (`float`, *optional*, defaults to `1.0`): Temperature of the sampling.
        top_p (`float`, *optional*, defaults to `1.0`): Share of the probability that is sampled from, that of the most likely tokens.
        top_k (`int`, *optional*, defaults to `0`): Number of the most likely tokens that are sampled from; 0 for all.
        use_chat_template (`bool`, *optional*):
            Whether prompts and histories are rendered as chat messages. By default, they are for each agent whose tokenizer has a chat
            template.
    """

    max_completion_length: int = setting(default=256, ge=1, le=1048576)
    temperature: float = setting(default=1.0, gt=0, le=1000)
    top_p: float = setting(default=1.0, gt=0, le=1)
    top_k: int = setting(default=0, ge=0, le=1000000000)
    use_chat_template: bool | None = setting()
