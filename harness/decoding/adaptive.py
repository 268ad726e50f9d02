"""How many tokens to draft: chosen in every iteration from what drafting yielded and cost until then.

An iteration that asks for K tokens yields 1 + s_1 + ... + s_K tokens of a row, where s_j is the chance that at least j
draft tokens are accepted. The K with the most tokens per second is chosen; 0 is regular decoding.

Other programs may slow iterations down for a while, with any number of draft tokens. So each time is divided by the
machine's pace at that moment before times are compared.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

# What an iteration's figures still count in the next one: acceptance changes with the text, costs with the context.
_MEMORY = 0.99

# Before anything is known. What was learned fades to this as well, so that a draft which did not pay is tried again.
_PRIOR = 0.8

# Costs are known only of what was tried, perhaps at a bad moment. So of this many iterations one drafts nothing and one
# at least twice as much as seems best; at the beginning, when every moment counts much, more often.
_ROUND = 128

# The first iterations, after which there is an estimate of every cost.
_FIRST = (0, 1, 0, 4)

# The pace of the machine is the median over this many iterations.
_PACE_WINDOW = 7


class DraftLength(Protocol):
    """Chooses the number of draft tokens. What it knows must come from finished iterations alone."""

    most: int

    def choose(self, num_rows: int) -> int:
        """K of the iteration that begins now, 0 to `most`."""
        ...

    def observe(self, limits: Sequence[int], num_accepted: Sequence[int]) -> None:
        """How it ended: how many tokens each row was asked for, and accepted."""
        ...


class Constant(DraftLength):
    """The same number every time."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.most = num_draft_tokens

    def choose(self, num_rows: int) -> int:
        return self.most

    def observe(self, limits: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Nothing to learn."""


class Adaptive(DraftLength):
    """The number that yields the most tokens per second, by the measured acceptance and the measured costs.

    It never reads tokens, and of an offer no more than was accepted; so the output keeps the target's distribution.

    Args:
        choices: the numbers to choose from, ascending, beginning with 0.
        clock: seconds, monotonic.
    """

    def __init__(
        self, choices: Sequence[int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._choices, self._clock = list(choices), clock
        self.most = self._choices[-1]
        self._accepted = _Chain(self.most)
        self._costs: dict[int, _Costs] = {}
        self._now = _Costs()
        self._began = 0.0

    def choose(self, num_rows: int) -> int:
        # Rows end at different times, and an iteration over a few of them costs less.
        self._now = self._costs.setdefault(num_rows.bit_length(), _Costs())
        wanted = self._wanted(self._now.num_seen)
        self._began = self._clock()
        return max(choice for choice in self._choices if choice <= wanted)

    def observe(self, limits: Sequence[int], num_accepted: Sequence[int]) -> None:
        self._now.observe(max(limits), self._clock() - self._began)
        self._accepted.observe(limits, num_accepted)

    def _wanted(self, turn: int) -> int:
        if turn < len(_FIRST):
            return _FIRST[turn]
        if turn % _ROUND == 0:
            return 0
        best = self._best()
        if turn % _ROUND == _ROUND // 2 or turn & (turn - 1) == 0:
            return next(
                (choice for choice in self._choices if choice >= max(1, 2 * best)), self.most
            )
        return best

    def _best(self) -> int:
        costs = self._now
        best, highest = 0, 1 / costs.at(0)
        tokens = survival = 1.0
        choices = set(self._choices)
        for k, rate in enumerate(self._accepted.rates(), 1):
            survival *= rate
            tokens += survival
            if k in choices and tokens / costs.at(k) > highest:
                best, highest = k, tokens / costs.at(k)
        return best


class _Chain:
    """How often the draft token at each place is accepted, if those before it are; one that is not offered never is."""

    def __init__(self, most: int) -> None:
        self._accepted, self._tried = [0.0] * most, [0.0] * most

    def observe(self, limits: Sequence[int], num_accepted: Sequence[int]) -> None:
        self._accepted = [_MEMORY * count for count in self._accepted]
        self._tried = [_MEMORY * count for count in self._tried]
        for limit, accepted in zip(limits, num_accepted, strict=True):
            for place in range(min(accepted + 1, limit)):
                self._tried[place] += 1 / len(limits)
                self._accepted[place] += (place < accepted) / len(limits)

    def rates(self) -> list[float]:
        """By place. What is not known of one is taken from the place before it."""
        found, before = [], _PRIOR
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            before = (accepted + before) / (tried + 1)
            found.append(before)
        return found


class _Costs:
    """Seconds of an iteration at the machine's usual pace, for about one number of rows."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._step = _Line()  # of iterations without draft tokens
        self._drafted = _Line()  # of the others, by the number of tokens asked for
        self._paces = deque([1.0] * _PACE_WINDOW, _PACE_WINDOW)

    def observe(self, asked: int, seconds: float) -> None:
        if self.num_seen >= len(_FIRST):
            self._paces.append(seconds / self.at(asked))
            seconds /= statistics.median(self._paces)
        self.num_seen += 1
        (self._drafted if asked else self._step).add(asked, seconds)

    def at(self, asked: int) -> float:
        return (self._drafted if asked and self._drafted.weight else self._step).at(asked)


class _Line:
    """A straight line through noisy points, of which the latest count most."""

    def __init__(self) -> None:
        self.weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        if self.weight and y < self.at(x) / 2:
            # The points were wrong: the first iterations of a kind may have to prepare something.
            self.weight = self._x = self._y = self._xx = self._xy = 0.0
        elif self.weight > 4:
            # Something else had the processor.
            y = min(y, 2 * self.at(x))
        self.weight = _MEMORY * self.weight + 1
        self._x = _MEMORY * self._x + x
        self._y = _MEMORY * self._y + y
        self._xx = _MEMORY * self._xx + x * x
        self._xy = _MEMORY * self._xy + x * y

    def at(self, x: float) -> float:
        """Level where one x alone is known, and never falling."""
        mean_x, mean_y = self._x / self.weight, self._y / self.weight
        variance = self._xx / self.weight - mean_x * mean_x
        slope = (self._xy / self.weight - mean_x * mean_y) / variance if variance > 1e-9 else 0.0
        return max(mean_y + max(slope, 0.0) * (x - mean_x), 0.1 * mean_y)
