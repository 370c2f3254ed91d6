"""Options of sampling, and of the part of its past turns that an agent sees."""

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
            default, they are for each agent with a chat template.
    """

    max_completion_length: int = setting(default=256, ge=1)
    temperature: float = setting(default=1.0, gt=0)
    top_p: float = setting(default=1.0, gt=0, le=1)
    top_k: int = setting(default=0, ge=0)
    use_chat_template: bool | None = setting()


@dataclass
class HistoryOptions:
    """
    The part of its past turns that an agent sees. By default it sees all of its own prompts and responses. The
    settings of a training and of an evaluation are such options, too.

    Args:
        memory_mode (`str`, *optional*): `"full"` or `"memoryful"`: all past turns. `"last"`: the last one. The default
            is `"full"`; it is `"last"` if one of the next three options is given, as in CoMLRL.
        original_prompt (`bool`, *optional*):
            Whether the agent sees the prompt of its first turn, whatever the `memory_mode`. By default it does unless
            `previous_prompts` is `False`, or the `memory_mode` is given and leaves the first turn out.
        previous_prompts (`bool`, *optional*): Whether the agent sees the prompts of the turns that `memory_mode`
            selects. By default it does if `memory_mode` is given. If only other options are given, it sees no past
            prompt but the first one.
        previous_response (`bool`, *optional*):
            Whether the agent sees its responses in the turns that `memory_mode` selects. By default it does.
        max_history_length (`int`, *optional*): Largest number of tokens that the past turns add to a prompt. The
            oldest turns are left out until the rest fits; the new prompt is never shortened. A training logs the
            number of dropped turns as `agents/<role>/history/dropped_turns`.
    """

    memory_mode: str | None = setting(choices=("full", "memoryful", "last"))
    original_prompt: bool | None = setting()
    previous_prompts: bool | None = setting()
    previous_response: bool | None = setting()
    max_history_length: int | None = setting(ge=0)

    def shown(self, num_turns: int, dropped: int = 0) -> list[tuple[bool, bool]]:
        """
        Selects the parts of the past turns that the agent sees: for each turn, oldest first, whether its prompt and
        its response are shown. The oldest `dropped` of the visible turns are left out. With `original_prompt`, the
        first prompt is left out last.
        """
        given = (self.original_prompt, self.previous_prompts, self.previous_response) != (None, None, None)
        only_flags = self.memory_mode is None and given
        mode = self.memory_mode or ("last" if given else "full")
        later_prompts = not only_flags if self.previous_prompts is None else self.previous_prompts
        first_prompt = self.original_prompt  # None: as the prompts of later turns
        if first_prompt is None and only_flags:
            first_prompt = self.previous_prompts is not False
        parts = []
        for turn in range(num_turns):
            selected = mode != "last" or turn == num_turns - 1
            prompt = first_prompt if turn == 0 and first_prompt is not None else selected and later_prompts
            parts.append((prompt, selected and self.previous_response is not False))
        visible = [turn for turn, part in enumerate(parts) if any(part)]
        for turn in visible[:dropped]:
            parts[turn] = (turn == 0 and self.original_prompt is True and dropped <= len(visible), False)
        return parts


FULL_HISTORY = HistoryOptions()
