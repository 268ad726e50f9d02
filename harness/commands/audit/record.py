"""`audit`: whether published figures are possible."""

from __future__ import annotations

from harness.commands.command import PathCommand


class Audit(PathCommand):
    """Explains figures of a table, and checks them against each other. It runs nothing, and takes a path in place of
    settings.
    """

    name = "audit"
    summary = "what an iteration costs by published figures, and whether they are possible: exit code 0 yes, 1 no"
    example = "speedup=1.05 K=3 acceptance=0.85"
    help_order = 11
    program = "harness.commands.audit.command"
