"""`until_saturated=true`: a sweep leaves out loads above one from which its throughput no longer grows."""

from __future__ import annotations

import dataclasses

import pytest

from harness.config.errors import SettingError
from harness.menu.commands.latency import LatencySettings
from harness.results.files import read_rows
from harness.results.measurement import measurement_digest
from harness.results.rows.latency import LatencyRow
from harness.sweep import saturation
from harness.sweep.saturation import reached_before
from in_process import QUICKEST_PAIR, Harness, results
from report_files import latency_run
from some_settings import settings_of


def _settings(batch_size: int, **changes: object) -> LatencySettings:
    return settings_of(
        LatencySettings, batch_size=batch_size, num_prompts=64, until_saturated=True, **changes
    )


def _rows(batch_size: int, regular: float, speculative: float) -> list[LatencyRow]:
    """The rows of a job with this throughput."""
    columns = {
        "batch_size": batch_size,
        "measurement": measurement_digest(_settings(batch_size)),
        "status": "ok",
    }
    return [
        dataclasses.replace(row, tokens_per_second=rate, **columns)
        for row, rate in zip(latency_run(), (regular, speculative), strict=True)
    ]


def test_larger_loads_are_left_out_where_neither_arm_gained() -> None:
    rows = _rows(1, 100, 200)
    assert reached_before(_settings(2), rows) is None
    rows += _rows(2, 150, 199)
    assert reached_before(_settings(4), rows) is None
    # Measured again, as the same settings under another name are.
    rows += [*_rows(4, 152, 203), *_rows(4, 152, 203)]
    reason = reached_before(_settings(8), rows)
    assert reason is not None
    assert "batch_size=2 to 4" in reason
    assert "regular 150.0 and 152.0 tokens/s" in reason
    # Larger loads say nothing about a smaller one, nor do other settings.
    assert reached_before(_settings(3), rows) is None
    assert reached_before(_settings(8, seed=1), rows) is None


def test_a_failed_job_says_nothing_about_throughput() -> None:
    rows = [*_rows(1, 100, 200), *_rows(2, 100, 200)]
    assert reached_before(_settings(4), rows) is not None
    failed = [dataclasses.replace(row, status="failed") for row in rows]
    assert reached_before(_settings(4), failed) is None


def test_a_sweep_stops_by_itself(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    # No load gains this much, so that the third is left out however fast this machine is.
    monkeypatch.setattr(saturation, "LEAST_GROWTH", 1000.0)
    quick = [*QUICKEST_PAIR, "num_prompts=4", "decoding.max_new_tokens=4", "num_warmup=0"]
    quick.append("hydra.sweep.dir=sweep")
    # The last job has the rows of the first.
    sweep = harness("latency", "-m", *quick, "batch_size=1,2,4,1", "until_saturated=true")
    lines = [line for line in sweep.stderr.splitlines() if line.startswith("[")]
    assert [line.partition(" ")[0] for line in lines] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "batch_size=4: left out: throughput does not grow" in lines[2]
    assert lines[3].endswith("(measured before)"), "the job that was left out is not left to do"
    assert "4 of 4 jobs" in sweep.stderr
    assert "left_out" in sweep.stdout
    assert set(results()["batch_size"]) == {1, 2}
    (left_out,) = [row for row in read_rows("sweep/latency.csv", LatencyRow) if row.status != "ok"]
    assert (left_out.job, left_out.batch_size, left_out.status) == ("2", 4, "left_out")
    assert "from batch_size=1 to 2" in str(left_out.error)
    # The same measurements without the setting, in the same directory: they are not measured again, and the job that
    # the first sweep left out is none of this one.
    again = harness("latency", "-m", *quick, "batch_size=1,2")
    assert again.stderr.count("measured before") == 2
    assert "[2/2] " in again.stderr
    assert "2 of 2 jobs" in again.stderr


def test_repeated_runs_are_not_left_out() -> None:
    with pytest.raises(SettingError, match="needs repeats=1"):
        _settings(1, repeats=2)
