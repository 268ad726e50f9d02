"""`result.json`: what every run leaves for programs."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import jsonschema

from harness.measuring.rows import LatencyRow
from harness.results.files import append_rows, read_file
from harness.results.judging.statement import WORDS, Kind, Relation
from harness.results.result_file import SCHEMA, write_result
from harness.results.statistics.interval import Coverage, Interval
from harness.results.verdict import verdict_of
from in_process import Harness, only
from report_files import latency_run, over

QUICK = ["num_prompts=8", "decoding.max_new_tokens=4", "num_warmup=0"]
SIMULATED = [*QUICK, "engine=simulated"]


def valid(file: Path) -> dict[str, Any]:
    """The contents of a file, which its schema allows."""
    content: dict[str, Any] = json.loads(file.read_text())
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    return content


def test_a_run_leaves_its_rows_verdict_and_command(harness: Harness) -> None:
    harness("latency", *SIMULATED)
    file = only("result.json")
    content = valid(file)
    assert (content["command"], content["status"], content["error"]) == ("latency", "ok", None)
    assert [row["arm"] for row in content["rows"]] == ["regular", "speculative"]
    speedup = content["rows"][1]["speedup"]
    assert content["statements"][0]["interval"] == speedup
    assert speedup["low"] < speedup["estimate"] < speedup["high"]
    summary = " ".join(file.with_name("summary.txt").read_text().split())
    assert content["finding"][0].partition(" (")[0] in summary
    assert [doubt for doubt in content["doubts"] if doubt not in summary] == []
    assert content["environment"]["command_line"].startswith("harness latency num_prompts=8")


def test_the_documented_example_passes_the_schema() -> None:
    page = Path(__file__).parents[2] / "docs" / "files.md"
    (example,) = re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL)
    schema = json.loads(SCHEMA.read_text())
    content = json.loads(example)
    jsonschema.validate(content, schema)
    assert {*content} == {*schema["properties"]}
    statement = schema["properties"]["statements"]["items"]
    assert {*content["statements"][0]} == {*statement["properties"]} == {*statement["required"]}
    assert statement["properties"]["relation"]["enum"] == [*get_args(Relation)]
    assert statement["properties"]["kind"]["enum"] == [*get_args(Kind)] == [*WORDS]


def test_a_failed_run_says_why(harness: Harness) -> None:
    harness("latency", *QUICK, "engine=server", "engine.url=http://127.0.0.1:9/v1", code=1)
    content = valid(only("result.json"))
    assert content["status"] == "failed"
    assert "127.0.0.1:9" in content["error"]
    # Others fail before it is decided whether texts go on past their end.
    row: Any = read_file(Path("results/latency.csv"), [LatencyRow]).rows[0]
    append_rows(Path("undecided.csv"), [dataclasses.replace(row, ignore_eos="auto")])
    assert read_file(Path("undecided.csv"), [LatencyRow]).rows[0].values()["ignore_eos"] == "auto"
    assert content["statements"] == []
    assert "is no CSV file" in harness("report", str(only("result.json")), code=2).complaint


def test_what_is_not_known_is_null_and_has_its_reason(tmp_path: Path) -> None:
    row = dataclasses.replace(
        latency_run()[1],
        ms_per_token_std=math.nan,
        decode_speedup=Interval(1.0, 0.9, 1.1),
        speedup=Interval(2.0, covers=Coverage(3, "prompt")),
    )
    write_result(tmp_path, [row], [], statements=[verdict_of(row)])
    content = valid(tmp_path / "result.json")
    estimate = {"estimate": 2.0, "low": None, "high": None, "covers": over(3)}
    reason = "no interval from fewer than 8 prompts"
    (statement,) = content["statements"]
    assert (statement["relation"], statement["why"]) == ("open", reason)
    assert statement["interval"] == estimate
    written = content["rows"][0]
    assert (written["ms_per_token"], written["ms_per_token_std"]) == (50.0, None)
    assert written["decode_speedup"] == {"estimate": 1.0, "low": 0.9, "high": 1.1, "covers": None}
    assert written["acceptance_histogram"] == [1, 2, 3]
