"""Suffix decoding (Oliaro et al. 2024, arXiv:2411.04975): counts of what followed the longest earlier match.

The text is in a trie of its substrings, each with the number of times it occurred, as in the paper's suffix tree. Two
limits keep it small. A substring that occurred once has no children; its position in the text stands for them. And
substrings end at `max_depth` tokens, plus one. So a token adds one node for each earlier match of the text's end, in
ordinary text two or three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

import torch

from harness.decoding.protocols import Step
from harness.drafting.text import Text, TextDrafter

END = -1  # behind each text of a trie that has several; never proposed


class _Node:
    """A substring."""

    __slots__ = ("best", "children", "count", "end", "followed", "token")

    def __init__(self, token: int, count: int = 0, end: int = 0) -> None:
        self.token = token  # its last
        self.count = count  # how often it occurred
        self.end = end  # where the latest occurrence ends
        self.children: dict[int, _Node] = {}
        self.followed = 0  # sum of the children's counts
        self.best: _Node | None = None  # the most frequent child, the latest of equals

    def see(self, child: _Node, end: int) -> None:
        """Count another occurrence of a child."""
        self.children[child.token] = child
        child.count += 1
        child.end = end
        self.followed += 1
        if self.best is None or child.count >= self.best.count:
            self.best = child


class SuffixTrie:
    """Counts of all substrings of a text, up to a depth.

    The matches of a position are the nodes of the last 0, 1, 2, ... tokens before it, as far as they occurred earlier.
    """

    def __init__(self, max_depth: int) -> None:
        self.tokens: list[int] = []
        self.root = _Node(END)
        self._max_depth = max_depth

    def append(self, matches: Sequence[_Node], token: int) -> list[_Node]:
        """Append a token to the text, whose end has these matches; returns the matches after it."""
        self.tokens.append(token)
        found = [self.root]
        for node in matches:
            child = node.children.get(token) or _Node(token)
            if child.count and len(found) <= self._max_depth:
                found.append(self._expanded(child))
            node.see(child, len(self.tokens))
        return found

    def follow(self, matches: Sequence[_Node], token: int) -> list[_Node]:
        """The matches after one more token of another text, with these matches before it."""
        children = (node.children.get(token) for node in matches[: self._max_depth])
        return [self.root, *(self._expanded(child) for child in children if child)]

    def continuation(
        self, matches: Sequence[_Node], most: int, threshold: float
    ) -> tuple[float, list[int]]:
        """The likeliest tokens after the longest match, and how many of them the counts expect to be right.

        At most as many as the match is long, which is the default of the authors' own code, and while their joint
        probability, estimated from the counts, is at least `threshold`.
        """
        node, position, probability, expected = matches[-1], 0, 1.0, 0.0
        found: list[int] = []
        while len(found) < min(most, len(matches) - 1):
            if node.best is not None:
                probability *= node.best.count / node.followed
                node = node.best
                token, position = node.token, node.end
            else:
                # It occurred once, or is too long to be counted: what followed the last time, also if that is a loop.
                missing = position - len(self.tokens)
                token = self.tokens[position] if missing < 0 else found[missing]
                position += 1
            if token == END or probability < threshold:
                break
            found.append(token)
            expected += probability
        return expected, found

    def _expanded(self, node: _Node) -> _Node:
        """The node, with a child for what followed its only occurrence so far."""
        if not node.children:
            node.see(_Node(self.tokens[node.end]), node.end + 1)
        return node


class SuffixText(Text):
    """A row in its own trie, compared with the earlier answers in `shared` as well."""

    def __init__(self, max_depth: int, threshold: float, shared: SuffixTrie | None) -> None:
        self._threshold = threshold
        self.trie = SuffixTrie(max_depth)
        self._tries = [(self.trie, self.trie.append)] + (
            [] if shared is None else [(shared, shared.follow)]
        )
        self.matches = [[trie.root] for trie, _ in self._tries]

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.matches = [
                go_on(held, token)
                for (_, go_on), held in zip(self._tries, self.matches, strict=True)
            ]

    def continuation(self, most: int) -> list[int]:
        found = [
            (*trie.continuation(matches, most, self._threshold), len(matches))
            for (trie, _), matches in zip(self._tries, self.matches, strict=True)
        ]
        # Of equals the longer match.
        return max(found, key=itemgetter(0, 2))[1]


class SuffixDrafter(TextDrafter):
    """Proposes the most frequent continuation of the longest match in prompt and output.

    Args:
        threshold: in [0, 1]; proposes while the estimated probability that all tokens are right is at least this.
        max_depth: the longest match, at least 1. It bounds the work per token.
        shared: match the answers of earlier batches too. A question asked twice then finds its own answer,
            and with the same random numbers its second answer is no independent sample.
        device: the target's.
    """

    def __init__(
        self,
        threshold: float = 0.1,
        max_depth: int = 24,
        shared: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shared = SuffixTrie(max_depth) if shared else None
        super().__init__(lambda: SuffixText(max_depth, threshold, self._shared), device)
        self._answers: list[
            tuple[SuffixText, int]
        ] = []  # of the batch, with the lengths of their prompts

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        if self._shared is not None:
            # Not before their batch has ended: an answer must not depend on the other rows of its batch.
            for text, num_prompt in self._answers:
                matches = [self._shared.root]
                for token in [*text.trie.tokens[num_prompt:], END]:
                    matches = self._shared.append(matches, token)
        super().start(prompts, first_tokens, step)
        self._answers = [
            (text, len(prompt)) for (text, _), prompt in zip(self._rows, prompts, strict=True)
        ]
