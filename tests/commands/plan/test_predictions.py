"""`plan costs=… acceptance=…` through the command line: planted costs predict what was not measured, without models."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import jsonschema
import pandas as pd
import pytest

import harness as package
from harness.config.errors import SettingError
from harness.engines.simulated.settings import SimulatedSettings
from harness.results.iteration_cost import Answers, IterationCost, Point, write_costs
from harness.results.statistics.interval import Interval
from in_process import Harness, only
from wording import mentions

PUBLISHED = Path(package.__file__).parents[1] / "benchmarks" / "published"
SWEEP = PUBLISHED / "qwen3.8_27b_b200_2026-10-06.csv"
SIMULATED = ["engine=simulated", "tokens=200"]


def rows_of(harness: Harness, *arguments: str) -> tuple[pd.DataFrame, str]:
    """The rows of a prediction, and its page."""
    outcome = harness("plan", *arguments, "hydra.run.dir=predicted")
    rows = pd.read_csv("predicted/plan.csv")
    Path("predicted/plan.csv").unlink()
    return rows, " ".join(outcome.stdout.split())


def test_a_sweep_predicts_the_speedup_on_texts_that_it_never_saw(harness: Harness) -> None:
    harness("latency", "-m", *SIMULATED, "K=2,4,8", "results.file=costs.csv")
    other = [*SIMULATED, "engine.acceptance=0.6", "seed=7"]
    harness("latency", "-m", *other, "K=2,4,8", "results.file=other.csv")
    rows, page = rows_of(harness, "costs=costs.csv", "acceptance=other.csv")
    rows = rows.set_index("num_draft_tokens")
    planted = SimulatedSettings(acceptance=0.6)
    assert [*rows.index] == [2, 4, 8]
    found = pd.read_csv("other.csv")
    after_first = (found.ms_per_token * 200 - found.time_to_first_token_ms) / 199
    both = after_first.groupby(found.run)
    measured = both.first() / both.last()
    measured.index = pd.Index(found.groupby("run").num_draft_tokens.last().astype(int))
    for k in rows.index:
        steps = planted.iteration_ms(k) / planted.step_ms
        assert rows.break_even_tokens[k] == pytest.approx(steps, rel=0.02)
        assert rows.iteration_ms[k] == pytest.approx(planted.iteration_ms(k), rel=0.02)
        assert rows.predicted_speedup_low[k] < measured[k] < rows.predicted_speedup_high[k]
        assert rows.measured_speedup[k] == pytest.approx(measured[k], rel=0.02)
    best = measured.idxmax()
    assert f"predicted at K={best}" in page
    assert "3 of 3 within 5 % of what was measured" in page
    assert "planted costs, no measurement" in page
    assert "intervals are over 15 prompts" in page


def test_the_published_sweep_is_predicted_by_one_command(harness: Harness) -> None:
    """Of Qwen3.8-27B on a B200: the cost from HumanEval, what math_reasoning yields."""
    asked = (f"costs={SWEEP}@HumanEval", f"acceptance={SWEEP}@math_reasoning")
    rows, page = rows_of(harness, *asked)
    assert "15 of 15 within 5 % of what was measured" in page
    assert "DSpark K=7 with 1 to 32 in flight: 3.88× to 2.25×" in page
    assert "MTP K=2 with 64 to 128 in flight: 1.59× to 1.30×" in page
    assert mentions(page, "DSpark has no price with 128 in flight", "1.9 times", "engine queues")
    errors = rows.predicted_speedup / rows.measured_speedup - 1
    assert len(rows) == 15
    assert errors.abs().max() < 0.05


@pytest.fixture
def table(tmp_path: Path) -> str:
    """A regular step of 20 ms; K=2, 4 and 8 take 25, 30 and 60 ms; nothing is known with several in flight but K=4."""
    lines = ["# mine", "k,in_flight,ms", ",1,20", "2,1,25", "4,1,30", "8,1,60", ",8,20", "4,8,40"]
    (tmp_path / "mine.csv").write_text("\n".join(lines) + "\n")
    return "costs=mine.csv"


@pytest.mark.parametrize(
    ("acceptance", "speedups"),
    [
        ("0.8", {2: 2.44 / 1.25, 4: 3.3616 / 1.5, 8: 4.328911 / 3}),
        # Further positions are unknown, and so are larger K.
        ("[0.8,0.5]", {2: 2.2 / 1.25}),
        ("[0.8,0.5,0.5,0.5]", {2: 2.2 / 1.25, 4: 2.5 / 1.5}),
        ("3@4", {4: 2.0}),
    ],
)
def test_what_typed_numbers_predict(
    harness: Harness, table: str, acceptance: str, speedups: dict[int, float]
) -> None:
    rows, page = rows_of(harness, table, f"acceptance={acceptance}")
    alone = rows.query("batch_size == 1").set_index("num_draft_tokens").predicted_speedup
    assert alone.to_dict() == pytest.approx(speedups)
    loaded = rows.query("batch_size == 8").set_index("num_draft_tokens").predicted_speedup
    assert loaded.to_dict() == pytest.approx({4: alone[4] * 1.5 / 2} if 4 in alone else {})
    assert "no interval is known" in page


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["acceptance=3@6"], "costs: has no price of K=6 with 1 in flight, but of K=2, 4, 8: measure K=6"),
        (["acceptance=7@4"], "acceptance=7@4: must be from 1 to 5 tokens per iteration at K=4"),
        (["acceptance=1.5"], "acceptance=1.5: must be above 0 and at most 1"),
        (["acceptance=[0.8,1.5]"], "must be above 0 and at most 1"),
        (["acceptance=./absent"], "acceptance=./absent: no such file or directory"),
        ([], "costs=mine.csv: needs acceptance=: what an iteration yields"),
        (["acceptance=mine.csv"], "acceptance: has no K"),
    ],
)  # fmt: skip
def test_mistakes(harness: Harness, table: str, arguments: list[str], complaint: str) -> None:
    assert complaint in harness.refused("plan", table, *arguments)


def test_costs_of_another_draft_are_refused(harness: Harness, table: str) -> None:
    asked = (f"costs={SWEEP}@HumanEval@MTP", f"acceptance={SWEEP}@math_reasoning@DSpark")
    assert "acceptance: is of DSpark, and costs of MTP" in harness.refused("plan", *asked)


def test_a_run_leaves_its_costs_and_they_are_read_again(harness: Harness) -> None:
    harness("latency", *SIMULATED, "K=4", "batch_size=2", "num_prompts=16")
    file = only("costs.json")
    content = json.loads(file.read_text())
    schema = Path(package.__file__).parent / "results" / "costs.schema.json"
    jsonschema.validate(content, json.loads(schema.read_text()))
    cost = IterationCost.from_json(content)
    assert [(point.width, point.rows) for point in cost.points] == [(1, 2), (5, 2)]
    of_file, _ = rows_of(harness, f"costs={file}", "acceptance=0.7")
    of_run, _ = rows_of(harness, f"costs={file.parent}", "acceptance=0.7")
    figures: list[Any] = ["num_draft_tokens", "batch_size", "predicted_speedup", "iteration_ms"]
    pd.testing.assert_frame_equal(of_file[figures], of_run[figures])
    file.write_text(json.dumps(content | {"version": 2}))
    assert "is no file of costs" in harness.refused("plan", f"costs={file}", "acceptance=0.7")


def test_a_map_has_prices_too(harness: Harness) -> None:
    grid = ("batch_sizes=[1,4]", "draft_tokens=[2,4]", "num_prompts=8")
    harness("map", *SIMULATED, *grid)
    directory = only("costs.json").parent
    rows, _ = rows_of(harness, f"costs={directory}", "acceptance=0.7")
    planted = SimulatedSettings()
    found = rows.set_index(["batch_size", "num_draft_tokens"]).break_even_tokens
    assert [*found.index] == [(1, 2), (1, 4), (4, 2), (4, 4)]
    for load, k in found.index:
        steps = planted.iteration_ms(k, load) / planted.iteration_ms(0, load)
        assert found[load, k] == pytest.approx(steps, rel=0.02)


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Costs of K=4 with 1 and 8 requests in flight, of runs with planted ones."""
    directory = tmp_path_factory.mktemp("loads")
    settings = SimulatedSettings()
    points = []
    for load in (1, 8):
        for k in (0, 4):
            ms = Interval(settings.iteration_ms(k, load))
            steps = Interval(ms.estimate / settings.iteration_ms(0, load))
            answers = Answers(8.0, 64, 3.36 if k else 1.0, load)
            points.append(Point(k + 1, load, ms, steps, answers=answers))
    write_costs(directory, IterationCost(points))
    return directory / "costs.json"


