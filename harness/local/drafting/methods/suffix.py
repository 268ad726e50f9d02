"""Suffix decoding (Oliaro et al. 2024, arXiv:2411.04975): counts of what followed the longest
earlier match.

The text is in a trie of its substrings, each with the number of times it occurred, as in the
paper's suffix tree. After `a b c a b`:

    a 2
      b 2
        c 1
    b 2
      c 1
    c 1

The text ends with the matches `a b`, `b` and the empty root: substrings that occurred before. The
longest match predicts: first its most frequent child, c; c occurred once, so then what followed it
in the text, a. That is all, because a match of two tokens predicts two.

Two limits keep the trie small. A substring that occurred once has no children: its position in the
text stands for them. And substrings end at `max_depth` tokens, plus one. So a token adds one node
for each earlier match of the text's end, in ordinary text two or three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.config.settings import DraftSettings, require, require_at_least
from harness.local.drafting.method import LoadedPair, MakeDrafter, TextMethod

if TYPE_CHECKING:
    from harness.local.decoding.protocols import Runner

END = -1  # behind each text of a trie that has several; never proposed


@dataclass(frozen=True, kw_only=True)
class SuffixSettings(DraftSettings):
    """Settings of `draft=suffix`.

    Attributes:
        threshold: a proposal ends where the estimated chance that all of it is accepted falls below
            this; 0.1 if None.
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
        """The threshold, or its default."""
        return 0.1 if self.threshold is None else self.threshold


class _Node:
    """A substring of the text, by its last token and its path from the root."""

    __slots__ = ("best", "children", "count", "end", "followed", "token")

    def __init__(self, token: int, count: int = 0, end: int = 0) -> None:
        self.token = token  # the last token of the substring
        self.count = count  # how often the substring occurred
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

    The matches of a position are the nodes of the last 0, 1, 2, ... tokens before it, as far as
    they occurred earlier.
    """

    def __init__(self, max_depth: int) -> None:
        self.tokens: list[int] = []
        self.root = _Node(END)
        self._max_depth = max_depth

    def append(self, matches: Sequence[_Node], token: int) -> list[_Node]:
        """Append a token to the text.

        Args:
            matches: those at the end of the text, the root first and the longest last.

        Returns:
            The matches at the new end.
        """
        self.tokens.append(token)
        new_matches = [self.root]
        for node in matches:
            child = node.children.get(token) or _Node(token)
            if child.count and len(new_matches) <= self._max_depth:
                new_matches.append(self._expanded(child))
            node.see(child, len(self.tokens))
        return new_matches

    def follow(self, matches: Sequence[_Node], token: int) -> list[_Node]:
        """Return the matches of another text's end in this trie, given those before its last token.

        The other text is not added.
        """
        children = (node.children.get(token) for node in matches[: self._max_depth])
        return [self.root, *(self._expanded(child) for child in children if child)]

    def continuation(
        self, matches: Sequence[_Node], most: int, threshold: float
    ) -> tuple[list[int], float]:
        """Predict the tokens after the longest match, the last of `matches`, and how many of them
        the counts expect to be right.

        There are at most `most`, at most as many as the match is long (the default of the authors'
        own code), and only while their joint probability, estimated from the counts, is at least
        `threshold`.
        """
        node = matches[-1]
        position = 0  # where the last predicted token ends in the text: a child sets it first
        probability = 1.0
        expected = 0.0
        predicted: list[int] = []
        while len(predicted) < min(most, len(matches) - 1):
            if node.best is not None:
                probability *= node.best.count / node.followed
                node = node.best
                token = node.token
                position = node.end
            else:
                # The substring occurred once, or is too long to be counted: repeat what followed
                # it. Beyond the end of the text, that is the prediction itself.
                missing = position - len(self.tokens)
                token = self.tokens[position] if missing < 0 else predicted[missing]
                position += 1
            if token == END or probability < threshold:
                break
            predicted.append(token)
            expected += probability
        return predicted, expected

    def _expanded(self, node: _Node) -> _Node:
        """Return the node, with a child for the token after its only occurrence so far."""
        if not node.children:
            node.see(_Node(self.tokens[node.end]), node.end + 1)
        return node


class SuffixText:
    """A row's text in a trie of its own, and its matches in the trie of earlier answers."""

    def __init__(self, max_depth: int, threshold: float, shared: SuffixTrie | None) -> None:
        self._threshold = threshold
        self.trie = SuffixTrie(max_depth)
        self._shared = shared
        self.matches = [self.trie.root]
        self._shared_matches = [] if shared is None else [shared.root]
        self.num_prompt: int | None = None

    def extend(self, tokens: Iterable[int]) -> None:
        """Append decided tokens; the first call has the prompt and one token of the answer."""
        for token in tokens:
            self.matches = self.trie.append(self.matches, token)
            if self._shared is not None:
                self._shared_matches = self._shared.follow(self._shared_matches, token)
        if self.num_prompt is None:
            self.num_prompt = len(self.trie.tokens) - 1

    def continuation(self, most: int) -> list[int]:
        """Return up to `most` tokens, from the trie that expects more of its tokens to be right."""
        of_row, num_expected = self.trie.continuation(self.matches, most, self._threshold)
        if self._shared is None:
            return of_row
        of_shared, num_expected_of_shared = self._shared.continuation(
            self._shared_matches, most, self._threshold
        )
        # The longer match wins between equals.
        row_rank = (num_expected, len(self.matches))
        shared_rank = (num_expected_of_shared, len(self._shared_matches))
        return of_shared if shared_rank > row_rank else of_row


class SuffixTexts:
    """Makes the texts of a run, which share earlier answers where the settings say so.

    A question that is asked again then finds its first answer. So its second answer is not an
    independent sample.
    """

    def __init__(self, settings: SuffixSettings) -> None:
        self._settings = settings
        self._shared = SuffixTrie(settings.max_depth) if settings.shared else None
        self._batch: list[SuffixText] = []

    def new(self) -> SuffixText:
        """Make an empty text."""
        text = SuffixText(self._settings.max_depth, self._settings.least_chance, self._shared)
        if self._shared is not None:
            self._batch.append(text)
        return text

    def begin_batch(self) -> None:
        """Learn the answers of the previous batch.

        They are learned this late because an answer must not depend on other rows of its batch.
        """
        if self._shared is None:
            return
        for text in self._batch:
            matches = [self._shared.root]
            for token in [*text.trie.tokens[text.num_prompt :], END]:
                matches = self._shared.append(matches, token)
        self._batch = []


class Suffix(TextMethod):
    """Proposes the most frequent continuation of the longest match in prompt and output."""

    name = "suffix"
    summary = (
        "the most frequent continuations of the longest known suffix, as far as they are likely"
    )
    settings = SuffixSettings

    def drafter(
        self, settings: SuffixSettings, pair: LoadedPair, runner: Runner | None
    ) -> MakeDrafter:
        """Return a function that makes drafters, which share the earlier answers if so set."""
        from harness.local.drafting.text import TextDrafter

        texts = SuffixTexts(settings)
        device = pair.target.input_device
        return lambda warp: TextDrafter(texts.new, device, texts.begin_batch)


RECORD = Suffix()
