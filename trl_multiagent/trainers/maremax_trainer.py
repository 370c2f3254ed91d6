from trl_multiagent.trainers.magrpo_trainer import MAGRPOTrainer
from trl_multiagent.trainers.maremax_config import MAReMaxConfig


class MAReMaxTrainer(MAGRPOTrainer):
    """
    Trainer for Multi-Agent REINFORCE with group max (MAReMax).

    The baseline is the highest return in the sibling set, the completion's own included (a variant of
    [ReMax](https://huggingface.co/papers/2310.10505)). Everything else is as in [`MAGRPOTrainer`]; `args` is a
    [`MAReMaxConfig`].
    """

    _tag_names = ["trl", "trl-multiagent", "maremax"]
    _name = "MAReMax"
    _config_class = MAReMaxConfig
