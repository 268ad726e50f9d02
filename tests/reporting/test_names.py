"""Names of rows: the K that a server reported, and the words in which rows differ."""

from __future__ import annotations

from typing import Any

import pytest

from harness.measuring.rows import LatencyRow
from harness.reporting.names import distinct_names, name_of, named_runs
from harness.results.runs import Run

SERVED = {"url": "http://a/v1", "mean_proposed": 1.5}


@pytest.mark.parametrize(
    ("columns", "k"),
    [
        ({"num_draft_tokens": 4}, 4),
        ({"num_draft_tokens": 4, "draft": None}, None),
        (SERVED, None),
        (SERVED | {"mean_proposed": 2.0}, 2),
        (SERVED | {"mean_proposed": None, "marginal_acceptance_by_position": [0.9]}, None),
        (SERVED | {"marginal_acceptance_by_position": [0.9, 0.8, 0.5]}, 3),
        (SERVED | {"marginal_acceptance_by_position": [0.9]}, 2),
        (SERVED | {"mean_proposed": 2.0, "url": None}, None),
    ],
)
def test_the_k_of_a_server_is_what_it_reported(columns: dict[str, Any], k: int | None) -> None:
    name = name_of(LatencyRow(**{"model": "13B", "draft": "7B"} | columns))
    assert name.num_draft_tokens == k
    assert ("K=" in name.label()) == (k is not None)


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        ([{}], ["13B with 7B"]),
        ([{"seed": 0}, {"batch_size": 4, "seed": 0}, {"batch_size": 4, "seed": 1}],
         ["13B with 7B", "13B with 7B · batches of 4", "13B with 7B · batches of 4 · seed 1"]),
        ([{"model": "./13B"}, {"model": "13B"}], ["13B with 7B · model ./13B", "13B with 7B · model 13B"]),
        ([{"draft": "a", "draft_dtype": "float16"}, {"draft": "b", "draft_dtype": "float32"}],
         ["13B with a", "13B with b"]),
        ([{"server_command": "s -k 2"}, {"server_command": "s -k 3 5 -z"}, {}],
         ["13B with 7B · -k 2", "13B with 7B · -k 3 5 -z", "13B with 7B"]),
        ([{"server_command": "s 2 9", "num_draft_tokens": 2, "settings": {"engine.start_command": "s {K}"}},
          {"server_command": "s 3 8", "num_draft_tokens": 3, "settings": {"engine.start_command": "s {K}"}}],
         ["13B with 7B · K=2", "13B with 7B · K=3"]),
    ],
)  # fmt: skip
def test_rows_are_named_by_what_they_differ_in(
    rows: list[dict[str, Any]], labels: list[str]
) -> None:
    named = distinct_names([LatencyRow(**{"model": "13B", "draft": "7B"} | row) for row in rows])
    assert [name.label() for name in named] == labels


def test_runs_come_by_pair_and_k_with_auto_last() -> None:
    ks: list[Any] = ["auto", 8, 2, None]
    runs = [Run([LatencyRow(model="13B", draft="7B", num_draft_tokens=k)]) for k in ks]
    assert [run.name.num_draft_tokens for run in named_runs(runs)] == [None, 2, 8, "auto"]
    other = LatencyRow(model="1B", draft="7B", batch_size=4, num_draft_tokens=1)
    first = named_runs([*runs, Run([other])])[0]
    assert (first.row.model, first.name.cell) == ("13B", "13B with 7B")
