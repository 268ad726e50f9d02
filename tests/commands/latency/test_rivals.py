"""Ways to draft that can be told apart, from files as `latency` writes them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.commands.report.command import build
from harness.measuring.rows import LatencyRow
from harness.reporting.table import legend
from harness.results.files import append_rows
from pages import findings, short
from report_files import latency_run, prompt_rows, write


def rivals_of(directory: Path, num_prompts: int = 15, *, factor: float, **changes: Any) -> str:
    """The findings about two drafts: `lookup` takes `factor` times as long as `suffix`."""
    rng = np.random.default_rng(0)
    hardness = rng.lognormal(3, 0.4, num_prompts)
    for draft, scale in (("suffix", 1.0), ("lookup", factor)):
        run = latency_run(draft=draft, draft_method=draft, speedup=2.0 / scale, **changes)
        times = hardness * scale * np.exp(rng.normal(0, 0.05, num_prompts))
        append_rows(directory / "latency.csv", run)
        named = [("story", float(time)) for time in times]
        append_rows(directory / "latency_prompts.csv", prompt_rows(run, named))
    return " ".join(line.text for line in findings(build([directory])))


def test_methods_that_cannot_be_told_apart_are_named(tmp_path: Path) -> None:
    alike = rivals_of(tmp_path / "alike", factor=1.005)
    assert "Cannot be told apart from" in alike
    assert "significantly" not in alike
    apart = rivals_of(tmp_path / "apart", factor=1.5)
    assert "Fastest: 13B with suffix" in apart
    assert "0.66 (0.64 to 0.69) of its speed-up" in apart
    assert "15 prompts" in apart
    assert "0.6" not in rivals_of(tmp_path / "few", 5, factor=1.5)


def test_a_busy_machine_orders_by_intervals_alone(tmp_path: Path) -> None:
    """What differs from run to run there is in no comparison of prompts."""
    assert "Gains significantly less" in rivals_of(tmp_path / "quiet", factor=1.06)
    busy = rivals_of(tmp_path / "busy", factor=1.06, processor_share=0.5)
    assert "Cannot be told apart from the fastest: 13B with lookup, K=4." in busy
    far = rivals_of(tmp_path / "far", factor=1.5, processor_share=0.5)
    assert "Gains significantly less than the fastest: 13B with lookup, K=4." in far


def test_the_best_k_is_worth_what_it_is_on_other_prompts(tmp_path: Path) -> None:
    """Six equal K: the best of them by chance is not better than the others."""
    rng = np.random.default_rng(1)
    for k in range(1, 7):
        run = latency_run(k, speedup=2.0)
        named = [("story", float(time)) for time in 50 * np.exp(rng.normal(0, 0.2, 15))]
        append_rows(tmp_path / "latency.csv", run)
        append_rows(tmp_path / "latency_prompts.csv", prompt_rows(run, named))
    tables = build([tmp_path]).all_tables
    (note,) = [note for table in tables for note in table.notes if "best of 6 K" in note]
    naive, honest = (float(number) for number in re.findall(r"(\d\.\d+)×", note))
    assert honest < naive
    assert "15 prompts" in note


def headlines_of(directory: Path, *speedups: float, **changes: Any) -> str:
    """The headlines of pairs with these speed-ups, all ± 0.1, without files of prompts."""
    for number, speedup in enumerate(speedups):
        changes = {"speedup_covers": "15 prompts"} | changes
        run = latency_run(draft=f"draft{number}", speedup=speedup, **changes)
        append_rows(directory / "latency.csv", run)
    return " ".join(line.text for line in findings(build([directory])))


def test_the_fastest_of_several_has_an_interval_that_holds_for_all(tmp_path: Path) -> None:
    """By its own interval, 1.90 to 2.10, it is faster than one of 1.72 to 1.92 would be at most."""
    text = headlines_of(tmp_path, 2.0, 1.82, 1.2)
    assert "draft0" in text.partition("2.00×")[0]
    low, high = map(float, re.findall(r"interval (\d\.\d+) to (\d\.\d+)", text)[0])
    assert low < 1.89
    assert high > 2.11
    assert "for 3 pairs at once" in text
    assert re.search(r"Cannot be told apart from the fastest: [^;]*draft1[^;]*?\.$", text)
    table = build([tmp_path]).all_tables[0]
    assert "hold together" in legend(table.shown()[0])


def test_pooled_rows_are_compared_by_the_number_of_runs(tmp_path: Path) -> None:
    pooled: dict[str, Any] = {
        "repeat": "all",
        "repeats": 5,
        "speedup_covers": "15 prompts and 5 runs",
    }
    speedups = (2.0, 1.6, 1.5, 1.4, 1.3)
    few = headlines_of(tmp_path / "few", *speedups, **pooled)
    pooled["speedup_covers"] = "15 prompts"
    many = headlines_of(tmp_path / "many", *speedups, **pooled)
    reach = [float(re.findall(r"interval (\d\.\d+) to", text)[0]) for text in (few, many)]
    assert reach[0] < reach[1] < 1.9
    assert "Gains significantly less than the fastest: 13B with draft1" in few
    assert "Cannot be told apart" not in few


def test_the_fastest_pair_is_no_rival_of_itself(tmp_path: Path) -> None:
    """On the first eight prompts, which both have, another pair is faster than that of the first sentence."""
    first = [("story", 60.0 + index) for index in range(8)]
    for draft, speedup, prompts in (
        ("3B", 2.0, [*first, *[("story", 20.0)] * 7]),
        ("7B", 1.9, [(name, time - 4) for name, time in first]),
    ):
        run = latency_run(draft=draft, speedup=speedup)
        append_rows(tmp_path / "latency.csv", run)
        append_rows(tmp_path / "latency_prompts.csv", prompt_rows(run, prompts))
    fastest, rivals, *_ = (line.text for line in findings(build([tmp_path])))
    assert "13B with 3B, K=4: 2.00×" in fastest
    assert rivals == "Cannot be told apart from the fastest: 13B with 7B, K=4."


def test_another_target_is_no_rival(tmp_path: Path) -> None:
    """The fastest speed-up of a slow target says nothing about another target's drafts."""
    runs = [latency_run(speedup=3.0), latency_run(speedup=1.5, model="30B", repository="x/30b")]
    text = " ".join(line.text for line in findings(build([write(tmp_path / "latency.csv", *runs)])))
    assert "Gains significantly less" not in text


