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

from harness.config.errors import SettingError
from harness.servers.counters import read_counters
from harness.servers.identity import (
    ListedModel,
    ServerReport,
    choose_model,
    samples,
    server_report,
    start_time,
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


@pytest.mark.parametrize(
    ("listed", "name", "typed_model", "chosen"),
    [
        (["a", "b"], "b", "a", "b"),
        (["a", "b"], None, "b", "b"),
        (["a"], None, None, "a"),
        # The command names a repository, and the list has its file.
        (["a"], None, "org/a", "a"),
        # Several, and nothing typed is among them.
        (["a", "b"], None, None, None),
        (["a", "b"], None, "c", None),
        (["a"], "c", "a", None),
        ([], None, "c", "c"),
        ([], None, None, "org/x"),
    ],
)
def test_the_model_is_the_typed_one_or_the_only_one(
    listed: list[str], name: str | None, typed_model: str | None, chosen: str | None
) -> None:
    models = [ListedModel(each, owner="vllm") for each in listed]
    report = ServerReport({}, None, models)
    setting, place = "engine.model", "engine.url=U"
    if chosen is None:
        names = ", ".join(listed)
        with pytest.raises(SettingError, match=f"must name a model that {place} serves: {names}$"):
            choose_model(report, "org/x", name, typed_model, setting, place)
        return
    found = choose_model(report, "org/x", name, typed_model, setting, place)
    assert (found.name, found.is_listed) == (chosen, bool(listed))


def test_a_typed_model_is_also_known_by_where_its_link_leads(tmp_path: Path) -> None:
    directory = tmp_path / "Llama-8B"
    directory.mkdir()
    link = tmp_path / "mine"
    link.symlink_to(directory)
    listed = [ListedModel("other", "/x/other"), ListedModel("served", str(directory))]
    report = ServerReport({}, None, listed)
    chosen = choose_model(report, "org/x", None, str(link), "engine.model", "engine.url")
    assert chosen.name == "served"


def test_a_server_of_no_known_kind_may_serve_what_it_does_not_list() -> None:
    report = ServerReport({}, None, [ListedModel("a", owner="somebody")])
    chosen = choose_model(report, "org/x", "c", None, "engine.model", "engine.url")
    assert (chosen.name, chosen.is_listed) == ("c", False)


DIGITS = "1" * 400


def test_damaged_pages_of_counters_say_nothing() -> None:
    """What makes the parser raise, and numbers that no counter, position or start has."""
    assert samples('x{a="1", ="2"} 3') == samples(f"x 1 {DIGITS}") == []
    positions = (3_000_000_000, DIGITS)
    accepted = [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} 0'
        for place in positions
    ]
    page = "\n".join([f"vllm:generation_tokens_total {DIGITS}", *accepted, ""])
    assert not read_counters(page).accepted_at
    starts = [
        start_time(f"process_start_time_seconds {start}\n")
        for start in ("NaN", "0", "+Inf", DIGITS)
    ]
    assert starts == [None] * 4


def test_a_list_of_models_is_believed_as_far_as_it_is_possible() -> None:
    listed = ["a", {"id": 3}, {"id": "base", "max_model_len": True, "owned_by": 1}]
    with pages(models={"data": listed}) as url:
        report = server_report(url, None)
    assert report is not None
    assert report.models == [ListedModel("base")]
