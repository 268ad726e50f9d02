"""Counters on a server's Prometheus page: how they grew while it answered, and the columns from
that.

They give acceptance where answers do not report it, and show whether the server also answered
others, drafts at all, takes prompts from a cache, was restarted, or is only one of several workers.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from harness.engines.requests import RequestRecord
from harness.engines.server.dialects import known_counters
from harness.engines.server.identity import page_of, start_time

_PAGES = ("/metrics", "/prometheus/metrics")
# `vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 123.0`
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})? (\S+)", re.MULTILINE)
# How often a page is read again where it could not be read, and after how many seconds.
_ATTEMPTS = 3
_RETRY_S = 0.1
# vLLM: `vllm:cache_config_info{block_size="128",num_gpu_blocks="9",...} 1.0`
_SIZES = re.compile(r'\b(?:block_size|num_gpu_blocks)="(\d+)"')
_POSITION = re.compile(r'position="(\d+)"')

# Tokens of a request that a server may have counted when it is cancelled, and that did not arrive.
_UNREAD = 16
# Share of our own tokens by which a server may count more or fewer, beyond a token for each request,
# before others are suspected: some count the token that ends a text.
_TOLERATED = 0.01


@dataclass
class Counted:
    """Counters of a server, or how much they grew; None for what it does not count.

    Attributes:
        generated: new tokens.
        drafts: iterations that verified draft tokens.
        proposed, accepted: draft tokens.
        by_position: iterations in which the draft token at each position was accepted.
        preempted: requests that lost their place in the cache to others, and are read again.
        cached: tokens of prompts that were taken from a cache.
        first_tokens, first_token_s: requests that got their first token, and the sum of their times
            until then.
        restarts: of the server. Growth over one is not known.
        running: requests that it answers now, or that wait.
        cache_size: tokens for which its cache has room.
    """

    generated: float | None = None
    drafts: float | None = None
    proposed: float | None = None
    accepted: float | None = None
    by_position: dict[int, float] = field(default_factory=dict)
    preempted: float | None = None
    cached: float | None = None
    first_tokens: float | None = None
    first_token_s: float | None = None
    restarts: int = 0
    running: float | None = None
    cache_size: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether it has any counter."""
        return replace(self, restarts=0) != Counted()

    def plus(self, other: Counted, times: int = 1) -> Counted:
        """The sum of both, the other counted `times` times. A counter that one lacks is 0 there."""
        restarts = self.restarts + times * other.restarts
        summed = replace(self, by_position=dict(self.by_position), restarts=restarts)
        for name in _COUNTERS:
            value = getattr(other, name)
            if value is not None:
                setattr(summed, name, (getattr(summed, name) or 0.0) + times * value)
        for position, value in other.by_position.items():
            before = summed.by_position.get(position, 0.0)
            summed.by_position[position] = before + times * value
        return summed

    def since(self, before: Counted) -> Counted:
        """The growth; no counter where one fell, or the server was restarted."""
        grown = self.plus(before, -1)
        values = [getattr(grown, name) for name in _COUNTERS]
        values += grown.by_position.values()
        if grown.restarts or any(value is not None and value < 0 for value in values):
            return Counted(restarts=grown.restarts)
        return grown


_NO_COUNTERS = ("by_position", "restarts", "running", "cache_size")
_COUNTERS = [entry.name for entry in fields(Counted) if entry.name not in _NO_COUNTERS]


def read_counters(text: str) -> Counted:
    """The known counters of a page in Prometheus's format, summed over the server's engines."""
    counted = Counted()
    names = known_counters()
    for name, labels, number in _SAMPLE.findall(text):
        counter = names.get(name.removesuffix("_total"))
        value = _number(number)
        if counter is None or value is None:
            continue
        if counter == "cache_size":
            sizes = [int(size) for size in _SIZES.findall(labels)]
            counted.cache_size = (counted.cache_size or 0.0) + value * math.prod(sizes)
        elif counter == "running":
            counted.running = (counted.running or 0.0) + value
        elif counter != "by_position":
            sample: dict[str, Any] = {counter: value}
            counted = counted.plus(Counted(**sample))
        elif position := _POSITION.search(labels):
            counted = counted.plus(Counted(by_position={int(position[1]): value}))
    if "vllm:generation_tokens" in text and counted.proposed is None:
        # Without speculation vLLM registers no counters of drafts.
        counted.drafts = counted.proposed = 0.0
    return counted


