"""
What this package relies on inside TRL, transformers, accelerate and PEFT.

Its trainers extend private methods, which may change in any release. These tests fail first, and say what changed.
`make test-latest` runs them with the newest releases.
"""

import argparse
import asyncio
import inspect
import re

import pytest
import torch
import transformers
import trl
from accelerate.state import AcceleratorState
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, Trainer
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.integrations.integration_utils import rewrite_logs
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.chat_template_utils import render_jinja_template
from trl import DPOTrainer, GRPOTrainer, RewardTrainer
from trl.chat_template_utils import add_response_schema
from trl.data_utils import _tokenize, apply_chat_template, common_prefix_length, prepare_multimodal_messages
from trl.distributed import DistributedBackend
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.models import unwrap_model_for_generation
from trl.models.utils import add_hooks, remove_hooks
from trl.trainer.utils import (
    RepeatSampler,
    add_fused_lm_head,
    create_model_from_path,
    get_config_model_id,
    nanstd,
    pad,
    repeat_iterable_dataset,
)

from trl_multiagent import JointRewardTrainer, MADPOTrainer, MAGRPOTrainer
from trl_multiagent.trainers.base.rollout_config import RESERVED
from trl_multiagent.trainers.base.vllm import AdapterGeneration
from trl_multiagent.trainers.madpo_config import LOSS_TYPES


# The methods that are overridden, by the class that overrides them and the one that has them
OVERRIDDEN = {
    (MAGRPOTrainer, GRPOTrainer): """
        _generate_and_score_completions _prepare_inputs compute_loss training_step prediction_step log
        _get_train_sampler get_train_dataloader _save_checkpoint create_model_card
    """,
    (MADPOTrainer, DPOTrainer): """
        _prepare_dataset _precompute_ref_logps compute_loss prediction_step log
    """,
    (JointRewardTrainer, RewardTrainer): """
        _prepare_dataset compute_loss log _save_checkpoint create_model_card
    """,
    (MAGRPOTrainer, Trainer): """
        _save _load_from_checkpoint _load_best_model _push_from_checkpoint push_to_hub init_hf_repo _get_grad_norm
        _get_output_dir train _save_rng_state _evaluate evaluate predict evaluation_loop
        create_accelerator_and_postprocess _prepare_for_training _init_training_state _maybe_log_save_evaluate
        _finalize_training create_optimizer save_model
    """,
    (MADPOTrainer, Trainer): "get_batch_samples",
    (AdapterGeneration, VLLMGeneration): "_init_vllm sync_weights",
}
# The parameters of the methods and functions that are called or replaced
CALLED = {
    PreTrainedModel.should_save_on_this_rank: "self is_main_process",
    GenerationMixin._sample: (
        "self input_ids logits_processor stopping_criteria generation_config synced_gpus streamer model_kwargs"
    ),
    Trainer._get_dataloader: "self dataset description batch_size sampler_fn is_training dataloader_key",
    Trainer._finish_current_push: "self",
    Trainer.get_optimizer_cls_and_kwargs: "args model",
    Trainer.save_model: "self output_dir _internal_call",
    VLLMClient: "base_url host server_port group_port connection_timeout",
    VLLMClient.check_server: "self total_timeout retry_interval",
    VLLMClient.generate: """
        self prompts features n repetition_penalty temperature top_p top_k min_p max_tokens logprobs
        structured_outputs_regex generation_kwargs
    """,
    VLLMGeneration.generate: "self prompts images num_generations profiler",
    DistributedBackend.gather_params: "self params",
    RepeatSampler: "data_source mini_repeat_count batch_size repeat_count shuffle seed",
    repeat_iterable_dataset: "dataset mini_repeat_count batch_size repeat_count",
    nanstd: "tensor dim keepdim",
    unwrap_model_for_generation: (
        "model accelerator gather_deepspeed3_params generation_kwargs gradient_checkpointing_kwargs"
    ),
    add_hooks: "model",
    remove_hooks: "model",
    add_response_schema: "processing_class",
    _tokenize: "processing_class input apply_chat_template_kwargs",
    common_prefix_length: "ids other_ids",
    apply_chat_template: "example processing_class tools template_kwargs",
    prepare_multimodal_messages: "messages images",
    render_jinja_template: """
        conversations tools documents chat_template return_assistant_tokens_mask continue_final_message
        add_generation_prompt kwargs
    """,
    add_fused_lm_head: "model temperature cast_lm_head_to_fp32 outputs",
    create_model_from_path: "model_id architecture kwargs",
    get_config_model_id: "config",
    rewrite_logs: "d",
    pad: "tensors padding_value padding_side pad_to_multiple_of",
}
# Attributes that are read or replaced, by the class whose source has them
NAMES = {
    argparse.ArgumentParser: "_actions",
    AcceleratorState: "_reset_state",
    BaseTunerLayer: "_active_adapter _disable_adapters cast_input_dtype_enabled",
    DPOTrainer: "precompute_ref_logps ref_model _metrics _total_train_tokens",
    GenerationMixin: "_supports_default_dynamic_cache",
    GradientCheckpointingLayer: "_gradient_checkpointing_func",
    GRPOTrainer: """
        _buffered_inputs _metrics _name _paper _step _tag_names generation_kwargs log_completions
        num_completions_to_print num_generations_eval ref_model shuffle_dataset temperature
    """,
    RewardTrainer: "_signature_columns",
    TensorBoardCallback: "_SummaryWriter rewrite_logs tb_writer",
    TrackioCallback: "rewrite_logs",
    WandbCallback: "rewrite_logs",
    asyncio.tasks: "_fut_waiter",
    Trainer: """
        _globalstep_last_logged _initial_global_step _total_loss_scalar _tr_loss hub_model_id processing_class
        push_in_progress
    """,
    torch.optim.lr_scheduler.LRScheduler: "_last_lr",
    VLLMGeneration: "_dist _iter_named_params _llm_weights_sleeping llm tp_group vllm_client",
}
ADVICE = (
    f"trl {trl.__version__} / transformers {transformers.__version__} changed what trl_multiagent extends. Read "
    "the change, "
    "adapt trl_multiagent/trainers, then this list and the version range in pyproject.toml."
)