def test_the_best_k_is_named_among_quiet_and_complete_runs_alone(tmp_path: Path) -> None:
    def remarks(*runs: Sequence[LatencyRow]) -> str:
        file = write(tmp_path / f"{len(list(tmp_path.iterdir()))}.csv", *runs)
        return str(build([file]).tables)

    slow = latency_run(k=2, speedup=1.5)
    assert "best K" in remarks(slow, latency_run(k=4, speedup=2.0))
    assert "best K" not in remarks(latency_run(k=2, speedup=0.7), latency_run(k=4, speedup=0.98))
    interrupted = latency_run(k=2, speedup=1.5, status="interrupted", ms_per_token=50.0)
    assert "best K" not in remarks(interrupted, latency_run(k=4, speedup=2.0))
    assert "best K" not in remarks(slow, latency_run(k=4, speedup=2.0, processor_share=0.2))


def test_what_a_command_was_filled_in_with_is_a_column_and_no_doubt(tmp_path: Path) -> None:
    """It changes the regular command, too, whose times then say nothing about the machine."""
    runs = []
    for x, ms in (("1", 9.0), ("5", 199.0)):
        commands = f"serve --delay {x}; serve --delay {x} -k 2"
        served = {"engine": "server", "server_command": commands, "settings": {"vary.x": x}}
        regular, row = latency_run(**served)
        runs.append([dataclasses.replace(regular, ms_per_token=ms), row])
    (page,) = build([write(tmp_path / "latency.csv", *runs)]).pages.values()
    shown = " ".join(short(page, 120).split())
    assert "something other than the settings changed" not in shown
    assert "x=1" in shown
