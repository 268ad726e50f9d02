"""Where two greedy texts part, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.config.amounts import length_in_common
from harness.config.errors import RunError
from harness.engines.detokenizer import BROKEN
from harness.engines.door.reference import Reference
from harness.engines.tokenizer import Tokenizer
from harness.results.statistics.arrays import Floats

# The likeliest tokens that are tried for the one that a text goes on with.
_MOST_TRIED = 1000
# Those whose margins are compared between two computations of logits.
_NUM_LIKELY = 8


@dataclass(frozen=True)
class Divergence:
    """The first position at which two continuations of a prompt differ.

    Attributes:
        logit_margin: logit of the regular arm's token there minus logit of the other's, after prompt and common
            prefix. A margin within the rounding of the model means that the two tokens tied.
        logit_tolerance: the largest margin there that rounding explains, as measured.
    """

    position: int
    logit_margin: float | None = None
    logit_tolerance: float | None = None

    @property
    def excess(self) -> float:
        """The margin over its tolerance: rounding explains 1 at most.

        Infinite without a margin: nothing shows that the tokens tied, nor that they did not.
        """
        if self.logit_margin is None or self.logit_tolerance is None:
            return math.inf
        return abs(self.logit_margin) / self.logit_tolerance


def first_divergence(
    reference: Reference | None,
    prompt: Sequence[int],
    expected: Sequence[int],
    actual: Sequence[int],
) -> Divergence | None:
    """The place where two continuations of a prompt part; None where they are the same tokens.

    Where one ends earlier, no margin is known.

    Args:
        reference: measures the margin with its target, where it begins a new batch: no arm may be
            decoding with that target then. None for no margins.

    Raises:
        RunError: a token is not in the reference's vocabulary.
    """
    position = length_in_common(expected, actual)
    if position == max(len(expected), len(actual)):
        return None
    if reference is None or position == min(len(expected), len(actual)):
        return Divergence(position)
    before = [*prompt, *expected[:position]]
    wanted, got = expected[position], actual[position]
    check_known([*expected[: position + 1], got], reference.vocabulary_size)
    return Divergence(position, *reference.margin(before, wanted, got))


def margin_deviation(logits: Floats, again: Floats) -> float:
    """The standard deviation of the margins between the likeliest tokens, from one computation of logits [n, V] to
    another one.
    """
    num_likely = min(_NUM_LIKELY, logits.shape[-1])
    likely = np.argpartition(logits, -num_likely)[:, -num_likely:]
    # Tokens that are not known have no finite logit.
    with np.errstate(invalid="ignore"):
        moved = np.take_along_axis(again, likely, -1) - np.take_along_axis(logits, likely, -1)
        pairs = moved[:, :, np.newaxis] - moved[:, np.newaxis, :]
    is_pair = np.isfinite(pairs) & ~np.eye(num_likely, dtype=bool)
    return float(np.sqrt(np.mean(pairs[is_pair] ** 2))) if is_pair.any() else 0.0


class _Written:
    """The reference's tokens behind a prompt so far, and their text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        self._prompt = list(prompt)
        self._num_before = len(self._shown(self._prompt))

    @property
    def after_prompt(self) -> list[int]:
        """The prompt and the tokens."""
        return [*self._prompt, *self.tokens]

    def ends_text(self, token: int) -> bool:
        """Whether a token has no text by itself, which is taken for the end of a text.

        Not every tokenizer lists all of these among its special tokens. Some drop a space at the beginning of a text,
        which a second token behind it shows.
        """
        return not self._shown([token, token])

    @property
    def has_ended(self) -> bool:
        return any(map(self.ends_text, self.tokens))

    def text_with(self, *tokens: int) -> str:
        """The text with these tokens added, without a last character that is incomplete."""
        text = self._shown([*self.after_prompt, *tokens])
        return text[self._num_before :].rstrip(BROKEN)

    def _shown(self, ids: list[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(ids, **options))


def text_divergence(
    reference: Reference,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    text: str,
    num_tokens: int,
) -> Divergence | None:
    """The place where a text, whose tokens are not known, parts from the reference's greedy text.

    The text is written with the reference's likeliest tokens as long as it goes on with them. At
    the first one that it does not go on with, the likeliest token that it does go on with is taken
    to be the server's. For the text "a dog" the reference writes "a", then " c", and
    of those that the text goes on with " d" is the likeliest. They part at position 1.

    A text that ends although the reference goes on parts from it there. None if it has `num_tokens`
    tokens, or if the reference ends there too.

    Args:
        num_tokens: the number of tokens that the server was asked for. If that many of the reference's
            do not write the whole text, they part there.
    """
    # Servers differ in whether they show a last character that is incomplete.
    text = text.rstrip(BROKEN)
    written = _Written(tokenizer, prompt)

    def begins_alike(token: int) -> bool:
        longer = written.text_with(token)
        # Some servers leave out space at the end of a text.
        return text.startswith(longer) or longer.rstrip() == text.rstrip()

    while len(so_far := written.text_with()) < len(text):
        position = len(written.tokens)
        before = written.after_prompt
        if position == num_tokens:
            return Divergence(position)
        logits = _logits_after(reference, before)
        likeliest = int(logits.argmax())
        if begins_alike(likeliest):
            written.tokens.append(likeliest)
            continue
        tried = np.argsort(-logits)[:_MOST_TRIED].tolist()
        others = [token for token in tried if begins_alike(token) and not written.ends_text(token)]
        # A token that is part of a character adds no text yet, so that any text may go on with it.
        adding = [token for token in others if len(written.text_with(token)) > len(so_far)]
        other = next(iter(adding or others), -1)
        # After the end of a text the server may continue in a way of its own.
        if other == -1 or written.has_ended:
            return Divergence(position)
        return Divergence(position, *reference.margin(before, likeliest, other))
    return _missing_text(reference, written, num_tokens)


def _missing_text(reference: Reference, written: _Written, num_tokens: int) -> Divergence | None:
    """The place where the reference adds more text within the number of tokens; None without one.

    Tokens may be left that add none: they are parts of a character, which the text need not show.
    """
    length = len(written.text_with())
    while len(written.tokens) < num_tokens and not written.has_ended:
        position = len(written.tokens)
        likeliest = int(_logits_after(reference, written.after_prompt).argmax())
        written.tokens.append(likeliest)
        if len(written.text_with()) > length:
            return Divergence(position)
    return None


def _logits_after(reference: Reference, token_ids: Sequence[int]) -> Floats:
    """The reference's logits [V] after a text."""
    any_token = 0
    return reference.logits_along([token_ids], [[any_token]])[0, 0]


def check_known(tokens: Sequence[int], vocabulary_size: int) -> None:
    """Raise a RunError for a token that the reference lacks: a server may serve another model."""
    if max(tokens) >= vocabulary_size:
        size = f"vocabulary of {vocabulary_size} tokens: is another model served?"
        raise RunError(f"token {max(tokens)} is not in the model's {size}")
