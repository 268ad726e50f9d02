"""`map` through the command line, and what it says about planted rows."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from echo_server import EchoServer, serving
from harness.commands.map.measure import Cell, Map, MeasuredCell, common_k
from harness.commands.map.plots import map_plots
from harness.commands.map.record import RECORD
from harness.commands.map.rows import MapRow
from harness.commands.map.tables import (
    CANNOT_TELL,
    DOES_NOT_PAY,
    PAYS,
    for_vllm,
    map_page,
    schedule_of,
    word_of,
)
from harness.config.machine import note_command_line
from harness.measuring.session import Session
from harness.results.acceptance import Acceptance
from harness.results.runs import Run
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import Interval
from in_process import QUICKEST_PAIR, Harness, only, results
from pages import full, short, tables_of
from wording import mentions

SUPPORT = Path(__file__).parents[2] / "support"
QUICK = [
    "map",
    *QUICKEST_PAIR,
    "num_prompts=3",
    "decoding.max_new_tokens=8",
    "num_warmup=0",
]


SERVER = [
    "engine=server",
    "model=tiny",
    "engine.regular_url=http://localhost:1/v1",
    "engine.url=http://localhost:2/v1",
]


def row(batch_size: int, k: int, speedup: float, spread: float = 0.1) -> MapRow:
    return MapRow(
        model="13B", draft="7B", batch_size=batch_size, num_draft_tokens=k, context=100,
        regular_ms_per_token=1.0, speedup=Interval(speedup, speedup - spread, speedup + spread),
    )  # fmt: skip


def asked_of(server: EchoServer) -> list[dict[str, Any]]:
    """The requests of a run, without those that ask what the server can do."""
    return [body for body in server.bodies if len(body["prompt"]) > 1]


ROWS = [
    *(row(size, 1, speedup) for size, speedup in ((1, 1.5), (4, 1.2), (16, 1.05))),
    *(row(size, 5, speedup) for size, speedup in ((1, 2.5), (4, 1.25), (16, 0.5))),
]


def test_a_map_of_the_tiny_pair(harness: Harness) -> None:
    pair = ["model=tiny_draft", "draft=tiny_draft"]
    asked = ["batch_sizes=[1,2]", "draft_tokens=[1,2]", "details=true"]
    outcome = harness(*QUICK, *pair, *asked, "decoding.max_new_tokens=4")
    rows = results("map")
    assert list(rows["batch_size"]) == [1, 1, 2, 2]
    assert list(rows["num_draft_tokens"]) == [1, 2] * 2
    assert rows["speedup"].gt(0).all()
    assert rows["mean_acceptance_length"].gt(1).all()
    assert rows["regular_ms_per_token"].gt(0).all()
    assert "K=2" in outcome.stdout
    # Every cell can have an interval, and be decided.
    assert rows["speedup_low"].gt(0).all()
    assert set(rows["speedup_covers"]) == {"8 prompts", "8 batches"}
    cells = [line for line in outcome.stderr.splitlines() if line.startswith("batch ")]
    assert len(cells) == 4
    drawing = only("map.svg").read_text()
    assert all(f"{speedup:.2f}×" in drawing for speedup in rows["speedup"])
    assert ("no schedule" in outcome.stdout) == (not list(Path().rglob("schedule_vllm.json")))


def test_an_interrupted_map_has_only_what_was_measured(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Map._measure_cell

    def measure_one(map_: Map, session: Session, cell: Cell) -> None:
        if map_.measured:
            raise KeyboardInterrupt
        measure(map_, session, cell)

    monkeypatch.setattr(Map, "_measure_cell", measure_one)
    outcome = harness(
        "map", "engine=simulated", "batch_sizes=[1,3]", "draft_tokens=[1,2]", code=130
    )
    rows = results("map")
    assert list(rows["status"]) == ["interrupted"]
    assert "Interrupted with 1 cell of the grid measured." in outcome.stdout
    assert "Use" not in outcome.stdout


def test_contexts_are_cut_to_their_lengths(harness: Harness) -> None:
    # Without a verdict on a noisy machine, where a draft of which nothing is accepted may seem faster.
    harness(*QUICK, "batch_sizes=[1]", "contexts=[4,8]", "draft_tokens=[2]", code=None)
    rows = results("map")
    assert list(rows["context"]) == [4, 8]


def test_a_map_of_servers_is_over_requests_in_flight(harness: Harness) -> None:
    servers = [EchoServer(version="1", num_draft_tokens=k) for k in (None, 4)]
    for server in servers:
        # Of two requests that are in flight together one ends long before the other.
        server.slow_every, server.slow_s = 2, 0.01
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(server)) for server in servers]
        addresses = [f"engine.regular_url={urls[0]}", f"engine.url={urls[1]}"]
        asked = ["num_prompts=8", "batch_sizes=[1,2,4]", "engine=server", "model=tiny"]
        harness(*QUICK, *asked, *addresses)
    rows = results("map")
    assert list(rows["batch_size"]) == [1, 2, 4]
    # As the server tells by its counts.
    assert list(rows["num_draft_tokens"]) == [4, 4, 4]
    assert list(rows["speedup_covers"]) == ["8 prompts", "8 laps", "8 laps"]
    assert rows["mean_acceptance_length"].gt(2).all()
    assert "requests in flight" in only("map.svg").read_text()
    for server in servers:
        sent = [(tuple(body["prompt"]), body.get("cache_salt")) for body in asked_of(server)]
        # No cell is answered from what another one, or its own warm-up, has left in a prefix cache.
        assert len(sent) == len(set(sent))
        salts = {str(salt) for _, salt in sent}
        assert len(salts) >= 3
        # Further requests keep two and four in flight until the last one of a lap has ended.
        assert any("extra" in salt for salt in salts)


def test_servers_are_started_once_for_all_cells_of_a_k(harness: Harness) -> None:
    """Each cell has its own number of requests in flight."""
    echo = [sys.executable, str(SUPPORT / "echo_server.py"), "--port", "{port}"]
    cells = ["batch_sizes=[1,2]", "draft_tokens=[2,3]", "engine.blocks=0", "model=tiny"]
    harness(*QUICK, *cells, "--", *echo, "--", *echo, "-k", "{K}")
    rows = results("map")
    assert len(rows) == 4
    for arm in ("regular", "speculative"):
        log = (Path(rows["directory"][0]) / f"{arm}_server.log").read_text()
        assert log.count("$ ") == 2
    assert log.count("-k 2") == log.count("-k 3") == 1


def test_the_warm_up_reads_prompts_that_are_not_measured(harness: Harness) -> None:
    """A prefix cache would know them: the whole batch of the cell, if there is one alone."""
    servers = [EchoServer(version="1", num_draft_tokens=k) for k in (None, 4)]
    Path("five.txt").write_text("\n".join(f"{number} + 1 =" for number in range(5)))
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(server)) for server in servers]
        addresses = [f"engine.regular_url={urls[0]}", f"engine.url={urls[1]}", "engine=server"]
        asked = ["prompts=./five.txt", "batch_sizes=[4]", "decoding.max_new_tokens=4"]
        quick = [argument for argument in QUICK if "num_warmup" not in argument]
        harness(*quick, *asked, *addresses)
    for server in servers:
        asked_how_often = Counter(
            tuple(body["prompt"]) for body in asked_of(server) if "extra" not in body["cache_salt"]
        )
        measured = dict(asked_how_often.most_common(5))
        # A batch for the warm-up, and eight batches of five texts.
        assert sum(measured.values()) == 8 * 4
        assert asked_how_often.total() - sum(measured.values()) == 4
    assert list(results("map")["speedup_covers"]) == ["8 laps of the same texts"]


def test_servers_that_do_other_work_have_no_map(harness: Harness) -> None:
    """One ends its texts early; `latency` refused a verdict, and `map` gave one."""
    servers = EchoServer(), EchoServer(num_draft_tokens=4, stop_after=3)
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(server)) for server in servers]
        addresses = [
            f"engine.regular_url={urls[0]}",
            f"engine.url={urls[1]}",
            "engine=server",
            "model=tiny",
        ]
        outcome = harness(*QUICK, "batch_sizes=[1,2]", *addresses, code=3)
    rows = results("map")
    assert list(rows["status"]) == ["no_verdict"] * 2
    assert rows["speedup"].isna().all()
    assert rows["error"].str.contains("the same work").all()
    shown = " ".join(outcome.stdout.split())
    assert mentions(shown, "cannot tell", "2 of 2 measured cells cannot tell", "the same work")
    assert "pays" not in shown.replace("whether it pays", "")
    assert not list(Path().rglob("schedule_vllm.json"))


def test_a_server_whose_k_depends_on_its_load_has_none() -> None:
    """vLLM with `num_speculative_tokens_per_batch_size`."""

    def cell(told: int, outcomes: list[tuple[int, int]]) -> MeasuredCell:
        acceptance = Acceptance.of(outcomes).columns()
        known = {name: value for name, value in acceptance.items() if value is not None}
        return MeasuredCell({}, {"mean_proposed": told} | known)

    alone, among_others = cell(1, [(1, 1), (1, 0)]), cell(3, [(3, 2), (1, 0)])
    assert common_k([alone, among_others]) is None
    assert common_k([among_others, among_others]) == 3
    assert common_k([cell(2, []), cell(3, [])]) == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["batch_sizes=[4,1]"], "batch_sizes=[4,1]: must be numbers from 1 on that rise"),
        (["draft_tokens=[]"], "draft_tokens=[]: must have a number"),
        (
            ["draft=suffix", "draft.shared=true", "batch_sizes=[1,16]"],
            "batch_sizes=16: must be at most 5 for 8 batches of the set's 40 prompts: draft.shared",
        ),
        (["draft_tokens=[1,2000]"], "draft_tokens=2000: must be at most 1024"),
        (["contexts=[100000]"], "contexts=100000: the texts of this set are enough for"),
        (
            ["decoding.num_draft_tokens=3"],
            "decoding.num_draft_tokens=3: changes nothing: draft_tokens",
        ),
        (["batch_size=8"], "batch_size=8: changes nothing: batch_sizes"),
        (["draft=none"], "draft=none: must be set"),
        (["engine=huggingface"], "batch_sizes=[1,4,16]: must be [1] with engine=huggingface"),
        (
            [*SERVER, "engine.url=http://localhost:1/v1"],
            "engine.regular_url=http://localhost:1/v1: must be another",
        ),
        ([*SERVER, "draft_tokens=[2]"], "draft_tokens=[2]: must be null with engine=server"),
        (
            ["engine=server", "model=tiny", "engine.url=http://localhost:1/v1"],
            "draft=none: must be set",
        ),
    ],
)
def test_wrong_settings(harness: Harness, arguments: list[str], complaint: str) -> None:
    assert harness.refused("map", *arguments).startswith(complaint)


def lines(rows: list[MapRow]) -> str:
    return " ".join(full(map_page([Run(rows)]), 200).split())


def table(rows: list[MapRow]) -> list[tuple[str, ...]]:
    (found,) = tables_of(map_page([Run(rows)]))
    return found.shown()[1]


def test_a_k_that_pays_from_a_larger_batch_on() -> None:
    """It did not pay, according to the map: only the first crossing from above was known."""
    rows = [row(size, 3, speedup, 0.01) for size, speedup in ((1, 0.8), (2, 1.5), (16, 1.6))]
    text = lines(rows)
    assert mentions(text, "pays at batch size 2 and 16, not at 1")
    assert schedule_of(rows)[0] == [(1, 1, 0), (2, 16, 3)]
    assert mentions(text, "K=0 at 1, K=3 at 2 to 16")


def test_a_cell_without_an_interval_says_nothing() -> None:
    alone = [dataclasses.replace(row(1, 4, 1.04), speedup=Interval(1.04))]
    text = lines(alone)
    assert mentions(text, "1 of 1 measured cells cannot tell", "no interval from fewer than 8")
    assert text.count("measured cells cannot tell") == 1
    assert "best" not in text
    assert mentions(text, "no schedule", "no cell can tell", "batch size 1")
    assert table(alone)[0] == ("1", "1.04× cannot tell")
    # Between cells that can it ends what is known, and gets the K of the size below.
    around = [row(2, 4, 1.5), dataclasses.replace(alone[0], batch_size=8), row(16, 4, 1.4)]
    assert mentions(lines(around), "pays at batch size 2 and 16")
    assert schedule_of(around)[0] == [(1, 16, 4)]


def test_a_cell_whose_arms_did_other_work_has_no_figure() -> None:
    refused = dataclasses.replace(
        row(1, 4, 1.0),
        speedup=None,
        status=NO_VERDICT, error="the arms did not do the same work",
    )  # fmt: skip
    rows = [row(2, 4, 1.5), dataclasses.replace(refused, batch_size=16)]
    assert table(rows)[1] == ("16", "– cannot tell")
    text = lines(rows)
    assert mentions(text, "1 of 2 measured cells", "the arms did not do the same work")
    # The schedule ends where it was measured.
    assert schedule_of(rows)[0] == [(1, 2, 4)]
    assert mentions(text, "Use by batch size: K=4 at 1 to 2 ")


@pytest.mark.parametrize(
    ("rows_of", "finding", "command"),
    [
        (ROWS, "pays at batch size 1 and 4", "'batch_sizes=[4,8,16]'"),
        (
            [row(1, 1, 1.5), row(16, 1, 1.4)],
            "pays at batch size 1 and 16",
            "harness map 'batch_sizes=[16,32,64]'",
        ),
        ([row(1, 1, 0.8), row(16, 1, 0.5)], "does not pay at batch size 1 and 16", ""),
        ([dataclasses.replace(row(1, 1, 1.0), weights="random")], "cannot tell", ""),
    ],
)
def test_the_answer_is_short(rows_of: list[MapRow], finding: str, command: str) -> None:
    note_command_line(["map"])
    text = short(map_page([Run(rows_of)]))
    assert max(map(len, text.splitlines())) <= 80
    # `Saved` is the twelfth.
    assert len(text.splitlines()) <= 11
    assert finding in text
    assert command in text
    assert "Next" in text or not command


def test_the_answer_has_every_cell_with_its_interval() -> None:
    """On 80 characters too, where a part of an answer loses the columns that have no room."""
    contexts = (512, 4096)
    all_k = (1, 2, 3, 5, 8)
    cells = [
        dataclasses.replace(row(size, k, 1.5 + size / 10 + k / 100, spread=0.01), context=context)
        for context in contexts
        for size in (1, 4)
        for k in all_k
    ]
    text = short(map_page([Run(cells)]))
    for cell in cells:
        assert cell.speedup is not None
        low, high = cell.speedup.low, cell.speedup.high
        shown = f"{cell.speedup.estimate:.2f}× {low:.2f} to {high:.2f}"
        assert text.count(shown) == len(contexts)
    assert all(f"K={k}" in text for k in all_k)
    assert "context of 512 tokens" in text


def test_a_sweep_of_maps_has_a_line_for_each() -> None:
    warm = Run([dataclasses.replace(cell, temperature=1.0) for cell in ROWS[:1]])
    cold = Run([dataclasses.replace(cell, temperature=0.0) for cell in ROWS])
    words = " ".join(short(map_page([warm, cold, Run([MapRow()])]), 110).split())
    assert "greedy: pays at batch size 1 and 4; best 2.50× (2.40 to 2.60): K=5" in words
    assert "temperature 1: pays at batch size 1; best 1.50× (1.40 to 1.60): K=1" in words
    assert map_page([Run([MapRow()])]) is None
    assert "batches of" not in words, "a grid has several"
    assert "K=1 at 1 (schedule_vllm.json)" in full(map_page([warm]))
    # A job of a sweep has the highest one.
    assert RECORD.line(ROWS).startswith("best 2.50× (2.40 to 2.60)")
    assert RECORD.line([MapRow()]) == ""


@pytest.mark.parametrize("weights", ["stored", "random"])
def test_the_drawing_says_what_the_text_says(weights: str) -> None:
    cells = [dataclasses.replace(cell, weights=weights) for cell in ROWS]
    words = [word_of(cell) for cell in cells]
    of_stored = [PAYS, PAYS, CANNOT_TELL, PAYS, PAYS, DOES_NOT_PAY]
    assert words == (of_stored if weights == "stored" else [CANNOT_TELL] * 6)
    ((_, figure),) = map_plots([Run(cells)])["map"]
    legend = figure.axes[0].get_legend_handles_labels()[1]
    assert {word for word in legend if word in of_stored} == set(words)
    assert (" pays at batch size 1 and" in lines(cells)) == (weights == "stored")
    assert len(figure.axes[0].patches) == len(words)


def test_what_is_said_of_planted_requests_in_flight() -> None:
    of_servers: dict[str, Any] = {"engine": "server", "num_draft_tokens": None}
    cells = [dataclasses.replace(row(size, 1, 3 / size), **of_servers) for size in (1, 4)]
    assert " pays with 1 request in flight " in lines(cells[:1])
    assert "best 3.00× (2.90 to 3.10): 1 request in flight" in lines(cells)
    assert mentions(lines(cells), "no schedule", "does not report its K")
    told = [dataclasses.replace(cell, num_draft_tokens=4) for cell in cells]
    assert mentions(lines(told), "Use by requests in flight: K=4 at 1 to 3, K=0 at 4")
    # The grid has several numbers of requests in flight.
    assert "· 1 in flight" not in lines(told)


def test_schedules_of_cells_that_can_tell() -> None:
    assert schedule_of([row(1, 1, 0.8), row(16, 1, 0.8)]) == (
        [],
        "there is no load at which it surely pays",
    )
    assert schedule_of([row(1, 1, 1.2), row(16, 1, 0.8)])[0] == [(1, 15, 1), (16, 16, 0)]
    # The best K cannot tell, and another one can.
    unsure = [row(1, 5, 2.0, spread=1.5), row(1, 1, 1.5), row(16, 1, 1.4)]
    assert schedule_of(unsure)[0] == [(1, 16, 1)]
    # Over contexts, twice as fast and half as fast cancel out.
    contexts = [
        dataclasses.replace(row(1, k, speedup), context=context)
        for context, k, speedup in ((10, 1, 1.3), (10, 5, 2.0), (900, 1, 1.3), (900, 5, 0.5))
    ]
    assert schedule_of(contexts)[0] == [(1, 1, 1)]


def test_vllm_gets_the_ranges_and_the_largest_k() -> None:
    """And nothing of the draft."""
    written = for_vllm([(1, 3, 0), (4, 16, 5)])
    assert json.loads(written) == {
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 3, 0], [4, 16, 5]],
    }
