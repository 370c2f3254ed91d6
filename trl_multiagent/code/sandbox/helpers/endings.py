"""
What ends a call or a run before its time. None of these is an `Exception`, so that checks do not catch them by chance.
"""

from .wire import LostStep


MAX_ERROR = 300  # characters of a check's error


class Timeout(BaseException):
    """The candidate did not answer in time."""


class Died(BaseException):
    """The candidate's process ended."""


class GiveUp(BaseException):
    """The rest of this program's checks does not run."""


class SandboxFault(BaseException):
    """The sandbox failed, not the program."""


class StepLost(BaseException):
    """
    This step ended the verifier in an earlier run. It is part of the code between two asserts, which cannot go on
    without it.
    """

    def __init__(self, step: LostStep):
        super().__init__(step.status, step.error)
        self.step = step


class CheckLost(StepLost):
    """This step ended the verifier in an earlier run. It is part of an assert, which fails."""


def outcome(error: BaseException) -> tuple[str, str]:
    """Status and error text of a check that raised."""
    if isinstance(error, StepLost):
        return error.step.status, error.step.error
    try:
        text = f"{type(error).__name__}: {str(error)[:MAX_ERROR]}".rstrip(": ")
    except Exception:  # `str` failed: an integer with too many digits, or a method of a class of the checks
        text = type(error).__name__
    return "timeout" if isinstance(error, Timeout) else "error", text.encode("utf-8", "replace").decode()
