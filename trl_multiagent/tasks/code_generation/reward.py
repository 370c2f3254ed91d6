"""
The joint reward of a team's code, 0 to 4.0, or 2.1 for a single agent.

There are two kinds with the same scale and parts. `paper` is the published table, for comparison with published
numbers; it also rewards some answers that do not solve the task. `earned` only rewards solving the task. It runs
modified programs to decide, where `paper` reads the code.
"""

import ast
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trl_multiagent.code.dependencies import IMPORTS, binds_of, called_name, names_in
from trl_multiagent.code.extraction import Code, join_sources, read_function
from trl_multiagent.code.program_runner import ProgramRunner
from trl_multiagent.code.sandbox import EXPERIMENTS, Program, Verdict, read_asserts
from trl_multiagent.console import printable
from trl_multiagent.environments.base import PASSED, JointAction, Outcome
from trl_multiagent.tasks.code_generation.item_facts import ItemFacts, facts_program, read_facts, read_problem


logger = logging.getLogger(__name__)

AUX = "aux"  # the agent that writes the helper function, which is also named `aux`
MAIN = "main"  # the agent that writes the entry point

REWARD_VERSION = 16  # appears in model cards; increased whenever the reward of some code changes
AUX_DEFINED = 0.4
MAIN_DEFINED = 0.6
SYNTAX = 0.5
TESTS = 1.0  # times the share of asserts that passed
AUX_USED = 0.5
NOT_A_WRAPPER = 1.0
VALUE_IGNORED = 0.5  # subtracted

SAMPLED = 4  # where rewards are only compared, one in so many items with equal pairs makes its experiments
MAX_CALLS = 10_000  # of aux, in the tests of a pair with which experiments are made
SECONDS_PER_CALL = 5e-4  # of aux, in an experiment, where each one passes between processes

KINDS = ("paper", "earned")
COLLABORATION = ("executed", "static")
REFERENCE_FACTOR = 20  # deadline of a check, in multiples of the reference solution's processor time
MIN_TIMEOUT = 1.0  # shortest deadline of a check, in seconds


@dataclass(frozen=True)
class Analysis:
    """The facts that the syntax trees of a team's answer show."""

    source: str  # the whole program: the prompt's prefix, aux's part, main's part
    setup: str  # the prompt's prefix alone
    aux_problem: str  # why aux's answer does not define `aux` with a result, empty if it does
    main_problem: str  # the same for main's answer and the entry point
    syntax_problem: str  # the parts of the program that do not parse, with place and reason
    without_code: tuple[str, ...] = ()  # the functions for which an agent answered with a text that contains no code
    # Whether code that the entry point needs names the aux agent's function. Only a run of the tests shows whether it
    # is called
    names_aux: bool = False
    # If so, aux's part and main's part as programs of their own, each with the prefix and the imports of both
    apart: tuple[str, str] = ("", "")
    # The size of the smaller part over the size of both, in nodes of the syntax tree: of `aux`, of the entry point,
    # and of what they need. 0 if the entry point does not name `aux`, None for a single agent
    size_share: float | None = None
    thin_wrapper: bool = False  # whether the entry point only returns the value of `aux`
    drops_value: bool = False  # whether `aux` returns a value, but a call stands by itself
    # The share of the characters of aux's completion, without white space, that belongs to `aux` and to the statements
    # that it needs: variables, helpers, calls that fill a table, and imports. 0 without `aux`, 1 for a single agent
    aux_function_share: float = 1.0
    main_function_share: float = 1.0  # the same for main's completion and the entry point
    is_opaque: bool = False  # whether only a run shows whether what main binds to the entry point can be called


@dataclass(frozen=True)
class CodeResult:
    """The result of scoring a joint action. The next turn's feedback is made from it."""

    analysis: Analysis  # of the code
    verdict: Verdict | None = None  # the result of running the program; `None` if scoring stopped before the run
    executed: bool = True  # whether the run of the tests also decides about collaboration, or only the code
    needs_aux: bool = True  # whether experiments show that a test that passes depends on `aux`
    divided: bool = False  # for the kind `earned`, whether they show that both agents are needed
    estimated: bool = False  # whether the two come from another item, see [`shared_experiments`]

    @property
    def ran(self) -> bool:
        """Whether the program was run: otherwise, scoring stopped before."""
        return self.verdict is not None

    @property
    def passed(self) -> int:
        """The number of tests that passed."""
        return self.verdict.passed if self.verdict else 0

    @property
    def called(self) -> bool:
        """
        Whether `aux` was called in a test that passed. If only the code decides: whether it may have been called.
        """
        if self.verdict is None or not self.analysis.names_aux or not self.passed:
            return False
        return not self.executed or self.verdict.calls.get(AUX, 0) > 0

    @property
    def ignored(self) -> bool:
        """
        Whether no test that passes depends on `aux`. If only the code decides: whether a value of `aux` is not used.
        """
        return not self.needs_aux if self.executed else self.analysis.drops_value


