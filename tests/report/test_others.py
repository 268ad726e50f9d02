from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.config.errors import SettingError
from harness.engines.requests import RequestError, RequestRecord
from harness.report.command import build
from harness.report.table import Table
from report_files import latency_run, write

SAVED: dict[str, Any] = {
    "model_id": "meta-llama/Llama-3.1-8B", "num_prompts": 100, "request_rate": "inf", "max_concurrency": 16,
    "completed": 98, "duration": 10.0, "request_throughput": 9.8, "output_throughput": 627.2, "mean_ttft_ms": 31.0,
    "median_ttft_ms": 30.0, "p99_ttft_ms": 80.0, "mean_tpot_ms": 6.0, "median_tpot_ms": 5.5, "p99_tpot_ms": 9.0,
}  # fmt: skip


def cells(*paths: Path) -> Sequence[Sequence[str]]:
    (table,) = [
        part for part in build(paths).parts if isinstance(part, Table) and part.key == "others"
    ]
    return table.shown()[1]


def save_records(path: Path) -> Path:
    records = [
        RequestRecord(0, 5, 0, [0.1, 0.2, 0.3], 0.3, num_tokens=3),
        RequestRecord(1, 5, 10**8, [0.2, 0.4], 0.4, num_tokens=2),
        RequestRecord(2, 5, 0, error=RequestError(408, "Timeout", "no end after 1 s"), seconds=1.0),
    ]
    path.write_text("".join(json.dumps(record.aiperf()) + "\n" for record in records))
    return path


def test_aiperfs_records_are_read(tmp_path: Path) -> None:
    file = save_records(tmp_path / "profile_export.jsonl")
    assert cells(file) == cells(tmp_path)
    (row,) = cells(file)
    # Two answers and five tokens in a second; 100 and 200 ms per token to a user.
    assert list(row) == [
        str(file), "AIPerf", "", "3", "150.0 / 190.0 / 199.0", "150.0 / 190.0 / 199.0", "2.00", "5.0", "6.7", "1", "1",
    ]  # fmt: skip


def test_what_vllms_benchmark_saves_is_read_next_to_our_rows(tmp_path: Path) -> None:
    file = tmp_path / "openai-infqps-concurrency16-Llama-3.1-8B-20261120.json"
    file.write_text(json.dumps(SAVED))
    write(tmp_path / "latency.csv", latency_run())
    (row,) = cells(tmp_path)
    assert list(row[1:5]) == ["vllm bench serve", "meta-llama/Llama-3.1-8B", "16", "100"]
    assert list(row[5:]) == ["30.0 / – / 80.0", "5.5 / – / 9.0", "9.80", "627.2", "", "2", ""]
    assert len(build([tmp_path]).pairs) == 1


def test_what_vllms_benchmark_appends_is_read_run_by_run(tmp_path: Path) -> None:
    """With acceptance as vLLM tells it of a server that speculates: a percentage."""
    file = tmp_path / "openai-4.0qps-Llama-3.1-8B-20261120.json"
    told = {"spec_decode_acceptance_rate": 62.5, "spec_decode_acceptance_length": 3.5, "failed": 1}
    file.write_text(json.dumps(SAVED) + "\n" + json.dumps(SAVED | told | {"request_rate": 4.0}))
    (tmp_path / "openai-4.0qps-Llama-3.1-8B-20261120.pytorch.json").write_text("[]")
    first, second = cells(tmp_path)
    assert list(first[-4:]) == ["2", "", "", ""]
    assert list(second[-4:]) == ["1", "", "62.5%", "3.50"]
    assert "4.00" in second


@pytest.mark.parametrize("content", ["", "{", "[1]", "3", '{"model_id": 1}', "null", "[" * 100_000])
@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_other_json_is_refused_in_a_line(tmp_path: Path, name: str, content: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(SettingError, match=r"is no CSV file of"):
        build([file])