def test_requests_in_flight_between_those_that_were_measured(harness: Harness) -> None:
    """Costs with 1 and 8 in flight predict 4, on texts that accept less, as the engine then answers them."""
    load = ["engine=simulated", "K=4", "num_prompts=32"]
    for in_flight in (1, 8):
        harness("latency", *load, f"batch_size={in_flight}", "results.file=costs.csv")
    slo = "slo={ttft_ms: 20, itl_ms: 21}"
    other = ["engine.acceptance=0.6", "seed=7", "batch_size=4", f"engine.{slo}"]
    harness("latency", *load, *other, "results.file=other.csv")
    rows, page = rows_of(harness, "costs=costs.csv", "acceptance=other.csv", "batch_size=4", slo)
    (row,) = rows.to_dict("records")
    for arm in ("", "regular_"):
        for figure, most in (("tokens_per_second", 0.05), ("first_token_ms", 0.1)):
            predicted, measured = (
                row[f"{kind}_{arm}{figure}"] for kind in ("predicted", "measured")
            )
            assert predicted == pytest.approx(measured, rel=most), (arm, figure)
        shares = [row[f"{kind}_{arm}goodput_share"] for kind in ("predicted", "measured")]
        assert shares[0] == pytest.approx(shares[1], abs=0.2)
    assert row["predicted_goodput_share"] > row["predicted_regular_goodput_share"]
    assert row["predicted_speedup"] == pytest.approx(row["measured_speedup"], rel=0.05)
    assert "first token" in page
    assert "on the simulated engine's clock" in page


