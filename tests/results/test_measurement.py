"""What makes two measurements the same, and how rows are found again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from harness.config.commands import LatencySettings
from harness.config.settings import (
    DecodingSettings,
    ModelSettings,
    PlacementSettings,
    PromptSettings,
    ResultSettings,
)
from harness.menu.methods.model import ModelDraftSettings
from harness.results import measurement
from harness.results.files import append_rows
from harness.results.measurement import measured_rows, measurement_digest, newest_run
from harness.results.schema import LatencyRow
from some_settings import settings_of


@pytest.fixture
def settings(tmp_path: Path) -> LatencySettings:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"1")
    model = ModelSettings(name="m", repository=str(tmp_path / "model"))
    prompts = PromptSettings(name="prompts", file=str(tmp_path / "prompts.txt"))
    return settings_of(LatencySettings, model=model, prompts=prompts)


def test_what_changes_a_number_changes_the_digest(
    settings: LatencySettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [measurement_digest(settings)]

    def changed(**changes: object) -> None:
        digests.append(measurement_digest(dataclasses.replace(settings, **changes)))

    changed(seed=1)
    changed(num_prompts=3)
    changed(decoding=DecodingSettings(num_draft_tokens=5))
    changed(draft=ModelDraftSettings(name="7B", repository="a/7B", revision="other"))
    changed(placement=PlacementSettings(strategy="cpu"))
    (tmp_path / "prompts.txt").write_text("one\nthree\n")
    changed()
    (tmp_path / "model" / "weights").write_bytes(b"22")
    changed()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-of-another-kind")
    changed()
    assert len(set(digests)) == len(digests)


def test_what_changes_no_number_does_not(settings: LatencySettings) -> None:
    changes = {"resume": False, "job_timeout_s": 5.0, "gpus_per_job": 1, "force": True}
    other = dataclasses.replace(settings, results=ResultSettings(file="elsewhere.csv"), **changes)
    assert measurement_digest(other) == measurement_digest(settings)


def test_without_a_draft_its_settings_do_not_matter(settings: LatencySettings) -> None:
    alone = dataclasses.replace(settings, draft=None)
    other = dataclasses.replace(alone, decoding=DecodingSettings(num_draft_tokens=8))
    assert measurement_digest(alone) == measurement_digest(other) != measurement_digest(settings)


def test_only_source_that_decodes_or_measures_counts(
    settings: LatencySettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in ("decoding", "report", "cli"):
        (tmp_path / "package" / room).mkdir(parents=True)
    monkeypatch.setattr(measurement, "_PACKAGE", tmp_path / "package")

    def digest(file: str) -> str:
        (tmp_path / "package" / file).write_text("changed = True\n")
        measurement._source.cache_clear()
        return measurement_digest(settings)

    before = digest("report/nothing.py")
    assert digest("report/plots.py") == digest("cli/main.py") == before
    assert digest("decoding/loops.py") != before
    measurement._source.cache_clear()


def row(run: str, digest: str, status: str, value: int) -> LatencyRow:
    return LatencyRow(run=run, measurement=digest, status=status, num_tokens=value)


def test_the_newest_complete_run_is_found_also_in_files_of_other_versions(tmp_path: Path) -> None:
    file = tmp_path / "latency.csv"
    # A version that had fewer columns.
    file.write_text(
        ",".join(["run", "measurement", "status", *LatencyRow.signature]) + "\n0,a,ok,,,,\n"
    )
    append_rows(file, [row("1", "a", "ok", 1), row("1", "a", "ok", 2)])
    append_rows(file, [row("2", "a", "ok", 3), row("2b", "b", "ok", 4)])
    append_rows(file, [row("3", "a", "failed", 5)])
    assert (tmp_path / "latency-2.csv").exists()
    assert [found.num_tokens for found in measured_rows(file, LatencyRow, "a")] == [3]
    assert measured_rows(file, LatencyRow, "c") == []
    assert [found.num_tokens for found in newest_run(file, LatencyRow)] == [5]
    assert newest_run(tmp_path / "absent.csv", LatencyRow) == []
