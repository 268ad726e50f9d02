"""The suite for a GPU: what it saves, what runs again, and what its report fills in."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forked import begin_program

ROOT = Path(__file__).parents[1]
PAIR = "7B+llama_68m-batch1-k4"
ABOUT: dict[str, Any] = {
    "attempts": 1,
    "done": True,
    "seconds": 60.0,
    "num_prompts": 2,
    "max_new_tokens": 64,
    "temperature": 1.0,
    "acceptance_rate": 0.8,
    "floor_ms": 3.0,
    "draft_floor_ms": 0.1,
    "copy_bandwidth_bytes_per_s": 4e12,
    "peak_memory_bytes": 2**34,
    "devices": "H200",
}


@pytest.mark.parametrize("tied", [False, True])
def test_linked_models_agree_as_often_as_asked(tied: bool, suite: ModuleType) -> None:
    """A draft with tied embeddings would propose what it read."""
    from chain import link

    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    target = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    draft = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))
    link(target, draft, agreement=0.8)
    tokens = torch.arange(500).unsqueeze(1)
    with torch.inference_mode():
        first, second = (model(tokens).logits.argmax(-1) for model in (target, draft))
    assert (first == second).float().mean() == pytest.approx(0.8)
    assert (second == tokens).float().mean() < 0.1


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_suite

    return gpu_suite


def save(directory: Path, name: str, lines: list[dict[str, Any]], **about: Any) -> None:
    directory.mkdir(exist_ok=True)
    texts = [json.dumps(line) for line in ({"case": name, **ABOUT, **about}, *lines)]
    (directory / f"{name}.jsonl").write_text("\n".join(texts), encoding="utf-8")


def arm(name: str, seconds: float, decode_ms: float, **more: Any) -> dict[str, Any]:
    own = {"arm": name, "seconds": [seconds] * 2, "ms_per_token": 1000 * seconds / 64}
    return own | {"first_token_ms": 9.0, "decode_ms_per_token": decode_ms} | more


def test_a_case_that_was_cut_off_runs_once_more(suite: ModuleType, tmp_path: Path) -> None:
    save(tmp_path, "tests", [], done=False)
    save(tmp_path, "commands", [], done=False, attempts=2)
    found = suite.gpu_report.read(tmp_path, ["tests", "commands", "recovery"])
    due = [name for name in (*found, "recovery") if suite.is_due(name, found)]
    assert due == ["tests", "recovery"]


def test_tests_are_found_where_plugins_and_servers_are_missing(suite: ModuleType) -> None:
    """As in the image of a GPU box: neither xdist nor pytest-timeout, uvicorn or pyte."""
    script = """
