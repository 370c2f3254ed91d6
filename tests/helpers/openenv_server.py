"""
Servers of OpenEnv for tests, with the environments `/text`, `/form` and `/tools`: `python openenv_server.py PORT...`
starts one for each port, and prints their process ids.
"""

import os
import sys

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_fastapi_app


class Number(Action):
    number: int


class Move(Action):
    x: int
    y: int


class Text(Observation):
    text: str = ""


class Guess(Environment):
    """The agents guess a number below `top`."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, top=9):
        self.secret = seed % top
        return Text(text=f"Guess a number below {top}.")

    def step(self, action, **settings):
        number = action.number if isinstance(action, Number) else action.x + action.y
        is_right = number == self.secret
        return Text(text=f"{number} is wrong", reward=float(is_right), done=is_right)


class Sum(MCPEnvironment):
    """The agent adds numbers with a tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        tools = FastMCP("sum")

        @tools.tool
        def add(number: int) -> int:
            """Adds a number."""
            self.total += number
            return self.total

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None):
        self.total = seed
        return Observation()

    def _step_impl(self, action, **settings):
        raise ValueError("Use the tool.")


def serve(port):
    server = FastAPI()
    for path, game in [("text", (Guess, Number, Text)), ("form", (Guess, Move, Text)), ("tools", (Sum, Action, Text))]:
        server.mount(f"/{path}", create_fastapi_app(*game, max_concurrent_envs=64))
    uvicorn.run(server, host="127.0.0.1", port=port, log_level="critical")


if __name__ == "__main__":
    for port in sys.argv[1:]:  # a fork, because the imports take long
        child = os.fork()
        if not child:
            serve(int(port))
            os._exit(0)
        print(child, flush=True)
