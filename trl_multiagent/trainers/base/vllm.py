"""
Samples completions with vLLM, on top of TRL's `VLLMGeneration`.

Every distinct model has an engine or a server, and its weights are sent there after every update. Agents that are
adapters on one base share an engine or a server: it loads the base once, and only the adapters are sent. An engine
samples for all of its agents in one call. Servers are asked in parallel.
"""

import copy
import math
import os
import shutil
import socket
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, patch_environment
from peft import PeftModel
from safetensors.torch import save_file
from torch import distributed
from transformers import set_seed
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration, empty_cache
from trl.import_utils import is_vllm_available

from trl_multiagent.console import install_command
from trl_multiagent.environments.task_errors import UnavailableError, describe
from trl_multiagent.jobs.distributed import error_barrier
from trl_multiagent.models.generation import Completion, Sampled
from trl_multiagent.models.pretrained import adapter_parameters, temporarily_set
from trl_multiagent.rollout.sampler import TurnPrompts
from trl_multiagent.rollout.tree import grouped
from trl_multiagent.trainers.base.rollout_config import RolloutConfig


# If the log-probabilities of engine and trainer differ more per token, on average and in nats, their weights differ.
# Different kernels and bfloat16 make a difference of about 0.03
LARGEST_DIFFERENCE = 0.3
LARGEST_SHARE_OUTSIDE = 0.5  # share of the ratios that are outside of the bounds of the sampling correction
SECONDS_TO_ANSWER = 10.0  # within which a server must answer before weights are sent to it
MEMORY, ROOM = Path("/dev/shm"), 4  # a folder in memory; it must have room for so many copies of the adapters
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Arguments of TRL's class that have the same names in the configuration, or the same names after `vllm_`
SAME_NAMES = "repetition_penalty temperature top_p top_k min_p max_completion_length trust_remote_code".split()
VLLM_NAMES = """
    mode server_timeout tensor_parallel_size max_model_length enable_sleep_mode model_impl structured_outputs_regex
""".split()

Prompts = dict[str, list[list[int]]]  # token ids of the prompts of each agent


class EngineError(UnavailableError):
    """Raised if an engine or a server does not sample from the trained model. The message names the agent."""


