from trl_multiagent.trainers.magrpo_trainer import MAGRPOTrainer


class MARLOOTrainer(MAGRPOTrainer):
    """
    Trainer for Multi-Agent REINFORCE Leave-One-Out (MARLOO).

    A completion's baseline is the mean return of the other siblings ([RLOO](https://huggingface.co/papers/2402.14740)).
    Everything else is as in [`MAGRPOTrainer`]; `args` is a [`MARLOOConfig`].
    """

    _tag_names = ["trl", "trl-multiagent", "marloo"]
    _name = "MARLOO"
