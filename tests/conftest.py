import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


SHARED = Path(__file__).resolve().parents[2] / "shared"
torch.set_num_threads(1)  # the models here are too small to share


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real benchmark files beside the checkout."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"no benchmark data in {SHARED / 'data'}")
    return SHARED / "data"


@pytest.fixture(scope="session")
def hostile() -> Path:
    """Programs that attack a code reward, beside the checkout."""
    if not (SHARED / "hostile").is_dir():
        pytest.skip(f"no hostile programs in {SHARED / 'hostile'}")
    return SHARED / "hostile"


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, and an end-of-sequence and a padding token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: k for k, character in enumerate(alphabet)}
    vocabulary |= {"<eos>": 256, "<pad>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    fast.chat_template = chat_template
    return fast


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "eos_token_id": 256,
        "pad_token_id": 257,
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**{**config, **changes}))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Folder of a tiny random Llama with a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_model")
    tiny_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)
