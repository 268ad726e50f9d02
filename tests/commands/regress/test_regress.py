"""`regress` through CSV files: simulated measurements before a change and after it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.commands.read_runs import every_run
from harness.commands.regress.comparisons import compared_runs
from harness.measuring.rows import LatencyRow
from harness.results.files import append_rows
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run
from in_process import Harness
from report_files import answer_row, eval_run, latency_run, over, run_id
from wording import mentions

NUM_PROMPTS = 10
# Standard deviations, of logarithms: between runs, and of a prompt within a run.
RUN_NOISE, WITHIN = 0.01, 0.02

Floats = NDArray[np.float64]


def planted_runs(
    rng: np.random.Generator,
    hardness: Floats,
    slowdown: float = 0.0,
    num_runs: int = 3,
    load: float = 1.0,
    **settings: Any,
) -> list[Run[LatencyRow]]:
    """Runs of one measurement; the seed differs.

    Args:
        slowdown: of the speculative arm.
        load: multiplies the times of both arms.
    """
    runs = []
    for number in range(num_runs):
        run_offset = rng.normal(0, RUN_NOISE)
        speculative = (
            load
            * hardness
            * (1 + slowdown)
            * np.exp(run_offset + rng.normal(0, WITHIN, len(hardness)))
        )
        regular = 2 * load * hardness * np.exp(rng.normal(0, WITHIN, len(hardness)))
        run = Run(latency_run(seed=number, repeat=number + 1, **settings))
        for arm, times in (("regular", regular), ("speculative", speculative)):
            run.prompt_rows += prompt_rows(str(run.last.run), arm, times)
        runs.append(run)
    return runs


def write_runs(directory: Path, *planted: Any, **settings: Any) -> Path:
    """The runs of `planted_runs` in a directory, as `latency` writes them."""
    for run in planted_runs(*planted, **settings):
        append_rows(directory / "latency.csv", run.rows)
        append_rows(directory / "latency_prompts.csv", run.prompt_rows)
    return directory


def prompt_rows(
    run: str, arm: str, times: Sequence[float], **acceptance: float | None
) -> list[LatencyPromptRow]:
    told = (
        {"mean_acceptance_length": 3.0, "tokens_per_iteration": 3.0, "num_iterations": 3}
        | acceptance
        if arm == "speculative"
        else {}
    )
    return [
        LatencyPromptRow(
            run=run, prompt_index=index, prompt_place=index, prompt=f"p{index}", arm=arm, completion="c", num_tokens=10,
            time_ms=10 * time, time_to_first_token_ms=1.0, unit=index, **told,
        )
        for index, time in enumerate(times)
    ]  # fmt: skip


def write_run(
    into: Path,
    times: Sequence[float],
    change: Callable[[LatencyPromptRow], LatencyPromptRow] = lambda row: row,
    **settings: Any,
) -> None:
    """One run whose arms have these times, and what is changed of its prompts' rows."""
    rows = latency_run(**settings)
    prompts = [
        change(row)
        for arm in ("regular", "speculative")
        for row in prompt_rows(str(rows[0].run), arm, times)
    ]
    append_rows(into / "latency.csv", rows)
    append_rows(into / "latency_prompts.csv", prompts)


def write_sides(
    tmp_path: Path,
    before: Mapping[str, Any] = MappingProxyType({}),
    after: Mapping[str, Any] = MappingProxyType({}),
    **shared: Any,
) -> list[str]:
    """Arguments for runs before and after, with settings of `write_runs` for either side and for both."""
    rng = np.random.default_rng(0)
    sides = []
    for name, side_changes in (("before", before), ("after", after)):
        write_runs(tmp_path / name, rng, np.ones(15), **shared, **side_changes)
        sides.append(f"{name}={tmp_path / name}")
    return sides


def test_runs_in_four_blocks_are_compared() -> None:
    rng = np.random.default_rng(0)
    hardness = np.full(4, 10.0)
    sides = [
        planted_runs(rng, hardness, slowdown, 5, speedup_covers=over(4, "block"))
        for slowdown in (0.0, 0.2)
    ]
    ms, *_ = compared_runs(*sides, margin=0.02)
    assert (ms.verdict, ms.statement.why) == ("worse", "")
    assert str(ms.comparison.change.covers).startswith("4 blocks and 5 + 5 runs")


