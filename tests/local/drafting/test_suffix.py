"""The trie counts what a search through the whole text counts, in a bounded number of steps."""

from __future__ import annotations

import random

import pytest
import torch

from chains import SIZE, request, texts
from fakes import MarkovRunner
from harness.local.decoding.protocols import Step
from harness.local.drafting.text import SuffixText
from harness.local.engine.reading import replayed
from loops import autoregressive, speculative
from text_drafters import suffix_drafter

NOTHING = Step(torch.empty(0))


def text(tokens: list[int], threshold: float = 0.1, max_depth: int = 24) -> SuffixText:
    made = SuffixText(max_depth, threshold, None)
    made.extend(tokens)
    return made


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),
        ([2, 5, 0, 2, 5, 1, 2, 6, 2], [5]),  # the most frequent, and no more than were matched
        ([2, 5, 2, 6, 2], [6]),  # the latest of equals
        (
            [7, 1, 2, 5, 4, 3, 1, 2, 6, 1, 2, 6, 7, 1, 2],
            [5, 4, 3],
        ),  # the longest match before the most frequent
        ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
        ([1, 2, 3], []),
        ([], []),
    ],
)
def test_what_followed_most_often_is_proposed(tokens: list[int], expected: list[int]) -> None:
    assert text(tokens).continuation(5) == expected


@pytest.mark.parametrize(
    ("threshold", "length"), [(0.7, 0), (0.6, 1), (0.34, 1), (0.3, 2), (0.0, 2)]
)
def test_as_many_tokens_as_their_joint_probability_carries(threshold: float, length: int) -> None:
    """After 8 9 comes 1 twice in three times, and after 8 9 1 comes 2 and 3 once each."""
    tokens = [8, 9, 4, 0, 8, 9, 1, 3, 0, 8, 9, 1, 2, 5, 8, 9]
    assert text(tokens, threshold).continuation(5) == [1, 2][:length]


def search(tokens: list[int], max_depth: int, most: int, threshold: float) -> list[int]:
    """Without a trie: occurrences are counted in the whole text, for each proposed token again."""

    def ends(substring: list[int]) -> list[int]:
        size = len(substring)
        return [
            end for end in range(size, len(tokens) + 1) if tokens[end - size : end] == substring
        ]

    for length in range(min(max_depth, len(tokens) - 1), 0, -1):
        if len(ends(tokens[-length:])) > 1:
            break
    else:
        return []
    substring, found, probability, position = tokens[-length:], [], 1.0, -1
    while len(found) < min(most, length):
        followers = [tokens[end] for end in ends(substring) if end < len(tokens)]
        if position < 0 and followers and len(substring) <= max_depth:
            latest = {token: index for index, token in enumerate(followers)}
            token = max(latest, key=lambda token: (followers.count(token), latest[token]))
            probability *= followers.count(token) / len(followers)
        else:
            if position < 0:
                position = ends(substring)[-1]
            token = (tokens + found)[position]
            position += 1
        if probability < threshold:
            break
        found.append(token)
        substring = [*substring, token]
    return found


@pytest.mark.parametrize("max_depth", [1, 3, 20])
@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_it_finds_what_a_search_finds(max_depth: int, threshold: float) -> None:
    generator = random.Random(0)
    lengths = set()
    for size in (1, 2, 5, 30):
        indexed, tokens = text([], threshold, max_depth), []
        for _ in range(90):
            again = generator.random() < 0.2  # copies from earlier on
            start = generator.randrange(len(tokens)) if again and tokens else 0
            new = tokens[start : start + 9] if again else [generator.randrange(size)]
            tokens += new
            indexed.extend(new)
            found = indexed.continuation(5)
            assert found == search(tokens, max_depth, 5, threshold)
            lengths.add(len(found))
    assert lengths == set(range(min(max_depth, 5) + 1))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_work_does_not_grow_with_the_text(size: int) -> None:
    """Appending a token touches the matches and one child of each; ordinary text has few of them."""
    generator = random.Random(1)
    indexed, steps = text([]), 0
    for _ in range(4000):
        indexed.extend([generator.randrange(size)])
        assert len(indexed.matches) <= 25
        steps += len(indexed.matches)
    assert size < 1000 or steps < 4000 * 3
    nodes, waiting = 0, [indexed.trie.root]
    while waiting:
        node = waiting.pop()
        nodes += 1
        assert node.followed == sum(child.count for child in node.children.values())
        waiting += node.children.values()
    assert nodes <= 2 * steps + 1


def test_earlier_answers_are_found_only_if_asked_for() -> None:
    target = torch.eye(SIZE).roll(1, dims=1)  # t is followed by t + 1
    first, second = request([[3], [9]], length=9), request([[1, 5]], length=6)
    for shared in (False, True):
        drafter = suffix_drafter(shared=shared)
        for what in (first, second):
            iterations = list(speculative(MarkovRunner(target), drafter, what, 4))
            expected = texts(autoregressive(MarkovRunner(target), what), len(what.prompts))
            assert texts(iterations, len(what.prompts)) == expected
        # 6, then 7 after a match of one token and 8, 9 after one of three; without earlier answers nothing is known.
        assert sum(count for iteration in iterations for count in iteration.num_accepted) == (
            3 if shared else 0
        )


def test_the_better_of_own_text_and_earlier_answers_is_proposed() -> None:
    drafter = suffix_drafter(shared=True)
    drafter.start([[0]], [4], NOTHING)
    drafter.observe([0], [5], NOTHING)
    drafter.observe([0], [6], NOTHING)
    drafter.start([[1, 5, 9, 1, 4]], [5], NOTHING)
    assert drafter.propose(2, torch.zeros(1, 2)).tokens.tolist() == [[6]], (
        "4 5 is longer than 5, and its answer ends"
    )
    drafter.start([[4, 5, 8, 3, 2, 4]], [5], NOTHING)
    assert drafter.propose(2, torch.zeros(1, 2)).tokens.tolist() == [[8, 3]]


def test_prompts_are_not_answers() -> None:
    drafter = suffix_drafter(shared=True)
    drafter.start([[1, 2, 3, 4]], [5], NOTHING)
    drafter.start([[1, 2]], [3], NOTHING)
    assert drafter.propose(2, torch.zeros(1, 2)).lengths == [0]


def test_texts_that_are_read_teach_their_answers_alone() -> None:
    """As in decoding: after 7 8 a second text finds nothing in the first one's prompt, and 1 2 3 in its answer."""
    drafter = suffix_drafter(threshold=0, shared=True)
    replayed(drafter, [6, 7, 8, 9, 1, 2, 3, 4], range(4, 8), None, 1, 10)
    in_prompt = replayed(drafter, [5, 7, 8, 9], range(2, 4), None, 1, 10)
    assert in_prompt is not None
    assert in_prompt.isnan().all()
    in_answer = replayed(drafter, [5, 1, 2, 3], range(2, 4), None, 1, 10)
    assert in_answer is not None
    assert in_answer.tolist() == [[1.0]]
