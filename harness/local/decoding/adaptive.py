"""Chooses how many tokens to draft, in every iteration: the number that measured best among those that were tried.

An iteration that asks for K tokens yields 1 + s_1 + ... + s_K tokens of a row, where s_j is the
chance that at least j draft tokens are accepted. The K with the most tokens per second is chosen; 0
is regular decoding.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence

# The weight of an iteration's figures in the next one: acceptance changes with the text, costs with
# the context.
_DECAY = 0.99

# The acceptance before anything is known. Estimates fade back to it, so that a draft which did not
# pay is tried again.
_PRIOR = 0.8

# A number is tried this often before its cost counts as known: the first time it may have to prepare something.
_MIN_SAMPLES = 2

# Once in this many iterations another number is tried again.
_EXPLORE_EVERY = 32

# The most that an iteration counts, in costs so far: beyond it something else had the processor.
_OUTLIER_FACTOR = 1.5


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


class Adaptive(DraftLength):
    """Chooses the number that yields the most tokens per second, by measured acceptance and costs.

    Numbers up to twice the best one are tried, so that a draft which does not pay is never asked for many tokens.

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
        # Seconds of iterations, by about how many rows they have, and by the number of draft tokens asked for.
        self._costs: dict[int, dict[int, _Seconds]] = {}
        self._costs_at_this_load: dict[int, _Seconds] = {}
        self._began = 0.0
        self._chosen = 0
        self._catches_up = False

    def choose(self, num_rows: int) -> int:
        # Rows end at different times, and an iteration over a few of them costs less: 1 row, 2 or
        # 3, 4 to 7 and so on have costs of their own.
        load_bucket = num_rows.bit_length()
        self._costs_at_this_load = self._costs.setdefault(
            load_bucket, {number: _Seconds() for number in self._choices}
        )
        number = self._wanted()
        # A draft first reads the tokens of the iterations before it that went without.
        self._catches_up = number > 0 and self._chosen == 0
        self._chosen = number
        self._began = self._clock()
        return number

    def observe(self, limits: Sequence[int], num_accepted: Sequence[int]) -> None:
        # Of a number that rows near their end have in place of their choice, too.
        seconds = self._costs_at_this_load.setdefault(max(limits), _Seconds())
        if not self._catches_up:
            seconds.add(self._clock() - self._began)
        self._accepted.observe(limits, num_accepted)

    def _wanted(self) -> int:
        """Return the best number, or one to be tried."""
        yields = self._accepted.yields()
        rates = {
            number: yields[number] / self._costs_at_this_load[number].mean
            for number in self._choices
            if self._costs_at_this_load[number].is_known
        }
        best = max(rates, key=lambda number: rates[number], default=0)
        last = bisect.bisect_left(self._choices, max(1, 2 * best))
        in_reach = self._choices[: last + 1]
        unknown = [number for number in in_reach if not self._costs_at_this_load[number].is_known]
        if unknown:
            return unknown[0]
        num_seen = sum(seconds.num_added for seconds in self._costs_at_this_load.values())
        if num_seen % _EXPLORE_EVERY == 0:
            return in_reach[num_seen // _EXPLORE_EVERY % len(in_reach)]
        return best


class _AcceptanceByPlace:
    """Estimates how often the draft token at each place is accepted, if those before it are.

    A token that was asked for, but not offered, counts as rejected.
    """

    def __init__(self, most: int) -> None:
        self._accepted = [0.0] * most
        self._tried = [0.0] * most

    def observe(self, limits: Sequence[int], num_accepted: Sequence[int]) -> None:
        self._accepted = [_DECAY * count for count in self._accepted]
        self._tried = [_DECAY * count for count in self._tried]
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


class _Seconds:
    """The mean time of noisy iterations; the latest count most."""

    def __init__(self) -> None:
        self.num_added = 0
        self.mean = 0.0
        self._weight = 0.0

    @property
    def is_known(self) -> bool:
        return self.num_added >= _MIN_SAMPLES

    def add(self, seconds: float) -> None:
        if self.is_known:
            seconds = min(seconds, _OUTLIER_FACTOR * self.mean)
        if seconds < self.mean / 2:
            # The old ones were too high: the first iterations of a kind may have to prepare
            # something.
            self._weight = 0.0
        self.num_added += 1
        self._weight = _DECAY * self._weight + 1
        self.mean += (seconds - self.mean) / self._weight
