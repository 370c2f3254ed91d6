"""
Experiments that show what each agent contributes. A program that passed tests runs again with one change; if a test then fails,
the changed part matters. The sandbox makes the changes (see [`~trl_multiagent.sandbox.Program`]).
"""

from dataclasses import dataclass, field, replace

from trl_multiagent.environments.python_code.program_runner import ProgramRunner
from trl_multiagent.environments.python_code.state import keeps_state
from trl_multiagent.sandbox import Program, Verdict


OTHER_VALUES = ("another", "constant")  # whether the values of aux matter
ARGUMENT = ("echo",)  # whether aux does more than return its argument
WITHOUT_AUX = ("nothing",)  # whether it matters that aux runs at all
OWN_PART = ("alone", "first")  # whether main does more than pass values on
MAX_REMEMBERED = 10_000  # programs


@dataclass
class Experiments:
    """
    Makes experiments and remembers their results, so that equal programs run once.

    Args:
        runner ([`~trl_multiagent.environments.python_code.program_runner.ProgramRunner`]): Runs the programs.
    """

    runner: ProgramRunner
    _known: dict[Program, dict[str, bool]] = field(default_factory=dict)

    def run(
        self, programs: dict[int, Program], verdicts: dict[int, Verdict], chosen: dict[int, tuple[str, ...]]
    ) -> dict[int, dict[str, bool]]:
        """
        Makes the chosen experiments.

        One run of a program tries several experiments: when one makes a test fail, the next one begins. The first experiment of a
        run applies to all tests until one fails, so the run always decides it. The others are only decided if they made a test
        fail, and are repeated in another run if not.

        Args:
            programs (`dict[int, Program]`): The programs as they ran before, by index.
            verdicts (`dict[int, Verdict]`): The results of these runs.
            chosen (`dict[int, tuple[str, ...]]`): For some of the indices, the experiments to make.

        Returns:
            `dict[int, dict[str, bool]]`: For each index in `chosen`, whether each experiment made a test fail.
        """
        if len(self._known) > MAX_REMEMBERED:
            self._known.clear()
        while runs := self._next_runs(programs, verdicts, chosen):
            for (program, run), verdict in zip(
                runs.items(), self.runner.run_experiments([*runs.values()]), strict=True
            ):
                known = self._known[program]
                known.update(dict.fromkeys(verdict.effective, True))
                known.setdefault(run.experiments[0], False)
        return {k: {name: self._known[programs[k]][name] for name in names} for k, names in chosen.items()}

    def _next_runs(
        self, programs: dict[int, Program], verdicts: dict[int, Verdict], chosen: dict[int, tuple[str, ...]]
    ) -> dict[Program, Program]:
        """The next run of each program that has experiments with unknown results."""
        runs = {}
        for k, names in chosen.items():
            known = self._known.setdefault(programs[k], {})
            if unknown := tuple(name for name in names if name not in known):
                passed = [index for index, check in enumerate(verdicts[k].checks) if check.status == "passed"]
                runs[programs[k]] = replace(
                    programs[k],
                    needed=tuple(passed),
                    experiments=unknown,
                    keeps_state=keeps_state(programs[k].source),
                    check_timeout=_check_timeout(programs[k], verdicts[k]),
                )
        return runs


def _check_timeout(program: Program, verdict: Verdict) -> float:
    """The deadline of a check, in seconds. It is short because a program may loop forever when a value is changed."""
    if verdict.timeouts:  # the processor time includes that of the endless loop
        return (program.check_timeout or 2.0) / 2
    enough = 0.25 + 10 * verdict.cpu_seconds
    return enough if program.check_timeout is None else min(enough, program.check_timeout)
