"""Chooses how many tokens to draft, in every iteration, by what drafting yielded and cost so far.

An iteration that asks for K tokens yields 1 + s_1 + ... + s_K tokens of a row, where s_j is the
chance that at least j draft tokens are accepted. The K with the most tokens per second is chosen; 0
is regular decoding.

Other programs may slow iterations down for a while, with any number of draft tokens. So each time
is divided by the machine's pace at that moment before times are compared.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

# The weight of an iteration's figures in the next one: acceptance changes with the text, costs with
# the context.
_MEMORY = 0.99

# The acceptance before anything is known. Estimates fade back to it, so that a draft which did not
# pay is tried again.
_PRIOR = 0.8

# A cost is known only where it was tried, perhaps at a bad moment. So of this many iterations one
# drafts nothing, one at least twice as much as seems best, and two a little more and a little less;
# more often at the beginning.
_ROUND = 128

# The draft tokens of the first iterations, after which there is an estimate of every cost: 1 and 4
# are two points of a line, and 0 comes twice because the very first iteration may have to prepare
# something, and is then too slow.
_FIRST = (0, 1, 0, 4)

# A promising number is tried this often before its cost counts as known.
_FEW = 2

# The most that an iteration counts, in expected costs: beyond it something else had the processor.
_SLOWEST = 1.5

# The pace of the machine is the median over this many iterations.
_PACE_WINDOW = 7


class DraftLength:
    """Chooses the number of draft tokens, from finished iterations alone: this class always the same number.

    Attributes:
        most: the largest number that it chooses.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self.most = num_draft_tokens

    def choose(self, num_rows: int) -> int:
        """Return K of the iteration that begins now with this many rows, 0 to `most`."""
        return self.most

    def observe(self, limits: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Learn how many tokens each row was asked for, and accepted."""


def draft_length_of(num_draft_tokens: int | DraftLength) -> DraftLength:
    """Return what chooses K, from a number or from itself."""
    return DraftLength(num_draft_tokens) if isinstance(num_draft_tokens, int) else num_draft_tokens


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
        super().__init__(self._choices[-1])
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
        """Return the best number, or one to be tried.

        Turns 0 to 3 take `_FIRST`. Of each 128 turns the first takes 0, the 65th at least twice the
        best, the 33rd and the 97th the choices next to the best. Turns 4, 8, 16 and 32 take at
        least twice the best, too. Any other turn takes a promising number if there is one.
        """
        if turn < len(_FIRST):
            return _FIRST[turn]
        place = turn % _ROUND
        if place == 0:
            return 0
        costs = self._now.of(self._choices)
        by_number = self._accepted.yields()
        yields = [by_number[number] for number in self._choices]
        rates = [tokens / seconds for tokens, seconds in zip(yields, costs, strict=True)]
        best_rate = max(rates)
        index = rates.index(best_rate)
        best = self._choices[index]
        is_power_of_two = turn.bit_count() == 1
        if place == _ROUND // 2 or is_power_of_two:
            twice = max(1, 2 * best)
            return next((choice for choice in self._choices if choice >= twice), self.most)
        if place == _ROUND // 4:
            return self._choices[min(index + 1, len(self._choices) - 1)]
        if place == 3 * _ROUND // 4:
            return self._choices[max(index - 1, 0)]
        promising = self._promising(yields, costs, best_rate)
        return best if promising is None else promising

    def _promising(
        self, yields: Sequence[float], costs: Sequence[float], best_rate: float
    ) -> int | None:
        """Return a number that has hardly been tried, and would be the best if it cost no more than
        the next smaller one that has; None without one.

        A line across a step in the costs is too high for the numbers before the step.
        """
        tries = [self._now.num_tries(number) for number in self._choices]
        last_tried = max(place for place, count in enumerate(tries) if count)
        cost_below = costs[0]
        for place in range(1, last_tried + 1):
            if tries[place] < _FEW and yields[place] > best_rate * cost_below:
                return self._choices[place]
            if tries[place]:
                cost_below = costs[place]
        return None


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
    """Estimates the seconds of an iteration at the machine's usual pace, for a number of rows.

    A number of draft tokens costs what it did where it was tried; between two that were, costs are
    on a line. One line through all of them would be wrong where costs have a step: GPUs compute in
    tiles, and prepared passes have few sizes.
    """

    def __init__(self) -> None:
        self.num_seen = 0
        self._tried: dict[int, _FadingMean] = {}  # by the number of draft tokens asked for
        self._paces = deque([1.0] * _PACE_WINDOW, _PACE_WINDOW)

    def observe(self, asked: int, seconds: float) -> None:
        if self.num_seen >= len(_FIRST):
            expected = self.at(asked)
            # 1.3 while another program makes everything take 1.3 times as long.
            self._paces.append(seconds / expected)
            seconds /= statistics.median(self._paces)
            seconds = min(seconds, _SLOWEST * expected)
        self.num_seen += 1
        self._tried.setdefault(asked, _FadingMean()).add(seconds)

    def num_tries(self, asked: int) -> int:
        return self._tried[asked].num_added if asked in self._tried else 0

    def at(self, asked: int) -> float:
        [seconds] = self.of([asked])
        return seconds

    def of(self, numbers: Sequence[int]) -> list[float]:
        """Return the costs of these numbers of draft tokens, one of which at least was tried."""
        drafted = sorted(number for number in self._tried if number) or [0]
        return [self._cost(number, drafted) for number in numbers]

    def _cost(self, asked: int, drafted: Sequence[int]) -> float:
        """Return the cost of a number; `drafted` are all that were tried, in which 0 is alone."""
        if asked in self._tried:
            return self._tried[asked].mean
        place = bisect.bisect(drafted, asked)
        first = drafted[max(0, place - 1)]
        last = drafted[min(place, len(drafted) - 1)]
        nearest = first
        if place == len(drafted):  # behind all of them, on the line through both ends
            first = drafted[0]
        slope = 0.0
        if last > first:
            rise = self._tried[last].mean - self._tried[first].mean
            slope = max(0.0, rise / (last - first))
        return self._tried[nearest].mean + slope * (asked - nearest)


class _FadingMean:
    """The mean of noisy numbers, of which the latest count most."""

    def __init__(self) -> None:
        self.num_added = 0
        self.mean = 0.0
        self._weight = 0.0

    def add(self, number: float) -> None:
        if number < self.mean / 2:
            # The old ones were too high: the first iterations of a kind may have to prepare
            # something.
            self._weight = 0.0
        self.num_added += 1
        self._weight = _MEMORY * self._weight + 1
        self.mean += (number - self.mean) / self._weight
