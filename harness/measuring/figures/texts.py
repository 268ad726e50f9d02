"""Figures of texts: how far the greedy texts of both arms agree, and the share of tokens after the end of a text."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.config.amounts import length_in_common
from harness.engines.divergence import Divergence, first_divergence
from harness.engines.door.reading import WeightsReference
from harness.engines.protocol import Answered
from harness.engines.requests import RequestRecord
from harness.engines.tokenizer import TextTokenizer, Tokenizer
from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.row import pooled
from harness.results.schema import MaybeFloat, MaybeInt


@dataclass(frozen=True, kw_only=True)
class TextFigures(Group):
    """How far the speculative arm's greedy texts agree with the regular arm's."""

    identical_prompts: MaybeInt = pooled("smallest", "greedy texts equal to the regular arm's")
    differing_prompts: MaybeInt = pooled(
        "largest",
        "greedy texts that diverge from the regular arm's; later turns after such a text count in neither number",
    )
    tokens_per_difference: MaybeFloat = pooled(
        "mean",
        "for single requests, not batches: greedy tokens / differences that rounding is not known to explain",
        "tokens",
    )
    margin_over_rounding: MaybeFloat = pooled(
        "largest",
        "logit margin / margin that rounding explains, at a difference between greedy texts: the largest",
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        compared = [row for row in run.rows_of(arm) if row.compared]
        if not compared:
            return cls()
        parted = [row for row in compared if row.divergence_position is not None]
        # The tokens before each text's divergence; all tokens of a text that does not diverge.
        num_alike = 0
        for row in compared:
            position = row.divergence_position
            num_alike += (row.num_tokens or 0) if position is None else position
        # Logit margin / margin that rounding explains; infinite if it is not known (`LatencyPromptRow.excess`).
        excesses = [row.excess for row in parted]
        num_unexplained = sum(excess > 1 for excess in excesses)
        is_counted = arm.was_sent and num_unexplained > 0
        return cls(
            identical_prompts=len(compared) - len(parted),
            differing_prompts=len(parted),
            tokens_per_difference=num_alike / num_unexplained if is_counted else None,
            margin_over_rounding=max(filter(math.isfinite, excesses), default=None),
        )


def compare_texts(
    run: MeasuredRun,
    reference: WeightsReference | None,
    tokenizer: Tokenizer,
    regular: Answered,
    speculative: Answered,
) -> None:
    """Record where greedy texts of the speculative arm diverge from the regular ones, in the speculative arm's
    `divergences`.

    Nothing is compared if texts are sampled or acceptance is synthetic. Two answers are compared only if both arms gave
    one. A later turn of a conversation is compared only if its earlier answers were equal, so that both arms had the
    same prompt.

    Args:
        reference: gives the model's own logits, for the margins; None if the engine has no weights in this process.
        regular: the regular arm's answers to a question.
        speculative: the speculative arm's answers to the same question.
    """
    decoding = run.settings.decoding
    if decoding.temperature > 0 or decoding.synthetic_acceptance is not None:
        return
    divergences = run.arms["speculative"].divergences
    pairs = zip(regular.with_prompts, speculative.with_prompts, strict=True)
    for (prompt, regular_request), (speculative_prompt, speculative_request) in pairs:
        requests = regular_request, speculative_request
        if prompt != speculative_prompt or not all(request.answered for request in requests):
            continue
        divergences[regular_request.index] = answers_divergence(
            reference, tokenizer, prompt, *requests
        )


def answers_divergence(
    reference: WeightsReference | None,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    regular: RequestRecord,
    speculative: RequestRecord,
) -> Divergence | None:
    """Return where two answers to a prompt diverge, as `first_divergence` does; None if they have the same
    tokens.
    """
    texts = [regular.token_ids, speculative.token_ids]
    if regular.from_text != speculative.from_text:
        # If only one arm's tokens were read from its text, both texts are encoded, because encoding a text need not
        # give the tokens that were drawn.
        encode = functools.partial(tokenizer.encode, add_special_tokens=False)
        texts = [encode(regular.text), encode(speculative.text)]
    divergence = first_divergence(reference, prompt, *texts)
    # A `TextTokenizer` has made-up ids for pieces of text, so the position is counted again, in tokens.
    if divergence is not None and isinstance(tokenizer, TextTokenizer):
        divergence = replace(divergence, position=_num_leading(regular, speculative))
    return divergence


def _num_leading(regular: RequestRecord, speculative: RequestRecord) -> int:
    """The number of leading tokens that two answers have in common, with a `TextTokenizer`: counted if the servers
    sent all ids, otherwise estimated from the common beginning of the texts.
    """
    if all(len(answer.shown_ids) == answer.num_tokens for answer in (regular, speculative)):
        return length_in_common(regular.shown_ids, speculative.shown_ids)
    text = regular.text.encode()
    num_bytes = length_in_common(text, speculative.text.encode())
    return num_bytes * regular.num_tokens // max(len(text), 1)


@dataclass(frozen=True, kw_only=True)
class EndFigures(Group):
    """How many of an arm's tokens come after the end of their text.

    A user would never see these tokens, and they may be easier or harder to draft than other tokens.
    """

    share_after_end: MaybeFloat = pooled(
        "mean",
        "share of the tokens after the end of their text, with `ignore_eos`",
        per="num_tokens",
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        # Answers whose tokens were read from their text are left out, because such a text does not include the end
        # token.
        answers = [request.token_ids for request in arm.answered if not request.from_text]
        num_tokens = sum(map(len, answers))
        if not run.end_tokens or not num_tokens:
            return cls()
        num_within = 0
        for token_ids in answers:
            ends = (number for number, token in enumerate(token_ids, 1) if token in run.end_tokens)
            # Up to and including the first end token; all tokens if there is none.
            num_within += next(ends, len(token_ids))
        return cls(share_after_end=1 - num_within / num_tokens)
