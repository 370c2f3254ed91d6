"""
Stands in for vLLM: the names that TRL and this package import from it, an engine, and a server.

TRL's own `VLLMGeneration` and `VLLMClient` run unchanged on top. The engine and the server answer with a transformers
model. Arguments and request fields are checked against those of vLLM, copied into the sets below; tests/vllm_engine
compares these with the vLLM that is installed. What differs from vLLM: weights reach the server through a loopback
socket instead of NCCL, and sampling knows temperature, stop tokens and stop strings of the byte tokenizer only.
"""

import contextlib
import functools
import itertools
import json
import os
import sys
import time
from multiprocessing.connection import Client, Listener
from types import ModuleType, SimpleNamespace
from typing import Literal
from urllib.parse import urlparse

import torch
import trl.generation.vllm_client
import trl.generation.vllm_generation
from local_server import LocalServer
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl.generation.vllm_client import VLLMClient

import trl_multiagent.trainers.base.vllm

from tiny import byte_tokenizer


# vllm.LLM.__init__, and of its keyword arguments for vllm.EngineArgs those that are used
LLM_ARGUMENTS = set(
    """model runner convert tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code allowed_local_media_path
    allowed_media_domains tensor_parallel_size dtype quantization revision tokenizer_revision chat_template seed
    gpu_memory_utilization cpu_offload_gb enforce_eager hf_token hf_overrides max_model_len max_num_seqs
    enable_sleep_mode model_impl distributed_executor_backend max_num_batched_tokens logprobs_mode
    enable_lora max_loras max_lora_rank""".split()
)
# vllm.SamplingParams
SAMPLING_ARGUMENTS = set(
    """n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids
    ignore_eos max_tokens min_tokens logprobs prompt_logprobs detokenize skip_special_tokens include_stop_str_in_output
    output_kind structured_outputs logit_bias allowed_token_ids extra_args bad_words""".split()
)
# The request of /v1/completions: vllm.entrypoints.openai.completion.protocol.CompletionRequest
COMPLETION_FIELDS = (SAMPLING_ARGUMENTS - {"output_kind", "detokenize", "extra_args"}) | set(
    "model prompt echo stream suffix user return_tokens_as_token_ids return_token_ids".split()
)
LORA_FIELDS = {"lora_name", "lora_path", "load_inplace", "is_3d_lora_weight"}
TOKENIZER = byte_tokenizer()
MaxLoRARanks = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]


def install(patch) -> None:
    """Makes vLLM look installed. `patch` is pytest's monkeypatch, or has its `setattr` and `setitem`."""
    generation, client = trl.generation.vllm_generation, trl.generation.vllm_client
    for module in (generation, client, trl_multiagent.trainers.base.vllm):
        patch.setattr(module, "is_vllm_available", lambda min_version=None: True)
    patch.setattr(generation, "LLM", LLM, raising=False)
    patch.setattr(generation, "SamplingParams", SamplingParams, raising=False)
    patch.setattr(client, "get_ip", lambda: "127.0.0.1", raising=False)
    patch.setattr(client, "_HAS_STATEFUL_TRAINER_ENGINE", True)
    patch.setattr(client, "_HAS_RESET_PREFIX_CACHE_SUCCESS", True)
    patch.setattr(client, "open_trainer_endpoint", open_trainer_endpoint, raising=False)
    patch.setattr(client, "packed_nccl_broadcast_producer", send_tensors, raising=False)
    # The real one, which refuses devices that NCCL does not serve
    real = VLLMClient.init_communicator
    patch.setattr(VLLMClient, "init_communicator", lambda self, device: real(self, "cuda"))
    for name, content in {"vllm.config.lora": {"MaxLoRARanks": MaxLoRARanks}, "vllm.lora.request": {}}.items():
        module = ModuleType(name)
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)
    sys.modules["vllm.lora.request"].LoRARequest = LoRARequest
    LLM.instances.clear()


# Sampling


@torch.no_grad()
def sample(model, prompts: list[list[int]], params: dict, generator: torch.Generator):
    """For every prompt, the tokens of one completion and their log-probabilities at the temperature."""
    stop = set(params["stop_token_ids"])
    if not params["ignore_eos"]:
        stop.add(model.config.eos_token_id)
    done = functools.partial(is_done, stop=stop, strings=params.get("stop") or [], most=params["max_tokens"])
    assert params.get("include_stop_str_in_output", False) == bool(params.get("stop"))
    width = max(map(len, prompts), default=0)
    ids = torch.tensor([[0] * (width - len(x)) + list(x) for x in prompts])
    mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in prompts])
    completions = [([], []) for _ in prompts]
    while any(not done(tokens) for tokens, _ in completions):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1].float()
        logps = (logits / params["temperature"]).log_softmax(-1)
        drawn = torch.multinomial(logps.exp(), 1, generator=generator)
        ids, mask = torch.cat([ids, drawn], 1), torch.cat([mask, torch.ones_like(drawn)], 1)
        for (tokens, own), token, logp in zip(completions, drawn[:, 0].tolist(), logps, strict=True):
            if not done(tokens):
                tokens.append(token)
                own.append(logp[token].item())
    return completions


