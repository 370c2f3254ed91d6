"""`accelerate launch`, as a script that `forked.Forked` can run."""

import faulthandler

from accelerate.commands.launch import main


if __name__ == "__main__":
    # A forked process cannot set a deadline of its own while this one has one
    faulthandler.cancel_dump_traceback_later()
    main()