@pytest.mark.parametrize(("ours", "theirs"), OVERRIDDEN, ids=lambda cls: cls.__name__)
def test_overridden_methods_take_the_same_arguments(ours, theirs):
    for name in OVERRIDDEN[ours, theirs].split():
        method, inherited = getattr(ours, name), getattr(theirs, name, None)
        assert inherited is not None and method is not inherited, f"{name}: {ADVICE}"
        own, parameters = inspect.signature(method).parameters, inspect.signature(inherited).parameters
        if "args" not in own:
            assert [*own] == [*parameters], f"{name}: {ADVICE}"
        elif not name.startswith("_"):  # callers may name the arguments
            assert "kwargs" in own, name


@pytest.mark.parametrize("function", CALLED, ids=lambda function: function.__qualname__)
def test_functions_have_the_parameters_that_are_known(function):
    assert list(inspect.signature(function).parameters) == CALLED[function].split(), ADVICE


@pytest.mark.parametrize("owner", NAMES, ids=lambda owner: owner.__name__)
def test_attributes_are_where_they_were(owner):
    source = inspect.getsource(owner)
    assert [name for name in NAMES[owner].split() if not re.search(rf"\b{name}\b", source)] == [], ADVICE


def test_the_losses_of_dpo_are_known():
    source = inspect.getsource(DPOTrainer._compute_loss)
    assert {*re.findall(r'loss_type == "(\w+)"', source)} >= {*LOSS_TYPES}, ADVICE


def test_the_arguments_of_generation_that_are_refused_are_theirs():
    assert vars(GenerationConfig()).keys() >= {*RESERVED}, ADVICE
