"""`recovery`: is this pair, with these settings, on this machine, lossless?

Texts are asked of the arm under test, one question after the other (`plain`) or many at a time (`load`). A reference
scores them (`scores`): the model's weights, or a regular server's log-probabilities of them (`regular_reference`).
Greedy texts must be its likeliest tokens (`greedy`), drawn ones must follow its distribution (`drawn`). Each check
becomes a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.commands.command import Experiment
from harness.commands.recovery.load import checks_under_load
from harness.commands.recovery.plain import checks_one_by_one, num_counted_tokens
from harness.commands.recovery.record import EXIT_CODES, RecoverySettings
from harness.commands.recovery.rows import RecoveryRow
from harness.commands.recovery.tables import summarise
from harness.commands.recovery.workload import FOLLOW_UP
from harness.config.errors import VerdictError
from harness.engines.registry import engine_of
from harness.measuring.prompts.sets import load_prompts
from harness.measuring.references import References
from harness.measuring.session import Session


class Recovery(Experiment):
    """A greedy comparison, then draws compared with the target's exact distribution."""

    def __init__(self, settings: RecoverySettings) -> None:
        self.settings = settings
        self.prompt_set = load_prompts(settings.prompts)
        self.prompts = self.prompt_set.take(settings.num_prompts)
        self.checks: list[dict[str, Any]] = []

    def measure(self, session: Session) -> None:
        settings = self.settings
        most = settings.decoding.max_new_tokens
        new_tokens = max(most, num_counted_tokens(settings.decoding.num_draft_tokens))
        if settings.load is not None or not engine_of(settings).computes_here:
            # A second turn reads a first answer, and has another.
            new_tokens = 2 * most + FOLLOW_UP + 1
        encoded = session.encode_set(self.prompt_set, self.prompts, new_tokens)
        self.prompts = encoded.prompts
        if settings.load is None:
            checks = checks_one_by_one(session, settings, encoded)
        else:
            references = References(session)
            checks = checks_under_load(session, settings, encoded.token_ids, references)
        # What was checked before an error has its rows.
        for check in checks:
            self.checks.append(check)

    def rows(self, session: Session) -> list[RecoveryRow]:
        """One row per check, or one without a check."""
        arm = self.settings.arms[-1]
        if session.engine is not None:
            arm = session.engine.arms[-1].name  # of a server alone, known since it was asked
        common: dict[str, Any] = {
            "arm": arm,
            "prompts_digest": self.prompt_set.digest,
        }
        if self.settings.load is not None:
            common["batch_size"] = self.settings.load
        return [session.row(RecoveryRow, **common | check) for check in self.checks or [{}]]

    def judge(self, rows: Sequence[RecoveryRow]) -> None:
        """Raises VerdictError if the pair is lossy (exit code 1), or if nothing can be told (3)."""
        summary = summarise(rows)
        if summary.verdict != "lossless":
            raise VerdictError(summary.in_short, EXIT_CODES[summary.verdict])


EXPERIMENT = Recovery