def test_requests_at_a_rate(harness: Harness, loads: Path) -> None:
    rows, page = rows_of(harness, f"costs={loads}", "acceptance=0.8", "rate=2")
    (row,) = rows.to_dict("records")
    assert row["predicted_tokens_per_second"] == pytest.approx(2 * 64, rel=0.03)
    assert 8 < row["predicted_first_token_ms"] < 40
    assert "at 2 requests per second" in page or "predicted at K=4" in page


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["batch_size=9"], "with 9 in flight, but with 1, 8 in flight: measure batch_size=9"),
        (["rate=20"], "has no price of what rate=20 keeps in flight: more than 8 in"),
        (["rate=1", "batch_size=2"], "batch_size=2: must be null with rate="),
        (["rate=0"], "rate=0.0: must be positive"),
        (["batch_size=2", "slo={ttft: 3}"], "slo={ttft: 3}: must be milliseconds by name, of ttft_ms and itl_ms"),
    ],
)  # fmt: skip
def test_loads_without_a_price_are_refused(
    harness: Harness, loads: Path, arguments: list[str], complaint: str
) -> None:
    asked = ("plan", f"costs={loads}", "acceptance=0.8", *arguments)
    assert complaint in harness.refused(*asked)


def test_a_load_beside_one_at_which_the_engine_queues_is_refused(loads: Path) -> None:
    cost = IterationCost.from_json(json.loads(loads.read_text()))
    queued = replace(cost, refused={8: "has no price with 8 in flight"}).between(5)
    with pytest.raises(SettingError, match="has no price with 8 in flight"):
        queued.best_k({4: 3.36}, 5)
    assert cost.between(4).steps_at(4, 4).estimate == pytest.approx(
        (4 * cost.steps_at(4, 1).estimate + 3 * cost.steps_at(4, 8).estimate) / 7
    )


