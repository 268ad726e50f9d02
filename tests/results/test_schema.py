"""Rows and their columns: read back as written, described on a page of the site."""

import typing
from pathlib import Path
from typing import Any

import hypothesis
import pandas as pd
import pytest
from hypothesis import strategies as st

from harness.commands.eval.rows import AnswerRow
from harness.commands.latency.record import LatencySettings
from harness.commands.registry import row_kinds
from harness.config.settings import DecodingSettings, ModelSettings, PlacementSettings
from harness.measuring.rows import LatencyRow
from harness.results.files import read_file, write_rows
from harness.results.row import Row
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.statistics.interval import Coverage, Interval
from some_settings import settings_of

NUMBERS = st.floats(min_value=0, allow_infinity=False)
ENTRIES: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    int: st.integers(0, 2**64 - 1),
    float: NUMBERS | st.floats(1e-5, 1e-3),
    bool: st.booleans(),
    type(None): st.none(),
    Any: st.recursive(st.text() | st.integers(-9, 10**19) | NUMBERS | st.booleans(), st.lists, max_leaves=3),
}  # fmt: skip


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a column's type, entries included."""
    entries = [values_of(entry) for entry in typing.get_args(hint)]
    origin = typing.get_origin(hint)
    if origin is list:
        return st.lists(*entries, max_size=3)
    if origin is dict:
        return st.dictionaries(*entries, max_size=3)
    return st.one_of(entries) if entries else ENTRIES[hint]


COVERAGES = [
    Coverage(12, "batch"),
    Coverage(15, "prompt", num_runs=5, own_seeds=True, degrees_of_freedom=11.25),
    Coverage(8, "lap", same_texts=True),
]


def columns_of(kind: type[Row]) -> st.SearchStrategy[dict[str, Any]]:
    """Values of each column of a kind of row; of an interval the estimate alone, or all of them."""
    columns = kind.columns()
    values = {name: values_of(column.hint) for name, column in columns.items()}
    for name, column in columns.items():
        if column.words:
            values[name] |= st.sampled_from(column.words)
        if column.part == "covers":
            values[name] = st.sampled_from(COVERAGES)
    return st.fixed_dictionaries(values)


@pytest.mark.parametrize("kind", row_kinds())
def test_every_column_comes_back(kind: type[Row], tmp_path: Path) -> None:
    """Through a file, as it is written and read."""
    file = tmp_path / "rows.csv"

    @hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
    @hypothesis.given(columns_of(kind))
    def comes_back(values: dict[str, Any]) -> None:
        row = kind.from_values(values)
        write_rows(file, [row])
        contents = read_file(file, row_kinds())
        assert (contents.kind, contents.rows, contents.unread) == (kind, [row], [])
        assert next(iter(row.cells())) == "run"

    comes_back()


@pytest.mark.parametrize("kind", row_kinds())
def test_what_pandas_saved_again_comes_back(kind: type[Row], tmp_path: Path) -> None:
    """In a column with gaps, as regular rows leave them, pandas writes 4.0 for 4."""
    file = tmp_path / "rows.csv"
    whole = [name for name, column in kind.columns().items() if column.type in (int, bool)]

    @hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
    @hypothesis.given(st.integers(0, 2**53 - 1), st.booleans())
    def comes_back(number: int, truth: bool) -> None:
        values = {name: number if kind.columns()[name].type is int else truth for name in whole}
        write_rows(file, [kind.from_values(cells) for cells in (values, {"run": "a"})])
        pd.read_csv(file).to_csv(file, index=False)
        contents = read_file(file, row_kinds())
        assert (contents.torn, contents.unread) == ([], [])
        assert contents.rows[0].values() | values == contents.rows[0].values()

    comes_back()


@pytest.mark.parametrize("stored", [None, "15 prompts", {}, {"num_units": "x", "unit": "lap"}])
def test_another_coverage_is_unknown(stored: object) -> None:
    assert Coverage.read(stored) is None


