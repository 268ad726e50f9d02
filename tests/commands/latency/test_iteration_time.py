"""What an iteration costs, from planted rows whose fixed cost and cost per draft token are known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from harness.commands.latency.costs import iteration_line, predicted_by_k, times_table
from harness.commands.latency.page import latency_page
from harness.commands.latency.plots import latency_plots
from harness.commands.latency.ranking import ranked_runs
from harness.measuring.rows import LatencyRow
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run
from pages import short
from report_files import latency_run, over
from wording import mentions

STEP_MS = 22.0
FIRST_MS = 300.0
LENGTH = 65


def run_of(
    k: int,
    fixed: float,
    per_token: float,
    num_prompts: int = 12,
    noise: float = 0.0,
    jump: float = 0.0,
    **changes: Any,
) -> Run[LatencyRow]:
    """A run against a server in which an iteration takes `fixed + k × per_token` ms, give or take `noise`.

    Args:
        jump: added from K=8 on.
    """
    fixed += jump if k >= 8 else 0.0
    rng = np.random.default_rng(k)
    tokens = 1 + 0.5 * k
    prompts = []
    for place in range(num_prompts):
        own_tokens = tokens * rng.uniform(0.7, 1.3)
        iteration_ms = (fixed + k * per_token) * (1 + noise * rng.standard_normal())
        num_iterations = round((LENGTH - 1) / own_tokens)
        times = {"speculative": num_iterations * iteration_ms, "regular": (LENGTH - 1) * STEP_MS}
        prompts += [
            LatencyPromptRow(
                prompt_index=place, prompt_place=place, arm=arm, num_tokens=LENGTH, time_ms=FIRST_MS + time,
                time_to_first_token_ms=FIRST_MS, num_iterations=num_iterations if arm == "speculative" else None,
            )
            for arm, time in times.items()
        ]  # fmt: skip
    regular_ms = (FIRST_MS + (LENGTH - 1) * STEP_MS) / LENGTH
    decoding_ms = (LENGTH - 1) * (fixed + k * per_token) / tokens
    ms = (FIRST_MS + decoding_ms) / LENGTH
    figures: dict[str, Any] = {
        "engine": "server", "draft": "head", "draft_method": "eagle3", "num_prompts": num_prompts, "mean_proposed": k,
        "num_tokens": num_prompts * LENGTH, "time_to_first_token_ms": FIRST_MS, "tokens_per_iteration": tokens,
        "requests_per_second": 1.0, "draft_ms": None, "verify_ms": None, "predicted_speedup": None,
        "speedup_covers": over(num_prompts), "temperature": 0.0,
    }  # fmt: skip
    both = latency_run(k, regular_ms / ms, **figures | changes)
    times = dict(zip(("regular", "speculative"), (regular_ms, ms), strict=True))
    rows = [row.from_values(row.values() | {"ms_per_token": times[str(row.arm)]}) for row in both]
    run = Run(rows)
    run.prompt_rows = prompts
    return run


def sweep(fixed: float, per_token: float, ks: Sequence[int] = (2, 4, 8), **changes: Any) -> str:
    return iteration_line([run_of(k, fixed, per_token, **changes) for k in ks]) or ""


def test_the_planted_costs_are_found() -> None:
    line = sweep(21.4, 3.1)
    assert line == (
        "An iteration takes 21.4 ms (21.4 to 21.4) + 3.10 ms (3.10 to 3.10) per draft token"
        " (95 % intervals over 12 prompts); a regular step takes 22.0 ms: a draft token costs 14 % of a regular step:"
        " at a decode-only 2.38× one more gains only if over 34 % of iterations accept it."
    )


def test_a_draft_token_never_takes_less_than_no_time() -> None:
    line = iteration_line([run_of(k, 30.0, -0.2, noise=0.05) for k in (2, 4, 8)])
    assert line is not None
    assert "no measurable time per draft token" in line
    assert "-0" not in line


def test_runs_of_one_k_are_one_point_of_the_line() -> None:
    """A report may have runs of each K from several days, on which the machine was a few per cent faster or slower."""
    days = (0.94, 0.97, 1.02, 1.07)
    runs = [run_of(k, 21.4 * day, 3.1 * day, noise=0.01) for k in (2, 4, 6, 8) for day in days]
    line = iteration_line(runs) or ""
    assert "12 prompts and 4 runs" in line
    assert "no line" not in line
    bounds = re.findall(r"([\d.]+) ms \(([\d.]+) to ([\d.]+)\)", line)
    for (_, low, high), planted in zip(bounds, (21.4, 3.1), strict=True):
        assert float(low) < planted < float(high)
    stairs = [
        run_of(k, 21.4 * day, 3.1 * day, noise=0.01, jump=20.0)
        for k in (2, 4, 6, 8, 10)
        for day in days
    ]
    line = iteration_line(stairs) or ""
    assert line.count("at K=6") == 1
    assert mentions(line, "from 7 to 9 tokens")


@pytest.mark.parametrize(
    "changes",
    [
        {"ks": (4,)},
        {"ks": (4, 4)},
        # Rows of a batch wait for the longest.
        {"batch_size": 4, "engine": "local", "requests_per_second": None},
        # Iterations that drafted nothing are not counted.
        {"draft": "ngram-mod", "tokens_per_iteration": None},
        {"tokens_per_iteration": None, "mean_acceptance_length": None},
        # The first of two commands may draft too.
        {"draft": "second command"},
    ],
)
def test_where_an_iteration_has_no_known_time_nothing_is_said(changes: dict[str, Any]) -> None:
    assert sweep(21.4, 3.1, **changes) == ""


def test_of_a_pair_each_series_with_several_k_has_a_line() -> None:
    """The fastest first; one that is faster still has a single K."""
    slow = [run_of(k, 30.2, 3.1, temperature=1.0) for k in (2, 4, 8)]
    fast = [run_of(k, 21.4, 3.1) for k in (2, 4, 8)]
    single = run_of(8, 10.0, 3.1, temperature=0.5)
    text = short(latency_page([*fast, *slow, single]), 200)
    greedy, at_one = text.index("greedy\n"), text.index("temperature 1\n")
    assert (
        greedy
        < text.index("An iteration takes 21.4 ms")
        < at_one
        < text.index("An iteration takes 30.2 ms")
    )
    assert text.count("An iteration") == 2


def test_the_plot_shows_the_points_and_the_line_where_there_is_one() -> None:
    def labels(jump: float) -> tuple[list[str], list[float]]:
        runs = [run_of(k, 21.4, 3.1, jump=jump, noise=0.01) for k in (2, 4, 6, 8, 10)]
        (plot,) = latency_plots(ranked_runs(runs))["iteration"]
        (axes,) = plot.figure.axes
        handles, names = axes.get_legend_handles_labels()
        return names, [*handles[0].lines[0].get_ydata()]

    names, steps = labels(0.0)
    assert re.fullmatch(r"0\.9\d steps and 0\.1[34] per draft token", names[1])
    expected = [(21.4 + 3.1 * k) / STEP_MS for k in (2, 4, 6, 8, 10)]
    assert steps == pytest.approx(expected, rel=0.02)
    assert len(labels(12.0)[0]) == 1, "a staircase is no line"


LENGTHS = [1.9, 2.7, 3.3, 3.8]


def rows(verify: float, draft: float = 0.0, **changes: Any) -> tuple[LatencyRow, LatencyRow]:
    """A run with K=4 whose target step takes 10 ms.

    Args:
        verify, draft: the cost of a verification and of a draft step, in target steps.
    """
    speculative: dict[str, Any] = {
        "num_draft_tokens": 4,
        "mean_proposed": 4.0,
        "mean_num_draft_tokens": 4.0,
        "draft_ms": 40 * draft,
        "verify_ms": 10 * verify,
        "tokens_per_iteration_by_num_draft_tokens": LENGTHS,
    }
    row = LatencyRow.from_values({"arm": "speculative"} | speculative | changes)
    return LatencyRow(arm="regular", target_step_ms=10.0), row


def predicted(*args: Any, **changes: Any) -> list[float]:
    return [figure.estimate for figure in predicted_by_k(*rows(*args, **changes)).values()]


def by_k(pair: tuple[LatencyRow, LatencyRow]) -> str | None:
    lines = dict(row.cells for row in times_table(*pair).rows)
    return lines.get("by K")


def test_smaller_k_are_predicted_with_the_passes_of_their_width() -> None:
    """Three tokens cost what one costs, and five twice as much: K=2 verifies for nothing, K=3 for half."""
    on_a_line = [1.9 / 1.25, 2.7 / 1.5, 3.3 / 1.75, 3.8 / 2]
    assert predicted(2.0) == pytest.approx(on_a_line)
    passes = [10.0, 10.0, 10.0, None, 20.0]
    timed = [1.9, 2.7, 3.3 / 1.5, 3.8 / 2]
    assert predicted(2.0, pass_ms_by_width=passes) == pytest.approx(timed)
    # Wider passes than a verification change nothing.
    assert predicted(2.0, pass_ms_by_width=[*passes, 60.0]) == pytest.approx(timed)


@pytest.mark.parametrize("passes", [[10, 9.9, None, None, 10.01], [10, 14, None, None, 10.1]])
def test_noise_of_flat_passes_does_not_move_the_prediction(passes: list[float | None]) -> None:
    """Whatever a smaller K verifies, it costs 1 to 1.05 steps: K=1 gains 1.65 to 1.73."""
    values = predicted(1.05, 0.1, pass_ms_by_width=passes)
    assert 1.9 / 1.15 - 1e-9 <= values[0] <= 1.9 / 1.1 + 1e-9
    assert values[3] == pytest.approx(3.8 / 1.45)


def test_passes_that_contradict_each_other_predict_nothing() -> None:
    pair = rows(2.0, pass_ms_by_width=[10.0, 14.0, 16.0, None, 11.0])
    assert not predicted_by_k(*pair)
    assert by_k(pair) is None
    # Where a verification costs what a step does, no noise of its parts matters.
    assert predicted_by_k(*rows(1.1, pass_ms_by_width=[10, 14, 16, None, 11]))
    assert predicted_by_k(*rows(2.0, pass_ms_by_width=[10, 14, 13, None, 15]))
