"""
Small language models that are trained from scratch on demonstrations, and cached. Nothing is downloaded.

They are the base models of demos: a task family names one as an [`ImitationModel`]. The name of a model's folder in
the cache contains a hash of everything that determines the model. The folder is moved there when it is complete.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl_multiagent.folders import build_once, cache_folder


PAD, EOS, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
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
LEARNING_RATE = 3e-3
DATA = Path(__file__).parents[1] / "data"

Demonstration = tuple[str, str]  # a prompt and an answer


@dataclass(frozen=True)
class ImitationModel:
    """
    A Llama of half a million parameters and its tokenizer, trained from scratch on demonstrations.

    A change of the code in the folder of `demonstrate`, or of the package's data, makes a new model.

    Args:
        name (`str`): Name in the cache.
        demonstrate (`Callable[[int, random.Random], list[tuple[str, str]]]`): Draws a number of pairs of a prompt and
            one agent's answer.
        steps (`int`): Steps of training, each on `batch_size` demonstrations. 600 take half a minute on one core.
        sources (`Sequence[Path]`, *optional*): Other files that determine the demonstrations.
        variant (`str`, *optional*, defaults to `""`): Settings that determine the demonstrations.
        vocabulary (`Sequence[str]`, *optional*): The words that texts consist of, for a tokenizer that splits at white
            space. By default a byte-level tokenizer is trained.
        architecture (`Mapping[str, int]`, *optional*): Changes of the Llama's configuration.
        batch_size (`int`, *optional*, defaults to `8`): Demonstrations of a step.
        seed (`int`, *optional*, defaults to `7`): Seed of the demonstrations and of the initial weights.
    """

    name: str
    demonstrate: Callable[[int, random.Random], list[Demonstration]]
    steps: int
    sources: Sequence[Path] = ()
    variant: str = ""
    vocabulary: Sequence[str] = ()
    architecture: Mapping[str, int] = field(default_factory=dict)
    batch_size: int = 8
    seed: int = 7

    def path(self, progress: bool = True) -> str:
        """
        Returns the folder of the model and its tokenizer. The first call builds them.

        They are cached in the folder that the environment variable `TRL_MULTIAGENT_CACHE` names, by default
        `~/.cache/trl_multiagent`. Of several processes that call this at the same time, one builds the model. The
        caller's random state and number of threads are not changed.

        Args:
            progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar while building.
        """
        folder = cache_folder() / f"{self.name}-{self.fingerprint()}"

        def build(scratch: Path) -> Path:
            self.build(scratch / "model", progress)
            return scratch / "model"

        build_once(folder, build)
        return str(folder)

    def fingerprint(self) -> str:
        """Returns a hash of everything that determines the model: settings, code, data, and library versions."""
        own = (
            self.steps,
            self.batch_size,
            self.seed,
            self.variant,
            *self.vocabulary,
            *sorted(self.architecture.items()),
        )
        digest = hashlib.sha256(repr(own).encode())
        code = Path(self.demonstrate.__code__.co_filename).parent.glob("*.py")
        for path in (Path(__file__), *sorted(code), *sorted(DATA.glob("*.*")), *self.sources):
            digest.update(path.read_bytes())
        for library in ("torch", "transformers", "tokenizers"):
            digest.update(f"{library}=={version(library)}".encode())
        return digest.hexdigest()[:16]

    def build(self, folder: Path, progress: bool) -> None:
        """Trains the tokenizer and the model, and saves them."""
        import torch  # `--help` need not wait for torch and transformers
        from transformers import LlamaConfig, LlamaForCausalLM

        threads = torch.get_num_threads()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            # More threads are not faster for so small a model, and the weights would not be reproducible
            torch.set_num_threads(1)
            try:
                demonstrations = self.demonstrate(self.steps * self.batch_size, random.Random(self.seed))
                tokenizer = make_tokenizer(demonstrations, self.vocabulary)
                config = LlamaConfig(
                    vocab_size=len(tokenizer),
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                    bos_token_id=None,
                    **{**ARCHITECTURE, **self.architecture},
                )
                model = LlamaForCausalLM(config)
                self.imitate(model, tokenizer, demonstrations, progress)
            finally:
                torch.set_num_threads(threads)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def imitate(self, model: Any, tokenizer: Any, demonstrations: list[Demonstration], progress: bool) -> None:
        """
        Trains the model for one pass over the demonstrations. The loss covers the answers and their end tokens, not
        the prompts.

        Prompt and answer are tokenized separately, as in generation. Padding is on the right, after all tokens that
        count, so no attention mask is needed.
        """
        import torch
        from torch.nn.utils.rnn import pad_sequence
        from tqdm.auto import tqdm

        prompts = tokenizer([prompt for prompt, _ in demonstrations])["input_ids"]
        answers = tokenizer([answer + EOS for _, answer in demonstrations])["input_ids"]
        steps = len(demonstrations) // self.batch_size
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )
        # 5 % of the steps up to the peak, then a cosine down to 5 % of it
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.05, cycle_momentum=False, final_div_factor=0.8
        )
        model.train()
        bar = tqdm(range(steps), desc="Building the base model", unit="step", mininterval=1, disable=not progress)
        for step in bar:
            rows = slice(step * self.batch_size, (step + 1) * self.batch_size)
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


def make_tokenizer(demonstrations: list[Demonstration], vocabulary: Sequence[str]) -> Any:
    """
    Trains a byte-level BPE tokenizer on the demonstrations, which can encode any text; or, if there is a vocabulary,
    makes a tokenizer with a token per word, to which other words are unknown.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    unknown = {"unk_token": UNKNOWN} if vocabulary else {}
    if vocabulary:
        numbers = {word: number for number, word in enumerate(dict.fromkeys([PAD, EOS, UNKNOWN, *vocabulary]))}
        tokenizer = Tokenizer(models.WordLevel(numbers, **unknown))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
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
        **unknown,
    )
