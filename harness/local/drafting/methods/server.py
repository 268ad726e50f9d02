"""A server's own drafting, whatever that is."""

from __future__ import annotations

from harness.config.run import RunSettings
from harness.config.settings import require
from harness.local.drafting.method import Method


class Server(Method):
    """The draft of the server at `engine.url`."""

    name = "server"
    summary = "with engine=server: what that server drafts with"

    def check(self, run: RunSettings) -> None:
        """Refuse every engine but a server that also has an address without drafting."""
        rule = "needs engine=server with engine.regular_url"
        require(run.engine.has_two, "draft", rule, "server")


RECORD = Server()
