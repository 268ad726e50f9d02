"""`regress`: whether a change made anything worse."""

from __future__ import annotations

from harness.commands.command import PathCommand


class Regress(PathCommand):
    """Compares the files of two versions. It runs nothing, and takes paths instead of settings."""

    name = "regress"
    summary = "whether a change made anything worse: exit code 0 no, 1 yes, 3 it cannot be told"
    example = "before=results/a.csv after=results/b.csv margin=0.02"
    help_order = 9
    program = "harness.commands.regress.command"
