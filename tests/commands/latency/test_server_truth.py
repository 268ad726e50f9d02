"""Reports of servers beyond their answers: counters, others' traffic, and bursts, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_server import EchoServer, Serve
from in_process import Harness, results

QUICK = ["engine=server", "model=tiny", "num_prompts=8", "decoding.max_new_tokens=8"]


def test_a_page_that_stays_away_is_said(
    harness: Harness, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.servers.counters._RETRY_S", 0.0)
    servers = [EchoServer(metrics=True, num_draft_tokens=n) for n in (None, 4)]
    servers[1].lost_pages = range(8, 20)
    harness("latency", *QUICK, *serve(*servers))
    row = results().iloc[-1]
    # Of each of 8 laps all 8 tokens are counted, or none.
    assert 0 < row["server_tokens"] < 8 * 8
    assert row["server_tokens"] % 8 == 0
    assert row["mean_acceptance_length"] == pytest.approx(1 + 4 / 3)


def test_servers_that_are_not_two_of_a_kind_give_no_verdict(harness: Harness, serve: Serve) -> None:
    """What else refuses one: tests/results/test_verdict.py."""
    urls = serve(EchoServer(), EchoServer(stride=2, num_draft_tokens=4))
    outcome = harness("latency", *QUICK, *urls, "decoding=greedy", code=3)
    assert "agree on 0 of 8 prompts, and part after about 1 tokens" in outcome.complaint
    assert set(results()["status"]) == {"no_verdict"}


def test_requests_have_what_the_user_adds(harness: Harness, serve: Serve) -> None:
    """A template's variables go to a server that applies it, beside further entries of the body."""
    server = EchoServer()
    thoughtless = {"enable_thinking": False}
    further = ["prompts.template_arguments={enable_thinking: false}", "engine.extra={priority: 2}"]
    [url] = serve(server)
    settings = ["engine=server", "model=tiny", url, "num_prompts=2", *further]
    harness("latency", *settings, "engine.chat=true", "decoding.max_new_tokens=4")
    assert server.bodies[-1]["chat_template_kwargs"] == thoughtless
    assert server.bodies[-1]["priority"] == 2
    harness("latency", *settings, "decoding.max_new_tokens=4")
    assert "chat_template_kwargs" not in server.bodies[-1]
    assert results()["measurement"].nunique() == 2


def test_a_kind_of_server_in_a_file_of_the_user(
    harness: Harness, serve: Serve, tmp_path: Path
) -> None:
    """Its requests have its own words and salt, and its counters are read."""
    (tmp_path / "my_server.py").write_text(
        "from harness.servers.dialects import Dialect\n"
        "MINE = Dialect(\n"
        "    name='mine', title='MyServer', words={'repetition_penalty': 'repeat'},\n"
        "    salt={'partition': '{salt}'}, parameters={'plain': True},\n"
        "    counters={'mine_new_tokens': 'generated'},\n"
        ")\n"
    )
    server = EchoServer()
    [url] = serve(server)
    settings = ["engine=server", "model=tiny", url, "num_prompts=2"]
    dialect = "engine.dialect=./my_server.py:MINE"
    harness("latency", *settings, dialect, "decoding.max_new_tokens=4")
    body = server.bodies[-1]
    assert (body["repeat"], body["plain"]) == (1.0, True)
    assert body["partition"]
    assert "repetition_penalty" not in body
    assert list(results()["server"]) == ["MyServer"]
