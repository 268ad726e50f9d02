"""Chooses how many tokens to draft, in every iteration, by what drafting yielded and cost so far.

An iteration that asks for K tokens yields 1 + s_1 + ... + s_K tokens of a row, where s_j is the
chance that at least j draft tokens are accepted. The K with the most tokens per second is chosen; 0
is regular decoding.

Other programs may slow iterations down for a while, with any number of draft tokens. So each time
is divided by the machine's pace at that moment before times are compared.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

# The weight of an iteration's figures in the next one: acceptance changes with the text, costs with
# the context.
_MEMORY = 0.99

# The acceptance before anything is known. Estimates fade back to it, so that a draft which did not
# pay is tried again.
_PRIOR = 0.8

# A cost is known only where it was tried, perhaps at a bad moment. So of this many iterations one
# drafts nothing and one at least twice as much as seems best; more often at the beginning.
_ROUND = 128

# The draft tokens of the first iterations, after which there is an estimate of every cost: 1 and 4
# are two points of the line of costs, and 0 comes twice because the very first iteration may have
# to prepare something, and is then too slow.
_FIRST = (0, 1, 0, 4)

# The pace of the machine is the median over this many iterations.
_PACE_WINDOW = 7


class DraftLength(Protocol):
    """Chooses the number of draft tokens, from finished iterations alone.

    Attributes:
        most: the largest number that it chooses.
    """

    most: int

    def choose(self, num_rows: int) -> int:
        """Return K of the iteration that begins now with this many rows, 0 to `most`."""
        ...

    def observe(self, limits: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Learn how many tokens each row was asked for, and accepted."""
        ...


class Constant(DraftLength):
    """Chooses the same number every time."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.most = num_draft_tokens

    def choose(self, num_rows: int) -> int:
        return self.most

    def observe(self, limits: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Learn nothing."""


def draft_length_of(num_draft_tokens: int | DraftLength) -> DraftLength:
    """Return what chooses K, from a number or from itself."""
    return Constant(num_draft_tokens) if isinstance(num_draft_tokens, int) else num_draft_tokens


