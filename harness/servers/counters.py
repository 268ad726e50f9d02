"""Reads the counters on a server's Prometheus page, and how much they grow while the server answers.

Acceptance is computed from the counters if answers do not report it. They also show whether the server answers other
clients, drafts at all, takes prompts from a cache, was restarted, or is only one of several workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.config.amounts import counted
from harness.engines.counts import Counts, added, growth
from harness.servers.dialects import known_counters, would_show_drafts
from harness.servers.http import RequestFailed, page, root_of
from harness.servers.identity import samples, start_time

_PAGES = ("/metrics", "/prometheus/metrics")
# How often reading a page is attempted, and the seconds between two attempts.
_ATTEMPTS = 3
_RETRY_S = 0.1
# The most seconds to wait, before a question, until the server has answered all other requests; and the seconds between
# two readings of its counters.
_MOST_DRAINING_S = 10.0
_DRAIN_LOOK_S = 0.05

# A larger counter, or a draft position with more digits, can only come from a damaged page.
_MOST_COUNTED = 1e18
_MOST_DIGITS = 4


def read_counters(text: str) -> Counts:
    """Read the known counters on a page in Prometheus's format; counters of several engines are added up."""
    totals: dict[str, float] = {}
    accepted_at: dict[int, float] = {}
    drafted_at: dict[int, float] = {}
    by_position = {"accepted_at": accepted_at, "drafted_at": drafted_at}
    # The name on the page of each counter that was found; also of those whose values are not used.
    words: dict[str, str] = {}
    names = known_counters()
    for sample in samples(text):
        counter = names.get(sample.name.removesuffix("_total"))
        if counter is None:
            continue
        words[counter] = sample.name
        if not 0 <= sample.value < _MOST_COUNTED:
            continue
        if counter in by_position:
            numbers = by_position[counter]
            position = sample.labels.get("position", sample.labels.get("token_position", ""))
            if position.isdecimal() and len(position) <= _MOST_DIGITS:
                numbers[int(position)] = numbers.get(int(position), 0.0) + sample.value
            continue
        totals[counter] = totals.get(counter, 0.0) + sample.value
    if drafted_at:
        # Every iteration that drafts has a first draft token, so the number of first draft tokens is the number of
        # iterations.
        totals["drafts"] = drafted_at.get(0, 0.0)
        totals["proposed"] = sum(drafted_at.values())
        totals["accepted"] = sum(accepted_at.values())
    # This kind of server would have counters of drafts if it speculated. Without them, it has drafted nothing.
    shown = ("drafts", "proposed", "drafted_at")
    if words.keys().isdisjoint(shown) and would_show_drafts(words.get("generated")):
        totals |= {"drafts": 0.0, "proposed": 0.0}
    return Counts(accepted_at=accepted_at, words=words, **totals)


