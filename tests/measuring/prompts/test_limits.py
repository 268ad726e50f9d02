"""Files that have no end, and directories of whole disks: one line, before weights load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.commands.report import command
from in_process import QUICKEST_PAIR, Harness
from shipped_copies import copy_shipped

PAIR = ["model=./model", "draft=none", "num_prompts=2", "chat_template=always"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    copy_shipped(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"]
)
def test_a_file_without_end(name: str, model: Path, harness: Harness) -> None:
    file = model / name
    for make in (lambda: file.symlink_to("/dev/zero"), lambda: os.mkfifo(file)):
        file.unlink(missing_ok=True)
        make()
        for role in ("model=./model", "draft=./model"):
            refused = harness.refused("latency", *QUICKEST_PAIR, role)
            assert f"=./model: {name} in it is no file but a pipe or a device" in refused
    file.unlink()
    with file.open("wb") as large:
        large.truncate(1 << 29)
    if name != "model.safetensors":
        assert "has 0.54 GB, and at most 0.27 GB are read" in harness.refused("latency", *PAIR)


def test_a_search_of_a_disk_ends(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "latency.csv")
    assert "holds no CSV file of" in harness.refused("report", str(tmp_path))
    monkeypatch.setattr(command, "_MOST_FILES", 10)
    for number in range(11):
        (tmp_path / f"{number}.txt").touch()
    refused = harness.refused("report", ".")
    assert refused.endswith("has more than 10 files below it: name a directory of results")
