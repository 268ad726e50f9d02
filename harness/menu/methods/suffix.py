"""Suffix decoding (Oliaro et al. 2024, arXiv:2411.04975): counts of what followed the longest earlier match.

The text is in a trie of its substrings, each with the number of times it occurred, as in the paper's suffix tree. Two
limits keep it small. A substring that occurred once has no children; its position in the text stands for them. And
substrings end at `max_depth` tokens, plus one. So a token adds one node for each earlier match of the text's end, in
ordinary text two or three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.settings import DraftSettings, require, require_at_least
from harness.menu.method import MakeDrafter, TextMethod

END = -1  # behind each text of a trie that has several; never proposed


@dataclass(frozen=True, kw_only=True)
class SuffixSettings(DraftSettings):
    """Settings of `draft=suffix`.

    Attributes:
        threshold: a proposal ends where the estimated chance that all of it is accepted falls below this; 0.1 if None.
        max_depth: tokens of the longest sequence that is counted. It bounds the work per token.
        shared: also search the earlier answers of the run.
    """

    threshold: float | None = None
    max_depth: int = 24
    shared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, max_depth=1)
        require(0 <= self.least_chance <= 1, "threshold", "must be in [0, 1]", self.threshold)

    @property
    def least_chance(self) -> float:
        """`threshold`, or what it is without one."""
        return 0.1 if self.threshold is None else self.threshold


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
        node = matches[-1]
        position = 0
        probability = 1.0
        expected = 0.0
        found: list[int] = []
        while len(found) < min(most, len(matches) - 1):
            if node.best is not None:
                probability *= node.best.count / node.followed
                node = node.best
                token = node.token
                position = node.end
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


class SuffixText:
    """A row in its own trie, compared with the earlier answers in `shared` as well."""

    def __init__(self, max_depth: int, threshold: float, shared: SuffixTrie | None) -> None:
        self._threshold = threshold
        self.trie = SuffixTrie(max_depth)
        self._shared = shared
        self.matches = [self.trie.root]
        self._shared_matches = [] if shared is None else [shared.root]
        self._num_prompt: int | None = None

    @property
    def answer(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.trie.tokens[self._num_prompt :]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append decided tokens; the first time a prompt with the token that follows it."""
        for token in tokens:
            self.matches = self.trie.append(self.matches, token)
            if self._shared is not None:
                self._shared_matches = self._shared.follow(self._shared_matches, token)
        if self._num_prompt is None:
            self._num_prompt = len(self.trie.tokens) - 1

    def continuation(self, most: int) -> list[int]:
        """Up to `most` tokens, of the text's own trie or of the shared one: where more are expected to be right."""
        expected, tokens = self.trie.continuation(self.matches, most, self._threshold)
        if self._shared is None:
            return tokens
        matches = self._shared_matches
        expected_shared, others = self._shared.continuation(matches, most, self._threshold)
        # The longer match wins between equals.
        own_rank = (expected, len(self.matches))
        return others if (expected_shared, len(matches)) > own_rank else tokens


class SuffixTexts:
    """Makes the texts of a run, which share earlier answers where the settings say so.

    A question asked twice then finds its own answer, and with the same random numbers its second answer is no
    independent sample.
    """

    def __init__(self, settings: SuffixSettings) -> None:
        self._settings = settings
        self._shared = SuffixTrie(settings.max_depth) if settings.shared else None
        self._batch: list[SuffixText] = []

    def new(self) -> SuffixText:
        """An empty text."""
        text = SuffixText(self._settings.max_depth, self._settings.least_chance, self._shared)
        if self._shared is not None:
            self._batch.append(text)
        return text

    def begin_batch(self) -> None:
        """Learn the answers of the batch before.

        Not earlier: an answer must not depend on the other rows of its batch.
        """
        if self._shared is None:
            return
        for text in self._batch:
            matches = [self._shared.root]
            for token in [*text.answer, END]:
                matches = self._shared.append(matches, token)
        self._batch = []


class Suffix(TextMethod):
    """Proposes the most frequent continuation of the longest match in prompt and output."""

    name = "suffix"
    summary = (
        "the most frequent continuations of the longest known suffix, as far as they are likely"
    )
    settings = SuffixSettings

    def drafter(self, settings: SuffixSettings, pair: Any, runner: Any) -> MakeDrafter:
        """See `Method.drafter`. All drafters share the answers that were learned."""
        from harness.drafting.text import TextDrafter

        texts = SuffixTexts(settings)
        device = pair.target.input_device
        return lambda warp: TextDrafter(texts.new, device, texts.begin_batch)

    def vllm(self, planned: Any, settings: SuffixSettings) -> dict[str, Any]:
        """See `Method.vllm`."""
        return {
            "method": "suffix",
            "suffix_decoding_max_tree_depth": settings.max_depth,
            "suffix_decoding_max_cached_requests": 10_000 if settings.shared else 0,
            "suffix_decoding_min_token_prob": settings.least_chance,
        }


RECORD = Suffix()