@dataclass
class CodeReward:
    """
    Scores joint actions. The arguments are the same as in [`CodeGenerationEnvironment`], where `kind` is called
    `reward_kind`.
    """

    runner: ProgramRunner  # runs the programs
    kind: str = "paper"
    collaboration: str = "executed"
    adaptive_timeout: bool = True
    warn_about_items: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (("kind", self.kind, KINDS), ("collaboration", self.collaboration, COLLABORATION)):
            if value not in known:
                raise ValueError(f"Unknown {name} {value!r}: choose {', '.join(known)}.")
        if self.kind == "earned" and self.collaboration == "static":
            raise ValueError("The reward kind 'earned' needs `collaboration` 'executed', because it runs programs.")
        self._facts: dict[tuple[str, str, str, bool], ItemFacts] = {}
        self._unreadable: set[tuple[str | None, str]] = set()  # answers that were reported

    def score(
        self,
        items: list[dict],
        joint_actions: list[JointAction],
        kinds: tuple[str, ...] = (),
        trees: Sequence[int] = (),
    ) -> list[Outcome]:
        """
        Scores a batch. All programs of the batch run in one call of the sandbox; experiments take a few more calls.

        Args:
            items (`list[dict]`): Rows of a code dataset, one per joint action.
            joint_actions (`list[JointAction]`): `{"aux": ..., "main": ...}`, or `{"main": ...}` for a single agent.
            kinds (`tuple[str, ...]`, *optional*): Kinds of the reward to report as metrics `{kind}_reward`, in
                addition to the one that the agents are trained on.
            trees (`Sequence[int]`, *optional*): The number of each joint action's item if rewards are only compared
                within the item, see [`shared_experiments`].

        Returns:
            `list[Outcome]`: For each joint action, the reward, its parts as metrics, and the [`CodeResult`] as `info`.
        """
        kinds, executed = tuple(dict.fromkeys((self.kind, *kinds))), self.collaboration == "executed"
        facts = self._item_facts(items, "earned" in kinds)
        analyses = [self._analyze(item, action) for item, action in zip(items, joint_actions, strict=True)]
        programs = {
            k: Program(
                source=analysis.source,
                entry_point=items[k]["entry_point"],
                checks=items[k]["test"],
                setup=analysis.setup,
                watch=(AUX,) if analysis.names_aux and (executed or "earned" in kinds) else (),
                check_timeout=self._check_timeout(facts[k]),
            )
            for k, analysis in enumerate(analyses)
            if not analysis.main_problem and not analysis.syntax_problem
        }
        verdicts = dict(zip(programs, self.runner.run([*programs.values()]), strict=True))
        for k in [k for k, x in verdicts.items() if analyses[k].is_opaque and x.definitions.status != "passed"]:
            analyses[k] = replace(analyses[k], main_problem=f"`{items[k]['entry_point']}` cannot be called")
            del programs[k], verdicts[k]
        shown = self._make_experiments(kinds, analyses, programs, verdicts, facts, trees)
        results = [
            CodeResult(analysis, verdicts.get(k), executed, *shown.get(k, ())) for k, analysis in enumerate(analyses)
        ]
        outcomes = [_outcome(self.kind, result, fact) for result, fact in zip(results, facts, strict=True)]
        for k, outcome in enumerate(outcomes if len(kinds) > 1 else ()):
            for kind in kinds:
                outcome.metrics[f"{kind}_reward"] = sum(PARTS[kind](results[k], facts[k]).values())
        return outcomes

    def _make_experiments(
        self,
        kinds: tuple[str, ...],
        analyses: list[Analysis],
        programs: dict[int, Program],
        verdicts: dict[int, Verdict],
        facts: list[ItemFacts],
        trees: Sequence[int],
    ) -> dict[int, tuple[bool, bool, bool]]:
        """
        Returns `needs_aux`, `divided` and `estimated` for the programs with which experiments are made, by index.
        """
        called = {
            k: replace(
                program,
                helper=analyses[k].apart[0],
                source=analyses[k].apart[1],
                needed=tuple(i for i, check in enumerate(verdicts[k].checks) if check.status == "passed"),
                check_timeout=_experiment_timeout(program, verdicts[k]),
            )
            for k, program in programs.items()
            if verdicts[k].passed and 0 < verdicts[k].calls.get(AUX, 0) <= MAX_CALLS
        }

        def find_effects(chosen: dict[int, tuple[str, ...]]) -> dict[int, tuple[str, ...]]:
            """Makes the chosen experiments, by index, in order until one has no effect. Returns those with one."""
            made = self.runner.run_experiments([replace(called[k], experiments=names) for k, names in chosen.items()])
            return {k: verdict.effective for k, verdict in zip(chosen, made, strict=True)}

        solving = [k for k in called if "earned" in kinds and facts[k].share(verdicts[k].passed) > 0]
        asks = called if "paper" in kinds and self.collaboration == "executed" else ()  # whether they need aux
        chosen = dict.fromkeys(asks, EXPERIMENTS[:1]) | dict.fromkeys(solving, EXPERIMENTS)
        shared = shared_experiments([called[k] if k in chosen else None for k in range(len(analyses))], trees)
        effects = find_effects({k: names for k, names in chosen.items() if k not in shared})
        # A main that answers itself if aux says nothing may still depend on what aux says
        others = find_effects({k: ("constant",) for k, effective in effects.items() if not effective})
        made = {k: (bool(effects[k] or others[k]), effects[k] == EXPERIMENTS[:-1]) for k in effects}
        return {k: (*made[shared.get(k, k)], k in shared) for k in chosen}

    def _analyze(self, item: dict, joint_action: JointAction) -> Analysis:
        """
        Analyses a joint action. Texts that the analysis fails on are logged once, and count as texts without code.
        """
        texts = (joint_action.get(AUX), joint_action[MAIN])
        try:
            return analyze(item["prompt"], item["entry_point"], *texts)
        except Exception as error:  # a mistake in the analysis must not end a training
            if texts not in self._unreadable:
                self._unreadable.add(texts)
                logger.error(
                    "%s: an answer could not be read (%s) and counts as empty. Please report its text: %r",
                    *(item["task_id"], f"{type(error).__name__}: {error}", texts),
                )
            return analyze(item["prompt"], item["entry_point"], None if texts[0] is None else "", "")

    def _check_timeout(self, facts: ItemFacts) -> float | None:
        """Returns the deadline of a check, in seconds; None for the sandbox's own."""
        if not self.adaptive_timeout or facts.reference_seconds is None:
            return None
        return max(MIN_TIMEOUT, REFERENCE_FACTOR * facts.reference_seconds)

    def _item_facts(self, items: list[dict], tries_trivial: bool) -> list[ItemFacts]:
        """
        Returns the facts about the items, in order. The facts about an item are determined when it is scored for the
        first time.
        """
        keys = [(item["prompt"], item["test"], item.get("canonical_solution") or "", tries_trivial) for item in items]
        if not tries_trivial and not (self.adaptive_timeout and any(reference for _, _, reference, _ in keys)):
            return [ItemFacts(len(read_asserts(item["test"]).sources)) for item in items]
        new = {key: item for key, item in zip(keys, items, strict=True) if key not in self._facts}
        verdicts = self.runner.run_experiments([facts_program(item, tries_trivial) for item in new.values()])
        for (key, item), verdict in zip(new.items(), verdicts, strict=True):
            facts = self._facts[key] = read_facts(item, verdict)
            if not self.warn_about_items:
                continue
            name = printable(str(item.get("task_id")))
            if tries_trivial and facts.trivial == facts.total:
                logger.warning("%s: a trivial answer passes all tests, so answers earn nothing for passing them", name)
            if facts.reference is not None and facts.reference < facts.total:
                logger.warning("%s: the reference solution passes %d of %d tests", name, facts.reference, facts.total)
        return [self._facts[key] for key in keys]


