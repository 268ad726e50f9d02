"""`result.json`: what every run leaves for programs, and what reads it like CSV."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness.measuring.rows import LatencyRow
from harness.results.files import append_rows, read_file
from harness.results.result_file import SCHEMA, read_result
from in_process import Harness, only

QUICK = ["num_prompts=8", "decoding.max_new_tokens=4", "num_warmup=0"]
SIMULATED = [*QUICK, "engine=simulated"]


def valid(file: Path) -> dict[str, Any]:
    """The contents of a file, which its schema allows."""
    content: dict[str, Any] = json.loads(file.read_text())
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    return content


def test_a_run_leaves_its_rows_verdict_and_command(harness: Harness, tmp_path: Path) -> None:
    harness("latency", *SIMULATED)
    file = only("result.json")
    content = valid(file)
    assert (content["command"], content["status"], content["error"]) == ("latency", "ok", None)
    assert [row["arm"] for row in content["rows"]] == ["regular", "speculative"]
    speedup = content["rows"][1]["speedup"]
    assert content["verdict"]["speedup"] == speedup
    assert speedup["low"] < speedup["estimate"] < speedup["high"]
    summary = " ".join(file.with_name("summary.txt").read_text().split())
    assert content["finding"][0].partition(" (")[0] in summary
    assert [doubt for doubt in content["doubts"] if doubt not in summary] == []
    assert content["environment"]["command_line"].startswith("harness latency num_prompts=8")
    read = read_result(file, [LatencyRow])
    assert read is not None
    assert read.rows == read_file(file.with_name("latency.csv"), [LatencyRow]).rows

    # Alone it is enough for a report and for `regress`.
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(file, alone)
    assert "15 prompts" not in harness("report", "alone", "output=page").stdout
    harness("report", str(file.parent))
    assert not harness("report", str(file.parent), "output=page").stderr.count("result.json")


def test_a_failed_run_says_why(harness: Harness) -> None:
    harness("latency", *QUICK, "engine=server", "engine.url=http://127.0.0.1:9/v1", code=1)
    content = valid(only("result.json"))
    assert content["status"] == "failed"
    assert "127.0.0.1:9" in content["error"]
    # Others fail before it is decided whether texts go on past their end.
    row = read_file(Path("results/latency.csv"), [LatencyRow]).rows[0]
    append_rows(Path("undecided.csv"), [dataclasses.replace(row, ignore_eos="auto")])
    assert read_file(Path("undecided.csv"), [LatencyRow]).rows[0].values()["ignore_eos"] == "auto"
    assert content["verdict"] is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "version 2"),
        ({"rows": [1]}, "no object"),
    ],
)
def test_another_version_and_damage_are_said(
    harness: Harness, change: dict[str, Any], problem: str
) -> None:
    harness("latency", *SIMULATED)
    file = only("result.json")
    damaged = Path("damaged.json")
    damaged.write_text(json.dumps(json.loads(file.read_text()) | change))
    refused = harness("report", str(damaged), code=2).complaint
    assert problem in refused
