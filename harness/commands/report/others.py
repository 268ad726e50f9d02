"""Measurements by other tools as rows of ours: AIPerf's exports, and vLLM's `bench serve`.

AIPerf 0.13 writes a line per request to `profile_export.jsonl`, with an `error` where it failed:

    {"metadata": {"request_start_ns": 1, ...},
     "metrics": {"request_latency": {"value": 12.5, "unit": "ms"}, ...}}

vLLM writes one object with the figures of all requests. A user may choose the names of both files,
so that in a directory their contents decide.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.commands.latency.figures.requests import percentile_columns
from harness.commands.latency.rows import LatencyRow
from harness.commands.latency.tables.run import REQUESTS, TIMES
from harness.tables.table import Column, Table, number, percent

# How the contents of each tool's files begin, by suffix: the keys are within `_LONGEST_BEGINNING` characters.
_BEGINNINGS = {
    ".jsonl": re.compile(r'\s*\{.*"request_start_ns"', re.DOTALL),
    ".json": re.compile(r'\s*\{.*"model_id"', re.DOTALL),
}
_LONGEST_BEGINNING = 4096
# Our own files in AIPerf's format, which repeat our rows.
_OUR_LINES = re.compile(r"profile_export_(regular|speculative|aa_first|aa_second)\.jsonl")
# Between the objects that vLLM's `--append-result` writes one after the other.
_BETWEEN = re.compile(r"(?<=\})\n(?=\{)")

# Our name of a time -> vLLM's.
_VLLM_NAMES = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "itl",
}

_COLUMNS = (
    Column("file", text=True, of="directory"),
    Column("tool", text=True, of="engine"),
    Column("model", text=True, of="model"),
    Column("in flight", of="batch_size", optional=True),
    Column("sent per s", number(), "request_rate", optional=True),
    Column("requests", of="num_prompts"),
    *REQUESTS,
    Column("acceptance", percent, "acceptance_rate", optional=True),
    Column("tokens/\niteration", number(), "mean_acceptance_length", optional=True),
)


class _Damaged(ValueError):
    """A file or line that the tool cannot have written; the message is the reason."""


@dataclass(frozen=True)
class _Drafts:
    """Counts of draft tokens, those accepted, and iterations."""

    num_proposed: float
    num_accepted: float
    num_iterations: float


@dataclass(frozen=True)
class _Request:
    """One line of AIPerf.

    Attributes:
        milliseconds, time_to_first_token, time_per_output_token: in milliseconds; None where they are not reported.
        gaps: milliseconds between the chunks of the answer.
        drafts: reported to AIPerf by a server that speculates; None where it reported none.
    """

    started_ns: float
    ended_ns: float
    error: Mapping[str, Any] | None
    num_tokens: float
    milliseconds: float | None
    time_to_first_token: float | None
    time_per_output_token: float | None
    gaps: list[float]
    drafts: _Drafts | None


def looks_like_other(file: Path) -> bool:
    """Whether a file in a directory may be of another tool; only its beginning is read."""
    beginning = _BEGINNINGS.get(file.suffix)
    if beginning is None or _OUR_LINES.fullmatch(file.name):
        return False
    try:
        with file.open(encoding="utf-8", errors="replace") as text:
            return bool(beginning.match(text.read(_LONGEST_BEGINNING)))
    except OSError:
        return False


def read_other(file: Path) -> tuple[list[LatencyRow], list[str]] | None:
    """The measurements of another tool; None where the file is of neither tool.

    Returns:
        Rows in our columns, with the tool as `engine` and the file as `directory`, and notes about
        what was left out.

    Raises:
        OSError: when it cannot be read.
    """
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".jsonl":
        return _aiperf(file, text)
    return _vllm(file, text)


def others_table(rows: Sequence[LatencyRow]) -> Table:
    """One line per file."""
    return Table.of("others", "Measured with other tools", rows, _COLUMNS, notes=(TIMES,))


def _aiperf(file: Path, text: str) -> tuple[list[LatencyRow], list[str]] | None:
    """The row of all requests; None if no line is of AIPerf."""
    requests: list[_Request] = []
    notes: list[str] = []
    is_aiperf = False
    for line_number, line in enumerate(text.split("\n"), 1):
        record = _parsed(line)
        if not isinstance(record, dict) or "metrics" not in record:
            if line.strip():
                notes.append(f"{file}, line {line_number}: is no record of AIPerf; left out")
            continue
        is_aiperf = True
        try:
            request = _request(record)
        except _Damaged as damaged:
            notes.append(f"{file}, line {line_number}: {damaged}; left out")
            continue
        if request is not None:
            requests.append(request)
    if not is_aiperf:
        return None
    if not requests:
        return [], [*notes, f"{file} holds no request that AIPerf measured; left out"]
    return [_aiperf_row(file, requests)], notes


def _request(record: Mapping[str, Any]) -> _Request | None:
    """A line as a request; None for one of the warm-up."""
    metadata = record.get("metadata")
    metrics = record["metrics"]
    error = record.get("error")
    if not isinstance(metadata, dict) or not isinstance(metrics, dict):
        raise _Damaged("metadata or metrics are missing")
    if metadata.get("benchmark_phase", "profiling") != "profiling":
        return None
    started = _number(metadata, "request_start_ns")
    ended = _number(metadata, "request_end_ns")
    if started is None or ended is None or ended <= started:
        raise _Damaged("the request took no time")
    if not isinstance(error, dict):
        error = {"type": str(error)} if error else None
    return _Request(
        started_ns=started,
        ended_ns=ended,
        error=error,
        num_tokens=_metric(metrics, "output_sequence_length") or 0,
        milliseconds=_metric(metrics, "request_latency"),
        time_to_first_token=_metric(metrics, "time_to_first_token"),
        # AIPerf's name for our time per output token.
        time_per_output_token=_metric(metrics, "inter_token_latency"),
        gaps=_gaps(metrics.get("inter_chunk_latency")),
        drafts=_drafts(record.get("spec_decode_acceptance")),
    )


def _gaps(metric: object) -> list[float]:
    """The list of a metric: `{"value": [12.5, 13.1], "unit": "ms"}`."""
    times = metric.get("value") if isinstance(metric, dict) else None
    if not isinstance(times, list):
        return []
    gaps = [_figure(time, "inter_chunk_latency") for time in times]
    return [gap for gap in gaps if gap is not None]


def _drafts(counts: object) -> _Drafts | None:
    if not isinstance(counts, dict):
        return None
    proposed = _number(counts, "num_draft_tokens")
    accepted = _number(counts, "num_accepted_draft_tokens")
    iterations = _number(counts, "num_spec_steps")
    if proposed is None or accepted is None or iterations is None:
        return None
    return _Drafts(proposed, accepted, iterations)


def _aiperf_row(file: Path, requests: Sequence[_Request]) -> LatencyRow:
    """The figures of all requests."""
    answered = [request for request in requests if request.error is None]
    started_ns = min(request.started_ns for request in requests)
    ended_ns = max(request.ended_ns for request in requests)
    seconds = (ended_ns - started_ns) / 1e9
    figures: dict[str, Any] = percentile_columns(
        time_to_first_token=[request.time_to_first_token for request in answered],
        time_per_output_token=[request.time_per_output_token for request in answered],
        inter_token_latency=[gap for request in answered for gap in request.gaps],
    )
    ms_per_token = [
        request.milliseconds / request.num_tokens
        for request in answered
        if request.milliseconds and request.num_tokens
    ]
    drafts = [request.drafts for request in answered if request.drafts is not None]
    num_proposed = sum(counts.num_proposed for counts in drafts)
    num_accepted = sum(counts.num_accepted for counts in drafts)
    num_iterations = sum(counts.num_iterations for counts in drafts)
    # AIPerf 0.13 gives a time-out a type, other versions a code.
    errors = [request.error for request in requests if request.error is not None]
    num_timed_out = sum(
        error.get("code") == 408 or error.get("type") == "TimeoutError" for error in errors
    )
    return LatencyRow(
        directory=str(file),
        engine="AIPerf",
        requests_per_second=len(answered) / seconds,
        tokens_per_second=sum(request.num_tokens for request in answered) / seconds,
        tokens_per_second_per_user=1000 / fmean(ms_per_token) if ms_per_token else None,
        num_prompts=len(requests),
        num_failed=len(requests) - len(answered),
        num_timed_out=num_timed_out,
        acceptance_rate=num_accepted / num_proposed if num_proposed else None,
        mean_acceptance_length=1 + num_accepted / num_iterations if num_iterations else None,
        **figures,
    )


def _vllm(file: Path, text: str) -> tuple[list[LatencyRow], list[str]] | None:
    """A row for each measurement; None if there is none of vLLM."""
    objects = [_parsed(part) for part in _BETWEEN.split(text)]
    saved = [part for part in objects if isinstance(part, dict) and "request_throughput" in part]
    rows: list[LatencyRow] = []
    notes: list[str] = []
    for measurement in saved:
        try:
            rows.append(_vllm_row(file, measurement))
        except _Damaged as damaged:
            notes.append(f"{file}: {damaged}; left out")
    return (rows, notes) if saved else None


def _vllm_row(file: Path, saved: Mapping[str, Any]) -> LatencyRow:
    """One measurement. vLLM saves the percentiles that it was asked for, by default p50 and p99."""
    figures: dict[str, Any] = {}
    for ours, theirs in _VLLM_NAMES.items():
        figures[f"{ours}_p50_ms"] = _number(saved, f"median_{theirs}_ms")
        figures[f"{ours}_p90_ms"] = _number(saved, f"p90_{theirs}_ms")
        figures[f"{ours}_p99_ms"] = _number(saved, f"p99_{theirs}_ms")
    # Without a limit the rate is `inf`, as text or as a number.
    rate = saved.get("request_rate")
    limited = rate not in ("inf", math.inf)
    num_prompts = _count(saved, "num_prompts")
    completed = _count(saved, "completed")
    failed = _count(saved, "failed")
    if failed is None and num_prompts is not None and completed is not None:
        failed = num_prompts - completed
    # A percentage. The length counts the target's own token of each iteration, as ours does.
    acceptance = _number(saved, "spec_decode_acceptance_rate")
    return LatencyRow(
        directory=str(file),
        engine="vllm bench serve",
        model=str(saved.get("model_id", "")),
        batch_size=_count(saved, "max_concurrency"),
        request_rate=_number(saved, "request_rate") if limited else None,
        requests_per_second=_number(saved, "request_throughput"),
        tokens_per_second=_number(saved, "output_throughput"),
        num_prompts=num_prompts,
        num_failed=failed,
        acceptance_rate=None if acceptance is None else acceptance / 100,
        mean_acceptance_length=_number(saved, "spec_decode_acceptance_length"),
        **figures,
    )


def _parsed(text: str) -> Any:
    """The value of a JSON text; None for another text, or one that is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _metric(metrics: Mapping[str, Any], name: str) -> float | None:
    """The value of a metric: `{"value": 12.5, "unit": "ms"}`."""
    metric = metrics.get(name)
    if metric is None:
        return None
    if not isinstance(metric, dict):
        raise _Damaged(f"{name} is no metric")
    return _figure(metric.get("value"), name)


def _count(values: Mapping[str, Any], key: str) -> int | None:
    value = _number(values, key)
    return None if value is None else int(value)


def _number(values: Mapping[str, Any], key: str) -> float | None:
    return _figure(values.get(key), key)


def _figure(value: Any, name: str) -> float | None:
    """A figure in a tool's file; None where it has none.

    Raises:
        _Damaged: it is not a number, or negative, or too large for a float.
    """
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise _Damaged(f"{name} is no number: {str(value)[:40]}")
    return float(value)
