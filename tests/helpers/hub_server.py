"""
A small Hugging Face Hub on the loopback interface, to test pushing and loading with the real client.

It holds repositories in memory and speaks the part of the Hub's protocol that `huggingface_hub` uses for models:
creating repositories and branches, permissions, preupload, the Git LFS batch API with single and multipart uploads,
commits, pull requests, downloads with redirects for LFS files, and listings. Uploads are checked against their
SHA-256. Requests can be made to fail, see [`HubServer.fail`]. The client has to run with `HF_ENDPOINT` set to
[`HubServer.url`] from its start, and with `HF_HUB_DISABLE_XET=1`.
"""

import base64
import hashlib
import json
import os
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".png", ".parquet")
WRITER, READER = "hf_writer", "hf_reader"  # tokens: one may write, the other only read
REPO_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass
class Blob:
    data: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """The SHA-256 of an LFS file, the git hash of a regular one."""
        if self.lfs:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()


@dataclass
class Repo:
    """Files of every commit, and the commit of every branch and pull request."""

    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, ref: str, files: dict[str, Blob], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.messages)} {message}".encode()).hexdigest()
        self.commits[oid] = files
        self.refs[ref] = oid
        self.messages.append(message)
        return oid

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return {path: blob.data for path, blob in self.commits[self.refs[revision]].items()}


@dataclass
class Fault:
    request: str  # beginning of "METHOD /path"
    times: int
    status: int | None  # None: the connection breaks in the middle of the body


