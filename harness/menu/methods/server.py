"""A server's own drafting, about which nothing is known here."""

from __future__ import annotations

from harness.config.run import RunSettings
from harness.config.settings import require
from harness.menu.method import Method


class Server(Method):
    """Whatever the server at `engine.url` drafts with."""

    name = "server"
    summary = "with engine=server: what that server drafts with"

    def check(self, run: RunSettings) -> None:
        """See `Method.check`."""
        rule = "needs engine=server with engine.regular_url"
        has_two = getattr(run.engine, "regular_url", None) is not None
        require(has_two, "draft", rule, "server")


RECORD = Server()
