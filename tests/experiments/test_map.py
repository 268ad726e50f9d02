"""`map` through the command line, and what it says about planted rows."""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from typing import Any

import pytest

from echo_server import EchoServer, serving
from harness.experiments.map import Map, MeasuredCell, reported_k
from harness.experiments.session import Session
from harness.experiments.surface import Cell
from harness.report.map import crossing, map_document, schedule_of
from harness.report.table import Line, Table
from harness.results.acceptance import Acceptance
from harness.results.rows.map import MapRow
from harness.results.statistics.interval import Interval
from in_process import QUICKEST_PAIR, Harness, only, results
from wording import mentions

QUICK = [
    "map",
    *QUICKEST_PAIR,
    "num_prompts=3",
    "decoding.max_new_tokens=8",
    "num_resamples=200",
    "num_warmup=0",
]


SERVER = [
    "engine=server",
    "engine.regular_url=http://localhost:1/v1",
    "engine.url=http://localhost:1/v1",
]


def row(batch_size: int, k: int, speedup: float, spread: float = 0.1) -> MapRow:
    return MapRow(
        model="13B", draft="7B", batch_size=batch_size, num_draft_tokens=k, context=100,
        measured=batch_size != 4, speedup=speedup,
        speedup_low=speedup - spread, speedup_high=speedup + spread,
    )  # fmt: skip


ROWS = [
    *(row(size, 1, speedup) for size, speedup in ((1, 1.5), (4, 1.2), (16, 1.05))),
    *(row(size, 5, speedup) for size, speedup in ((1, 2.5), (4, 1.25), (16, 0.5))),
]


def test_a_map_of_the_tiny_pair(harness: Harness) -> None:
    pair = ["model=tiny", "draft=tiny_draft"]
    outcome = harness(*QUICK, *pair, "batch_sizes=[1,2,3]", "draft_tokens=[1,2,4]")
    rows = results("map")
    assert list(rows["batch_size"]) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert list(rows["num_draft_tokens"]) == [1, 2, 4] * 3
    measured = rows[rows["measured"]]
    assert len(measured) == 4
    assert rows["speedup"].gt(0).all()
    assert measured["mean_acceptance_length"].gt(1).all()
    assert rows[~rows["measured"]]["regular_ms_per_token"].isna().all()
    assert mentions(outcome.stdout, "4 of 9 cells")
    assert "K=4" in outcome.stdout
    lines = [line for line in outcome.stderr.splitlines() if line.startswith("batch ")]
    assert len(lines) == 4
    drawing = only("map.svg").read_text()
    assert all(f"{speedup:.2f}×" in drawing for speedup in rows["speedup"])
    if "0 from 1 on" not in outcome.stdout:
        config = json.loads(only("schedule_vllm.json").read_text())
        assert config["num_speculative_tokens_per_batch_size"][0][0] == 1


def test_an_interrupted_map_has_only_what_was_measured(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Map._measure_cell

    def measure_one(map_: Map, session: Session, cell: Cell) -> float:
        if map_.measured:
            raise KeyboardInterrupt
        return measure(map_, session, cell)

    monkeypatch.setattr(Map, "_measure_cell", measure_one)
    outcome = harness(*QUICK, "batch_sizes=[1,3]", "draft_tokens=[1,2]", code=130)
    rows = results("map")
    assert list(rows["status"]) == ["interrupted"]
    assert rows["measured"].all()
    assert "Interrupted with 1 cell of the grid measured." in outcome.stdout
    assert "K by batch size" not in outcome.stdout


def test_contexts_are_cut_to_their_lengths(harness: Harness) -> None:
    harness(*QUICK, "batch_sizes=[1]", "contexts=[4,8]", "draft_tokens=[2]")
    rows = results("map")
    assert list(rows["context"]) == [4, 8]


def test_a_map_of_servers_is_over_requests_in_flight(harness: Harness) -> None:
    servers = EchoServer(delay_s=0.01, version="1"), EchoServer(num_draft_tokens=4, version="1")
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(server)) for server in servers]
        addresses = [f"engine.regular_url={urls[0]}", f"engine.url={urls[1]}"]
        asked = ["num_prompts=8", "batch_sizes=[1,2,4]", "share=1", "engine=server"]
        outcome = harness(*QUICK, *asked, *addresses)
    rows = results("map")
    assert list(rows["batch_size"]) == [1, 2, 4]
    # As the server tells by its counts.
    assert list(rows["num_draft_tokens"]) == [4, 4, 4]
    assert list(rows["speedup_covers"]) == ["8 prompts", "4 laps", "2 laps"]
    assert rows["mean_acceptance_length"].gt(2).all()
    pays = "K=4 pays with any number of requests in flight up to 4" in outcome.stdout
    assert pays == (rows["speedup"] > 1).all()
    assert "requests in flight" in only("map.svg").read_text()
    if (rows["speedup"] > 1).all():
        assert only("schedule_llama_cpp.txt").read_text().startswith("--spec-draft-n-max 4 ")
    # No cell is answered from what another one has left in a prefix cache.
    asked = [
        (body["cache_salt"], *body["prompt"])
        for body in servers[0].bodies
        if body["max_tokens"] > 1
    ]
    assert len(asked) == len(set(asked))