def shared_experiments(pairs: Sequence[Program | None], trees: Sequence[int]) -> dict[int, int]:
    """
    Finds the pairs that need no experiments, because all pairs of their item are equal, and rewards are only compared
    within an item. Of such items, one in [`SAMPLED`] makes its experiments, and the next ones count as this one, so
    that the mean reward stays right.

    Args:
        pairs (`Sequence[Program | None]`): The pair of each joint action; `None` if it needs no experiments.
        trees (`Sequence[int]`): The number of the item of each; empty if rewards count by themselves.

    Returns:
        `dict[int, int]`: For each such pair, the one that takes its place.
    """
    by_item: dict[int, list[int]] = {}
    for k, tree in enumerate(trees):
        by_item.setdefault(tree, []).append(k)
    equal = [group for group in by_item.values() if pairs[group[0]] and len({pairs[k] for k in group}) == 1]
    return {k: equal[n - n % SAMPLED][0] for n, group in enumerate(equal) if n % SAMPLED for k in group}


def _experiment_timeout(program: Program, verdict: Verdict) -> float:
    """
    Returns the deadline of a check in an experiment, in seconds. It is short because a program may loop forever when a
    value is changed.
    """
    if verdict.timeouts:  # the processor time includes the endless loop
        return (program.check_timeout or 2.0) / 2
    calls = sum(verdict.calls.values()) * SECONDS_PER_CALL
    enough = 0.25 + 10 * verdict.cpu_seconds + calls
    return enough if program.check_timeout is None else min(enough, program.check_timeout + calls)


