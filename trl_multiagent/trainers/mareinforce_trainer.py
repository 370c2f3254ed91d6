from trl_multiagent.trainers.magrpo_trainer import MAGRPOTrainer
from trl_multiagent.trainers.mareinforce_config import MAREINFORCEConfig


class MAREINFORCETrainer(MAGRPOTrainer):
    """
    Trainer for Multi-Agent REINFORCE (MAREINFORCE).

    The advantage of a completion is its return, without a baseline. Everything else is as in [`MAGRPOTrainer`]; `args`
    is a [`MAREINFORCEConfig`].
    """

    _tag_names = ["trl", "trl-multiagent", "mareinforce"]
    _name = "MAREINFORCE"
    _config_class = MAREINFORCEConfig
