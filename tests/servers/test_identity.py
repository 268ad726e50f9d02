"""What a server is taken for, by the statuses and contents of its pages."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.config.settings import ModelSettings
from harness.servers.identity import (
    ListedModel,
    ServerReport,
    choose_model,
    server_report,
    why_not_ready,
)

LIST = {"data": [{"id": "m", "owned_by": "llamacpp"}]}


@contextmanager
def pages(**answers: int | Mapping[str, Any]) -> Iterator[str]:
    """The API of a server with these pages, by the last part of their path: a status, or content."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.rpartition("/")[2], 404)
            body = b"" if isinstance(answer, int) else json.dumps(answer).encode()
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_server_without_a_page_of_health_is_ready_by_its_list(status: int) -> None:
    with pages(health=status, models=LIST) as url:
        assert why_not_ready(url, None) is None


def test_health_decides_where_it_is_also_against_the_list() -> None:
    with pages(health=503, models=LIST) as url:
        assert "/health answers" in str(why_not_ready(url, None))
    with pages(health={}, models={"data": []}) as url:
        assert why_not_ready(url, None) is None


def test_a_broken_page_takes_only_its_own_part_of_the_report() -> None:
    with pages(models=LIST, props=500, metrics=500, version={"version": "1.2"}) as url:
        report = server_report(url, None)
    assert report is not None
    assert report.models == [ListedModel("m", owner="llamacpp")]
    assert report.about["/version version"] == "1.2"
    with pages(models=503) as url:
        assert server_report(url, None) is None


def test_a_model_is_known_by_where_its_link_leads(tmp_path: Path) -> None:
    """A server that is started with the directory lists it by that, whatever the link is called."""
    directory = tmp_path / "Llama-8B"
    directory.mkdir()
    link = tmp_path / "mine"
    link.symlink_to(directory)
    settings = ModelSettings(name="mine", repository=str(link))
    listed = [ListedModel("other", "/x/other"), ListedModel("served", str(directory))]
    report = ServerReport({}, None, listed)
    chosen = choose_model(report, settings, None, None, "engine.model", "engine.url")
    assert chosen.name == "served"
