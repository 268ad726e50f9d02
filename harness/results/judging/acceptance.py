"""Compares the draft tokens that an engine accepts with those that its weights predict, and with the draft's card; and
judges which causes explain low acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.amounts import percent
from harness.results.judging.statement import Statement
from harness.results.rows.acceptance import AcceptanceCauseRow, AcceptanceRow
from harness.results.statistics.interval import Interval
from harness.results.statistics.multiplicity import widened

# The log-probability of a model's own texts, and the number of iterations, may differ from the expected value by this
# many standard deviations. By chance alone, they differ by more in two of a million runs.
MOST_DEVIATIONS = 4.75
# Between this many deviations and `MOST_DEVIATIONS`, nothing is concluded about an engine: by chance alone, three
# deviations are exceeded in one of 370 runs.
_DOUBTFUL_DEVIATIONS = 3.0
# Rounding and ties explain at most this share of tokens with probability 0 under the model.
MOST_IMPOSSIBLE = 0.005
# If a smaller share of the draft tokens is accepted, acceptance is called low, whatever the draft's card promises.
LITTLE = 0.2

_TOKENS = "tokens per iteration"


@dataclass(frozen=True)
class AcceptanceFinding:
    """The conclusions about a run of `acceptance`, in the order in which a reader meets them.

    Attributes:
        typed: the rows about the run as typed: one for all draft tokens, and one for each position.
        engine: whether the engine accepts as many draft tokens as its weights predict; None if no engine outside of
            this process is tested.
        texts: whether the texts are the model's own; None if the model did not read them.
        positions: the engine compared with its weights at each draft position.
        card: the draft compared with its card; None if there is no card.
        causes: one statement for each condition that was measured.
        explaining: statements about other conditions under which the same answers are as the weights predict.
        differing: statements about conditions under which new answers have more draft tokens accepted, and about the
            comparison of two commands.
        is_little: whether less than 20 % of the draft tokens is accepted, or significantly less than the card promises.
    """

    typed: Sequence[AcceptanceCauseRow]
    engine: Statement | None
    texts: Statement | None
    positions: Sequence[Statement]
    card: Statement | None
    causes: Sequence[Statement]
    explaining: Sequence[Statement]
    differing: Sequence[Statement]
    is_little: bool

    @property
    def statements(self) -> list[Statement]:
        single = (self.engine, self.texts, self.card)
        return [*filter(None, single), *self.positions, *self.causes]

    @property
    def first_below(self) -> int | None:
        """The first draft position, from 1, at which the engine accepts less than its weights predict; None if there is
        none.
        """
        below = (row.subject.position for row in self.positions if row.relation == "below")
        return next(below, None)

    @property
    def is_in_doubt(self) -> bool:
        """Whether the tested engine differs from its weights' prediction, or this could not be judged."""
        return self.engine is not None and not self.engine.is_judged_open


def finding_of(row: AcceptanceRow, causes: Sequence[AcceptanceCauseRow]) -> AcceptanceFinding:
    """The conclusions from the rows of a run.

    Args:
        row: the row of the K that the page is about.
        causes: the rows of all conditions, including the condition as typed.
    """
    typed = [cause for cause in causes if cause.cause is None]
    # Other conditions have one statement each, about all draft tokens. The comparison of two commands (`command`) also
    # has one for each position.
    others = [
        cause
        for cause in causes
        if cause.cause == "command" or (cause.cause and cause.position is None)
    ]
    engine, texts, card = engine_statement(row), texts_statement(row), _card(row)
    positions = [
        against_weights(place)
        for place in typed
        if place.position is not None and place.weights is not None
    ]
    statements = [_cause(cause, typed, len(others)) for cause in others]
    # A condition that reads the same answers differently is a cause if the engine differs from its weights' prediction
    # as typed, but agrees with it under that condition. A condition with new answers is a cause if more is accepted.
    is_as_typed = not any(found and found.is_conclusion for found in (engine, texts))
    explaining = []
    differing = []
    for statement in statements:
        cause = statement.subject
        if not cause.is_asked:
            if not is_as_typed and explains(cause, causes):
                explaining.append(statement)
        elif statement.relation == "above" or (
            cause.cause == "command" and (statement.is_conclusion or cause.position is None)
        ):
            differing.append(statement)
    is_little = row.acceptance_rate is not None and row.acceptance_rate < LITTLE
    is_little |= card is not None and card.relation == "below"
    return AcceptanceFinding(
        typed, engine, texts, positions, card, statements, explaining, differing, is_little
    )


def engine_statement(row: AcceptanceRow) -> Statement | None:
    """Whether an engine accepts as many draft tokens as its weights predict, judged by the figure that `believed`
    chooses; None if no engine outside of this process is tested.
    """
    weights = row.weights_tokens_per_iteration
    if weights is None and row.engine_unknown is None:
        return None
    return _as_weights(believed(row), weights, row, _TOKENS, row.engine_unknown or "")


def believed(row: AcceptanceRow) -> float | None:
    """The tokens per iteration of an engine: by its own counts, or by the tokens that arrived together.

    Its counts are used unless they are not known, or they contradict the weights' prediction while the arrivals agree
    with it. None if neither counts nor arrivals are known.
    """
    served, arrived = row.served_tokens_per_iteration, row.arrived_tokens_per_iteration
    weights = row.weights_tokens_per_iteration or Interval()
    if served is None or arrived is None or not weights.has_bounds:
        return arrived if served is None else served
    is_contradicted = weights.excludes(served) and not weights.excludes(arrived)
    return arrived if is_contradicted else served


