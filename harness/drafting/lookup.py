"""Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), over prompt and output alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from harness.drafting.text import Text, TextDrafter


class LookupText(Text):
    """A row with an index of its n-grams. Per token it costs one dictionary entry for each length of n-gram."""

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        self._following: dict[
            tuple[int, ...], int
        ] = {}  # n-gram -> where its latest continuation begins

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            # Now that they are followed by something; so the end of the text never finds itself.
            for ngram in self._last_ngrams():
                self._following[ngram] = len(self._tokens)
            self._tokens.append(token)

    def continuation(self, most: int) -> list[int]:
        for ngram in self._last_ngrams():
            if (begin := self._following.get(ngram)) is not None:
                # A continuation that reaches the end of the text goes on as it began: the text is in a loop.
                period = len(self._tokens) - begin
                return [self._tokens[begin + index % period] for index in range(most)]
        return []

    def _last_ngrams(self) -> Iterable[tuple[int, ...]]:
        """The n-grams at the end of the text, longest first."""
        return (tuple(self._tokens[-size:]) for size in self._sizes if size <= len(self._tokens))


class LookupDrafter(TextDrafter):
    """Finds the longest n-gram at the end of a row that occurred before, and proposes what followed it the last time.

    transformers and vLLM take its first occurrence. The latest is as cheap with an index, and better where a text
    changes what it repeats: a renamed variable, a list that goes on, a loop.

    Args:
        max_ngram: the longest n-gram to find, and
        min_ngram: the shortest, at least 1.
        device: the target's.
    """

    def __init__(
        self, max_ngram: int = 3, min_ngram: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(lambda: LookupText(max_ngram, min_ngram), device)
