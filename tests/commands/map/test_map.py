"""`map` through the command line, and what it says about planted rows."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from echo_server import EchoServer, Serve
from harness.commands.map.measure import Cell, own_k
from harness.commands.map.page import map_page
from harness.commands.map.rows import MapRow
from harness.measuring.session import Session
from harness.results.judging.grid import Schedule, cells_of, for_vllm, schedule_of
from harness.results.judging.series import judged_at_once
from harness.results.runs import Run
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import Coverage, Interval
from in_process import QUICKEST_PAIR, Harness, covered, results

SUPPORT = Path(__file__).parents[2] / "support"
PLANTED = ["engine=simulated"]
QUICK = ["map", *QUICKEST_PAIR, "num_prompts=3", "decoding.max_new_tokens=8", "num_warmup=0"]


SERVER = ["engine=server", "model=tiny"]
SERVER += ["engine.regular_url=http://localhost:1/v1", "engine.url=http://localhost:2/v1"]


def row(batch_size: int, k: int, speedup: float, spread: float = 0.1) -> MapRow:
    return MapRow(
        arm="speculative", model="13B", draft="7B", batch_size=batch_size, num_draft_tokens=k, ms_per_token=9.0,
        speedup=Interval(speedup, speedup - spread, speedup + spread, Coverage(15, "prompt")),
    )  # fmt: skip


def schedule(rows: list[MapRow]) -> tuple[Schedule, str]:
    return schedule_of(judged_at_once(cells_of(rows)))


ROWS = [
    *(row(size, 1, speedup) for size, speedup in ((1, 1.5), (4, 1.2), (16, 1.05))),
    *(row(size, 5, speedup) for size, speedup in ((1, 2.5), (4, 1.25), (16, 0.5))),
]


def cells() -> pd.DataFrame:
    """The speculative rows of `results/map.csv`, one for each cell."""
    return results("map").query("arm == 'speculative'").reset_index()


def test_the_cells_of_a_map_are_runs_of_latency(harness: Harness) -> None:
    """The same answers."""
    grid = ["batch_sizes=[1,2]", "draft_tokens=[1,2]", "tokens=9", "num_prompts=3"]
    outcome = harness("map", *PLANTED, *grid)
    rows = cells()
    assert list(rows["num_draft_tokens"]) == [1, 1, 2, 2]
    assert list(rows["batch_size"]) == [1, 2] * 2
    # Every cell can have an interval, and be decided.
    assert rows["speedup_low"].gt(0).all()
    assert list(map(covered, rows["speedup_covers"])) == ["8 prompts", "8 laps"] * 2
    harness("report")
    _, drawing = Path("results/report.html").read_text().split("kind-load", 1)
    assert all(f"K={k}" in drawing[: drawing.index("</figure>")] for k in (1, 2))
    assert ("no schedule" in outcome.stdout) == (not list(Path().rglob("schedule_vllm.json")))
    assert not list(Path().rglob("latency_prompts.csv"))
    harness("latency", *PLANTED, "tokens=9", "K=2", "batch_size=2", "num_prompts=16")
    alone = results("latency")
    for name in ("acceptance_rate", "num_tokens", "num_prompts"):
        assert alone[name][1] == rows[name][3], name


def test_cells_of_a_pair_on_this_machine_are_batches(harness: Harness) -> None:
    harness(*QUICK, "batch_sizes=[1,2]", "draft_tokens=[2]")
    assert list(map(covered, cells()["speedup_covers"])) == ["8 prompts", "8 batches"]


def test_an_interrupted_map_has_only_what_was_measured(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Cell.measure

    def measure_largest(cell: Cell, session: Session) -> None:
        if cell.settings.batch_size < 3:
            raise KeyboardInterrupt
        measure(cell, session)

    monkeypatch.setattr(Cell, "measure", measure_largest)
    harness("map", *PLANTED, "batch_sizes=[1,3]", "draft_tokens=[2]", code=130)
    assert list(results("map")["status"]) == ["interrupted"] * 2


def test_a_map_of_servers_is_over_requests_in_flight(harness: Harness, serve: Serve) -> None:
    servers = [EchoServer(version="1", num_draft_tokens=k) for k in (None, 4)]
    for server in servers:
        # Of two requests that are in flight together one ends long before the other.
        server.slow_every, server.slow_s = 2, 0.01
    asked = ["num_prompts=8", "batch_sizes=[1,2]", "engine=server", "model=tiny"]
    harness(*QUICK, *asked, *serve(*servers))
    rows = cells()
    assert list(rows["batch_size"]) == [1, 2]
    # As the server tells by its counts.
    assert list(rows["num_draft_tokens"]) == [4, 4]
    assert list(map(covered, rows["speedup_covers"])) == ["8 prompts", "8 laps"]
    assert rows["mean_acceptance_length"].gt(2).all()
    harness("report")
    _, drawing = Path("results/report.html").read_text().split("kind-load", 1)
    assert "requests in flight" in drawing[: drawing.index("</figure>")]
    for server in servers:
        # Without the requests that ask what the server can do.
        asked_of = [body for body in server.bodies if len(body["prompt"]) > 1]
        sent = [(tuple(body["prompt"]), body.get("cache_salt")) for body in asked_of]
        # No cell is answered from what another one, or its own warm-up, has left in a prefix cache.
        assert len(sent) == len(set(sent))
        salts = {str(salt) for _, salt in sent}
        assert len(salts) >= 2
        # Further requests keep two in flight until the last one of a lap has ended.
        assert any("extra" in salt for salt in salts)


def test_servers_are_started_once_for_all_cells_of_a_k(harness: Harness) -> None:
    """Each cell has its own number of requests in flight."""
    echo = [sys.executable, str(SUPPORT / "echo_server.py"), "--port", "{port}"]
    grid = ["batch_sizes=[1,2]", "draft_tokens=[2,3]", "engine.blocks=0", "model=tiny"]
    harness(*QUICK, *grid, "--", *echo, "--", *echo, "-k", "{K}")
    rows = cells()
    assert len(rows) == 4
    for arm in ("regular", "speculative"):
        log = (Path(rows["directory"][0]) / f"{arm}_server.log").read_text()
        assert log.count("$ ") == 2
    assert log.count("-k 2") == log.count("-k 3") == 1


def test_a_server_whose_k_depends_on_its_load_has_none() -> None:
    """vLLM with `num_speculative_tokens_per_batch_size`."""
    own = MapRow(arm="speculative", draft="server", url="http://a/v1", mean_proposed=2.9)
    reported = replace(own, marginal_acceptance_by_position=[0.9, 0.8, 0.7])
    assert own_k([reported, MapRow(arm="regular"), reported]) == 3
    assert own_k([reported, replace(reported, mean_proposed=3.5)]) is None
    assert own_k([own]) is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["batch_sizes=[4,1]"], "batch_sizes=[4,1]: must be numbers from 1 on that rise"),
        (["contexts=[100000]"], "contexts=100000: the texts of this set are enough for"),
        (["batch_size=8"], "batch_size=8: changes nothing: batch_sizes"),
        (["engine=huggingface"], "batch_sizes=[1,4,16]: must be 1 with engine=huggingface"),
        (
            [*SERVER[:-1], "engine.url=http://localhost:1/v1"],
            "engine.regular_url=http://localhost:1/v1: must be another",
        ),
        ([*SERVER, "draft_tokens=[2]"], "draft_tokens=[2]: must be null with engine=server"),
    ],
)
def test_wrong_settings(harness: Harness, arguments: list[str], complaint: str) -> None:
    assert harness.refused("map", *arguments).startswith(complaint)


def test_a_cell_without_an_interval_decides_nothing() -> None:
    """It gets the K of the size below."""
    alone = replace(row(8, 4, 1.04), speedup=Interval(1.04))
    assert schedule([alone])[1] == "nothing is shown at the smallest load, 8"
    assert schedule([row(2, 4, 1.5), alone, row(16, 4, 1.4)])[0] == [(1, 16, 4)]
    error = "the arms did not do the same work"
    refused = replace(row(16, 4, 1.0), speedup=None, status=NO_VERDICT, error=error)
    assert schedule([row(2, 4, 1.5), refused])[0] == [(1, 16, 4)]


def test_it_says_that_the_machine_was_busy() -> None:
    busy = [replace(cell, processor_share=0.04) for cell in ROWS[:2]]
    page = map_page([Run([*busy, *ROWS[2:]])])
    assert any(doubt.startswith("2 of 6 cells") for doubt in page.doubts)
    quiet = map_page([Run(ROWS)])
    assert quiet.doubts == []


@pytest.mark.parametrize("weights", ["stored", "random"])
def test_the_drawing_has_a_curve_for_each_k(weights: str) -> None:
    cells = [replace(cell, weights=weights) for cell in ROWS]
    verdicts = [cell.verdict for cell in judged_at_once(cells_of(cells))]
    stored = ["above", "above", "open", "above", "above", "below"]
    relations = [verdict.relation for verdict in verdicts]
    assert relations == (stored if weights == "stored" else ["open"] * 6)
    assert {verdict.family for verdict in verdicts} == {6 if weights == "stored" else 1}
    page = map_page([Run(cells)])
    ((_, figure),) = page.plots()["load"]
    handles, names = figure.axes[0].get_legend_handles_labels()
    assert [name.rpartition(" · ")[2] for name in names] == ["K=1", "K=5"]
    assert [*handles[0].lines[0].get_ydata()] == [1.5, 1.2, 1.05]


def test_schedules_of_cells_that_can_tell() -> None:
    # A K that pays from a larger batch on: only the first crossing from above was known.
    rising = [row(size, 3, speedup, 0.01) for size, speedup in ((1, 0.8), (2, 1.5), (16, 1.6))]
    assert schedule(rising)[0] == [(1, 1, 0), (2, 16, 3)]
    assert schedule([row(1, 1, 0.8), row(16, 1, 0.8)]) == (
        [],
        "no K is shown to pay at any load",
    )
    assert schedule([row(1, 1, 1.2), row(16, 1, 0.8)])[0] == [(1, 15, 1), (16, 16, 0)]
    # The best K cannot tell, and another one can.
    unsure = [row(1, 5, 2.0, spread=1.5), row(1, 1, 1.5), row(16, 1, 1.4)]
    assert schedule(unsure)[0] == [(1, 16, 1)]


def test_a_load_at_which_nothing_is_shown_keeps_the_k_of_the_next_smaller_one() -> None:
    """It is switched off only where that K is shown to lose."""
    open_at_16 = row(16, 4, 1.0)
    alone = replace(row(64, 4, 1.2), speedup=Interval(1.2))
    assert schedule([row(1, 4, 2.0), open_at_16, alone])[0] == [(1, 64, 4)]
    assert schedule([row(1, 4, 2.0), row(16, 4, 0.7)])[0] == [(1, 15, 4), (16, 16, 0)]
    other_loses = [row(1, 4, 2.0), open_at_16, row(16, 8, 0.7)]
    assert schedule(other_loses)[0] == [(1, 16, 4)]
    all_lose = [row(1, 4, 2.0), row(16, 2, 0.6), row(16, 8, 0.7), row(64, 2, 1.0)]
    assert schedule(all_lose)[0] == [(1, 15, 4), (16, 64, 0)]
    assert schedule([row(1, 4, 1.0), row(16, 4, 2.0)])[1].startswith("nothing is shown at")


def test_cells_that_cannot_tell_are_all_counted() -> None:
    cells = [row(1, 4, 2.0), row(16, 4, 1.0), replace(row(64, 4, 1.2), speedup=Interval(1.2))]
    (doubt,) = map_page([Run(cells)]).doubts
    assert doubt.startswith("2 of 3 measured cells cannot tell whether it pays, 1 of them for")


def test_vllm_gets_the_ranges_and_the_largest_k() -> None:
    """And nothing of the draft."""
    written = for_vllm([(1, 3, 0), (4, 16, 5)])
    assert json.loads(written) == {
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 3, 0], [4, 16, 5]],
    }
