"""`plan costs=… acceptance=…` through the command line: planted costs predict what was not measured, without models."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pandas as pd
import pytest

import harness as package
from harness.commands.plan.record import TypedAcceptance
from harness.commands.read_prices import read_prices
from harness.config.acceptance_math import length_in_answers
from harness.config.errors import SettingError
from harness.engines.registry import ENGINES
from harness.results.files import append_rows
from harness.results.price.value import IterationCost
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.statistics.interval import Interval
from in_process import Harness, only
from report_files import latency_run, write
from wording import mentions

PUBLISHED = Path(package.__file__).parents[1] / "benchmarks" / "published"
SWEEP = PUBLISHED / "qwen3.8_27b_b200_2026-10-06.csv"
SimulatedSettings: Any = ENGINES["simulated"].settings
SIMULATED = ["engine=simulated", "tokens=200"]


def test_a_rate_is_typed_as_a_share_or_in_percent() -> None:
    rates = [TypedAcceptance.read(typed).rates for typed in ("0.7", "70%")]
    assert rates[1] == pytest.approx(rates[0])
    assert TypedAcceptance.read("0%").rates[0] == 0
    assert TypedAcceptance.read("70%.csv").path == "70%.csv"


def rows_of(harness: Harness, *arguments: str) -> tuple[pd.DataFrame, str]:
    """The rows of a prediction, and its page."""
    outcome = harness("plan", *arguments, "hydra.run.dir=predicted")
    rows = pd.read_csv("predicted/plan.csv")
    shutil.rmtree("predicted")
    return rows, " ".join(outcome.stdout.split())


def truth(settings: Any, k: int, num_tokens: int) -> float:
    """The speed-up of decoding answers of so many tokens, by the expected time of what is left after each token."""
    expected_ms = [0.0]
    for left in range(1, num_tokens):
        most = min(k, left - 1)
        rates = [*settings.acceptance_by_position, *[settings.acceptance_by_position[-1]] * k][
            :most
        ]
        reached = np.cumprod([1.0, *rates])
        chances = [*(reached[:-1] - reached[1:]), reached[-1]]
        further = sum(
            chance * expected_ms[left - 1 - accepted] for accepted, chance in enumerate(chances)
        )
        expected_ms.append(settings.iteration_ms(most) + further)
    return (num_tokens - 1) * settings.iteration_ms(0) / expected_ms[-1]


KS = (2, 4, 6, 8, 10)


@pytest.mark.parametrize(
    ("planted", "typed", "tokens"),
    [(0.9, "0.9", 24), ((0.95, 0.9, 0.6, 0.5), "[0.95,0.9,0.6,0.5]", 48)],
)
def test_predictions_hold_the_planted_truth_of_answers_as_long_as_the_prices(
    harness: Harness, planted: Any, typed: str, tokens: int
) -> None:
    """Where passes get slower at nine tokens. The intervals are those of costs, of texts that accept less."""
    jumps = {9: 8.0}
    sweep = ["engine=simulated", "engine.jumps={9: 8.0}", f"tokens={tokens}", "num_prompts=24"]
    harness("latency", "-m", *sweep, f"K={','.join(map(str, KS))}", "results.file=costs.csv")
    rows, _ = rows_of(harness, "costs=costs.csv", f"acceptance={typed}")
    settings = SimulatedSettings(acceptance=planted, jumps=jumps)
    for row in rows.itertuples():
        expected = truth(settings, row.num_draft_tokens, tokens)
        half = row.predicted_speedup_high / row.predicted_speedup
        assert abs(math.log(row.predicted_speedup / expected)) < 1.5 * math.log(half), row


def test_yields_of_texts_of_another_length_are_those_of_answers_as_long_as_the_prices(
    harness: Harness,
) -> None:
    asked = ["engine=simulated", "K=6", "engine.prompts_differ=0", "num_prompts=100"]
    harness("latency", *asked, "tokens=24", "results.file=costs.csv")
    harness("latency", *asked, "tokens=200", "engine.acceptance=0.9", "results.file=other.csv")
    settings = SimulatedSettings(acceptance=0.9)
    for more, tokens in ((), 24), (("tokens=200",), 200), (("tokens=64",), 64):
        rows, _ = rows_of(harness, "costs=costs.csv", "acceptance=other.csv", *more)
        [row] = rows.to_dict("records")
        assert row["max_new_tokens"] == tokens
        yielded = simulated_length(0.9, 6, tokens)
        assert row["predicted_tokens_per_iteration"] == pytest.approx(yielded, rel=0.02)
    rows, _ = rows_of(harness, "costs=costs.csv", "acceptance=other.csv")
    assert rows.predicted_speedup[0] == pytest.approx(truth(settings, 6, 24), rel=0.02)


def simulated_length(rate: float, k: int, num_tokens: int, num_answers: int = 4000) -> float:
    """Tokens per iteration of answers that are decoded one draft token after the other; the first token is the
    prompt's.
    """
    rng = np.random.default_rng(0)
    num_iterations = 0
    for _ in range(num_answers):
        left = num_tokens - 1
        while left > 0:
            num_drafted = min(k, left - 1)
            rejected = np.flatnonzero(rng.random(num_drafted) >= rate)
            left -= 1 + (rejected[0] if rejected.size else num_drafted)
            num_iterations += 1
    return num_answers * (num_tokens - 1) / num_iterations


@pytest.mark.parametrize(("rate", "k", "num_tokens"), [(0.8, 4, 9), (0.6, 2, 5), (0.9, 6, 24)])
def test_tokens_per_iteration_of_short_answers_are_those_of_answers(
    rate: float, k: int, num_tokens: int
) -> None:
    simulated = simulated_length(rate, k, num_tokens)
    assert length_in_answers([rate], k, num_tokens) == pytest.approx(simulated, rel=0.01)


def test_two_decoded_tokens_take_one_iteration_or_two() -> None:
    assert length_in_answers([0.8], 4, 3) == pytest.approx(2 / (0.8 * 1 + 0.2 * 2))


def test_lengths_that_no_answer_has_take_no_time() -> None:
    assert length_in_answers([0.8], 4, 1e308) == pytest.approx(sum(0.8**i for i in range(5)), 1e-3)


def test_texts_that_were_read_are_yields_of_their_length(harness: Harness, table: str) -> None:
    """Nine texts of nine tokens, of which the prompt gives the first."""
    rows = []
    for k in (2, 4):
        tokens = Interval(length_in_answers([0.8], k, 9))
        read = {"num_draft_tokens": k, "num_texts": 9, "num_tokens": 72, "draft": "a"}
        rows.append(AcceptanceRow(run="1", status="ok", tokens_per_iteration=tokens, **read))
    append_rows(Path("read.csv"), rows)
    predicted, _ = rows_of(harness, table, "acceptance=read.csv", "tokens=200")
    expected = [length_in_answers([0.8], k, 200) for k in (2, 4, 4)]
    assert [*predicted.predicted_tokens_per_iteration] == pytest.approx(expected, rel=1e-6)


def test_what_was_measured_with_answers_of_another_length_is_not_held_against_it(
    harness: Harness,
) -> None:
    """The same planted costs: all that differs is how many tokens an answer has."""
    for name, length in (("short", 8), ("long", 96)):
        planted = ["engine=simulated", "K=2", f"max_new_tokens={length}", "num_prompts=12"]
        harness("latency", *planted, f"results.file={name}.csv")
    rows, page = rows_of(harness, "costs=short.csv", "acceptance=long.csv")
    assert rows.measured_speedup.isna().all()
    assert "of what was measured" not in page
    rows, _ = rows_of(harness, "costs=short.csv", "acceptance=long.csv", "tokens=96")
    assert rows.predicted_speedup[0] == pytest.approx(rows.measured_speedup[0], rel=0.05)


def test_a_k_without_a_price_is_named(harness: Harness, table: str) -> None:
    asked = [table, "acceptance=0.8", "batch_size=1"]
    named = "No price or no yield of K=16, but of K=2, 4, 8: measure K=16."
    assert named in harness("plan", *asked, "K=16").stdout
    assert "measure K=" not in harness("plan", *asked, "K=8").stdout.partition("Next")[0]


def test_planted_costs_of_a_map_are_no_measurement(harness: Harness) -> None:
    cells = ["batch_sizes=[4]", "draft_tokens=[2]", "num_prompts=10"]
    harness("map", "engine=simulated", *cells, "hydra.run.dir=cells")
    outcome = harness("plan", "costs=cells", "acceptance=0.8")
    assert mentions(outcome.stdout, "planted costs, no measurement", "at K=2 with 4 in flight")
    # At least as many prompts as were asked for.
    assert (pd.read_csv("cells/map.csv").num_prompts.dropna() >= 10).all()


def test_the_published_sweep_is_predicted_by_one_command(harness: Harness) -> None:
    """Of Qwen3.8-27B on a B200: the cost from HumanEval, what math_reasoning yields."""
    asked = (f"costs={SWEEP}@HumanEval", f"acceptance={SWEEP}@math_reasoning")
    rows, page = rows_of(harness, *asked)
    assert mentions(page, "DSpark has no price with 128 in flight", "1.9 times", "queueing")
    errors = rows.predicted_speedup / rows.measured_speedup - 1
    assert len(rows) == 15
    assert (errors.abs() < 0.05).sum() == 14
    assert errors.abs().max() < 0.052


@pytest.fixture
def table(tmp_path: Path) -> str:
    """A regular step of 20 ms; K=2, 4 and 8 take 25, 30 and 60 ms; nothing is known with several in flight but K=4."""
    lines = ["# mine", "k,in_flight,ms", ",1,20", "2,1,25", "4,1,30", "8,1,60", ",8,20", "4,8,40"]
    (tmp_path / "mine.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "untimed.csv").write_text("k,ms_per_token\n,20\n4,9\n")
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
    rows, _ = rows_of(harness, table, f"acceptance={acceptance}")
    alone = rows.query("batch_size == 1").set_index("num_draft_tokens").predicted_speedup
    assert alone.to_dict() == pytest.approx(speedups)
    loaded = rows.query("batch_size == 8").set_index("num_draft_tokens").predicted_speedup
    assert loaded.to_dict() == pytest.approx({4: alone[4] * 1.5 / 2} if 4 in alone else {})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["acceptance=3@6"], "costs: has no price of K=6 with 1 in flight, but of K=2, 4, 8: measure K=6"),
        (["acceptance=7@4"], "acceptance=7@4: must be from 1 to 5 tokens per iteration at K=4"),
        (["acceptance=1.5"], "acceptance=1.5: must be above 0 and at most 1"),
        (["acceptance=./absent"], "acceptance=./absent: no such file or directory"),
        ([], "costs=mine.csv: needs acceptance=: what an iteration yields"),
        ([f"costs={SWEEP}@HumanEval@MTP", f"acceptance={SWEEP}@math_reasoning@DSpark"],
         "acceptance: has nothing of MTP, only of DSpark"),
        (["acceptance=mine.csv"], "acceptance: has no tokens per iteration of any K"),
        (["costs=untimed.csv", "acceptance=0.8"], "costs: has no time of an iteration with a draft: ms, or"),
        (["acceptance=0.8", "batch_size=9"], "with 9 in flight, but with 1, 8 in flight: measure batch_size=9"),
    ],
)  # fmt: skip
def test_mistakes(harness: Harness, table: str, arguments: list[str], complaint: str) -> None:
    costs = [] if any(word.startswith("costs=") for word in arguments) else [table]
    assert complaint in harness.refused("plan", *costs, *arguments)


def test_rows_say_whose_costs_they_are_of_and_no_length_that_nobody_knows(
    harness: Harness, table: str
) -> None:
    Path("other.csv").write_text("k,ms,low,high\n,20,19,21\n4,30,28,32\n")
    outcome = harness("plan", "-m", f"{table},other.csv", "acceptance=3.2@4", "tokens=8")
    page = " ".join(outcome.stdout.split())
    assert page.startswith("2 runs mine.csv with 3.2@4: 2.13× predicted at K=4 with 1 in flight"), (
        page
    )
    assert "other.csv with 3.2@4: 2.13×" in page
    assert "speed-ups are of decoding, without" in page
    rows = pd.concat(map(pd.read_csv, Path().rglob("plan.csv")))
    assert (rows.predicted_tokens_per_iteration == 3.2).all()
    unknown: list[Any] = ["max_new_tokens", "engine", "repository", "chat_template"]
    assert rows[unknown].isna().all(axis=None)


@pytest.mark.parametrize(
    ("swept", "differs"),
    [
        ("engine.step_ms=20,60", "differ in settings: {}, {'engine.step_ms': 60.0}"),
        ("tokens=8,16", "differ in max_new_tokens: 8, 16"),
    ],
)
def test_runs_that_differ_in_more_than_k_and_load_are_no_one_price_nor_yield(
    harness: Harness, swept: str, differs: str
) -> None:
    asked = ["engine=simulated", "num_prompts=8", "K=4"]
    harness("latency", "-m", *asked, swept, "results.file=two.csv")
    harness("latency", *asked, "results.file=one.csv")
    assert differs in harness.refused("plan", "costs=two.csv", "acceptance=one.csv")
    assert differs in harness.refused("plan", "costs=one.csv", "acceptance=two.csv")


def test_result_files_of_a_benchmark_are_costs_and_yields(tmp_path: Path) -> None:
    """Runs of both arms in one file: 8.0 ms for each of 2.00 tokens over 11.2 ms are 1.43 steps."""
    served = {"max_concurrency": 1, "output_throughput": 88.0, "mean_tpot_ms": 11.2}
    drafts = {"spec_decode_num_drafts": 6000, "spec_decode_draft_tokens": 12000}
    length = {"mean_tpot_ms": 8.0, "spec_decode_acceptance_length": 2.0}
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([served, served | drafts | length]))
    (cost,) = read_prices("costs", str(file)).costs.values()
    assert cost.at(2).steps.estimate == pytest.approx(16 / 11.2, rel=1e-3)
    assert read_prices("acceptance", str(file)).yields[""][2].estimate == pytest.approx(2, rel=1e-3)


def test_what_varies_with_k_is_no_other_setting(tmp_path: Path) -> None:
    """A server's command and what varies in it may name K; of its own draft the name is not known."""
    runs = []
    for k in (2, 4):
        settings = {"vary.k": k, "engine.start_command": f"vllm --k {k}"}
        runs.append(latency_run(k, settings=settings, draft="server"))
    file = write(tmp_path / "latency.csv", *runs)
    assert {name: set(ks) for name, ks in read_prices("acceptance", str(file)).yields.items()} == {
        "": {2, 4}
    }
    write(file, latency_run(8, settings={"vary.k": 4}, draft="server"))
    with pytest.raises(SettingError, match="differ in settings"):
        read_prices("acceptance", str(file))
    target = write(tmp_path / "target" / "latency.csv", latency_run(draft=None))
    with pytest.raises(SettingError, match="has no run of latency with a draft"):
        read_prices("costs", str(target))


