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
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


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


class HubServer(ThreadingHTTPServer):
    """The server; use it as a context manager."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []  # "METHOD /path" of every request
        self.faults: list[str] = []  # beginnings of requests, each of which fails once
        self.lock = threading.RLock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

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


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_) -> None:
        pass

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        request = f"{self.command} {url.path}"
        self.server.requests.append(request)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = next((fault for fault in self.server.faults if request.startswith(fault)), None)
        if fault is not None:
            self.server.faults.remove(fault)
            return self.reply(500, {"error": "The storage is out of order"})
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        with self.server.lock:
            self.route(parts, parse_qs(url.query), body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def reply(self, status: int, content=b"", **headers: str) -> None:
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int, code: str, message: str, **headers: str) -> None:
        headers |= {"X-Error-Code": code, "X-Error-Message": message}
        self.reply(status, {"error": message}, **headers)

    @property
    def token(self) -> str | None:
        return self.headers.get("Authorization", "").removeprefix("Bearer ") or None

    def route(self, parts: list[str], query: dict[str, list[str]], body: bytes) -> None:
        match parts:
            case ["api", "repos", "create"]:
                self.create_repo(json.loads(body))
            case ["api", "validate-yaml"]:
                self.reply(200, {"errors": [], "warnings": []})
            case ["api", "whoami-v2"]:
                self.reply(200, {"name": "user", "orgs": [], "auth": {}})
            case ["api", "models", owner, name, *rest]:
                self.repo_api(f"{owner}/{name}", rest, query, body)
            case ["api", "datasets", owner, name, *rest]:
                self.repo_api(f"datasets/{owner}/{name}", rest, query, body)
            case ["datasets", owner, name, "resolve", revision, *path]:
                self.resolve(f"datasets/{owner}/{name}", revision, "/".join(path))
            case [owner, name, "resolve", revision, *path]:
                self.resolve(f"{owner}/{name}", revision, "/".join(path))
            case _:
                self.refuse(404, "NotFound", f"The test server does not know {self.path}")

    # Repositories

    def create_repo(self, request: dict) -> None:
        repo_id = f"{request['organization'] or 'user'}/{request['name']}"
        if request.get("type") == "dataset":
            repo_id = f"datasets/{repo_id}"
        if self.token != WRITER:
            self.refuse(403, "Forbidden", f"You don't have the rights to create a model under {repo_id}")
        elif repo_id in self.server.repos:
            self.reply(409, {"error": "You already created this model repo", "url": f"{self.server.url}/{repo_id}"})
        else:
            self.server.repos[repo_id] = repo = Repo(private=request.get("visibility") == "private")
            repo.commit("main", {".gitattributes": b""}, "initial commit")
            self.reply(200, {"url": f"{self.server.url}/{repo_id}", "name": repo_id})

    def find_repo(self, repo_id: str, write: bool = False) -> Repo | None:
        """The repository, if this client may see it or write to it; otherwise it is told why not."""
        repo = self.server.repos.get(repo_id)
        if repo is None or (repo.private and self.token not in (WRITER, READER)):
            self.refuse(404, "RepoNotFound", "Repository not found")
        elif write and self.token != WRITER:
            self.refuse(403, "Forbidden", f"You don't have the rights to write to {repo_id}")
        else:
            return repo
        return None

    def find_files(self, repo: Repo, revision: str) -> tuple[str, dict[str, bytes]] | None:
        oid = repo.refs.get(revision, revision)
        if oid in repo.commits:
            return oid, repo.commits[oid]
        self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    def repo_api(self, repo_id: str, rest: list[str], query: dict[str, list[str]], body: bytes) -> None:
        write = rest[:1] in (["preupload"], ["commit"], ["branch"]) or rest == ["auth-check", "write"]
        repo = self.find_repo(repo_id, write)
        if repo is None:
            return
        match rest:
            case [] | ["revision", _]:
                if found := self.find_files(repo, rest[1] if rest else "main"):
                    siblings = [{"rfilename": path} for path in found[1]]
                    info = {"id": repo_id, "sha": found[0], "private": repo.private, "siblings": siblings}
                    self.reply(200, info)
            case ["auth-check", *_]:
                self.reply(200)
            case ["branch", name]:
                if name in repo.refs:
                    return self.refuse(409, "Conflict", f"Reference already exists: {name}")
                repo.refs[name] = repo.refs[json.loads(body or b"{}").get("startingPoint", "main")]
                self.reply(200, {})
            case ["tree", revision, *path]:
                if found := self.find_files(repo, revision):
                    self.list_tree(found[1], "/".join(path))
            case ["preupload", revision]:
                if found := self.find_files(repo, revision):
                    self.preupload(found[1], json.loads(body))
            case ["commit", revision]:
                if found := self.find_files(repo, revision):
                    self.commit(repo_id, repo, revision, found[1], "create_pr" in query, body)
            case _:
                self.refuse(404, "NotFound", f"The test server does not know {self.path}")

    def list_tree(self, files: dict[str, bytes], folder: str) -> None:
        inside = {path: data for path, data in files.items() if not folder or path.startswith(f"{folder}/")}
        if not inside:
            return self.refuse(404, "EntryNotFound", f"{folder} does not exist")
        entries = []
        for path, data in inside.items():
            entries.append({"type": "file", "path": path, "size": len(data), "oid": git_hash(data)})
        self.reply(200, entries)

    # Uploads

    def preupload(self, files: dict[str, bytes], request: dict) -> None:
        replies = []
        for file in request["files"]:
            reply = {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
            if file["path"] in files:
                reply["oid"] = git_hash(files[file["path"]])
            replies.append(reply)
        self.reply(200, {"files": replies})

    def commit(
        self, repo_id: str, repo: Repo, revision: str, files: dict[str, bytes], create_pr: bool, body: bytes
    ) -> None:
        header, *operations = [json.loads(line) for line in body.splitlines()]
        files = dict(files)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                return self.refuse(400, "BadRequest", f"The test server does not know {operation['key']}")
        number = 1 + sum(ref.startswith("refs/pr/") for ref in repo.refs)
        ref = f"refs/pr/{number}" if create_pr else revision
        oid = repo.commit(ref, files, header["value"]["summary"])
        reply = {"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/{repo_id}/commit/{oid}"}
        if create_pr:
            reply["pullRequestUrl"] = f"{self.server.url}/{repo_id}/discussions/{number}"
        self.reply(200, reply)

    # Downloads

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        repo = self.find_repo(repo_id)
        found = self.find_files(repo, revision) if repo is not None else None
        if found is None:
            return
        oid, files = found
        if path not in files:
            return self.refuse(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": oid})
        self.reply(200, files[path], **{"X-Repo-Commit": oid, "ETag": f'"{git_hash(files[path])}"'})


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
