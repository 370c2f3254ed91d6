"""
Samples completions with vLLM, on top of TRL's `VLLMGeneration`.

Every distinct model has an engine or a server, and its weights are sent there after every update. Agents that are adapters
on one base share an engine or a server: it loads the base once, and only the adapters are sent.
"""

import math
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, cast, get_args

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from peft import LoraConfig, PeftModel
from torch import distributed
from transformers import PreTrainedModel, set_seed
from trl.extras.profiling import ProfilingContext
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from trl_multiagent.environments.task_errors import UnavailableError, describe
from trl_multiagent.folders import MODEL_CONFIG
from trl_multiagent.models.pretrained import adapter_parameters, find_file
from trl_multiagent.trainers.base.rollout_config import RolloutConfig


# Mean difference of the log-probabilities of engine and trainer per token, in nats, above which both have different weights.
# Different kernels and bfloat16 make about 0.03
LARGEST_DIFFERENCE = 0.3
LARGEST_SHARE_OUTSIDE = 0.5  # of the ratios that are outside of the bounds of the sampling correction
COMPARED_TOKENS = 64  # of a prompt, when a server is compared with the trainer
SUPPORTED_BY_VLLM = {"use_dora": False, "bias": "none", "modules_to_save": None}  # options of an adapter


class EngineError(UnavailableError):
    """Raised if an engine or a server samples from another model than the one that is trained. The message names the agent."""


class AgentGeneration(VLLMGeneration):
    """
    Samples from one model: that of one agent, or of several agents that share all weights.

    The arguments are those of TRL's class. That class requires the same number of prompts on all processes; here the processes may have
    different numbers.
    """

    adapter: str | None = None  # the adapter that the model samples with; `None` for a model without adapters

    def __init__(self, **kwargs: Any):
        self.loaded_steps: dict[str | None, int] = {}  # the optimizer step of the weights in the engine, by adapter
        self.compared: set[str | None] = set()  # the adapters whose server has been compared with the trainer
        super().__init__(**kwargs)

    def sample(
        self, role: str, prompt_ids: list[list[int]], num_generations: int, step: int
    ) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
        """
        Samples completions for each prompt of this process. Every process must call it, even if it has no prompts. `step` is the number of
        optimizer steps so far: the weights are sent before the first completions of a step.

        Returns:
            `tuple` of two lists with one entry per prompt: its completions, as token ids up to and including the first end-of-sequence
            token; and the log-probabilities in nats with which the engine sampled these tokens, NaN if the engine returned none.

        Raises:
            EngineError: A server gives the first prompt another probability than the trainer does.
        """
        if self.loaded_steps.get(self.adapter) != step:
            self.sync_weights()
            self.loaded_steps[self.adapter] = step
        if self.mode == "server" and self.adapter not in self.compared:
            self._compare(role, prompt_ids)
        prompts = [ids for ids in prompt_ids for _ in range(num_generations)]
        _, completion_ids, logprobs, _ = self.generate(prompts, None, num_generations)
        completion_ids = [list(ids) for ids in completion_ids]
        # TRL requests one log-probability per position, that of the sampled token
        logps = [[math.nan if entry[0] is None else entry[0] for entry in sequence] for sequence in logprobs]
        starts = range(0, len(prompts), num_generations)
        return (
            [completion_ids[k : k + num_generations] for k in starts],
            [logps[k : k + num_generations] for k in starts],
        )

    def _compare(self, role: str, prompt_ids: list[list[int]]) -> None:
        """Compares the log-probabilities that the server and the trainer give to the tokens of a prompt."""
        shared = [prompt_ids[0][:COMPARED_TOKENS] if prompt_ids else []]
        broadcast_object_list(shared)  # the first process asks the server
        (ids,) = shared
        if len(ids) < 2:
            return
        self.compared.add(self.adapter)
        tokens = torch.tensor([ids], device=self.accelerator.device)
        with torch.no_grad():  # under ZeRO-3, this takes all processes
            logps = self.model(input_ids=tokens).logits[:, :-1].float().log_softmax(-1)
        own = logps.gather(-1, tokens[:, 1:, None]).flatten().tolist()
        problem = [self._problem_of_server(role, ids, own) if self.accelerator.is_main_process else None]
        broadcast_object_list(problem)
        if problem[0] is not None:
            raise EngineError(problem[0])

    def _problem_of_server(self, role: str, ids: list[int], own: list[float]) -> str | None:
        """Returns why the server does not have the trainer's weights, which give the log-probabilities `own`; `None` if it has them."""
        client, model = self.vllm_client, self.model.name_or_path
        where = f"agent {role!r}: the vLLM server at {client.base_url} samples with {client.model}, the trainer has {model}"
        advice = "Start it with the model of the agent, which must not be used by another run."
        try:
            (theirs,) = client.get_sequence_logprobs([ids], [1], top_logprobs=1)["actual_logprobs"]
        except Exception as error:  # TRL raises whatever the server answers, such as that it does not know a token
            return f"{where}, whose tokens the server refuses ({describe(error)}). {advice}"
        difference = fmean(abs(x - y) for x, (y,) in zip(own, theirs, strict=True))
        if difference <= LARGEST_DIFFERENCE:
            return None
        return (
            f"{where}, and their log-probabilities of a prompt are {difference:.2f} nats per token apart (at most {LARGEST_DIFFERENCE}). "
            f"{advice}"
        )

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list | None] | None,
        num_generations: int,
        profiler: ProfilingContext | None = None,
    ) -> tuple:
        group = self._process_group()
        by_process: list[Any] = [prompts]
        if group is not None:
            by_process = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(by_process, prompts, group=group)
        if self.mode == "server" and not any(by_process):
            return [], [], [], []
        if group is None:
            return super().generate(prompts, images, num_generations, profiler)
        # TRL's split of the results is correct only if all processes request equally many. Therefore the first process
        # requests all completions, the others request none, and the first broadcasts the results
        rank = distributed.get_rank(group)
        everything = [ids for share in by_process for ids in share] if rank == 0 else []
        outputs: list[Any] = [super().generate(everything, images, num_generations, profiler)]
        distributed.broadcast_object_list(outputs, src=distributed.get_global_rank(group, 0), group=group)
        start = sum(len(share) for share in by_process[:rank])
        return tuple(x[start : start + len(prompts)] for x in outputs[0])

    def _process_group(self) -> distributed.ProcessGroup | None:
        """Returns the processes that make one request together: all of them for a server, those of one engine in colocate mode."""
        if self.mode == "server":
            return distributed.group.WORLD if self.accelerator.num_processes > 1 else None
        return self.tp_group if self.tensor_parallel_size > 1 else None


