"""Seconds from Enter to the first look at a server and to the first request, of several installations in turns:

python benchmarks/first_request.py TIMES .venv/bin/harness OTHER/bin/harness
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar


class Server(BaseHTTPRequestHandler):
    """Lists one model, and refuses every request."""

    protocol_version = "HTTP/1.1"
    first: ClassVar[dict[str, float]] = {}

    def answer(self, status: int, body: bytes) -> None:
        self.first.setdefault(self.command, time.perf_counter())
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(200, b'{"object": "list", "data": [{"id": "tiny"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(500, b"{}")

    def log_message(self, *arguments: object) -> None:
        pass


def main() -> None:
    times, *programs = sys.argv[1:]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    asked = ["latency", "engine=server", f"engine.url=http://127.0.0.1:{server.server_port}/v1"]
    seconds: dict[str, list[tuple[float, float]]] = {program: [] for program in programs}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(int(times)):
            for program in programs:
                Server.first.clear()
                began = time.perf_counter()
                subprocess.run([program, *asked], cwd=directory, capture_output=True, check=False)
                seconds[program].append((Server.first["GET"] - began, Server.first["POST"] - began))
    for program, measured in seconds.items():
        for name, values in zip(("look", "request"), zip(*measured, strict=True), strict=True):
            ordered = sorted(values)
            middle = ordered[len(ordered) // 2]
            print(
                f"{program}: first {name} {ordered[0]:.2f} s at best, {middle:.2f} s in the middle"
            )


if __name__ == "__main__":
    main()
