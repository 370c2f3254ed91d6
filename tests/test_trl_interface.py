"""
What this package relies on inside TRL and transformers.

Its trainers extend private methods, which may change in any release. This list fails first, and says what changed.
"""

import inspect

import pytest
import transformers
import trl
from transformers import Trainer
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import (
    RepeatSampler,
    add_fused_lm_head,
    create_model_from_path,
    pad,
    split_tensor_dict,
)


METHODS = {
    GRPOTrainer: {
        "_generate_and_score_completions": ["self", "inputs"],
        "_prepare_inputs": ["self", "generation_batch"],
        "_compute_loss": ["self", "model", "inputs"],
        "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
        "training_step": ["self", "model", "inputs", "num_items_in_batch"],
        "prediction_step": ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
        "_tokenize_prompts": ["self", "prompts"],
        "_get_train_sampler": ["self", "dataset"],
        "get_train_dataloader": ["self"],
        "_save_checkpoint": ["self", "model", "trial"],
        "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    },
    Trainer: {
        "_get_dataloader": [
            "self",
            "dataset",
            "description",
            "batch_size",
            "sampler_fn",
            "is_training",
            "dataloader_key",
        ],
        "_save": ["self", "output_dir", "state_dict"],
        "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
        "_load_best_model": ["self"],
        "_push_from_checkpoint": ["self", "checkpoint_folder"],
        "_get_grad_norm": ["self", "model", "grad_norm"],
        "_get_output_dir": ["self", "trial"],
        "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
        "_save_checkpoint": ["self", "model", "trial"],
        "_save_optimizer_and_scheduler": ["self", "output_dir"],
        "_save_rng_state": ["self", "output_dir"],
        "_evaluate": ["self", "trial", "ignore_keys_for_eval", "skip_scheduler"],
        "_finalize_training": ["self", "trial", "num_train_samples", "start_time"],
        "_run_epoch": [
            "self",
            "model",
            "epoch",
            "train_dataloader",
            "steps_in_epoch",
            "num_update_steps_per_epoch",
            "trial",
            "ignore_keys_for_eval",
            "start_time",
            "resume_from_checkpoint",
            "epochs_trained",
            "steps_trained_in_current_epoch",
        ],
        "create_optimizer": ["self", "model"],
    },
    RepeatSampler: {
        "__init__": ["self", "data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed"]
    },
}
FUNCTIONS = {
    unwrap_model_for_generation: [
        "model",
        "accelerator",
        "gather_deepspeed3_params",
        "generation_kwargs",
        "gradient_checkpointing_kwargs",
    ],
    add_fused_lm_head: ["model", "temperature", "cast_lm_head_to_fp32", "outputs"],
    create_model_from_path: ["model_id", "architecture", "kwargs"],
    pad: ["tensors", "padding_value", "padding_side", "pad_to_multiple_of"],
    split_tensor_dict: ["tensor_dict", "num_chunks"],
}
# Attributes that `GRPOTrainer.__init__` sets and that are read or swapped here
ATTRIBUTES = [
    "processing_class",
    "_tokenizer",
    "eos_token_ids",
    "generation_config",
    "generation_kwargs",
    "_metrics",
    "_logs",
    "ref_model",
    "loss_type",
    "shuffle_dataset",
    "log_completions",
    "temperature",
    "importance_sampling_level",
    "beta",
]
ADVICE = (
    f"trl {trl.__version__} / transformers {transformers.__version__} changed what trl_multiagent extends. Read the change, "
    "adapt trl_multiagent/trainers, then this list and the version range in pyproject.toml."
)


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, methods in METHODS.items() for name in methods], ids=str
)
def test_methods(owner, name):
    assert list(inspect.signature(getattr(owner, name)).parameters) == METHODS[owner][name], ADVICE


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions(function):
    assert list(inspect.signature(function).parameters) == FUNCTIONS[function], ADVICE


def test_attributes():
    source = inspect.getsource(GRPOTrainer.__init__) + inspect.getsource(Trainer.__init__)
    assert [name for name in ATTRIBUTES if f"self.{name} =" not in source] == [], ADVICE


def test_the_training_loop_counts_in_attributes_that_a_checkpoint_restores():
    source = inspect.getsource(Trainer._inner_training_loop)
    names = ["_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step"]
    places = [source.find(f"self.{name} = ") for name in names]
    assert -1 not in places and max(places) < source.index("on_train_begin") < source.index("self._run_epoch("), ADVICE
    saving = inspect.getsource(Trainer._save_checkpoint)
    assert all(f"self.{name}(" in saving for name in ("_get_output_dir", "_save_rng_state", "_push_from_checkpoint"))


def test_the_loss_reads_what_a_batch_holds():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    names = ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"]
    names += ["num_items_in_batch", "ref_per_token_logps"]
    assert [name for name in names if f'"{name}"' not in source] == [], ADVICE


def test_generate_takes_a_filled_cache():
    assert "_supports_default_dynamic_cache" in dir(transformers.LlamaForCausalLM), ADVICE
    assert {"batch_repeat_interleave", "batch_select_indices", "is_sliding"} <= {*dir(transformers.DynamicCache)}, (
        ADVICE
    )
    assert list(inspect.signature(transformers.StaticCache).parameters)[:2] == ["config", "max_cache_len"], ADVICE
