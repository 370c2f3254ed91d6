"""Silences messages of other libraries that say nothing about a run. Importing this module must stay fast."""

import logging
import warnings


def quiet_libraries() -> None:
    """Done when the package is imported, before it imports these libraries."""
    # On a machine without a GPU, bitsandbytes recommends a package for 4-bit weights, whether or not there are any
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # TRL's own default is the deprecated name
    warnings.filterwarnings("ignore", "`gradient_checkpointing(_kwargs)?` is deprecated", FutureWarning)
    # `accelerate launch` lists the flags that were left out. Their defaults are right
    logging.getLogger("accelerate.commands.launch").addFilter(is_no_list_of_defaults)


def is_no_list_of_defaults(record: logging.LogRecord) -> bool:
    return "had defaults used instead" not in str(record.msg)
