"""Measurements by other tools next to ours: AIPerf's `profile_export.jsonl`, and what vLLM's `bench serve` saves.

AIPerf 0.13 writes a line per request: `metadata` and `metrics`, and an `error` where it failed. Its name, and that of
vLLM's file, may be chosen, so that in a directory contents decide.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.report.latency import REQUESTS, TIMES
from harness.report.table import Column, Table, number, percent
from harness.results.schema import LatencyRow
from harness.results.statistics.percentiles import percentile_columns

# Both begin with these words, within this many characters.
_BEGINNINGS = {
    ".jsonl": re.compile(r'\s*\{.*"request_start_ns"', re.DOTALL),
    ".json": re.compile(r'\s*\{.*"model_id"', re.DOTALL),
}
_LONGEST_BEGINNING = 4096
# Our own lines per request repeat what our rows say.
_OUR_LINES = re.compile(r"profile_export_(regular|speculative|aa_first|aa_second)\.jsonl")
# vLLM's `--append-result` writes one after the other.
_BETWEEN = re.compile(r"(?<=\})\n(?=\{)")

# By our name of a time, vLLM's.
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


class Others(NamedTuple):
    """A file's figures in the columns of ours, with the tool as `engine`, and notes about what was left out."""

    rows: list[LatencyRow]
    notes: list[str]


class _Damaged(ValueError):
    """A file or line that the tool did not write so; its text says why."""


class _Request(NamedTuple):
    """One line of AIPerf. Times are None where it tells none."""

    started_ns: float
    ended_ns: float
    error: Mapping[str, Any] | None
    num_tokens: float
    milliseconds: float | None
    time_to_first_token: float | None
    time_per_output_token: float | None
    gaps: list[float]
    drafts: tuple[float, float, float] | None


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


def read_other(file: Path) -> Others | None:
    """The measurement of another tool; None where the file is of neither tool.

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


def _aiperf(file: Path, text: str) -> Others | None:
    requests: list[_Request] = []
    notes: list[str] = []
    num_lines = 0
    for line_number, line in enumerate(text.split("\n"), 1):
        record = _parsed(line)
        if not isinstance(record, dict) or "metrics" not in record:
            if line.strip():
                notes.append(f"{file}, line {line_number}: is no record of AIPerf; left out")
            continue
        num_lines += 1
        try:
            request = _request(record)
        except _Damaged as damaged:
            notes.append(f"{file}, line {line_number}: {damaged}; left out")
            continue
        if request is not None:
            requests.append(request)
    if not num_lines:
        return None
    if not requests:
        return Others([], [*notes, f"{file} holds no request that AIPerf measured; left out"])
    return Others([_aiperf_row(file, requests)], notes)


def _request(record: Mapping[str, Any]) -> _Request | None:
    """A line; None for one of the warm-up."""
    metadata = record.get("metadata")
    metrics = record["metrics"]
    error = record.get("error")
    if not isinstance(metadata, dict) or not isinstance(metrics, dict):
        raise _Damaged("metadata or metrics are missing")
    if metadata.get("benchmark_phase", "profiling") != "profiling":
        return None
    started, ended = (_number(metadata, f"request_{end}_ns") for end in ("start", "end"))
    if started is None or ended is None or ended <= started:
        raise _Damaged("the request took no time")
    if error and not isinstance(error, dict):
        error = {"type": str(error)}
    return _Request(
        started_ns=started,
        ended_ns=ended,
        error=error if isinstance(error, dict) else None,
        num_tokens=_metric(metrics, "output_sequence_length") or 0,
        milliseconds=_metric(metrics, "request_latency"),
        time_to_first_token=_metric(metrics, "time_to_first_token"),
        time_per_output_token=_metric(metrics, "inter_token_latency"),
        gaps=_gaps(metrics.get("inter_chunk_latency")),
        drafts=_drafts(record.get("spec_decode_acceptance")),
    )


def _gaps(metric: object) -> list[float]:
    """Times between the chunks of an answer, of which AIPerf has a list."""
    times = metric.get("value") if isinstance(metric, dict) else None
    if not isinstance(times, list):
        return []
    gaps = [_number({"gap": time}, "gap", "inter_chunk_latency") for time in times]
    return [gap for gap in gaps if gap is not None]


def _drafts(told: object) -> tuple[float, float, float] | None:
    """Draft tokens, those accepted, and iterations, as a server that speculates told AIPerf."""
    if not isinstance(told, dict):
        return None
    names = "num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps"
    proposed, accepted, steps = (_number(told, name) for name in names)
    if proposed is None or accepted is None or steps is None:
        return None
    return proposed, accepted, steps


def _aiperf_row(file: Path, requests: Sequence[_Request]) -> LatencyRow:
    """AIPerf's inter-token latency is our time per output token."""
    answered = [request for request in requests if request.error is None]
    begun = min(request.started_ns for request in requests)
    seconds = (max(request.ended_ns for request in requests) - begun) / 1e9
    figures: dict[str, Any] = percentile_columns(
        time_to_first_token=[request.time_to_first_token for request in answered],
        time_per_output_token=[request.time_per_output_token for request in answered],
        inter_token_latency=[gap for request in answered for gap in request.gaps],
    )
    waits = [
        request.milliseconds / request.num_tokens
        for request in answered
        if request.milliseconds and request.num_tokens
    ]
    drafts = [request.drafts for request in answered if request.drafts is not None]
    proposed, accepted, steps = (sum(counts) for counts in zip((0, 0, 0), *drafts, strict=True))
    return LatencyRow(
        directory=str(file),
        engine="AIPerf",
        requests_per_second=len(answered) / seconds,
        tokens_per_second=sum(request.num_tokens for request in answered) / seconds,
        tokens_per_second_per_user=1000 * len(waits) / sum(waits) if waits else None,
        num_prompts=len(requests),
        num_failed=len(requests) - len(answered),
        num_timed_out=sum(_timed_out(request.error) for request in requests),
        acceptance_rate=accepted / proposed if proposed else None,
        mean_acceptance_length=1 + accepted / steps if steps else None,
        **figures,
    )


