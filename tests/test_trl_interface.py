"""
What this package relies on inside TRL, transformers, accelerate, PEFT and the standard library.

Its trainers extend private methods, which may change in any release. These tests fail first, and say what changed.
`make test-latest` runs them with the newest releases.
"""

import argparse
import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
import trl
from accelerate.state import AcceleratorState
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch.optim.lr_scheduler import LRScheduler
from transformers import GenerationConfig, GenerationMixin, Trainer, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import DPOTrainer, GRPOTrainer, RewardTrainer
from trl.data_utils import apply_chat_template
from trl.distributed import DistributedBackend
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import (
    FusedCausalLMOutput,
    RepeatSampler,
    add_fused_lm_head,
    create_model_from_path,
    get_comet_experiment_url,
    get_config_model_id,
    get_trackio_space_url,
    pad,
)

from trl_multiagent.trainers.base.rollout_config import FIXED_IN_GENERATION, OWN_ARGUMENT
from trl_multiagent.trainers.madpo_config import LOSS_TYPES, REFUSED_LOSS_TYPES


# The parameters of the methods that are overridden or called, besides `self`
METHODS = {
    GRPOTrainer: """
        _generate_and_score_completions(inputs)
        _prepare_inputs(generation_batch)
        compute_loss(model, inputs, return_outputs, num_items_in_batch)
        training_step(model, inputs, num_items_in_batch)
        prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        log(logs, start_time)
        _get_train_sampler(dataset)
        get_train_dataloader()
        _save_checkpoint(model, trial)
        create_model_card(model_name, dataset_name, tags)
        _load_optimizer_and_scheduler(checkpoint)
    """,
    DPOTrainer: """
        _prepare_dataset(dataset, processing_class, args, dataset_name)
        _precompute_ref_logps(dataset, name, batch_size)
        compute_ref_log_probs(model, inputs)
        _compute_loss(model, inputs, return_outputs)
        compute_loss(model, inputs, return_outputs, num_items_in_batch)
        prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        log(logs, start_time)
    """,
    RewardTrainer: """
        _prepare_dataset(dataset, processing_class, args, dataset_name)
        _set_signature_columns_if_needed()
        compute_loss(model, inputs, return_outputs, num_items_in_batch)
        log(logs, start_time)
        _save_checkpoint(model, trial)
    """,
    Trainer: """
        get_batch_samples(epoch_iterator, num_batches, device)
        _get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
        _save(output_dir, state_dict)
        _load_from_checkpoint(resume_from_checkpoint, model)
        _load_best_model()
        _push_from_checkpoint(checkpoint_folder)
        _finish_current_push()
        init_hf_repo(token, private)
        save_model(output_dir, _internal_call)
        _get_grad_norm(model, grad_norm)
        _get_output_dir(trial)
        train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        _save_checkpoint(model, trial)
        _save_optimizer_and_scheduler(output_dir)
        _save_rng_state(output_dir)
        _evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        predict(test_dataset, ignore_keys, metric_key_prefix)
        evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        create_accelerator_and_postprocess()
        _prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        _init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial)
        _maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate)
        _finalize_training(trial, num_train_samples, start_time)
        create_optimizer(model)
    """,
    VLLMGeneration: """
        _init_vllm()
        sync_weights()
        generate(prompts, images, num_generations, profiler)
    """,
    VLLMClient: """
        __init__(base_url, host, server_port, group_port, connection_timeout)
        get_server_info()
    """,
    GenerationMixin: """
        _sample(input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs)
    """,
    DistributedBackend: """
        gather_params(params)
    """,
    RepeatSampler: """
        __init__(data_source, mini_repeat_count, batch_size, repeat_count, shuffle, seed)
    """,
}
FUNCTIONS = {
    unwrap_model_for_generation: "model accelerator gather_deepspeed3_params generation_kwargs gradient_checkpointing_kwargs",
    apply_chat_template: "example processing_class tools template_kwargs",
    add_fused_lm_head: "model temperature cast_lm_head_to_fp32 outputs",
    create_model_from_path: "model_id architecture kwargs",
    get_comet_experiment_url: "",
    get_config_model_id: "config",
    get_trackio_space_url: "",
    pad: "tensors padding_value padding_side pad_to_multiple_of",
}
# Attributes that `GRPOTrainer.__init__` sets and that are read or swapped here
ATTRIBUTES = """
processing_class chat_template_kwargs generation_kwargs _metrics ref_model shuffle_dataset log_completions log_unique_prompts num_completions_to_print num_generations_eval temperature hub_model_id
""".split()
# The same of `DPOTrainer`
DPO_ATTRIBUTES = """
precompute_ref_logps loss_types loss_weights aux_loss_enabled ref_model _tokenizer _metrics _total_train_tokens
""".split()
# Private attributes and arguments besides these methods, and the source that has them
PRIVATE = {
    "_actions": argparse.ArgumentParser,
    "_active_adapter": BaseTunerLayer,
    "_buffered_inputs": GRPOTrainer,
    "_disable_adapters": BaseTunerLayer,
    "_dist": VLLMGeneration,
    "_globalstep_last_logged": Trainer,
    "_gradient_checkpointing_func": GradientCheckpointingLayer,
    "_initial_global_step": Trainer,
    "_last_lr": LRScheduler,
    "_llm_weights_sleeping": VLLMGeneration,
    "_name": GRPOTrainer,
    "_paper": GRPOTrainer,
    "_reset_state": AcceleratorState,
    "_signature_columns": RewardTrainer,
    "_step": GRPOTrainer,
    "_supports_default_dynamic_cache": GenerationMixin,
    "_SummaryWriter": TensorBoardCallback,
    "_tag_names": GRPOTrainer,
    "_total_loss_scalar": Trainer,
    "_tr_loss": Trainer,
}
PACKAGE = Path(__file__).resolve().parents[1] / "trl_multiagent"
ADVICE = (
    f"trl {trl.__version__} / transformers {transformers.__version__} changed what trl_multiagent extends. Read the change, "
    "adapt trl_multiagent/trainers, then this list and the version range in pyproject.toml."
)


