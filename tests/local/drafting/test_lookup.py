"""The index finds what a search through the whole text finds, in a bounded number of steps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from harness.local.drafting.text import LookupText


def text(tokens: list[int], max_ngram: int = 3, min_ngram: int = 1) -> LookupText:
    made = LookupText(max_ngram, min_ngram)
    made.extend(tokens)
    return made


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1]),
        ([1, 2, 5, 0, 1, 2, 6, 0, 1, 2], [6, 0]),  # the latest occurrence, not the first
        ([7, 1, 2, 5, 4, 3, 1, 2, 6, 0, 7, 1, 2], [5, 4]),  # but the longest n-gram first
        ([4, 4], [4, 4]),
        ([1, 2, 3, 1, 2, 3, 1], [2, 3]),
        ([1, 2, 3], []),
        ([1], []),
        ([], []),
    ],
)
def test_what_followed_is_proposed(tokens: list[int], expected: list[int]) -> None:
    assert text(tokens).continuation(2) == expected


def test_an_ngram_may_be_as_long_as_the_text() -> None:
    """A search through all sizes up to this one would never end."""
    assert text([1, 2, 9, 1, 2], max_ngram=10**15).continuation(2) == [9, 1]


def search(tokens: list[int], max_ngram: int, min_ngram: int, most: int) -> list[int]:
    """Without an index."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[-size:]:
                grown = list(tokens)
                for index in range(most):
                    grown.append(grown[begin + size + index])
                return grown[len(tokens) :]
    return []


@pytest.mark.parametrize("ngrams", [(3, 1), (4, 2), (1, 1)])
def test_it_finds_what_a_search_finds(ngrams: tuple[int, int]) -> None:
    generator = random.Random(0)
    found = 0
    for size in (2, 5, 30):
        indexed, tokens = LookupText(*ngrams), []
        for _ in range(120):
            tokens.append(generator.randrange(size))
            indexed.extend(tokens[-1:])
            assert indexed.continuation(5) == search(tokens, *ngrams, 5)
            found += bool(indexed.continuation(5))
    assert 50 < found < 360


class CountingDict(dict[Any, Any]):
    steps = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.steps += 1
        super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        self.steps += 1
        return super().get(key, default)


def test_the_work_does_not_grow_with_the_text() -> None:
    generator = random.Random(1)
    indexed = LookupText(3, 1)
    indexed._following = counted = CountingDict()
    indexed.extend(generator.randrange(1000) for _ in range(10_000))
    for _ in range(100):
        counted.steps = 0
        indexed.continuation(8)
        assert counted.steps <= 3
        counted.steps = 0
        indexed.extend([generator.randrange(1000)])
        assert counted.steps == 3
