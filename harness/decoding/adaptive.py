"""How many tokens to draft: chosen in every iteration from what drafting yielded and cost until then.

An iteration that asks for K tokens yields 1 + s_1 + ... + s_K tokens of a row, where s_j is the chance that at least j
draft tokens are accepted, and takes drafting(K) + verifying(w), where w <= K tokens are offered. The K with the most
tokens per second is chosen; 0 is regular decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

# What an iteration's figures still count in the next one: acceptance changes with the text, costs with the context.
_MEMORY = 0.99
_COST_MEMORY = 0.98

# Before anything is known. What was learned fades to this as well, so that a draft which did not pay is tried again.
_PRIOR = 0.8

# An iteration that drafts nothing is timed at least this often.
_REFRESH = 128

# The first iterations, after which every part of the costs is known.
_FIRST = (0, 4, 0, 1)


class DraftLength(Protocol):
    """Chooses the number of draft tokens. What it knows must come from finished iterations alone."""

    most: int

    def choose(self, num_rows: int) -> int:
        """K of the iteration that begins now, 0 to `most`."""
        ...

    def drafted(self) -> None:
        """The proposal is there."""
        ...

    def observe(self, limits: Sequence[int], lengths: Sequence[int], num_accepted: Sequence[int]) -> None:
        """How it ended: how many tokens each row was asked for, was offered, and accepted."""
        ...


class Constant(DraftLength):
    """The same number every time."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.most = num_draft_tokens

    def choose(self, num_rows: int) -> int:
        return self.most

    def drafted(self) -> None:
        """Nothing to learn."""

    def observe(self, limits: Sequence[int], lengths: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Nothing to learn."""


class Adaptive(DraftLength):
    """The number that yields the most tokens per second, by the measured acceptance and the measured costs.

    It never reads tokens, and of an offer no more than was accepted; so the output keeps the target's distribution.
    Times are read where the loop waits for the device anyway: work that was queued while drafting may count as
    verification, which changes their parts and not their sum.

    Args:
        choices: the numbers to choose from, ascending, beginning with 0.
        clock: seconds, monotonic.
    """

    def __init__(self, choices: Sequence[int], clock: Callable[[], float] = time.perf_counter) -> None:
        self._choices, self._clock = list(choices), clock
        self.most = self._choices[-1]
        self._accepted = _Chain(self.most)
        self._offered = _Chain(self.most)
        self._costs: dict[int, _Costs] = {}
        self._now = _Costs()
        self._began = self._proposed = 0.0
        self._asked = 0

    def choose(self, num_rows: int) -> int:
        # Rows end at different times, and an iteration over a few of them costs less.
        self._now = self._costs.setdefault(num_rows.bit_length(), _Costs())
        count = self._best()
        self._asked = max(choice for choice in self._choices if choice <= count)
        self._began = self._proposed = self._clock()
        return self._asked

    def drafted(self) -> None:
        self._proposed = self._clock()

    def observe(self, limits: Sequence[int], lengths: Sequence[int], num_accepted: Sequence[int]) -> None:
        asked, width = max(limits), max(lengths)
        drafting, verifying = self._proposed - self._began, self._clock() - self._proposed
        self._now.observe(asked, width, drafting, verifying)
        self._accepted.fade()
        self._offered.fade()
        weight = 1 / len(limits)
        for limit, accepted in zip(limits, num_accepted, strict=True):
            self._accepted.add(limit, accepted, weight)
        if asked:
            self._offered.add(asked, width, 1)

    def _best(self) -> int:
        costs = self._now
        if costs.num_seen < len(_FIRST):
            return _FIRST[costs.num_seen]
        if costs.since_step >= _REFRESH:
            return 0
        best, highest = 0, 1 / costs.step.mean
        tokens = survival = 1.0
        width, offered = 0.0, 1.0
        accepted_rates, offered_rates = self._accepted.rates(), self._offered.rates()
        some = offered_rates[0]  # chance that anything is offered
        choices = set(self._choices)
        for k in range(1, self.most + 1):
            survival *= accepted_rates[k - 1]
            tokens += survival
            offered *= offered_rates[k - 1]
            width += offered
            if k not in choices:
                continue
            verifying = (1 - some) * costs.step.mean + some * costs.verifying.at(width / some)
            rate = tokens / (costs.drafting.at(k) + verifying)
            if rate > highest:
                best, highest = k, rate
        return best


class _Chain:
    """How often a chain of events reaches each length, if it has reached the one before."""

    def __init__(self, most: int) -> None:
        self._reached, self._tried = [0.0] * most, [0.0] * most

    def fade(self) -> None:
        self._reached = [_MEMORY * count for count in self._reached]
        self._tried = [_MEMORY * count for count in self._tried]

    def add(self, most: int, length: int, weight: float) -> None:
        """A chain that could have had `most` links and had `length`."""
        for place in range(min(length + 1, most)):
            self._tried[place] += weight
        for place in range(length):
            self._reached[place] += weight

    def rates(self) -> list[float]:
        """By place. What is not known of one is taken from the place before it."""
        found, before = [], _PRIOR
        for reached, tried in zip(self._reached, self._tried, strict=True):
            before = (reached + before) / (tried + 1)
            found.append(before)
        return found


class _Costs:
    """Seconds of an iteration's parts, for about one number of rows."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.since_step = 0
        self.step = _Line()  # of an iteration that verifies nothing
        self.verifying = _Line()  # by the number of tokens verified, from 1
        self.drafting = _Line()  # by the number asked for

    def observe(self, asked: int, width: int, drafting: float, verifying: float) -> None:
        self.num_seen += 1
        self.since_step += 1
        if asked:
            self.drafting.add(asked, drafting)
        if width:
            self.verifying.add(width, verifying)
        else:
            self.step.add(0, verifying)
            self.since_step = 0
            if not self.verifying.weight:
                # Until more is known a few tokens more cost nothing.
                self.verifying.add(0, verifying)


class _Line:
    """A straight line through noisy points, of which the latest count most."""

    def __init__(self) -> None:
        self.weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        if self.weight > 4:
            # Something else had the processor.
            y = min(y, 2 * self.at(x))
        sums = ("weight", 1.0), ("_x", x), ("_y", y), ("_xx", x * x), ("_xy", x * y)
        for name, value in sums:
            setattr(self, name, _COST_MEMORY * getattr(self, name) + value)

    @property
    def mean(self) -> float:
        return self._y / self.weight

    def at(self, x: float) -> float:
        """Level where one x alone is known, and never falling."""
        mean_x, mean_y = self._x / self.weight, self.mean
        variance = self._xx / self.weight - mean_x * mean_x
        slope = (self._xy / self.weight - mean_x * mean_y) / variance if variance > 1e-9 else 0.0
        return max(mean_y + max(slope, 0.0) * (x - mean_x), 0.1 * mean_y)
