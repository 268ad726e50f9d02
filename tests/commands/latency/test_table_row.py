"""`report format=row`: a row for a table of many people's runs, from planted rows and through the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from harness.commands.latency.tables.table_row import table_rows
from harness.measuring.rows import LatencyRow
from harness.results.files import append_rows
from harness.results.result_file import write_result
from harness.results.runs import Run
from in_process import Harness
from report_files import latency_run, write

LLAMA = "llama-server -m Qwen3.gguf --host 127.0.0.1 --port {port} --metrics"
DRAFTS = (
    "llama-server -m Qwen3.gguf --spec-type draft-mtp --host 127.0.0.1 --port '{port}' --metrics"
)
SERVED: dict[str, Any] = {
    "engine": "server", "server": "llama.cpp b10434", "server_command": f"{LLAMA}; {DRAFTS}", "model": "Qwen3.gguf",
    "draft": "draft-mtp", "draft_method": "draft-mtp", "tokens_per_iteration": 2.5, "url": None,
}  # fmt: skip


def cells(run: list[LatencyRow]) -> list[str]:
    """The cells of a run's row."""
    headings, separator, line = table_rows([Run(run)])
    assert re.fullmatch(r"\|( --- \|)+", separator)
    texts = [re.split(r"(?<!\\)\|", each)[1:-1] for each in (headings, line)]
    assert len(texts[0]) == len(texts[1]) == separator.count("---")
    return [text.strip() for text in texts[1]]


def test_a_row_says_what_was_measured() -> None:
    assert cells(latency_run(2, 1.5, **SERVED)) == [
        "Qwen3.gguf",
        "llama.cpp b10434",
        "draft-mtp",
        "2",
        "NVIDIA A100",
        "1.50× (1.40 to 1.60)",
        "2.50",
        "`llama-server -m Qwen3.gguf --spec-type draft-mtp --metrics`",
    ]


@pytest.mark.parametrize(
    ("changes", "column", "text"),
    [
        ({"speedup_covers": "15 prompts"}, 5, "1.50× (1.40 to 1.60 over 15 prompts)"),
        ({"speedup_low": None, "speedup_high": None}, 5, "1.50× (no interval)"),
        ({"status": "no_verdict", "error": "x", "speedup": None}, 5, "no verdict"),
        ({"processor_share": 0.5}, 5, "1.50× (1.40 to 1.60), not quiet"),
        ({"draft": "org/head", "draft_method": "eagle3"}, 2, "org/head (eagle3)"),
        ({"draft": "server", "draft_method": None}, 2, "the server's own"),
        ({"engine": "local", "server": None}, 1, "harness 0.1.0, engine=local"),
        ({"model": "a|b"}, 0, r"a\|b"),
        ({"server_command": None}, 7, "–"),
    ],
)
def test_what_a_run_lacks(changes: dict[str, Any], column: int, text: str) -> None:
    regular, speculative = latency_run(2, 1.5, **SERVED)
    assert cells([regular, speculative.from_values(speculative.values() | changes)])[column] == text


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("env K=2 harness serve K=2 host=127.0.0.1 port={port}", "`env K=2 harness serve K=2`"),
        ("vllm serve A --x '{\"a|b\": 1}' --host 127.0.0.1 --port {port}",
         "`vllm serve A --x '{\"a\\|b\": 1}'`"),
        ("docker run -p {port}:8000 vllm/vllm-openai", "`docker run -p '{port}:8000' vllm/vllm-openai`"),
        ("vllm serve '`A`'", "`` vllm serve '`A`' ``"),
    ],
)  # fmt: skip
def test_a_command_lacks_our_port(command: str, shown: str) -> None:
    assert cells(latency_run(**SERVED | {"server_command": command}))[7] == shown


def test_the_command_line_prints_a_row_for_each_run(harness: Harness) -> None:
    directories = []
    for draft in ("7B", "68M"):
        directory = Path("outputs", draft)
        directory.mkdir(parents=True)
        run = latency_run(draft=draft, directory=str(directory))
        append_rows(Path("results/latency.csv"), run)
        append_rows(directory / "latency.csv", run)
        write_result(directory, run, [])
        directories.append((str(run[0].run), directory))
    lines = harness("report", "format=row").stdout.splitlines()
    assert len(lines) == 4
    assert "| 7B |" in lines[2]
    (first, _), (_, second) = directories
    assert harness("report", first, "format=row").stdout.splitlines() == lines[:3]
    assert harness("report", str(second), "format=row").stdout.splitlines()[2] == lines[3]


def test_a_file_that_was_cut_has_no_row_of_an_arm_alone(harness: Harness, tmp_path: Path) -> None:
    write(tmp_path / "latency.csv", latency_run(2, 1.5, **SERVED))
    text = (tmp_path / "latency.csv").read_text()
    (tmp_path / "latency.csv").write_text(text[: len(text) - 200])
    outcome = harness("report", str(tmp_path / "latency.csv"), "format=row", code=2)
    assert "holds no whole run of latency" in outcome.complaint
    assert "cells; left out" in outcome.stderr
    assert outcome.stdout == ""
