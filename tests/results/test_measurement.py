"""What makes two measurements the same, and how rows are found again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from harness.config.commands import LatencySettings
from harness.config.settings import DecodingSettings, ModelSettings, PlacementSettings, PromptSettings, ResultSettings
from harness.results.files import append_rows, read_rows, replace_rows
from harness.results.measurement import measured_rows, measurement_digest, newest_run


@pytest.fixture
def settings(tmp_path: Path) -> LatencySettings:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"1")
    return LatencySettings(
        model=ModelSettings(name="m", repository=str(tmp_path / "model")),
        draft=ModelSettings(name="d", repository="somebody/draft"),
        decoding=DecodingSettings(),
        placement=PlacementSettings(),
        prompts=PromptSettings(name="prompts", file=str(tmp_path / "prompts.txt")),
        results=ResultSettings(file="results/latency.csv"),
    )


def test_what_changes_a_number_changes_the_digest(
    settings: LatencySettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [measurement_digest(settings)]

    def changed(**changes: object) -> None:
        digests.append(measurement_digest(dataclasses.replace(settings, **changes)))

    changed(seed=1)
    changed(num_prompts=3)
    changed(decoding=DecodingSettings(num_draft_tokens=5))
    changed(draft=ModelSettings(name="d", repository="somebody/draft", revision="other"))
    changed(placement=PlacementSettings(strategy="cpu"))
    (tmp_path / "prompts.txt").write_text("one\nthree\n")
    changed()
    (tmp_path / "model" / "weights").write_bytes(b"22")
    changed()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-of-another-kind")
    changed()
    assert len(set(digests)) == len(digests)


def test_what_changes_no_number_does_not(settings: LatencySettings) -> None:
    other = dataclasses.replace(
        settings,
        results=ResultSettings(file="elsewhere.csv"),
        resume=False,
        job_timeout_s=5.0,
        gpus_per_job=1,
        force=True,
    )
    assert measurement_digest(other) == measurement_digest(settings)


def test_without_a_draft_its_settings_do_not_matter(settings: LatencySettings) -> None:
    alone = dataclasses.replace(settings, draft=None)
    other = dataclasses.replace(alone, decoding=DecodingSettings(num_draft_tokens=8))
    assert measurement_digest(alone) == measurement_digest(other) != measurement_digest(settings)


def row(measurement: str, status: str, timestamp: str, value: int) -> dict[str, object]:
    return {"measurement": measurement, "status": status, "timestamp": timestamp, "value": value}


def test_the_newest_complete_run_is_found_beside_other_schemas(tmp_path: Path) -> None:
    file = tmp_path / "latency.csv"
    append_rows(file, [{"measurement": "a", "status": "ok", "timestamp": "0", "older": "schema"}])
    append_rows(file, [row("a", "ok", "1", 1), row("a", "ok", "1", 2)])
    append_rows(file, [row("a", "ok", "2", 3), row("b", "ok", "2", 4)])
    append_rows(file, [row("a", "failed", "3", 5)])
    assert (tmp_path / "latency-2.csv").exists()
    assert [found["value"] for found in measured_rows(file, "a")] == ["3"]
    assert measured_rows(file, "c") == []
    assert [found["value"] for found in newest_run(file)] == ["5"]
    assert newest_run(tmp_path / "absent.csv") == []


def test_a_row_takes_the_place_of_those_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "sweep.csv"
    assert replace_rows(file, [{"job": "0", "text": 'a "quoted"\nline', "value": 1}], "job") == 1
    assert (
        replace_rows(file, [{"job": "1", "text": "NA", "value": None}, {"job": "1", "text": "x", "value": 2}], "job")
        == 2
    )
    assert replace_rows(file, [{"job": "0", "text": "new", "value": 3, "more": True}], "job") == 2
    assert read_rows(file) == [
        {"job": "1", "text": "NA", "value": "", "more": ""},
        {"job": "1", "text": "x", "value": "2", "more": ""},
        {"job": "0", "text": "new", "value": "3", "more": "True"},
    ]