def test_a_run_leaves_its_costs_and_they_are_read_again(harness: Harness) -> None:
    harness("latency", *SIMULATED, "K=4", "batch_size=2", "num_prompts=16")
    file = only("costs.json")
    content = json.loads(file.read_text())
    schema = Path(package.__file__).parent / "results" / "price" / "costs.schema.json"
    jsonschema.validate(content, json.loads(schema.read_text()))
    cost = IterationCost.from_json(content)
    assert [(point.width, point.rows) for point in cost.points] == [(1, 2), (5, 2)]
    file_rows, _ = rows_of(harness, f"costs={file}", "acceptance=0.7")
    run_rows, _ = rows_of(harness, f"costs={file.parent}", "acceptance=0.7")
    figures: list[Any] = ["num_draft_tokens", "batch_size", "predicted_speedup", "iteration_ms"]
    pd.testing.assert_frame_equal(file_rows[figures], run_rows[figures])
    # It would be compared with itself.
    own_rows, page = rows_of(harness, f"costs={file.parent}", f"acceptance={file.parent}")
    assert own_rows.measured_speedup.isna().all()
    assert "of what was measured" not in page
    harness("map", *SIMULATED, "batch_sizes=[1]", "draft_tokens=[4]", "hydra.run.dir=map")
    map_rows, _ = rows_of(harness, "costs=map", "acceptance=0.7")
    assert [*map_rows.iteration_ms] == pytest.approx(
        [SimulatedSettings().iteration_ms(4)], rel=0.02
    )
    Path("alone").mkdir()
    assert "holds no CSV file" in harness.refused("plan", "costs=alone", "acceptance=0.7")
    Path("alone", file.name).write_bytes(file.read_bytes())
    alone, _ = rows_of(harness, "costs=alone", "acceptance=0.7")
    pd.testing.assert_frame_equal(alone[figures], run_rows[figures])
    file.write_text(json.dumps(content | {"points": content["points"][:1]}))
    refused = harness.refused("plan", f"costs={file}", "acceptance=0.7")
    assert "costs: has no time of an iteration with a draft" in refused
    harness("latency", *SIMULATED, "draft=none", "hydra.run.dir=regular")
    assert not Path("regular", file.name).exists()
    for wrong in ({"version": 2}, {"refused": "x"}, {"points": [{"ms": True}]}, {"points": 1}):
        file.write_text(json.dumps(content | wrong))
        assert "is no file of costs" in harness.refused("plan", f"costs={file}", "acceptance=0.7")


