"""The command line as a user meets it: processes, exit codes, and what is on stderr."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Against hanging: far more than a busy machine needs.
TIMEOUT_S = 900

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def harness(tmp_path: Path) -> Run:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "harness", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    return run


def test_without_a_command_it_lists_them(harness: Run) -> None:
    result = harness()
    assert result.returncode == 0
    assert "python -m harness latency model=30B draft=7B" in result.stdout


def test_help_lists_settings_and_presets(harness: Run) -> None:
    result = harness("latency", "--help")
    assert result.returncode == 0
    for expected in ("num_draft_tokens: 4", "7B", "tiny_draft", "-m sweeps"):
        assert expected in result.stdout


def test_the_composed_configuration_can_be_printed(harness: Run) -> None:
    result = harness("latency", "model=7B_8bit_4GPUs", "draft=./other", "--cfg", "job")
    assert result.returncode == 0, result.stderr
    assert "name: 7B_8bit_4GPUs" in result.stdout
    assert "repository: ./other" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["latncy"], "latncy: no such command (did you mean latency?)"),
        (["eval", "prompts=english"], "prompts: no such setting"),
        (
            ["latency", "runner=graph"],
            "runner=graph: must be one of auto, eager, static, compiled, graphs, graphs_only",
        ),
        (["latency", "job_timeout_s=0"], "job_timeout_s=0.0: must be positive"),
        (["latency", "job_timeout_s=60"], "job_timeout_s=60.0: needs -m: it ends jobs of a sweep"),
        (["latency", "model=7C"], "model=7C: no such preset (did you mean 7B?)"),
        (["latency", "draft=tiny_draf"], "draft=tiny_draf: no such preset (did you mean tiny_draft?)"),
        (["latency", "draft=lokup"], "draft=lokup: no such preset (did you mean lookup?)"),
        (["latency", "draft=tiny_draf_8bit"], "draft=tiny_draf: no such preset (did you mean tiny_draft?)"),
        (["latency", "+pair=7B+tiny_draf"], "draft=tiny_draf: no such preset (did you mean tiny_draft?)"),
        (["latency", "placement=balancd"], "placement=balancd: no such preset (did you mean balanced?)"),
        (["latency", "prompts=englsh"], "prompts=englsh: no such preset (did you mean english?)"),
        (["latency", "temperature=1"], "temperature: no such setting (did you mean decoding.temperature?)"),
        (["latency", "decoding.top_pp=1"], "decoding.top_pp: no such setting (did you mean decoding.top_p?)"),
        (["latency", "+seeds=3"], "seeds: no such setting (did you mean seed?)"),
        (["latency", "decoding.num_draft_tokens=0"], "decoding.num_draft_tokens=0: must be at least 1"),
        (["latency", "decoding.temperature=-1"], "decoding.temperature=-1.0: must not be negative"),
        (["latency", "decoding.top_p=1.5"], "decoding.top_p=1.5: must be in (0, 1]"),
        (["latency", "decoding.rule=deepmnd"], "decoding.rule=deepmnd: must be one of deepmind, google"),
        (["latency", "decoding.lenience=0.5"], "decoding.lenience=0.5: below 1 needs decoding.rule=google"),
        (["latency", "batch_size=two"], "batch_size=two: must be a whole number"),
        (["latency", "model.gpus=0"], "model.gpus=0: must be at least 1"),
        (["latency", "model=7B,13B"], "model=7B,13B: several values need -m"),
        (["latency", "model"], "model: cannot be read as setting=value"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(harness: Run, arguments: list[str], expected: str) -> None:
    result = harness(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"harness: {expected}")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_several_values_are_a_sweep_wherever_the_flag_stands(harness: Run) -> None:
    for arguments in (["seed=1,2", "-m", "decoding.top_p=2"], ["-m", "seed=1,2", "decoding.top_p=2"]):
        result = harness("latency", *arguments)
        assert result.returncode == 2
        assert result.stderr.count("harness: decoding.top_p=2.0: must be in (0, 1]") == 2, result.stderr


def test_who_reads_half_of_the_help_sees_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m harness latency --help | head -n 1"
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr == ""


def test_a_traceback_can_be_asked_for(harness: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    result = harness("latency", "decoding.top_p=0")
    assert result.returncode != 0
    assert "Traceback" in result.stderr
    assert "SettingError" in result.stderr


def test_a_wrong_setting_is_found_without_importing_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from harness import cli; sys.argv = ['harness', 'latency', 'decoding.top_p=0']\n"
        "try: cli.main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert result.stdout.split() == ["2", "False", "False"]


def test_users_bring_their_own_presets(harness: Run, tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "ours.yaml").write_text("name: ours\nrepository: team/ours\n")
    result = harness("latency", "-cd", "mine", "model=ours_4bit", "draft=ours", "--cfg", "job")
    assert result.returncode == 0, result.stderr
    assert "name: ours_4bit" in result.stdout
    assert "quantization: 4bit" in result.stdout


def test_a_directory_without_its_slash_is_suggested_with_it(harness: Run, tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    result = harness("latency", "model=llama")
    assert result.returncode == 2
    assert result.stderr.startswith("harness: model=llama: no such preset (did you mean ./llama?)")
