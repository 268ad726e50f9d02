"""Where two greedy texts part, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.config.amounts import length_in_common
from harness.config.errors import RunError
from harness.engines.detokenizer import BROKEN
from harness.engines.door.reading import Reference
from harness.engines.tokenizer import Tokenizer, tokens_behind
from harness.results.statistics import Floats

# Those whose margins are compared between two computations of logits.
_NUM_LIKELY = 8


@dataclass(frozen=True)
class Divergence:
    """The first position at which two continuations of a prompt differ. Of a text whose logits are known: the one
    whose margin is most beyond its tolerance.

    Attributes:
        logit_margin: logit of the regular arm's token there, or of the likeliest one, minus logit of the other's, after
            prompt and common prefix. A margin within the rounding of the model means that the two tokens tied.
        logit_tolerance: the largest margin there that rounding explains, as measured.
    """

    position: int
    logit_margin: float | None = None
    logit_tolerance: float | None = None

    @property
    def columns(self) -> dict[str, float | None]:
        """Its columns in rows."""
        return {
            "divergence_position": self.position,
            "logit_margin": self.logit_margin,
            "logit_tolerance": self.logit_tolerance,
        }

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


class _Behind:
    """The texts of tokens behind a prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._num_before = len(self._shown(prompt))

    def ends_text(self, token: int) -> bool:
        """Whether a token has no text by itself, which is taken for the end of a text.

        Not every tokenizer lists all of these among its special tokens. Some drop a space at the beginning of a text,
        which a second token behind it shows.
        """
        return not self._shown([token, token])

    def text(self, tokens: Sequence[int]) -> str:
        """The text of these tokens, without a last character that is incomplete."""
        text = self._shown([*self._prompt, *tokens])
        return text[self._num_before :].rstrip(BROKEN)

    def _shown(self, ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))


def text_divergence(
    reference: Reference,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    text: str,
    num_tokens: int,
) -> Divergence | None:
    """The place where a text, whose tokens are not known, parts from the reference's greedy text.

    One pass reads the text's own tokens. Where the reference's likeliest token writes the same text in other tokens,
    that one is taken, and the rest is read again. For the text "a dog" the reference writes "a", then " c": they part
    at position 1, where the text has " dog".

    A text that ends although the reference goes on parts from it there. None if it has `num_tokens`
    tokens, or if the reference ends there too.

    Args:
        num_tokens: the number of tokens that the server was asked for. If that many of the reference's
            do not write the whole text, they part there.
    """
    # Servers differ in whether they show a last character that is incomplete.
    text = text.rstrip(BROKEN)
    behind = _Behind(tokenizer, prompt)
    written: list[int] = []
    position = 0
    # A pass finds at least one more token.
    for _ in range(num_tokens + 1):
        rest = tokens_behind(tokenizer, text[len(behind.text(written)) :])
        tokens = [*written, *rest][:num_tokens]
        # Any token ends it: what comes before is wanted.
        [logits] = reference.logits_along([prompt], [[*tokens, 0]])
        likeliest = logits.argmax(-1).tolist()
        position = length_in_common(tokens, likeliest)
        if position == num_tokens:
            is_whole = len(behind.text(tokens)) >= len(text)
            return None if is_whole else Divergence(position)
        token = likeliest[position]
        has_ended = position == len(tokens)
        if behind.ends_text(token):
            # After the end of a text the server may continue in a way of its own.
            return None if has_ended else Divergence(position)
        written = [*tokens[:position], token]
        longer = behind.text(written)
        # Some servers leave out space at the end of a text.
        if text.startswith(longer) or longer.rstrip() == text.rstrip():
            continue
        if has_ended:
            return Divergence(position)
        before = [*prompt, *tokens[:position]]
        return Divergence(position, *reference.margin(before, token, tokens[position]))
    return Divergence(position)


def check_known(tokens: Sequence[int], vocabulary_size: int) -> None:
    """Raise a RunError for a token that the reference lacks: a server may serve another model."""
    if max(tokens) >= vocabulary_size:
        size = f"vocabulary of {vocabulary_size} tokens: is another model served?"
        raise RunError(f"token {max(tokens)} is not in the model's {size}")