SIGNATURES = [(owner, *x) for owner, lines in METHODS.items() for x in re.findall(r"(\w+)\((.*)\)", lines)]


@pytest.mark.parametrize(
    ("owner", "name", "parameters"), SIGNATURES, ids=[f"{x[0].__name__}.{x[1]}" for x in SIGNATURES]
)
def test_methods(owner, name, parameters):
    assert (
        ", ".join(inspect.signature(getattr(owner, name)).parameters).removeprefix("self").strip(", ") == parameters
    ), ADVICE


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions(function):
    assert " ".join(inspect.signature(function).parameters) == FUNCTIONS[function], ADVICE


def test_attributes():
    source = inspect.getsource(GRPOTrainer.__init__) + inspect.getsource(Trainer.__init__)
    assert [name for name in ATTRIBUTES if f"self.{name} =" not in source] == [], ADVICE


def test_attributes_of_dpo():
    source = inspect.getsource(DPOTrainer.__init__)
    assert [name for name in DPO_ATTRIBUTES if f"self.{name} =" not in source] == [], ADVICE


def test_the_dpo_loss_reads_the_keys_and_calls_the_model_as_is_known():
    """A team gives it the outputs of all agents, and the log-probabilities of their references."""
    source = inspect.getsource(DPOTrainer._compute_loss)
    read = set(re.findall(r'inputs\["(\w+)"\]', source))
    keys = {"completion_mask", "input_ids", "attention_mask", "ref_chosen_logps", "ref_rejected_logps"}
    assert read == keys and source.count("self.precompute_ref_logps") == 1, ADVICE
    # The policy, and outputs that nobody asks for
    assert source.count(" model(**model_kwargs") == 2, ADVICE
    fields = set(re.findall(r"\boutputs\.(\w+)", source)) - {"log_probs"}
    assert fields == {"aux_loss", "entropy", "is_top1", "log_sum_sq_probs", "mean_logits"}, ADVICE


def test_the_losses_of_dpo_are_known():
    """A new one is a function of joint log-ratios, or has to be refused."""
    source = inspect.getsource(DPOTrainer._compute_loss)
    known = {*LOSS_TYPES, *REFUSED_LOSS_TYPES}
    assert set(re.findall(r'loss_type == "(\w+)"', source)) == known, ADVICE


def test_pushes_in_the_background():
    assert "self.push_in_progress =" in inspect.getsource(Trainer.init_hf_repo), ADVICE
    assert "self.push_in_progress.jobs" in inspect.getsource(Trainer._push_from_checkpoint), ADVICE
    assert "self.processing_class is not None" in inspect.getsource(Trainer._push_from_checkpoint), ADVICE


def test_vllm_generation():
    """What `trl_multiagent.trainers.base.vllm_generation` takes for granted between the lines of TRL's class."""
    arguments = set(inspect.signature(VLLMGeneration).parameters)
    assert {"server_base_url", "group_port", "max_num_seqs", "enable_sleep_mode", "generation_kwargs"} <= arguments, (
        ADVICE
    )
    engine = inspect.getsource(VLLMGeneration._init_vllm)
    assert "self.llm = LLM(" in engine and "self.tp_group, _ =" in engine, ADVICE  # replaced, read
    assert "self._llm_weights_sleeping = self.enable_sleep_mode" in engine, ADVICE
    generate = inspect.getsource(VLLMGeneration.generate)
    # Shares are slices of equal size, which the first process makes the whole
    assert "accelerator.process_index * len(prompts)" in generate and "local_rank_in_group * orig_size" in generate, (
        ADVICE
    )
    assert "self.llm.sleep(level=2)" in generate, ADVICE
    client = inspect.getsource(VLLMClient.generate)
    assert '"model": self.model' in client and "sampling_params.update(generation_kwargs or {})" in client, ADVICE
    assert "self.base_url" in client and "self.session.post" in inspect.getsource(VLLMClient._post), ADVICE


