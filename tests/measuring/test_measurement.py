"""The identity of a measurement, and how its rows are found again."""

import dataclasses
import os
from pathlib import Path

import pytest

from echo_server import EchoServer, serving
from harness.commands.latency.record import LatencySettings
from harness.config.settings import (
    DecodingSettings,
    ModelSettings,
    PlacementSettings,
    PromptSettings,
    ResultSettings,
)
from harness.local.drafting.method import ModelDraftSettings
from harness.measuring import measurement
from harness.measuring.measurement import Measurement, identify, measured_rows, weights_identity
from harness.measuring.rows import LatencyRow
from harness.results.files import append_rows
from harness.servers.settings import ServerSettings
from some_settings import settings_of


@pytest.fixture
def settings(tmp_path: Path) -> LatencySettings:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_bytes(b"1")
    model = ModelSettings(name="m", repository=str(tmp_path / "model"))
    prompts = PromptSettings(name="prompts", file=str(tmp_path / "prompts.txt"))
    return settings_of(LatencySettings, model=model, prompts=prompts)


def test_what_changes_a_number_changes_the_digest(
    settings: LatencySettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [identify(settings).digest]

    def changed(**changes: object) -> None:
        digests.append(identify(dataclasses.replace(settings, **changes)).digest)

    changed(seed=1)
    changed(num_prompts=3)
    changed(decoding=DecodingSettings(num_draft_tokens=5))
    changed(draft=ModelDraftSettings(name="7B", repository="a/7B", revision="other"))
    changed(placement=PlacementSettings(strategy="cpu"))
    (tmp_path / "prompts.txt").write_text("one\nthree\n")
    changed()
    (tmp_path / "model" / "weights.bin").write_bytes(b"22")
    changed()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-of-another-kind")
    changed()
    monkeypatch.setattr(measurement, "gpu_names", lambda: ["A100"])
    changed()
    monkeypatch.setattr(measurement, "gpu_names", list)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    changed()
    assert len(set(digests)) == len(digests)


def test_what_changes_no_number_changes_no_digest(
    settings: LatencySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = identify(settings).digest
    # Later jobs of a sweep have it.
    monkeypatch.setenv("HARNESS_SWEEP_THREADS", "2")
    changes = {"resume": False, "job_timeout_s": 5.0, "force": True}
    other = dataclasses.replace(settings, results=ResultSettings(file="elsewhere.csv"), **changes)
    assert identify(other).digest == digest
    alone = dataclasses.replace(settings, draft=None)
    without = dataclasses.replace(alone, decoding=DecodingSettings(num_draft_tokens=8))
    assert identify(alone).digest == identify(without).digest != identify(settings).digest


def test_all_source_counts(
    settings: LatencySettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    monkeypatch.setattr(measurement, "PACKAGE", package)

    def digest(file: str) -> str:
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text("changed = True\n")
        measurement._source.cache_clear()
        return identify(settings).digest

    before = digest("decoding/notes.md")
    assert digest("decoding/notes.md") == before
    counted = "config/acceptance_math.py decoding/loops.py a_new_room/any_kind.py gpus.csv".split()
    assert len({before, *map(digest, counted)}) == 1 + len(counted)
    measurement._source.cache_clear()


def row(run: str, digest: str, status: str, value: int) -> LatencyRow:
    return LatencyRow(run=run, measurement=digest, status=status, num_tokens=value)


def test_the_newest_complete_run_is_found_also_in_files_of_other_versions(tmp_path: Path) -> None:
    file = tmp_path / "latency.csv"
    # A version that had fewer columns.
    header = ",".join(["run", "measurement", "status", *LatencyRow.recognised_by])
    file.write_text(f"{header}\n0,a,ok,,,,\n")
    append_rows(file, [row("1", "a", "ok", 1), row("1", "a", "ok", 2)])
    append_rows(file, [row("2", "a", "ok", 3), row("2b", "b", "ok", 4)])
    append_rows(file, [row("3", "a", "failed", 5)])
    # A map with a cell that was refused a verdict is not whole without it.
    append_rows(file, [row("4", "a", "ok", 6), row("4", "a", "no_verdict", 7)])
    assert (tmp_path / "latency-2.csv").exists()
    assert [found.num_tokens for found in measured_rows(file, LatencyRow, Measurement("a"))] == [3]
    assert measured_rows(file, LatencyRow, Measurement("c")) == []


def asking(settings: LatencySettings, url: str, **changes: object) -> LatencySettings:
    engine = ServerSettings(name="server", url=url)
    return dataclasses.replace(settings, draft=None, engine=engine, **changes)


def test_figures_of_a_server_are_of_the_process_that_gave_them(
    settings: LatencySettings, tmp_path: Path
) -> None:
    file, server = tmp_path / "latency.csv", EchoServer(version="1.0", started=100)

    def found(url: str, **changes: object) -> bool:
        asked = identify(asking(settings, url, **changes))
        return bool(measured_rows(file, LatencyRow, asked))

    with serving(server) as url, serving(EchoServer(version="1.0")) as unknown:
        now = identify(asking(settings, url))
        assert now.server_started == "100"
        two = ServerSettings(name="server", url=url, regular_url=unknown)
        assert identify(dataclasses.replace(settings, engine=two)).server_started is None
        known = {"measurement": now.digest, "server_started": now.server_started}
        told = LatencyRow(run="1", status="ok", **known)
        append_rows(file, [told])
        assert found(url)
        assert not found(url, seed=7)
        server.started = 200
        assert not found(url)
        assert found(url, resume="always")
        server.started = None
        assert not found(url), "it may run with other flags than before"
        assert found(url, resume="always")
        server.version = "1.1"
        assert not found(url, resume="always"), "another version gives other figures"
        server.version = "1.0"
        assert found(url, resume="always")
    assert not found(url, resume="always"), "a server that is down was not measured"


def test_figures_of_a_started_server_are_of_the_files_that_its_command_names(
    settings: LatencySettings, tmp_path: Path
) -> None:
    """Nobody can see which further files its program reads: they are not taken over unasked."""
    program, model = tmp_path / "serve", tmp_path / "model.gguf"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    model.write_bytes(b"1")
    words = (str(program), "--port", "{port}", f"--model={model}")
    engine = ServerSettings(name="server", start_command=words)
    started = dataclasses.replace(settings, draft=None, engine=engine)
    always = dataclasses.replace(started, resume="always")
    assert not identify(started).reusable
    first = identify(always)
    assert first.reusable
    assert identify(always).digest == first.digest
    model.write_bytes(b"22")
    second = identify(always)
    os.utime(program, (1, 1))
    assert len({first.digest, second.digest, identify(always).digest}) == 3


def test_weights_are_known_by_commit_or_by_their_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = ModelSettings(name="m", repository="maker/model")
    newest, older = 5 * "89abcdef", 5 * "0123abcd"
    pinned = dataclasses.replace(model, revision=older)
    cache = tmp_path / "models--maker--model"
    assert weights_identity(model) is None
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(newest)
    for commit in (newest, older):
        (cache / "snapshots" / commit).mkdir(parents=True)
    assert weights_identity(model) == f"commit:{newest}"
    assert weights_identity(pinned) == f"commit:{older}"

    local = ModelSettings(name="m", repository=str(tmp_path / "local"))
    (tmp_path / "local").mkdir()
    weights = tmp_path / "local" / "model.safetensors"
    weights.write_bytes(bytes(3_000_000))
    before = weights_identity(local)
    (tmp_path / "local" / "README.md").write_text("about it")
    weights.touch()
    assert weights_identity(local) == before
    trained = bytearray(3_000_000)
    trained[1_500_000:] = b"1" * 1_500_000
    weights.write_bytes(trained)
    assert weights_identity(local) != before
