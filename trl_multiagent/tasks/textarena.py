"""The task `textarena`: any game of TextArena, played by the agents of a team."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from trl_multiagent.environments.task import Task, TaskSettings, load_datasets, setting
from trl_multiagent.environments.task_errors import describe
from trl_multiagent.environments.workflow import Agents, WorkflowEnvironment
from trl_multiagent.tasks.seeded import OwnDraws, Seeds, check_package


@dataclass
class Game:
    """The section `textarena`."""

    game: str = setting("Id of the game, or module:Class of one without an id.", "KuhnPoker-v0")
    players: int = setting("Number of players.", 2, ge=1, le=15)
    options: dict[str, Any] | None = setting("Arguments of the game, such as {max_rounds: 1}.")
    memory: bool = setting("Whether a game is a chat; otherwise, each prompt has all that happened.", True)
    invalid_cost: float = setting("What an invalid move costs its player, besides the game's rules.", 0.0, ge=0)

    def __post_init__(self) -> None:
        check_package("textarena", "games")
        try:
            self.start(0)
        except Exception as error:  # games fail in their own ways
            raise ValueError(f"`textarena`: {self.game}, {self.players} players: {describe(error)}") from error

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(f"player_{k}" for k in range(self.players))

    def start(self, seed: int) -> tuple[Any, OwnDraws]:
        """Starts a game, which draws from its own random numbers."""
        import textarena

        if ":" in self.game and self.game not in textarena.envs.registration.ENV_REGISTRY:
            textarena.envs.registration.register(self.game, self.game)
        draws = OwnDraws(seed)
        with draws:
            game = textarena.make(self.game, **(self.options or {}))
            game.reset(num_players=self.players, seed=seed)
        return game, draws

    async def play(self, item: dict, agents: Agents) -> dict[str, float]:
        """Plays a game to its end. The rewards are the game's own, 0 for a player to whom it gives none."""
        game, draws = self.start(item["seed"])
        inner = game
        while hasattr(inner, "env"):  # wrappers show all that happened again; they stay for the moves
            inner = inner.env
        done, moves, invalid = False, 0, 0
        seen: dict[int, list] = defaultdict(list)  # games may tell their rules and cards once
        while not done:
            with draws:
                player, messages = inner.get_observation()
            seen[player] += messages
            text = shown(messages if self.memory else seen[player], player, inner.state.role_mapping, not self.memory)
            move = await agents[player](text, memory=self.memory)
            info = inner.state.game_info[player]
            had_lost = info["invalid_move"]
            with draws:
                done, _ = game.step(str(move))
            is_invalid = getattr(inner.state, "error_count", 0) > 0 or info["invalid_move"] != had_lost
            moves, invalid = moves + 1, invalid + is_invalid
            agents.reward(-self.invalid_cost * is_invalid, self.roles[player])
            agents.log("invalid_moves", invalid / moves)
        rewards = getattr(inner, "rewards", None) or game.close()[0]  # Hanabi keeps its score in the first
        return {role: float((rewards or {}).get(k, 0.0)) for k, role in enumerate(self.roles)}


def shown(messages: list[tuple[int, str, Any]], player: int, names: dict[int, str], with_own: bool) -> str:
    """Returns what a game has told a player, without the player's own moves if they are in its history."""
    news = [x for x in messages if with_own or x[0] != player or x[2].name != "PLAYER_ACTION"]
    return "\n".join(f"[{names.get(sender, f'Player {sender}')}] {text}" for sender, text, _ in news) or "Your move:"


def make_environment(settings: TaskSettings) -> WorkflowEnvironment:
    game = settings.sections["textarena"]
    return WorkflowEnvironment(game.play, game.roles, live=True, metric_ranges={"invalid_moves": (0.0, 1.0)})


TASK = Task(
    make_environment,
    load_datasets,
    settings={"dataset": Seeds, "textarena": Game},
    roles=lambda sections: sections["textarena"].roles,
)
