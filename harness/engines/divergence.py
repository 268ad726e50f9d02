"""Where two greedy texts part, and whether rounding explains it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from harness.config.errors import RunError
from harness.engines.protocol import Reference

# A character whose bytes are not complete.
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# Likeliest tokens among which the one is looked for that wrote a text.
_MOST_TRIED = 1000


@dataclass(frozen=True)
class Divergence:
    """The first position at which two continuations of a prompt differ.

    Attributes:
        expected, actual: the regular arm's token there, and the other's.
        logit_margin: logit of `expected` minus logit of `actual`, after prompt and common prefix.
            A margin within the rounding of the model means that the two tokens tied.
        logit_tolerance: the largest margin there that rounding explains, as measured.
    """

    position: int
    expected: int
    actual: int
    logit_margin: float | None = None
    logit_tolerance: float | None = None

    @property
    def excess(self) -> float:
        """The margin in tolerances: rounding explains one at most. Infinite where the margin is not known."""
        if self.logit_margin is None or self.logit_tolerance is None:
            return math.inf
        return abs(self.logit_margin) / self.logit_tolerance


def first_divergence(
    reference: Reference | None,
    prompt: Sequence[int],
    expected: Sequence[int],
    actual: Sequence[int],
) -> Divergence | None:
    """Compare two continuations of `prompt`; None where they are the same tokens. Starts a new batch on the target.

    One that ends earlier parts there: its token is then -1, and no margin is known.

    Raises:
        RunError: a token is not in the reference's vocabulary.
    """
    for position, (wanted, got) in enumerate(itertools.zip_longest(expected, actual, fillvalue=-1)):
        if wanted != got:
            if reference is None or -1 in (wanted, got):
                return Divergence(position, wanted, got)
            check_known([*expected[: position + 1], got], reference.vocabulary_size)
            before = [*prompt, *expected[:position]]
            return _with_margin(reference, before, position, wanted, got)
    return None


def _with_margin(
    reference: Reference, before: Sequence[int], position: int, expected: int, actual: int
) -> Divergence:
    """Measure how far apart two tokens are after those `before` them."""
    margin = reference.margin(before, expected, actual)
    return Divergence(
        position,
        expected=expected,
        actual=actual,
        logit_margin=margin.value,
        logit_tolerance=margin.tolerance,
    )


class _Written:
    """The tokens that follow a prompt, and their text; a part of a character is no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        self._prompt = list(prompt)
        self._num_before = len(self._decoded([]))

    def text_with(self, *tokens: int) -> str:
        return self._decoded([*self.tokens, *tokens])[self._num_before :].rstrip(_BROKEN)

    def _decoded(self, tokens: Sequence[int]) -> str:
        ids = [*self._prompt, *tokens]
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(ids, **options))


def text_divergence(
    reference: Reference,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    text: str,
    num_tokens: int,
) -> Divergence | None:
    """Compare a text, whose tokens are not known, with the greedy one of the reference; None where it begins alike.

    The reference's tokens are taken as long as they write the text. A text may end earlier than theirs.

    Args:
        num_tokens: the most that the text has.
    """
    written = _Written(tokenizer, prompt)
    special = set(tokenizer.all_special_ids)

    def begins_alike(token: int) -> bool:
        longer = written.text_with(token)
        return text.startswith(longer) or longer.startswith(text)

    while len(own := written.text_with()) < len(text):
        position = len(written.tokens)
        before = [*prompt, *written.tokens]
        if position == num_tokens:
            return Divergence(position, -1, -1)
        logits = reference.logits([before])[0]
        likeliest = int(logits.argmax())
        if begins_alike(likeliest):
            written.tokens.append(likeliest)
            continue
        tried = logits.topk(min(_MOST_TRIED, len(logits))).indices.tolist()
        others = [token for token in tried if token not in special and begins_alike(token)]
        # A part of a character begins every text: rather the likeliest token that adds to this one.
        other = max(others, key=lambda token: len(written.text_with(token)) > len(own), default=-1)
        # Behind its end a server may have gone on in another way.
        if other == -1 or not special.isdisjoint(written.tokens):
            return Divergence(position, likeliest, other)
        return _with_margin(reference, before, position, likeliest, other)
    return None


def check_known(tokens: Sequence[int], vocabulary_size: int) -> None:
    """Raises RunError for a token that the reference lacks: a server may serve another model."""
    if max(tokens) >= vocabulary_size:
        size = f"vocabulary of {vocabulary_size} tokens: is another model served?"
        raise RunError(f"token {max(tokens)} is not in the model's {size}")
