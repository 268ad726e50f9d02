"""`recovery`: is this pair, with these settings, on this machine, lossless?

The arm under test answers requests of many kinds, `batch_size` of them at a time (`workload`). A reference
scores its texts (`scored`, `scores`): the model's weights, or a regular server's log-probabilities of them
(`measuring.reported`). Greedy texts must be its likeliest tokens (`GreedyTexts`), drawn ones must follow its
distribution (`results.statistics.drawn_tokens`). Without either, greedy texts alone are compared (`greedy_check`), and
drawn ones are undecided. Each check becomes a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.commands.command import Experiment
from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.rows import TEXTS_FILE, RecoveryRow, RecoveryTextRow
from harness.commands.recovery.sampling import samplings
from harness.commands.recovery.scored import scored_checks
from harness.commands.recovery.scores import GreedyTexts, with_ends
from harness.commands.recovery.workload import (
    FOLLOW_UP,
    Answer,
    Asking,
    Columns,
    Workload,
    acceptance_of,
    taken_samplings,
)
from harness.config.errors import RunError
from harness.config.settings import require
from harness.engines.divergence import first_divergence
from harness.engines.door.reference import Reference
from harness.engines.protocol import Arm
from harness.measuring.progress import say
from harness.measuring.prompts.sets import load_prompts
from harness.measuring.references import References
from harness.measuring.reported import ReportedReference
from harness.measuring.session import Session

_REGULAR = "engine.regular_url=, a server of the same model that does not speculate"


class RecoveryExperiment(Experiment[RecoverySettings, RecoveryRow]):
    """Asks the last arm, and checks its answers against the reference that there is."""

    def __init__(self, settings: RecoverySettings) -> None:
        self.settings = settings
        self.prompt_set = load_prompts(settings.prompts)
        self.prompts = self.prompt_set.take(settings.num_prompts)
        self.refused: Sequence[str] = ()
        self.num_too_long: Mapping[str, int] = {}
        self.checks: list[Columns] = []

    def measure(self, session: Session) -> None:
        # What was checked before an error has its rows.
        for check in self._checks(session):
            self.checks.append(check)

    def rows(self, session: Session) -> list[RecoveryRow]:
        """One row per check, or one without a check."""
        arm = self.settings.arms[-1]
        prepared_share = None
        if session.engine is not None:
            arm = session.engine.arms[-1].name  # of a server alone, known since it was asked
            prepared_share = session.engine.prepared_share
        common: dict[str, Any] = {
            "arm": arm,
            "prepared_share": prepared_share,
            "prompts_digest": self.prompt_set.digest,
            "refused": ", ".join(self.refused) or None,
            **self.num_too_long,
        }
        rows = [session.row(RecoveryRow, **common | check) for check in self.checks or [{}]]
        return [
            # By definition the output may differ, although the check does not show it.
            dataclasses.replace(row, verdict="undecided")
            if row.lossy and row.verdict == "lossless"
            else row
            for row in rows
        ]

    def _checks(self, session: Session) -> Iterator[Columns]:
        """Open the engine, look for a reference, and yield each check."""
        settings = self.settings
        most = settings.decoding.max_new_tokens
        # A second turn reads a first answer, and has another.
        answers = f"two answers of decoding.max_new_tokens={most} and the question between them"
        encoded = session.encoder.encode_set(
            self.prompt_set, self.prompts, 2 * most + FOLLOW_UP + 1, answers
        )
        self.num_too_long = encoded.num_too_long
        prompts = encoded.token_ids
        # A first prompt may have a token more (`Workload`), a second one goes on after an answer.
        longest = encoded.longest + 1 + most + FOLLOW_UP
        session.place(settings.batch_size, longest)
        tried = [sampling.decoding for sampling in samplings(settings.decoding)]
        greedy = dataclasses.replace(settings.decoding, temperature=0)
        engine = session.open(settings.batch_size, longest, [*tried, greedy])
        arm = engine.arms[-1]
        taken, self.refused = taken_samplings(arm, settings, prompts[0])
        references = References(settings, session.planned, engine)
        reference = self._reference(session, references, prompts)
        if isinstance(reference, ReportedReference):
            unknown = [
                sampling for sampling in taken if not sampling.is_known_by(settings.top_logprobs)
            ]
            if unknown:
                names = ", ".join(sampling.name for sampling in unknown)
                shown = f"top_logprobs={settings.top_logprobs}"
                say(f"not tested, because {shown} is not enough: {names}")
            taken = [sampling for sampling in taken if sampling not in unknown]
        can_end = all(each.traits.stops_at_tokens for each in engine.arms)

        def keep(name: str, answers: Sequence[Answer]) -> None:
            rows = [_text_row(session, name, answer) for answer in answers]
            session.append(TEXTS_FILE, rows)

        end_tokens = session.end_tokens()
        asking = Asking(settings, prompts, taken, end_tokens, can_end, keep=keep)
        regular = engine.arms[0] if len(engine.arms) > 1 else None
        if reference is not None:
            yield from scored_checks(asking, arm, reference)
            return
        has_weights = references.for_texts() is not None
        if regular is not None or has_weights:
            whose = "the weights write" if has_weights else "the regular server writes"
            say(f"greedy texts are compared with those that {whose}")
            yield greedy_check(asking, arm, regular, references)
            if not taken:
                return
        why = self._untested_draws(has_weights) if taken else self._nothing_known()
        yield {"check": "reference", "verdict": "undecided", "finding": why}

    def _untested_draws(self, has_weights: bool) -> str:
        """Why drawn texts are not tested, and how to change that."""
        beyond_model = self.settings.engine.beyond_model
        if beyond_model is not None:
            return (
                f"no log-probabilities know of {beyond_model}, so drawn texts cannot be tested:"
                f" temperature=0 compares greedy ones with those of {_REGULAR}"
            )
        if has_weights:
            return (
                "drawn texts are tested by token ids, which not every server here sends:"
                " vLLM and llama.cpp do"
            )
        return (
            "drawn texts are tested by token ids and log-probabilities: give servers that send both (vLLM with"
            f" --max-logprobs={self.settings.top_logprobs}, or llama.cpp), or a model= whose weights"
            " load here"
        )

    def _nothing_known(self) -> str:
        """Why greedy texts can be compared with nothing, and how to change that."""
        beyond_model = self.settings.engine.beyond_model
        if beyond_model is not None:
            return f"the weights know nothing of {beyond_model}: give {_REGULAR}"
        return f"there is nothing to compare with: give {_REGULAR}, or a model= whose weights load here"

    def _reference(
        self, session: Session, references: References, prompts: Sequence[Sequence[int]]
    ) -> Reference | None:
        """The weights, or the regular arm's log-probabilities; None where neither can be had.

        Raises:
            SettingError: the run asks for a regular arm, and there is none.
            RunError: that arm does not give the log-probabilities of a text.
        """
        settings = self.settings
        if settings.reference != "regular":
            weights = references.for_tokens()
            if weights is not None or settings.reference == "weights":
                return weights
        engine = session.engine
        assert engine is not None
        regular, *others = engine.arms
        reports_ids = all(arm.traits.reports_token_ids for arm in engine.arms)
        reads_ids = reports_ids and settings.engine.beyond_model is None
        is_asked_for = settings.reference == "regular"
        if not (others and reads_ids and regular.scores):
            rule = (
                "needs a second arm (engine.regular_url, or a draft) that sends token ids and"
                " log-probabilities of texts"
            )
            require(not is_asked_for, "reference", rule, settings.reference)
            return None
        num_tokens = len(session.tokenizer)
        try:
            return ReportedReference(
                regular, prompts[0], num_tokens, settings.top_logprobs, settings.batch_size
            )
        except RunError as error:
            if is_asked_for:
                raise
            say(f"the regular arm is no reference: {error}")
            return None


def _text_row(session: Session, name: str, answer: Answer) -> RecoveryTextRow:
    request, record = answer
    return session.row(
        RecoveryTextRow,
        arm=name,
        sampling=request.sampling.name,
        prompt_token_ids=[*request.prompt],
        token_ids=[*record.token_ids],
        is_tested=request.is_compared,
    )


def greedy_check(asking: Asking, arm: Arm, regular: Arm | None, references: References) -> Columns:
    """The check of an arm's greedy texts by those that the weights write, else by a regular arm's, asked one at a time.

    So it is where no log-probabilities of texts are known: of some servers, of chats, and with a grammar.
    """
    num_in_flight = asking.settings.batch_size
    has_weights = references.for_texts() is not None
    if has_weights:
        # Servers differ in whether the text has the token that ends it.
        asking = dataclasses.replace(asking, can_end=False)
    # Drawn ones are in flight beside them, and are not tested.
    requests = Workload(asking).first_turns(len(asking.prompts))
    say(f"testing the {arm.name} arm: {len(requests):,} requests, {num_in_flight} in flight")
    answers = [
        answer
        for answer in asking.ask(arm, requests, num_in_flight, "asking")
        if answer.request.is_greedy and answer.request.is_compared
    ]
    texts = GreedyTexts(asking.end_tokens)
    if has_weights:
        for planned, record in answers:
            parting = references.text_divergence(planned.prompt, record.text, planned.num_tokens)
            # A text that the model would go on with parts from it at its end.
            texts.add(parting, dataclasses.replace(planned, num_tokens=0), record)
    elif regular is not None:
        doing = f"asking the {regular.name} arm"
        expected = asking.ask(regular, [answer.request for answer in answers], 1, doing)
        for (planned, record), (_, wanted) in zip(answers, expected, strict=True):
            # Nothing here knows the margin of their tokens.
            parting = first_divergence(None, planned.prompt, wanted.token_ids, record.token_ids)
            texts.add(parting, planned, wanted, record)
    return with_ends(texts.columns(), answers) | acceptance_of(
        [answer.record for answer in answers]
    )
