"""Composite checkpoints, of a text model and a vision tower: trained as text, saved under their own class and keys."""

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, GenerationConfig, Mistral3Config, Qwen2_5_VLConfig, Qwen3_5Config
from transformers.integrations.mistral import tokenizer as mistral_tokenizer
from transformers.models.auto import tokenization_auto

from trl_multiagent import AgentTeam, IACConfig, IACTrainer
from trl_multiagent.environments.yaml_task import TASK
from trl_multiagent.hub import team_card, team_files
from trl_multiagent.models.generation import generate_groups
from trl_multiagent.models.packing import can_pack
from trl_multiagent.runs.plan import plan_size
from trl_multiagent.team.card import facts_of
from trl_multiagent.team.files import load_tokenizer

from prepared import parse_recipe
from tiny import byte_tokenizer, tiny_environment, tiny_llama, tiny_team, tiny_trainer


TEXT = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
TEXT |= {"num_key_value_heads": 1, "intermediate_size": 64, "eos_token_id": 256, "pad_token_id": 257}
TEXT |= {"bos_token_id": None, "tie_word_embeddings": False, "initializer_range": 0.3}
ROLES = ("aux", "main")
OUTSIDE = ("visi", "visual", "projector")  # parts of the names of parameters


def composite(family, folder):
    """Saves a random checkpoint of a family and a tokenizer."""
    torch.manual_seed(0)
    if family == "qwen3_5":
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
        linear |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
        vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
        config = Qwen3_5Config(text_config={**TEXT, **linear}, vision_config=vision)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    elif family == "qwen2_5_vl":
        vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
        config = Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": rope}, vision_config=vision)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    else:  # as Ministral 3
        vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        vision |= {"model_type": "pixtral", "image_size": 28, "patch_size": 14}
        config = Mistral3Config(text_config={"model_type": "ministral3", **TEXT}, vision_config=vision)
        model = transformers.Mistral3ForConditionalGeneration(config)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model.eval()


def test_a_class_without_a_backbone_is_refused(tmp_path):
    team = tiny_team()
    team.agents["main"].base_model_prefix = "none"  # as Llama 4's
    with pytest.raises(ValueError, match="'main' cannot be trained: LlamaForCausalLM of transformers names no"):
        tiny_trainer(tmp_path, team)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen2_5_vl", "mistral3"])
@pytest.mark.parametrize("form", ["full", "lora"])
def test_a_composite_checkpoint_is_trained_as_text_and_stays_what_it_was(tmp_path, family, form):
    original = composite(family, tmp_path / "base")
    lora = LoraConfig(target_modules="all-linear", r=2) if form == "lora" else None
    team = AgentTeam.from_pretrained(tmp_path / "base", ROLES, lora)
    before = {name: x.clone() for name, x in team.state_dict().items()}
    trainer = tiny_trainer(tmp_path / "run", team, tiny_environment(), max_steps=1, learning_rate=0.01)
    trainer.train()
    changed = {name for name, x in team.state_dict().items() if not torch.equal(x, before[name])}
    assert changed and not any(part in name for name in changed for part in OUTSIDE)
    assert not any(part in name for name in before if "lora_" in name for part in OUTSIDE)
    trainer.save_model(str(tmp_path / "team"))
    ids = torch.randint(0, 256, (2, 12))
    for role in ROLES:
        with torch.no_grad(), team.activate(role) as agent:
            expected = agent(input_ids=ids).logits
        folder = tmp_path / "team" / "agents" / role
        cls = type(original)
        if form == "lora":
            plain = PeftModel.from_pretrained(cls.from_pretrained(tmp_path / "base"), folder)
        else:
            plain = cls.from_pretrained(folder)
            files = [load_file(path / "model.safetensors").keys() for path in (folder, tmp_path / "base")]
            assert files[0] == files[1] and plain.config.architectures == [cls.__name__]
        with torch.no_grad():
            assert torch.allclose(plain.eval()(input_ids=ids).logits, expected, atol=1e-5)
            assert not torch.allclose(original(input_ids=ids).logits, expected, atol=1e-3)
    card = str(team_card(facts_of(team), str(tmp_path / "team")))
    names = {}
    exec(card.split("```python\n")[2].split("```")[0], names)  # of the last agent
    with torch.no_grad():
        assert torch.allclose(names["model"].eval()(input_ids=ids).logits, expected, atol=1e-5)
    again = AgentTeam.from_pretrained(tmp_path / "team")
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in team.state_dict().items())


def test_a_composite_base_in_4_bits_has_adapters_alone_to_train(tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    composite("mistral3", tmp_path)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="float32")
    lora = LoraConfig(target_modules="all-linear", r=2)
    team = AgentTeam.from_pretrained(tmp_path, ROLES, lora, quantization_config=quantization)
    trained = [name for name, x in team.named_parameters() if x.requires_grad]
    assert trained and all("lora_" in name for name in trained)


