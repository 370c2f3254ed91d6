"""
Generation through vLLM, on TRL's `VLLMGeneration`.

A model of its own has an engine or a server of its own, to which its weights are sent after every update. Agents that are
adapters on one base share one engine or server, which holds the base and is sent the adapters only.
"""

import math
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from peft import LoraConfig, PeftModel
from torch import distributed
from transformers import PreTrainedModel, set_seed
from trl import GRPOConfig
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from trl_multiagent.models.pretrained import MODEL_CONFIG, adapter_parameters, find_file


class AgentGeneration(VLLMGeneration):
    """
    Samples from one model: that of one agent, or of several agents that share all weights.

    The arguments are those of TRL's class, which takes for granted that all processes have the same number of prompts.
    Here they may differ.
    """

    adapter: str | None = None  # which of the model's adapters answers; `None` for a model without

    def __init__(self, **kwargs):
        self.loaded_steps = {}  # the optimizer step whose weights the engine holds, by adapter
        super().__init__(**kwargs)

    def sample(
        self, role: str, prompt_ids: list[list[int]], num_generations: int, step: int
    ) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
        """
        Samples completions for each prompt. Every process must call it, also without prompts.

        Args:
            role (`str`):
                The agent.
            prompt_ids (`list[list[int]]`):
                Token ids of this process's prompts.
            num_generations (`int`):
                Number of completions of each prompt.
            step (`int`):
                Number of optimizer steps so far: the weights are sent before the first completions of a step.

        Returns:
            `tuple` of two lists with one entry per prompt: its completions, as token ids up to and including the first
            end-of-sequence token, and the log-probabilities in nats with which the engine sampled these tokens (NaN
            where it gave none).
        """
        if self.loaded_steps.get(self.adapter) != step:
            self.sync_weights()
            self.loaded_steps[self.adapter] = step
        prompts = [ids for ids in prompt_ids for _ in range(num_generations)]
        _, completion_ids, logprobs, _ = self.generate(prompts, None, num_generations)
        completion_ids = [list(ids) for ids in completion_ids]
        # Of each position TRL asks for one log-probability, that of the sampled token
        logps = [[math.nan if entry[0] is None else entry[0] for entry in sequence] for sequence in logprobs]
        starts = range(0, len(prompts), num_generations)
        return tuple([x[k : k + num_generations] for k in starts] for x in (completion_ids, logps))

    def generate(self, prompts, images, num_generations, profiler=None):
        group = self._process_group()
        by_process = [prompts]
        if group is not None:
            by_process = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(by_process, prompts, group=group)
        if self.mode == "server" and not any(by_process):
            return [], [], [], []
        if group is None:
            return super().generate(prompts, images, num_generations, profiler)
        # TRL hands out shares of the size of each process's request, at that multiple of the rank: right only for equal
        # requests. So the first process asks for everything, the others for nothing, and the first passes on the shares
        rank = distributed.get_rank(group)
        everything = [ids for share in by_process for ids in share] if rank == 0 else []
        outputs = [super().generate(everything, images, num_generations, profiler)]
        distributed.broadcast_object_list(outputs, src=distributed.get_global_rank(group, 0), group=group)
        start = sum(len(share) for share in by_process[:rank])
        return tuple(x[start : start + len(prompts)] for x in outputs[0])

    def _process_group(self) -> distributed.ProcessGroup | None:
        """The processes that ask together: all for a server, the holders of one engine in colocate mode."""
        if self.mode == "server":
            return distributed.group.WORLD if self.accelerator.num_processes > 1 else None
        return self.tp_group if self.tensor_parallel_size > 1 else None


