from trl_multiagent.trainers.magrpo_trainer import MAGRPOTrainer


class MAReMaxTrainer(MAGRPOTrainer):
    """
    Trainer for Multi-Agent REINFORCE with group max (MAReMax).

    A completion's baseline is the highest return of its siblings ([ReMax](https://huggingface.co/papers/2310.10505)).
    Everything else is as in [`MAGRPOTrainer`]; `args` is a [`MAReMaxConfig`].
    """

    _tag_names = ["trl", "trl-multiagent", "maremax"]
    _name = "MAReMax"