class CounterPage:
    """The page of a server's counters.

    Args:
        url: of the server's API.
        key: of the API; None without one.
        pages: their addresses, where they are not below the server's own. Counters of several
            are added up.
    """

    def __init__(self, url: str, key: str | None, pages: Sequence[str] = ()) -> None:
        root = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._candidates = [pages] if pages else [(root + path,) for path in _PAGES]
        self._last: Counted | None = None
        self._num_missed = 0
        # A process that began after this one is a restart, and not another worker.
        self._newest_start = time.time()

    def read(self) -> Counted | None:
        """The counters now; None where they cannot be read. A server without any is soon not asked
        again.
        """
        for _ in range(1 if self._last is None else _ATTEMPTS):
            for pages in self._candidates:
                texts = [page_of(url, self._key) for url in pages]
                counted = read_counters("\n".join(text or "" for text in texts))
                if counted.is_known and None not in texts:
                    self._candidates = [pages]
                    starts = [_number(start_time(text or "") or "") for text in texts]
                    newest = max((start for start in starts if start is not None), default=None)
                    self._note_restart(counted, newest)
                    self._last = counted
                    return counted
            if self._last is not None:
                time.sleep(_RETRY_S)
        self._num_missed += 1
        if self._last is None and self._num_missed == _ATTEMPTS:
            self._candidates = []
        return None

    def _note_restart(self, counted: Counted, started: float | None) -> None:
        """Count a restart where the server's start is new, or is not reported and a counter fell."""
        if self._last is None:
            self._newest_start = max(self._newest_start, started or 0.0)
            return
        counted.restarts = self._last.restarts
        fell = not counted.since(self._last).is_known
        if (started or 0.0) > self._newest_start or (started is None and fell):
            counted.restarts += 1
            self._newest_start = max(self._newest_start, started or 0.0)


def traffic_columns(counted: Counted, requests: Iterable[RequestRecord]) -> dict[str, Any]:
    """The columns about tokens that the server generated for other clients, and about ours that
    these counters missed.
    """
    columns: dict[str, Any] = {}
    if counted.generated is None:
        return columns
    ours = [request.num_tokens for request in requests]
    cancelled = [request for request in requests if request.is_cancelled]
    foreign = counted.generated - sum(ours)
    tolerated = len(ours) + _TOLERATED * sum(ours) + _UNREAD * len(cancelled)
    columns["server_tokens"] = round(counted.generated)
    columns["foreign_tokens"] = round(foreign) if foreign > tolerated else 0
    columns["unseen_tokens"] = round(-foreign) if -foreign > tolerated else 0
    return columns


def counter_columns(counted: Counted) -> dict[str, Any]:
    """The columns about preempted requests, caches, first tokens and whether anything was drafted."""
    columns: dict[str, Any] = {}
    if counted.cache_size is not None:
        columns["cache_size"] = round(counted.cache_size)
    if counted.preempted is not None:
        columns["num_preemptions"] = round(counted.preempted)
    if counted.cached is not None:
        columns["cached_tokens"] = round(counted.cached)
    if counted.first_tokens and counted.first_token_s is not None:
        mean_s = counted.first_token_s / counted.first_tokens
        columns["server_time_to_first_token_ms"] = 1000 * mean_s
    drafts = counted.proposed if counted.drafts is None else counted.drafts
    if drafts is not None:
        columns["drafted"] = drafts > 0
    return columns


def counted_acceptance(counted: Counted, num_requests: int) -> dict[str, Any]:
    """The columns about acceptance that counters give; none where nothing was drafted.

    Args:
        num_requests: answers, whose first tokens come without a verification.
    """
    drafts = counted.drafts
    proposed = counted.proposed
    accepted = counted.accepted
    if accepted is None and drafts and counted.generated is not None:
        # Each verification yields one token besides those that it accepts.
        accepted = max(0.0, counted.generated - num_requests - drafts)
    if accepted is None or not (proposed or drafts):
        return {}
    columns: dict[str, Any] = {"acceptance_source": "metrics"}
    if proposed:
        columns["acceptance_rate"] = accepted / proposed
    if drafts:
        columns["mean_acceptance_length"] = 1 + accepted / drafts
        columns["mean_proposed"] = proposed / drafts if proposed else None
    if drafts and counted.by_position:
        rates = [times / drafts for _, times in sorted(counted.by_position.items())]
        columns["marginal_acceptance_by_position"] = [round(rate, 4) for rate in rates]
    return columns


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None
