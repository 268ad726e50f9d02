"""Measurements that differ in their load: batch sizes, requests in flight, requests per second."""

from __future__ import annotations

import dataclasses

from harness.commands.latency.plots import latency_plots
from harness.commands.latency.tables.compared import pairs_table
from harness.commands.latency.tables.ranked import ranked_runs
from harness.commands.registry import measurement
from harness.results.runs import group
from harness.results.statistics.interval import Interval
from pages import tables_of
from report_files import latency_run

SERVER = {"engine": "server", "draft": "server", "url": "http://gpu1:8000/v1"}


def test_a_table_over_loads_is_in_the_order_of_the_loads() -> None:
    """By speed-up they were 1, 64, 4, 16; another pair stays apart."""
    speedups = {16: 1.1, 1: 2.5, 64: 1.4, 4: 1.2}
    rows = [
        row
        for load, speedup in speedups.items()
        for draft, factor in (("7B", 1.0), ("3B", 1.1))
        for row in latency_run(speedup=speedup * factor, batch_size=load, draft=draft)
    ]
    pairs = ranked_runs(group(rows))
    assert [pair.load for pair in pairs] == [1, 4, 16, 64] * 2
    assert [pair.draft for pair in pairs] == ["3B"] * 4 + ["7B"] * 4
    assert len(pairs_table(pairs).rows) == 8


def test_requests_per_second_and_in_flight_are_on_different_axes() -> None:
    rows = [row for load in (1, 4) for row in latency_run(batch_size=load, **SERVER)]
    rates = (2.0, 8.0)
    rows += [row for rate in rates for row in latency_run(request_rate=rate, **SERVER)]
    in_flight, per_second = latency_plots(group(rows))["load"]
    assert "requests in flight" in in_flight.figure.axes[0].get_xlabel()
    assert per_second.figure.axes[0].get_xlabel() == "requests per second"


def test_tables_of_servers_have_no_empty_columns() -> None:
    """llama.cpp's counters tell acceptance over all iterations, and nothing of phases."""
    untold = (
        "predicted_speedup draft_ms verify_ms target_step_ms iteration_ms num_draft_tokens"
        " conditional_acceptance_rate acceptance_by_position acceptance_histogram"
    ).split()
    told = {"marginal_acceptance_by_position": [0.6, 0.4], "goodput_ratio": Interval(0.8)}
    rows = []
    for load in (1, 4):
        regular, speculative = latency_run(batch_size=load, **SERVER)
        changes = dict.fromkeys(untold) | told
        rows += [dataclasses.replace(regular, target_step_ms=None)]
        rows += [dataclasses.replace(speculative, **changes)]
    tables = tables_of(measurement("latency").page(group(rows)))
    headings = {
        table.key: [" ".join(column.heading.split()) for column in table.shown()[0]]
        for table in tables
    }
    assert "goodput" in headings["pairs"]
    assert "predicted" not in headings["pairs"]
    assert headings["reasons"][1:] == [
        "K",
        "accepted",
        "tokens per iteration",
        "of all iterations, %",
    ]
