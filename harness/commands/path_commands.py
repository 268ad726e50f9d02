"""The records of commands that read files: they run nothing, and take paths in place of settings."""

from __future__ import annotations

from harness.commands.command import PathCommand


class Audit(PathCommand):
    """Explains figures of a table, and checks them against each other."""

    name = "audit"
    summary = "what an iteration costs by published figures, and whether they are possible: exit code 0 yes, 1 no"
    example = "baseline=22.7 speed=40.6 acceptance=73.9% K=3"
    help_order = 11
    program = "harness.commands.audit.command"


class Report(PathCommand):
    """Reads the files of what was measured."""

    name = "report"
    summary = "tables, Markdown and an HTML page with plots from the CSV files of what was measured"
    example = "results"
    help_order = 8
    program = "harness.commands.report.command"