def test_a_server_whose_k_depends_on_its_load_has_none() -> None:
    """vLLM with `num_speculative_tokens_per_batch_size`."""

    def cell(told: int, outcomes: list[tuple[int, int]]) -> MeasuredCell:
        return MeasuredCell(Interval(1.5), Acceptance.of(outcomes), {}, 2.0, 1.0, told)

    alone, among_others = cell(1, [(1, 1), (1, 0)]), cell(3, [(3, 2), (1, 0)])
    assert reported_k([alone, among_others]) is None
    assert reported_k([among_others, among_others]) == 3
    assert reported_k([cell(2, []), cell(3, [])]) == 3


def test_a_map_of_generate_has_one_prompt_at_a_time(harness: Harness) -> None:
    harness(*QUICK, "engine=huggingface", "batch_sizes=[1]", "draft_tokens=[1,2]", "share=1")
    rows = results("map")
    assert list(rows["num_draft_tokens"]) == [1, 2]
    assert rows["mean_acceptance_length"].is_monotonic_increasing


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["batch_sizes=[4,1]"], "batch_sizes=[4,1]: must be numbers from 1 on that rise"),
        (["draft_tokens=[]"], "draft_tokens=[]: must have a number"),
        (["batch_sizes=[1000]"], "batch_sizes=1000: must not be above the prompts of the set"),
        (["draft_tokens=[1,2000]"], "draft_tokens=2000: must be at most 1024"),
        (["contexts=[100000]"], "contexts=100000: the texts of this set are enough for"),
        (
            ["decoding.num_draft_tokens=3"],
            "decoding.num_draft_tokens=3: changes nothing: draft_tokens",
        ),
        (["batch_size=8"], "batch_size=8: changes nothing: batch_sizes"),
        (["draft=none"], "draft=none: must be set"),
        (["share=0"], "share=0.0: must be in (0, 1]"),
        (["engine=huggingface"], "batch_sizes=[1,4,16]: must be [1] with engine=huggingface"),
        ([*SERVER, "draft_tokens=[2]"], "draft_tokens=[2]: must be null with engine=server"),
        (["engine=server", "engine.url=http://localhost:1/v1"], "draft=none: must be set"),
    ],
)
def test_wrong_settings(harness: Harness, arguments: list[str], complaint: str) -> None:
    assert harness.refused("map", *arguments).startswith(complaint)


def test_the_batch_size_at_which_it_stops_paying() -> None:
    assert crossing([1, 4], [2.0, 0.5]) == pytest.approx(2.0)
    assert crossing([1, 4, 16], [3.0, 2.0, 1.5]) is None
    assert crossing([1, 4], [0.9, 1.2]) == 0


def test_what_is_said_of_planted_rows() -> None:
    document = map_document(ROWS)
    said = " ".join(part.text for part in document if isinstance(part, Line))
    assert mentions(said, "K=1 pays at every batch size up to 16")
    assert mentions(said, "K=5 pays up to a batch size of 5.6", "4.8", "6.7")
    assert mentions(said, "highest speed-up is 2.50×", "K=5", "batch size 1")
    assert schedule_of(ROWS) == {1: 5, 16: 1}
    assert "no interval" not in said
    two = [dataclasses.replace(ROWS[0], speedup_low=None, speedup_high=None), *ROWS[1:]]
    few = " ".join(part.text for part in map_document(two) if isinstance(part, Line))
    assert mentions(few, "1 of 4 measured cells have no interval")
    assert mentions(few, "num_prompts=8")
    (table,) = [part for part in document if isinstance(part, Table)]
    _, cells = table.shown()
    assert cells == [
        ("1", "1.50×", "2.50×"),
        ("4", "(1.20×)", "(1.25×)"),
        ("16", "1.05×", "0.50×"),
    ]


def test_what_is_said_of_planted_requests_in_flight() -> None:
    of_servers: dict[str, Any] = {"engine": "server", "num_draft_tokens": None}
    cells = [dataclasses.replace(row(size, 1, 3 / size), **of_servers) for size in (1, 4)]
    (always, ends) = (
        " ".join(part.text for part in map_document(asked) if isinstance(part, Line))
        for asked in (cells[:1], cells)
    )
    assert "Speculation pays with any number of requests in flight up to 1" in always
    assert "Speculation pays up to 3 requests in flight" in ends
    assert "is 3.00× with 1 request in flight" in always
    told = [dataclasses.replace(cell, num_draft_tokens=4) for cell in cells]
    said = " ".join(part.text for part in map_document(told) if isinstance(part, Line))
    assert (
        "K by requests in flight, 0 where drafting does not pay: 4 from 1 on, 0 from 4 on." in said
    )
    # The grid has several numbers of requests in flight.
    assert "· 1 in flight" not in said


def test_a_pair_that_never_pays_drafts_nothing() -> None:
    assert schedule_of([row(1, 1, 0.9), row(4, 1, 0.8)]) == {1: 0}
    assert schedule_of([row(1, 1, 1.2), row(4, 1, 0.8)]) == {1: 1, 4: 0}
