"""A tiny language model with random weights, for trying a task on any machine without a download."""

import string
import tempfile
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_multiagent.folders import MODEL_CONFIG
from trl_multiagent.models.pretrained import seeded


GAIN = 300.0  # of the normalizations
END, PAD, UNKNOWN = "<|end|>", "<|pad|>", "<|unknown|>"


def tiny_model(folder: str | Path) -> str:
    """
    Builds a Llama with about 50,000 random parameters and a tokenizer with one token per printable ASCII character in
    a folder, unless a model is there already. Returns the folder. Small weights and large gains make it learn at the
    rates that suit large models, such as 1e-5.
    """
    folder = Path(folder)
    if (folder / MODEL_CONFIG).is_file():
        return str(folder)
    vocabulary = {token: k for k, token in enumerate([PAD, END, UNKNOWN, *string.printable])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, padding_side="left"
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.1 / GAIN,
        pad_token_id=vocabulary[PAD],
        eos_token_id=vocabulary[END],
        bos_token_id=None,
    )
    with seeded(0, "tiny"):
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # of a normalization
                parameter.fill_(GAIN)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch:
        model.save_pretrained(scratch + "/model")
        tokenizer.save_pretrained(scratch + "/model")
        Path(scratch, "model").rename(folder)  # atomic, so an interrupted run leaves no incomplete model
    return str(folder)
