"""Rows of every kind through a sweep's tables and `report`: whole, damaged, named in markup, and of failures."""

import csv
import itertools
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import recompute

from harness.cli.sweep import exit_code, job_line, print_sweep
from harness.commands.command import Command
from harness.commands.plan.rows import PlanRow
from harness.commands.registry import commands, measurement, row_kinds
from harness.commands.report import command as report_command
from harness.commands.report.command import build
from harness.config.errors import SettingError
from harness.measuring.rows import LatencyRow
from harness.reporting.files import on_terminal
from harness.reporting.terminal import as_text
from harness.results.files import read_kind, rows_in, write_rows
from harness.results.row import ColumnDescription
from harness.results.schema import RunRow
from harness.results.statistics.proportions import wald_interval
from in_process import QUICK_MODELS, QUICKEST_PAIR, Harness
from report_files import eval_run, latency_run, write
from shipped_copies import copy_shipped
from wicked_engine import FATAL, FILE

VALUES: dict[Any, Any] = {
    str: "text", int: 3, float: 0.5, bool: True, list: [1, 2], dict: {"cpu": 5}, list[str]: ["text"],
    list[dict[str, Any]]: [{"change": "gpus=2"}],
}  # fmt: skip
WITH_ROWS = [command for command in commands() if isinstance(command, Command)]
RUN_KINDS = [command.row for command in WITH_ROWS]
SWEPT = [command.row for command in WITH_ROWS if command.sweeps]
ARMS = ("regular", "speculative")


def filled(kind: type[RunRow], **changes: Any) -> RunRow:
    """A row that has a value in every column."""
    values = {}
    for name, column in kind.columns().items():
        values[name] = VALUES.get(column.hint, VALUES[column.type])
    known = {name: value for name, value in changes.items() if name in values}
    return kind.from_values(values | {"status": "ok", "job": "0"} | known)


def runs(kind: type[RunRow]) -> dict[str, list[RunRow]]:
    """Runs by what they are an example of."""
    return {
        "filled": [filled(kind, arm=arm, run="1") for arm in ARMS],
        "bare": [kind(run="2", job="1", status="ok")],
        "failed": [kind(run="3", job="2", status="failed", error="killed")],
        "in part": [filled(kind, run="4", job="3", arm="regular", status="interrupted")],
    }


@pytest.mark.parametrize("kind", SWEPT)
@pytest.mark.parametrize("example", ["filled", "bare", "failed", "in part"])
def test_a_job_has_a_line(kind: type[RunRow], example: str) -> None:
    rows = runs(kind)[example]
    assert job_line(kind.kind, rows)
    assert exit_code(kind.kind, rows, []) in (0, 1, 3)


@pytest.mark.parametrize("kind", SWEPT)
def test_a_sweep_has_tables(
    kind: type[RunRow], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for run in runs(kind).values() for row in run]
    print_sweep(kind.kind, rows, tmp_path / "rows.csv", 4, [])
    printed = capsys.readouterr().out
    assert "text" in printed
    assert "killed" in printed


@pytest.mark.parametrize("kind", RUN_KINDS)
def test_report_shows_it(kind: type[RunRow], tmp_path: Path) -> None:
    rows = [row for run in runs(kind).values() for row in run]
    file = tmp_path / f"{kind.kind}.csv"
    write_rows(file, rows)
    if kind is PlanRow:
        # It measures nothing.
        with pytest.raises(SettingError, match="is no CSV file of"):
            build([file])
        return
    report = build([file])
    assert report.pages
    report_command.write(report, tmp_path)
    assert "text" in (tmp_path / "report.md").read_text()


NUMBERS = {"negative": "-7", "huge": "1e300", "not finite": "nan"}
TEXTS = {
    "text": "fast",
    # More than any Python nests.
    "deep": "[" * 12_000,
    "nested": '{"a": {"b": [1]}, "c": [[2]]}',
    "texts": '["x", null, {}]',
    "numbers": "[-1, 1e300]",
    "object": '{"cpu": "x"}',
    "empty list": "[]",
}
# A report is drawn for each: what is no number does not depend on the others, and is in one.
REPORTS = {**{name: {name: cell} for name, cell in NUMBERS.items()}, "no number": TEXTS}


@pytest.mark.parametrize("report", REPORTS)
def test_one_damaged_column_after_another(report: str, tmp_path: Path) -> None:
    """Of `latency` and of `eval`, in one report."""
    latency = write(tmp_path / "whole_latency.csv", latency_run(2), latency_run(4))
    whole_files = {"latency": latency, "eval": write(tmp_path / "whole_eval.csv", eval_run())}
    damaged_files = []
    for command, whole in whole_files.items():
        damaged = tmp_path / f"{command}.csv"
        write_with_damage(damaged, whole, REPORTS[report])
        damaged_files.append(damaged)
    built = build(damaged_files)
    assert built.pages
    report_command.write(built, tmp_path)


