"""Files of a model that would take all memory or time, and those that have no end: one line, before weights load."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.commands import read_runs
from harness.config.errors import SettingError
from harness.measuring.prompts import limits
from harness.measuring.prompts.limits import within_limits
from in_process import QUICKEST_PAIR, Harness
from shipped_copies import copy_shipped

PAIR = ["model=./model", "draft=none", "num_prompts=2", "chat_template=always"]
ENDLESS_LOOP = 3 * "{% for i in range(99999) %}" + 3 * "{% endfor %}"
MEMORY, TIME = r"more than 2\.\d GB of memory", "more than 1 s of processor time"
GROWS = [{"type": "Replace", "pattern": {"String": "a"}, "content": 20 * "a"}] * 8


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(limits, "_SECONDS", 1)
    copy_shipped(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing limits it")
@pytest.mark.parametrize(
    ("template", "limit"),
    [
        ("{{ 'a' * 10 ** 11 }}", MEMORY),
        ("{{ 'a'.center(10 ** 11) }}", MEMORY),
        ("{{ '%10000000000d' % 5 }}", MEMORY),
        (ENDLESS_LOOP, TIME),
    ],
)
def test_a_chat_template_that_runs_away(
    template: str, limit: str, model: Path, harness: Harness
) -> None:
    (model / "chat_template.jinja").write_text(template)
    rule = f"chat_template: the model's tokenizer and chat template need {limit} for the prompts"
    assert re.fullmatch(rule, harness.refused("latency", *PAIR))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing limits it")
@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_tokenizer_that_runs_away(part: str, model: Path, harness: Harness) -> None:
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    grows = [content[part], *GROWS] if part == "decoder" else GROWS
    name = "decoders" if part == "decoder" else "normalizers"
    content[part] = {"type": "Sequence", name: grows}
    file.write_text(json.dumps(content))
    assert "the model's tokenizer and chat template need more than" in harness.refused(
        "latency", *PAIR[:-1]
    )


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
    monkeypatch.setattr(read_runs, "_MOST_FILES", 10)
    for number in range(11):
        (tmp_path / f"{number}.txt").touch()
    refused = harness.refused("report", ".")
    assert refused.endswith("has more than 10 files below it: name a directory of results")


def test_a_signal_ends_the_work(tmp_path: Path) -> None:
    def interrupt() -> None:
        (tmp_path / "process").write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        within_limits(interrupt, 0, "model")
    assert not psutil.pid_exists(int((tmp_path / "process").read_text()))


def test_an_error_of_the_work_is_its_own() -> None:
    def refuse() -> None:
        raise SettingError("chat_template", "refuses a prompt")

    with pytest.raises(SettingError, match="refuses a prompt"):
        within_limits(refuse, 0, "model")
    assert within_limits(lambda: [[1, 2]], 0, "model") == [[1, 2]]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is copied")
@pytest.mark.parametrize("before", ["true", None])
def test_servers_that_start_later_do_not_inherit_what_the_copy_needs(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TOKENIZERS_PARALLELISM"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    assert within_limits(lambda: os.environ[name], 1, "model") == "false"
    assert os.environ.get(name) == before
