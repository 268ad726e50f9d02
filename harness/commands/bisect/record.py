"""`bisect`: which of several versions of a server made it slower."""

from __future__ import annotations

from harness.commands.command import PathCommand


class Bisect(PathCommand):
    """Measures versions of one command by `latency`, as few as it can. Its own arguments say which versions."""

    name = "bisect"
    summary = "which version, or which commit, made a server slower or accept less, in as few starts as it can"
    example = "versions=0.9,0.10,0.11 -- docker run -p {port}:8000 server:{version}"
    help_order = 10
    program = "harness.commands.bisect.command"
