"""Drafts without a model, on the host: a `Text` guesses the next tokens of a row from the row's own prompt and answer.

`LookupText` is one kind of `Text`. Users can write others (docs/your-own-method.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from harness.local.decoding.protocols import Drafter, Proposal, Step, TokenRows
from harness.local.decoding.transfer import padded, to_device


class Text(Protocol):
    """The tokens of one row. An implementation should index them, so that the time for a proposal does not grow with
    the length of the text.
    """

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens: first the prompt with the first new token, later the tokens that each iteration decided."""

    def continuation(self, most: int) -> list[int]:
        """Return up to `most` tokens that may follow, or an empty list if there is no guess."""


class TextDrafter(Drafter):
    """Proposes, for each row, the continuation that the row's `Text` guesses. These proposals are deterministic.

    Args:
        new_text: returns an empty `Text`; called once for each row of each batch.
    """

    layers = ()
    draws = False

    def __init__(self, new_text: Callable[[], Text]) -> None:
        self.new_text = new_text
        self._texts: list[Text] = []

    def start(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        self._texts = []
        self._device = step.logits.device
        for prompt, first in zip(prompts, first_tokens, strict=True):
            text = self.new_text()
            text.extend([*prompt, first])
            self._texts.append(text)

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        proposed = [text.continuation(num_draft_tokens) for text in self._texts]
        # Shorter guesses are padded, and `lengths` says how many tokens of each row are offered.
        lengths = [len(guess) for guess in proposed]
        tokens = to_device(padded(proposed), self._device)
        return Proposal(tokens, lengths=lengths)

    def observe(self, num_accepted: Sequence[int], decided: TokenRows, step: Step) -> None:
        for text, tokens in zip(self._texts, decided, strict=True):
            text.extend(tokens)


class LookupText:
    """Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), in the prompt and the output.

    It takes the longest n-gram at the end of the text that occurred earlier, and proposes the tokens that followed the
    latest earlier occurrence.

    transformers and vLLM use the first occurrence of an n-gram. With an index, finding the latest occurrence takes no
    longer. The latest occurrence predicts better if the text changes the passages that it repeats, for example if a
    variable was renamed, if a list goes on, or in a loop. The index has one entry per token and length of n-gram.

    Example: `a b c a b` ends with `a b`, the longest n-gram that occurred earlier. It was followed by the tokens from
    position 2 to the end of the text: `c a b`. They are repeated until there are as many tokens as wanted.

    Args:
        max_ngram: the most tokens of an n-gram.
    """

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._tokens: list[int] = []
        # For each n-gram, the index of the token that followed its latest occurrence.
        self._following: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. For each token, index the n-grams that end just before it."""
        for token in tokens:
            # An n-gram is recorded only when a token follows it. Otherwise the n-gram at the end of the text would be
            # found as its own earlier occurrence.
            for ngram in self._last_ngrams():
                self._following[ngram] = len(self._tokens)
            self._tokens.append(token)

    def continuation(self, most: int) -> list[int]:
        """Return the `most` tokens that followed the latest earlier occurrence of the longest n-gram at the end of the
        text. Return an empty list if no n-gram at the end of the text occurred earlier.
        """
        for ngram in self._last_ngrams():
            begin = self._following.get(ngram)
            if begin is not None:
                # If the end of the text is reached, the continuation is repeated, because the text is in a loop.
                period = len(self._tokens) - begin
                return [self._tokens[begin + index % period] for index in range(most)]
        return []

    def _last_ngrams(self) -> Iterable[tuple[int, ...]]:
        """Yield the n-grams at the end of the text, longest first."""
        for size in range(min(self._max_ngram, len(self._tokens)), 0, -1):
            yield tuple(self._tokens[-size:])
