"""
A small Hugging Face Hub on the loopback interface, to test pushing and loading with the real client.

It holds repositories in memory and speaks the part of the Hub's protocol that `huggingface_hub` uses for models and
datasets: creating repositories and branches, permissions, commits with all files in them, pull requests, downloads
and listings. Requests can be made to fail, see [`HubServer.fail_once`]. The client has to run with
`HF_ENDPOINT` set to [`HubServer.url`] from its start, and with `HF_HUB_DISABLE_XET=1`.
"""

import base64
import hashlib
import json
import os
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from local_server import LocalServer, Request


WRITER, READER = "hf_writer", "hf_reader"  # tokens: one may write, the other only read


@dataclass
class Repo:
    """Files of every commit, and the commit of every branch and pull request."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, ref: str, files: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.messages)} {message}".encode()).hexdigest()
        self.commits[oid] = files
        self.refs[ref] = oid
        self.messages.append(message)
        return oid

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.refs[revision]]


class Refused(Exception):
    """A request is answered with a status and the code of an error."""


class HubServer(LocalServer):
    """The server; use it as a context manager."""

    def __init__(self):
        super().__init__()
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []  # "METHOD /path" of every request
        self.faults: list[str] = []  # beginnings of requests, each of which fails once

    def fail_once(self, request: str) -> None:
        """Answers the next request that begins so, such as `"POST /path"`, with an error of the server."""
        self.faults.append(request)

    def environment(self, home) -> dict[str, str]:
        """Environment variables of a client whose cache and settings are in the folder `home`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSF"))}
        on = ("HUB_DISABLE_XET", "HUB_DISABLE_TELEMETRY", "HUB_DISABLE_PROGRESS_BARS", "DATASETS_OFFLINE")
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), **{f"HF_{name}": "1" for name in on}}
        own |= {"NO_PROXY": "127.0.0.1,localhost", "OMP_NUM_THREADS": "1", "HF_TOKEN": WRITER}
        return kept | own

    def respond(self, request: Request, body: bytes) -> None:
        url = urlsplit(request.path)
        named = f"{request.command} {url.path}"
        self.requests.append(named)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        try:
            if fault := next((fault for fault in self.faults if named.startswith(fault)), None):
                self.faults.remove(fault)
                raise Refused(500, "OutOfOrder")
            with self.lock:
                content, headers = self.answer(request, parts, parse_qs(url.query), body)
            request.reply(200, content, **headers)
        except Refused as error:
            status, code = error.args
            request.reply(status, {"error": code}, **{"X-Error-Code": code, "X-Error-Message": code})

    def answer(
        self, request: Request, parts: list[str], query: dict[str, list[str]], body: bytes
    ) -> tuple[bytes | dict | list, dict[str, str]]:
        """The content and the headers of an answer."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token != WRITER and (request.command == "POST" or parts[-2:] == ["auth-check", "write"]):
            raise Refused(403, "Forbidden")
        match parts:
            case ["api", "repos", "create"]:
                return self.create_repo(json.loads(body)), {}
            case ["api", "validate-yaml"]:
                return {"errors": [], "warnings": []}, {}
            case ["api", ("models" | "datasets") as kind, owner, name, *rest]:
                repo_id = f"{owner}/{name}" if kind == "models" else f"datasets/{owner}/{name}"
                return self.repo_api(repo_id, self.find_repo(repo_id, token), rest, query, body), {}
            case _ if "resolve" in parts:
                place = parts.index("resolve")
                repo = self.find_repo("/".join(parts[:place]), token)
                oid, files = self.find_files(repo, parts[place + 1])
                path = "/".join(parts[place + 2 :])
                if path not in files:
                    raise Refused(404, "EntryNotFound")
                return files[path], {"X-Repo-Commit": oid, "ETag": f'"{git_hash(files[path])}"'}
        raise Refused(404, "NotFound")

    def create_repo(self, request: dict) -> dict:
        repo_id = f"{request['organization'] or 'user'}/{request['name']}"
        if request.get("type") == "dataset":
            repo_id = f"datasets/{repo_id}"
        if repo_id not in self.repos:
            self.repos[repo_id] = repo = Repo(private=request.get("visibility") == "private")
            repo.commit("main", {".gitattributes": b""}, "initial commit")
        return {"url": f"{self.url}/{repo_id}", "name": repo_id}

    def find_repo(self, repo_id: str, token: str) -> Repo:
        repo = self.repos.get(repo_id)
        if repo is None or (repo.private and token not in (WRITER, READER)):
            raise Refused(404, "RepoNotFound")
        return repo

    def find_files(self, repo: Repo, revision: str) -> tuple[str, dict[str, bytes]]:
        oid = repo.refs.get(revision, revision)
        if oid not in repo.commits:
            raise Refused(404, "RevisionNotFound")
        return oid, repo.commits[oid]

    def repo_api(self, repo_id: str, repo: Repo, rest: list[str], query: dict, body: bytes) -> dict | list:
        match rest:
            case ["auth-check", *_]:
                return {}
            case ["branch", name]:
                repo.refs.setdefault(name, repo.refs["main"])
                return {}
        oid, files = self.find_files(repo, rest[1] if rest else "main")
        match rest:
            case [] | ["revision", _]:
                siblings = [{"rfilename": path} for path in files]
                return {"id": repo_id, "sha": oid, "private": repo.private, "siblings": siblings}
            case ["tree", _, *folders]:
                inside = {path: data for path, data in files.items() if path.split("/")[: len(folders)] == folders}
                if not inside:
                    raise Refused(404, "EntryNotFound")
                return [
                    {"type": "file", "path": path, "size": len(data), "oid": git_hash(data)}
                    for path, data in inside.items()
                ]
            case ["preupload", _]:
                same = {"uploadMode": "regular", "shouldIgnore": False}
                paths = [file["path"] for file in json.loads(body)["files"]]
                oids = {path: {"oid": git_hash(files[path])} for path in paths if path in files}
                return {"files": [{"path": path, **same, **oids.get(path, {})} for path in paths]}
            case ["commit", revision]:
                return self.commit(repo_id, repo, files, revision, "create_pr" in query, body)
        raise Refused(404, "NotFound")

    def commit(
        self, repo_id: str, repo: Repo, files: dict[str, bytes], revision: str, create_pr: bool, body: bytes
    ) -> dict:
        header, *operations = [json.loads(line)["value"] for line in body.splitlines()]
        added = {value["path"]: base64.b64decode(value["content"]) for value in operations}
        oid = repo.commit("refs/pr/1" if create_pr else revision, {**files, **added}, header["summary"])
        reply = {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo_id}/commit/{oid}"}
        if create_pr:
            reply["pullRequestUrl"] = f"{self.url}/{repo_id}/discussions/1"
        return reply


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