@pytest.mark.parametrize(
    ("num_common", "verdict", "reason"),
    [
        (8, "worse", ""),
        (7, "cannot tell", "7 prompts on both sides, and 8 needed"),
        (0, "cannot tell", "no prompt has a time on both sides"),
    ],
)
def test_prompts_of_both_sides_are_compared(num_common: int, verdict: str, reason: str) -> None:
    rng = np.random.default_rng(0)
    before, after = (planted_runs(rng, np.ones(15), slowdown) for slowdown in (0.0, 0.2))
    for run in after:
        run.prompt_rows = [
            replace(row, prompt_place=row.place + 15 - num_common) for row in run.prompt_rows
        ]
    ms, *_ = compared_runs(before, after, margin=0.02)
    assert (ms.verdict, ms.statement.why) == (verdict, reason)


def test_what_is_not_known_is_not_called_the_same() -> None:
    """The programs are identical, and their runs differ by more than the margin."""
    rng = np.random.default_rng(0)
    before, after = (planted_runs(rng, np.ones(15)) for _ in range(2))
    *_, tokens, ms = compared_runs(before, after, margin=0.0001)
    assert "tokens per iteration, no worse: 1.00 (1.00 to 1.00)" in tokens.as_reason
    assert "ms per iteration, cannot tell: 0.98 (0.96 to 1.01)" in ms.as_reason


def test_significance_is_adjusted_for_the_number_of_comparisons() -> None:
    """A slow-down with a p-value of 0.03 alone, among six measurements that did not change."""
    rng = np.random.default_rng(1)
    sides: list[list[Run[LatencyRow]]] = [[], []]
    for top_k in range(1, 8):
        slowdown = 0.025 if top_k == 1 else 0.0
        sides[0] += planted_runs(rng, np.ones(NUM_PROMPTS), top_k=top_k)
        sides[1] += planted_runs(rng, np.ones(NUM_PROMPTS), slowdown, top_k=top_k)
    alone, *_ = compared_runs(sides[0][:3], sides[1][:3], margin=0.0)
    assert (alone.verdict, alone.statement.why) == ("worse", "")
    among, *_ = compared_runs(*sides, margin=0.0)
    assert among.comparison == alone.comparison
    assert among.verdict == "cannot tell"
    assert among.statement.why == "not significant among 28 comparisons"


@pytest.fixture
def sides(tmp_path: Path) -> list[str]:
    """Arguments for 5 runs before, and 5 after, that are 10 % slower."""
    rng = np.random.default_rng(5)
    hardness = rng.lognormal(0, 0.4, 15)
    before = write_runs(tmp_path / "before", rng, hardness, num_runs=5, commit="a" * 40)
    after = write_runs(tmp_path / "after", rng, hardness, 0.1, num_runs=5, commit="b" * 40)
    return [f"before={before}", f"after={after}"]


def test_a_slow_down_has_exit_code_1(harness: Harness, sides: list[str], tmp_path: Path) -> None:
    outcome = harness("regress", "details=true", *reversed(sides), "margin=0.02", code=1)
    assert "15 prompts and 5 + 5 runs" in outcome.stdout
    assert "commit differs: aaaaaaaaa before, bbbbbbbbb after" in outcome.stdout
    assert "worse: ms per token +" in outcome.complaint
    swapped = [sides[1].replace("after=", "before="), sides[0].replace("before=", "after=")]
    assert "faster" in harness("regress", "details=true", *swapped).stdout


