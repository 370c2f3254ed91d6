"""The traceback of an error in a task, as somebody who wrote the task wants to read it."""

from types import TracebackType


# What runs a task. Its frames say nothing about a task's error
CALLERS = tuple(f"trl_multiagent.{package}." for package in ("trainers", "rollout", "environments", "jobs", "team"))
LIBRARIES = "trl transformers accelerate torch asyncio concurrent contextlib threading".split()


def frames_of_task(error: BaseException) -> TracebackType | None:
    """Returns the frames of an error but for those of this package and its libraries, which run the task."""
    frames, frame, kept, is_inner = [], error.__traceback__, None, True
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    for frame in reversed(frames):
        module = frame.tb_frame.f_globals.get("__name__", "")
        is_caller = module.startswith(CALLERS)
        is_inner &= not is_caller  # what a task calls is shown whole
        if is_inner or not (is_caller or module.partition(".")[0] in LIBRARIES):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept
