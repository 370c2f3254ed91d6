"""A local server that speaks OpenAI's protocol, and can be made to fail in every way."""

import contextlib
import json
import threading
import time
from dataclasses import dataclass, field

from local_server import LocalServer


@dataclass
class Reply:
    """What the server sends. A text in its place is an answer of the model."""

    body: str | bytes = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str | None = "application/json"
    missing_bytes: int = 0  # how much shorter the body is than the header says
    stall: float = 0.0  # seconds before anything is sent
    drips: bool = False  # a header that never ends comes byte by byte


class EndpointServer(LocalServer):
    """
    Args:
        answer (`Callable`): `(request, number) -> str | Reply`, called in many threads; `request` has the body as
            JSON, the number counts from 0.
    """

    def __init__(self, answer):
        super().__init__()
        self.answer = answer
        self.requests: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.active = self.most_active = 0
        self.closing = threading.Event()

    def __exit__(self, *_):
        self.closing.set()
        super().__exit__()

    def respond(self, handler, body):
        request = json.loads(body)
        with self.lock:
            number = len(self.requests)
            self.requests.append(request)
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        try:
            reply = self.answer(request, number)
        finally:
            with self.lock:
                self.active -= 1
        if isinstance(reply, str):
            reply = Reply(self.completion(reply))
        if reply.stall:
            self.closing.wait(reply.stall)
        body = reply.body.encode() if isinstance(reply.body, str) else reply.body
        with contextlib.suppress(ConnectionError):  # a client that has given up
            if reply.drips:
                handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
                while not self.closing.wait(0.02):
                    handler.wfile.write(b"x")
            self.send(handler, reply, body)

    @staticmethod
    def send(handler, reply, body):
        handler.send_response(reply.status)
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        if reply.content_type is not None:
            handler.send_header("Content-Type", reply.content_type)
        handler.send_header("Content-Length", str(len(body) + reply.missing_bytes))
        handler.end_headers()
        handler.wfile.write(body)
        if reply.missing_bytes:
            handler.close_connection = True

    @staticmethod
    def completion(text: str) -> str:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 5}})

    def wait_for(self, number: int, seconds: float = 20.0) -> bool:
        """Waits until so many requests are under way at the same time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.most_active >= number:
                return True
            time.sleep(0.005)
        return False
