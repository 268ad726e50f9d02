"""Ten lines about a run, from planted rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from harness.commands.latency.tables.pull_request import pull_request
from harness.commands.read_runs import read
from harness.measuring.rows import LatencyRow
from report_files import latency_run, run_id, write
from wording import mentions


def lines(directory: Path) -> str:
    return "\n".join(pull_request(read([directory]).runs_of(LatencyRow)))


def test_a_row_over_repeats_has_the_command_of_its_runs(tmp_path: Path) -> None:
    runs = []
    for number in (1, 2):
        directory = tmp_path / f"run{number}"
        directory.mkdir()
        command = {"command_line": "harness latency -m K=4 repeats=2"}
        (directory / "environment.json").write_text(json.dumps(command))
        runs.append(latency_run(repeat=str(number), directory=str(directory)))
    over = {"run": run_id(), "repeat": "all", "pooled_runs": [run[0].run for run in runs]}
    pooled = [dataclasses.replace(row, **over, directory=None) for row in runs[0]]
    write(tmp_path / "latency.csv", *runs, pooled)
    assert "`harness latency -m K=4 repeats=2`" in lines(tmp_path)


def test_a_draft_that_the_server_does_not_name_is_not_none(tmp_path: Path) -> None:
    served = {"engine": "server", "url": "http://a/v1", "salted": True, "draft_method": None}
    served |= {"num_draft_tokens": None}
    write(tmp_path / "latency.csv", latency_run(draft="server", **served))
    text = lines(tmp_path)
    assert "method its server's own at K=4," in text
    assert "prefix cache: no prompt is in it" in text


def test_what_weakens_a_result_stands_behind_it(tmp_path: Path) -> None:
    covers = {"speedup_covers": "15 prompts", "decode_speedup": 2.1, "decode_speedup_low": 2.0}
    covers |= {"decode_speedup_high": 2.2, "decode_speedup_covers": "14 prompts"}
    write(tmp_path / "latency.csv", latency_run(**covers))
    quiet = lines(tmp_path)
    assert "doubts" not in quiet
    assert mentions(quiet, "1.90 to 2.10", "over 15 prompts")
    assert mentions(quiet, "2.00 to 2.20", "over 14 prompts")
    busy = tmp_path / "busy"
    busy.mkdir()
    run = latency_run(processor_share=0.4, num_threads=1, load=9.0, num_cores=2)
    write(busy / "latency.csv", run)
    assert mentions(lines(busy), "doubts: ", "40%")
