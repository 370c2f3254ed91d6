"""How agents sample."""

from dataclasses import dataclass

from trl_multiagent.limits import setting


# By keyword, so that a subclass decides what can be given by position
@dataclass(kw_only=True)
class SamplingOptions:
    """
    The settings of sampling, the same wherever agents sample.

    Args:
        max_completion_length (`int`, *optional*, defaults to `256`): Maximum length of a completion, in tokens.
        temperature (`float`, *optional*, defaults to `1.0`): Temperature.
        top_p (`float`, *optional*, defaults to `1.0`): Share of the probability that is sampled from.
        top_k (`int`, *optional*, defaults to `0`): Number of tokens that are sampled from; 0 for all.
        use_chat_template (`bool`, *optional*):
            Whether prompts and histories are rendered as chat messages. By default, they are for each agent whose tokenizer has a chat
            template.
    """

    max_completion_length: int = setting("Tokens of a completion at most.", 256, ge=1, le=1048576)
    temperature: float = setting("Temperature of the sampling.", 1.0, gt=0, le=1000)
    top_p: float = setting("Nucleus of the sampling.", 1.0, gt=0, le=1)
    top_k: int = setting("Most likely tokens that are sampled from; 0 for all.", 0, ge=0, le=1000000000)
    use_chat_template: bool | None = setting(
        "Chat messages for all (true) or no (false) agents; by default for those with a chat template."
    )
