"""The time that a check takes."""

import os
import time
from collections.abc import Callable


POLL_SECONDS = 0.0005  # processor time that the verifier needs for waiting between two looks


class Clock:
    """
    The time that a check takes: the processor time of the candidate and of this process, and the time in which both
    wait for something other than a core. Waiting for a core does not count, so the time does not depend on the
    machine's load. `look` advances the clock.

    Args:
        limit (`float`): Seconds that a check may take. The time between looks is a small part of it.
        ask_candidate (`Callable[[], dict]`): Gives what the candidate did since the last call (see `zygote.Usage`).
        own_times (`int`): Open `schedstat` file of this process.
    """

    def __init__(self, limit: float, ask_candidate: Callable[[], dict], own_times: int):
        self.limit = limit
        self.interval = min(0.05, limit / 20)
        self.ask_candidate = ask_candidate
        self.own_times = own_times
        self.total = 0.0  # of all checks and of the code between them
        self.begin()
        self.start_candidate()

    def begin(self, computed: float = 0.0, idle: float = 0.0) -> None:
        """Starts to time a check, which may have taken some time before."""
        self.begun = time.monotonic()
        self.computed, self.idle = computed, idle

    def start_candidate(self) -> None:
        """Starts to time a new candidate."""
        self.looked, self.own = time.monotonic(), self._own()

    @property
    def spent(self) -> float:
        return self.computed + self.idle

    def until_next_look(self) -> float:
        return self.looked + min(self.interval, max(0.002, self.limit - self.spent)) - time.monotonic()

    def look(self) -> int:
        """Advances the clock and returns the number of the candidate's threads."""
        own = self._own()
        candidate, now = self.ask_candidate(), time.monotonic()
        since = now - self.looked
        computed = candidate["computed"] + max(0.0, own[0] - self.own[0] - POLL_SECONDS)
        waited = candidate["waited"] + own[1] - self.own[1]
        # Looking itself takes about 2 % of the time. If looks are further apart than planned, this process was stopped
        # or had no core, and the candidate may have been stopped too
        idle = min(max(0.0, 0.98 * since - computed) - waited, 2 * self.interval)
        self.total += max(0.0, computed + idle)
        part = min(1.0, (now - self.begun) / since)  # the rest belongs to the previous check
        self.computed += part * computed
        # Some time that looked idle turns out at a later look to be waiting for a core
        self.idle = max(0.0, self.idle + part * idle)
        self.looked, self.own = now, self._own()
        return candidate["threads"]

    def _own(self) -> tuple[float, float]:
        """Seconds of processor time of this process, and seconds that it waited for a core."""
        os.lseek(self.own_times, 0, os.SEEK_SET)
        return time.process_time(), int(os.read(self.own_times, 100).split()[1]) / 1e9
