"""Tiny models and environments that the tests share."""

import asyncio
import json

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from trl_multiagent import AgentTeam, MAGRPOConfig, MAGRPOTrainer, Task, workflow
from trl_multiagent.environments import Environment, FunctionEnvironment, Outcome


def byte_tokenizer(chat_template: str | None = None) -> transformers.PreTrainedTokenizerFast:
    """One token per byte, and an end-of-sequence and a padding token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: k for k, character in enumerate(alphabet)}
    vocabulary |= {"<eos>": 256, "<pad>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    fast.chat_template = chat_template
    return fast


SIZE = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZE |= {"eos_token_id": 256, "pad_token_id": 257, "bos_token_id": None}


def tiny_classifier(**changes) -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    size = {**SIZE, "intermediate_size": 64, "initializer_range": 0.1, "num_labels": 1}
    return LlamaForSequenceClassification(LlamaConfig(**size, **changes))


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = {**SIZE, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    config |= {"initializer_range": 0.1, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**{**config, **changes}))


ARCHITECTURES = ["gpt2", "mistral with a sliding window", "gemma3"]


def other_model(architecture: str, sliding_window: int = 4) -> PreTrainedModel:
    """Random models with learned positions or none, with layers that see a window only, and with recurrent layers."""
    torch.manual_seed(0)
    size = {**SIZE, "initializer_range": 0.3}
    gqa = {"num_key_value_heads": 1, "intermediate_size": 64, "head_dim": 16, "sliding_window": sliding_window}
    if architecture == "bloom":
        return transformers.BloomForCausalLM(transformers.BloomConfig(**size))
    if architecture == "falcon":
        return transformers.FalconForCausalLM(transformers.FalconConfig(**size, alibi=True))
    if architecture == "recurrent layers":
        layers = ["linear_attention", "full_attention"]
        return transformers.Qwen3NextForCausalLM(
            transformers.Qwen3NextConfig(layer_types=layers, num_experts=2, **size, num_key_value_heads=1, head_dim=16)
        )
    if architecture == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **size)
        )
    elif architecture == "lfm2":  # a layer keeps a state of its own
        size |= {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 1, "intermediate_size": 64}
        return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**size))
    elif architecture == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(layer_types=layers, **size, **gqa))
    else:
        return transformers.MistralForCausalLM(transformers.MistralConfig(**size, **gqa))


EXPERTS = {
    "qwen2_moe": (transformers.Qwen2MoeForCausalLM, transformers.Qwen2MoeConfig),
    "qwen3_moe": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig),
    "olmoe": (transformers.OlmoeForCausalLM, transformers.OlmoeConfig),
}


def tiny_experts(architecture: str, **changes) -> PreTrainedModel:
    """Random mixtures of four experts, whose router loss has some weight."""
    torch.manual_seed(0)
    model_class, config_class = EXPERTS[architecture]
    size = {**SIZE, "num_key_value_heads": 2, "intermediate_size": 32, "initializer_range": 0.3}
    experts = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    experts |= {"num_local_experts": 4} if architecture == "mixtral" else {"num_experts": 4}
    if architecture.startswith("qwen"):
        experts |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
    return model_class(config_class(**{**size, **experts, **changes}))


def tiny_team(roles=("aux", "main"), chat_template: str | None = None, num_hidden_layers: int = 1) -> AgentTeam:
    """Random agents, different ones, each with a tokenizer of its own."""
    return AgentTeam(
        {role: tiny_llama(seed, num_hidden_layers=num_hidden_layers) for seed, role in enumerate(roles)},
        {role: byte_tokenizer(chat_template) for role in roles},
    )


FORMS = ("full", "heterogeneous", "shared", "lora", "lora on two bases", "lora and whole modules", "mixed")


def team_of(form: str, roles=("aux", "main"), **changes) -> AgentTeam:
    """A team of each form. The adapters do something from the start, as those of a trained team do."""
    if form == "full":
        models = [tiny_llama(seed, **changes) for seed in range(len(roles))]
    if form == "heterogeneous":  # another size, another vocabulary
        sizes = [{"hidden_size": 32 - 16 * (seed % 2), "vocab_size": 258 + seed} for seed in range(len(roles))]
        models = [tiny_llama(seed, **size, **changes) for seed, size in enumerate(sizes)]
    if form == "shared":
        models = [tiny_llama(**changes)] * len(roles)
    if form.startswith(("lora", "dora", "mixed")):
        bases = [tiny_llama(seed, **changes) for seed in range(2 if form == "lora on two bases" else 1)]
        copied = ["input_layernorm", "embed_tokens"] if form == "lora and whole modules" else None
        models = []
        for k, role in enumerate(roles[:-1] if form == "mixed" else roles):
            base = bases[k % len(bases)]
            torch.manual_seed(100 + k)
            config = {"target_modules": "all-linear", "modules_to_save": copied, "use_dora": form == "dora"}
            config = LoraConfig(r=4, lora_alpha=16, init_lora_weights=False, **config)
            if k < len(bases):
                bases[k] = base = get_peft_model(base, config, adapter_name=role)
            else:
                base.add_adapter(role, config)
            for name, parameter in base.named_parameters():
                if f".modules_to_save.{role}." in name:
                    parameter.data.mul_(1 + 0.5 * torch.rand_like(parameter))
            models.append(base)
        if form == "mixed":  # the first agent has an adapter, the last one is a full model
            models.append(tiny_llama(len(roles), **changes))
    tokenizers = {role: byte_tokenizer() for role in roles}
    return AgentTeam(dict(zip(roles, models, strict=True)), tokenizers)


def count_reward(completions, **columns) -> list[float]:
    """Rewards that differ between siblings and depend on every agent's text."""
    letters = "aeiou0123456789.,;%#!"
    texts = [[(k, text) for k, text in enumerate(c.values(), start=1)] for c in completions]
    return [sum(k * text.count(letter) for k, text in one for letter in letters) / 10 for one in texts]