class AdapterGeneration(AgentGeneration):
    """
    Samples from several agents that are LoRA adapters on one base. Each adapter has the name of its agent's role.

    The engine loads the base once. After an update, it receives the adapters as files in `folder`. The `kwargs` are arguments of TRL's
    `VLLMGeneration`.
    """

    _llm_weights_sleeping: bool  # set by TRL when the engine starts

    def __init__(self, roles: Sequence[str], folder: Path, **kwargs: Any):
        self.roles = roles
        self.folder = folder
        self.versions = dict.fromkeys(roles, 0)  # number of times that each adapter was written
        super().__init__(**kwargs)

    @property
    def _configs(self) -> dict[str, LoraConfig]:
        return {role: cast(LoraConfig, self.model.peft_config[role]) for role in self.roles}

    def _init_vllm(self) -> None:
        if self.mode == "server":  # TRL's communicator is not needed, because it transfers weights
            if self.accelerator.is_main_process:
                self.vllm_client = VLLMClient(base_url=self.server_base_url, connection_timeout=self.server_timeout)
            self.accelerator.wait_for_everyone()
            return

        lora = {"enable_lora": True, "max_loras": len(self.roles), "max_lora_rank": max_lora_rank(self._configs)}
        engine_class = vllm_generation.LLM
        # TRL creates the engine, and its arguments cannot enable adapters
        vllm_generation.LLM = lambda **arguments: AdapterEngine(engine_class(**arguments, **lora))
        try:
            super()._init_vllm()
        finally:
            vllm_generation.LLM = engine_class

    def sample(
        self, role: str, prompt_ids: list[list[int]], num_generations: int, step: int
    ) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
        self.adapter = role
        if self.mode == "server":
            if self.accelerator.is_main_process:
                self.vllm_client.model = role  # a request for the name of an adapter is answered by the base with it
        else:
            self.llm.role = role
            if self._llm_weights_sleeping:
                empty_cache()
                self.llm.wake_up(tags=["weights"])
                self._llm_weights_sleeping = False
        return super().sample(role, prompt_ids, num_generations, step)

    def sync_weights(self) -> None:
        role = cast(str, self.adapter)
        self.versions[role] += 1
        # The engine's prefix cache identifies an adapter by name and path, so every version needs its own path
        folder = self.folder / f"{role}-{self.versions[role]}"
        writes = self.mode == "colocate" or self.accelerator.is_main_process
        with self._dist.gather_params(adapter_parameters(cast(PeftModel, self.model), role)):
            if writes:
                self.model.save_pretrained(str(folder), selected_adapters=[role], save_embedding_layers=False)
        if not writes:
            return
        if self.mode == "colocate":
            self.llm.load(role, folder / role)
        else:
            self._load_on_server(role, folder / role)
        if self.versions[role] > 1:
            shutil.rmtree(self.folder / f"{role}-{self.versions[role] - 1}")

    def _load_on_server(self, role: str, folder: Path) -> None:
        response = self.vllm_client.session.post(
            f"{self.vllm_client.base_url}/v1/load_lora_adapter",
            json={"lora_name": role, "lora_path": str(folder), "load_inplace": True},
        )
        if response.status_code != 200:
            raise RuntimeError(
                f"The vLLM server at {self.vllm_client.base_url} did not load the adapter of agent {role!r} from "
                f"{folder}: {response.status_code}, {response.text}. It must have access to that folder, and be started with "
                f"`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` in its environment and `--enable-lora --max-loras "
                f"{len(self.roles)} --max-lora-rank {max_lora_rank(self._configs)}`."
            )