class AgentGeneration(VLLMGeneration):
    """
    Samples from one model, which belongs to one agent or to several that share all weights.

    Args:
        roles (`Sequence[str]`): The agents.
        stop_strings (`Mapping[str, Sequence[str]]`): Strings that end a completion, by role.
        dtype (`str`): The data type of the engine.
        folder (`Path`, *optional*): Folder of the node through which an engine or a server receives the weights. By
            default, a server receives them over NCCL.
        kwargs: Arguments of TRL's class.
    """

    _llm_weights_sleeping: bool  # set by TRL when the engine starts

    def __init__(
        self,
        roles: Sequence[str],
        stop_strings: Mapping[str, Sequence[str]],
        dtype: str,
        folder: Path | None = None,
        **kwargs: Any,
    ):
        self.roles, self.stop_strings, self.dtype = roles, stop_strings, dtype
        self.folder = self.node_folder = folder
        # The optimizer step of the last sent weights, by their owner, and whether all processes sent them
        self.sent_steps: dict[str, tuple[int, bool]] = {}
        self.num_folders = 0
        self.unread: dict[str, Path] = {}  # folders with weights that a server has not read yet, by owner
        if folder is not None:
            accelerator = kwargs["accelerator"]
            if not accelerator.is_local_main_process:
                folder = folder.with_name(f"{folder.name}-{accelerator.process_index}")
            self.folder = folder  # of this process
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)  # at process exit at the latest
        super().__init__(**kwargs)

    def owner(self, role: str) -> str:
        """
        Returns the agent that gives its name to the weights of `role` when they are sent. Agents that share all
        weights use the first agent's name.
        """
        return self.roles[0]

    def _init_vllm(self) -> None:
        if self.mode == "colocate":
            self._start_engine()
            return
        try:
            if self.folder is None:
                super()._init_vllm()
            elif self.accelerator.is_main_process:  # without TRL's communicator for NCCL
                self.vllm_client = VLLMClient(base_url=self.server_base_url, connection_timeout=self.server_timeout)
        except OSError as error:
            raise EngineError(f"agent {self.roles[0]!r}: {describe(error)}") from error
        if self.accelerator.is_main_process:
            self.vllm_client.session.max_redirects = 0  # one would send prompts to another host
        self.accelerator.wait_for_everyone()

    def _start_engine(self, **arguments: Any) -> None:
        """Starts the engine. TRL creates it, but cannot pass these arguments to `vllm.LLM`."""
        engine_class = vllm_generation.LLM

        def start(**given: Any) -> Engine:
            llm = engine_class(**given, dtype=self.dtype, **arguments)
            return Engine(llm, self.stop_strings, keeps_weights=isinstance(self, AdapterGeneration))

        with temporarily_set(vllm_generation, LLM=start), launch_variables(self.accelerator.num_processes):
            super()._init_vllm()

    # Weights

    def update(self, role: str, step: int, together: bool = True) -> None:
        """
        Sends the weights of an agent after the optimizer step `step`. All processes must call this method, at the same
        time if they are `together`. Raises [`EngineError`] if the server does not answer.
        """
        owner = self.owner(role)
        if self.mode == "server":
            # Over NCCL, a dead server would make the processes wait
            on_first(self.accelerator, lambda: self.answered(role, self.vllm_client.check_server, SECONDS_TO_ANSWER))
        self._send(owner, together)
        self.sent_steps[owner] = step, together

    def _send(self, owner: str, together: bool) -> None:
        """
        Sends the weights to an engine or over NCCL, or writes them to a folder, which [`load`] makes the server read.
        """
        if self.folder is None:
            self.sync_weights()
            return
        writes = self.accelerator.is_main_process
        tensors = {
            name: parameter.detach().to("cpu", copy=True).contiguous()
            for name, parameter in self._iter_named_params()  # under ZeRO-3, this needs all processes
            if writes
        }
        if writes:
            folder = self._new_folder(owner)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            self.unread[owner] = folder

    def _new_folder(self, owner: str) -> Path:
        """Makes a folder with a new name, because vLLM's caches identify weights by their folder."""
        self.num_folders += 1
        folder = cast(Path, self.folder) / f"{owner}-{self.num_folders}"
        folder.mkdir(parents=True)
        return folder

    def sync_weights(self) -> None:
        if self.mode == "server":
            super().sync_weights()
            return
        if self.enable_sleep_mode:
            self.wake_up()
        # TRL would call `load_weights`, which fails where vLLM has replaced parameters after loading, as in mixtures
        # of experts
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._iter_named_params()})
        self.llm.reset_prefix_cache()

    def wake_up(self) -> None:
        """Wakes the weights of a sleeping engine."""
        empty_cache()
        self.llm.wake_up(tags=["weights"])
        self._llm_weights_sleeping = False

    def load(self) -> None:
        """
        Makes the server read the folders that were written since the last call. Only the first process calls this
        method.
        """
        for owner, folder in self.unread.items():
            self._read_on_server(owner, folder)
        self.unread = {}

    def _read_on_server(self, owner: str, folder: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._post_folder(owner, "collective_rpc", body, folder, "`VLLM_SERVER_DEV_MODE=1` in its environment")
        self.vllm_client.reset_prefix_cache()
        shutil.rmtree(folder)

    def _post_folder(self, owner: str, path: str, body: dict[str, Any], folder: Path, needs: str) -> None:
        """
        Requests that the server reads a folder with weights. `needs`: the options that the server must have for that.
        """
        response = self.vllm_client.session.post(f"{self.vllm_client.base_url}/{path}", json=body)
        if response.status_code != 200:
            raise EngineError(
                f"The vLLM server at {self.vllm_client.base_url} did not load the weights of agent {owner!r} from "
                f"{folder}: {response.status_code}, {response.text[:300]}. It must have access to that folder, and be "
                f"started with {needs}."
            )

    def answered(self, role: str, action: Callable[..., Any], *args: Any) -> Any:
        """Runs an action that uses the server, and returns its result. Raises [`EngineError`] if it fails."""
        try:
            return action(*args)
        except EngineError:
            raise
        except Exception as error:  # TRL raises the server's answer, and requests an error if there is none
            raise EngineError(
                f"agent {role!r}: the vLLM server at {self.vllm_client.base_url} gave no answer "
                f"({describe(error)[:300]}). If it has ended, start it again as before, and resume the run."
            ) from error

    # Completions

    def _client(self, role: str) -> VLLMClient:
        """Returns a client that makes its requests with an agent's weights."""
        return self.vllm_client

    def ask(self, role: str, prompt_ids: list[list[int]], num_generations: int) -> list[list[Completion]]:
        """Returns the server's completions for each prompt of an agent. Only the first process calls this method."""
        output = self._client(role).generate(
            prompts=prompt_ids,
            n=num_generations,
            repetition_penalty=self.repetition_penalty,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            max_tokens=self.max_completion_length,
            logprobs=self.logprobs,
            structured_outputs_regex=self.structured_outputs_regex,
            generation_kwargs={**self.generation_kwargs, **stopping(self.stop_strings.get(role, ()))},
        )
        return as_completions(output["completion_ids"], output["logprobs"], num_generations)

    def sample(self, prompts: Prompts, num_generations: int) -> Sampled:
        """
        Samples the completions of all agents of the engine in one call. All processes of an engine must call this
        method.
        """
        group = self.tp_group if self.tensor_parallel_size > 1 else None

        def ask(prompts: Prompts) -> Sampled:
            rows = [(role, ids) for role in prompts for ids in prompts[role] for _ in range(num_generations)]
            self.llm.rows = [role for role, _ in rows]
            # TRL splits the results correctly only if all processes request the same number. Therefore the first
            # process requests all completions, and the others none
            is_first = group is None or distributed.get_rank(group) == 0
            own = [ids for _, ids in rows] if is_first else []
            _, completion_ids, logprobs, _ = self.generate(own, None, num_generations)
            completions = iter(as_completions(completion_ids, logprobs, num_generations))
            return {role: [next(completions) for _ in prompts[role]] for role in prompts if is_first}

        return shared_answers(group, prompts, ask)


class AdapterGeneration(AgentGeneration):
    """
    Samples from several agents that are LoRA adapters on one base. Each adapter has the name of its agent's role.

    The engine loads the base once. After an update, it receives the adapters as files in the folder. The arguments are
    the same as in [`AgentGeneration`].
    """

    folder: Path

    def __init__(self, **kwargs: Any):
        self.last_folders: dict[str, Path] = {}  # that this process has written
        self.num_shared = 0
        super().__init__(**kwargs)

    def owner(self, role: str) -> str:
        return role

    @property
    def _rank(self) -> int:
        """The smallest value of vLLM's setting `max_lora_rank` that is sufficient for all adapters."""
        from vllm.config.lora import MaxLoRARanks

        configs = [self.model.peft_config[role] for role in self.roles]
        rank = max(rank for config in configs for rank in (config.r, *(config.rank_pattern or {}).values()))
        return min((choice for choice in get_args(MaxLoRARanks) if choice >= rank), default=rank)

    def _start_engine(self, **arguments: Any) -> None:
        arguments["revision"] = self.model.peft_config[self.roles[0]].revision  # of the base
        super()._start_engine(enable_lora=True, max_loras=len(self.roles), max_lora_rank=self._rank, **arguments)

    def _send(self, owner: str, together: bool) -> None:
        is_colocated = self.mode == "colocate"
        shares = is_colocated and together
        writes = self.accelerator.is_local_main_process if shares else is_colocated or self.accelerator.is_main_process
        folder = None
        if shares:  # one process writes for all processes of its node, which read after the next barrier
            self.num_shared += 1
            folder = cast(Path, self.node_folder) / f"{owner}-shared-{self.num_shared}"
        elif writes:
            folder = self._new_folder(owner)
        with self._dist.gather_params(adapter_parameters(self.model, owner)):
            if writes:
                self.model.save_pretrained(str(folder), selected_adapters=[owner], save_embedding_layers=False)
        if folder is None:
            return
        if is_colocated:
            self.llm.load(owner, folder / owner)
        else:
            self.unread[owner] = folder / owner
        if writes:
            if owner in self.last_folders:
                shutil.rmtree(self.last_folders[owner])
            self.last_folders[owner] = folder

    def _read_on_server(self, owner: str, folder: Path) -> None:
        body = {"lora_name": owner, "lora_path": str(folder), "load_inplace": True}
        needs = (
            "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` in its environment and "
            f"`--enable-lora --max-loras {len(self.roles)} --max-lora-rank {self._rank}`"
        )
        self._post_folder(owner, "v1/load_lora_adapter", body, folder, needs)

    def _client(self, role: str) -> VLLMClient:
        client = copy.copy(self.vllm_client)
        client.model = role  # vLLM answers a request for an adapter's name with the base and this adapter
        return client

    def sample(self, prompts: Prompts, num_generations: int) -> Sampled:
        if self._llm_weights_sleeping:
            self.wake_up()
        return super().sample(prompts, num_generations)


@dataclass
class Engine:
    """
    Makes an engine, a `vllm.LLM`, sample for several agents in one call, each with its own adapter and stop strings.
    """

    llm: Any
    stop_strings: Mapping[str, Sequence[str]]
    keeps_weights: bool  # whether the engine keeps the weights while it sleeps
    requests: dict[str, Any] = field(default_factory=dict)  # vLLM's handle of each agent's adapter
    rows: list[str] = field(default_factory=list)  # the agent of each prompt of the next call
    num_loaded: int = 0

    def load(self, role: str, folder: Path) -> None:
        """Sets the adapter of an agent to that in a folder. vLLM reads the folder when the adapter is first used."""
        from vllm.lora.request import LoRARequest

        # vLLM identifies an adapter by a number, and reads the files of a number only once
        self.num_loaded += 1
        self.requests[role] = LoRARequest(role, self.num_loaded, str(folder))

    def generate(self, prompts: list[Any], sampling_params: Any, use_tqdm: bool) -> Any:
        params = {}
        for role in set(self.rows):
            params[role] = copy.copy(sampling_params)
            for name, value in stopping(self.stop_strings.get(role, ())).items():
                setattr(params[role], name, value)
        adapters = [self.requests[role] for role in self.rows] if self.requests else None
        return self.llm.generate(
            prompts, [params[role] for role in self.rows], use_tqdm=use_tqdm, lora_request=adapters
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def sleep(self, level: int) -> None:
        # TRL asks for level 2, which discards the weights. But the weights of a base with adapters are sent only once
        self.llm.sleep(level=1 if self.keeps_weights else level)


def check_machine(args: RolloutConfig) -> None:
    """Raises an error if this machine, or the number of processes, cannot run vLLM as it could run elsewhere."""
    if not is_vllm_available():
        raise ImportError(f"`use_vllm=True` needs vLLM: {install_command('vllm')}.")
    if args.vllm_mode == "colocate" and args.world_size % args.vllm_tensor_parallel_size != 0:
        raise ValueError(
            f"`vllm_tensor_parallel_size` is {args.vllm_tensor_parallel_size}, which does not divide the "
            f"{args.world_size} processes."
        )


class VLLMGenerator:
    """Samples with vLLM. Sends the weights to vLLM before the first completions after an optimizer step."""

    synchronized = True  # as in [`~trainers.base.team_trainer.TrainerGenerator`]

    def __init__(self, trainer: Any):
        check_machine(trainer.args)
        self.trainer = trainer
        self.agents = make_generations(trainer.team, trainer.accelerator, trainer.args)
        self.max_new_tokens = trainer.args.max_completion_length
        self.stop_strings = trainer.args.stop_strings or {}

    def generate(self, turn: TurnPrompts) -> Sampled:
        self.send(turn.prompt_ids)
        self._wait()
        return sample_turn(self.agents, turn.prompt_ids, turn.num_generations, self.trainer.accelerator)

    def send(self, roles: Iterable[str]) -> None:
        """Sends the weights of agents that have changed since they were sent."""
        team = self.trainer.team
        for role in roles:
            self._wait()
            agent = self.agents[role]
            step = 0 if role in team.frozen else self.trainer.state.global_step
            sent = agent.sent_steps.get(agent.owner(role))
            if sent != (step, True) and (self.synchronized or sent != (step, False)):
                with team.activate(role):
                    agent.update(role, step, self.synchronized)

    def _wait(self) -> None:
        """Waits for the other processes before a collective operation."""
        if self.synchronized:
            error_barrier(self.trainer.accelerator)

    def forget_weights(self) -> None:
        """Makes the next call send the weights again."""
        for agent in self.agents.values():
            agent.sent_steps.clear()

    def check(self, role: str, numbers: list[float]) -> None:
        """
        Compares the log-probabilities of the engine with those of the policy.

        Args:
            role (`str`): The agent.
            numbers (`list[float]`): The numbers of [`~trainers.base.loss.sampling_correction`], summed over a batch.

        Raises:
            EngineError: The weights of the engine seem to differ from the trained ones: the difference is too large,
                too many ratios are out of bounds, or too many log-probabilities are missing.
        """
        outside, number, total, compared, sampled, _ = numbers
        difference, share, missing = total / max(1, compared), outside / max(1, number), 1 - compared / max(1, sampled)
        if sampled and missing > 0.5:
            raise EngineError(f"vLLM returned no log-probabilities for {missing:.0%} of the tokens of agent {role!r}.")
        if difference > LARGEST_DIFFERENCE or share >= LARGEST_SHARE_OUTSIDE:
            raise EngineError(
                f"Step {self.trainer.state.global_step + 1}: the log-probabilities with which vLLM sampled for agent "
                f"{role!r} differ from the policy's by {difference:.2f} nats per token, and {share:.0%} of the ratios "
                f"are outside of the bounds of the sampling correction (limits: {LARGEST_DIFFERENCE} nats, "
                f"{LARGEST_SHARE_OUTSIDE:.0%}). vLLM has other weights than the trainer: restart it with the agent's "
                "own model, and resume. A server needs `--logprobs-mode processed_logprobs`. If only its precision "
                "differs, set `vllm_importance_sampling_mode: token_truncate`, or weaken `top_p` and the like."
            )


def sample_turn(
    agents: Mapping[str, AgentGeneration], prompts: Prompts, num_generations: int, accelerator: Accelerator
) -> Sampled:
    """
    Samples the completions of all agents of a turn. Their weights must have been sent. All processes must call this
    function.
    """
    if next(iter(agents.values())).mode == "server":
        group = distributed.group.WORLD if accelerator.num_processes > 1 else None
        return shared_answers(
            group, prompts, lambda x: on_first(accelerator, lambda: ask_servers(agents, x, num_generations))
        )
    completions: Sampled = {}
    for engine in dict.fromkeys(agents[role] for role in prompts):
        own = {role: prompts[role] for role in prompts if agents[role] is engine}
        completions |= engine.sample(own, num_generations)
    return completions


def ask_servers(agents: Mapping[str, AgentGeneration], prompts: Prompts, num_generations: int) -> Sampled:
    """Asks the servers of all agents at the same time. A server reads new weights first."""

    def load(role: str) -> None:
        agents[role].answered(role, agents[role].load)

    def ask(role: str) -> list[list[Completion]]:
        return agents[role].answered(role, agents[role].ask, role, prompts[role], num_generations)

    asked = [role for role in prompts if prompts[role]]
    with ThreadPoolExecutor(max(1, len(asked))) as pool:
        list(pool.map(load, {agents[role]: role for role in prompts}.values()))
        return {role: [] for role in prompts} | dict(zip(asked, pool.map(ask, asked), strict=True))


def shared_answers(
    group: distributed.ProcessGroup | None,
    prompts: Prompts,
    ask: Callable[[Prompts], Sampled],
) -> Sampled:
    """
    Returns the answers to the prompts of this process. The processes of a group make one request together, and may
    have different numbers of prompts. Each calls `ask` with the prompts of all; `ask` returns the answers on the first
    process.
    """
    if group is None:
        return ask(prompts)
    shares: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(shares, prompts, group=group)
    answers = [ask({role: [ids for share in shares for ids in share[role]] for role in prompts})]
    distributed.broadcast_object_list(answers, src=distributed.get_global_rank(group, 0), group=group)
    own = {}
    for role in prompts:
        start = sum(len(share[role]) for share in shares[: distributed.get_rank(group)])
        own[role] = answers[0][role][start : start + len(prompts[role])]
    return own


def on_first(accelerator: Accelerator, action: Callable[[], Any]) -> Any:
    """Runs an action on the first process. Returns its result, or raises its [`EngineError`], on all processes."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = action()
        except EngineError as error:
            outcome[1] = error
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def as_completions(
    completion_ids: list[list[int]], logprobs: list[list[list[float | None]]], num_generations: int
) -> list[list[Completion]]:
    """
    Converts TRL's results to the completions of each prompt. TRL requests one log-probability per position, in nats,
    which belongs to the sampled token. It is NaN where the engine returned none.
    """
    logps = [[math.nan if entry[0] is None else entry[0] for entry in sequence] for sequence in logprobs]
    completions = [Completion(*x) for x in zip(completion_ids, logps, strict=True)]
    return [completions[k : k + num_generations] for k in range(0, len(completions), num_generations)]


def stopping(strings: Sequence[str]) -> dict[str, Any]:
    """Returns the sampling parameters of vLLM that end a completion after a string, which the completion keeps."""
    if not strings:
        return {}
    # A string may be a special token, such as `</tool_call>`
    return {"stop": list(strings), "include_stop_str_in_output": True, "skip_special_tokens": False}


def launch_variables(num_processes: int) -> AbstractContextManager[None]:
    """
    Restores the environment variables that TRL sets for an engine. With them, the next trainer of this process would
    wait for other processes. A single process gets a free port for its engine, because several runs may have the same
    `MASTER_PORT`, or TRL's first choice.
    """
    values = {name: os.environ.get(name, "") for name in LAUNCH_VARIABLES}
    if num_processes == 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            values["MASTER_PORT"] = str(free.getsockname()[1])
    return patch_environment(**values)


def make_generations(team: Any, accelerator: Accelerator, args: RolloutConfig) -> dict[str, AgentGeneration]:
    """
    Connects to the servers, or starts the engines, that sample for the agents of an [`AgentTeam`]. Roles with the same
    model get the same object. The model has the weights that they share, or is a `PeftModel` with an adapter named
    after each role.
    """
    groups = grouped((model, role) for role, model in team.policies.items())
    urls = server_urls(groups.values(), args) if args.vllm_mode == "server" else [None] * len(groups)
    generations: dict[str, AgentGeneration] = {}
    for k, (model, roles) in enumerate(groups.items()):
        with_adapters = isinstance(model, PeftModel)
        folder = None
        if with_adapters or (args.vllm_mode == "server" and args.vllm_weight_transfer == "files"):
            number = sum(x.nbytes for role in roles for x in adapter_parameters(model, role)) if with_adapters else 0
            folder = weights_folder(args, number)
        generation = (AdapterGeneration if with_adapters else AgentGeneration)(
            roles=roles,
            stop_strings=args.stop_strings or {},
            # That in which the trainer computes
            dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else str(model.dtype).removeprefix("torch."),
            model=model,
            accelerator=accelerator,
            processing_class=None,  # TRL needs it for image tokens only
            server_base_url=urls[k],
            group_port=args.vllm_group_port + k,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization / len(groups),
            max_num_seqs=args.rows_per_device * len(roles) * args.vllm_tensor_parallel_size,
            **{name: getattr(args, name) for name in SAME_NAMES},
            **{name: getattr(args, f"vllm_{name}") for name in VLLM_NAMES},
            logprobs=0,
            generation_kwargs={
                **(args.generation_kwargs or {}),
                "stop_token_ids": team.end_tokens(roles[0]),  # no others end a completion
                "ignore_eos": True,  # the end-of-sequence tokens in the model's files may differ from the agent's
            },
            folder=folder,
        )
        generations |= dict.fromkeys(roles, generation)
    if args.vllm_mode == "colocate":
        # An engine samples with the generators of its process, and seeds them when it starts. The processes of one
        # engine need the same seed
        set_seed(args.seed + accelerator.process_index // args.vllm_tensor_parallel_size)
    return generations


def weights_folder(args: RolloutConfig, size: int) -> Path:
    """
    Returns a new folder of this node for weights. An engine in the process gets them through memory, if there is room
    for several times their `size` in bytes. All processes must call this function.
    """
    free = min(gather_object([shutil.disk_usage(MEMORY).free if MEMORY.is_dir() else 0]))
    in_memory = args.vllm_adapter_dir is None and args.vllm_mode == "colocate" and free > ROOM * size
    folder = MEMORY if in_memory else Path(str(args.vllm_adapter_dir or args.output_dir)).resolve()
    name = broadcast_object_list([uuid.uuid4().hex])[0]
    return folder / f"vllm-{name}-{socket.gethostname()}"


def server_urls(groups: Collection[list[str]], args: RolloutConfig) -> list[str]:
    """
    Returns the URL of each model's server. `groups`: the roles of each model. Raises `ValueError` if the servers do
    not fit them.
    """
    by_role = args.vllm_server_base_urls
    if by_role is None and len(groups) == 1:
        return [args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"]
    roles, urls = [role for group in groups for role in group], by_role or {}
    if {*urls} != {*roles}:
        raise ValueError(
            f"`vllm_server_base_urls` needs one URL for each of the roles {roles}; it has {', '.join(urls) or 'none'}."
        )
    chosen = [urls[group[0]] for group in groups]
    if len({*chosen}) < len(groups):
        raise ValueError(f"`vllm_server_base_urls`: a server holds one model, but the agents have {len(groups)}.")
    return chosen