import sys
import pytest
sys.modules.update(dict.fromkeys(("xdist", "pytest_timeout", "uvicorn", "fastapi", "pyte")))
sys.exit(pytest.main([*sys.argv[1:], "--collect-only", "-q"]))
"""
    shown = subprocess.run(
        [sys.executable, "-c", script, *suite.pytest_arguments("gpu and not slow")],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    num_collected, _ = re.search(r"(\d+)/(\d+) tests collected", shown.stdout).groups()
    assert int(num_collected) >= 8


def test_a_case_of_tests_that_ran_none_is_no_success(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest, "main", lambda *_, **__: pytest.ExitCode.INTERRUPTED)
    with pytest.raises(RuntimeError, match="no test ran: pytest ended with 2"):
        suite.run_tests("gpu", lambda lines: None, [])


def test_results_are_where_they_were_asked_for(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tests change the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--out", "results"])
    assert suite.options_from({}).out == tmp_path / "results"


def test_a_command_has_its_environment_before_it(suite: ModuleType) -> None:
    line = suite._run_command("PYTHONPROFILEIMPORTTIME=1 --version")
    assert line["exit_code"] == 0
    assert any(text.startswith("import time:") for text in line["end"])


def test_what_one_wants_to_know_first_is_measured_first(suite: ModuleType) -> None:
    names = [job.name for job in suite.GPU_JOBS]
    assert names[0] == PAIR
    assert names.index(f"{PAIR}-assisted-constant-K") < names.index("tests")
    assert len(set(names)) == len(names)


def test_each_measurement_is_saved_and_a_failed_case_keeps_them(
    suite: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []
    file = tmp_path / "other.jsonl"

    def measure(save: Any, done: Any) -> None:
        save([{}, {"size": 1}])
        seen.append(file.read_text(encoding="utf-8").splitlines())
        raise RuntimeError("no memory")

    options = suite.argparse.Namespace(again=False)
    assert suite.run(suite.Other("other", 1, measure), options, file) == (
        "other: RuntimeError: no memory"
    )
    assert [json.loads(line) for line in seen[0]][1:] == [{"size": 1}]
    assert 'raise RuntimeError("no memory")' in capsys.readouterr().err
    about, line = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert line == {"size": 1}
    assert (about["done"], about["error"]) == (True, "RuntimeError: no memory")


def test_an_attempt_that_is_cut_off_at_once_leaves_what_there_was(
    suite: ModuleType, tmp_path: Path
) -> None:
    """Both its lines and its first line, which the report's table needs."""
    line = {"test": "test_one", "outcome": "passed", "seconds": 1.0}
    save(tmp_path, "tests", [line], done=False, summary="1 passed")
    file = tmp_path / "tests.jsonl"

    def measure(save: Any, done: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite.run(suite.Other("tests", 1, measure), suite.argparse.Namespace(again=False), file)
    result = suite.gpu_report.read_file(file)
    assert result.lines == [line]
    assert (result.about["attempts"], result.about["done"]) == (2, False)
    assert "1 passed" in suite.gpu_report.report({"tests": result})


def test_there_is_a_report_where_little_was_found(suite: ModuleType, tmp_path: Path) -> None:
    versions = dict.fromkeys(("torch_version", "transformers_version", "bitsandbytes_version"), "1")
    about = {**versions, "timestamp": "2026-11-24T12:00:00", "commit": "abc"}
    failed = "OutOfMemoryError: CUDA out of memory"
    save(tmp_path, PAIR, [], error=failed, **about)
    report = suite.gpu_report.report(suite.gpu_report.read(tmp_path, [PAIR]))
    for found in (f"failed: {failed}", "not measured"):
        assert found in report


def test_a_case_that_hangs_leaves_time_for_others(suite: ModuleType) -> None:
    minutes = [suite.most_minutes(job) for job in suite.GPU_JOBS]
    assert all(most >= 2 * job.minutes for most, job in zip(minutes, suite.GPU_JOBS, strict=True))
    assert minutes[0] < 20


def test_the_report_fills_the_readme_with_peers_of_other_processes(
    suite: ModuleType, tmp_path: Path
) -> None:
    lines = [
        arm("eager regular", 1.0, 14.0),
        arm("compiled regular", 0.25, 3.3),
        arm("compiled speculative", 0.125, 1.7),
    ]
    save(tmp_path, PAIR, lines)
    assisted = {"arm": "assisted, constant K", "seconds": [0.5], "ms_per_token": 7.8}
    save(tmp_path, f"{PAIR}-assisted-constant-K", [assisted], num_prompts=1)
    page = tmp_path / "README.md"
    begin, end = suite.gpu_report.README_MARKS
    page.write_text(f"before\n{begin}old\n{end}after\n", encoding="utf-8")
    results = suite.gpu_report.read(tmp_path, [PAIR, f"{PAIR}-assisted-constant-K"])
    suite.gpu_report.fill(page, results)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    for found in ("1.10×", "4.00×", "assisted, constant K", "reached"):
        assert found in text
    assert begin in (ROOT / "README.md").read_text(encoding="utf-8")


def run_suite(*arguments: str) -> None:
    """Run the suite on a pretended GPU, in processes of its own."""
    variables = {"PRETENDED_GPUS": "1", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests/support")))
    program = [sys.executable, str(ROOT / "benchmarks/gpu_suite.py"), *arguments]
    shown = subprocess.run(
        program, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr


@pytest.mark.slow
def test_on_a_pretended_gpu_cases_run_to_their_end_in_their_own_processes(
    suite: ModuleType, tmp_path: Path
) -> None:
    """A pair and a command; all others, by the command in CONTRIBUTING.md, take an hour."""
    wanted = {PAIR, "eagle3"}
    out = tmp_path / "results"
    for job in suite.GPU_JOBS:
        if job.name not in wanted:
            save(out, job.name, [])
    run_suite("--minutes", "60", "--prompts", "1", "--tokens", "4", "--out", str(out))
    results = suite.gpu_report.read(out, wanted)
    assert {name: result.about.get("error") for name, result in results.items()} == dict.fromkeys(
        wanted
    )
    arms = {line["arm"] for line in results[PAIR].lines}
    assert arms >= {"eager regular", "compiled regular", "compiled speculative"}
    assert [line["exit_code"] for line in results["eagle3"].lines] in ([0], [3])
    report = suite.gpu_report.report(results)
    for found in ("pretended GPU", "compiled passes against eager", "compiled speculative"):
        assert found in report
    assert len(list(tmp_path.glob("*.tar.gz"))) == 2
    assert (out / "results/latency.csv").exists()


def test_the_report_says_what_is_decided(suite: ModuleType, tmp_path: Path) -> None:
    both = [1.0, 1.1] * 4
    lines = [
        arm("eager regular", 8.0, 14.0) | {"seconds": [4 * one for one in both]},
        arm("compiled regular", 2.0, 3.3) | {"seconds": both},
        arm("compiled speculative", 1.0, 1.7) | {"seconds": [one / 2 for one in both]},
    ]
    save(tmp_path, PAIR, lines)
    compiled = "generate, static compiled cache"
    theirs = {"arm": compiled, "seconds": [1.04 * one for one in both], "ms_per_token": 7.8}
    peer = f"{PAIR}-{compiled.replace(',', '').replace(' ', '-')}"
    save(tmp_path, peer, [theirs])
    results = suite.gpu_report.read(tmp_path, [PAIR, peer])
    rows = [row.cells for row in suite.gpu_report.decisions(results).rows]
    assert [row[1:] for row in rows[:1]] == [("1.04× (1.04 to 1.04)", "ours goes")]
    assert rows[1][1].startswith("4.00×")
    versions = dict.fromkeys(("torch_version", "transformers_version", "bitsandbytes_version"), "1")
    for result in results.values():
        result.about.update(versions, timestamp="2026-11-24T12:00:00", commit="abc")
    assert "ours goes" in suite.gpu_report.report(results)


def list_cases() -> None:
    suite = str(ROOT / "benchmarks/gpu_suite.py")
    sys.argv = [suite, "--list"]
    sys.path.insert(0, str(Path(suite).parent))
    runpy.run_path(suite, run_name="__main__")


def test_the_plan_is_printed_wherever_it_is_called_from(tmp_path: Path) -> None:
    process = begin_program(list_cases, tmp_path)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "eagle3" in stdout


def run_a_case_that_hangs() -> None:
    program = Path("case")
    program.write_text(
        "#!/bin/sh\necho $$ > started.part\nmv started.part started\nexec sleep 600\n"
    )
    program.chmod(0o755)
    suite = str(ROOT / "benchmarks/gpu_suite.py")
    sys.executable = str(program.resolve())
    sys.argv = [suite, "--minutes", "5", "--out", "results"]
    sys.path.insert(0, str(Path(suite).parent))
    runpy.run_path(suite, run_name="__main__")


def test_a_suite_that_is_ended_ends_its_case_and_archives_its_results(tmp_path: Path) -> None:
    """`timeout` ends it so, and a case that went on would have the GPU."""
    process = begin_program(run_a_case_that_hangs, tmp_path)
    # The case runs in the directory of the results.
    started = tmp_path / "results/started"
    while not started.exists() and process.poll() is None:
        time.sleep(0.01)
    case = psutil.Process(int(started.read_text(encoding="utf-8")))
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert not case.is_running()
    assert (tmp_path / "results.tar.gz").exists()
    assert "to take home" in stdout
