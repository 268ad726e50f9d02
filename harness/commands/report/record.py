"""`report`: what was measured, as tables, Markdown and a page with plots."""

from __future__ import annotations

from harness.commands.command import PathCommand


class Report(PathCommand):
    """Reads the files of what was measured. It runs nothing, and takes paths instead of settings."""

    name = "report"
    summary = "tables, Markdown and an HTML page with plots from the CSV files of what was measured"
    example = "results"
    help_order = 8
    program = "harness.commands.report.command"
