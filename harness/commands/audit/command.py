"""`audit`: what an iteration costs by published figures, and whether these are possible."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

from harness.commands.arguments import read_arguments
from harness.commands.audit.figures import NUMBERS
from harness.commands.audit.judge import VERDICTS, judge
from harness.commands.audit.page import audit_page
from harness.commands.audit.rows import SHORT_NAMES, stated_rows
from harness.config.command_line import Words
from harness.config.errors import CANNOT_TELL, SettingError, VerdictError
from harness.reporting.page import in_full
from harness.reporting.terminal import WIDE, plain_console, print_document

_EXAMPLE = "audit baseline=22.7 speed=40.6 acceptance=73.9% K=3"
_HELP = f"""\
usage: harness {_EXAMPLE}
       harness audit baseline=130.9 speed=161.2 acceptance=73.9% K=3 speed=118.8 acceptance=52.1% K=4

What does an iteration cost by published figures, what holds the speed-up back, and is each figure possible, given the
others? Nothing is run.

  NAME=VALUE     a NAME that is typed again is the next row's; one value holds for all rows
  baseline=      speed of the regular arm, in tokens/s or as 24.6ms (per token) or 41s (per answer)

A claim is consistent, impossible or unlikely (chance, or another average, definition or run may explain it). One that
cannot be checked by the others is not counted.

NAME of a number: {" ".join(NUMBERS)}
Short for some:   {" ".join(SHORT_NAMES)}

Exit code 0: something was checked, and nothing is impossible or unlikely. 1: something is impossible. 2: a wrong
argument, or no figures. 3: something is unlikely, or nothing could be checked."""
_LISTS = dict.fromkeys((*SHORT_NAMES, *NUMBERS, "k"))
_ARGUMENTS: type[Any] = make_dataclass(
    "AuditSettings", [(name, list[str], field(default_factory=list)) for name in _LISTS]
)


def main(words: Words) -> None:
    """The command `audit`.

    Raises:
        SettingError: a wrong argument, or none.
        VerdictError: a claim is impossible (exit code 1), or unlikely, or none could be checked (3).
    """
    settings, paths = read_arguments(_ARGUMENTS, words, _HELP)
    typed = {"K" if name == "k" else name: texts for name, texts in vars(settings).items() if texts}
    if paths or not typed:
        raise SettingError("audit", f"takes figures, as a table has them in a row: {_EXAMPLE}")
    rows = stated_rows(typed)
    judged = [claim for row in rows for claim in judge(row)]
    print_document(in_full(audit_page(rows, judged)), plain_console(WIDE))
    if not judged:
        raise VerdictError("nothing could be checked: too little is stated", CANNOT_TELL)
    worst = max(judged, key=lambda claim: VERDICTS.index(claim.verdict))
    if worst.verdict != "consistent":
        raise VerdictError(str(worst), 1 if worst.verdict == "impossible" else CANNOT_TELL)