def paper_parts(result: CodeResult, facts: ItemFacts) -> dict[str, float]:
    """Returns the parts of the reward according to the published table."""
    analysis, called = result.analysis, result.called
    return {
        "definition": AUX_DEFINED * (not analysis.aux_problem) + MAIN_DEFINED * (not analysis.main_problem),
        "syntax": SYNTAX * result.ran,
        "tests": TESTS * result.passed / facts.total,
        "aux_used": AUX_USED * called,
        "own_part": NOT_A_WRAPPER * (called and not analysis.thin_wrapper),
        "aux_ignored": -VALUE_IGNORED * (called and result.ignored),
    }


def earned_parts(result: CodeResult, facts: ItemFacts) -> dict[str, float]:
    """
    Returns the parts of the reward of the kind `earned`. `share` is the share of the tests that pass, among the tests
    that trivial answers do not pass; `main` and `aux` are the shares of the agents' texts that belong to their
    functions.
    """
    analysis, share = result.analysis, facts.share(result.passed)
    main, aux = analysis.main_function_share, analysis.aux_function_share
    together = share * result.divided
    return {
        "definition": MAIN_DEFINED * main * (not analysis.main_problem) + AUX_DEFINED * together,
        "syntax": SYNTAX * min(main, aux) * result.ran,
        "tests": TESTS * share,
        "aux_used": AUX_USED * together,
        "own_part": NOT_A_WRAPPER * together,
        "aux_ignored": -VALUE_IGNORED * share * (not result.needs_aux),
    }


PARTS = {"paper": paper_parts, "earned": earned_parts}


def metric_ranges(num_agents: int) -> dict[str, tuple[float, float]]:
    """Returns the smallest and the largest possible value of the reward and of its parts."""
    is_team = num_agents == 2
    defined, together = MAIN_DEFINED + is_team * AUX_DEFINED, is_team * (AUX_USED + NOT_A_WRAPPER)
    rewards = ("reward", "total_reward", "gated_total_reward", *(f"{kind}_reward" for kind in KINDS))
    largest = dict.fromkeys(rewards, defined + SYNTAX + TESTS + together)
    largest |= {
        "definition_reward": defined,
        "syntax_reward": SYNTAX,
        "execution_reward": TESTS,
        "syntax_valid_rate": 1.0,
        "test_pass_rate": 1.0,
    }
    if is_team:
        largest |= {
            "collab_aux_usage": AUX_USED,
            "collab_non_wrapper": NOT_A_WRAPPER,
            "size_share": 0.5,
            "collab_ignored_aux_call_penalty": VALUE_IGNORED,
            "collaboration_reward": together,
        }
    lowest = {"collaboration_reward": -VALUE_IGNORED}
    return {name: (lowest.get(name, 0.0), value) for name, value in largest.items()}


def _outcome(kind: str, result: CodeResult, facts: ItemFacts) -> Outcome:
    verdict = result.verdict
    parts = PARTS[kind](result, facts)
    reward = sum(parts.values())
    passed = result.passed
    share = {} if result.analysis.size_share is None else {"size_share": result.analysis.size_share}
    estimated = {"experiments": "from another item"} if result.estimated else {}
    return Outcome(
        reward=reward,
        metrics={
            "syntax_valid_rate": float(not (result.analysis.syntax_problem or result.analysis.without_code)),
            "definition_reward": parts["definition"],
            "syntax_reward": parts["syntax"],
            "execution_reward": parts["tests"],
            "tests_passed": float(passed),
            "tests_total": float(facts.total),
            "test_pass_rate": passed / facts.total,
            PASSED: float(passed == facts.total),
            "timeouts": float(verdict.timeouts if verdict else 0),
            "collab_aux_usage": parts["aux_used"],
            "collab_non_wrapper": parts["own_part"],
            "collab_ignored_aux_call_penalty": -parts["aux_ignored"],
            "collaboration_reward": parts["aux_used"] + parts["own_part"] + parts["aux_ignored"],
            **share,
            "total_reward": reward,
        },
        info=result,
        extra={"tests": "", "suspicious": ""} if verdict is None else verdict.columns() | estimated,
    )