class Adaptive(DraftLength):
    """Chooses the number that yields the most tokens per second, by measured acceptance and costs.

    It looks at how many tokens were accepted, never at which tokens were proposed. So K does not
    depend on the tokens that it decides about, and the output keeps the target's distribution.

    Args:
        choices: the numbers to choose from, ascending, beginning with 0.
        clock: seconds, monotonic.
    """

    def __init__(
        self, choices: Sequence[int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._choices = list(choices)
        self._clock = clock
        self.most = self._choices[-1]
        self._accepted = _AcceptanceByPlace(self.most)
        self._costs: dict[int, _IterationCosts] = {}
        self._now = _IterationCosts()
        self._began = 0.0

    def choose(self, num_rows: int) -> int:
        # Rows end at different times, and an iteration over a few of them costs less: 1 row, 2 or
        # 3, 4 to 7 and so on have costs of their own.
        self._now = self._costs.setdefault(num_rows.bit_length(), _IterationCosts())
        wanted = self._wanted(self._now.num_seen)
        self._began = self._clock()
        return max(choice for choice in self._choices if choice <= wanted)

    def observe(self, limits: Sequence[int], num_accepted: Sequence[int]) -> None:
        self._now.observe(max(limits), self._clock() - self._began)
        self._accepted.observe(limits, num_accepted)

    def _wanted(self, turn: int) -> int:
        """Return the best number, or one to be tried: turns 0 to 3 take `_FIRST`, every multiple of
        128 takes 0, and turns 4, 8, 16, 32 and 64, and 64 more than each multiple of 128, take at
        least twice the best.
        """
        if turn < len(_FIRST):
            return _FIRST[turn]
        if turn % _ROUND == 0:
            return 0
        best = self._best()
        is_power_of_two = turn.bit_count() == 1
        if turn % _ROUND == _ROUND // 2 or is_power_of_two:
            return self._at_least(max(1, 2 * best))
        return best

    def _at_least(self, number: int) -> int:
        """Return the smallest choice that is not below a number; the largest if all are."""
        for choice in self._choices:
            if choice >= number:
                return choice
        return self.most

    def _best(self) -> int:
        best = 0
        most_per_second = 0.0
        costs = self._now.of(self._choices)
        yields = self._accepted.yields()
        for number, seconds in zip(self._choices, costs, strict=True):
            per_second = yields[number] / seconds
            if per_second > most_per_second:
                best = number
                most_per_second = per_second
        return best


class _AcceptanceByPlace:
    """Estimates how often the draft token at each place is accepted, if those before it are.

    A token that was asked for, but not offered, counts as rejected.
    """

    def __init__(self, most: int) -> None:
        self._accepted = [0.0] * most
        self._tried = [0.0] * most

    def observe(self, limits: Sequence[int], num_accepted: Sequence[int]) -> None:
        self._accepted = [_MEMORY * count for count in self._accepted]
        self._tried = [_MEMORY * count for count in self._tried]
        if not max(limits):
            return
        share = 1 / len(limits)
        for limit, accepted in zip(limits, num_accepted, strict=True):
            # The accepted tokens were tested, and the first rejected one.
            for place in range(min(accepted + 1, limit)):
                self._tried[place] += share
                if place < accepted:
                    self._accepted[place] += share

    def yields(self) -> list[float]:
        """Return the tokens of an iteration that asks for 0, 1, 2, ... draft tokens.

        Where little is known of a place, its rate is close to that of the place before it.
        """
        yields = [1.0]
        rate = _PRIOR
        survival = 1.0
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            rate = (accepted + rate) / (tried + 1)
            survival *= rate
            yields.append(yields[-1] + survival)
        return yields


class _IterationCosts:
    """Estimates the seconds of an iteration at the machine's usual pace, for a number of rows."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._step = _FadingLine()  # of iterations without draft tokens
        self._drafted = _FadingLine()  # of the others, by the number of tokens asked for
        self._paces = deque([1.0] * _PACE_WINDOW, _PACE_WINDOW)

    def observe(self, asked: int, seconds: float) -> None:
        if self.num_seen >= len(_FIRST):
            # 1.3 while another program makes everything take 1.3 times as long.
            self._paces.append(seconds / self.at(asked))
            seconds /= statistics.median(self._paces)
        self.num_seen += 1
        line = self._drafted if asked else self._step
        line.add(asked, seconds)

    def at(self, asked: int) -> float:
        line = self._drafted if asked and self._drafted.weight else self._step
        return line.at(asked)

    def of(self, numbers: Sequence[int]) -> list[float]:
        """Return the costs of 0, which is the first, and of further numbers of draft tokens."""
        line = self._drafted if self._drafted.weight else self._step
        return [self._step.at(0), *line.values(numbers[1:])]


class _FadingLine:
    """Fits a straight line to noisy points, of which the latest count most."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        # The number of points and their sums, in which each point fades with time.
        self.weight = 0.0
        self._x = 0.0
        self._y = 0.0
        self._xx = 0.0
        self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        if self.weight and y < self.at(x) / 2:
            # The old points were too slow: the first iterations of a kind may have to prepare
            # something.
            self._forget()
        elif self.weight > 4:
            # Something else had the processor.
            y = min(y, 2 * self.at(x))
        self.weight = _MEMORY * self.weight + 1
        self._x = _MEMORY * self._x + x
        self._y = _MEMORY * self._y + y
        self._xx = _MEMORY * self._xx + x * x
        self._xy = _MEMORY * self._xy + x * y

    def at(self, x: float) -> float:
        """Return y at x. The line never falls, and is level while a single x is known."""
        [y] = self.values([x])
        return y

    def values(self, places: Sequence[float]) -> list[float]:
        """Return y at each x, as `at` does."""
        mean_x = self._x / self.weight
        mean_y = self._y / self.weight
        variance = self._xx / self.weight - mean_x * mean_x
        slope = 0.0
        if variance > 1e-9:
            covariance = self._xy / self.weight - mean_x * mean_y
            slope = max(0.0, covariance / variance)
        least = 0.1 * mean_y
        return [max(mean_y + slope * (x - mean_x), least) for x in places]
