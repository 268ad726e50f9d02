"""Drafting without a model: what a row's own text, prompt and answer, says that may follow.

`LookupText` and `SuffixText` are two kinds of `Text`. All of it happens on the host.
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

    def __init__(self, new_text: Callable[[], Text]) -> None:
        self.new_text = new_text
        self._texts: list[Text] = []

    def clear(self) -> None:
        self._texts = []

    def add(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
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

    def select(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[row] for row in rows]


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


class _Node:
    """A substring of the text, by its last token and its path from the root."""

    __slots__ = ("best", "children", "count", "end", "followed", "token")

    def __init__(self, token: int) -> None:
        self.token = token  # the last token of the substring
        self.count = 0  # how often the substring occurred
        self.end = 0  # where the latest occurrence ends
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


class SuffixText:
    """Counts of all substrings of a text, up to a depth: suffix decoding (Oliaro et al. 2024,
    arXiv:2411.04975), with a trie in place of the paper's suffix tree. After `a b c a b`:

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

    Attributes:
        root: the node of the empty substring.
        matches: the nodes of the last 0, 1, 2, ... tokens, as far as they occurred earlier.
    """

    def __init__(self, max_depth: int, threshold: float) -> None:
        self._max_depth = max_depth
        self._threshold = threshold
        self._tokens: list[int] = []
        self.root = _Node(-1)
        self.matches = [self.root]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append decided tokens."""
        for token in tokens:
            self._tokens.append(token)
            matches = [self.root]
            for node in self.matches:
                child = node.children.get(token) or _Node(token)
                if child.count and len(matches) <= self._max_depth:
                    matches.append(self._expanded(child))
                node.see(child, len(self._tokens))
            self.matches = matches

    def continuation(self, most: int) -> list[int]:
        """Return the tokens that are expected after the longest match.

        There are at most `most`, at most as many as the match is long (the default of the authors'
        own code), and only while their joint probability, estimated from the counts, is at least
        the threshold.
        """
        node = self.matches[-1]
        position = 0  # where the last predicted token ends in the text: a child sets it first
        probability = 1.0
        predicted: list[int] = []
        while len(predicted) < min(most, len(self.matches) - 1):
            if node.best is not None:
                probability *= node.best.count / node.followed
                node = node.best
                token = node.token
                position = node.end
            else:
                # The substring occurred once, or is too long to be counted: repeat what followed
                # it. Beyond the end of the text, that is the prediction itself.
                missing = position - len(self._tokens)
                token = self._tokens[position] if missing < 0 else predicted[missing]
                position += 1
            if probability < self._threshold:
                break
            predicted.append(token)
        return predicted

    def _expanded(self, node: _Node) -> _Node:
        """Return the node, with a child for the token after its only occurrence so far."""
        if not node.children:
            node.see(_Node(self._tokens[node.end]), node.end + 1)
        return node
