"""The rows of `acceptance`: one per number of draft tokens K, per text, and per measured condition."""

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
        "tokens that iterations decide, without the first of each text", "tokens"
    )
    is_in_question: bool | None = figure(
        "whether the run is about this K: that of an engine elsewhere, of a card, or of the settings"
    )
    tokens_per_iteration: Interval | None = figure(
        "expected tokens per iteration, over all of them",
        "tokens",
    )
    marginal_acceptance_by_position: list[float | None] | None = figure(
        "expected share of the iterations that proposed something in which the draft token at each position is"
        " accepted"
    )
    log_probability: MaybeFloat = figure(
        "mean log-probability of the texts' tokens under the target, of those it can draw", "nats"
    )
    own_log_probability: MaybeFloat = figure(
        "the same, expected of texts that the target draws", "nats"
    )
    likelihood_z: MaybeFloat = figure(
        "difference of the two in standard deviations: far from 0 the texts are not the target's"
    )
    impossible_share: MaybeFloat = figure("share of the tokens that the target cannot draw")

    repeated_share: MaybeFloat = figure(
        "share of the texts' tokens that end four tokens which the text had before"
    )
    fits: MaybeText = figure("what of the draft's stored files fits the model's, and what does not")
    card_tokens_per_iteration: MaybeFloat = figure(
        "what the draft's card promises, of the K that it is compared at", "tokens"
    )
    served_tokens_per_iteration: MaybeFloat = figure(
        "by the engine's own counts, of the K that it drafts with", "tokens"
    )
    arrived_tokens_per_iteration: MaybeFloat = figure(
        "by what arrived together; empty where nothing did", "tokens"
    )
    weights_tokens_per_iteration: Interval | None = figure(
        "expected by the weights of the same texts; an engine with these weights is outside of the interval in two"
        " runs of a million",
        "tokens",
    )
    engine_unknown: MaybeText = figure(
        "why it is not known whether the engine accepts what the weights predict"
    )


def row_in_question(rows: Sequence[AcceptanceRow]) -> AcceptanceRow:
    """The row of the K that the run is about; in a file that does not mark it, the row of the largest K."""
    return max(rows, key=lambda row: (bool(row.is_in_question), row.num_draft_tokens or 0))


@dataclass(frozen=True, kw_only=True)
class AcceptanceTextRow(Row):
    """`acceptance_texts.csv`: one row per text, or turn of a conversation; `prompts=` reads texts."""

    kind = "acceptance_texts"
    recognised_by = ("prompt_index", "token_ids", "iterations_by_num_draft_tokens")

    prompt_index: MaybeInt = figure(
        "place of the prompt in its set; of equal prompts that of the first"
    )
    category: MaybeText = figure("category of the prompt, where the set has them")
    turn: MaybeInt = figure("of a conversation, from 1; empty for texts that are none")
    context: MaybeInt = figure("tokens before the text", "tokens")
    prompt: MaybeText = figure("the prompt; the user's last message of a chat; empty for turns")
    completion: MaybeText = figure("the text")
    token_ids: list[int] | None = figure("its tokens; empty where only a server knows them")
    num_tokens: MaybeInt = figure("tokens that iterations decide, without the first", "tokens")
    iterations_by_num_draft_tokens: list[float] | None = figure(
        "expected iterations for K from 1 on"
    )

    def iterations(self, k: int) -> float:
        """Expected iterations at this K, which must be one of those that were computed."""
        return (self.iterations_by_num_draft_tokens or [])[k - 1]


@dataclass(frozen=True, kw_only=True)
class AcceptanceCauseRow(Row):
    """`acceptance_causes.csv`: per condition, as typed or another, a row for each draft position and one for all."""

    kind = "acceptance_causes"
    recognised_by = ("cause", "condition", "position")

    cause: MaybeText = figure("what differs from the run as typed, by its name in `causes`")
    condition: MaybeText = figure("the same in words; empty as typed")
    is_asked: bool | None = figure("whether the condition got answers of its own")
    position: MaybeInt = figure("of the draft token, from 1; empty for all of them")
    served: Interval | None = figure(
        "tokens per iteration by the engine's counts; at a position accepted / tested draft tokens"
    )
    weights: Interval | None = figure("the same by the weights")
    relative: Interval | None = figure(
        "tokens per iteration over those of the same prompts as typed, of answers of its own; at a position the share"
        " of its tested draft tokens"
    )
    own_texts: bool | None = figure("whether the texts are as likely as the model's own, read so")
    why: MaybeText = figure("why it was not measured")
