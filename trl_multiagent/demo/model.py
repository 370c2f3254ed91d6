"""
Builds the demo's base model, a tokenizer and a small Llama trained from scratch on noisy demonstrations, and caches it.

There are two: one for a single turn, and one that has also seen how answers are revised after feedback. Nothing is downloaded. The name of the
model's folder in the cache contains a hash of everything that determines the model. The folder is moved there when it is complete.
"""

import hashlib
import os
import random
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_multiagent.demo.demonstrations import demonstrate
from trl_multiagent.demo.problems import demo_dataset, demo_problems, demo_prompts
from trl_multiagent.demo.revisions import demonstrate_revisions
from trl_multiagent.environments.code_generation import feedback
from trl_multiagent.environments.code_generation.roles import AUX, MAIN


SEED = 7
PAD, EOS = "<|pad|>", "<|end|>"
VOCABULARY = 640
ARCHITECTURE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
STEPS = {1: 600, 2: 1000}  # by the number of turns
BATCH_SIZE, LEARNING_RATE = 8, 3e-3


def demo_model(progress: bool = True, num_turns: int = 1) -> str:
    """
    The path of the demo's base model and tokenizer. The first call builds them, which takes about half a minute on one core, or
    two minutes for two turns.

    They are cached in the folder that the environment variable `TRL_MULTIAGENT_CACHE` names, by default
    `~/.cache/trl_multiagent`. Of several processes that call this at the same time, one builds the model. The caller's random state and
    number of threads are not changed.

    Args:
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar while building.
        num_turns (`int`, *optional*, defaults to `1`): `2` for the model that has seen revisions.
    """
    name = "demo" if num_turns == 1 else "demo-two-turns"
    folder = cache_folder() / f"{name}-{fingerprint()}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(f"{folder}.lock"),
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch,
        ):
            if not folder.is_dir():  # another process may have built it meanwhile
                built = Path(scratch) / "model"
                build_model(built, progress, num_turns)
                built.rename(folder)
    return str(folder)


def cache_folder() -> Path:
    """Returns the folder of the cached models."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TRL_MULTIAGENT_CACHE") or user_cache / "trl_multiagent")


def fingerprint() -> str:
    """Returns a hash of everything that determines the model: the code that makes the model and its data, and library versions."""
    names = ("problems.py", "demonstrations.py", "revisions.py", "model.py")
    sources = [*(Path(__file__).with_name(name) for name in names), Path(feedback.__file__)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    for library in ("torch", "transformers", "tokenizers"):
        digest.update(f"{library}=={version(library)}".encode())
    return digest.hexdigest()[:16]


def build_model(folder: Path, progress: bool, num_turns: int) -> None:
    """Trains the tokenizer and the model, and saves them."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        torch.set_num_threads(1)  # more are not faster for so small a model, and the weights would not be reproducible
        try:
            rng = random.Random(SEED)
            demonstrations = make_demonstrations(STEPS[num_turns] * BATCH_SIZE, rng, num_turns)
            tokenizer = train_tokenizer(demonstrations)
            config = LlamaConfig(
                vocab_size=len(tokenizer),
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
                **ARCHITECTURE,
            )
            model = LlamaForCausalLM(config)
            imitate(model, tokenizer, demonstrations, progress)
        finally:
            torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_demonstrations(number: int, rng: random.Random, num_turns: int = 1) -> list[tuple[str, str]]:
    """Draws pairs of a prompt and one agent's answer, for random training problems. With two turns, half of them are revisions."""
    problems = {problem.name: problem for problem in demo_problems("train")}
    items = demo_dataset("train").to_list()
    pairs = []
    for _ in range(number // num_turns):
        item = rng.choice(items)
        role = rng.choice((AUX, MAIN))
        pairs.append((demo_prompts(item)[role], demonstrate(problems[item["entry_point"]], role, rng)))
    if num_turns == 2:
        drawn = rng.choices(items, k=(number - len(pairs)) // 2)  # each gives two demonstrations, one per role
        for revisions in demonstrate_revisions(drawn, problems, rng):
            pairs += revisions.values()
        rng.shuffle(pairs)
    return pairs


def train_tokenizer(demonstrations: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on the demonstrations. It can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in demonstrations for text in pair), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def imitate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: list[tuple[str, str]],
    progress: bool,
) -> None:
    """
    Trains the model for one pass over the demonstrations. The loss covers the answers and their end tokens, not the prompts.

    Prompt and answer are tokenized separately, as in generation. Padding is on the right, after all tokens that count, so no
    attention mask is needed.
    """
    prompts = tokenizer([prompt for prompt, _ in demonstrations])["input_ids"]
    answers = tokenizer([answer + EOS for _, answer in demonstrations])["input_ids"]
    steps = len(demonstrations) // BATCH_SIZE
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    # 5 % of the steps up to the peak, then a cosine down to 5 % of it
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.05, cycle_momentum=False, final_div_factor=0.8
    )
    model.train()
    for step in tqdm(range(steps), desc="Building the base model", unit="step", mininterval=1, disable=not progress):
        rows = slice(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        pairs = list(zip(prompts[rows], answers[rows], strict=True))
        ids = [torch.tensor(prompt + answer) for prompt, answer in pairs]
        labels = [torch.tensor([-100] * len(prompt) + answer) for prompt, answer in pairs]
        output = model(
            input_ids=pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
            labels=pad_sequence(labels, batch_first=True, padding_value=-100),
            use_cache=False,
        )
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
