"""
Composite checkpoints, of a text model and others: which families are trained as text and stay what they were.

    python -m benchmarks.models.composite                       # all families, half a minute of one core
    python -m benchmarks.models.composite --families Gemma3     # some of them
    python -m benchmarks.models.composite --smoke               # one of them

Each family is a small random model of its own class, saved as a checkpoint. A team of two starts from it and takes one
step of MAGRPO, in full and with LoRA adapters. The columns say whether

- train: weights of the text model changed, and no others;
- saved: plain transformers loads an agent with the checkpoint's class and keys, and computes the same;
- adapter: plain PEFT puts an agent's adapter on the checkpoint, and computes the same;
- again: the saved team loads with the same weights.

A reason stands where something failed.
"""

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, PreTrainedModel

from benchmarks.team_run import byte_tokenizer
from trl_multiagent import AgentTeam, FunctionEnvironment, MAGRPOConfig, MAGRPOTrainer


TEXT = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
TEXT |= {"num_key_value_heads": 1, "intermediate_size": 64, "eos_token_id": 256, "pad_token_id": 257}
TEXT |= {"bos_token_id": None, "tie_word_embeddings": False, "initializer_range": 0.3}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VISION |= {"image_size": 28, "patch_size": 14}
QWEN_VISION = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
# The name of a configuration class, without `Config`: what differs in its text model and in its vision tower
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3_5": (LINEAR, QWEN_VISION),
    "Qwen3VL": (MROPE, {**QWEN_VISION, "deepstack_visual_indexes": [0]}),
    "Qwen2_5_VL": (MROPE, QWEN_VISION),
    "Mistral3": ({"model_type": "ministral3"}, {**VISION, "model_type": "pixtral"}),
    "Gemma3": ({}, {**VISION, "model_type": "siglip_vision_model"}),
    "Gemma4": ({}, {**VISION, "model_type": "gemma4_vision"}),
    "Llama4": ({"num_local_experts": 2}, {**VISION, "model_type": "llama4_vision_model"}),
    "SmolVLM": ({"model_type": "llama"}, {**VISION, "model_type": "smolvlm_vision"}),
    "Idefics3": ({"model_type": "llama"}, {**VISION, "model_type": "idefics3_vision"}),
    "LlavaNext": ({"model_type": "qwen2"}, {**VISION, "model_type": "siglip_vision_model"}),
    "InternVL": ({"model_type": "qwen3"}, {**VISION, "model_type": "internvl_vision", "image_size": [28, 28]}),
}
ROLES = ("aux", "main")


def checkpoint(family: str, folder: Path) -> PreTrainedModel:
    """Saves a random checkpoint of a family with a tokenizer, and returns the model."""
    text, vision = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(text_config={**TEXT, **text}, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model.eval()


def trained(base: Path, folder: Path, peft_config: LoraConfig | None) -> tuple[AgentTeam, str]:
    """Trains a team by one step and saves it. Returns it, and which of its weights changed, in words."""
    team = AgentTeam.from_pretrained(base, ROLES, peft_config)
    before = {name: x.clone() for name, x in team.state_dict().items()}
    environment = FunctionEnvironment(
        dict.fromkeys(ROLES, "{x}"),
        lambda completions, **columns: [float(sum(map(len, x.values())) % 3) for x in completions],
    )
    options = {"max_steps": 1, "learning_rate": 0.01, "max_completion_length": 8, "save_strategy": "no"}
    args = MAGRPOConfig(str(folder / "run"), use_cpu=True, report_to="none", disable_tqdm=True, **options)
    MAGRPOTrainer(team, environment, args, train_dataset=Dataset.from_dict({"x": ["ab", "c"]})).train()
    team.save_pretrained(folder)
    changed = [name for name, x in team.state_dict().items() if not torch.equal(x, before[name])]
    agent = team.agents["main"]
    (decoder,) = (name for name, module in agent.named_modules() if module is agent.get_decoder())
    outside = [x for x in changed if f".{decoder}." not in x and "lm_head" not in x]
    return team, "nothing changed" if not changed else f"{outside[0]} changed" if outside else "yes"


def equal(loaded: PreTrainedModel | PeftModel, team: AgentTeam, role: str) -> str:
    """Says whether a model computes what an agent computes."""
    ids = torch.arange(65, 77)[None]
    with torch.no_grad(), team.activate(role) as agent:
        expected = agent(input_ids=ids).logits
        return "yes" if torch.allclose(loaded.eval()(input_ids=ids).logits, expected, atol=1e-5) else "other numbers"


def check(family: str, folder: Path) -> dict[str, str]:
    """Returns the columns of a family."""
    base, found = folder / "base", {}
    cls = type(checkpoint(family, base))
    team, found["train"] = trained(base, folder / "full", None)
    agent = folder / "full" / "agents" / "main"
    keys = [load_file(path / "model.safetensors").keys() for path in (agent, base)]
    plain = cls.from_pretrained(agent)
    is_same = keys[0] == keys[1] and plain.config.architectures == [cls.__name__]
    found["saved"] = equal(plain, team, "main") if is_same else "other keys"
    again = AgentTeam.from_pretrained(folder / "full").state_dict()
    found["again"] = "yes" if all(torch.equal(x, again[name]) for name, x in team.state_dict().items()) else "no"
    team, of_adapter = trained(base, folder / "lora", LoraConfig(r=2, target_modules="all-linear"))
    adapted = PeftModel.from_pretrained(cls.from_pretrained(base), folder / "lora" / "agents" / "main")
    found["adapter"] = equal(adapted, team, "main") if of_adapter == "yes" else of_adapter
    return {"class": cls.__name__, **found}


def silently(function: Callable[..., dict[str, str]], *args: Any) -> dict[str, str]:
    """Returns what a function returns, or the error that it raised; nothing is printed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return function(*args)
        except Exception as error:  # the table says what failed
            return {"class": f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES], help="default: all")
    parser.add_argument("--smoke", action="store_true", help="seconds: one family")
    parser.add_argument("--output", type=Path, default=Path("composite.json"), help="where the JSON goes")
    options = parser.parse_args()
    results = {}
    columns = ("class", "train", "saved", "adapter", "again")
    print(f"| family | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
    for family in options.families[:1] if options.smoke else options.families:
        with tempfile.TemporaryDirectory() as folder:
            found = results[family] = silently(check, family, Path(folder))
        print(f"| {family} | {' | '.join(found.get(column, '') for column in columns)} |", flush=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