def is_done(tokens: list[int], stop: set[int], strings: list[str], most: int) -> bool:
    text = TOKENIZER.decode(tokens, skip_special_tokens=True) if strings else ""
    return len(tokens) == most or (bool(tokens) and tokens[-1] in stop) or any(string in text for string in strings)


# The engine in this process


class SamplingParams:
    def __init__(self, **arguments):
        assert set(arguments) <= SAMPLING_ARGUMENTS, set(arguments) - SAMPLING_ARGUMENTS
        vars(self).update(arguments)


class LoRARequest:
    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str):
        assert lora_int_id >= 1 and lora_path
        self.lora_name, self.lora_int_id, self.lora_path = lora_name, lora_int_id, lora_path


class LLM:
    """Keeps adapters by number, allows sleep to one instance per process, and loses what vLLM loses asleep."""

    instances = []

    def __init__(self, **arguments):
        assert set(arguments) <= LLM_ARGUMENTS, set(arguments) - LLM_ARGUMENTS
        self.arguments = arguments
        assert not any(llm.arguments["enable_sleep_mode"] for llm in [*self.instances, self] if self.instances)
        self.instances.append(self)
        self.model = AutoModelForCausalLM.from_pretrained(arguments["model"]).eval()
        self.adapters = {}
        self.generator = torch.Generator().manual_seed(arguments["seed"])
        self.awake = {"weights", "kv_cache"}
        self.calls = []  # (names of the adapters or None, number of prompts, sampling arguments of the first)
        self.loaded_weights = []

    def collective_rpc(self, method, kwargs) -> None:
        assert method == "reload_weights" and "weights" in self.awake
        for name, x in kwargs["weights_iterator"]:
            self.loaded_weights.append(name)
            with torch.no_grad():
                self.model.get_parameter(name).copy_(x)

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True, lora_request=None):
        assert self.awake == {"weights", "kv_cache"}
        assert self.model.get_input_embeddings().weight.isfinite().all()  # lost in a sleep and not sent again
        requests = lora_request or [None] * len(prompts)
        assert len(prompts) == len(sampling_params) == len(requests)
        names = sorted({request.lora_name for request in requests}) if lora_request else None
        self.calls.append((names, len(prompts), vars(sampling_params[0]) if prompts else None))
        completions, outputs = [], []
        rows = zip([prompt["prompt_token_ids"] for prompt in prompts], sampling_params, requests, strict=True)
        for _, of_agent in itertools.groupby(rows, key=lambda row: (id(row[1]), id(row[2]))):
            ids, params, of_request = zip(*of_agent, strict=True)
            model = self.model if of_request[0] is None else self.adapter(of_request[0])
            completions += sample(model, ids, vars(params[0]), self.generator)
        for prompt, (ids, logps) in zip(prompts, completions, strict=True):
            logprobs = [{i: SimpleNamespace(logprob=p, rank=1)} for i, p in zip(ids, logps, strict=True)]
            completion = SimpleNamespace(token_ids=tuple(ids), logprobs=logprobs)
            outputs.append(SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[completion]))
        return outputs

    def adapter(self, request) -> PeftModel:
        assert self.arguments["enable_lora"]
        if request.lora_int_id not in self.adapters:
            self.adapters[request.lora_int_id] = load_adapter(self.arguments["model"], request.lora_path)
        return self.adapters[request.lora_int_id]

    def sleep(self, level: int = 1) -> None:
        assert self.arguments["enable_sleep_mode"]
        self.awake = set()
        if level == 2:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(float("nan"))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.awake |= set(tags or ("weights", "kv_cache"))

    def reset_prefix_cache(self) -> bool:
        return True


def load_adapter(base: str, folder: str) -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()


# Weights: the trainer is rank 0, as with NCCL, and announces on which port it waits for the server


def open_trainer_endpoint(init_info: dict):
    with Listener((init_info["master_address"], init_info["master_port"])) as listener:
        return SimpleNamespace(connection=listener.accept(), group=SimpleNamespace())


def send_tensors(iterator, group, src, post_iter_func) -> None:
    for item in iterator:
        group.connection.send_bytes(post_iter_func(item).detach().numpy().tobytes())


# The server


