"""The stand-in of the other tests takes what vLLM takes."""

import dataclasses
import inspect

from vllm import LLM, EngineArgs, SamplingParams
from vllm.config.lora import MaxLoRARanks
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import vllm_double


def parameters(function) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_arguments_and_fields_exist():
    engine = parameters(LLM) | {field.name for field in dataclasses.fields(EngineArgs)}
    assert vllm_double.LLM_ARGUMENTS <= engine
    assert vllm_double.SAMPLING_ARGUMENTS <= parameters(SamplingParams)
    assert vllm_double.COMPLETION_FIELDS <= set(CompletionRequest.model_fields)
    assert vllm_double.LORA_FIELDS <= set(LoadLoRAAdapterRequest.model_fields)
    assert vllm_double.MaxLoRARanks == MaxLoRARanks


def test_methods_have_the_parameters_of_the_double():
    for name in ("generate", "collective_rpc", "sleep", "wake_up", "reset_prefix_cache"):
        assert parameters(getattr(vllm_double.LLM, name)) <= parameters(getattr(LLM, name)), name
    assert parameters(vllm_double.LoRARequest) <= parameters(LoRARequest)
    assert {"weights_iterator", "weights_path"} <= parameters(GPUModelRunner.reload_weights)