class CounterPage:
    """The page with a server's counters. It determines how much the counters grow while the server answers a question.

    Attributes:
        between: how much they grew while this run asked nothing, at all starts of the server so far (`ServerArm` hands
            it on to the page of the next start); None if a reading is missing.

    Args:
        url: address of the server's API.
        key: key of the API; None without one.
        pages: addresses of pages with counters, which are added up; empty to look for the page at the server's own
            address.
        say: shows a line to the user.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        pages: Sequence[str],
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        root = root_of(url)
        self._key = key
        # Alternatives, each with the pages that are read together. `read` keeps the first one that has counters.
        self._candidates = [pages] if pages else [(root + path,) for path in _PAGES]
        self._last: Counts | None = None
        self._num_missed = 0
        # The latest start time that the server has reported, in seconds since the epoch.
        self._newest_start: float | None = None
        self._say = say
        # The reading at the beginning of the current question; None if it failed.
        self._before: Counts | None = None
        self.between: Counts | None = Counts()
        # The reading since which this run has asked nothing; None if it failed.
        self._since: Counts | None = None
        # The number of restarts at the end of the last question. A restart after that counts for the next question.
        self._restarts_reported = 0.0
        # How many requests of the last question were left unfinished, so that the server may still be answering them.
        self._num_left = 0
        # Whether `begin` has given up waiting; and how many requests of other clients were then running.
        self._is_always_busy = False
        self._num_others = 0.0

    def read(self) -> Counts | None:
        """Read the counters now; None if they cannot be read.

        If no page with counters was found in `_ATTEMPTS` calls, the server is not asked again. Once a page was found, a
        call reads it up to `_ATTEMPTS` times until that succeeds.
        """
        for _ in range(1 if self._last is None else _ATTEMPTS):
            for pages in self._candidates:
                try:
                    texts = [page(url, self._key) for url in pages]
                except RequestFailed:
                    continue
                counts = read_counters("\n".join(texts))
                if counts.is_known:
                    self._candidates = [pages]
                    starts = [float(start) for start in map(start_time, texts) if start]
                    self._last = self._with_restarts(counts, max(starts, default=None))
                    return self._last
            if self._last is not None:
                time.sleep(_RETRY_S)
        self._num_missed += 1
        if self._last is None and self._num_missed == _ATTEMPTS:
            self._candidates = []
        return None

    def _with_restarts(self, counts: Counts, started: float | None) -> Counts:
        """The counters, with the number of restarts so far.

        A restart is counted if the server's start time is later than before. If the server reports no start time, a
        restart is counted if a counter has fallen.
        """
        restarts = 0.0 if self._last is None else self._last.restarts
        if started is None and self._last is not None:
            # If a counter has fallen, `growth` knows nothing.
            restarts += not growth(replace(counts, restarts=restarts), self._last).is_known
        elif started is not None and self._newest_start is not None:
            restarts += started > self._newest_start
            if started < self._newest_start:
                # An older process has answered again. So there was no restart: several worker processes share the
                # address.
                restarts = 0.0
        if started is not None:
            self._newest_start = max(started, self._newest_start or started)
        return replace(counts, restarts=restarts)

    def show_drafts(self) -> bool:
        """Whether the server has drafted anything so far, according to its counters; False if these are not known.

        Called once, when a connection begins: `between` grows from this reading on.
        """
        self._since = self.read()
        counts = self._since or Counts()
        return bool(counts.drafts or counts.proposed)

    def look(self) -> None:
        """Add the counters' growth since the last question to `between`."""
        self._end_between(self.read())

    def _end_between(self, now: Counts | None) -> None:
        """Add the growth from `_since` until the reading `now` to `between`, which becomes None for good if a reading
        is missing.
        """
        if now is None or self._since is None or self.between is None:
            self.between = None
        else:
            self.between = added(growth(now, self._since), self.between)
        self._since = now

    def begin(self) -> None:
        """Wait until the server is idle, but at most `_MOST_DRAINING_S` seconds, and read the counters.

        If the server stays busy, the user is told once, and later calls do not wait.
        """
        until = time.monotonic() + _MOST_DRAINING_S
        counts = self.read()
        while counts is not None and counts.running and not self._is_always_busy:
            if time.monotonic() > until:
                self._is_always_busy = True
                self._num_others = max(0.0, counts.running - self._num_left)
                number = counted(round(self._num_others or counts.running), "request")
                whose = "others" if self._num_others else "this run"
                self._say(f"the server is still answering {number} of {whose}")
            time.sleep(_DRAIN_LOOK_S)
            counts = self.read()
        self._end_between(counts)
        # `growth` subtracts this number, so a restart since the last question counts in this one.
        self._before = counts and replace(counts, restarts=self._restarts_reported)

    def end(self, num_left: int) -> Counts | None:
        """Return the growth of the counters since `begin`; None if the counters could not be read.

        `running` is the number of other clients' requests when a `begin` gave up waiting for them, since this program
        connected to the server; 0 if none did.

        Args:
            num_left: how many requests of this question were left unfinished, so that the server may still answer them.
        """
        self._num_left = num_left
        now = self._since = self.read()
        if now is None or self._before is None:
            return None
        self._restarts_reported = now.restarts
        grown = growth(now, self._before)
        # An older process may have answered again, after which there are fewer restarts than before.
        return replace(grown, running=self._num_others, restarts=max(0.0, grown.restarts))