def is_different(damage: str, about: ColumnDescription) -> bool:
    """Whether the damage may do something to such a column that another one does not."""
    if about.type in (list, dict) or "list" in str(about.hint):
        return damage in TEXTS
    return about.type is str or damage in NUMBERS or damage == "text"


def write_with_damage(damaged: Path, whole: Path, cells: Mapping[str, str]) -> None:
    """Write the runs of a file again for each of its columns and each of these cells in it."""
    header, *lines = list(csv.reader(whole.read_text().splitlines()))
    place_of_run = header.index("run")
    runs = [list(rows) for _, rows in itertools.groupby(lines, lambda row: row[place_of_run])]
    kind = read_kind(whole, row_kinds())
    columns = kind.columns()
    rows = []
    for place, name in enumerate(header):
        for damage, cell in cells.items():
            if not is_different(damage, columns[name]):
                continue
            # The runs take turns: K is 2 in one and 4 in the other.
            for row in runs[place % len(runs)]:
                changed = [*row]
                changed[place_of_run] += f"{name} {damage}"
                if name != "run":
                    changed[place] = cell
                rows.append(changed)
    with damaged.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])


MARKUP = "math [/no_think] <b>&amp;</b> *x*"
ESCAPE = "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202e"


def test_names_are_text_wherever_they_are_shown(harness: Harness, tmp_path: Path) -> None:
    model = "./[bold red]m <i>"
    copy_shipped(tmp_path / model)
    texts = [f"{MARKUP} {number} {ESCAPE}" for number in (1, 2)]
    prompts = [{"prompt": text, "category": name} for name in (MARKUP, ESCAPE) for text in texts]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    quick = ["num_prompts=4", "decoding.max_new_tokens=4", "prompts=p.jsonl"]
    ran = harness("latency", f"model={model}", "draft=tiny_draft", *quick)
    shown = harness("report", "results", "outputs")
    for text in (ran.summary, shown.stdout):
        # The terminal wraps where it likes.
        words = "".join(text.split()).replace("│", "")
        assert "[boldred]m<i>" in words
        if text is ran.stdout:
            assert "[/no_think]" in words
            assert "␛[31mred␛]0;title␇" in words
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text + ran.stderr)
    page = (tmp_path / "results" / "report.html").read_text()
    assert "math [/no_think] &lt;b&gt;&amp;amp;&lt;/b&gt; *x*" in page
    assert "&lt;i&gt;" in page
    assert "<i>" not in page
    markdown = (tmp_path / "results" / "report.md").read_text()
    assert "math \\[/no\\_think\\] &lt;b&gt;&amp;amp;&lt;/b&gt; \\*x\\*" in markdown.replace(
        "no_think", "no\\_think"
    )
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(page + markdown)


# Runs of every kind, by what is typed for them.
SIMULATED = ("latency", "engine=simulated", "n=9", "tokens=16")
RUNS = {
    "latency": (),
    "batches": ("batch_size=4", "n=34"),
    "laps": ("batch_size=2", "n=32"),
    "blocks": ("engine.blocks=7", "engine.start_noise=0.1"),
    "conversations": ("prompts=turns.jsonl", "prompts.turns=all", "chat_template=never"),
    "categories": ("prompts=categories.jsonl",),
    "precision": ("precision=0.05", "n=30"),
    "unlike lengths": ("n=12", "tokens=400", f"engine.lengths={9 * [2] + 3 * [400]}", "decoding.ignore_eos=false"),
    "no verdict": ("n=3",),
    "no draft": ("draft=none",),
    "greedy": ("temperature=0",),
}  # fmt: skip
OTHERS = {
    "real": ("latency", *QUICKEST_PAIR, "n=8", "tokens=4"),
    "batches of a real pair": ("latency", *QUICKEST_PAIR, "n=16", "tokens=4", "batch_size=2"),
    "failed": ("latency", f"engine={FILE}:Wicked", "n=8", "tokens=4", f"K={FATAL}"),
    "acceptance": ("acceptance", *QUICK_MODELS, "n=8", "tokens=16"),
    "eval": ("eval", *QUICKEST_PAIR, "n=8"),
    "recovery": ("recovery", *QUICKEST_PAIR, "n=3", "tokens=8", "shift=0.5", "num_draws=1000"),
}


@pytest.mark.parametrize("case", [*RUNS, *OTHERS])
def test_the_report_of_a_run_is_its_page(harness: Harness, case: str) -> None:
    """What a page needs is in its files."""
    turns: list[Any] = [{"turns": [f"I like dogs {n}", "And cats"]} for n in range(9)]
    texts = [f"I like {n} dogs" for n in range(9)]
    categories = [{"prompt": text, "category": "ab"[n % 2]} for n, text in enumerate(texts)]
    for name, prompts in {"turns": turns, "categories": categories}.items():
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    typed = OTHERS.get(case) or (*SIMULATED, *RUNS[case])
    assert harness.as_reported(harness(*typed, code=None))
    if typed[0] in ("latency", "eval") and case != "failed":
        assert recompute.main(["outputs"]) == 0


