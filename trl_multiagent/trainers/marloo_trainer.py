from trl_multiagent.trainers.magrpo_trainer import MAGRPOTrainer
from trl_multiagent.trainers.marloo_config import MARLOOConfig


class MARLOOTrainer(MAGRPOTrainer):
    """
    Trainer for Multi-Agent REINFORCE Leave-One-Out (MARLOO).

    The baseline of a completion is the mean return of its siblings, without its own
    ([RLOO](https://huggingface.co/papers/2402.14740)). Everything else is as in [`MAGRPOTrainer`]; `args` is a
    [`MARLOOConfig`].
    """

    _tag_names = ["trl", "trl-multiagent", "marloo"]
    _name = "MARLOO"
    _config_class = MARLOOConfig
