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
            this process is tested, or if its weights were not read.
        texts: whether the texts are the model's own; None if the model did not read them.
        positions: the engine compared with its weights at each draft position; [] if its weights were not read.
        card: the draft compared with its card; None if there is no card.
        causes: one statement for each condition other than the run as typed, about all draft tokens. If the condition
            could not be measured, the statement has the reason (`why`). The comparison of two commands has a statement
            for each position, too.
        explaining: those of `causes` in which the same answers, read under the condition, are as the weights predict;
            [] if the run as typed has no difference to explain.
        differing: the conditions whose new answers have more draft tokens accepted; and, if two commands are compared,
            the statement about all draft tokens and every conclusion about a position.
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
        below = (found.subject.position for found in self.positions if found.relation == "below")
        return next(below, None)

    @property
    def is_in_doubt(self) -> bool:
        """Whether the tested engine differs from its weights' prediction, or this could not be judged."""
        return self.engine is not None and not self.engine.is_judged_open


def finding_of(row: AcceptanceRow, conditions: Sequence[AcceptanceCauseRow]) -> AcceptanceFinding:
    """The conclusions from the rows of a run.

    Args:
        row: the row of the K that the page is about.
        conditions: the rows of all conditions, including the condition as typed.
    """
    typed = [condition for condition in conditions if condition.cause is None]
    # The rows of other conditions that get a statement (`AcceptanceFinding.causes`).
    others = [
        condition
        for condition in conditions
        if condition.cause == "command" or (condition.cause and condition.position is None)
    ]
    engine, texts, card = engine_statement(row), texts_statement(row), _card(row)
    positions = [
        against_weights(cause)
        for cause in typed
        if engine and cause.position is not None and cause.weights is not None
    ]
    statements = [_cause(cause, typed, len(others)) for cause in others]
    explaining = []
    differing = []
    for statement in statements:
        cause = statement.subject
        if not cause.is_asked:
            # The same answers were read as if the engine had drafted them under this condition.
            if has_difference(engine, texts) and explains(cause, conditions):
                explaining.append(statement)
        elif cause.cause == "command":
            # The user asked how two commands compare, so the figure of all draft tokens is stated whatever it shows.
            if cause.position is None or statement.is_conclusion:
                differing.append(statement)
        elif statement.relation == "above":
            differing.append(statement)
    is_little = row.acceptance_rate is not None and row.acceptance_rate < LITTLE
    is_little |= card is not None and card.relation == "below"
    return AcceptanceFinding(
        typed, engine, texts, positions, card, statements, explaining, differing, is_little
    )


def has_difference(engine: Statement | None, texts: Statement | None) -> bool:
    """Whether the run as typed has a difference that a condition may explain: the engine differs from its weights'
    prediction, or the texts are not the model's own. False if this is unknown.
    """
    return any(found is not None and found.is_conclusion for found in (engine, texts))


def engine_statement(row: AcceptanceRow) -> Statement | None:
    """Whether an engine accepts as many draft tokens as its weights predict, judged by the figure that `believed`
    chooses; None if no engine outside of this process is tested, or if its weights were not read.
    """
    weights = row.weights_tokens_per_iteration
    if weights is None:
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
    every position that is known. Under this condition, the texts must also be as likely as the model's own texts.

    Args:
        cause: the condition's row about all draft tokens.
        causes: the rows of all conditions.
    """
    rows = [
        row for row in causes if row.condition == cause.condition and row.is_asked == cause.is_asked
    ]
    compared = [against_weights(row) for row in rows]
    differs = any(found.interval.is_known and not found.is_judged_open for found in compared)
    return bool(cause.own_texts) and against_weights(cause).is_judged_open and not differs


def against_weights(row: AcceptanceCauseRow) -> Statement:
    """The engine compared with its weights' prediction under a condition: over all draft tokens, or at the position of
    the row.
    """
    served = None if row.served is None else row.served.estimate
    return _as_weights(served, row.weights, row, _figure(row))


def _as_weights(
    served: float | None, weights: Interval | None, subject: Any, figure: str, why: str = ""
) -> Statement:
    """Whether a figure of an engine equals the figure that its weights predict: above or below beyond
    `MOST_DEVIATIONS`, open with a reason beyond `_DOUBTFUL_DEVIATIONS`, otherwise open without one.

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
        bound = weights.high if moved > 0 else weights.low
        half_width = abs(bound - weights.estimate)
        # A bound of a rate that was cut at 0 or 1 does not show its standard deviation.
        is_known = half_width > 0 and bound not in (0.0, 1.0)
        deviations = MOST_DEVIATIONS * abs(moved) / half_width if is_known else 0.0
        if _DOUBTFUL_DEVIATIONS < deviations <= MOST_DEVIATIONS:
            why = why or f"{deviations:.1f} standard deviations apart; more texts decide"
    return Statement.ordered("engine", difference, why, limit=0.0, subject=subject, figure=figure)


def _figure(row: AcceptanceCauseRow) -> str:
    return _TOKENS if row.position is None else f"acceptance at position {row.position}"


def excluded(engine: Statement, weights: Interval) -> str:
    """The largest gain or loss that the statement's interval does not exclude, in words: `no difference above 6 %`."""
    largest = max(-engine.interval.low, engine.interval.high)
    return f"no difference above {percent(largest / weights.estimate)}"


def _cause(
    cause: AcceptanceCauseRow, typed: Sequence[AcceptanceCauseRow], family: int
) -> Statement:
    """How acceptance changes under a condition: measured by new answers, or predicted for the same answers read under
    it. The interval is that of the figure under the condition divided by the figure as typed.

    Args:
        typed: the rows about the run as typed; the first is about all draft tokens.
        family: the number of these statements that are seen together.
    """
    share = Interval()
    if cause.relative is not None:
        share = widened(cause.relative, family)
    elif cause.weights is not None and typed and typed[0].weights is not None:
        # Not widened for `family`: the bounds of predictions are at `MOST_DEVIATIONS`.
        share = cause.weights.scaled(1 / typed[0].weights.estimate)
    why = cause.why or ""
    return Statement.ordered(
        "cause", share, why, subject=cause, family=family, figure=_figure(cause)
    )


def _card(row: AcceptanceRow) -> Statement | None:
    """The tokens per iteration compared with those that the draft's card promises; None if there is no card."""
    promised = row.card_tokens_per_iteration
    if promised is None:
        return None
    tokens = row.tokens_per_iteration or Interval()
    return Statement.ordered("card", tokens, limit=promised, subject=row, figure=_TOKENS)


def engine_in_words(engine: Statement) -> str:
    """The statement about an engine in words, with its figures.

    For example, `as the weights predict, no difference above 9 %: the engine yields 3.96 tokens per iteration at K=4,
    the weights predict 4.05 (3.80 to 4.31)`. The 9 % are (4.31 - 3.96) / 4.05.
    """
    row = engine.subject
    texts = texts_statement(row)
    if texts is not None and texts.is_conclusion:
        return "the texts are not the model's, so the weights predict nothing about the engine"
    weights = row.weights_tokens_per_iteration or Interval()
    words = engine.words
    figures = row.engine_unknown
    if figures is None:
        figures = f"the engine yields {believed(row):.2f} tokens per iteration at K={row.num_draft_tokens}"
    if engine.is_judged_open:
        words += f", {excluded(engine, weights)}"
    elif engine.why and row.engine_unknown is None:
        words += f" ({engine.why})"
    return f"{words}: {figures}, the weights predict {weights:.2f}"
