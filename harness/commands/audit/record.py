"""`audit`: whether published figures are possible."""

from __future__ import annotations

from harness.commands.command import Command


class Audit(Command):
    """Explains figures of a table, and checks them against each other. It runs nothing, and takes a path in place of
    settings.
    """

    name = "audit"
    summary = "what an iteration costs by published figures, and whether they are possible: exit code 0 yes, 1 no"
    example = "README.md num_prompts=80"
    help_order = 10
    experiment = "harness.commands.audit.command"
    measures = False
    sweeps = False


RECORD = Audit()
