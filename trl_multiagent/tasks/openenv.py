"""The task `openenv`: environments that servers of OpenEnv run, each episode in a session of its own."""

import asyncio
import json
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from pydantic_core import from_json

from trl_multiagent.endpoints import MAX_BODY, check_url
from trl_multiagent.environments.task import Task, load_datasets, setting
from trl_multiagent.environments.task_errors import UnavailableError, describe
from trl_multiagent.environments.workflow import Agents, WorkflowEnvironment
from trl_multiagent.tasks.seeded import Seeds, check_package


TOOLS = ("Action", "CallToolAction", "ListToolsAction")  # titles of the actions of a server with tools
CALL = 'Answer with a JSON object {"name": ..., "arguments": {...}} to call one of these tools:\n'


class NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        """Makes a redirect, which could lead to another host, an error."""


@dataclass
class Servers:
    """The section `openenv`."""

    servers: list[str] | None = setting("Addresses, such as [http://127.0.0.1:8000]. An item has one server.")
    roles: list[str] | None = setting("Roles of the agents, who act in turn; by default one, `agent`.")
    reset: dict[str, Any] | None = setting("Arguments of `reset`, beside the seed.")
    timeout: float = setting("Seconds that a server may take to answer.", 60.0, gt=0)

    def __post_init__(self) -> None:
        check_package("openenv", "openenv")
        self.actors = tuple(self.roles or ["agent"])
        for url in self.servers or ["(none)"]:
            check_url("openenv.servers", url)


class ServedEnvironment(WorkflowEnvironment):
    """The episodes that the servers of the section `openenv` run."""

    def __init__(self, section: Servers):
        self.section, self.schemas = section, dict[str, dict]()
        super().__init__(self.play, section.actors, live=True, metric_ranges={"invalid_actions": (0.0, 1.0)})

    def prepare(self, num_turns: int) -> None:
        for url in self.section.servers or ():
            self.schema_of(url)

    def schema_of(self, url: str) -> dict:
        """Returns the schema of a server's actions. Raises `UnavailableError` if it gives none."""
        try:
            if url not in self.schemas:
                opener = urllib.request.build_opener(NoRedirects)
                with opener.open(f"{url.rstrip('/')}/schema", timeout=self.section.timeout) as answer:
                    self.schemas[url] = dict(from_json(answer.read(MAX_BODY))["action"])
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            raise UnavailableError(f"`openenv.servers`: {url} is no server of OpenEnv: {describe(error)}") from error
        return self.schemas[url]

    async def play(self, item: dict, agents: Agents) -> None:
        """Plays an episode. The server pays each action. Raises `UnavailableError` if it fails."""
        from openenv import GenericEnvClient
        from websockets.exceptions import WebSocketException

        section, servers = self.section, self.section.servers or []
        url, turn, invalid = servers[item["seed"] % len(servers)], 0, 0
        schema = await asyncio.to_thread(self.schema_of, url)
        try:
            async with GenericEnvClient(url, section.timeout, section.timeout) as client:
                said, read = [("", await rules(client, schema))], dict.fromkeys(self.roles, 0)
                result = await client.reset(seed=item["seed"], **(section.reset or {}))
                session, seen = client._ws, shown(result.observation)
                while not result.done:
                    role, said = self.roles[turn % len(self.roles)], [*said, ("", seen)]
                    news = [text for author, text in said[read[role] :] if text and author != role]
                    read[role], turn = len(said), turn + 1
                    answer = await agents[role]("\n".join(news))
                    said.append((role, f"[{role}] {answer}"))
                    try:
                        result = await client.step(action(schema, str(answer)))
                        seen = shown(result.observation)
                        agents.reward(result.reward or 0.0)
                    except (ValueError, RuntimeError) as error:  # of the agent, or the server's answer to its action
                        seen, invalid = f"Invalid: {error}", invalid + 1
                    if client._ws is not session:  # a client that has lost its session opens another
                        raise ConnectionError("the session was lost")
                    agents.log("invalid_actions", invalid / turn)
        except (TimeoutError, OSError, RuntimeError, WebSocketException) as error:
            if not turn:
                await agents[0]("The environment does not answer.")  # an episode has a first turn
            raise UnavailableError(f"The OpenEnv server {url} failed: {describe(error)}") from error


async def rules(client: Any, schema: dict) -> str:
    """Returns what an agent must know about the form of its answers."""
    if schema.get("title") in TOOLS:
        return CALL + "\n".join(map(json.dumps, (await client.step({"type": "list_tools"})).observation["tools"]))
    return "" if is_text(schema) else f"Answer with a JSON object of this form:\n{json.dumps(schema)}"


def is_text(schema: dict) -> bool:
    return schema.get("title") not in TOOLS and len(schema.get("required", ())) == 1


def action(schema: dict, answer: str) -> dict:
    """Returns the action that an answer is. Raises `ValueError` if it has no JSON object, but needs one."""
    if is_text(schema):
        return {schema["required"][0]: answer}
    value, _ = json.JSONDecoder(strict=False).raw_decode("{" + answer.partition("{")[2])
    if schema.get("title") in TOOLS:
        return {"type": "call_tool", "tool_name": value.get("name"), "arguments": value.get("arguments", {})}
    return value


def shown(observation: dict) -> str:
    """Returns an observation as text: its only field, or all as JSON."""
    fields = {name: value for name, value in observation.items() if value and name != "metadata"}
    return str(*fields.values()) if len(fields) == 1 else json.dumps(fields, ensure_ascii=False)


TASK = Task(
    lambda settings: ServedEnvironment(settings.sections["openenv"]),
    load_datasets,
    settings={"dataset": Seeds, "openenv": Servers},
    roles=lambda sections: sections["openenv"].actors,
)