def test_one_run_on_each_side_says_nothing_about_times_without_noise(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    hardness = rng.lognormal(0, 0.4, 15)
    before = write_runs(tmp_path / "before", rng, hardness, num_runs=1)
    after = write_runs(tmp_path / "after", rng, hardness, 0.2, num_runs=1)
    noise = write_runs(tmp_path / "aa", rng, hardness, num_runs=10)
    asked = [f"before={before}", f"after={after}"]
    outcome = harness("regress", "details=true", *asked, code=3)
    assert "slower" not in outcome.stdout
    monkeypatch.setenv("COLUMNS", "80")
    short = harness("regress", str(before), str(after), code=3).stdout
    assert len(short.splitlines()) <= 15
    assert max(map(len, short.splitlines())) <= 80
    outcome = harness("regress", "details=true", *asked, f"noise={noise}", code=1)
    assert "slower" in outcome.stdout
    for name, settings in (("k", {"batch_size": 64}), ("device", {"devices": "NVIDIA H200"})):
        noise = write_runs(tmp_path / name, rng, hardness, num_runs=10, **settings)
        outcome = harness("regress", "details=true", *asked, f"noise={noise}", code=3)
        assert "was not used" in outcome.stdout


def test_tokens_per_iteration_are_compared_seed_by_seed(tmp_path: Path) -> None:
    """What differs between seeds is the same on both sides, and no noise."""
    lengths = np.random.default_rng(0).uniform(1.5, 4.5, (3, 10))
    for name, factor in (("before", 1.0), ("same", 1.0), ("less", 0.95)):
        for seed, prompt_values in enumerate(factor * lengths):

            def drafted(
                row: LatencyPromptRow, prompt_values: Floats = prompt_values
            ) -> LatencyPromptRow:
                return replace(row, tokens_per_iteration=prompt_values[row.prompt_index])

            write_run(tmp_path / name, np.ones(10), drafted, seed=seed, repeat=seed + 1)
    before, same, less = (every_run(tmp_path / name).runs for name in ("before", "same", "less"))
    figure = compared_runs(before, same[1:], margin=0.02)[2]
    assert figure.change == "+0.0 %"
    assert figure.mean_before == pytest.approx(figure.mean_after)
    verdicts = [compared_runs(before, after, margin=0.02)[2].verdict for after in (same, less)]
    assert verdicts == ["no worse", "worse"]


def test_the_first_line_names_the_measurement_that_is_worse(
    harness: Harness, tmp_path: Path
) -> None:
    """K=4 takes 15 % longer after the change, and K=2 does not."""
    rng = np.random.default_rng(0)
    for side, k, slowdown in (
        *(("before", 2, 0.0), ("before", 4, 0.0)),
        *(("after", 2, 0.0), ("after", 4, 0.15)),
    ):
        write_runs(tmp_path / side, rng, np.ones(15), slowdown, 5, num_draft_tokens=k)
    outcome = harness("regress", str(tmp_path / "before"), str(tmp_path / "after"), code=1)
    for printed in (" ".join(outcome.stdout.split()), outcome.complaint):
        assert re.search(r"worse: 13B with 7B, K=4: ms per token \+1[0-9.]+ %", printed)
        assert "K=2: " not in printed.partition("95 % intervals")[0]


def test_accuracy_is_compared_question_by_question(harness: Harness, tmp_path: Path) -> None:
    limits = {"before": (0, 60), "after": (0, 40), "same": (0, 60), "others": (100, 60)}
    for name, (first, limit) in limits.items():
        rows = eval_run(seeds=(0,))
        append_rows(tmp_path / name / "eval.csv", rows)
        (tmp_path / name / "environment.json").write_text("{}")
        answers = [answer_row(rows[0].run, first + n, n < limit) for n in range(100)]
        append_rows(tmp_path / name / "eval_prompts.csv", answers)
    asked = [f"before={tmp_path}/before/eval.csv", f"after={tmp_path}/after/eval.csv"]
    outcome = harness("regress", "details=true", *asked, code=1)
    assert "accuracy -20.0 points" in outcome.complaint
    harness("regress", "details=true", asked[0], f"after={tmp_path}/same/eval.csv", "margin=0.1")
    outcome = harness("regress", asked[0], f"after={tmp_path}/others/eval.csv", code=3)
    assert "no question was answered on both sides" in outcome.stdout


def test_greedy_copies_of_a_question_count_once(harness: Harness, tmp_path: Path) -> None:
    """20 questions, each asked five times, are no 100 questions: `eval` counts them once."""
    for name, limit in (("before", 12), ("after", 9)):
        rows = eval_run(seeds=(0,), temperature=0)
        append_rows(tmp_path / name / "eval.csv", rows)
        (tmp_path / name / "environment.json").write_text("{}")
        answers = [
            answer_row(rows[0].run, index, index % 20 < limit, a=index % 20) for index in range(100)
        ]
        append_rows(tmp_path / name / "eval_prompts.csv", answers)
    outcome = harness(
        "regress", "details=true", f"before={tmp_path}/before", f"after={tmp_path}/after", code=3
    )
    assert "cannot tell" in outcome.stdout


def test_wrong_arguments(harness: Harness, sides: list[str], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    other = write_runs(tmp_path / "other", rng, np.ones(15), top_k=7)
    append_rows(tmp_path / "failed.csv", latency_run(status="failed", run=run_id()))
    assert "before: must be set" in harness.refused("regress")
    assert "margin=-1" in harness.refused("regress", *sides, "margin=-1")
    assert "did you mean after?" in harness.refused("regress", "aftr=x")
    assert "must be true or false" in harness.refused("regress", "details=yes")
    assert "differ in top_k (0, 7). " in harness.refused("regress", sides[0], f"after={other}")
    assert "no such file" in harness.refused("regress", sides[0], "after=absent.csv")
    assert "no complete run" in harness.refused("regress", sides[0], f"after={tmp_path}/failed.csv")
    single = write_runs(tmp_path / "single", rng, np.ones(15), num_runs=1)
    assert "two runs" in harness.refused("regress", *sides, f"noise={single}")


_BUSY = {"processor_share": 0.66, "load": 1.5}
_QUIET = {"processor_share": 0.99}
_NO_VERDICT = {"status": "no_verdict", "error": "one drafts", "ms_per_token": 50.0, "slowdown": 0.3}
_LOADED = "99 % of the CPU time it wanted before, 66 % after"
INCOMPARABLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "disturbed": ({}, {"processor_share": 0.2}, "after: 3 of 3 runs drifted, or shared the"),
    "another K": (
        {"url": "http://a/v1", "mean_proposed": 4.0},
        {"url": "http://a/v1", "mean_proposed": 2.0},
        "4 draft tokens per iteration before, 2 after",
    ),
    "other work": ({"num_tokens": 960}, {"num_tokens": 320}, "before generated 960 tokens, after"),
    "no verdict": ({}, _NO_VERDICT, "after: no verdict: one drafts"),
    "a load": (_QUIET, _BUSY, _LOADED),
    "a drift": ({}, {"drifted": True, "load": 1.5}, "0 of 3 runs before were disturbed, 3 of 3"),
}


@pytest.mark.parametrize("case", INCOMPARABLE)
def test_sides_that_cannot_be_compared_have_no_figures(
    harness: Harness, tmp_path: Path, case: str
) -> None:
    before, after, reason = INCOMPARABLE[case]
    outcome = harness("regress", "details=true", *write_sides(tmp_path, before, after), code=3)
    shown = " ".join(outcome.stdout.split())
    assert reason in shown
    assert outcome.complaint.startswith("cannot tell whether it is worse")
    # Neither figures of what is refused, nor a step that cannot help.
    assert not {"slower", "faster", "nan", "Next"} & set(shown.split())


def test_the_newest_runs_are_named_where_none_has_the_same_settings(
    harness: Harness, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    before = write_runs(tmp_path / "before", rng, np.ones(15), draft="1B", draft_repository="x/1B")
    after = write_runs(tmp_path / "after", rng, np.ones(15), draft_repository="y/7B")
    line = harness.refused("regress", f"before={before}", f"after={after}")
    assert mentions(line, "no run with the settings of one in")
    assert "differ in draft (1B, 7B), draft_repository (x/1B, y/7B). " in line


def test_another_build_of_a_server_is_what_is_compared(harness: Harness, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, flags in (("before", {}), ("after", {"engine.first_command": ["--threads", "2"]})):
        settings = {"engine.start_command": f"./{name}/llama-server", "engine.rate": 2} | flags
        columns = {"server": f"llama.cpp {name}", "server_command": [f"./{name}/llama-server -m x"]}
        write_runs(tmp_path / name, rng, np.ones(15), settings=settings, **columns)
    sides = [f"before={tmp_path}/before", f"after={tmp_path}/after"]
    outcome = harness("regress", "details=true", "margin=0.5", *sides)
    shown = " ".join(outcome.stdout.split())
    assert mentions(shown, "3 + 3 runs", "server differs: llama.cpp before before")
    for settings, differing in ({"engine.rate": 3}, "(2, 3)"), ({}, "(2, none)"):
        other_rate = write_runs(tmp_path / differing, rng, np.ones(15), settings=settings)
        line = harness.refused("regress", sides[0], f"after={other_rate}")
        assert f"differ in engine.rate {differing}. " in line


def test_what_one_side_alone_measured_is_not_compared(harness: Harness, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for side, loads in (("before", (1, 2, 4)), ("after", (1, 2))):
        for load in loads:
            write_runs(tmp_path / side, rng, np.ones(15), batch_size=load)
    sides = str(tmp_path / "before"), str(tmp_path / "after")
    shown = " ".join(harness("regress", *sides, "margin=0.5").stdout.split())
    assert shown.startswith("2 measurements · margin 50.0 %")
    assert "Why 13B with 7B, K=4: 3.30" in shown
    assert "Only measured before, so not compared: 1 combination of settings." in shown


def test_runs_on_both_sides_count_before_alone(harness: Harness, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    hardness = np.ones(15)
    both = write_runs(tmp_path / "both", rng, hardness, num_runs=5)
    assert "has no run that before= lacks" in harness.refused(
        "regress", f"before={both}", f"after={both}"
    )
    write_runs(both, rng, hardness, 0.1, num_runs=5)
    before = tmp_path / "before"
    for run in every_run(both).runs[:5]:
        append_rows(before / "latency.csv", run.rows)
        append_rows(before / "latency_prompts.csv", run.prompt_rows)
    outcome = harness("regress", "details=true", f"before={before}", f"after={both}", code=1)
    assert "5 + 5 runs" in outcome.stdout
    assert "left out of after: 5 runs" in outcome.stdout


def test_before_and_after_are_the_runs_own_figures(harness: Harness, tmp_path: Path) -> None:
    """2.34 as a mean over laps is not the 1.78 that the run's own page shows."""
    sides = write_sides(tmp_path, speedup=1.777, tokens_per_iteration=3.97)
    shown = harness("regress", "details=true", *sides, "margin=0.5").stdout
    # Before and after, in the answer and in the details; tokens per iteration also in the reason.
    assert (shown.count("1.777"), shown.count("3.97")) == (2, 4)


@pytest.mark.parametrize("time_ms", [-5.0, math.inf])
def test_impossible_times_name_their_file(harness: Harness, tmp_path: Path, time_ms: float) -> None:
    write_run(tmp_path / "before", np.ones(10))
    write_run(tmp_path / "after", np.ones(10), lambda row: replace(row, time_ms=time_ms))
    sides = [f"before={tmp_path / 'before'}", f"after={tmp_path / 'after'}"]
    shown = " ".join(harness("regress", "details=true", *sides, code=3).stdout.split())
    assert "the times in the prompts' files cannot be read" in shown
    assert "after" in shown


def test_changes_are_those_of_all_tokens_and_parts_multiply_to_them(tmp_path: Path) -> None:
    """The wait for the first token grows: of short answers that is half of the time, of all tokens a tenth. The long
    answers accept less, in iterations that cost less.
    """
    lengths = [4, 256] * 8
    num_decoded = sum(lengths) - len(lengths)
    iterations = {
        "before": [math.ceil((length - 1) / 3) for length in lengths],
        "after": [math.ceil((length - 1) / (2.3 if length > 4 else 3)) for length in lengths],
    }
    yields = {name: num_decoded / sum(numbers) for name, numbers in iterations.items()}
    costs = {name: 5 * num_decoded / sum(numbers) for name, numbers in iterations.items()}
    for name, first_ms in (("before", 300), ("after", 600)):
        rows = latency_run(tokens_per_iteration=yields[name])
        append_rows(tmp_path / name / "latency.csv", rows)
        prompts = []
        for arm, step_ms in (("regular", 10), ("speculative", 5)):
            for index, length in enumerate(lengths):
                number = iterations[name][index] if arm == "speculative" else None
                prompts.append(
                    LatencyPromptRow(
                        run=rows[0].run, prompt_index=index, prompt_place=index, prompt=f"p{index}", arm=arm,
                        completion="c", unit=index,
                        num_tokens=length, time_ms=first_ms + step_ms * (length - 1), time_to_first_token_ms=first_ms,
                        num_iterations=number, tokens_per_iteration=number and (length - 1) / number,
                    )
                )  # fmt: skip
        append_rows(tmp_path / name / "latency_prompts.csv", prompts)
    before, after = (every_run(tmp_path / name).runs for name in ("before", "after"))
    compared = compared_runs(before, after, margin=0.02)
    found = {one.figure.name: one.comparison for one in compared}
    ms = {
        (first_ms, step_ms): sum(first_ms + step_ms * (length - 1) for length in lengths)
        for first_ms in (300, 600)
        for step_ms in (10, 5)
    }
    change = found["ms per token"].change
    assert change.estimate == pytest.approx(ms[600, 5] / ms[300, 5])
    speedups = [ms[first_ms, 10] / ms[first_ms, 5] for first_ms in (600, 300)]
    assert found["speed-up"].change.estimate == pytest.approx(speedups[0] / speedups[1])
    ratio = yields["after"] / yields["before"]
    assert found["tokens per iteration"].change.estimate == pytest.approx(ratio)
    # Time after the first token is what it was. One run on each side says nothing about the noise of times.
    for words in (
        f"{yields['before']:.2f} → {yields['after']:.2f} tokens per iteration, {ratio:.2f} (",
        f"{costs['before']:.1f} → {costs['after']:.1f} ms per iteration, cannot tell: {ratio:.2f} (",
    ):
        assert words in f"{compared[-2].as_reason}; {compared[-1].as_reason}"
