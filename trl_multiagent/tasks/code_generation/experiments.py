"""
Experiments that show what each agent contributes. A program that passed tests runs again with one change; if a test
then fails, the changed part matters. The sandbox makes the changes (see [`~trl_multiagent.code.sandbox.Program`]).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trl_multiagent.code.program_runner import ProgramRunner
from trl_multiagent.code.sandbox import Program, Verdict


WITHOUT_AUX = "nothing"  # whether it matters that aux runs
WITHOUT_VALUE = "mute"  # whether it matters that aux returns something
# If so, whether it matters what it returns
OTHER_VALUES = ("another|swapped", "constant", "second", "third", "replay", "echo")
IN_PLACE = ("apart",)  # if not, whether it matters that it changes its arguments
ANY_VALUE = "another|constant"  # the same, for the kind `paper`: one effect is enough
OWN_PART = ("alone", "first")  # whether main does more than pass values on
# Changes no value. If it makes a test fail, the other experiments show nothing. Twice, since a program may fail by
# chance
CONTROL = "control|control"
MAX_REMEMBERED = 10_000  # programs
# Of aux, in the tests of a pair with which experiments are made. In an experiment, each one passes between processes
MAX_CALLS = 10_000
SECONDS_PER_CALL = 5e-4  # of aux, in an experiment


@dataclass
class Experiments:
    """
    Makes experiments and remembers their results, so that equal programs run once. The methods take the programs as
    they ran before, by index, and the verdicts of these runs.
    """

    runner: ProgramRunner
    _known: dict[tuple[Program, tuple[str, ...]], dict[str, bool]] = field(default_factory=dict)

    def collaborate(self, programs: dict[int, Program], verdicts: dict[int, Verdict]) -> dict[int, tuple[bool, bool]]:
        """For each program, whether its tests need `aux`, and whether both agents do a part of the work."""
        without = self._run(verdicts, {k: (program, (WITHOUT_AUX, WITHOUT_VALUE)) for k, program in programs.items()})
        needed = {k: lost[WITHOUT_AUX] for k, lost in without.items()}
        parts = {k: (*(OTHER_VALUES if without[k][WITHOUT_VALUE] else IN_PLACE), *OWN_PART, CONTROL) for k in programs}
        results = self._run(verdicts, {k: (programs[k], parts[k]) for k in programs if needed[k]})
        divided = {k: all(lost[name] != (name == CONTROL) for name in lost) for k, lost in results.items()}
        # if no test is lost without aux, one may still be lost with wrong values
        spare = {k: (programs[k], OTHER_VALUES[:1]) for k in programs if not needed[k]}
        for k, lost in self._run(verdicts, spare).items():
            needed[k] = any(lost.values())
        return {k: (needed[k], divided.get(k, False)) for k in programs}

    def depend_on_aux(
        self, programs: dict[int, Program], verdicts: dict[int, Verdict]
    ) -> dict[int, tuple[bool, bool]]:
        """
        For each program, whether its tests depend on the values of `aux`, or on what it does in place; and False.
        """
        results = self._run(verdicts, {k: (program, (ANY_VALUE,)) for k, program in programs.items()})
        depends = {k: lost[ANY_VALUE] for k, lost in results.items()}
        open_questions = {k: (programs[k], (WITHOUT_AUX, WITHOUT_VALUE)) for k in programs if not depends[k]}
        for k, lost in self._run(verdicts, open_questions).items():
            depends[k] = lost[WITHOUT_AUX] and not lost[WITHOUT_VALUE]
        return {k: (depended, False) for k, depended in depends.items()}

    def _run(
        self, verdicts: dict[int, Verdict], chosen: Mapping[int, tuple[Program, tuple[str, ...]]]
    ) -> dict[int, dict[str, bool]]:
        """
        Makes the chosen experiments, by index, in their order until one has no effect. Returns for each index whether
        each experiment had an effect, that is, made a test fail; False for those that were not made.
        """
        if len(self._known) > MAX_REMEMBERED:
            self._known.clear()
        runs = {
            (program, names): replace(
                program,
                needed=tuple(i for i, check in enumerate(verdicts[k].checks) if check.status == "passed"),
                experiments=names,
                check_timeout=_check_timeout(program, verdicts[k]),
            )
            for k, (program, names) in chosen.items()
            if (program, names) not in self._known
        }
        made = self.runner.run_experiments([*runs.values()]) if runs else []
        for (key, run), verdict in zip(runs.items(), made, strict=True):
            self._known[key] = {name: name in verdict.effective for name in run.experiments}
        return {k: self._known[key] for k, key in chosen.items()}


def _check_timeout(program: Program, verdict: Verdict) -> float:
    """
    Returns the deadline of a check, in seconds. It is short because a program may loop forever when a value is
    changed.
    """
    if verdict.timeouts:  # the processor time includes that of the endless loop
        return (program.check_timeout or 2.0) / 2
    # an experiment also copies and compares what passes between the agents
    calls = sum(verdict.calls.values()) * SECONDS_PER_CALL
    enough = 0.25 + 10 * verdict.cpu_seconds + calls
    return enough if program.check_timeout is None else min(enough, program.check_timeout + calls)