def test_what_cannot_be_read_is_none() -> None:
    row = LatencyRow.parse(
        {
            "ms_per_token": "nan",
            "num_tokens": "x",
            "num_prompts": "9" * 400,
            "weight_bytes": "[",
            "acceptance_by_position": "[NaN]",
            "foreign": "1",
        }
    )
    assert row == LatencyRow()
    assert LatencyPromptRow.parse({"completion": ""}).completion is None
    # A column that always has text.
    assert AnswerRow.parse({"completion": ""}).completion == ""


def test_an_interval_is_one_value_or_an_estimate_alone() -> None:
    for cells, speedup in [
        ({}, None),
        ({"speedup": "2", "speedup_low": "1.9", "speedup_high": "2.1"}, Interval(2, 1.9, 2.1)),
        # Files of older versions, without a column or with an end alone.
        ({"speedup": "2"}, Interval(2)),
        (
            {"speedup": "2", "speedup_covers": '{"num_units": 9, "unit": "prompt"}'},
            Interval(2, covers=Coverage(9, "prompt")),
        ),
        ({"speedup": "2", "speedup_low": "9" * 400, "speedup_high": "2.1"}, Interval(2)),
        ({"speedup": "9" * 400, "speedup_low": "1.9", "speedup_high": "2.1"}, None),
    ]:
        row = LatencyRow.parse(cells)
        assert row.speedup == speedup
        written = {name: str(cell) for name, cell in row.cells().items() if cell is not None}
        assert LatencyRow.parse(written) == row


def test_columns_repeat_the_settings() -> None:
    settings = settings_of(
        LatencySettings,
        model=ModelSettings(name="m", repository="a/m", quantization="8bit"),
        decoding=DecodingSettings(temperature=0.25, num_draft_tokens=3),
        placement=PlacementSettings(strategy="cpu"),
    )
    asked = LatencyRow.setting_columns(settings)
    assert set(asked) <= set(LatencyRow.columns())
    expected = {
        "model": "m", "repository": "a/m", "draft": "7B", "quantization": "8bit", "draft_quantization": "none",
        "placement": "cpu", "num_draft_tokens": 3, "temperature": 0.25, "prompts": "english",
    }  # fmt: skip
    assert {name: asked[name] for name in expected} == expected


def test_a_row_knows_whether_it_is_of_the_named_models() -> None:
    for changes, real in [
        ({"draft": "7B"}, True),
        ({"draft": "7B", "weights": "stored"}, True),
        ({"weights": "random"}, False),
        ({"draft": "7B", "synthetic_acceptance": 0.0}, False),
        ({"synthetic_acceptance": 0.8}, True),
    ]:
        assert LatencyRow(**changes).real is real


def test_a_row_knows_where_its_answers_come_from() -> None:
    here = {None, "local", "huggingface"}
    for engine in (None, "local", "huggingface", "server", "simulated"):
        assert LatencyRow(engine=engine).is_elsewhere == (engine not in here)
    # Another engine shows it by weights that it does not know.
    assert LatencyRow(engine="mine").is_elsewhere
    assert not LatencyRow(engine="mine", weights="stored").is_elsewhere
    for url in (None, "http://127.0.0.1:8000/v1", "http://localhost", "http://0.0.0.0:1"):
        assert not LatencyRow(url=url).is_on_another_machine
    for url in ("http://a/v1", "http://localhost.a:8000", "http://127.a.net/v1"):
        assert LatencyRow(url=url).is_on_another_machine
    for command in (None, [], ["vllm A"], ["vllm A", "vllm A -x"]):
        assert not LatencyRow(server_command=command).has_same_command
    assert LatencyRow(server_command=["vllm A", "vllm A"]).has_same_command
    pair = {"url": "http://a/v1", "regular_url": "http://a/v1"}
    assert LatencyRow(**pair, served_model=["m"]).has_one_server
    assert LatencyRow(**pair).has_one_server
    for other in (pair | {"served_model": ["m", "n"]}, pair | {"regular_url": "http://b/v1"}, {}):
        assert not LatencyRow(**other).has_one_server
