"""The data type of the weights that are trained."""

from collections.abc import Iterable

import torch

from trl_multiagent.trainers.base.limited_arguments import LimitedArguments


def check_trained_weights(weights: Iterable[tuple[str, torch.nn.Parameter]], args: LimitedArguments) -> None:
    """
    Refuses trained weights that lose small updates. In bfloat16, a change of less than about 1/256 of a weight is rounded away. DeepSpeed
    in mixed precision has a float32 copy of the trained weights.

    Args:
        weights (`Iterable[tuple[str, torch.nn.Parameter]]`): The names and parameters of a module.
        args ([`LimitedArguments`]): The trainer's arguments.

    Raises:
        ValueError: a trained weight has 16 bits and the optimizer rounds to the nearest number, or the optimizer rounds
            stochastically and there is nothing to round.
    """
    low = {name: x for name, x in weights if x.requires_grad and x.dtype in (torch.bfloat16, torch.float16)}
    if args.rounds_stochastically and not low:
        raise ValueError(
            "`bf16_stochastic_round` in `optim_args` is for trained weights in bfloat16, but they are float32: load the model with "
            "`dtype='bfloat16'`, or remove it. LoRA adapters are always float32."
        )
    if args.rounds_stochastically:  # which torchao does for bfloat16 alone
        low = {name: x for name, x in low.items() if x.dtype == torch.float16}
    has_float32_copy = args.deepspeed_plugin is not None and (args.bf16 or args.fp16)
    if has_float32_copy or not low:
        return
    name, weight = next(iter(low.items()))
    raise ValueError(
        f"The trained weight {name!r} is {str(weight.dtype).removeprefix('torch.')}, in which small updates are lost: load the model with "
        "`dtype='float32'`, and set `bf16=True` to compute in bfloat16. Where memory forbids this, keep bfloat16 with "
        "`optim='adamw_torch_8bit'` and `optim_args='bf16_stochastic_round=True'`."
    )