class HubServer(ThreadingHTTPServer):
    """
    The server; use it as a context manager.

    Args:
        chunk_size (`int`, *optional*, defaults to `2**20`): LFS files that are larger are uploaded in parts of this
            size.
    """

    daemon_threads = True

    def __init__(self, chunk_size: int = 2**20):
        super().__init__(("127.0.0.1", 0), Handler)
        self.chunk_size = chunk_size
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}  # LFS storage, by SHA-256
        self.parts: dict[str, dict[int, bytes]] = {}  # of multipart uploads under way
        self.requests: list[str] = []  # "METHOD /path" of every request
        self.faults: list[Fault] = []
        self.lock = threading.RLock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def cdn_url(self) -> str:
        """Where LFS files are downloaded from: another host, as far as the client can see."""
        return f"http://localhost:{self.server_port}/cdn"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address) -> None:
        """A client that went away is no news."""

    def fail(self, request: str, times: int, status: int | None = None) -> None:
        """
        Makes the next requests that begin so fail with a status, or break the connection in the middle of the body.
        """
        self.faults.append(Fault(request, times, status))

    def take_fault(self, request: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and request.startswith(fault.request):
                    fault.times -= 1
                    return fault
        return None

    def environment(self, home, token: str | None = WRITER) -> dict[str, str]:
        """Environment variables of a client whose cache and settings are in the folder `home`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSF"))}
        on = ("HUB_DISABLE_XET", "HUB_DISABLE_TELEMETRY", "HUB_DISABLE_PROGRESS_BARS", "DATASETS_OFFLINE")
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), **{f"HF_{name}": "1" for name in on}}
        own |= {"NO_PROXY": "127.0.0.1,localhost", "OMP_NUM_THREADS": "1"}
        return kept | own | ({"HF_TOKEN": token} if token is not None else {})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_) -> None:
        pass

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        request = f"{self.command} {url.path}"
        self.server.requests.append(request)
        fault = self.server.take_fault(request)
        if fault is not None and fault.status is None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            # A reset instead of an orderly end
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return self.connection.close()
        body = self.read_body()
        if fault is not None:
            return self.reply(fault.status, {"error": "The storage is out of order"}, **{"Retry-After": "0"})
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        with self.server.lock:
            self.route(parts, parse_qs(url.query), body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

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
                self.validate_card(json.loads(body)["content"])
            case ["api", "whoami-v2"]:
                self.reply(200, {"name": "user", "orgs": [], "auth": {}})
            case ["api", "models", owner, name, *rest]:
                self.repo_api(f"{owner}/{name}", rest, query, body)
            case ["api", "datasets", owner, name, *rest]:
                self.repo_api(f"datasets/{owner}/{name}", rest, query, body)
            case [owner, name, "info", "lfs", "objects", "batch"]:
                if self.find_repo(f"{owner}/{name.removesuffix('.git')}", write=True):
                    self.lfs_batch(json.loads(body))
            case ["datasets", owner, name, "info", "lfs", "objects", "batch"]:
                if self.find_repo(f"datasets/{owner}/{name.removesuffix('.git')}", write=True):
                    self.lfs_batch(json.loads(body))
            case ["datasets", owner, name, "resolve", revision, *path]:
                self.resolve(f"datasets/{owner}/{name}", revision, "/".join(path))
            case ["lfs", action, sha256, *rest]:
                self.lfs_transfer(action, sha256, rest, body)
            case ["cdn", sha256]:
                self.send_file(self.server.objects[sha256], ETag=f'"{sha256}"')
            case [owner, name, "resolve", revision, *path]:
                self.resolve(f"{owner}/{name}", revision, "/".join(path))
            case _:
                self.refuse(404, "NotFound", f"The test server does not know {self.path}")

    # Repositories

    def create_repo(self, request: dict) -> None:
        repo_id = f"{request['organization'] or 'user'}/{request['name']}"
        if request.get("type") == "dataset":
            repo_id = f"datasets/{repo_id}"
        if self.token is None:
            self.refuse(401, "Unauthorized", "Invalid username or password.")
        elif self.token != WRITER:
            self.refuse(403, "Forbidden", f"You don't have the rights to create a model under {repo_id}")
        elif repo_id in self.server.repos:
            self.reply(409, {"error": "You already created this model repo", "url": f"{self.server.url}/{repo_id}"})
        else:
            self.server.repos[repo_id] = repo = Repo(private=request.get("visibility") == "private")
            repo.commit("main", {".gitattributes": Blob(b"*.safetensors filter=lfs\n", lfs=False)}, "initial commit")
            self.reply(200, {"url": f"{self.server.url}/{repo_id}", "name": repo_id})

    def find_repo(self, repo_id: str, write: bool = False) -> Repo | None:
        """The repository, if this client may see it or write to it; otherwise it is told why not."""
        repo = self.server.repos.get(repo_id)
        if repo is None or (repo.private and self.token not in (WRITER, READER)):
            self.refuse(404 if self.token else 401, "RepoNotFound", "Repository not found")
        elif write and self.token is None:
            self.refuse(401, "Unauthorized", "Invalid username or password.")
        elif write and self.token != WRITER:
            self.refuse(403, "Forbidden", f"You don't have the rights to write to {repo_id}")
        else:
            return repo
        return None

    def find_files(self, repo: Repo, revision: str) -> tuple[str, dict[str, Blob]] | None:
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

    def validate_card(self, content: str) -> None:
        _, metadata, _ = re.split(r"^---$", content, maxsplit=2, flags=re.MULTILINE)
        metadata = yaml.safe_load(metadata)
        errors = []
        for name in ("base_model", "datasets"):
            values = metadata.get(name, [])
            for value in [values] if isinstance(values, str) else values:
                if not REPO_ID.fullmatch(value):
                    errors.append({"message": f'"{name}" must be an id on the Hub, not {value!r}'})
        if not all(isinstance(tag, str) for tag in metadata.get("tags", [])):
            errors.append({"message": '"tags" must be strings'})
        self.reply(400 if errors else 200, {"errors": errors, "warnings": []})

    def list_tree(self, files: dict[str, Blob], folder: str) -> None:
        inside = {path: blob for path, blob in files.items() if not folder or path.startswith(f"{folder}/")}
        if not inside:
            return self.refuse(404, "EntryNotFound", f"{folder} does not exist")
        entries = []
        for path, blob in inside.items():
            entry = {"type": "file", "path": path, "size": len(blob.data), "oid": blob.oid}
            if blob.lfs:
                entry["lfs"] = {"oid": blob.oid, "size": len(blob.data), "pointerSize": 134}
            entries.append(entry)
        self.reply(200, entries)

    # Uploads

    def preupload(self, files: dict[str, Blob], request: dict) -> None:
        replies = []
        for file in request["files"]:
            mode = "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular"
            reply = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
            if file["path"] in files:
                reply["oid"] = files[file["path"]].oid
            replies.append(reply)
        self.reply(200, {"files": replies})

    def lfs_batch(self, request: dict) -> None:
        objects = []
        for entry in request["objects"]:
            sha256, size = entry["oid"], entry["size"]
            reply = {"oid": sha256, "size": size}
            if sha256 not in self.server.objects:
                storage = f"{self.server.url}/lfs"
                upload = {"href": f"{storage}/upload/{sha256}"}
                if size > self.server.chunk_size:
                    number = -(-size // self.server.chunk_size)
                    parts = {str(k): f"{storage}/part/{sha256}/{k}" for k in range(1, number + 1)}
                    header = {"chunk_size": str(self.server.chunk_size), **parts}
                    upload = {"href": f"{storage}/complete/{sha256}", "header": header}
                reply["actions"] = {"upload": upload, "verify": {"href": f"{storage}/verify/{sha256}"}}
            objects.append(reply)
        self.reply(200, {"objects": objects, "transfer": "basic"})

    def lfs_transfer(self, action: str, sha256: str, rest: list[str], body: bytes) -> None:
        if action == "part":
            self.server.parts.setdefault(sha256, {})[int(rest[0])] = body
            return self.reply(200, ETag=f'"{hashlib.md5(body).hexdigest()}"')
        if action == "verify":
            return self.reply(200 if sha256 in self.server.objects else 404, {})
        if action == "complete":
            parts = self.server.parts[sha256]
            for part in json.loads(body)["parts"]:
                assert part["etag"] == f'"{hashlib.md5(parts[part["partNumber"]]).hexdigest()}"'
            body = b"".join(parts[number] for number in sorted(parts))
        if hashlib.sha256(body).hexdigest() != sha256:
            return self.refuse(400, "BadDigest", "The content does not have the SHA-256 that was announced")
        self.server.objects[sha256] = body
        self.reply(200, {})

    def commit(
        self, repo_id: str, repo: Repo, revision: str, files: dict[str, Blob], create_pr: bool, body: bytes
    ) -> None:
        header, *operations = [json.loads(line) for line in body.splitlines()]
        files = dict(files)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
            elif operation["key"] == "lfsFile":
                content = self.server.objects.get(value["oid"])
                if content is None or len(content) != value["size"]:
                    return self.refuse(400, "BadRequest", f"{value['path']} was not uploaded")
                files[value["path"]] = Blob(content, lfs=True)
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
        blob = files[path]
        headers = {"X-Repo-Commit": oid, "ETag": f'"{blob.oid}"'}
        if blob.lfs:
            linked = {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": str(len(blob.data))}
            self.reply(302, **headers, **linked, Location=f"{self.server.cdn_url}/{blob.oid}")
        else:
            self.send_file(blob.data, **headers)

    def send_file(self, data: bytes, **headers: str) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            return self.reply(200, data, **headers)
        start, end = int(match[1]), int(match[2] or len(data) - 1)
        self.reply(206, data[start : end + 1], **{"Content-Range": f"bytes {start}-{end}/{len(data)}"}, **headers)