@pytest.mark.parametrize("typed", [SIMULATED, OTHERS["eval"], OTHERS["acceptance"]])
def test_details_are_every_known_figure(harness: Harness, typed: Sequence[str]) -> None:
    details = harness(*typed, code=None).summary.partition("Every figure")[2]
    lines = {line.split()[0]: line for line in details.splitlines() if re.match("  [a-z]", line)}
    rows = rows_in(Path(f"results/{typed[0]}.csv"), measurement(typed[0]).row)
    in_question = [row for row in rows if getattr(row, "is_in_question", True)]
    for name, column in rows[0].columns().items():
        if column.kind == "figure" and column.part in ("", "estimate"):
            values = [getattr(row, column.field) for row in in_question]
            assert (name in lines) == any(value is not None for value in values), name
            for value in values:
                assert not isinstance(value, float) or f"{value:.5g}" in lines[name]


def test_a_figure_that_is_not_that_of_the_answers_is_found(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    harness(*SIMULATED)
    file = next(Path("outputs").rglob("latency.csv"))
    assert recompute.main(["outputs"]) == 0
    printed = capsys.readouterr().out
    assert "0 rows with answers of several runs" in printed
    for name in ("num_iterations", "num_accepted", "acceptance_histogram", "per_user"):
        assert name not in printed
    assert "latency.directory" in printed
    # A sweep that reuses a run has its rows alone.
    Path("reusing").mkdir()
    shutil.copy(file, "reusing")
    assert recompute.main(["reusing"]) == 0
    assert capsys.readouterr().out == printed
    rows = pd.read_csv(file)
    rows.assign(acceptance_rate=rows.acceptance_rate + 1e-6).to_csv(file, index=False)
    assert recompute.main(["outputs"]) == 1
    # 7 of 8 answers are correct; Wald's bounds are not clipped.
    wald = wald_interval(7, 8)
    shared = {"run": "a", "arm": "regular", "num_tokens": 1}
    answers = [{**shared, "seed": 0, "correct": n > 0} for n in range(8)]
    figures = {"accuracy": 7 / 8, "wald_low": wald.low, "wald_high": wald.high}
    evaluated = [
        {**shared, "num_tokens": 8, "num_correct": 7, "seed": s} | figures for s in (0, "all")
    ]
    pd.DataFrame(evaluated).to_csv("outputs/eval.csv")
    pd.DataFrame(answers).to_csv("outputs/eval_prompts.csv")
    file.unlink()
    capsys.readouterr()
    assert recompute.main(["outputs"]) == 0
    assert "1 rows with answers of several runs" in capsys.readouterr().out
    file.with_name("latency_prompts.csv").unlink()
    assert recompute.main(["reusing"]) == 1
    assert "regular: its answers are not found" in capsys.readouterr().out


def test_single_runs_are_asked_for_by_their_ids(harness: Harness) -> None:
    runs = [latency_run(model=model) for model in ("7B", "13B", "30B")]
    write(Path("results/latency.csv"), *runs)
    first, second, _ = (str(run[0].run) for run in runs)
    shown = harness("report", first, second).stdout
    assert ("7B with" in shown, "13B with" in shown, "30B" in shown) == (True, True, False)
    # The report of a file is next to it.
    assert "results/report.md" in harness("report", "results/latency.csv").stderr
    assert "plots" not in Path("results/report.md").read_text(), "no pair has several K"
    assert "13B" in harness("report", second, "format=row").stdout
    assert len(harness("report", "format=row").stdout.splitlines()) == 2 + 3
    for run in ("20200101T000000", "20200101"):
        assert "no run in results has this id" in harness.refused("report", run)


def test_a_failure_is_listed_with_its_reason_until_the_measurement_succeeds(tmp_path: Path) -> None:
    def after(*runs: Sequence[LatencyRow]) -> str:
        return as_text(on_terminal(build([write(tmp_path / "latency.csv", *runs)])))

    def run(**changes: Any) -> list[LatencyRow]:
        return latency_run(measurement="feed", **changes)

    assert "failed: 13B does not fit" in after(run(status="failed", error="13B does not fit"))
    measured = after(run())
    assert "2.00× faster" in measured
    assert "failed" not in measured
    # A later failure is news.
    again = after(*[run(status="failed", error="out of memory") for _ in range(2)])
    assert "2.00× faster" in again
    assert "failed: out of memory (2 times)" in " ".join(again.split())
