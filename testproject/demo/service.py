"""A small web service on the loopback, for jobs that need one: unwell at first, and without a fax."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Service(ThreadingHTTPServer):
    """`PUT /almanac` is refused twice, then taken; `POST /fax` is gone for good.

    `taken` counts what it did, by Idempotency-Key; `refused` its refusals, by path.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.taken: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        key = self.headers["Idempotency-Key"]
        if self.server.refused["/almanac"] < 2:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            self.server.taken[key] += 1
            self._answer(HTTPStatus.CREATED, {"receipt": f"almanac-{key}"})

    def do_POST(self) -> None:
        self._refuse(HTTPStatus.GONE)

    def _refuse(self, status: HTTPStatus) -> None:
        self.server.refused[self.path] += 1
        self._answer(status, {"detail": status.phrase})

    def _answer(self, status: HTTPStatus, answer: dict[str, str]) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the story tells."""


@contextlib.contextmanager
def service() -> Iterator[Service]:
    """Run the service in a thread for the length of the block."""
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, name="service", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
