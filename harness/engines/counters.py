"""Counters on a server's Prometheus page: how they grew while it answered, and the columns from
that.

They give acceptance where answers tell none, and show whether the server also answered others.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from harness.engines.requests import RequestRecord
from harness.results.servers import page_of

_PAGES = ("/metrics", "/prometheus/metrics")
# `vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 123.0`
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')

# Fields of `Counted` by the counters' names, without `_total`. Dynamo passes on those of its
# engines.
_NAMES = {
    # vllm/v1/metrics and vllm/v1/spec_decode/metrics.py
    "vllm:generation_tokens": "generated",
    "vllm:num_preemptions": "preempted",
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "proposed",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "by_position",
    # ggml-org/llama.cpp, pull request 26389
    "llamacpp:tokens_predicted": "generated",
    "llamacpp:spec_decode_num_drafts": "drafts",
    "llamacpp:spec_decode_num_draft_tokens": "proposed",
    "llamacpp:spec_decode_num_accepted_tokens": "accepted",
    "llamacpp:spec_decode_num_accepted_tokens_per_pos": "by_position",
    # SGLang: what it accepted follows from tokens and verifications.
    "sglang:generation_tokens": "generated",
    "sglang:spec_verify_calls": "drafts",
    # TensorRT-LLM's names, which older versions of Dynamo prefix in another way.
    "trtllm_spec_decode_num_draft_tokens": "proposed",
    "trtllm_spec_decode_num_accepted_tokens": "accepted",
    "trtllm:spec_decode_num_draft_tokens": "proposed",
    "trtllm:spec_decode_num_accepted_tokens": "accepted",
    # Our own `serve`.
    "harness_tokens": "generated",
    "harness_draft_tokens": "proposed",
    "harness_accepted_draft_tokens": "accepted",
}
# Share of our own tokens by which a server may count more, beyond a token for each request, before
# others are suspected: some count the token that ends a text.
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
    """

    generated: float | None = None
    drafts: float | None = None
    proposed: float | None = None
    accepted: float | None = None
    by_position: dict[int, float] = field(default_factory=dict)
    preempted: float | None = None

    def plus(self, other: Counted, times: int = 1) -> Counted:
        """The sum of both, the other counted `times` times. A counter that one lacks is 0 there."""
        summed = replace(self, by_position=dict(self.by_position))
        for name in _COUNTERS:
            value = getattr(other, name)
            if value is not None:
                setattr(summed, name, (getattr(summed, name) or 0.0) + times * value)
        for position, value in other.by_position.items():
            before = summed.by_position.get(position, 0.0)
            summed.by_position[position] = before + times * value
        return summed

    def since(self, before: Counted) -> Counted | None:
        """The growth; None where a counter fell, because the server was restarted."""
        grown = self.plus(before, -1)
        values = [getattr(grown, name) for name in _COUNTERS]
        values += grown.by_position.values()
        return None if any(value is not None and value < 0 for value in values) else grown


_COUNTERS = [each.name for each in fields(Counted) if each.name != "by_position"]


def read_counters(text: str) -> Counted:
    """The known counters of a page in Prometheus's format, summed over the server's engines."""
    counted = Counted()
    for name, labels, number in _SAMPLE.findall(text):
        counter = _NAMES.get(name.removesuffix("_total"))
        value = _number(number)
        if counter is None or value is None:
            continue
        if counter != "by_position":
            sample: dict[str, Any] = {counter: value}
            counted = counted.plus(Counted(**sample))
        elif position := _POSITION.search(labels):
            counted = counted.plus(Counted(by_position={int(position[1]): value}))
    return counted


class CounterPage:
    """The page of a server's counters.

    Args:
        url: of the server's API.
        key: of the API; None without one.
        page: its address, where it is not below the server's own.
    """

    def __init__(self, url: str, key: str | None, page: str | None = None) -> None:
        root = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._candidates = [page] if page else [root + path for path in _PAGES]
        self._found: str | None = None

    def read(self) -> Counted | None:
        """The counters now; None where the server has no such page, and is then not asked again."""
        for url in list(self._candidates):
            counted = read_counters(page_of(url, self._key) or "")
            if counted != Counted():
                self._candidates = [url]
                return counted
        self._candidates = []
        return None


def total(growths: Sequence[Counted | None]) -> Counted | None:
    """The sum of several growths; None where one is not known, or without any."""
    known = [growth for growth in growths if growth is not None]
    if not known or len(known) < len(growths):
        return None
    return functools.reduce(Counted.plus, known)


def traffic_columns(counted: Counted, requests: Iterable[RequestRecord]) -> dict[str, Any]:
    """The columns about tokens that the server generated for other clients, and requests it
    preempted.
    """
    columns = {}
    if counted.preempted is not None:
        columns["num_preemptions"] = round(counted.preempted)
    if counted.generated is None:
        return columns
    ours = [request.num_tokens for request in requests]
    foreign = counted.generated - sum(ours)
    tolerated = len(ours) + _TOLERATED * sum(ours)
    columns["server_tokens"] = round(counted.generated)
    columns["foreign_tokens"] = round(foreign) if foreign > tolerated else 0
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