def test_times_to_first_tokens_must_be_known(harness: Harness, table: str) -> None:
    asked = ("plan", table, "acceptance=3@4", "batch_size=2")
    assert "has no time to the first token of requests one at a time" in harness.refused(*asked)


# 10 iterations of K=4: 4 accept nothing, 3 two tokens, 3 all four.
YIELDS = {2: 1 + (6 * 2) / 10, 4: 1 + (3 * 2 + 3 * 4) / 10}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        # https://docs.vllm.ai/en/stable/features/speculative_decoding/acceptance_metrics/, two answers
        ("answers.json", [{"metrics": {"speculative_decoding": {"acceptance_histogram": [3, 0, 1, 0, 3]}}},
                          {"metrics": {"speculative_decoding": {"acceptance_histogram": [1, 0, 2, 0, 0]}}}]),
        # AIPerf's docs/tutorials/spec-decode-metrics.md: the sum counts, and not each request's again
        ("profile_export_aiperf.json", {"pooled_spec_decode_acceptance_histogram": {"0": 4, "2": 3, "4": 3},
                                        "records": [{"acceptance_histogram": {"0": 1}}]}),
        ("profile_export.jsonl", {"metadata": {}, "spec_decode_acceptance":
                                  {"acceptance_histogram": {"0": 4, "2": 3, "4": 3}, "num_spec_tokens": 4}}),
    ],
)  # fmt: skip
def test_histograms_of_other_programs(
    harness: Harness, table: str, name: str, content: Any
) -> None:
    Path(name).write_text(json.dumps(content))
    rows, _ = rows_of(harness, table, f"acceptance={name}")
    found = rows.query("batch_size == 1").set_index("num_draft_tokens")
    assert found.predicted_tokens_per_iteration.to_dict() == pytest.approx(YIELDS)


def test_a_server_says_what_it_accepts(harness: Harness, table: str) -> None:
    """The counters of vLLM of the same ten iterations."""
    by_position = [6, 6, 3, 3]
    lines = ['vllm:spec_decode_num_drafts_total{engine="0"} 10.0']
    for place, number in enumerate(by_position):
        labels = f'{{engine="0",position="{place}"}}'
        lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{labels} {number}.0")

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write("\n".join(lines).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        asked = (table, f"acceptance=http://127.0.0.1:{server.server_port}/v1")
        rows, _ = rows_of(harness, *asked)
        lines[:] = ["vllm:spec_decode_num_drafts_total 0.0"]
        assert "has counted no drafts yet" in harness.refused("plan", *asked)
        server.shutdown()
    found = rows.query("batch_size == 1").set_index("num_draft_tokens")
    assert found.predicted_tokens_per_iteration.to_dict() == pytest.approx(YIELDS)
    assert "shows no counters" in harness.refused("plan", *asked)


def test_several_acceptances_make_one_page(harness: Harness, table: str) -> None:
    outcome = harness("plan", "-m", table, "acceptance=0.7,0.9")
    shown = " ".join(outcome.stdout.split())
    assert re.search(r"0\.7: predicted .*0\.9: predicted", shown)


def test_another_run_of_the_model_or_machine_is_not_mixed_in(harness: Harness) -> None:
    harness("latency", *SIMULATED, "K=4")
    rows = pd.read_csv("results/latency.csv", dtype=str)
    other = rows.assign(run=rows.run + "x", devices="NVIDIA H100", measurement="other")
    pd.concat([rows.assign(devices="NVIDIA A100"), other]).to_csv("both.csv", index=False)
    complaint = harness.refused("plan", "costs=both.csv", "acceptance=0.7")
    assert "has runs that differ in devices: NVIDIA A100, NVIDIA H100" in complaint
