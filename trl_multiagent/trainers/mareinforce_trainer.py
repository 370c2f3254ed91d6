from trl_multiagent.trainers.magrpo_trainer import MAGRPOTrainer


class MAREINFORCETrainer(MAGRPOTrainer):
    """
    Trainer for Multi-Agent REINFORCE (MAREINFORCE).

    There is no baseline.
    Everything else is as in [`MAGRPOTrainer`]; `args` is a [`MAREINFORCEConfig`].
    """

    _tag_names = ["trl", "trl-multiagent", "mareinforce"]
    _name = "MAREINFORCE"
