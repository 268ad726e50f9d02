"""`recovery`: is this pair, with these settings, on this machine, lossless?

The arm under test answers requests of many kinds, `batch_size` of them at a time (`asking`, `workload`). A reference
scores its texts (`scored`): the model's weights, or a regular server's log-probabilities of them
(`reported`). Greedy texts must be its likeliest tokens (`greedy`), drawn ones must follow its distribution
(`drawn`). A regular server without log-probabilities answers the same requests (`compared`). Each check becomes a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from harness.commands.command import Experiment
from harness.commands.recovery.answers import recorded_checks
from harness.commands.recovery.compared import compared_checks
from harness.commands.recovery.greedy import Columns
from harness.commands.recovery.kinds import kind_checks
from harness.commands.recovery.record import EXIT_CODES, RecoverySettings
from harness.commands.recovery.reported import RegularReference, regular_reference
from harness.commands.recovery.rows import RecoveryRow
from harness.commands.recovery.sampling import Sampling
from harness.commands.recovery.scored import scored_checks
from harness.commands.recovery.tables import summarise
from harness.commands.recovery.workload import FOLLOW_UP, Asking, taken_samplings
from harness.config.errors import VerdictError
from harness.engines.door.reference import TextReference
from harness.engines.registry import engine_of
from harness.measuring.progress import say
from harness.measuring.prompts.sets import load_prompts
from harness.measuring.references import References
from harness.measuring.session import Session


class Recovery(Experiment[RecoverySettings, RecoveryRow]):
    """Asks the last arm, and checks its answers against the reference that there is."""

    def __init__(self, settings: RecoverySettings) -> None:
        if settings.answers is not None and engine_of(settings).own_loop:
            # The target alone is needed.
            settings = dataclasses.replace(settings, draft=None)
        self.settings = settings
        self.prompt_set = load_prompts(settings.prompts)
        self.prompts = self.prompt_set.take(settings.num_prompts)
        self.refused: Sequence[str] = ()
        self.checks: list[Columns] = []

    def measure(self, session: Session) -> None:
        # What was checked before an error has its rows.
        for check in self._checks(session):
            self.checks.append(check)

    def rows(self, session: Session) -> list[RecoveryRow]:
        """One row per check, or one without a check."""
        arm = self.settings.arms[-1]
        if session.engine is not None:
            arm = session.engine.arms[-1].name  # of a server alone, known since it was asked
        common: dict[str, Any] = {
            "arm": arm,
            "prompts_digest": self.prompt_set.digest,
            "refused": ", ".join(self.refused) or None,
        }
        return [session.row(RecoveryRow, **common | check) for check in self.checks or [{}]]

    def judge(self, rows: Sequence[RecoveryRow]) -> None:
        """Raises VerdictError if the pair is lossy (exit code 1), or if nothing can be told (3)."""
        summary = summarise(rows)
        if summary.verdict != "lossless":
            raise VerdictError(summary.in_short, EXIT_CODES[summary.verdict])

    def _checks(self, session: Session) -> Iterator[Columns]:
        """Open the engine, look for a reference, and yield each check."""
        settings = self.settings
        if settings.answers is not None:
            yield from recorded_checks(session, settings)
            return
        most = settings.decoding.max_new_tokens
        # A second turn reads a first answer, and has another.
        answers = f"two answers of decoding.max_new_tokens={most} and the question between them"
        encoded = session.encode_set(
            self.prompt_set, self.prompts, 2 * most + FOLLOW_UP + 1, answers
        )
        self.prompts = encoded.prompts
        prompts = encoded.token_ids
        # A first prompt may have a token more (`Workload`), a second one goes on after an answer.
        longest = encoded.longest + 1 + most + FOLLOW_UP
        session.place(settings.batch_size, longest)
        engine = session.open(settings.batch_size, longest, fault=settings.fault)
        arm = engine.arms[-1]
        samplings, self.refused = taken_samplings(arm, settings, prompts[0])
        references = References(session)
        reference = self._reference(session, references, prompts)
        if isinstance(reference, RegularReference):
            samplings = self._known(reference, samplings)
        asking = Asking(settings, prompts, samplings, session.end_tokens())
        regular = engine.arms[0] if len(engine.arms) > 1 else None
        if engine.servers is not None and settings.by_kind:
            yield from kind_checks(asking, arm, regular)
        if reference is not None:
            yield from scored_checks(asking, arm, reference)
            return
        if regular is not None:
            why = settings.engine.beyond_model or "without log-probabilities"
            say(f"{why}: answers are compared with those of the regular server")
        if regular is not None or references.for_texts() is not None:
            yield from compared_checks(asking, arm, regular, references)
            if regular is not None or not samplings:
                return
        why = self._nothing_known(references)
        yield {"check": "reference", "verdict": "undecided", "finding": why}

    def _nothing_known(self, references: References) -> str:
        """Why nothing can be compared, and how to change that."""
        regular = "engine.regular_url=, a server of the same model that does not speculate"
        beyond_model = self.settings.engine.beyond_model
        if beyond_model is not None:
            return f"the weights know nothing of {beyond_model}: give {regular}"
        if references.for_texts() is not None:
            return (
                f"the server sends no token ids, so draws are compared with nothing: give {regular}"
            )
        return (
            f"there is nothing to compare with: give {regular}, or a model= whose weights load here"
        )

    def _reference(
        self, session: Session, references: References, prompts: Sequence[Sequence[int]]
    ) -> TextReference | None:
        """The weights, or the regular arm's log-probabilities; None where neither can be had."""
        asked_for = self.settings.reference
        if asked_for != "regular":
            weights = references.for_tokens()
            if weights is not None or asked_for == "weights":
                return weights
        return regular_reference(session, self.settings, prompts[0])

    def _known(self, reference: RegularReference, samplings: Sequence[Sampling]) -> list[Sampling]:
        """The sampling settings that the log-probabilities shown determine; the others are named."""
        unknown = [sampling for sampling in samplings if not reference.knows(sampling)]
        if unknown:
            names = ", ".join(sampling.name for sampling in unknown)
            shown = f"top_logprobs={self.settings.top_logprobs}"
            say(f"not tested, because {shown} is not enough: {names}")
        return [sampling for sampling in samplings if sampling not in unknown]


EXPERIMENT = Recovery
