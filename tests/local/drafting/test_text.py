"""Drafters without a model: what they find in a text, in a bounded number of steps, and in the real loop."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from chains import (
    GREEDY,
    RAGGED,
    autoregressive,
    chain,
    p_value_of_texts,
    requests,
    row_steps,
    small_chain,
    speculative,
    texts,
)
from fakes import MarkovRunner
from harness.local.decoding.loop import Iteration, RowRequest
from harness.local.decoding.protocols import Proposal, Step
from harness.local.decoding.verify import Verdict, verify
from harness.local.decoding.warp import Warp
from harness.local.drafting.text import LookupText, SuffixText, TextDrafter
from text_drafters import lookup_drafter, suffix_drafter
from verifiers import FALSE_ALARM_RATE, without_residual

NOTHING = Step(torch.empty(0))


# Lookup --------------------------------------------------------------------------------------------------------------


def test_an_ngram_may_be_as_long_as_the_text() -> None:
    """A search through all sizes up to this one would never end."""
    text = LookupText(10**15, 1)
    text.extend([1, 2, 9, 1, 2])
    assert text.continuation(2) == [9, 1]


def looked_up(tokens: list[int], max_ngram: int, min_ngram: int, most: int) -> list[int]:
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
def test_lookup_finds_what_a_search_finds(ngrams: tuple[int, int]) -> None:
    generator = random.Random(0)
    found = 0
    for size in (2, 5, 30):
        text, tokens = LookupText(*ngrams), []
        for _ in range(120):
            tokens.append(generator.randrange(size))
            text.extend(tokens[-1:])
            assert text.continuation(5) == looked_up(tokens, *ngrams, 5)
            found += bool(text.continuation(5))
    assert 50 < found < 360


# Suffix --------------------------------------------------------------------------------------------------------------


def counted(tokens: list[int], threshold: float = 0.1, max_depth: int = 24) -> SuffixText:
    text = SuffixText(max_depth, threshold)
    text.extend(tokens)
    return text


@pytest.mark.parametrize(
    ("threshold", "length"), [(0.7, 0), (0.6, 1), (0.34, 1), (0.3, 2), (0.0, 2)]
)
def test_as_many_tokens_as_their_joint_probability_carries(threshold: float, length: int) -> None:
    """After 8 9 comes 1 twice in three times, and after 8 9 1 comes 2 and 3 once each."""
    tokens = [8, 9, 4, 0, 8, 9, 1, 3, 0, 8, 9, 1, 2, 5, 8, 9]
    assert counted(tokens, threshold).continuation(5) == [1, 2][:length]


def most_frequent(tokens: list[int], max_depth: int, most: int, threshold: float) -> list[int]:
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
def test_suffix_finds_what_a_search_finds(max_depth: int, threshold: float) -> None:
    generator = random.Random(0)
    lengths = set()
    for size in (1, 2, 5, 30):
        text, tokens = counted([], threshold, max_depth), []
        for _ in range(90):
            again = generator.random() < 0.2  # copies from earlier on
            start = generator.randrange(len(tokens)) if again and tokens else 0
            new = tokens[start : start + 9] if again else [generator.randrange(size)]
            tokens += new
            text.extend(new)
            found = text.continuation(5)
            assert found == most_frequent(tokens, max_depth, 5, threshold)
            lengths.add(len(found))
    assert lengths == set(range(min(max_depth, 5) + 1))


@pytest.mark.parametrize("size", [1, 1000])
def test_the_work_of_suffix_does_not_grow_with_the_text(size: int) -> None:
    """Appending a token touches the matches and one child of each; ordinary text has few of them."""
    generator = random.Random(1)
    text, steps = counted([]), 0
    for _ in range(4000):
        text.extend([generator.randrange(size)])
        assert len(text.matches) <= 25
        steps += len(text.matches)
    assert size < 1000 or steps < 4000 * 3
    nodes, waiting = 0, [text.root]
    while waiting:
        node = waiting.pop()
        nodes += 1
        assert node.followed == sum(child.count for child in node.children.values())
        waiting += node.children.values()
    assert nodes <= 2 * steps + 1


# In the loop ---------------------------------------------------------------------------------------------------------

New = Callable[[], TextDrafter]
every_drafter = pytest.mark.parametrize(
    "new",
    [
        lookup_drafter,
        suffix_drafter,
        lambda: suffix_drafter(threshold=0, max_depth=6),
    ],
    ids=["lookup", "suffix", "shallow suffix"],
)


def run(
    target: Tensor, drafter: TextDrafter, what: list[RowRequest], k: int = 4
) -> list[Iteration]:
    return list(speculative(MarkovRunner(target), drafter, what, k))


@every_drafter
@pytest.mark.parametrize("warp", [GREEDY, Warp(0.3)], ids=["greedy", "sampled"])
def test_rows_of_a_batch_end_one_by_one(new: New, warp: Warp) -> None:
    """Greedy output is the regular one, and a row's output does not depend on its batch."""
    target, prompts = chain(0), [*RAGGED, [6], [4, 4, 4, 4]]
    stop = [] if warp == GREEDY else [8]
    what = requests(prompts, warp, length=50, stop=stop)
    iterations = run(target, new(), what)
    output = texts(iterations, len(prompts))
    if warp == GREEDY:
        assert output == texts(autoregressive(MarkovRunner(target), what), len(prompts))
    for index, prompt in enumerate(prompts):
        alone = run(target, new(), requests([prompt], warp, 50, stop, [index]))
        assert texts(alone, 1)[0] == output[index]
    offered = {len(row_step.proposed) for row_step in row_steps(iterations)}
    assert 0 in offered
    assert max(offered) >= 3
    assert max(row_step.num_accepted for row_step in row_steps(iterations)) >= 2
    assert (len({len(row) for row in output}) > 2) == bool(stop)


