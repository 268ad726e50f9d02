"""How far greedy texts of the arms agree, and the share of tokens that come after the end of their text."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.config.amounts import length_in_common
from harness.engines.tokenizer import TextTokenizer
from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.row import Ratio, pooled
from harness.results.schema import MaybeFloat, MaybeInt

if TYPE_CHECKING:
    from harness.engines.door.reference import Reference
    from harness.engines.protocol import Answered
    from harness.engines.requests import RequestRecord
    from harness.engines.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TextFigures(Group):
    """How far greedy texts of the speculative arm agree with the regular one's."""

    identical_prompts: MaybeInt = pooled("smallest", "greedy texts equal to the regular arm's")
    differing_prompts: MaybeInt = pooled(
        "largest",
        "greedy texts that part from the regular arm's; turns after such a text are in neither number",
    )
    tokens_per_difference: MaybeFloat = pooled(
        Ratio(of="num_tokens"),
        "of servers: greedy tokens per difference that rounding does not explain",
        "tokens",
    )
    margin_over_rounding: MaybeFloat = pooled(
        "largest",
        "largest logit margin at a difference between greedy texts, over what rounding explains",
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        if not arm.divergences:
            return cls()
        num_alike = 0
        num_differences = 0
        excesses = []
        for request in arm.answered:
            divergence = arm.divergences.get(request.index)
            if divergence is not None:
                num_alike += divergence.position
                num_differences += divergence.excess > 1
                if divergence.logit_margin is not None:
                    excesses.append(divergence.excess)
            elif request.index in arm.divergences:
                num_alike += request.num_tokens
        is_counted = arm.was_sent and num_differences > 0
        num_identical = list(arm.divergences.values()).count(None)
        return cls(
            identical_prompts=num_identical,
            differing_prompts=len(arm.divergences) - num_identical,
            tokens_per_difference=num_alike / num_differences if is_counted else None,
            margin_over_rounding=max(excesses, default=None),
        )


def compare_texts(
    run: MeasuredRun,
    reference: Reference | None,
    tokenizer: Tokenizer,
    answers: Mapping[str, Answered],
) -> None:
    """Note where greedy texts of the speculative arm part from the regular ones.

    A turn before which the arms' answers differ already is not compared.

    Args:
        reference: the weights' own probabilities; None where an engine has none here.
        answers: of both arms to a question, by the name of the arm.
    """
    from harness.engines.divergence import first_divergence

    decoding = run.settings.decoding
    if decoding.temperature > 0 or decoding.synthetic_acceptance is not None:
        return
    divergences = run.arms["speculative"].divergences
    regular, speculative = (answers[name] for name in run.arms)
    pairs = zip(regular.with_prompts, speculative.with_prompts, strict=True)
    for (prompt, request), (other_prompt, other) in pairs:
        if not (request.answered and other.answered and prompt == other_prompt):
            continue
        texts = [request.token_ids, other.token_ids]
        if request.from_text != other.from_text:
            # The tokens that were drawn need not be those of their text.
            encode = functools.partial(tokenizer.encode, add_special_tokens=False)
            texts = [encode(request.text), encode(other.text)]
        divergence = first_divergence(reference, prompt, *texts)
        if divergence is not None and isinstance(tokenizer, TextTokenizer):
            divergence = replace(divergence, position=_num_alike(request, other))
        divergences[request.index] = divergence


def _num_alike(request: RequestRecord, other: RequestRecord) -> int:
    """The tokens that two answers have in common, without a tokenizer: by the ids that the servers sent; without them
    about as many as a text of that length has in the first answer.
    """
    if all(len(answer.shown_ids) == answer.num_tokens for answer in (request, other)):
        return length_in_common(request.shown_ids, other.shown_ids)
    text = request.text.encode()
    num_bytes = length_in_common(text, other.text.encode())
    return num_bytes * request.num_tokens // max(len(text), 1)


@dataclass(frozen=True, kw_only=True)
class EndFigures(Group):
    """How much of an arm's texts comes after their ends.

    No reader sees that, and it may be easier or harder to draft.
    """

    share_after_end: MaybeFloat = pooled(
        Ratio(over="num_tokens"),
        "share of the tokens after the end of their text, with `ignore_eos`",
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        # Text that a server sent does not have the token that ends it.
        answers = [request.token_ids for request in arm.answered if not request.from_text]
        num_tokens = sum(map(len, answers))
        if not run.end_tokens or not num_tokens:
            return cls()
        num_within = sum(_text_length(token_ids, run.end_tokens) for token_ids in answers)
        return cls(share_after_end=1 - num_within / num_tokens)


def _text_length(token_ids: Sequence[int], end_tokens: Collection[int]) -> int:
    """Number of tokens up to the first that ends the text, this one included; all without one."""
    for position, token in enumerate(token_ids):
        if token in end_tokens:
            return position + 1
    return len(token_ids)
