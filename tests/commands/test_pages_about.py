"""Pages about many runs, and that every command that an answer names as the next one would run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from composing import all_accepted, collected
from harness.commands.report.command import build
from harness.config.command_line import Words
from harness.measuring.rows import LatencyRow
from harness.reporting import words
from harness.reporting.files import ReportContents, html_page, markdown, on_terminal
from harness.reporting.table import Line, Table
from harness.reporting.terminal import as_text
from in_process import QUICK_MODELS, QUICKEST_PAIR, Harness
from report_files import latency_run, over, write

SURE = {"speedup_covers": over(15)}
PLANTED = {"engine": "simulated", "model": "simulated", "devices": None, "dtype": None}


def afternoon(directory: Path) -> ReportContents:
    """Runs as somebody tries them: a sweep over K, other prompts and targets, two that ended early, made-up ones."""
    runs: list[list[LatencyRow]] = [
        *(latency_run(k, speedup, **SURE) for k, speedup in ((2, 1.5), (4, 2.0), (8, 1.8))),
        *(latency_run(k, 1.4, temperature=0.0, **SURE) for k in (2, 4)),
        latency_run(prompts="mine", prompts_digest="1", **SURE),
        latency_run(prompts="chats", prompts_digest="2", **SURE),
        latency_run(prompts="chats", prompts_digest="2", chat_template="never", **SURE),
        latency_run(model="13B_8bit", quantization="8bit", **SURE),
        latency_run(draft=None, model="30B"),
        latency_run(num_prompts=3, speedup_low=None, speedup_high=None, speedup_covers=over(3)),
        latency_run(status="interrupted", error="stopped", ms_per_token=1.0, num_prompts=2),
        latency_run(status="failed", error="no room", model="65B"),
        *(latency_run(k, 3.0, **SURE, **PLANTED) for k in (2, 4)),
        latency_run(synthetic_acceptance=0.8, **SURE),
    ]
    return build([write(directory / "latency.csv", *runs)])


def bold(report: ReportContents) -> list[str]:
    """The sentences of a terminal's page in bold, without headings."""
    lines = [part for part in on_terminal(report) if isinstance(part, Line)]
    return [line.text for line in lines if line.style in ("good", "bad") or "cannot" in line.text]


def test_a_series_each_and_one_bold_sentence_for_it(tmp_path: Path) -> None:
    """And one for each single run with a verdict."""
    report = afternoon(tmp_path)
    first, second, *single = bold(report)
    assert [line.split(":")[0] for line in single] == [
        "  13B with 7B, K=4, 15 prompts (mine)",
        "  13B with 7B, K=4, 15 prompts (chats)",
        "  13B with 7B, K=4, 15 prompts (chats), chat_template never",
        "  13B_8bit with 7B, K=4, 15 prompts (english), 8bit",
    ]
    assert first.startswith("  Highest that pays: 13B with 7B, K=4: 2.00× faster")
    assert second.startswith("  Highest that pays: 13B with 7B, K=2: 1.40× faster")
    page = report.pages["Is it faster?"]
    assert [len(part.tables[0].rows) for part in page.parts] == [3, 2, 5]
    # Above them all, below what distinguishes them.
    above = [line.text for line in report.answers["Is it faster?"]]
    for title in ("15 prompts (english) · temperature 0.5", "15 prompts (english) · greedy"):
        assert above[above.index(f"13B with 7B · {title}") + 1].startswith("Highest")


def test_no_setting_that_all_rows_share_is_in_the_rows(tmp_path: Path) -> None:
    report = afternoon(tmp_path)
    for page in report.pages.values():
        for part in page.parts:
            columns, rows = part.tables[0].shown()
            names = [column.name for column in columns]
            if "settings" in names:
                settings = [row[names.index("settings")].split(" · ") for row in rows]
                assert set.intersection(*map(set, settings)) <= {""}


def test_series_that_differ_in_a_rare_setting_have_different_titles(tmp_path: Path) -> None:
    runs = [
        latency_run(k, 2.0, chat_template=template, **SURE)
        for template in ("auto", "never")
        for k in (2, 4)
    ]
    report = build([write(tmp_path / "latency.csv", *runs)])
    parts = report.pages["Is it faster?"].parts
    assert ["chat_template never" in part.title for part in parts] == [False, True]


def reasons(table: Table) -> dict[str, str]:
    columns, rows = table.shown()
    why = [column.name for column in columns].index("why")
    return {row[0].partition("\n")[0]: row[why] for row in rows}


def test_a_run_without_a_verdict_has_its_own_reason_beside_its_name(tmp_path: Path) -> None:
    file = write(
        tmp_path / "latency.csv",
        latency_run(model="whole", **SURE),
        latency_run(model="short", num_prompts=3, speedup_low=None, speedup_high=None, speedup_covers=over(3)),
        latency_run(model="stopped", status="interrupted", error="by Ctrl-C", ms_per_token=1.0, num_prompts=2),
        latency_run(model="refused", status="no_verdict", error="the regular server drafts", ms_per_token=1.0),
        latency_run(model="large", status="failed", error="no room"),
        latency_run(model="alone", draft=None),
    )  # fmt: skip
    report = build([file])
    page = report.pages["Without a verdict"]
    (table,) = page.tables
    assert reasons(table) == {
        "short with 7B": "no interval from fewer than 8 prompts",
        "stopped with 7B": "interrupted: by Ctrl-C (the figures cover 2 prompts)",
        "refused with 7B": "no verdict: the regular server drafts (the figures cover 15 prompts)",
        "large with 7B": "failed: no room",
    }
    assert all(row.faint for row in table.rows)
    assert [*report.pages] == ["Is it faster?", "Without a verdict"]
    shown = markdown(report, "")
    assert shown.count("No speed-up was measured") == 0
    assert shown.index("alone") < shown.index("Without a verdict\n")


