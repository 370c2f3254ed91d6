from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl import DPOConfig

from trl_multiagent.trainers.base.team_config import TeamConfig


# The losses of TRL's DPO, and why some are none of a team
LOSS_TYPES = (
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
)
# Those that TRL has with another divergence than the reverse KL
F_DIVERGENCE_LOSS_TYPES = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
SORTING = "it sorts the log-ratios of a micro-batch, so it is no function of a pair's joint log-ratio"
REFUSED_LOSS_TYPES = {"aot": SORTING, "aot_unpaired": SORTING}


@dataclass
class MADPOConfig(TeamConfig, DPOConfig):
    r"""
    Configuration class for the [`MADPOTrainer`].

    This class includes only the parameters that are specific to MADPO training. For a full list of training arguments,
    please refer to [`TeamConfig`] (agents), [`~trl.DPOConfig`] and [`~transformers.TrainingArguments`].

    Parameters:
        reference_free (`bool`, *optional*, defaults to `False`):
            Whether to leave the reference policy out: log-ratios become log-probabilities.
        use_environment_step (`bool`, *optional*, defaults to `True`):
            Whether training on pairs that have rewards advances `env_step`, as if they were scored anew.
        environment_steps_per_pair (`int`, *optional*, defaults to `2`):
            By how much `env_step` advances per pair.
        num_turns (`int`, *optional*, defaults to `1`):
            Turns of the episodes that are played in an evaluation with an environment.
        max_completion_length (`int`, *optional*, defaults to `256`):
            Maximum length of the completions that are sampled in such an evaluation, in tokens.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of this sampling.
        top_p (`float`, *optional*, defaults to `1.0`):
            Top-p of this sampling.
        top_k (`int`, *optional*, defaults to `0`):
            Top-k of this sampling; 0 considers all tokens.
        use_chat_template (`bool`, *optional*):
            Whether the prompts of these episodes are chat messages. By default, they are for each agent whose tokenizer
            has a chat template. It does not apply to preferences, which are texts or messages themselves.

    > [!NOTE]
    > `remove_unused_columns` defaults to `False`.
    """

    free_on_resume: ClassVar[tuple[str, ...]] = (
        *TeamConfig.free_on_resume,
        "dataset_num_proc",
        "max_completion_length",
        "num_turns",
        "precompute_ref_batch_size",
        "temperature",
        "top_k",
        "top_p",
        "use_chat_template",
    )

    limits: ClassVar[dict[str, dict[str, Any]]] = {
        "truncation_mode": {"choices": ("keep_start",)},
        "beta": {"gt": 0, "le": 1000000},
        "label_smoothing": {"ge": 0, "lt": 0.5},
        "f_divergence_type": {"choices": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")},
        "f_alpha_divergence_coef": {"ge": -1000, "le": 1000},
        "discopop_tau": {"gt": 0, "le": 1000},
        "loss_weights": {"ge": 0, "le": 1000000},
        "max_length": {"ge": 1},
        "pad_to_multiple_of": {"ge": 1, "le": 65536},
        "precompute_ref_batch_size": {"ge": 1, "needs": "precompute_ref_log_probs"},
        "ref_model_mixup_alpha": {"ge": 0, "le": 1, "needs": "sync_ref_model"},
        "ref_model_sync_steps": {"ge": 1, "needs": "sync_ref_model"},
        "dataset_num_proc": {"ge": 1, "le": 1024},
        "label_smoothing_factor": {"refused": "the loss has no labels; see `label_smoothing`"},
        "environment_steps_per_pair": {"ge": 1},
        "num_turns": {"ge": 1},
        "max_completion_length": {"ge": 1, "le": 1048576},
        "temperature": {"gt": 0, "le": 1000},
        "top_p": {"gt": 0, "le": 1},
        "top_k": {"ge": 0, "le": 1000000000},
    }

    reference_free: bool = field(default=False, metadata={"help": "Whether to leave the reference policy out."})
    use_environment_step: bool = field(
        default=True, metadata={"help": "Whether training on pairs that have rewards advances `env_step`."}
    )
    environment_steps_per_pair: int = field(default=2, metadata={"help": "By how much `env_step` advances per pair."})
    num_turns: int = field(default=1, metadata={"help": "Number of turns of an episode in evaluation."})
    max_completion_length: int = field(
        default=256, metadata={"help": "Maximum number of tokens of a completion in evaluation."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature in evaluation."})
    top_p: float = field(default=1.0, metadata={"help": "Top-p of the sampling in evaluation."})
    top_k: int = field(default=0, metadata={"help": "Top-k of the sampling in evaluation; 0 considers all tokens."})
    use_chat_template: bool | None = field(
        default=None,
        metadata={
            "help": "Chat messages for all (True) or no (False) agents in evaluation; by default for those with a chat "
            "template."
        },
    )
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Must be False: the columns of the roles are found by their names."}
    )

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, str):
            self.loss_type: list[str] = [self.loss_type]
        self._check_values()
        super().__post_init__()

    def _check_values(self) -> None:
        if not self.loss_type:
            raise ValueError("`loss_type` is empty, it must name at least one loss.")
        for loss_type in self.loss_type:
            if loss_type in REFUSED_LOSS_TYPES:
                raise ValueError(
                    f"`loss_type` {loss_type!r} is not supported for a team: {REFUSED_LOSS_TYPES[loss_type]}."
                )
            if loss_type not in LOSS_TYPES:
                raise ValueError(f"`loss_type` is {loss_type!r}, it must be one of {', '.join(LOSS_TYPES)}.")
        unsupported: dict[str, tuple[Any, str]] = {
            "ld_alpha": (None, "it compares the lengths of two single answers, and a joint answer has several"),
            "padding_free": (False, "TRL's DPOTrainer does not support it either"),
            "use_liger_kernel": (False, "it replaces the forward that computes the log-probabilities"),
            "activation_offloading": (False, "it expects a single model"),
            "pad_token": (None, "every agent has a tokenizer of its own, set the token there"),
            "remove_unused_columns": (False, "the columns of the roles are found by their names"),
        }
        for name, (value, reason) in unsupported.items():
            if getattr(self, name) != value:
                raise ValueError(f"`{name}={getattr(self, name)}` is not supported by MADPO: {reason}.")
        if self.f_divergence_type != "reverse_kl" and not {*self.loss_type} <= F_DIVERGENCE_LOSS_TYPES:
            raise ValueError(
                f"`f_divergence_type={self.f_divergence_type!r}` goes with the losses {', '.join(sorted(F_DIVERGENCE_LOSS_TYPES))}, but "
                f"`loss_type` is {', '.join(self.loss_type)}."
            )
        if "exo_pair" in self.loss_type and self.label_smoothing == 0:
            raise ValueError("`loss_type` 'exo_pair' needs a `label_smoothing` greater than 0, such as 0.001.")
        if self.use_weighting and "sft" in self.loss_type:
            raise ValueError("`use_weighting` applies to pairs, but the 'sft' loss has none: leave one of them out.")
        if self.reference_free:
            needing = {"precompute_ref_log_probs": False, "sync_ref_model": False, "f_divergence_type": "reverse_kl"}
            for name, off in needing.items():
                if getattr(self, name) != off:
                    raise ValueError(
                        f"`{name}={getattr(self, name)!r}` needs a reference policy, but `reference_free` is true."
                    )
        if self.precompute_ref_log_probs and self.sync_ref_model:
            raise ValueError(
                "`sync_ref_model` changes the reference policy, whose log-probabilities `precompute_ref_log_probs` "
                "computes only once: set one of them to False."
            )
