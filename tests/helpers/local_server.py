"""What servers on the loopback interface have in common."""

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def handle_request(self) -> None:
        self.server.respond(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

    do_GET = do_HEAD = do_POST = handle_request

    def reply(self, status: int, content: bytes | dict | list, **headers: str) -> None:
        """Sends bytes, or a value as JSON."""
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class LocalServer(ThreadingHTTPServer):
    """
    A context manager. `respond(request, body)` answers a [`Request`], in a thread of its own.

    It waits for its threads, because one that drops its last tensor while Python ends aborts the process.
    """

    daemon_threads = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Request)
        self.lock = threading.RLock()
        self.connections = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def process_request(self, request, client_address) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def __exit__(self, *_) -> None:
        self.shutdown()
        for connection in self.connections:  # clients keep them open
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()
