"""What an engine accepts, against its weights and the draft's card, and which of the measured causes make it little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.results.judging.statement import Statement
from harness.results.rows.acceptance import AcceptanceCauseRow, AcceptanceRow
from harness.results.statistics.interval import Interval
from harness.results.statistics.multiplicity import widened

# Standard deviations by which the log-probability of a model's own texts, or the number of iterations, may differ from
# the expected one. Chance alone exceeds them, in either direction, twice in a million.
MOST_DEVIATIONS = 4.75
# The share of tokens that a model cannot draw, which rounding and ties explain.
MOST_IMPOSSIBLE = 0.005
# Acceptance below this share of the draft tokens is little, whatever a card says.
LITTLE = 0.2

_TOKENS = "tokens per iteration"


@dataclass(frozen=True)
class AcceptanceFinding:
    """What is said of a run of `acceptance`, in the order in which it is read.

    Attributes:
        engine: whether it accepts what its weights do; None without an engine elsewhere.
        texts: whether they are the model's own.
        positions: the engine against its weights at each draft position.
        card: the draft against its card; None without one.
        guess: the draft against a guess that is always the same; None where it was not asked.
        causes: of each condition that was measured.
        named: those that are shown to make the difference.
    """

    engine: Statement | None
    texts: Statement | None
    positions: Sequence[Statement] = ()
    card: Statement | None = None
    guess: Statement | None = None
    causes: Sequence[Statement] = ()
    named: Sequence[Statement] = field(default=())

    @property
    def statements(self) -> list[Statement]:
        single = (self.engine, self.texts, self.card, self.guess)
        return [*filter(None, single), *self.positions, *self.causes]

    @property
    def first_below(self) -> int | None:
        """The first draft position, from 1, at which the engine accepts less than its weights."""
        below = (row.subject.position for row in self.positions if row.relation == "below")
        return next(below, None)


def finding_of(
    rows: Sequence[AcceptanceRow], row: AcceptanceRow, causes: Sequence[AcceptanceCauseRow]
) -> AcceptanceFinding:
    """What the rows of a run say.

    Args:
        rows: of every K.
        row: of the K that the page is about.
        causes: of its conditions, that as typed among them.
    """
    engine = engine_statement(row)
    texts = texts_statement(row)
    typed = [cause for cause in causes if cause.cause is None]
    others = [cause for cause in causes if cause.cause is not None and cause.position is None]
    positions = [
        _against_weights(place, f"acceptance at position {place.position}")
        for place in typed
        if place.position is not None and place.weights is not None
    ]
    as_typed = next((place for place in typed if place.position is None), AcceptanceCauseRow())
    statements = [_cause(cause, as_typed, len(others)) for cause in others]
    # Another reading is a cause where the engine is not as typed, and explains it; other answers where they gain.
    is_as_typed = not any(found and found.is_conclusion for found in (engine, texts))
    named = [
        statement
        for statement in statements
        if (statement.subject.is_asked and statement.relation == "above")
        or (statement.subject.cause == "command" and statement.is_conclusion)
        or (
            not is_as_typed
            and not statement.subject.is_asked
            and explains(statement.subject, causes)
        )
    ]
    return AcceptanceFinding(engine, texts, positions, _card(row), _guess(rows), statements, named)


def engine_statement(row: AcceptanceRow) -> Statement | None:
    """Whether an engine accepts what its weights do, by its counts, or where these alone contradict the weights by what
    arrived together. None for a run without an engine elsewhere.
    """
    weights = row.weights_tokens_per_iteration
    if weights is None and row.engine_unknown is None:
        return None
    difference = _difference(believed(row), weights)
    why = row.engine_unknown or ""
    return Statement.ordered("engine", difference, why, limit=0.0, subject=row, figure=_TOKENS)


def believed(row: AcceptanceRow) -> float | None:
    """The tokens per iteration of an engine: its counts, but for those that its weights and what arrived contradict."""
    served, arrived = row.served_tokens_per_iteration, row.arrived_tokens_per_iteration
    weights = row.weights_tokens_per_iteration or Interval()
    if served is None or arrived is None or not weights.has_bounds:
        return arrived if served is None else served
    is_contradicted = weights.excludes(served) and not weights.excludes(arrived)
    return arrived if is_contradicted else served


def texts_statement(row: AcceptanceRow) -> Statement | None:
    """Whether texts are as likely as those of the model; None where nobody read them."""
    if row.impossible_share is None:
        return None
    z = row.likelihood_z or 0.0
    if row.impossible_share > MOST_IMPOSSIBLE:
        z = min(z, -2 * MOST_DEVIATIONS)
    interval = Interval(z, z - MOST_DEVIATIONS, z + MOST_DEVIATIONS)
    figure = "log-probability in standard deviations"
    return Statement.ordered("texts", interval, limit=0.0, subject=row, figure=figure)


def explains(cause: AcceptanceCauseRow, causes: Sequence[AcceptanceCauseRow]) -> bool:
    """Whether an engine that is read under this condition accepts what its weights do, at every position."""
    places = [place for place in causes if place.condition == cause.condition]
    differs = any(_against_weights(place, "").is_conclusion for place in places)
    return bool(cause.own_texts) and _against_weights(cause, "").is_judged and not differs


def _against_weights(place: AcceptanceCauseRow, figure: str) -> Statement:
    served = None if place.served is None else place.served.estimate
    difference = _difference(served, place.weights)
    return Statement.ordered("engine", difference, limit=0.0, subject=place, figure=figure)


def _difference(served: float | None, weights: Interval | None) -> Interval:
    if served is None or weights is None:
        return Interval()
    return Interval(served - weights.estimate, served - weights.high, served - weights.low)


def _cause(cause: AcceptanceCauseRow, typed: AcceptanceCauseRow, family: int) -> Statement:
    """How acceptance differs under a condition, by answers of its own or by another reading of the same ones."""
    share = Interval()
    if cause.relative is not None:
        share = widened(cause.relative, family)
    elif cause.weights is not None and typed.weights is not None:
        share = cause.weights.scaled(1 / typed.weights.estimate)
    why = cause.why or ""
    return Statement.ordered("cause", share, why, subject=cause, family=family, figure=_TOKENS)


def _card(row: AcceptanceRow) -> Statement | None:
    promised = row.card_tokens_per_iteration
    if promised is None:
        return None
    tokens = row.tokens_per_iteration or Interval()
    return Statement.ordered("card", tokens, limit=promised, subject=row, figure=_TOKENS)


def _guess(rows: Sequence[AcceptanceRow]) -> Statement | None:
    for row in rows:
        if row.relative_to_guess is not None:
            return Statement.ordered("guess", row.relative_to_guess, subject=row, figure=_TOKENS)
    return None
