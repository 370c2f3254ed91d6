"""What servers on the loopback interface have in common."""

import json
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
    """A context manager. `respond(request, body)` answers a [`Request`], in a thread of its own."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Request)
        self.lock = threading.RLock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()