def _timed_out(error: Mapping[str, Any] | None) -> bool:
    """AIPerf 0.13 gives a time-out its type alone; others, and our own lines, a code."""
    return error is not None and (error.get("code") == 408 or error.get("type") == "TimeoutError")


def _vllm(file: Path, text: str) -> Others | None:
    found = [_parsed(part) for part in _BETWEEN.split(text)]
    saved = [one for one in found if isinstance(one, dict) and "request_throughput" in one]
    rows: list[LatencyRow] = []
    notes: list[str] = []
    for one in saved:
        try:
            rows.append(_vllm_row(file, one))
        except _Damaged as damaged:
            notes.append(f"{file}: {damaged}; left out")
    return Others(rows, notes) if saved else None


def _vllm_row(file: Path, saved: Mapping[str, Any]) -> LatencyRow:
    """It tells the percentiles that it was asked for, the median and the 99th by default."""
    figures: dict[str, Any] = {
        f"{ours}_p{share}_ms": _number(saved, f"{name}_{theirs}_ms")
        for ours, theirs in _VLLM_NAMES.items()
        for share, name in ((50, "median"), (90, "p90"), (99, "p99"))
    }
    # Without a limit the rate is `inf`, as text or as a number.
    rate = saved.get("request_rate")
    limited = rate not in ("inf", math.inf)
    num_prompts = _count(saved, "num_prompts")
    completed = _count(saved, "completed")
    failed = _count(saved, "failed")
    if failed is None and num_prompts is not None and completed is not None:
        failed = num_prompts - completed
    # A server that speculates has both: a percentage, and a length that counts the token that each
    # iteration adds.
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
    """The value of a JSON text; None where it is none, or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _metric(metrics: Mapping[str, Any], name: str) -> float | None:
    """AIPerf's `{"value": 12.5, "unit": "ms"}`."""
    metric = metrics.get(name)
    if metric is None:
        return None
    if not isinstance(metric, dict):
        raise _Damaged(f"{name} is no metric")
    return _number(metric, "value", name)


def _count(values: Mapping[str, Any], key: str) -> int | None:
    value = _number(values, key)
    return None if value is None else int(value)


def _number(values: Mapping[str, Any], key: str, name: str = "") -> float | None:
    """A figure that a tool tells; None where it does not."""
    value = values.get(key)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise _Damaged(f"{name or key} is no number: {str(value)[:40]}")
    return float(value)