# The analysis of an answer. The program is joined in the order prompt, aux, main, so the last definition of a name
# counts. Main's entry point replaces one that aux wrote; an `aux` that main defines is main's own function, and
# calling it is no collaboration


def analyze(prompt: str, entry_point: str, aux_completion: str | None, main_completion: str) -> Analysis:
    """
    Analyses the raw answers of a team to a problem of the dataset, in which main writes the function `entry_point`.
    `aux_completion` is `None` for a single agent.
    """
    prefix = read_problem(prompt, entry_point).prefix
    aux = read_function(aux_completion or "", AUX)
    main = read_function(main_completion, entry_point, has_partner=aux_completion is not None)
    answers = [(entry_point, main)] if aux_completion is None else [(AUX, aux), (entry_point, main)]
    names_aux = _definitions_count(aux, main, entry_point) and any(AUX in statement.reads for statement in main.needed)
    # An `aux` without a use has no size
    sizes = [sum(1 for x in code.needed for _ in ast.walk(x.node)) for code in (aux, main)] if names_aux else [0, 1]
    return Analysis(
        source=join_sources(prefix, _counted(aux), main.source),
        setup=prefix,
        aux_problem=aux.problem,
        main_problem=main.problem,
        syntax_problem="; ".join(f"code for `{name}`, {code.error}" for name, code in answers if code.error),
        without_code=tuple(name for name, code in answers if not code.found),
        names_aux=names_aux,
        apart=_apart(prefix, aux, main) if names_aux else ("", ""),
        size_share=None if aux_completion is None else min(sizes) / sum(sizes),
        thin_wrapper=names_aux and _is_thin_wrapper(main.function),
        drops_value=names_aux
        and not aux.problem
        and any(
            isinstance(node, ast.Expr) and called_name(node.value) == AUX
            for statement in main.needed
            for node in ast.walk(statement.node)
        ),
        aux_function_share=1.0 if aux_completion is None else aux.share,
        main_function_share=main.share,
        is_opaque=main.is_opaque,
    )


def _definitions_count(aux: Code, main: Code, entry_point: str) -> bool:
    """
    Returns whether `aux` and the entry point are the functions that the two agents define when the whole program runs.
    """
    if not (aux.defined and main.defined) or aux.error or main.error:
        return False
    declared = set().union(*(statement.declares for statement in (*aux.statements, *main.statements)))
    return AUX not in binds_of(main.statements) and not {AUX, entry_point} & declared


def _apart(prefix: str, aux: Code, main: Code) -> tuple[str, str]:
    """Returns the programs of aux and of main, each by itself."""
    nodes = [x.node for code in (aux, main) for x in code.statements if AUX not in x.binds]
    imports = "\n".join(dict.fromkeys(ast.unparse(node) for node in nodes if isinstance(node, IMPORTS)))
    return join_sources(imports, prefix, _counted(aux)), join_sources(imports, prefix, main.source)


def _counted(aux: Code) -> str:
    """Returns aux's part of the program, with a `def`: the sandbox counts calls of nothing else."""
    call = f"def {AUX}(*args, _{AUX}={AUX}, **kwargs):\n    return _{AUX}(*args, **kwargs)\n"
    return join_sources(aux.source, call) if aux.is_opaque else aux.source


def _is_thin_wrapper(function: ast.AST | None) -> bool:
    """
    Returns whether the entry point is only `return aux(...)`, or `x = aux(...); return x`, or `aux` itself, also as
    the only argument of a call such as `partial(aux)`.
    """
    if isinstance(function, ast.Lambda):
        return called_name(function.body) == AUX
    if isinstance(function, ast.Call) and len(function.args) == 1 and not function.keywords:
        (function,) = function.args
    if isinstance(function, ast.Name):
        return function.id == AUX
    values = set()  # names of the value of `aux`
    for node in function.body if isinstance(function, ast.FunctionDef) else ():
        value = getattr(node, "value", None)
        is_value = called_name(value) == AUX or (isinstance(value, ast.Name) and value.id in values)
        if isinstance(node, ast.Return):
            return is_value
        if is_value and isinstance(node, (ast.Assign, ast.AnnAssign)):
            values |= names_in(*(node.targets if isinstance(node, ast.Assign) else [node.target]))
        elif not isinstance(value, ast.Constant):  # such as the docstring
            return False
    return False