class AdapterGeneration(AgentGeneration):
    """
    Samples from several agents that are LoRA adapters on one base, each named as its agent.

    The engine loads the base once. Of an update it gets the agent's adapter, as files.

    Args:
        roles (`list[str]`):
            The agents, which are the names of the adapters.
        folder (`Path`):
            Where adapters are written for the engine to read. A server must see it under the same path.
        **kwargs:
            Arguments of TRL's `VLLMGeneration`.
    """

    def __init__(self, roles: Sequence[str], folder: Path, **kwargs):
        self.roles = roles
        self.folder = folder
        self.versions = dict.fromkeys(roles, 0)  # how often each adapter was written
        super().__init__(**kwargs)

    @property
    def _configs(self) -> dict[str, LoraConfig]:
        return {role: self.model.peft_config[role] for role in self.roles}

    def _init_vllm(self):
        if self.mode == "server":  # without TRL's communicator, which is for weights
            if self.accelerator.is_main_process:
                self.vllm_client = VLLMClient(base_url=self.server_base_url, connection_timeout=self.server_timeout)
            self.accelerator.wait_for_everyone()
            return

        lora = {"enable_lora": True, "max_loras": len(self.roles), "max_lora_rank": max_lora_rank(self._configs)}
        engine_class = vllm_generation.LLM
        # TRL makes the engine, from arguments among which there are none for adapters
        vllm_generation.LLM = lambda **arguments: AdapterEngine(engine_class(**arguments, **lora))
        try:
            super()._init_vllm()
        finally:
            vllm_generation.LLM = engine_class

    def sample(self, role, prompt_ids, num_generations, step):
        self.adapter = role
        if self.mode == "server":
            if self.accelerator.is_main_process:
                self.vllm_client.model = role  # the name of an adapter stands for the base with it
        else:
            self.llm.role = role
            if self._llm_weights_sleeping:
                empty_cache()
                self.llm.wake_up(tags=["weights"])
                self._llm_weights_sleeping = False
        return super().sample(role, prompt_ids, num_generations, step)

    def sync_weights(self):
        role = self.adapter
        self.versions[role] += 1
        # For its cache of prefixes the engine knows an adapter by name and path: a path is never used again
        folder = self.folder / f"{role}-{self.versions[role]}"
        mine = self.mode == "colocate" or self.accelerator.is_main_process
        with self._dist.gather_params(adapter_parameters(self.model, role)):
            if mine:
                self.model.save_pretrained(folder, selected_adapters=[role], save_embedding_layers=False)
        if not mine:
            return
        if self.mode == "colocate":
            self.llm.load(role, folder / role)
        else:
            self._send(role, folder / role)
        if self.versions[role] > 1:
            shutil.rmtree(self.folder / f"{role}-{self.versions[role] - 1}")

    def _send(self, role: str, folder: Path) -> None:
        response = self.vllm_client.session.post(
            f"{self.vllm_client.base_url}/v1/load_lora_adapter",
            json={"lora_name": role, "lora_path": str(folder), "load_inplace": True},
        )
        if response.status_code != 200:
            raise RuntimeError(
                f"The vLLM server at {self.vllm_client.base_url} did not load the adapter of agent {role!r} from "
                f"{folder}: {response.status_code}, {response.text}. It must see that folder, and be started with "
                f"`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` in its environment and `--enable-lora --max-loras "
                f"{len(self.roles)} --max-lora-rank {max_lora_rank(self._configs)}`."
            )


class AdapterEngine:
    """
    A vLLM engine as TRL uses it, that answers with one of its adapters.

    Args:
        llm (`vllm.LLM`):
            The engine.
    """

    def __init__(self, llm):
        self.llm = llm
        self.requests = {}  # vLLM's handle of each agent's adapter
        self.role = None
        self.number = 0

    def load(self, role: str, folder: Path) -> None:
        """Answers for an agent with the adapter in a folder. vLLM reads it when it is first used."""
        from vllm.lora.request import LoRARequest

        self.number += 1  # vLLM knows an adapter by its number, and keeps what it has read under one
        self.requests[role] = LoRARequest(role, self.number, str(folder))

    def generate(self, prompts, **kwargs):
        return self.llm.generate(prompts, lora_request=self.requests[self.role], **kwargs)

    def wake_up(self, tags: list[str]) -> None:
        self.llm.wake_up(tags=tags)

    def sleep(self, level: int) -> None:
        self.llm.sleep(level=1)  # TRL's level 2 drops the weights, and nobody sends the base's again