class AdapterEngine:
    """Makes an engine, a `vllm.LLM`, sample with one of its adapters. It has the methods that TRL calls."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.requests: dict[str, Any] = {}  # vLLM's handle of each agent's adapter
        self.role: str | None = None  # the agent that the next call samples for
        self.num_loaded = 0

    def load(self, role: str, folder: Path) -> None:
        """Sets the adapter of an agent to that in a folder. vLLM reads the folder when the adapter is first used."""
        from vllm.lora.request import LoRARequest

        # vLLM identifies an adapter by a number, and does not read the files of a known one again
        self.num_loaded += 1
        self.requests[role] = LoRARequest(role, self.num_loaded, str(folder))

    def generate(self, prompts: list[Any], **kwargs: Any) -> Any:
        return self.llm.generate(prompts, lora_request=self.requests[cast(str, self.role)], **kwargs)

    def wake_up(self, tags: list[str]) -> None:
        self.llm.wake_up(tags=tags)

    def sleep(self, level: int) -> None:
        # TRL asks for level 2, which discards the weights. Those of the base are not sent again
        self.llm.sleep(level=1)


def make_generations(
    policies: dict[str, PreTrainedModel | PeftModel],
    eos_token_ids: dict[str, list[int]],
    accelerator: Accelerator,
    args: RolloutConfig,
) -> dict[str, AgentGeneration]:
    """
    Connects to the servers, or starts the engines, that sample for the agents. Returns one object for roles with the same model: a model
    whose weights they share, or a `PeftModel` with an adapter of each role's name. `eos_token_ids`: the only tokens that end a completion.
    """
    groups = roles_by_model(policies)
    urls: Sequence[str | None] = [None] * len(groups)
    if args.vllm_mode == "server":
        urls = server_urls(groups, args)
    generations: dict[str, AgentGeneration] = {}
    for k, roles in enumerate(groups):
        model = policies[roles[0]]
        kwargs = {
            **_sampling_arguments(args, eos_token_ids[roles[0]]),
            "model": model,
            "accelerator": accelerator,
            "processing_class": None,  # TRL needs it for image tokens only
            "mode": args.vllm_mode,
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
        }
        generation: AgentGeneration
        if isinstance(model, PeftModel):
            folder = Path(args.vllm_adapter_dir or Path(cast(str, args.output_dir)) / "vllm_adapters").resolve()
            generation = AdapterGeneration(roles=roles, folder=folder / uuid.uuid4().hex, **kwargs)
        else:
            generation = AgentGeneration(**kwargs)
        generations |= dict.fromkeys(roles, generation)
        if args.vllm_mode == "server" and accelerator.is_main_process and args.vllm_importance_sampling_correction:
            _check_logprobs_mode(generation.vllm_client)
    if args.vllm_mode == "colocate":
        # An engine samples with the generators of its process, and seeds them when it starts. The processes of one engine
        # need the same seed
        set_seed(args.seed + accelerator.process_index // args.vllm_tensor_parallel_size)
    return generations


def _sampling_arguments(args: RolloutConfig, eos_token_ids: list[int]) -> dict[str, Any]:
    """Returns the sampling settings of an agent, as arguments of TRL's `VLLMGeneration`."""
    return {
        "structured_outputs_regex": args.vllm_structured_outputs_regex,
        "repetition_penalty": args.repetition_penalty,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "max_completion_length": args.max_completion_length,
        "logprobs": 0,
        "generation_kwargs": {
            **cast(dict, args.generation_kwargs or {}),
            "stop_token_ids": eos_token_ids,
            "ignore_eos": True,  # the end-of-sequence tokens in the model's files may differ from the agent's
        },
    }