def feedback(item, history):
    return {
        role: f"Turn {len(history)} gave {history[-1].outcome.reward:.2f}. {role}:" for role in history[-1].prompts
    }


def tiny_environment(roles=("aux", "main"), reward=count_reward) -> FunctionEnvironment:
    prompts = {role: "Task {x}, part " + role + ":" for role in roles}
    return FunctionEnvironment(prompts, reward, transition=feedback)


class Workflow(Environment):
    """
    Three turns. Who acts depends on the item: aux, main and again aux; both and then main; or aux alone. An episode
    whose second turn earns little ends after it. Each role has a reward of its own, unless they are `shared`.
    """

    roles = ("aux", "main")
    plans = ((("aux",), ("main",), ("aux",)), (("aux", "main"), ("main",), ("main",)), (("aux",),) * 3)

    def __init__(self, shared: bool = False):
        self.shared = shared

    def prompts(self, item, history):
        if len(history) == 2 and history[-1].outcome.reward < 0.05:
            return {}
        last = f"{history[-1].outcome.reward:.2f}, " if history else ""
        acting = self.plans[len(item["x"]) // 2 % 3][len(history)]
        return {role: f"Task {item['x']}, {last}part {role}:" for role in acting}

    def score(self, items, joint_actions, histories):
        rewards = count_reward(joint_actions)
        if self.shared:
            return rewards
        return [{"aux": x, "main": 2 * x - len(texts) / 10} for x, texts in zip(rewards, joint_actions, strict=True)]


def living_workflow():
    """The same as a function, whose episodes live."""

    @workflow(roles=Workflow.roles, live=True)
    async def run(item, agents):
        last = ""
        for turn, roles in enumerate(Workflow.plans[len(item["x"]) // 2 % 3]):
            asked = [agents[role](f"Task {item['x']}, {last}part {role}:") for role in roles]
            (reward,) = count_reward([dict(zip(roles, await asyncio.gather(*asked), strict=True))])
            own = {"aux": reward, "main": 2 * reward - len(roles) / 10}
            for role, number in own.items():
                agents.reward(number, role)
            if turn == 1 and sum(own.values()) / 2 < 0.05:
                break
            last = f"{sum(own.values()) / 2:.2f}, "

    return run


class AsciiGame(Environment):
    """A zero-sum game of two: one wins if its text is plain ASCII and the other's is not."""

    def __init__(self, roles):
        self.roles = roles

    def prompts(self, item, history):
        return dict.fromkeys(self.roles, "Show:")

    def score(self, items, joint_actions, histories):
        one, other = self.roles
        signs = [float(action[one].isascii()) - float(action[other].isascii()) for action in joint_actions]
        return [Outcome({one: sign, other: -sign}) for sign in signs]


def tiny_items(number: int = 12) -> Dataset:
    # Of different lengths, so that batches are padded
    return Dataset.from_dict({"x": [str(10**k % 997) * (1 + k % 3) for k in range(number)]})


def tiny_task(number: int, held_out: int = 2, reward=count_reward) -> Task:
    """A task for recipes with `number` items to train on."""
    prompts = {"aux": "Help with {x}:", "main": "Do {x}:"}
    datasets = tiny_items(number), tiny_items(held_out) if held_out else None
    return Task(lambda settings: FunctionEnvironment(prompts, reward), lambda settings: datasets)


PROBLEM = {"prompt": 'def f(x):\n    """Double x."""\n', "entry_point": "f"}
PROBLEM["test"] = "def check(candidate):\n    assert candidate(1) == 2\n"


def write_problems(path, number: int) -> None:
    """Writes rows of HumanEval's form."""
    path.write_text("".join(json.dumps({"task_id": f"T/{k}", **PROBLEM}) + "\n" for k in range(number)))


# Arguments for short runs on the CPU that write nothing
SHORT = {"max_steps": 1, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
SHORT |= {"bf16": False, "use_cpu": True, "gradient_checkpointing": False}
SHORT |= {"report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
# Arguments that save a checkpoint and evaluate after every step
SAVED = {"save_strategy": "steps", "save_steps": 1}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}


def tiny_config(output_dir, config=MAGRPOConfig, **arguments) -> MAGRPOConfig:
    return config(
        output_dir=str(output_dir), **{**SHORT, "items_per_device": 2, "max_completion_length": 8, **arguments}
    )


def tiny_trainer(output_dir, team=None, environment=None, trainer=MAGRPOTrainer, config=MAGRPOConfig, **arguments):
    """A trainer on tiny agents; keyword arguments of the trainer and of its configuration, mixed."""
    team = tiny_team() if team is None else team
    environment = tiny_environment(team.roles) if environment is None else environment
    names = ("train_dataset", "eval_dataset", "callbacks", "optimizers")
    own = {name: arguments.pop(name) for name in names if name in arguments}
    own.setdefault("train_dataset", tiny_items())
    args = tiny_config(output_dir, config, **arguments)
    return trainer(team, environment, args, **own)


def same_teams(*folders) -> bool:
    teams = [AgentTeam.from_pretrained(str(folder)).parameters() for folder in folders]
    return all(torch.equal(a, b) for a, b in zip(*teams, strict=True))


def flip(path, position=0.5):
    """Changes a bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * position)] ^= 1
    path.write_bytes(data)
