"""Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), over prompt and
output alike.

transformers and vLLM take an n-gram's first occurrence. The latest is as cheap with an index, and
better where a text changes what it repeats: a renamed variable, a list that goes on, a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.config.settings import (
    DecodingSettings,
    DraftSettings,
    require,
    require_at_least,
)
from harness.local.drafting.method import LoadedPair, TextMethod

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class LookupSettings(DraftSettings):
    """Settings of `draft=lookup`.

    Attributes:
        max_ngram: tokens that must have occurred before, at most.
        min_ngram: tokens that must have occurred before, at least.
    """

    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, min_ngram=1)
        rule = f"must be at least draft.min_ngram={self.min_ngram}"
        require(self.max_ngram >= self.min_ngram, "max_ngram", rule, self.max_ngram)


class LookupText:
    """A row's text with an index of its n-grams: one entry per token and length of n-gram.

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


class Lookup(TextMethod):
    """Proposes what followed the same n-gram the last time."""

    name = "lookup"
    summary = "what followed the same n-gram in prompt and output"
    settings = LookupSettings

    def texts(
        self, settings: LookupSettings, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Callable[[], LookupText]:
        """Return a function that makes an empty `LookupText`."""
        return lambda: LookupText(settings.max_ngram, settings.min_ngram)

    def huggingface(
        self, pair: LoadedPair, settings: LookupSettings, decoding: DecodingSettings
    ) -> dict[str, Any]:
        return {
            "prompt_lookup_num_tokens": decoding.num_draft_tokens,
            "max_matching_ngram_size": settings.max_ngram,
        }

    def check_huggingface(self, settings: LookupSettings) -> None:
        """Refuse a least n-gram."""
        rule = "must be 1 with engine=huggingface: generate() tries single tokens too"
        require(settings.min_ngram == 1, "draft.min_ngram", rule, settings.min_ngram)


RECORD = Lookup()