def roles_by_model(policies: dict[str, PreTrainedModel | PeftModel]) -> list[list[str]]:
    """Returns the roles of each distinct model."""
    groups: dict[int, list[str]] = {}
    for role, model in policies.items():
        groups.setdefault(id(model), []).append(role)
    return list(groups.values())


def server_urls(groups: list[list[str]], args: RolloutConfig) -> list[str]:
    """
    Returns the URL of each distinct model's server. `groups` are the roles of each model.

    Raises:
        ValueError: a server is missing, or the servers do not fit the models.
    """
    by_role = args.vllm_server_base_urls
    if by_role is None:
        if len(groups) > 1:
            raise ValueError(
                f"The agents have {len(groups)} models of their own, and each needs a vLLM server: set "
                f"`vllm_server_base_urls` to one URL per role, {[roles[0] for roles in groups]}."
            )
        return [args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"]
    roles = [role for group in groups for role in group]
    if set(by_role) != set(roles):
        unknown, missing = sorted(set(by_role) - set(roles)), [role for role in roles if role not in by_role]
        problem = f"{missing} are missing." if missing else f"{unknown} are not roles."
        raise ValueError(f"`vllm_server_base_urls` needs one URL per role, {roles}: {problem}")
    urls: dict[str, list[str]] = {}
    for group in groups:
        if len({by_role[role] for role in group}) > 1:
            raise ValueError(f"{group} have one model, but several servers in `vllm_server_base_urls`.")
        urls.setdefault(by_role[group[0]], []).append(group[0])
    for url, sharing in urls.items():
        if len(sharing) > 1:
            raise ValueError(f"{sharing} have models of their own, but one server, {url}: it holds one model.")
    return list(urls)


def check_vllm(policies: dict[str, PreTrainedModel | PeftModel], args: RolloutConfig) -> None:
    """Raises `ValueError` if vLLM cannot sample for a team as configured, before anything is started."""
    groups = roles_by_model(policies)
    if args.vllm_mode == "server":
        server_urls(groups, args)
    elif args.vllm_enable_sleep_mode and len(groups) > 1:
        raise ValueError(
            f"`vllm_enable_sleep_mode` works with one engine per process, and the team's {len(groups)} models need one "
            "each. Turn it off, let the agents share a model, or use `vllm_mode='server'`."
        )
    for role, model in policies.items():
        if isinstance(model, PeftModel):
            adapter_config = cast(LoraConfig, model.peft_config[role])
            for name, supported in SUPPORTED_BY_VLLM.items():
                value = getattr(adapter_config, name) or supported
                if value != supported:
                    raise ValueError(
                        f"vLLM cannot sample with the adapter of agent {role!r}: `{name}` is {value!r}, but must be {supported!r}."
                    )
            max_lora_rank({role: adapter_config})
        # An engine loads the model by its name
        if args.vllm_mode == "colocate" and not (model.name_or_path and find_file(model.name_or_path, MODEL_CONFIG)):
            raise ValueError(
                f"The model of agent {role!r} was loaded from {model.name_or_path!r}, where vLLM finds no config.json: "
                "start from a model id or from the agent's own folder."
            )


def max_lora_rank(configs: dict[str, LoraConfig]) -> int:
    """Returns the smallest value of vLLM's setting `max_lora_rank` that is sufficient for all adapters."""
    from vllm.config.lora import MaxLoRARanks

    allowed = get_args(MaxLoRARanks)
    rank = max(max([config.r, *(config.rank_pattern or {}).values()]) for config in configs.values())
    if rank > max(allowed):
        raise ValueError(f"vLLM samples with adapters of rank {max(allowed)} at most; the agents' have {rank}.")
    return min(choice for choice in allowed if choice >= rank)


def _check_logprobs_mode(client: VLLMClient) -> None:
    """Raises `ValueError` if a server returns log-probabilities of another distribution than it samples from."""
    mode = client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        raise ValueError(
            f"The vLLM server at {client.base_url} runs with `--logprobs-mode {mode}`, which makes the importance sampling "
            "correction wrong. Restart it with `--logprobs-mode processed_logprobs`, or set "
            "`vllm_importance_sampling_correction` to False."
        )
