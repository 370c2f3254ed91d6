"""
Runs the programs of an environment, counts their results for the training log, and stores suspicious programs on disk.
"""

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trl_multiagent.code.sandbox import Program, Sandbox, Verdict


logger = logging.getLogger(__name__)

KEPT_PROGRAMS = 1000  # per process; the limit is needed because a policy repeats a trick that it has found


@dataclass
class ProgramRunner:
    """
    Runs programs in a sandbox, and counts their results. Every method returns one verdict per program, in order.

    Args:
        sandbox (`Sandbox`): The sandbox that runs the programs.
        keep_suspicious (`str` or `Path`, *optional*): Folder for programs with a suspicious verdict, one JSON file
            each. By default they are not stored.
    """

    sandbox: Sandbox
    keep_suspicious: str | Path | None = None

    def __post_init__(self) -> None:
        self._kept = 0
        self._counts: defaultdict[str, float] = defaultdict(float)

    def run(self, programs: Sequence[Program]) -> list[Verdict]:
        """Runs the agents' programs."""
        verdicts = self._run(programs, "seconds")
        for program, verdict in dict(zip(programs, verdicts, strict=True)).items():  # equal programs run once
            self._counts["executions"] += 1
            self._counts["timeouts"] += verdict.timeouts
            self._counts["memory_kills"] += verdict.out_of_memory
            if verdict.suspicious:
                self._counts["suspicious"] += 1
                self._keep(program, verdict)
        return verdicts

    def run_experiments(self, programs: Sequence[Program]) -> list[Verdict]:
        """
        Runs the agents' programs with a change, or others, such as reference solutions. Only the time is counted.
        """
        return self._run(programs, "experiment_seconds")

    def _run(self, programs: Sequence[Program], count: str) -> list[Verdict]:
        """Runs programs, if there are any, and adds the wall-clock seconds to a count."""
        if not programs:
            return []
        start = time.monotonic()
        verdicts = self.sandbox.run(programs)
        self._counts[count] += time.monotonic() - start
        return verdicts

    def metrics(self) -> dict[str, float]:
        """
        Returns the results since the last call of this method.

        Returns:
            `dict[str, float]`: `executions_per_second`, the agents' programs per second spent running them, with equal
            programs of a batch counted once; `experiment_seconds`, the time for all other runs; the number of checks
            that hit a deadline, `timeouts`; and the numbers of programs that ran out of memory, `memory_kills`, or
            looked `suspicious`.
        """
        counts, self._counts = self._counts, defaultdict(float)
        speed = counts["executions"] / counts["seconds"] if counts["seconds"] else 0.0
        names = ("experiment_seconds", "timeouts", "memory_kills", "suspicious")
        return {"executions_per_second": speed, **{name: counts[name] for name in names}}

    def _keep(self, program: Program, verdict: Verdict) -> None:
        if self.keep_suspicious is None or self._kept >= KEPT_PROGRAMS:
            return
        folder = Path(self.keep_suspicious)
        record = {"suspicious": verdict.suspicious, "passed": verdict.passed, **vars(program)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"program_{time.time_ns()}_{os.getpid()}.json").open("x") as file:  # through no link
                json.dump(record, file, indent=2)
        except OSError as error:  # a full disk, for example, must not end the training
            logger.warning("A suspicious program could not be stored in %s: %s", folder, error)
        self._kept += 1