def texts_statement(row: AcceptanceRow) -> Statement | None:
    """Whether the texts are as likely as the model's own texts; None if the model did not compute their
    probabilities.
    """
    if row.impossible_share is None:
        return None
    z = row.likelihood_z or 0.0
    # Too many tokens that the model cannot draw: the texts are not its own, whatever the likelihood of the others. With
    # this z, the interval below excludes 0.
    if row.impossible_share > MOST_IMPOSSIBLE:
        z = min(z, -2 * MOST_DEVIATIONS)
    interval = Interval(z, z - MOST_DEVIATIONS, z + MOST_DEVIATIONS)
    figure = "log-probability in standard deviations"
    return Statement.ordered("texts", interval, limit=0.0, subject=row, figure=figure)


def explains(cause: AcceptanceCauseRow, causes: Sequence[AcceptanceCauseRow]) -> bool:
    """Whether, under this condition, the same answers agree with the weights' prediction: over all draft tokens, and at
    every position that is known. The texts must also be as likely as the model's own texts.
    """
    places = [place for place in causes if place.condition == cause.condition]
    compared = [against_weights(place) for place in places]
    differs = any(place.interval.is_known and not place.is_judged_open for place in compared)
    return bool(cause.own_texts) and against_weights(cause).is_judged_open and not differs


def against_weights(place: AcceptanceCauseRow) -> Statement:
    """The engine compared with its weights' prediction under a condition: over all draft tokens, or at the position of
    the row.
    """
    figure = _TOKENS if place.position is None else f"acceptance at position {place.position}"
    served = None if place.served is None else place.served.estimate
    return _as_weights(served, place.weights, place, figure)


def _as_weights(
    served: float | None, weights: Interval | None, subject: Any, figure: str, why: str = ""
) -> Statement:
    """Whether a figure of an engine equals the figure that its weights predict, to within `MOST_DEVIATIONS`.

    Args:
        served: the engine's figure; None if it is not known.
        weights: the predicted figure, with bounds at `MOST_DEVIATIONS`; None if it is not known.
        why: a reason why nothing can be concluded; empty if there is none.
    """
    difference = Interval()
    if served is not None and weights is not None:
        # The bounds change places, because the weights' figure is subtracted.
        moved = served - weights.estimate
        difference = Interval(moved, served - weights.high, served - weights.low)
        limit = weights.high - weights.estimate if moved > 0 else weights.estimate - weights.low
        deviations = MOST_DEVIATIONS * abs(moved) / limit if limit else 0.0
        if _DOUBTFUL_DEVIATIONS < deviations <= MOST_DEVIATIONS:
            why = why or f"{deviations:.1f} standard deviations apart; more texts decide"
    return Statement.ordered("engine", difference, why, limit=0.0, subject=subject, figure=figure)


def excluded(engine: Statement, weights: Interval | None) -> str:
    """The largest gain or loss that the statement's interval does not exclude, in words: `no difference above 6 %`."""
    expected = (weights or Interval()).estimate
    largest = max(-engine.interval.low, engine.interval.high)
    return f"no difference above {percent(largest / expected)}"


def _cause(
    cause: AcceptanceCauseRow, typed: Sequence[AcceptanceCauseRow], family: int
) -> Statement:
    """How acceptance changes under a condition: measured by new answers, or predicted for the same answers read under
    it. The interval is that of the figure under the condition divided by the figure as typed.

    Args:
        typed: the rows about the run as typed; the first is about all draft tokens.
        family: the number of conditions that are seen together.
    """
    share = Interval()
    if cause.relative is not None:
        share = widened(cause.relative, family)
    elif cause.weights is not None and typed and typed[0].weights is not None:
        share = cause.weights.scaled(1 / typed[0].weights.estimate)
    why = cause.why or ""
    return Statement.ordered("cause", share, why, subject=cause, family=family, figure=_TOKENS)


def _card(row: AcceptanceRow) -> Statement | None:
    """The tokens per iteration compared with those that the draft's card promises; None if there is no card."""
    promised = row.card_tokens_per_iteration
    if promised is None:
        return None
    tokens = row.tokens_per_iteration or Interval()
    return Statement.ordered("card", tokens, limit=promised, subject=row, figure=_TOKENS)


def engine_in_words(engine: Statement) -> str:
    """The statement about an engine in words, with its figures.

    For example, `as the weights predict, no difference above 8 %: the engine decides 3.96 tokens per iteration at K=4,
    the weights predict 4.05 (3.80 to 4.31)`.
    """
    row = engine.subject
    texts = texts_statement(row)
    if texts is not None and texts.is_conclusion:
        return "the texts are not the model's, so the weights predict nothing about the engine"
    weights = row.weights_tokens_per_iteration or Interval()
    words = engine.words
    figures = row.engine_unknown
    if figures is None:
        figures = f"the engine decides {believed(row):.2f} tokens per iteration at K={row.num_draft_tokens}"
    if engine.is_judged_open:
        words += f", {excluded(engine, weights)}"
    elif engine.why and row.engine_unknown is None:
        words += f" ({engine.why})"
    return f"{words}: {figures}, the weights predict {weights:.2f}"
