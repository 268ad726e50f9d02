"""Passes of a plain server are timed behind a prefix in its cache: by a server whose clock and cache are planted, and
behind a real one, which says how many tokens it read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import takewhile
from threading import Thread
from typing import Any, ClassVar

import pytest

from harness.config.errors import SettingError
from harness.results.price.value import IterationCost
from harness.servers import passes
from harness.servers.passes import WIDTHS, pass_times
from in_process import Harness, only
from real_servers import gguf_pair, llama_serving

STEP_MS = 20.0
ON_ITS_WAY_MS = 7.0


def planted_ms(width: int) -> float:
    """Kernels change at nine tokens."""
    return STEP_MS + 0.5 * (width - 1) + (8.0 if width >= 9 else 0.0)


class PlainServer(BaseHTTPRequestHandler):
    """Its clock goes on by what a request takes, and nobody waits."""

    now_ms = 0.0
    cached: ClassVar[list[Sequence[int]]] = []
    keeps = True
    key: str | None = None

    def do_GET(self) -> None:
        if self._is_refused():
            return
        self._send({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        if self._is_refused():
            return
        server = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, number = body["prompt"], body["max_tokens"]
        # As a tree of prefixes holds all earlier prompts.
        common = 0
        for known in server.cached:
            pairs = zip(prompt, known, strict=False)
            common = max(common, len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]))
        num_read = max(1, len(prompt) - common * server.keeps)
        server.cached.append(prompt)
        server.now_ms += ON_ITS_WAY_MS + planted_ms(num_read) + (number - 1) * STEP_MS
        timings = {"cache_n": len(prompt) - num_read}
        self._send({"timings": timings, "usage": {"completion_tokens": number}})

    def _is_refused(self) -> bool:
        is_refused = self.key not in (None, self.headers["Authorization"])
        if is_refused:
            self.send_error(401)
        return is_refused

    def _send(self, content: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(passes.time, "perf_counter", lambda: PlainServer.now_ms / 1000)
    PlainServer.cached, PlainServer.keeps, PlainServer.key = [], True, None
    with HTTPServer(("127.0.0.1", 0), PlainServer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_planted_passes_are_found_whatever_a_request_takes_on_its_way(plain: str) -> None:
    """Also where the cache holds the prompts of an earlier run."""
    pass_times(plain, 100, num_rounds=2)
    cost = IterationCost.from_passes(pass_times(plain, 100, num_rounds=2), plain)
    for width in WIDTHS:
        point = cost.points[width - 1]
        assert point.ms.estimate == pytest.approx(planted_ms(width), abs=1e-6)
        assert point.steps.estimate == pytest.approx(planted_ms(width) / STEP_MS, abs=1e-6)
    shape = cost.shape()
    assert [str(step) for step in (shape.jumps if shape else ())] == ["from 8 to 9 tokens +34 %"]


def test_what_a_plain_server_predicts(harness: Harness, plain: str) -> None:
    outcome = harness("plan", f"costs={plain}", "acceptance=3@4")
    shown = " ".join(outcome.stdout.split())
    assert f"{3 / (planted_ms(5) / STEP_MS):.2f}× predicted at K=4" in shown
    assert "drafting is left out" in shown
    assert "intervals are over 24 rounds" in shown
    # Once is enough for other predictions.
    again = harness("plan", f"costs={only('costs.json')}", "acceptance=2@1")
    assert f"{2 / (planted_ms(2) / STEP_MS):.2f}× predicted at K=1" in again.stdout


def test_a_server_with_a_key(harness: Harness, plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PlainServer.key = "Bearer secret"
    asked = f"costs={plain}", "acceptance=3@4"
    assert "401 Unauthorized; api_key_variable=NAME" in harness.refused("plan", *asked)
    with_user = plain.replace("//", "//me:secret@")
    assert harness.refused("plan", f"costs={with_user}", *asked[1:]).startswith(
        "costs: a key or password"
    )
    monkeypatch.setenv("A_KEY", "secret")
    outcome = harness("plan", *asked, "api_key_variable=A_KEY")
    assert "predicted at K=4" in outcome.stdout
    assert "secret" not in only("costs.json").read_text(encoding="utf-8")


def test_a_server_that_keeps_no_prefix_is_refused(plain: str) -> None:
    PlainServer.keeps = False
    with pytest.raises(SettingError, match=r"keeps no prefixes: it read \d\d tokens"):
        pass_times(plain, 64, num_rounds=1)


def test_a_real_server_reads_the_new_tokens_alone() -> None:
    """Else it is refused."""
    with llama_serving(gguf_pair().model, "-c", "512", "-np", "1") as url:
        rounds = pass_times(f"{url}/v1", 64, num_rounds=1)
    assert [*rounds[0]] == [*WIDTHS]
