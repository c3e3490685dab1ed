"""A server that is ready and has version 1 only: `python -m tests.scale.late_server PORT`."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LateServer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200 if self.headers["Dne-At-Least"] == "1" else 503)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), LateServer).serve_forever()