def make_generations(
    policies: dict[str, PreTrainedModel | PeftModel],
    eos_token_ids: dict[str, list[int]],
    accelerator: Accelerator,
    args: GRPOConfig,
) -> dict[str, AgentGeneration]:
    """
    Connects to the servers, or starts the engines, that sample for the agents.

    Args:
        policies (`dict[str, PreTrainedModel]` or `dict[str, PeftModel]`):
            What computes for each role. Roles with the same object share it: a model whose weights they share, or a
            `PeftModel` with an adapter named after each of them.
        eos_token_ids (`dict[str, list[int]]`):
            The tokens that end a completion of each role, and no others do.
        accelerator (`Accelerator`):
            The trainer's.
        args ([`MAGRPOConfig`]):
            The `vllm_*` and sampling fields.

    Returns:
        `dict[str, AgentGeneration]`: The generation of each role, one object for roles that share a model.
    """
    groups = roles_by_model(policies)
    urls = server_urls(groups, args) if args.vllm_mode == "server" else [None] * len(groups)
    generations = {}
    for k, roles in enumerate(groups):
        kwargs = {
            "model": policies[roles[0]],
            "accelerator": accelerator,
            "processing_class": None,  # TRL looks for image tokens with it
            "mode": args.vllm_mode,
            "structured_outputs_regex": args.vllm_structured_outputs_regex,
            "server_base_url": urls[k],
            "server_timeout": args.vllm_server_timeout,
            "group_port": args.vllm_group_port + k,
            "tensor_parallel_size": args.vllm_tensor_parallel_size,
            "gpu_memory_utilization": args.vllm_gpu_memory_utilization / len(groups),
            "max_model_length": args.vllm_max_model_length,
            "max_num_seqs": args.rows_per_device * args.vllm_tensor_parallel_size,
            "enable_sleep_mode": args.vllm_enable_sleep_mode,
            "model_impl": args.vllm_model_impl,
            "trust_remote_code": args.trust_remote_code,
            "repetition_penalty": args.repetition_penalty,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "max_completion_length": args.max_completion_length,
            "logprobs": 0,
            "generation_kwargs": {
                **(args.generation_kwargs or {}),
                "stop_token_ids": eos_token_ids[roles[0]],
                "ignore_eos": True,  # those of the model's files, which need not be the agent's
            },
        }
        if is_peft_model(policies[roles[0]]):
            folder = Path(args.vllm_adapter_dir or Path(args.output_dir) / "vllm_adapters").resolve()
            generation = AdapterGeneration(roles=roles, folder=folder / uuid.uuid4().hex, **kwargs)
        else:
            generation = AgentGeneration(**kwargs)
        generations |= dict.fromkeys(roles, generation)
        if args.vllm_mode == "server" and accelerator.is_main_process and args.vllm_importance_sampling_correction:
            _check_logprobs(generation.vllm_client)
    if args.vllm_mode == "colocate":
        # An engine seeds the process's generators when it starts, and then samples with them. The processes of one
        # engine must sample alike
        set_seed(args.seed + accelerator.process_index // args.vllm_tensor_parallel_size)
    return generations


def roles_by_model(policies: dict[str, PreTrainedModel | PeftModel]) -> list[list[str]]:
    """The roles of each distinct model."""
    groups = {}
    for role, model in policies.items():
        groups.setdefault(id(model), []).append(role)
    return list(groups.values())


def server_urls(groups: list[list[str]], args: GRPOConfig) -> list[str]:
    """The server of each distinct model, given the roles that use it."""
    by_role = args.vllm_server_base_urls
    if by_role is None:
        if len(groups) > 1:
            raise ValueError(
                f"The agents have {len(groups)} models of their own, and each needs a vLLM server: set "
                f"`vllm_server_base_urls` to one URL per role, {[roles[0] for roles in groups]}."
            )
        return [args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"]
    roles = [role for group in groups for role in group]
    unknown = sorted(set(by_role) - set(roles))
    missing = [role for group in groups for role in group if role not in by_role]
    if unknown or missing:
        raise ValueError(
            f"`vllm_server_base_urls` needs one URL per role, {roles}: "
            + (f"{missing} are missing." if missing else f"{unknown} are no roles.")
        )
    for group in groups:
        if len({by_role[role] for role in group}) > 1:
            raise ValueError(f"{group} have one model, but several servers in `vllm_server_base_urls`.")
    urls = [by_role[group[0]] for group in groups]
    for url in urls:
        if urls.count(url) > 1:
            sharing = [group[0] for group in groups if by_role[group[0]] == url]
            raise ValueError(f"{sharing} have models of their own, but one server, {url}: it holds one model.")
    return urls


def check_vllm(policies: dict[str, PreTrainedModel | PeftModel], args: GRPOConfig) -> None:
    """Refuses, before anything is started, a team that vLLM cannot sample for as configured."""
    groups = roles_by_model(policies)
    if args.vllm_mode == "server":
        server_urls(groups, args)
    elif args.vllm_enable_sleep_mode and len(groups) > 1:
        raise ValueError(
            f"`vllm_enable_sleep_mode` works with one engine per process, and the team's {len(groups)} models need one "
            "each. Turn it off, let the agents share a model, or use `vllm_mode='server'`."
        )
    for role, model in policies.items():
        if is_peft_model(model):
            _check_vllm_supports(role, model.peft_config[role])
            max_lora_rank({role: model.peft_config[role]})
        # An engine is started by the name of the model
        if args.vllm_mode == "colocate" and not (model.name_or_path and find_file(model.name_or_path, MODEL_CONFIG)):
            raise ValueError(
                f"The model of agent {role!r} was loaded from {model.name_or_path!r}, where vLLM finds no config.json: "
                "start from a model id or from the agent's own folder."
            )


def _check_vllm_supports(role: str, config: LoraConfig) -> None:
    refused = {
        "use_dora": (config.use_dora, False),
        "bias": (config.bias, "none"),
        "modules_to_save": (config.modules_to_save or None, None),
    }
    for name, (value, supported) in refused.items():
        if value != supported:
            raise ValueError(
                f"vLLM cannot sample with the adapter of agent {role!r}: `{name}` is {value!r}, it must be {supported!r}."
            )


def max_lora_rank(configs: dict[str, LoraConfig]) -> int:
    """The smallest of vLLM's settings for the rank that is enough for all adapters."""
    from vllm.config.lora import MaxLoRARanks

    allowed = get_args(MaxLoRARanks)
    rank = max(max([config.r, *config.rank_pattern.values()]) for config in configs.values())
    if rank > max(allowed):
        raise ValueError(f"vLLM samples with adapters of rank {max(allowed)} at most; the agents' have {rank}.")
    return min(choice for choice in allowed if choice >= rank)


def _check_logprobs(client: VLLMClient) -> None:
    mode = client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        raise ValueError(
            f"The vLLM server at {client.base_url} runs with `--logprobs-mode {mode}`, which makes the importance sampling "
            "correction wrong. Restart it with `--logprobs-mode processed_logprobs`, or set "
            "`vllm_importance_sampling_correction` to False."
        )


def sampling_correction(logps: torch.Tensor, rows: dict[str, torch.Tensor], args: GRPOConfig) -> torch.Tensor:
    """
    How much likelier a completion is under the policy than under the engine that sampled it, bounded.

    Source: the correction of TRL's GRPO. Every update uses completions of the policy that it starts from, so that the
    log-probabilities of the update's own forward serve as the old policy's.

    Args:
        logps (`torch.Tensor` of shape `(num_rows, completion_length)`):
            Log-probabilities of the tokens under the policy.
        rows (`dict[str, torch.Tensor]`):
            `completion_mask` and `sampling_per_token_logps` (NaN: no correction) of that shape.
        args ([`MAGRPOConfig`]):
            The `vllm_importance_sampling_*` fields.

    Returns:
        `torch.Tensor`: Factors of the loss, of shape `(num_rows, 1)` in the `"sequence_*"` modes, else of the shape of
        `logps`.
    """
    granularity, constraint = args.vllm_importance_sampling_mode.split("_")
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    difference = (logps.detach() - rows["sampling_per_token_logps"]).nan_to_num(nan=0.0) * rows["completion_mask"]
    if granularity == "sequence":
        difference = difference.sum(dim=1, keepdim=True)
    ratio = difference.exp()
    if constraint == "truncate":
        return ratio.clamp(low, high)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
