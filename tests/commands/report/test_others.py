from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.commands.read_runs import read
from harness.commands.report.command import build
from harness.config.errors import SettingError
from harness.engines.requests import RequestError, RequestRecord
from harness.tables.table import Line, Table
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
        str(file), "AIPerf", "", "3", "150.0 / 190.0 / 199.0", "150.0 / 190.0 / 199.0",
        "100.0 / 180.0 / 198.0", "2.00", "5.0", "6.7", "1", "1",
    ]  # fmt: skip


def test_what_vllms_benchmark_saves_is_read_next_to_our_rows(tmp_path: Path) -> None:
    file = tmp_path / "openai-infqps-concurrency16-Llama-3.1-8B-20261120.json"
    file.write_text(json.dumps(SAVED))
    write(tmp_path / "latency.csv", latency_run())
    (row,) = cells(tmp_path)
    assert list(row[1:5]) == ["vllm bench serve", "meta-llama/Llama-3.1-8B", "16", "100"]
    assert list(row[5:]) == ["30.0 / – / 80.0", "5.5 / – / 9.0", "9.80", "627.2", "", "2", ""]
    assert len(read([tmp_path]).runs) == 1


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


REAL = Path(__file__).with_name("aiperf_0_13.jsonl")


def test_what_aiperf_0_13_writes_is_read_under_any_name(tmp_path: Path) -> None:
    """A warm-up, two answers with what the server told of its drafts, and a time-out, as AIPerf wrote them."""
    file = tmp_path / "artifacts" / "tiny-openai-chat-concurrency2" / "chosen.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(REAL.read_text())
    (row,) = read([tmp_path / "artifacts"]).others
    records = [json.loads(line) for line in REAL.read_text().splitlines()]
    answered = [record for record in records[1:] if "error" not in record]
    assert len(answered) == 2
    firsts = [record["metrics"]["time_to_first_token"]["value"] for record in answered]
    assert row.time_to_first_token_p50_ms == pytest.approx(sum(firsts) / 2)
    drafts = [record["spec_decode_acceptance"] for record in answered]
    proposed = sum(told["num_draft_tokens"] for told in drafts)
    accepted = sum(told["num_accepted_draft_tokens"] for told in drafts)
    assert row.acceptance_rate == pytest.approx(accepted / proposed)
    assert (row.num_prompts, row.num_failed, row.num_timed_out) == (3, 1, 1)


def test_vllms_file_may_have_any_name_and_other_json_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "my run.json").write_text(json.dumps(SAVED))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "model_id": 7}')
    (tmp_path / "profile_export_regular.jsonl").write_text(REAL.read_text())
    assert [row[1] for row in cells(tmp_path)] == ["vllm bench serve"]


DAMAGED_METRICS = [
    "fast",
    None,
    [],
    {"value": "fast"},
    {"value": -1},
    {"value": math.nan},
    {"value": True},
]


@pytest.mark.parametrize("metric", DAMAGED_METRICS)
@pytest.mark.parametrize(
    "name", ["request_latency", "output_sequence_length", "time_to_first_token"]
)
def test_a_damaged_line_of_aiperf_does_not_end_the_report(
    tmp_path: Path, name: str, metric: object
) -> None:
    lines = REAL.read_text().splitlines()
    record = json.loads(lines[1])
    record["metrics"][name] = metric
    instant = json.loads(lines[2])
    instant["metadata"]["request_end_ns"] = instant["metadata"]["request_start_ns"]
    more = [json.dumps(record), json.dumps(instant), "[" * 10_000, '{"metadata": {"request_st']
    (tmp_path / "profile_export.jsonl").write_text("\n".join([*lines, *more]))
    report = build([tmp_path])
    assert read([tmp_path]).others[0].num_prompts == 3 + (metric is None)
    notes = [part.text for part in report.parts if isinstance(part, Line)]
    assert len(notes) == 4 - (metric is None)
    assert any("line 6: the request took no time; left out" in note for note in notes)


@pytest.mark.parametrize("value", ["fast", [1], -1, {}, pytest.param(10**400, id="huge")])
@pytest.mark.parametrize("name", [name for name in SAVED if name not in ("duration", "model_id")])
def test_a_damaged_file_of_vllm_is_a_note(tmp_path: Path, name: str, value: object) -> None:
    write(tmp_path / "latency.csv", latency_run())
    file = tmp_path / "saved.json"
    file.write_text(json.dumps(SAVED | {name: value}))
    report = build([tmp_path])
    used = not name.startswith("mean_")
    notes = [part.text for part in report.parts if isinstance(part, Line)]
    assert (f"{file}: {name} is no number: {str(value)[:40]}; left out" in notes) == used
    assert len(read([tmp_path]).others) == (not used)


def test_files_without_a_measurement_are_refused_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "profile_export.jsonl"
    file.write_text(REAL.read_text().splitlines()[0])
    with pytest.raises(SettingError, match="holds no request that AIPerf measured"):
        build([file])
