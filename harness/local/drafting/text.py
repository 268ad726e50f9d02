"""Drafting without a model: what a row's own text, prompt and answer, says that may follow.

`LookupText` is one kind of `Text`. All of it happens on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from harness.local.decoding.protocols import Drafter, Proposal, Step, TokenRows
from harness.local.decoding.transfer import padded, to_device


class Text(Protocol):
    """The tokens of one row, indexed so that a proposal takes the same time after any number of
    them.
    """

    def extend(self, tokens: Iterable[int]) -> None:
        """Append decided tokens."""

    def continuation(self, most: int) -> list[int]:
        """Return up to `most` tokens that may follow; none without a guess."""


class TextDrafter(Drafter):
    """Proposes what each row's text says, which is deterministic.

    Args:
        new_text: makes the empty text of a row.
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
        lengths = [len(guess) for guess in proposed]
        tokens = to_device(padded(proposed), self._device)
        return Proposal(tokens, lengths=lengths)

    def observe(self, num_accepted: Sequence[int], decided: TokenRows, step: Step) -> None:
        for text, tokens in zip(self._texts, decided, strict=True):
            text.extend(tokens)


class LookupText:
    """Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), over prompt and
    output alike: an index of n-grams, with one entry per token and length of n-gram.

    transformers and vLLM take an n-gram's first occurrence. The latest is as cheap with an index, and
    better where a text changes what it repeats: a renamed variable, a list that goes on, a loop.

    `a b c a b` ends with `a b`, the longest n-gram that occurred before. What followed it begins at
    position 2 and reaches the end: `c a b`, which is repeated as often as tokens are asked for.
    """

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._tokens: list[int] = []
        # Where the latest continuation of each n-gram begins.
        self._following: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append decided tokens."""
        for token in tokens:
            # Recorded only now, when something follows: the end of the text must not find itself.
            for ngram in self._last_ngrams():
                self._following[ngram] = len(self._tokens)
            self._tokens.append(token)

    def continuation(self, most: int) -> list[int]:
        """Return up to `most` tokens that followed the longest n-gram at the end of the text."""
        for ngram in self._last_ngrams():
            begin = self._following.get(ngram)
            if begin is not None:
                # A continuation that reaches the end of the text is repeated: the text is in a
                # loop.
                period = len(self._tokens) - begin
                return [self._tokens[begin + index % period] for index in range(most)]
        return []

    def _last_ngrams(self) -> Iterable[tuple[int, ...]]:
        """Yield the n-grams at the end of the text, longest first."""
        for size in range(min(self._max_ngram, len(self._tokens)), self._min_ngram - 1, -1):
            yield tuple(self._tokens[-size:])