@pytest.mark.parametrize("family", ["qwen3_5", "mistral3"])
@pytest.mark.parametrize("form", ["model", "adapter"])
def test_critics_read_with_the_text_model(tmp_path, family, form):
    composite(family, tmp_path / "base")
    lora = LoraConfig(target_modules="all-linear", r=2) if form == "adapter" else None
    team = AgentTeam.from_pretrained(tmp_path / "base", ROLES, lora)
    options = {"trainer": IACTrainer, "config": IACConfig, "critic_form": form, "max_steps": 1}
    tiny_trainer(tmp_path / "run", team, tiny_environment(), **options).train()
    of_critics = {name: x for name, x in team.named_parameters() if "critic" in name}
    assert of_critics and not any(part in name for name in of_critics for part in OUTSIDE)
    for critic in team.critics.names if form == "model" else ():  # of other critics that were saved there
        (tmp_path / "team" / "critics" / critic).mkdir(parents=True)
        (tmp_path / "team" / "critics" / critic / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    team.save_pretrained(tmp_path / "team")
    saved = {name: x.clone() for name, x in of_critics.items()}
    with torch.no_grad():
        for parameter in of_critics.values():
            parameter.zero_()
    team.load_weights(tmp_path / "team")
    assert all(torch.equal(x, saved[name]) for name, x in of_critics.items())


def test_with_mistral_common_a_tokenizer_is_still_that_of_transformers(tmp_path, monkeypatch):
    composite("mistral3", tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, "mistral3", "MistralCommonBackend")
    monkeypatch.setattr(mistral_tokenizer, "is_mistral_common_available", lambda: True)
    tokenizer = load_tokenizer(str(tmp_path), {})
    assert tokenizer.padding_side == "left" and tokenizer.backend_tokenizer
    tokenizer.save_pretrained(tmp_path)
    assert "mistral" not in (tmp_path / "tokenizer_config.json").read_text()


def test_the_files_of_a_processor_are_read_and_saved(tmp_path):
    composite("qwen3_5", tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}!"}')
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    for folder, saved in ((tmp_path, "team"), (tmp_path / "team" / "agents" / "aux", "again")):
        team = AgentTeam.from_pretrained(folder, ROLES)
        assert team.tokenizers["main"].apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a!"
        team.save_pretrained(tmp_path / saved)
        file = tmp_path / saved / "agents" / "main" / "preprocessor_config.json"
        assert file.read_text() == (tmp_path / file.name).read_text()
        assert f"agents/main/{file.name}" in team_files(tmp_path / saved, with_critics=False)


def test_an_adapter_that_replaces_weights_of_the_shared_base_is_refused(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "adapter")
    adapted = get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(target_modules=["q_proj"])
    )
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)  # as those of the base
    AgentTeam.from_pretrained([str(tmp_path / "adapter")] * 2, ROLES)
    adapted.get_input_embeddings().weight.data += 1.0
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    with pytest.raises(ValueError, match=r"replaces 'base_model.* of its base, which agents share"):
        AgentTeam.from_pretrained([str(tmp_path / "adapter")] * 2, ROLES)


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["norm"]}])
def test_an_adapter_of_the_text_model_is_refused_for_the_whole_checkpoint(tmp_path, options):
    composite("qwen3_5", tmp_path / "base")
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    text.save_pretrained(tmp_path / "text")
    adapted = get_peft_model(text, LoraConfig(target_modules=["q_proj"], r=2, **options))
    adapted.save_pretrained(tmp_path / "adapter")
    for folder in ("adapter", "text"):
        byte_tokenizer().save_pretrained(tmp_path / folder)
    names = [str(tmp_path / "adapter")] * 2
    with pytest.raises(ValueError, match=r"does not fit its base .* as Qwen3_5ForC.*: one of the two has no '"):
        AgentTeam.from_pretrained(names, ROLES)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "text")  # as the message advises
    adapted.save_pretrained(tmp_path / "adapter")
    assert AgentTeam.from_pretrained(names, ROLES).form == "lora"


@pytest.mark.parametrize("family", ["qwen3_5", "qwen2_5_vl", "mistral3"])
def test_greedy_texts_are_those_of_generate(tmp_path, family):
    """Prompts of several lengths share a call, and may share a row of the update."""
    model = composite(family, tmp_path)
    config = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=257, eos_token_id=[256])
    prompts = [[65, 66, 67], [68] * 9, [70]]
    generate_groups(model, prompts[:1], [[0, 1]], config)  # another number of rows
    found = generate_groups(model, prompts, [[0, 1]] * 3, config)
    for prompt, group in zip(prompts, found, strict=True):
        plain = model.generate(input_ids=torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
        assert group == [plain] * 2
    if can_pack(model, 16):
        row = torch.arange(65, 77)[None]
        mask = torch.zeros(1, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
        packed = model(input_ids=row, attention_mask=mask, position_ids=torch.arange(12)[None]).logits
        assert torch.allclose(packed, model(input_ids=row).logits, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen2_5_vl", "mistral3"])
def test_the_plan_counts_what_the_team_trains(tmp_path, monkeypatch, family):
    monkeypatch.chdir(tmp_path)
    number = composite(family, "base").num_parameters()
    (tmp_path / "rows.jsonl").write_text('{"x": "1"}\n')
    task = "{dataset: {name: rows.jsonl}, prompts: {aux: '{x}', main: '{x}'}, agent_model: {name: base},"
    task += "reward_funcs: [trl.rewards.think_format_reward], magrpo: {use_cpu: true, bf16: false}}"
    (tmp_path / "run.yaml").write_text(task)
    for form, setting in (("full", "seed=1"), ("shared", "agent_model.share_weights=true"), ("lora", "peft.r=2")):
        run = parse_recipe("magrpo", TASK, ["--config", "run.yaml", "--override", setting])
        size = plan_size(run, run.make_environment(), [{"x": "1"}])
        team = AgentTeam.from_pretrained("base", ROLES, run.peft_config, share_weights=form == "shared")
        trained, frozen = (sum(x.numel() for x in team.parameters() if x.requires_grad == y) for y in (True, False))
        assert (size.trained, size.frozen + size.base) == (trained, frozen) and size.largest >= number
