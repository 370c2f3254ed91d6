import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from trl import GRPOConfig

from trl_multiagent.environments.base import MAX_TURNS, Environment
from trl_multiagent.limits import check_arguments, setting, short
from trl_multiagent.models.reasoning import check_template_kwargs
from trl_multiagent.rollout.options import HistoryOptions, SamplingOptions
from trl_multiagent.rollout.sampler import check_stop_strings
from trl_multiagent.trainers.base.team_config import TeamConfig


# The normalizer of these losses does not depend on how a batch is split into micro-batches, unlike `bnpo`'s
LOSS_TYPES = ("luspo", "dr_grpo", "grpo", "dapo")
# Names that `generation_kwargs` must not have: the trainer has arguments for them, or sets them itself
RESERVED = """
    max_new_tokens max_length num_return_sequences temperature top_p top_k min_p repetition_penalty
    cache_implementation stop_strings do_sample num_beams eos_token_id pad_token_id bos_token_id
    return_dict_in_generate output_scores output_logits output_attentions output_hidden_states
""".split()
RESERVED_WITH_VLLM = "seed n stop include_stop_str_in_output stop_token_ids ignore_eos".split()
SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

SCALES = ("none", False, "group", "batch", True)  # of TRL; a team takes the first two


@dataclass
class RolloutConfig(SamplingOptions, HistoryOptions, TeamConfig, GRPOConfig):
    r"""
    Arguments of the trainers that learn from rollout trees.

    For a full list of training arguments, please refer to [`TeamConfig`], [`~rollout.options.HistoryOptions`]
    (the visible part of past turns), [`~rollout.options.SamplingOptions`], [`~trl.GRPOConfig`] and
    [`~transformers.TrainingArguments`].

    A *row* is one completion of every agent: the k-th completions of all agents at a node form row k. If no branch
    ends early, the rollout tree of an item has `rows_per_item` rows.

    Parameters:
        items_per_device (`int`, *optional*): Number of items per device and optimizer step, each with its whole
            rollout tree. If not set, it is the number of whole trees that `per_device_train_batch_size *
            gradient_accumulation_steps` rows hold (8 of the former by default), and at least 1. An optimizer step
            always uses the whole batch.
        per_device_train_batch_size (`int` or `str`, *optional*, defaults to `"auto"`): Number of rows of one forward
            pass of the update, which changes memory and speed, but not the update if `items_per_device` is set. With
            `"auto"`, it is chosen at the first step: as many as fit into the memory of the device, with a fifth of it
            left free, see [`~trainers.base.memory.choose_rows`]. If the memory runs out nevertheless, it is halved,
            and the step runs again.
        gradient_checkpointing (`bool`, *optional*): Whether activations are computed again in the backward pass, to
            save memory. By default, they are if the rows would not fit otherwise.
        num_turns (`int`, *optional*): Largest number of turns of an episode, which is the depth of the rollout tree.
            By default 1; episodes of a workflow go on until it ends, for at most its `max_turns`.
        joint_mode (`str`, *optional*, defaults to `"align"`):
            How the completions of a node form joint actions: `"align"` pairs the g-th completions of all agents,
            `"cross"` takes their Cartesian product. `"aligned"` and `"crossed"` are accepted.
        discount (`float`, *optional*, defaults to `1.0`): Factor of the next turn's return in the return of a joint
            action.
        early_termination_threshold (`float`, *optional*):
            A node becomes a leaf if its mean processed reward is strictly greater. With `None`, no branch ends early.
        branching (`str`, *optional*, defaults to `"tree"`): `"tree"`: every joint action of a node is continued, or
            with `handoff` one of them. `"episodes"`: `num_generations` independent episodes per item, as GRPO with
            several turns does elsewhere. Completions of one turn are compared across the episodes.
        handoff (`str`, *optional*): Which joint actions of a node are continued in the next turn. `None` continues all
            of them (a tree). `"random"` continues one that is drawn uniformly, `"best"` the one with the highest
            reward (a chain).
        reward_scale (`float`, *optional*, defaults to `1.0`): Factor applied to every reward.
        reward_shift (`float`, *optional*, defaults to `0.0`): Added to every reward after `reward_scale`.
        num_agents (`int`, *optional*): Number of agents. It must match the environment's roles, and is needed only to
            compute the size of a `"cross"` tree of several turns.
        max_joint_actions (`int`, *optional*, defaults to `10000`):
            Largest rollout tree of one item, in joint actions. A configuration with larger trees is refused.
        generation_token_budget (`int`, *optional*, defaults to `262144`): Upper bound of prompt and completion tokens
            in one `generate` call. A turn of the trees that needs more is generated in several calls. With `None`, a
            turn is never split. Has no effect with vLLM.
        stop_strings (`dict[str, list[str]]`, *optional*): Strings that end a completion of a role, such as `{"agent":
            ["</tool_call>"]}`. The completion keeps the string.
        vllm_server_base_urls (`dict[str, str]`, *optional*): With `vllm_mode="server"`, the URL of each role's vLLM
            server. If the agents share one model or one base, TRL's `vllm_server_base_url`, or `vllm_server_host` and
            `vllm_server_port`, are enough. The weights are sent through one port per model: `vllm_group_port` and the
            following ones.
        vllm_weight_transfer (`str`, *optional*, defaults to `"nccl"`): How vLLM servers receive the weights of full
            models: `"nccl"`, or `"files"` in `vllm_adapter_dir`, for any device. Adapters are always sent as files.
        vllm_adapter_dir (`str`, *optional*): Folder through which vLLM receives adapters, and with
            `vllm_weight_transfer="files"` whole models. A server must have access to it under the same path. Defaults
            to the output folder, or for engines in the training processes to memory, if there is room. What is written
            there is removed when the run ends.
        rollouts_ahead (`int`, *optional*, defaults to `0`): With 1, the completions of the next step are sampled while
            the update of this one is computed, see [`~trainers.base.ahead`]. The policy that samples is always one
            step old, except in the first step, and each loss is multiplied by the bounded ratio of the two policies,
            as with vLLM.
        trace_steps (`int`, *optional*): Writes the rollouts to `trace/` in the output folder, one file per process and
            this many steps. A row holds one joint action, see [`~rollout.trace`]. By default, no trace is written.
        trace_max_files (`int`, *optional*, defaults to `100`): Number of files that are kept per process; the oldest
            are deleted.
        on_cliff (`str`, *optional*): What happens when the reward of an evaluation drops by `cliff_drop`: `"stop"`
            ends the training, `"rollback"` also takes the team of the best checkpoint, for which it sets
            `load_best_model_at_end`. By default, there is only a warning.
        cliff_drop (`float`, *optional*, defaults to `0.3`): It is a drop if
            an evaluation loses this share of the best reward so far.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`]:
    > - `loss_type`: Defaults to `"luspo"`, the sum over tokens of -A log pi, averaged over rows.
    > - `scale_rewards`: Defaults to `"none"`: advantages are not divided by a standard deviation of rewards.
    > - `num_generations`: Defaults to `4`, `num_generations_eval` to `1`.
    > - `per_device_eval_batch_size`: Defaults to `items_per_device * num_generations`, whole items.
    > - `bf16`: Defaults to `True` where the hardware is quicker with it, else `False`.
    > - `disable_dropout`: Defaults to `True`, because the completions are sampled without dropout.
    """

    free_on_resume: ClassVar[tuple[str, ...]] = (
        *TeamConfig.free_on_resume,
        *"""
            cache_implementation ds3_gather_for_generation generation_batch_size generation_token_budget
            max_joint_actions num_agents num_completions_to_print num_generations_eval on_cliff cliff_drop
            steps_per_generation trace_ vllm_adapter_dir vllm_enable_ vllm_g vllm_max_ vllm_mode vllm_server_
            vllm_tensor_ vllm_weight_
        """.split(),
    )

    unsupported: ClassVar[list[str]] = """
        train_sampling_strategy length_column_name prediction_loss_only include_num_input_tokens_seen
        eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
        batch_eval_metrics
    """.split()

    items_per_device: int | None = setting(ge=1)
    per_device_train_batch_size: int | str | None = setting(default="auto", gt=0, choices=("auto",))
    gradient_checkpointing: bool | None = setting()
    num_turns: int = setting(ge=1, le=1000)  # not given: see `__post_init__`
    joint_mode: str = setting(default="align", choices=("align", "cross", "aligned", "crossed"))
    discount: float = setting(default=1.0, ge=0, le=1)
    early_termination_threshold: float | None = setting()
    branching: str = setting(default="tree", choices=("tree", "episodes"))
    handoff: str | None = setting(choices=("random", "best"))
    reward_scale: float = setting(default=1.0, ne=0)
    reward_shift: float = setting(default=0.0)
    reward_none: str = setting(
        "Joint actions that no reward function scores: 'error', or 'drop', which leaves them out of the baseline and "
        "the loss, and logs their share as `turn_{k}/reward_none`.",
        "error",
        choices=("error", "drop"),
    )
    num_agents: int | None = setting(ge=1, le=1000)
    max_joint_actions: int = setting(default=10000, ge=1)
    generation_token_budget: int | None = setting(default=262144, ge=1)
    stop_strings: dict[str, list[Any]] | None = setting()
    vllm_server_base_urls: dict[str, str] | None = setting()
    vllm_weight_transfer: str = setting(default="nccl", choices=("nccl", "files"))
    vllm_adapter_dir: str | None = setting()
    rollouts_ahead: int = setting(default=0, ge=0, le=1)
    trace_steps: int | None = setting(ge=1)
    trace_max_files: int = setting(default=100, ge=1)
    on_cliff: str | None = setting(choices=("stop", "rollback"))
    cliff_drop: float = setting(default=0.3, gt=0)
    num_generations: int = setting("Completions that each agent samples at a node, G in the formulas.", 4, ge=1)
    per_device_eval_batch_size: int | None = setting(
        "Episodes that an evaluation plays at once; by default as many as the first turn of a step has completions.",
        ge=1,
    )
    num_generations_eval: int = setting("Independent episodes per item in evaluation.", 1, ge=1)
    loss_type: str = setting(f"One of {', '.join(LOSS_TYPES)}.", "luspo", choices=LOSS_TYPES)
    scale_rewards: str = setting("Only 'none'; see `advantage_normalization`.", "none", choices=SCALES)
    max_completion_length: int = setting("Maximum number of tokens of a completion.", 512, ge=1)
    # Arguments of TRL that it checks only when it trains, or never
    importance_sampling_level: str = setting("Unit of a probability ratio.", "token", choices=("token", "sequence"))
    vllm_mode: str = setting("Engines in the trainer, or servers.", "colocate", choices=("colocate", "server"))
    vllm_importance_sampling_mode: str = setting("How ratios are bounded.", "sequence_mask", choices=SAMPLING_MODES)

    def __post_init__(self) -> None:
        if str(self.per_device_train_batch_size).isdigit():  # `HfArgumentParser` gives a text
            self.per_device_train_batch_size = int(str(self.per_device_train_batch_size))
        check_arguments(self)
        if self.scale_rewards not in SCALES[:2]:
            raise ValueError(
                f"`scale_rewards` is {self.scale_rewards!r}; it must be 'none': `advantage_normalization=True` "
                "divides advantages by their standard deviation."
            )
        self.has_num_turns = self.num_turns is not None
        if self.num_turns is None:  # an upper bound for the size of a batch, until `fit` knows the environment
            self.num_turns = MAX_TURNS if self.branching == "episodes" else 1
        self.joint_mode = self.joint_mode.removesuffix("ed")
        if self.on_cliff == "rollback":
            self.load_best_model_at_end = True
            if self.metric_for_best_model is None:
                self.metric_for_best_model: str | None = "reward"
        self.chooses_rows = self.per_device_train_batch_size in (None, "auto")
        is_open = self.activation_checkpointing is None and self.gradient_checkpointing is None
        self.chooses_checkpointing = is_open and not (
            self.torch_compile or self.torch_compile_backend or self.torch_compile_mode
        )
        if is_open:
            self.activation_checkpointing: bool | None = self.chooses_checkpointing  # until it is chosen
        self._check_values()
        self._plan_batch()
        # GRPOConfig wants two rows at least, and whole groups of `num_generations` completions. A batch here consists
        # of whole trees, whatever a forward has. With a forward as one group, GRPOConfig's checks pass
        given = self.num_generations, self.per_device_train_batch_size
        self.num_generations = self.per_device_train_batch_size = max(2, self.rows_per_forward)
        super().__post_init__()
        self.num_generations, self.per_device_train_batch_size = given
        if self.zero_stage == 3 and self.world_size > 1 and not self.ds3_gather_for_generation:
            raise ValueError(
                "`ds3_gather_for_generation=False` makes every forward pass of the generation a collective operation, "
                "but rollout trees differ between ranks, which would deadlock. Leave it True: every device then holds "
                "the weights of the agent that generates."
            )
        needs_metric = self.save_strategy == "best" or self.metric_for_best_model is not None
        if needs_metric and self.metric_for_best_model in (None, "loss", "eval_loss"):  # transformers' default is loss
            raise ValueError(
                "`load_best_model_at_end`, `save_strategy: best` and `lr_scheduler_type: "
                f"{self.lr_scheduler_type.value}` need a `metric_for_best_model`, such as 'reward': an evaluation has "
                "no loss."
            )
        self._check_generation_kwargs()
        if self.use_vllm:
            self._check_vllm()
        if self.rollouts_ahead:
            from trl_multiagent.trainers.base.ahead import check_ahead

            check_ahead(self)

    def fit(self, environment: Environment) -> None:
        """
        Sets `num_turns` to what an environment plays. Raises `ValueError` if it cannot play so many turns, or if
        `stop_strings` are not those of its roles.
        """
        check_stop_strings(self.stop_strings, environment.roles)
        given = self.num_turns if self.has_num_turns else None
        self.num_turns = environment.check_turns(given, self.branching == "episodes")

    def steps_per_epoch(self, num_rows: int) -> int:
        """Returns the number of optimizer steps in one pass over a training dataset with this many rows."""
        return num_rows // (self.items_per_device * self.world_size) * self.num_iterations

    @property
    def num_episodes(self) -> int | None:
        """The number of episodes per item; `None` for trees."""
        return self.num_generations if self.branching == "episodes" else None

    @property
    def completions_per_node(self) -> int:
        """The number of completions of each agent at a node: G, or 1 in episodes."""
        return 1 if self.branching == "episodes" else self.num_generations

    @property
    def joint_actions_per_node(self) -> int:
        """The number of joint actions of one node: G (align), G^N (cross), or 1 in episodes."""
        if self.joint_mode == "align" or self.num_agents == 1:
            return self.completions_per_node
        if self.num_agents is None:
            raise ValueError("`joint_mode='cross'` with several turns needs `num_agents` for the size of the tree.")
        return self.num_generations**self.num_agents

    @property
    def nodes_per_turn(self) -> list[int]:
        """The number of nodes of one item's tree or episodes at each turn, if no branch ends early."""
        if self.branching == "episodes":
            return [self.num_generations] * self.num_turns
        if self.num_turns == 1 or self.handoff is not None:
            return [1] * self.num_turns
        return [self.joint_actions_per_node**turn for turn in range(self.num_turns)]

    @property
    def rows_per_item(self) -> int:
        """The number of rows (completions of each agent) of one item's tree, if no branch ends early."""
        return sum(self.nodes_per_turn) * self.completions_per_node

    @property
    def rows_per_device(self) -> int:
        """The number of rows of one device in an optimizer step, if no branch ends early."""
        return cast(int, self.items_per_device) * self.rows_per_item

    @property
    def rows_per_forward(self) -> int:
        """The number of rows of one forward pass of the update; until it is chosen, the rows of a step."""
        return cast(int, self.per_device_train_batch_size)

    def set_rows(self, rows: int, checkpoints: bool) -> None:
        """Sets what was left open of the rows of a forward and of checkpointing."""
        if self.chooses_rows:
            self.per_device_train_batch_size = rows
        if self.chooses_checkpointing:
            self.activation_checkpointing = self.gradient_checkpointing = checkpoints

    def check_tree_size(self, num_agents: int | None) -> None:
        """
        Raises a `ValueError` if an item's rollout tree has more than `max_joint_actions` joint actions.
        """
        # A node has G^N (cross) or G (align) joint actions. In a tree, each opens a node of the next turn; a chain has
        # one node per turn
        exponent = (num_agents or 1) if self.joint_mode == "cross" else 1
        is_tree = self.handoff is None and self.branching == "tree"
        exponents = [exponent * turn if is_tree else exponent for turn in range(1, self.num_turns + 1)]
        # Larger powers are not computed, because they may have millions of digits
        if sum(self.num_generations ** min(x, 64) for x in exponents) > self.max_joint_actions:
            raise ValueError(
                f"the rollout tree of an item is too large: it has more than {self.max_joint_actions} joint actions, "
                "`max_joint_actions`. Lower `num_generations` or `num_turns`, set `handoff`, or raise "
                "`max_joint_actions`."
            )

    def _check_values(self) -> None:
        """Checks the size of the tree, and arguments that depend on each other."""
        self.check_tree_size(self.num_agents)
        if self.branching == "episodes" and (self.handoff is not None or self.joint_mode == "cross"):
            raise ValueError(
                "`branching: episodes` plays independent episodes: it cannot be combined with `handoff` or "
                "`joint_mode: cross`."
            )
        if self.on_cliff == "rollback" and self.save_strategy == "no":
            raise ValueError("`on_cliff: rollback` needs checkpoints to go back to: set `save_strategy`.")
        if self.on_cliff is not None and self.eval_strategy == "no":
            raise ValueError("`on_cliff` looks at the reward of evaluations: set `eval_strategy`.")
        saves_steps = self.load_best_model_at_end and self.save_strategy == "steps"
        if saves_steps and self.num_iterations > 1 and self.save_steps % self.num_iterations != 0:
            raise ValueError(
                f"`save_steps` is {self.save_steps}; with `load_best_model_at_end` it must be a multiple of "
                f"`num_iterations`, {self.num_iterations}, because checkpoints are saved between batches."
            )

    def _check_generation_kwargs(self) -> None:
        if not isinstance(self.generation_kwargs, dict | None):
            raise ValueError(f"`generation_kwargs` is {short(self.generation_kwargs)}; it must be a mapping.")
        if self.chat_template_kwargs is not None:
            check_template_kwargs("`chat_template_kwargs`", self.chat_template_kwargs)
        kwargs = self.generation_kwargs or {}
        for name in (*RESERVED, *(RESERVED_WITH_VLLM if self.use_vllm else ())):
            if name in kwargs and (name, kwargs[name]) != ("do_sample", True):
                raise ValueError(f"`generation_kwargs` must not set {name!r}, which other arguments decide.")
        if not self.use_vllm:
            from trl_multiagent.rollout.sampling_arguments import sampling_arguments

            sampling_arguments(kwargs)

    def _check_vllm(self) -> None:
        if self.devices is not None:
            raise ValueError(
                "`devices` cannot be combined with vLLM: its engines would all be on the first GPU. Leave one out."
            )
        if self.vllm_max_model_length is not None and self.vllm_max_model_length <= self.max_completion_length:
            raise ValueError(
                f"`vllm_max_model_length` is {self.vllm_max_model_length}: no room for a prompt before the "
                f"`max_completion_length` of {self.max_completion_length} tokens. Raise the former or lower the "
                "latter."
            )

    def _plan_batch(self) -> None:
        """
        Derives `items_per_device`, if it is not set. A call of `training_step` runs all forwards of an optimizer step,
        so for `Trainer` there is no accumulation.
        """
        rows = (8 if self.chooses_rows else self.rows_per_forward) * self.gradient_accumulation_steps
        if self.items_per_device is None:
            if self.gradient_accumulation_steps > 1 and rows % self.rows_per_item != 0:
                raise ValueError(
                    f"`per_device_train_batch_size * gradient_accumulation_steps` is {rows} rows, which is not a "
                    f"whole number of rollout trees of {self.rows_per_item} rows. Set `items_per_device` instead."
                )
            self.items_per_device = max(1, rows // self.rows_per_item)
        elif self.gradient_accumulation_steps > 1:
            raise ValueError(
                f"`items_per_device` says that a step has {self.items_per_device} items of each process, whatever "
                "`gradient_accumulation_steps` is: leave one of them out."
            )
        if self.per_device_eval_batch_size is None:
            num_items = math.ceil(self.items_per_device * self.num_generations / self.num_generations_eval)
            self.per_device_eval_batch_size = num_items * self.num_generations_eval
        self.gradient_accumulation_steps: int = 1
        if self.chooses_rows:
            self.per_device_train_batch_size = self.rows_per_device
