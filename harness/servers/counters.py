"""Counters on a server's Prometheus page: how they grew while it answered, and the columns from
that.

They give acceptance where answers do not report it, and show whether the server also answered
others, drafts at all, takes prompts from a cache, was restarted, or is only one of several workers.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from typing import Any

from harness.engines.counts import Counts, growth, is_known
from harness.engines.requests import RequestRecord
from harness.servers.dialects import known_counters
from harness.servers.identity import page_of, start_time

_PAGES = ("/metrics", "/prometheus/metrics")
# `vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 123.0`
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})? (\S+)", re.MULTILINE)
# How often a page is read again where it could not be read, and after how many seconds.
_ATTEMPTS = 3
_RETRY_S = 0.1
# vLLM: `vllm:cache_config_info{block_size="128",num_gpu_blocks="9",...} 1.0`
_SIZES = re.compile(r'\b(?:block_size|num_gpu_blocks)="(\d+)"')
_POSITION = re.compile(r'position="(\d+)"')

# Of a cancelled request, the tokens that a server may have counted and that did not arrive.
_UNREAD = 16
# Share of our own tokens by which a server may count more or fewer, beyond a token for each request,
# before others are suspected: some count the token that ends a text.
_TOLERATED = 0.01


def read_counters(text: str) -> Counts:
    """The known counters of a page in Prometheus's format, summed over the server's engines."""
    counts: Counts = {}
    names = known_counters()
    for name, labels, number in _SAMPLE.findall(text):
        counter = names.get(name.removesuffix("_total"))
        value = _number(number)
        position = _POSITION.search(labels)
        if counter is None or value is None or (counter == "by_position" and not position):
            continue
        if counter == "cache_size":
            value *= math.prod(map(int, _SIZES.findall(labels)))
        elif counter == "by_position" and position:
            counter = f"accepted at {position[1]}"
        counts[counter] = counts.get(counter, 0.0) + value
    if "vllm:generation_tokens" in text and "proposed" not in counts:
        # Without speculation vLLM registers no counters of drafts.
        counts |= {"drafts": 0.0, "proposed": 0.0}
    return counts


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
        self._last: Counts | None = None
        self._num_missed = 0
        # A process that began after this one is a restart, and not another worker.
        self._newest_start = time.time()

    def read(self) -> Counts | None:
        """The counters now; None where they cannot be read. A server without any is soon not asked
        again.
        """
        for _ in range(1 if self._last is None else _ATTEMPTS):
            for pages in self._candidates:
                texts = [page_of(url, self._key) for url in pages]
                counts = read_counters("\n".join(text or "" for text in texts))
                if counts and None not in texts:
                    self._candidates = [pages]
                    starts = [_number(start_time(text or "") or "") for text in texts]
                    newest = max((start for start in starts if start is not None), default=None)
                    self._note_restart(counts, newest)
                    self._last = counts
                    return counts
            if self._last is not None:
                time.sleep(_RETRY_S)
        self._num_missed += 1
        if self._last is None and self._num_missed == _ATTEMPTS:
            self._candidates = []
        return None

    def _note_restart(self, counts: Counts, started: float | None) -> None:
        """Count a restart where the server's start is new, or is not reported and a counter fell."""
        counts["restarts"] = 0.0
        if self._last is not None:
            counts["restarts"] = self._last["restarts"]
            was_restarted = not is_known(growth(counts, self._last))
            if started is not None:
                was_restarted = started > self._newest_start
            counts["restarts"] += was_restarted
        self._newest_start = max(self._newest_start, started or 0.0)


def traffic_columns(counts: Counts, requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """The columns about tokens that the server generated for other clients, and about ours that
    these counters missed.
    """
    if "generated" not in counts:
        return {}
    ours = [request.num_tokens for request in requests]
    num_cancelled = sum(request.is_cancelled for request in requests)
    foreign = counts["generated"] - sum(ours)
    tolerated = len(ours) + _TOLERATED * sum(ours) + _UNREAD * num_cancelled
    return {
        "server_tokens": round(counts["generated"]),
        "foreign_tokens": round(foreign) if foreign > tolerated else 0,
        "unseen_tokens": round(-foreign) if -foreign > tolerated else 0,
    }


def counter_columns(counts: Counts) -> dict[str, Any]:
    """The columns about preempted requests, caches, first tokens and whether anything was drafted."""
    columns: dict[str, Any] = {}
    names = {"cache_size": "cache_size", "preempted": "num_preemptions", "cached": "cached_tokens"}
    for name, column in names.items():
        if name in counts:
            columns[column] = round(counts[name])
    if counts.get("first_tokens") and "first_token_s" in counts:
        mean_s = counts["first_token_s"] / counts["first_tokens"]
        columns["server_time_to_first_token_ms"] = 1000 * mean_s
    drafts = counts.get("drafts", counts.get("proposed"))
    if drafts is not None:
        columns["drafted"] = drafts > 0
    return columns


def counted_acceptance(counts: Counts, num_requests: int) -> dict[str, Any]:
    """The columns about acceptance that counters give; none where nothing was drafted.

    Args:
        num_requests: answers, whose first tokens come without a verification.
    """
    drafts = counts.get("drafts")
    proposed = counts.get("proposed")
    accepted = counts.get("accepted")
    if accepted is None and drafts and "generated" in counts:
        # Each verification yields one token besides those that it accepts.
        accepted = max(0.0, counts["generated"] - num_requests - drafts)
    if accepted is None or not (proposed or drafts):
        return {}
    columns: dict[str, Any] = {"acceptance_source": "metrics"}
    if proposed:
        columns["acceptance_rate"] = accepted / proposed
    if drafts:
        columns["mean_acceptance_length"] = 1 + accepted / drafts
        columns["mean_proposed"] = proposed / drafts if proposed else None
        positions = sorted(int(name.split()[-1]) for name in counts if " at " in name)
        rates = [counts[f"accepted at {position}"] / drafts for position in positions]
        if rates:
            columns["marginal_acceptance_by_position"] = [round(rate, 4) for rate in rates]
    return columns


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None
