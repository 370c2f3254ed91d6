"""Models in GGUF files. Each is converted once, to a folder as transformers writes it, and read from there."""

import copy
import hashlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import (
    TOKENIZER_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import SAFE_WEIGHTS_NAME

from trl_multiagent.console import install_command
from trl_multiagent.folders import MODEL_CONFIG, open_cache
from trl_multiagent.models.pretrained import find_file, without_weights


VERSION = re.compile(r"\d+-\d+|\.unfinished-.*")  # names of conversions: nothing else is removed


def gguf_file_of(name: str) -> tuple[str, str | None]:
    """
    Splits the path of a GGUF file into its folder or repository and the name of the file. Other names stay as they
    are, and have none.
    """
    path = Path(name)
    is_file = path.suffix == ".gguf" and not path.is_dir()
    return (str(path.parent), path.name) if is_file else (name, None)


def converted(name: str, revision: str | None = None, token: str | bool | None = None, weights: bool = True) -> str:
    """
    Returns the folder that a model is read from. For a GGUF file, this is its conversion, beside the file, or in the
    cache if its folder is not writable or the Hub's; other names stay as they are. Of several processes, one converts.
    A file that has changed is converted again.

    Args:
        name (`str`): A model's id or folder, or the path of a GGUF file in a folder or a repository on the Hub.
        revision (`str`, *optional*): Revision of the repository.
        token (`str` or `bool`, *optional*): Token for the Hub.
        weights (`bool`, *optional*, defaults to `True`): Whether to convert the weights, to float32 (4 bytes each on
            the disk). Without, the folder may have only the configuration and the tokenizer.

    Raises:
        ImportError: The library `gguf` is missing.
        OSError: The file cannot be found or changes meanwhile, or the disk is too full.
        ValueError: The file is damaged or lacks weights, or its architecture is unknown to transformers.
    """
    folder, file_name = gguf_file_of(name)
    if file_name is None:
        return name
    file = Path(name).absolute()
    place = file.parent
    if is_on_hub := not file.is_file():
        found = find_file(folder, file_name, revision, token, required=True)
        if found is None:
            raise OSError(f"{name} does not exist. A saved adapter needs the model that it was trained on.")
        file = Path(found)
    if is_on_hub or not os.access(place, os.W_OK):
        place = open_cache() / "gguf" / hashlib.sha256(str(file).encode()).hexdigest()[:16]
    place = place / f"{file.name}_converted"
    target = place / version_of(file)
    if not (target / (SAFE_WEIGHTS_NAME if weights else MODEL_CONFIG)).is_file():
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / ".lock"):
            for other in place.iterdir():  # of an earlier version of the file, or of a killed process
                if VERSION.fullmatch(other.name) and other != target:
                    shutil.rmtree(other)
            convert(file, target, weights)
    return str(target)


def version_of(file: Path) -> str:
    """Returns the size of a file and the time of its last change, which no program can set."""
    status = file.stat()
    return f"{status.st_size}-{status.st_ctime_ns}"


def check_library() -> None:
    """Raises an `ImportError` if the library `gguf` is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Reading a GGUF file needs the library gguf: {install_command('gguf')}.") from error


def convert(file: Path, folder: Path, weights: bool) -> None:
    """Writes the parts of a GGUF file that `folder` lacks. Each appears there when it is complete."""
    check_library()
    version = version_of(file)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as scratch:
        if not folder.is_dir():
            print(f"{file.name}: reading its configuration and tokenizer, once", file=sys.stderr)
            write_header(file, header := Path(scratch, "header"))
            header.rename(folder)
        if weights and not (folder / SAFE_WEIGHTS_NAME).is_file():
            print(f"{file.name}: converting its weights, once, to {folder}", file=sys.stderr)
            read_model(file, folder).save_pretrained(scratch, max_shard_size=2**62)
            if version_of(file) != version:
                raise OSError(f"{file} was changed while it was converted: start again.")
            Path(scratch, SAFE_WEIGHTS_NAME).rename(folder / SAFE_WEIGHTS_NAME)


def write_header(file: Path, folder: Path) -> None:
    """Writes the configuration and the tokenizer of a GGUF file to a folder. Each use of the header takes seconds."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.save_pretrained(folder)
    cls = TOKENIZER_MAPPING.get(type(config), PreTrainedTokenizerFast)  # `AutoTokenizer` would read the header again
    if not issubclass(cls, PreTrainedTokenizerFast):  # with `mistral-common`
        cls = PreTrainedTokenizerFast
    cls.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def read_model(file: Path, folder: Path) -> PreTrainedModel:
    """
    Reads the model in a GGUF file as one that can be saved: transformers saves none, although the weights are plain
    numbers. `folder`: where its configuration is.
    """
    config = AutoConfig.from_pretrained(folder)
    if is_deepspeed_zero3_enabled():
        raise ValueError(f"{file} is converted by one process: evaluate it before it is trained under ZeRO-3.")
    needed = 4 * without_weights(config).num_parameters()
    if shutil.disk_usage(folder).free < needed:
        raise OSError(f"The disk of {folder} has less than the {needed / 1e9:.1f} GB that converted weights need.")
    model, loaded = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        config=copy.deepcopy(config),
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    if missing := sorted(loaded["missing_keys"]):  # without a head that is tied to the embeddings
        raise ValueError(f"{file} lacks {len(missing)} weights, the first of which is {missing[0]}.")
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return plain
