"""The rows of `acceptance`, in three files: one per number of draft tokens K; one per text; and, for each condition,
one per draft position and one for all positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.results.row import Row, figure, setting
from harness.results.schema import MaybeFloat, MaybeInt, MaybeText, PromptedRow
from harness.results.statistics.interval import Interval

TEXTS_FILE = "acceptance_texts.csv"
CAUSES_FILE = "acceptance_causes.csv"


@dataclass(frozen=True, kw_only=True)
class AcceptanceRow(PromptedRow):
    """`acceptance.csv`: one row per K."""

    kind = "acceptance"
    filled_if_measured = ("tokens_per_iteration",)
    recognised_by = ("tokens_per_iteration", "text_source")

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    text_source: MaybeText = figure(
        "`given` with the prompts, `written` by the target now, or `served` by another engine"
    )
    num_texts: MaybeInt = figure("texts")
    num_tokens: MaybeInt = figure(
        "tokens that iterations decide: all but the first of each text", "tokens"
    )
    is_in_question: bool | None = figure(
        "whether the run is about this K (the K of a tested engine, of a card, or of the settings)"
    )
    tokens_per_iteration: Interval | None = figure(
        "tokens per iteration, expected by the weights or, without weights, counted by the server",
        "tokens",
    )
    marginal_acceptance_by_position: list[float | None] | None = figure(
        "for each position: share of the drafting iterations that accept the draft token there, expected or counted"
    )
    log_probability: MaybeFloat = figure(
        "mean log-probability, under the target, of the texts' tokens that it can draw", "nats"
    )
    own_log_probability: MaybeFloat = figure(
        "expected value of `log_probability` for texts that the target draws", "nats"
    )
    likelihood_z: MaybeFloat = figure(
        "`log_probability` minus `own_log_probability`, in standard deviations; far from 0, the texts are not the"
        " target's"
    )
    impossible_share: MaybeFloat = figure("share of the texts' tokens that the target cannot draw")

    repeated_share: MaybeFloat = figure(
        "share of the texts' tokens that complete a sequence of four tokens that occurred in the text before"
    )
    card_tokens_per_iteration: MaybeFloat = figure(
        "tokens per iteration that the draft's card promises, in the row of the K with which it is compared",
        "tokens",
    )
    served_tokens_per_iteration: MaybeFloat = figure(
        "tokens per iteration by the engine's own counts, in the row of the engine's K", "tokens"
    )
    arrived_tokens_per_iteration: MaybeFloat = figure(
        "tokens per iteration, from the tokens that arrived together; empty if none did, or if the engine's own counts"
        " agree with the weights",
        "tokens",
    )
    weights_tokens_per_iteration: Interval | None = figure(
        "tokens per iteration that the weights predict for the same texts; an engine with these weights is outside of"
        " the interval in two of a million runs",
        "tokens",
    )
    engine_unknown: MaybeText = figure(
        "reason why it is not known whether the engine accepts as many draft tokens as the weights predict"
    )


def row_in_question(rows: Sequence[AcceptanceRow]) -> AcceptanceRow:
    """The row of the K that the run is about; if the file does not mark it, the row of the largest K."""
    return max(rows, key=lambda row: (bool(row.is_in_question), row.num_draft_tokens or 0))


@dataclass(frozen=True, kw_only=True)
class AcceptanceTextRow(Row):
    """`acceptance_texts.csv`: one row per text, or turn of a conversation; `prompts=` can read texts from it."""

    kind = "acceptance_texts"
    recognised_by = ("prompt_index", "token_ids", "iterations_by_num_draft_tokens")

    prompt_index: MaybeInt = figure(
        "place of the prompt in its set; of equal prompts, the place of the first"
    )
    category: MaybeText = figure("category of the prompt, if the set has categories")
    turn: MaybeInt = figure("turn of a conversation, from 1; empty for other texts")
    context: MaybeInt = figure("tokens before the text", "tokens")
    prompt: MaybeText = figure("the prompt; for a chat, its last message; empty for turns")
    completion: MaybeText = figure("the text")
    token_ids: list[int] | None = figure("token ids of the text; empty if only a server knows them")
    num_tokens: MaybeInt = figure("tokens that iterations decide: all but the first", "tokens")
    iterations_by_num_draft_tokens: list[float] | None = figure(
        "expected number of iterations for each K, from 1"
    )

    def iterations(self, k: int) -> float:
        """The expected number of iterations at this K, which must be one of the computed ones: from 1 to the length of
        `iterations_by_num_draft_tokens`.
        """
        return (self.iterations_by_num_draft_tokens or [])[k - 1]


@dataclass(frozen=True, kw_only=True)
class AcceptanceCauseRow(Row):
    """`acceptance_causes.csv`: for each condition (as typed, or another), one row per draft position, and one row for
    all.
    """

    kind = "acceptance_causes"
    recognised_by = ("cause", "condition", "position")

    cause: MaybeText = figure(
        "the difference from the run as typed, by its name in `causes`; empty for the run as typed"
    )
    condition: MaybeText = figure("the difference in words; empty for the run as typed")
    is_asked: bool | None = figure("whether new answers were requested under the condition")
    position: MaybeInt = figure("position of the draft token, from 1; empty for all draft tokens")
    served: Interval | None = figure(
        "tokens per iteration by the engine's counts; for a position, accepted / tested draft tokens"
    )
    weights: Interval | None = figure("the same figure as the weights predict it")
    relative: Interval | None = figure(
        "for new answers, the tokens per iteration (for a position, accepted / tested draft tokens) divided by those of"
        " the same prompts in the run as typed"
    )
    own_texts: bool | None = figure(
        "whether, under this condition, the texts are as likely as the model's own"
    )
    why: MaybeText = figure("reason why the condition was not measured")