@every_drafter
@pytest.mark.parametrize("rule", [verify, without_residual])
def test_the_loop_keeps_the_target_s_distribution(new: New, rule: Callable[..., Verdict]) -> None:
    """Chi-square over four tokens after one prompt; the broken twin is caught, with a p-value of 1e-50."""
    size, num_rows = 3, 1500
    target = small_chain(5, 0.8, size)
    what = requests([[0, 1, 0, 2, 0, 1]] * num_rows, Warp(1.0), 4)
    iterations = list(speculative(MarkovRunner(target.float()), new(), what, 2, verification=rule))
    assert {row_step.num_accepted for row_step in row_steps(iterations)} == {0, 1, 2}
    assert (p_value_of_texts(texts(iterations, num_rows), target, 1) > FALSE_ALARM_RATE) == (
        rule is verify
    )


@every_drafter
def test_rows_are_followed_and_renumbered(new: New) -> None:
    drafter = new()
    drafter.start([[1, 2, 3, 1, 2], [7], [4, 5, 6, 4, 5]], [3, 8, 6], NOTHING)
    proposal = drafter.propose(2, torch.zeros(3, 2))
    assert proposed(proposal) == [[1, 2], [], [4, 5]]
    drafter.observe([2, 0, 1], [[1, 2, 3], [9], [4, 9]], NOTHING)
    drafter.select([2, 0])
    assert proposed(drafter.propose(3, torch.zeros(2, 3))) == [[], [1, 2, 3]], "6 4 9 is new"
    drafter.observe([0, 3], [[4], [1, 2, 3, 1]], NOTHING)
    assert proposed(drafter.propose(1, torch.zeros(2, 1))) == [
        [9 if new is lookup_drafter else 5],
        [2],
    ]
    drafter.observe([0, 0], [[1], [1]], NOTHING)  # rejected
    drafter.start([[9, 9]], [1], NOTHING)
    empty = drafter.propose(4, torch.zeros(1, 4))
    assert (empty.tokens.shape, empty.tokens.dtype, empty.lengths) == ((1, 0), torch.long, [0])


def proposed(proposal: Proposal) -> list[list[int]]:
    assert proposal.probabilities is None
    assert proposal.lengths is not None
    return [
        row[:length] for row, length in zip(proposal.tokens.tolist(), proposal.lengths, strict=True)
    ]
