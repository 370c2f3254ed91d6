"""Checks that vLLM can sample for a team as configured, before anything is started."""

from typing import cast, get_args

import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel
from trl.generation.vllm_client import VLLMClient

from trl_multiagent.folders import MODEL_CONFIG
from trl_multiagent.models.pretrained import find_file
from trl_multiagent.trainers.base.rollout_config import RolloutConfig


SUPPORTED_BY_VLLM = {"use_dora": False, "bias": "none", "modules_to_save": None}  # options of an adapter


def roles_by_model(policies: dict[str, PreTrainedModel | PeftModel]) -> list[list[str]]:
    """Returns the roles of each distinct model."""
    groups: dict[int, list[str]] = {}
    for role, model in policies.items():
        groups.setdefault(id(model), []).append(role)
    return list(groups.values())


def server_urls(groups: list[list[str]], args: RolloutConfig) -> list[str]:
    """
    Returns the URL of each model's server. `groups`: the roles of each model. Raises `ValueError` if the servers do
    not fit them.
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
            f"`vllm_enable_sleep_mode` works with one engine per process, and the team's {len(groups)} models "
            "need one "
            "each. Turn it off, let the agents share a model, or use `vllm_mode='server'`."
        )
    if args.vllm_mode == "colocate" and torch.cuda.is_available():
        check_memory(policies, args, torch.cuda.get_device_properties(args.device).total_memory)
    for role, model in policies.items():
        if isinstance(model, PeftModel):
            adapter_config = cast(LoraConfig, model.peft_config[role])
            for name, supported in SUPPORTED_BY_VLLM.items():
                value = getattr(adapter_config, name) or supported
                if value != supported:
                    raise ValueError(
                        f"vLLM cannot sample with the adapter of agent {role!r}: `{name}` is {value!r}, but must "
                        f"be {supported!r}."
                    )
            max_lora_rank({role: adapter_config})
        # An engine loads the model by its name
        if args.vllm_mode == "colocate" and not (model.name_or_path and find_file(model.name_or_path, MODEL_CONFIG)):
            raise ValueError(
                f"The model of agent {role!r} was loaded from {model.name_or_path!r}, where vLLM finds no "
                "config.json: "
                "start from a model id or from the agent's own folder."
            )


def engine_dtype(model: PreTrainedModel | PeftModel, args: RolloutConfig) -> torch.dtype:
    """Returns the data type in which the trainer computes with a model, which is also that of its engine."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else model.dtype


def check_memory(policies: dict[str, PreTrainedModel | PeftModel], args: RolloutConfig, total: int) -> None:
    """Raises `ValueError` if the weights of a model do not fit into its engine's part of a GPU with `total` bytes."""
    groups = roles_by_model(policies)
    part = total * args.vllm_gpu_memory_utilization / len(groups)
    for role, *_ in groups:
        size = sum(
            x.numel() * (engine_dtype(policies[role], args) if x.is_floating_point() else x.dtype).itemsize
            for x in policies[role].parameters()
        )
        size //= args.vllm_tensor_parallel_size
        if size >= part:
            raise ValueError(
                f"The weights of agent {role!r} take {size / 1e9:.1f} GB, but its vLLM engine gets "
                f"{part / 1e9:.1f} GB: the share "
                f"`vllm_gpu_memory_utilization`, {args.vllm_gpu_memory_utilization:g}, of {total / 1e9:.1f} GB, "
                f"in {len(groups)} equal "
                f"parts. Set it to more than {size * len(groups) / total:.2f}, or use `vllm_mode: server`."
            )


def max_lora_rank(configs: dict[str, LoraConfig]) -> int:
    """Returns the smallest value of vLLM's setting `max_lora_rank` that is sufficient for all adapters."""
    from vllm.config.lora import MaxLoRARanks

    allowed = get_args(MaxLoRARanks)
    rank = max(max([config.r, *(config.rank_pattern or {}).values()]) for config in configs.values())
    if rank > max(allowed):
        raise ValueError(f"vLLM samples with adapters of rank {max(allowed)} at most; the agents' have {rank}.")
    return min(choice for choice in allowed if choice >= rank)


def check_logprobs_mode(client: VLLMClient) -> None:
    """Raises `ValueError` if a server's log-probabilities are not those of the distribution from which it samples."""
    mode = client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        raise ValueError(
            f"The vLLM server at {client.base_url} runs with `--logprobs-mode {mode}`, so its log-probabilities "
            "cannot be compared "
            "with the trainer's. Restart it with `--logprobs-mode processed_logprobs`."
        )
