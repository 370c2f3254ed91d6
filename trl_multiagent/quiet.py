"""Silences messages of other libraries that say nothing about a run. Importing this module must stay fast."""

import logging
import warnings


def quiet_libraries() -> None:
    """To be called before these libraries are imported."""
    # On a machine without a GPU, bitsandbytes recommends a package for 4-bit weights, whether or not there are any
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # TRL's own default is the deprecated name
    warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated", FutureWarning)