def test_a_k_above_the_block_of_a_head_is_the_setting_below(harness: Harness) -> None:
    """It has no price of its own, and nothing above it is advised."""
    harness("latency", "-m", *SIMULATED, "K=4,7,8", "results.file=results/sweep.csv")
    rows = pd.read_csv("results/sweep.csv", dtype=str)
    is_above = (rows.arm == "speculative") & (rows.num_draft_tokens == "8")
    at_most = rows[(rows.arm == "speculative") & (rows.num_draft_tokens == "7")]
    rows.loc[is_above, "mean_num_draft_tokens"] = at_most.mean_num_draft_tokens.item()
    rows.to_csv("sweep.csv", index=False)
    predicted, page = rows_of(harness, "costs=sweep.csv", "acceptance=0.99")
    assert [*predicted.num_draft_tokens] == [4, 7]
    assert "K=8 drafts no more tokens than K=7" in page
    assert "measure K=7" in page
    assert "K=14" not in page
    page = harness("report", "sweep.csv").stdout
    assert "K=8 drafts no more tokens than K=7: both are one setting" in page
    assert "Without a verdict" not in page


def test_a_typed_rate_is_of_one_draft_and_what_drafted_nothing_has_no_price(
    harness: Harness,
) -> None:
    """Of one draft each iteration drafts K, of the other one in ten."""
    names = "few,good"
    for name in names.split(","):
        harness("latency", *SIMULATED, "K=4")
        rows = pd.read_csv("results/latency.csv", dtype=str)
        Path("results/latency.csv").unlink()
        rows["draft"] = rows.draft.where(rows.draft.isna(), name)
        if name == "few":
            rows["mean_num_draft_tokens"] = "0.4"
        rows.to_csv(f"{name}.csv", index=False)
    both = pd.concat([pd.read_csv(f"{name}.csv", dtype=str) for name in names.split(",")])
    both.to_csv("both.csv", index=False)
    rows, page = rows_of(harness, "costs=both.csv", "acceptance=0.7")
    assert [*rows.draft] == ["good"]
    assert "0.4 tokens were drafted of K=4" in page
    both["mean_num_draft_tokens"] = "3.9"
    both.to_csv("both.csv", index=False)
    refused = harness.refused("plan", "costs=both.csv", "acceptance=0.7")
    assert mentions(refused, "acceptance=0.7: is of one draft", "few, good", "costs=both.csv@few")
    rows, _ = rows_of(harness, "costs=both.csv@good", "acceptance=0.7")
    assert [*rows.draft] == ["good"]