class VLLMServer(LocalServer):
    """
    Speaks the part of `vllm serve`'s protocol that TRL and this package use.

    Args:
        model (`str`): Folder of the model.
        weight_transfer (`bool`): Whether it was started with `--weight-transfer-config`.
        lora (`bool`): Whether it was started with `--enable-lora` and runtime updating.
        shift (`float`): Added to all log-probabilities that it reports.
    """

    def __init__(self, model, weight_transfer=True, lora=False, shift=0.0):
        super().__init__()
        self.name = str(model)
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.weight_transfer, self.lora, self.shift = weight_transfer, lora, shift
        self.adapters, self.adapter_paths = {}, []
        self.generator = torch.Generator().manual_seed(0)
        self.updates = []  # the weights after each update
        self.completions = []  # the bodies of /v1/completions
        self.paths = []
        self.connection = None
        self.in_update = False

    def __exit__(self, *error):
        super().__exit__()
        if self.connection is not None:
            self.connection.close()

    def respond(self, request, body):
        path = urlparse(request.path).path
        self.paths.append(path)
        request.reply(*self.answer(path, json.loads(body or "null")))

    def answer(self, path: str, body: dict | None) -> tuple[int, dict | bytes]:
        if path == "/health":
            return 200, b""
        elif path == "/v1/models":
            return 200, {"data": [{"id": self.name}, *({"id": name} for name in self.adapters)]}
        elif path == "/server_info":
            transfer = {"backend": "nccl"} if self.weight_transfer else None
            return 200, {"vllm_config": {"weight_transfer_config": transfer}}
        elif path == "/get_world_size":
            return 200, {"world_size": 1}
        elif path == "/init_weight_transfer_engine":
            info = body["init_info"]
            assert set(info) == {"master_address", "master_port", "rank_offset", "world_size", "packed"}
            while self.connection is None:  # the trainer opens its side meanwhile
                with contextlib.suppress(ConnectionRefusedError):
                    self.connection = Client((info["master_address"], info["master_port"]))
                time.sleep(0.01)
            return 200, {"message": "Weight transfer initialized"}
        elif path in ("/start_weight_update", "/finish_weight_update"):
            assert self.in_update == (path == "/finish_weight_update")
            self.in_update = not self.in_update
            if not self.in_update:
                self.updates.append({name: x.clone() for name, x in self.model.state_dict().items()})
            return 200, {"message": "Weight update started or finished"}
        elif path == "/update_weights":
            assert self.in_update
            self.receive(body["update_info"])
            return 200, {"message": "Weights updated"}
        elif path == "/reset_prefix_cache":
            return 200, {"success": True}
        elif path == "/collective_rpc":
            assert set(body) == {"method", "kwargs"} and body["method"] == "reload_weights"
            for name, x in load_file(f"{body['kwargs']['weights_path']}/model.safetensors").items():
                self.model.get_parameter(name).data.copy_(x)
            self.updates.append({name: x.clone() for name, x in self.model.state_dict().items()})
            return 200, {"results": [None]}
        elif path == "/v1/load_lora_adapter" and self.lora:
            assert set(body) <= LORA_FIELDS
            if body["lora_name"] in self.adapters and not body["load_inplace"]:
                return 400, {"error": {"message": f"The lora adapter '{body['lora_name']}' has already been loaded."}}
            self.adapters[body["lora_name"]] = load_adapter(self.name, body["lora_path"])
            self.adapter_paths.append(body["lora_path"])
            return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully.".encode()
        elif path == "/v1/completions":
            assert set(body) <= COMPLETION_FIELDS, set(body) - COMPLETION_FIELDS
            with self.lock:
                return self.complete(body)
        return 404, {"detail": "Not Found"}

    @torch.no_grad()
    def receive(self, info: dict) -> None:
        assert set(info) == {"names", "dtype_names", "shapes"}
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            x = torch.frombuffer(bytearray(self.connection.recv_bytes()), dtype=getattr(torch, dtype)).reshape(shape)
            self.model.get_parameter(name).copy_(x)

    def complete(self, body: dict) -> tuple[int, dict]:
        assert body["return_token_ids"] and body["return_tokens_as_token_ids"] and body["logprobs"] == 0
        self.completions.append(body)
        assert body["prompt"] and body["model"] in (self.name, *self.adapters)
        model = self.adapters.get(body["model"], self.model)
        choices = []
        prompts = [prompt_ids for prompt_ids in body["prompt"] for _ in range(body["n"])]
        for prompt_ids, (ids, logps) in zip(prompts, sample(model, prompts, body, self.generator), strict=True):
            logps = [logp + self.shift for logp in logps]
            tokens = [f"token_id:{k}" for k in ids]
            top = [{token: logp} for token, logp in zip(tokens, logps, strict=True)]
            logprobs = {"tokens": tokens, "token_logprobs": logps, "top_logprobs": top}
            choices.append({"token_ids": ids, "prompt_token_ids": prompt_ids, "logprobs": logprobs})
        return 200, {"choices": choices}


PORTS = itertools.count(20_000 + os.getpid() % 1_200 * 10)  # below those that the system gives to whoever asks for one


def free_ports(number: int) -> int:
    """The first of some ports in a row that are free on loopback, and that no other program gets by chance."""
    while True:
        ports = [next(PORTS) for _ in range(number)]
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports:
                stack.enter_context(Listener(("127.0.0.1", port)))
            return ports[0]
