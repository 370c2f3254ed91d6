"""Runs `trl-multiagent play`: a person plays a task in a terminal, beside the agents of a saved team."""

import contextlib
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trl_multiagent.console import printable
from trl_multiagent.environments.base import (
    Environment,
    History,
    Prompt,
    ScoringContext,
    Turn,
    ask,
    item_id,
    judge,
    scoring,
)
from trl_multiagent.rollout.sampling_arguments import sampling_of
from trl_multiagent.rollout.seats import Branch, FunctionSeat, Seat, SeatedEnvironment
from trl_multiagent.rollout.trace import prompt_text
from trl_multiagent.runs.evaluation import load_items, make_environment
from trl_multiagent.runs.evaluation_settings import Evaluation, find_team, parse_evaluation
from trl_multiagent.runs.models import make_loader
from trl_multiagent.runs.run import end_on_wrong_input, end_with_one_line
from trl_multiagent.settings.read import ConfigError
from trl_multiagent.team.seat import TeamSeat


# What a prompt lists after a colon, up to the end of the sentence
LISTED = re.compile(r": +([^.?:\n]+)")


class Person(Seat):
    """Plays a role with what somebody types. A backslash at the end of a line continues the answer on the next."""

    def answer(self, role: str, branches: Sequence[Branch]) -> list[str]:
        print(f"\n{printable(prompt_text(branches[0].prompts[role]))}")
        text = input(f"{role}> ")
        while text.endswith("\\"):
            text = f"{text[:-1]}\n{input('> ')}"
        return [text]

    def describe(self) -> dict[str, Any]:
        return {"person": True}


def random_answer(item: dict, prompt: Prompt, history: History) -> str:
    """Draws a choice that the prompt lists last after a colon, in brackets or as a word; else any of its words."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    choices = re.findall(r"\[.+?\]|\w+", (LISTED.findall(text) or [text])[-1])
    return random.Random(f"{item_id(item)} {len(history)} {text}").choice(choices or [""])


HUMAN = "human"
PLAYERS: dict[str, Seat] = {HUMAN: Person(), "random": FunctionSeat(random_answer)}


def run_play(argv: Sequence[str], given: Sequence[str]) -> None:
    """
    Plays the items of a task with a person. `argv`: arguments as for `trl-multiagent evaluate`, with one team;
    `given`: the players of roles, each as `ROLE=human`, `ROLE=random` or `ROLE=TEAM`.
    """
    prog = "trl-multiagent play"
    with end_on_wrong_input(prog):
        evaluation = parse_evaluation(None, argv, prog)
        environment, own = make_environment(evaluation), dict[str, Seat]()  # of roles that were not trained
        if isinstance(environment, SeatedEnvironment):
            own, environment = environment.seats, environment.task
        seats = choose_seats(evaluation, environment.roles, own, dict(text.partition("=")[::2] for text in given))
        items, num_turns = load_items(evaluation), evaluation.config.num_turns or 1
        environment.prepare(num_turns)
    with end_with_one_line(prog), contextlib.suppress(EOFError, KeyboardInterrupt):
        for number, item in enumerate(items, start=1):
            print(f"\nItem {number} of {len(items)}. Ctrl-D ends the game.")
            play_item(environment, item, seats, own, num_turns)
    print()  # what follows is no answer to the last prompt


def choose_seats(
    evaluation: Evaluation, roles: Sequence[str], own: Mapping[str, Seat], names: dict[str, str]
) -> dict[str, Seat]:
    """
    Returns the player of each role: that in `names`, else its seat in the settings of the run, else its agent in the
    team. If nobody in `names` is human, a person takes the first role that was not trained and is not in `names`; if
    all were trained, the first that is not in `names`.
    """
    if {*names} - {*roles} or "" in names.values():
        raise ConfigError(f"`--seat` must be ROLE=PLAYER, and the roles are {', '.join(roles)}.")
    if HUMAN not in names.values():
        names |= dict.fromkeys([role for role in (*own, *roles) if role not in names][:1], HUMAN)
    config = evaluation.config

    def seat(team: str) -> TeamSeat:
        """Samples as an evaluation does."""
        return TeamSeat(
            team,
            loader=make_loader(evaluation.settings),
            seed=config.seed,
            use_chat_template=config.use_chat_template,
            history_options=config,
            stop_strings=config.stop_strings,
            **sampling_of(config, evaluation.max_completion_length),
        )

    seats = {role: own.get(role) or seat(evaluation.teams[0].location) for role in roles}
    return seats | {role: PLAYERS.get(name) or seat(find_team(name)) for role, name in names.items()}


def play_item(
    environment: Environment, item: dict, seats: Mapping[str, Seat], untrained: Mapping[str, Seat], num_turns: int
) -> None:
    """
    Plays an episode, and prints the answers and the rewards. `num_turns` does not count turns of `untrained` roles
    alone, as in training.
    """
    history: tuple[Turn, ...] = ()
    with environment.playing(num_turns, True, untrained):
        while prompts := ask(environment, [item], [history])[0]:
            num_turns -= not prompts.keys() <= untrained.keys()
            if num_turns < 0:
                break
            action = {role: seats[role].answer(role, [Branch(item, history, prompts)])[0] for role in prompts}
            with scoring(ScoringContext([prompts])):
                (outcome,) = judge(environment, [item], [action], [history], evaluation=True)
            history = (*history, Turn(prompts, action, outcome))
            for role, text in action.items():
                if seats[role] is not PLAYERS[HUMAN]:
                    print(f"{role}: {printable(text.strip())}")
    for role in environment.roles:
        rewards = [turn.outcome.role_rewards.get(role, turn.outcome.reward) for turn in history]
        print(f"Reward of {role}: {sum(rewards):g}", flush=True)