def test_where_no_run_has_a_verdict_the_figures_are_shown_all_the_same(tmp_path: Path) -> None:
    few = {"num_prompts": 3, "speedup_low": None, "speedup_high": None, "speedup_covers": over(3)}
    stopped = latency_run(8, 3.0, status="interrupted", error="stopped", ms_per_token=1.0)
    runs = [latency_run(2, 1.5, **few), latency_run(4, 2.0, **few), stopped]
    report = build([write(tmp_path / "latency.csv", *runs)])
    page = report.pages["Is it faster?"]
    assert [line.text for line in page.finding] == ["No run has a verdict."]
    _, rows = page.tables[0].shown()
    assert [row[:2] for row in rows] == [("2", "1.50×"), ("4", "2.00×")]
    assert len(report.pages["Without a verdict"].tables[0].rows) == 3


def test_made_up_runs_are_apart_and_nothing_is_said_of_them(tmp_path: Path) -> None:
    report = afternoon(tmp_path)
    assert [*report.pages] == ["Is it faster?", "Without a verdict", "Made up"]
    # 13B, its 8 bits, 30B, and no other.
    assert report.title == "Speculative decoding: 3 models"
    assert report.about[0] == "12 measurements"
    page = report.pages["Made up"]
    assert [part.title.partition(" · ")[0] for part in page.parts] == [
        "latency: simulated",
        "latency: 13B with 7B, synthetic 0.8",
    ]
    assert not page.statements
    assert not any(part.finding or part.why or part.next for part in page.parts)
    html = html_page(report, {})
    assert html.index("simulated") > html.index("Without a verdict")


def test_planted_runs_alone_are_told_as_ever(harness: Harness) -> None:
    harness("latency", "engine=simulated", "num_prompts=8", "-m", "K=2,4")
    shown = harness("report").stdout
    # Which of them is named depends on how busy the machine is.
    assert shown.startswith("Is it faster?\nsimulated")
    assert "Made up" not in shown


def test_a_terminal_shows_five_series(tmp_path: Path) -> None:
    runs: list[Any] = [
        latency_run(k, 2.0, model=f"model{number}", **SURE) for number in range(8) for k in (2, 4)
    ]
    report = build([write(tmp_path / "latency.csv", *runs)])
    shown = as_text(on_terminal(report))
    assert shown.count("Highest that pays") == 5
    assert "3 more: report.md" in shown
    assert markdown(report, "").count("### ") == 8


def test_a_race_is_an_impression_on_a_terminal_too(harness: Harness) -> None:
    harness("compare", "prompt=A", "max_new_tokens=8")
    assert "an impression, not a measurement" in harness("report").stdout


@pytest.mark.parametrize(
    ("line", "changes", "again"),
    [
        # Of two settings with one last name only the one that is typed goes.
        ("prompts.file=a.jsonl results.file=b.csv", "results.file=c.csv", "prompts.file=a.jsonl results.file=c.csv"),
        ("-m draft=a draft.b=2 K=2,4", "decoding.num_draft_tokens=8", "draft=a draft.b=2 decoding.num_draft_tokens=8"),
        ("draft.max_ngram=2 hydra.run.dir=x details=true", "draft=suffix", "draft=suffix"),
        ("K=2 n=8 K=8", "repeats=5", "n=8 K=8 repeats=5"),
        ("K=2 -- llama-server -m 'my model' {K}", "K=8", "K=8 -- llama-server -m 'my model' '{K}'"),
    ],
)  # fmt: skip
def test_a_command_is_typed_again_with_changes(line: str, changes: str, again: str) -> None:
    Words.divide(["latency", *shlex.split(line)]).note()
    assert words.typed_again(changes, leaving_out=("dir",)) == f"harness latency {again}"


def test_the_steps_of_runs_are_accepted_and_one_runs(harness: Harness) -> None:
    lines = [json.dumps({"prompt": f"Count {n}.", "completion": "one two"}) for n in range(3)]
    Path("mine.jsonl").write_text("\n".join(lines))
    models = [*QUICK_MODELS, "tokens=4", "num_warmup=0"]
    texts = [*QUICKEST_PAIR, "up_to=2", "texts_per_prompt=1"]
    with collected() as steps:
        harness("acceptance", *texts, "prompts=./mine.jsonl", "T=0")
        harness("latency", *models, "num_prompts=2")
        harness("latency", "-m", *models, "num_prompts=2", "K=1,2")
        harness("plan", *QUICKEST_PAIR)
        harness(
            "recovery", *QUICKEST_PAIR, "num_draws=1000", "num_prompts=2", "tokens=4", code=None
        )
    all_accepted(steps)
    measure = next(step for step in steps if step.text == "measure it")
    asked = shlex.split(measure.command)[1:]
    assert {"prompts=./mine.jsonl", "T=0"} < set(asked)
    # It runs as it was typed, but for its length.
    harness(*asked, "tokens=4", "num_prompts=2", "num_warmup=0")
