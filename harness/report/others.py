"""Measurements by other tools next to ours: AIPerf's `profile_export.jsonl`, and what vLLM's `bench serve` saves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.report.latency import REQUESTS
from harness.report.table import Column, Table, number, percent
from harness.results.schema import LatencyRow

# What the two name their files by default. Our own lines per request repeat what our rows say.
OTHER_FILE = r"profile_export\.jsonl|.*qps.*(?<!\.pytorch)\.json"
# vLLM's `--append-result` writes one after the other.
_BETWEEN = re.compile(r"(?<=\})\n(?=\{)")

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


def read_other(file: Path) -> list[LatencyRow]:
    """A file's figures in the columns of ours, with the tool as `engine`; nothing where it is of neither tool.

    Raises:
        OSError: when it cannot be read.
    """
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        if file.suffix == ".jsonl":
            row = _aiperf(file, [json.loads(line) for line in text.splitlines() if line.strip()])
            return [] if row is None else [row]
        return [_vllm(file, json.loads(saved)) for saved in _BETWEEN.split(text)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def others_table(rows: Sequence[LatencyRow]) -> Table:
    """One line per file."""
    return Table.of("others", "Measured with other tools", rows, _COLUMNS)


def _aiperf(file: Path, records: Sequence[Mapping[str, Any]]) -> LatencyRow | None:
    """Time between tokens is the mean of each request, as in our rows."""
    timed = [
        record
        for record in records
        if record["metadata"].get("benchmark_phase", "profiling") == "profiling"
    ]
    answered = [record["metrics"] for record in timed if not record["error"]]
    if not timed:
        return None
    begun, ended = (
        [record["metadata"][f"request_{end}_ns"] for record in timed] for end in ("start", "end")
    )
    seconds = (max(ended) - min(begun)) / 1e9
    figures: dict[str, Any] = {}
    for ours, theirs in (
        ("time_to_first_token",) * 2,
        ("time_between_tokens", "inter_token_latency"),
    ):
        if found := [metrics[theirs]["value"] for metrics in answered if theirs in metrics]:
            figures |= {
                f"{ours}_p{percent}_ms": float(np.percentile(found, percent))
                for percent in (50, 90, 99)
            }
    lengths = [metrics["output_sequence_length"]["value"] for metrics in answered]
    waits = [
        metrics["request_latency"]["value"] / length
        for metrics, length in zip(answered, lengths, strict=True)
    ]
    return LatencyRow(
        directory=str(file),
        engine="AIPerf",
        requests_per_second=len(answered) / seconds,
        tokens_per_second=sum(lengths) / seconds,
        tokens_per_second_per_user=len(waits) * 1000 / sum(waits) if waits else None,
        num_prompts=len(timed),
        num_failed=len(timed) - len(answered),
        num_timed_out=sum((record["error"] or {}).get("code") == 408 for record in timed),
        **figures,
    )


def _vllm(file: Path, saved: Mapping[str, Any]) -> LatencyRow:
    """It tells the percentiles that it was asked for, the median and the 99th by default."""
    figures = {
        f"{ours}_p{percent}_ms": saved.get(f"{name}_{theirs}_ms")
        for ours, theirs in (("time_to_first_token", "ttft"), ("time_between_tokens", "tpot"))
        for percent, name in ((50, "median"), (90, "p90"), (99, "p99"))
    }
    # Without a limit the rate is `inf`.
    rate = saved.get("request_rate")
    return LatencyRow(
        directory=str(file),
        engine="vllm bench serve",
        model=saved["model_id"],
        batch_size=saved.get("max_concurrency"),
        request_rate=rate if isinstance(rate, int | float) and math.isfinite(rate) else None,
        requests_per_second=saved["request_throughput"],
        tokens_per_second=saved["output_throughput"],
        num_prompts=saved["num_prompts"],
        num_failed=saved.get("failed", saved["num_prompts"] - saved["completed"]),
        # Of a server that speculates; a percentage, and with the token that each iteration adds.
        acceptance_rate=saved["spec_decode_acceptance_rate"] / 100
        if "spec_decode_acceptance_rate" in saved
        else None,
        mean_acceptance_length=saved.get("spec_decode_acceptance_length"),
        **figures,
    )