def test_the_training_loop_counts_in_attributes_that_a_checkpoint_restores():
    source = inspect.getsource(Trainer._inner_training_loop)
    names = ["_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step"]
    places = [source.find(f"self.{name} = ") for name in names]
    assert -1 not in places and max(places) < source.index("on_train_begin") < source.index("self._run_epoch("), ADVICE
    assert "self._last_lr" in inspect.getsource(torch.optim.lr_scheduler.LRScheduler.get_last_lr), ADVICE
    saving = inspect.getsource(Trainer._save_checkpoint)
    assert all(f"self.{name}(" in saving for name in ("_get_output_dir", "_save_rng_state", "_push_from_checkpoint"))


def test_logs():
    """Metrics are put under other names, and the table of completions is left out, before GRPOTrainer logs."""
    source = inspect.getsource(GRPOTrainer.log)
    assert 'mode = "train" if self.model.training else "eval"' in source and 'f"eval_{key}"' in source, ADVICE
    assert source.index("super().log(") < source.index("self.log_completions:"), ADVICE
    assert "print_prompt_completions_sample(" not in source[: source.index("self.log_completions:")], ADVICE
    assert 'logging_backend.log({"completions": logging_backend.Table(dataframe=df)})' in source, ADVICE


@pytest.mark.parametrize("name", PRIVATE)
def test_private_names(name):
    assert re.search(rf"\b{name}\b", inspect.getsource(PRIVATE[name])), ADVICE


def private_names_of_others() -> set[str]:
    """
    Private names in the package that belong to a library: those that the package never defines, and those that also occur in
    the classes that it extends. The sandbox is left out, because it uses no library.
    """
    used, own = set(), set()
    for path in PACKAGE.rglob("*.py"):
        if "sandbox" in path.relative_to(PACKAGE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
                if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls"):
                    own.add(node.attr)
            elif isinstance(node, ast.keyword):
                used.add(node.arg or "")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                used.add(node.name)
                own.add(node.name)
            elif isinstance(node, ast.arg):
                own.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
    classes = (Trainer, GRPOTrainer, DPOTrainer, RewardTrainer, VLLMGeneration, VLLMClient)
    extended = {word for one in classes for word in re.findall(r"\w+", inspect.getsource(one))}
    private = {name for name in used if re.fullmatch(r"_[a-zA-Z]\w*", name)}
    return {name for name in private if name not in own or name in extended}


def test_every_private_name_in_use_is_listed():
    # `_fields` of a syntax tree's nodes and `os._exit` are documented
    listed = {*PRIVATE, *ATTRIBUTES, *DPO_ATTRIBUTES, "_fields", "_exit"}
    for _, name, parameters in SIGNATURES:
        listed.update((name, *parameters.split(", ")))
    used = private_names_of_others()
    assert used - listed == set(), "list these names, with the source that has them"
    assert {*PRIVATE} - used == set(), "these names are no longer used"


def test_the_router_loss_has_a_place():
    """What GRPO asks of a model and of its configuration, and the field of the output that carries the loss."""
    source = inspect.getsource(GRPOTrainer.__init__)
    assert 'hasattr(text_config, "output_router_logits")' in source and '"router_aux_loss_coef", 0.0' in source, ADVICE
    assert "aux_loss" in FusedCausalLMOutput.__dataclass_fields__, ADVICE


def test_checkpointed_layers_look_at_their_own_mode():
    source = inspect.getsource(GradientCheckpointingLayer.__init_subclass__)
    assert "self.gradient_checkpointing and self.training" in source, ADVICE
    assert "self._gradient_checkpointing_func(" in source, ADVICE


def test_peft_s_wrappers_of_whole_modules():
    wrapper = ModulesToSaveWrapper(torch.nn.Linear(2, 2), "aux")
    assert {"_active_adapter", "_disable_adapters"} <= {*vars(wrapper)}, ADVICE
    assert list(wrapper.modules_to_save) == ["aux"] and wrapper.original_module is not wrapper.modules_to_save["aux"]


def test_generate_takes_a_filled_cache():
    assert "_supports_default_dynamic_cache" in dir(transformers.LlamaForCausalLM), ADVICE
    assert {"batch_repeat_interleave", "batch_select_indices", "is_sliding"} <= {*dir(transformers.DynamicCache)}, (
        ADVICE
    )
    assert list(inspect.signature(transformers.StaticCache).parameters)[:2] == ["config", "max_cache_len"], ADVICE


def test_the_choices_that_are_listed_here_are_theirs():
    assert {"lr_scheduler_type", "optim", "eval_strategy"} <= {
        field.name for field in dataclasses.fields(TrainingArguments)
    }
    assert list(inspect.signature(Trainer.get_optimizer_cls_and_kwargs).parameters)[:1] == ["args"]
    assert vars(GenerationConfig()).keys() >= {*OWN_ARGUMENT, *FIXED_IN_GENERATION}
