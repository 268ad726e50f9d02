"""Finds the position at which two greedy texts diverge, and measures whether rounding explains the divergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.config.amounts import length_in_common
from harness.config.errors import RunError
from harness.engines.door.reading import WeightsReference
from harness.engines.tokenizer import BROKEN, Detokenizer, Tokenizer, tokens_behind
from harness.results.rows.prompts import margin_excess
from harness.results.statistics import Floats

# To compare two computations of the logits, the margins between this many likeliest tokens are compared.
_NUM_LIKELY = 8


@dataclass(frozen=True)
class Divergence:
    """The position at which two continuations of a prompt differ.

    For two texts, it is the first position at which they differ. For a text whose logits are known, it is the position
    whose margin exceeds its tolerance most.

    Attributes:
        position: the index of the token after the prompt, from 0.
        logit_margin: after the prompt and the common tokens, the logit of the regular arm's token (or of the likeliest
            token) minus the logit of the other token. If the margin is within the model's rounding, the two tokens
            tied. None if it was not measured.
        logit_tolerance: the largest margin that rounding explains at this position, as measured; None if the margin is
            None.
    """

    position: int
    logit_margin: float | None = None
    logit_tolerance: float | None = None

    @property
    def columns(self) -> dict[str, float | None]:
        """The values of this divergence for the columns of a row."""
        return {
            "divergence_position": self.position,
            "logit_margin": self.logit_margin,
            "logit_tolerance": self.logit_tolerance,
        }

    @property
    def excess(self) -> float:
        """`margin_excess` of the two tokens."""
        return margin_excess(self.logit_margin, self.logit_tolerance)


def first_divergence(
    reference: WeightsReference | None,
    prompt: Sequence[int],
    expected: Sequence[int],
    actual: Sequence[int],
) -> Divergence | None:
    """Return the position at which two continuations of a prompt diverge; None if they have the same tokens.

    If one continuation ends at this position and the other goes on, the margin is None.

    Args:
        reference: measures the margin with the target. It begins a new batch for that, so no arm may be decoding with
            the target at the same time. None to measure no margin.
        prompt: the token ids of the prompt.
        expected: the tokens of the regular arm, or those to compare with.
        actual: the tokens of the other continuation.

    Raises:
        RunError: a token is not in the reference's vocabulary, or as from `WeightsReference.margin`. It is not raised
            if no margin is measured.
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
    """Return the root mean square by which margins differ between two computations of the same logits [n, V].

    Margins between all pairs of the eight likeliest tokens at each position count. If two tokens' logits differ by 0.1
    and by 0.3 between the computations, their margin differs by 0.2. The result is 0 if no pair has finite logits.
    """
    num_likely = min(_NUM_LIKELY, logits.shape[-1])
    likely = np.argpartition(logits, -num_likely)[:, -num_likely:]
    # The logits of a server are known for some tokens only. The other tokens have no finite logit.
    with np.errstate(invalid="ignore"):
        moved = np.take_along_axis(again, likely, -1) - np.take_along_axis(logits, likely, -1)
        pairs = moved[:, :, np.newaxis] - moved[:, np.newaxis, :]
    is_pair = np.isfinite(pairs) & ~np.eye(num_likely, dtype=bool)
    return float(np.sqrt(np.mean(pairs[is_pair] ** 2))) if is_pair.any() else 0.0


def _text_behind(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text of tokens that follow a prompt, without an incomplete last character."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(detokenizer.add(token) or "" for token in tokens)


def text_divergence(
    reference: WeightsReference,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    text: str,
    num_tokens: int,
) -> Divergence | None:
    """Return the position at which a text diverges from the greedy text of the reference. The tokens of the text are
    not known, only its characters.

    In each pass, the reference reads the text as the tokens into which the tokenizer splits it. If the reference's
    likeliest token differs from the next of these tokens, but writes the same characters, it replaces that token, and
    the rest of the text is split and read again. If it writes other characters, they diverge there: if the text is "a
    dog", and the reference writes "a" and then " c", they diverge at position 1, where the text has " dog". Tokens that
    write a part of a character are judged when the character is whole, and a divergence there has no margin.

    If the text ends and the reference goes on, they diverge at the end of the text. The result is None if the texts
    agree up to `num_tokens` tokens, or if the reference ends where the text ends.

    Args:
        reference: the reference, which begins a new batch for this.
        prompt: the token ids of the prompt.
        num_tokens: the number of tokens that the server was asked for. If the text is longer than what the
            reference writes with this many tokens, the two diverge after these tokens.

    Raises:
        RunError: as from `WeightsReference.logits_along`.
    """
    # Servers differ in whether they send an incomplete last character.
    text = text.rstrip(BROKEN)
    written: list[int] = []
    # Each pass finds at least one more token, unless it is rounded otherwise than the pass before.
    for _ in range(num_tokens + 1):
        rest = tokens_behind(tokenizer, text[len(_text_behind(tokenizer, prompt, written)) :])
        tokens = [*written, *rest][:num_tokens]
        # `logits_along` returns the logits before each token. The logits after the last token are needed too, so any
        # token (here 0) is appended.
        [logits] = reference.logits_along([prompt], [[*tokens, 0]])
        likeliest = logits.argmax(-1).tolist()
        position = length_in_common(tokens, likeliest)
        if position == num_tokens:
            # The two agree in as many tokens as were asked for.
            is_whole = len(_text_behind(tokenizer, prompt, tokens)) >= len(text)
            return None if is_whole else Divergence(position)
        token = likeliest[position]
        # Whether the server's text has no further token here, but the reference has.
        has_ended = position == len(tokens)
        # A token without text of its own ends the text, whether or not it is a special token. It is decoded twice in a
        # row, because some tokenizers drop a space at the beginning of a text.
        if not tokenizer.decode([token, token], skip_special_tokens=True):
            # If the reference ends the text, the server's text must end here too.
            return None if has_ended else Divergence(position)
        written = [*tokens[:position], token]
        longer = _text_behind(tokenizer, prompt, written)
        # The reference's token writes the same characters, so it replaces the text's own. (Some servers omit white
        # space at the end of a text.)
        if text.startswith(longer) or longer.rstrip() == text.rstrip():
            continue
        before = [*prompt, *tokens[:position]]
        # Within a character of several tokens, it is not known which token the text has here.
        if has_ended or tokenizer.decode(before).endswith(BROKEN):
            return Divergence(position)
        return Divergence(position, *reference.margin(before, token, tokens[position]))
    # Reached only if passes were rounded differently. There is no margin then.
    return Divergence(position)


def check_known(tokens: Sequence[int], vocabulary_size: int) -> None:
    """Raise a RunError if a token is not in the reference's vocabulary. Then the server may serve another model.

    Args:
        tokens: at least one token id.
    """
    if max(tokens) >= vocabulary_size:
        size = f"vocabulary of {vocabulary_size} tokens: is another model served?"
        raise RunError(f"token {max(tokens)} is not in the model's {size}")
