"""
Experiments that show what each agent contributes: a program that passed tests runs again with one thing changed, and what
matters is whether that costs it a test. The sandbox makes the changes (see [`~trl_multiagent.sandbox.Program`]).
"""

from dataclasses import dataclass, field, replace

from trl_multiagent.environments.execution_log import ExecutionLog
from trl_multiagent.sandbox import Program, Verdict


OTHER_VALUES = ("another", "constant")  # whether the values of aux matter
ARGUMENT = ("echo",)  # whether aux tells more than what it is given
WITHOUT_AUX = ("nothing",)  # whether it matters that aux runs
OWN_PART = ("alone", "first")  # whether main does more than pass values on
MAX_REMEMBERED = 10_000  # programs


@dataclass
class Experiments:
    """
    Makes experiments, each once for programs that are the same.

    Args:
        executions (`ExecutionLog`): What runs the programs.
    """

    executions: ExecutionLog
    _known: dict[Program, dict[str, bool]] = field(default_factory=dict)

    def run(
        self, programs: dict[int, Program], verdicts: dict[int, Verdict], chosen: dict[int, tuple[str, ...]]
    ) -> dict[int, dict[str, bool]]:
        """
        Makes the chosen experiments.

        A program tries several in one run: the next begins when one has cost a test. The first one of the run has seen all tests, so
        it is decided either way; others that have not cost a test are tried in another run.

        Args:
            programs (`dict[int, Program]`): The programs as they ran before, by index.
            verdicts (`dict[int, Verdict]`): What that showed.
            chosen (`dict[int, tuple[str, ...]]`): For some of the indices, the experiments to make.

        Returns:
            `dict[int, dict[str, bool]]`: For each index in `chosen`, whether each experiment cost a test.
        """
        if len(self._known) > MAX_REMEMBERED:
            self._known.clear()
        while runs := self._next_runs(programs, verdicts, chosen):
            for (program, run), verdict in zip(
                runs.items(), self.executions.run_experiments([*runs.values()]), strict=True
            ):
                known = self._known[program]
                known.update(dict.fromkeys(verdict.effective, True))
                known.setdefault(run.experiments[0], False)
        return {k: {name: self._known[programs[k]][name] for name in names} for k, names in chosen.items()}

    def _next_runs(
        self, programs: dict[int, Program], verdicts: dict[int, Verdict], chosen: dict[int, tuple[str, ...]]
    ) -> dict[Program, Program]:
        """For each program of which something is not known yet, the program to run next."""
        runs = {}
        for k, names in chosen.items():
            known = self._known.setdefault(programs[k], {})
            if unknown := tuple(name for name in names if name not in known):
                passed = [index for index, check in enumerate(verdicts[k].checks) if check.status == "passed"]
                runs[programs[k]] = replace(
                    programs[k],
                    needed=tuple(passed),
                    experiments=unknown,
                    check_timeout=_check_timeout(programs[k], verdicts[k]),
                )
        return runs


def _check_timeout(program: Program, verdict: Verdict) -> float:
    """Seconds for a check, in which a changed value may make a program loop that passed."""
    if verdict.timeouts:  # the time of a program that looped says nothing about the checks that it passes
        return (program.check_timeout or 2.0) / 2
    enough = 0.25 + 10 * verdict.cpu_seconds
    return enough if program.check_timeout is None else min(enough, program.check_timeout)
