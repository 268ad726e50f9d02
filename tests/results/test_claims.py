"""What must hold among published figures, and what does not have to."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from harness.results.acceptance import Acceptance
from harness.results.claims.judge import Judged, judge
from harness.results.claims.stated import NUMBERS, Printed, Stated


def row(place: str = "row 1", **cells: object) -> Stated:
    numbers = {}
    settings = {}
    for name, cell in cells.items():
        if name not in NUMBERS:
            settings[name] = str(cell)
        elif (number := Printed.read(name, str(cell))) is not None:
            numbers[name] = number
    return Stated(place, settings, numbers)


def verdicts(*rows: Stated) -> Mapping[str, str]:
    return {one.figure: one.verdict for one in judge(rows)}


def only(*rows: Stated) -> Judged:
    """The only claim that is not consistent."""
    (found,) = [one for one in judge(rows) if one.verdict != "consistent"]
    return found


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("1.95×", 1.945, 1.955),
        ("1.95x", 1.945, 1.955),
        ("3.2 tok/s", 3.15, 3.25),
        ("1,234", 1233.5, 1234.5),
        ("1,234.5 tokens/s", 1234.45, 1234.55),
        ("1,95", 1.945, 1.955),
        ("+45 %", 1.445, 1.455),
        ("45% faster", 1.445, 1.455),
        ("−32% (61 vs 90 tok/s)", 0.675, 0.685),
        ("1.31× to 1.42×", 1.305, 1.425),
        ("2.1-2.4", 2.05, 2.45),
        ("2.26 (2.07 to 2.50)", 2.255, 2.265),
        ("2.793 ± 0.061", 2.7925, 2.7935),
        ("**2.7x faster**", 2.65, 2.75),
        ("1e3", 500, 1500),
        (".5", 0.45, 0.55),
    ],
)
def test_a_number_stands_for_all_that_rounds_to_it(text: str, low: float, high: float) -> None:
    read = Printed.read("speedup", text)
    assert read is not None
    assert (read.low, read.high) == pytest.approx((low, high))


def test_what_is_behind_a_number_is_its_interval() -> None:
    read = Printed.read("speedup", "2.26 (95 % interval 2.07 to 2.50)")
    assert read is not None
    assert read.interval == pytest.approx((2.065, 2.505))
    found = only(row(speedup="2.62 (2.07 to 2.50)"))
    assert (found.verdict, "its own interval" in found.reason) == ("unlikely", True)
    spread = Printed.read("speedup", "2.26 ± 0.10")
    assert spread is not None
    assert spread.interval == pytest.approx((2.15, 2.37), abs=0.01)
    between = Printed.read("speedup", "2.1 to 2.3 ± 0.10")
    assert between is not None
    assert between.interval == pytest.approx((1.945, 2.455))


@pytest.mark.parametrize("text", ["", "n/a", "–", "-", "None", "nan", " N/A "])
def test_an_empty_cell_states_nothing(text: str) -> None:
    assert Printed.read("speedup", text) is None


@pytest.mark.parametrize("text", ["fast", "3.2 k tok/s", "-2", "2..5 x y", "K=4", "1.2.3"])
def test_anything_else_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        Printed.read("speedup", text)


def test_a_rate_below_zero_is_read_and_impossible() -> None:
    read = Printed.read("acceptance_rate", "-5 %")
    assert read is not None
    assert (read.low, read.high) == pytest.approx((-0.055, -0.045))
    assert only(row(acceptance_rate="-5 %")).verdict == "impossible"


# Limits worked out by hand from the definitions in `IDENTITIES`: the last cell within each and the first beyond.
LIMITS: list[tuple[str, dict[str, object], dict[str, str]]] = [
    (
        "speedup",
        {"num_draft_tokens": 4},
        {"5.0×": "consistent", "5.2×": "unlikely", "5.4×": "impossible"},
    ),
    ("speedup", {"num_draft_tokens": 4, "draft": "lookup"}, {"5.4×": "not stated"}),
    # An answer of 32 tokens loses 1.5 · 20 ÷ 63 of 4 draft tokens, and up to twice that as more are accepted.
    (
        "acceptance_rate",
        {"tokens_per_iteration": "1.30", "num_draft_tokens": 4},
        {"7.5 %": "consistent", "8.7 %": "consistent", "9.4 %": "unlikely"},
    ),
    ("mean_num_draft_tokens", {"num_draft_tokens": 4}, {"4.00": "consistent", "4.10": "unlikely"}),
    ("mean_num_draft_tokens", {"num_draft_tokens": 4}, {"3.05": "consistent", "3.00": "unlikely"}),
    # 3 · 31 ÷ 32 tokens per iteration without the first one.
    (
        "acceptance_rate",
        {"tokens_per_iteration": "3.00", "num_draft_tokens": 4},
        {"48.0 %": "consistent", "46.5 %": "unlikely"},
    ),
    (
        "acceptance_rate",
        {"num_accepted": 60, "num_drafted": 100},
        {"60.0 %": "consistent", "61.0 %": "unlikely"},
    ),
    # 80 % of 0.5 accepted of 10.
    (
        "acceptance_rate",
        {"tokens_per_iteration": "1.50", "num_draft_tokens": 10, "draft": "suffix"},
        {"4.0 %": "consistent", "3.8 %": "unlikely"},
    ),
    # 2 accepted of 3 tested, or of 2.5 where half of the iterations accept all; ÷ 4 proposed.
    (
        "conditional_acceptance_rate",
        {"tokens_per_iteration": "3.00", "num_draft_tokens": 4, "max_new_tokens": 1000},
        {
            **{"66.7 %": "consistent", "80.0 %": "consistent", "50.0 %": "consistent"},
            **{"66.0 %": "unlikely", "81.0 %": "unlikely", "52.0 %": "unlikely"},
        },
    ),
    (
        "user_tokens_per_second",
        {"ms_per_token": "10.00"},
        {"86.0": "consistent", "84.0": "unlikely", "114.0": "consistent", "116.0": "unlikely"},
    ),
]


@pytest.mark.parametrize(("figure", "stated", "cells"), LIMITS)
def test_limits_of_a_figure(figure: str, stated: dict[str, object], cells: dict[str, str]) -> None:
    assert {cell: verdicts(row(**stated, **{figure: cell}))[figure] for cell in cells} == cells


def test_counts_are_exact_and_at_least_one() -> None:
    read = Printed.read("num_prompts", "80")
    assert read is not None
    assert (read.low, read.high) == (80, 80)
    with pytest.raises(ValueError, match="0"):
        Printed.read("batch_size", "0")


def test_an_iteration_yields_one_to_k_plus_one_tokens() -> None:
    assert verdicts(row(tokens_per_iteration="5.00", num_draft_tokens=4)) == {
        "tokens_per_iteration": "consistent"
    }
    # All of 32 tokens in 31 ÷ 5 iterations: the first one comes from reading the prompt.
    assert only(row(tokens_per_iteration="5.16", num_draft_tokens=4)).verdict == "unlikely"
    found = only(row(tokens_per_iteration="5.18", num_draft_tokens=4))
    assert found.verdict == "impossible"
    assert "K=4" in found.reason
    # Lengths without the target's own token may be.
    assert only(row(tokens_per_iteration="0.98", num_draft_tokens=4)).verdict == "not stated"
    # Without K there is nothing to hold against it.
    without = only(row(tokens_per_iteration="9.1"))
    assert (without.verdict, without.reason) == ("not stated", "cannot be checked without K")


def test_both_definitions_of_the_rate_are_tried() -> None:
    """Of iterations whose counts are known, K the same in each."""
    rng = random.Random(0)
    for k in (2, 4, 8):
        for chance in (0.3, 0.7, 0.95):
            outcomes = []
            for _ in range(500):
                accepted = next((n for n in range(k) if rng.random() > chance), k)
                outcomes.append((k, accepted))
            counts = Acceptance.of(outcomes)
            stated = {
                "tokens_per_iteration": f"{counts.mean_acceptance_length:.2f}",
                "num_draft_tokens": k,
                "max_new_tokens": 1000,
            }
            proposed = f"{100 * (counts.acceptance_rate or 0):.1f} %"
            num_tested = sum(min(accepted + 1, k) for _, accepted in outcomes)
            tested = f"{100 * counts.num_accepted / num_tested:.1f} %"
            by_name = {
                name: {one.figure: one for one in judge([row(acceptance_rate=rate, **stated)])}
                for name, rate in (("proposed", proposed), ("tested", tested))
            }
            reasons = {name: one["acceptance_rate"].reason for name, one in by_name.items()}
            assert reasons["proposed"] == "is accepted ÷ proposed"
            if chance < 0.9:
                assert reasons["tested"] == "is accepted ÷ tested, not ÷ proposed"
            wrong = f"{100 * (counts.acceptance_rate or 0) * 0.9:.1f} %"
            assert only(row(acceptance_rate=wrong, **stated)).verdict == "unlikely"


def test_other_definitions_of_a_rate_are_not_impossible() -> None:
    """3 of 4 first draft tokens, 2 of 60 in a tree; 1 of 4 with a length that leaves out the target's own token."""
    first = row(tokens_per_iteration="1.90", num_draft_tokens=4, acceptance_rate="75 %")
    without = row(tokens_per_iteration="1.00", num_draft_tokens=4, acceptance_rate="25 %")
    tree = row(tokens_per_iteration="3.00", num_draft_tokens=5, acceptance_rate="3.3 %")
    assert [only(one).verdict for one in (first, tree)] == ["unlikely"] * 2
    assert {*verdicts(without).values()} == {"consistent"}
    assert only(row(acceptance_rate="120 %")).verdict == "impossible"


def test_a_rate_of_another_definition_than_the_others_is_unlikely() -> None:
    rows = [
        row("row 1", tokens_per_iteration="2.00", num_draft_tokens=2, acceptance_rate="50 %"),
        row("row 2", tokens_per_iteration="2.40", num_draft_tokens=4, acceptance_rate="35 %"),
        # 1.6 accepted of up to 2.6 tested.
        row("row 3", tokens_per_iteration="2.60", num_draft_tokens=6, acceptance_rate="64 %"),
    ]
    found = only(*rows)
    assert (found.row.place, found.verdict) == ("row 3", "unlikely")
    # A table that has it throughout is consistent.
    assert set(verdicts(rows[2])) == {"tokens_per_iteration", "acceptance_rate"}
    assert {*verdicts(rows[2]).values()} == {"consistent"}


def test_where_k_varies_a_rate_has_a_lower_limit_alone() -> None:
    stated = {"draft": "lookup", "num_draft_tokens": 10, "tokens_per_iteration": "1.50"}
    assert verdicts(row(acceptance_rate="60 %", **stated))["acceptance_rate"] == "consistent"
    assert verdicts(row(acceptance_rate="3 %", **stated))["acceptance_rate"] == "unlikely"


def test_proposed_tokens_link_length_and_rate_exactly() -> None:
    stated = {"draft": "lookup", "num_draft_tokens": 10, "tokens_per_iteration": "1.50"}
    fitting = row(acceptance_rate="25.0 %", mean_num_draft_tokens="2.00", **stated)
    assert verdicts(fitting)["acceptance_rate"] == "consistent"
    found = judge([row(acceptance_rate="28.0 %", mean_num_draft_tokens="2.00", **stated)])
    assert "unlikely" in {one.verdict for one in found}


def test_answers_that_end_leave_room_for_fewer_draft_tokens() -> None:
    """Of 4 draft tokens in each iteration 2 accepted are 50 %, of fewer in the last ones more."""
    stated = {"tokens_per_iteration": "3.00", "num_draft_tokens": 4, "acceptance_rate": "53 %"}
    assert verdicts(row(max_new_tokens=48, **stated))["acceptance_rate"] == "consistent"
    assert verdicts(row(max_new_tokens=1000, **stated))["acceptance_rate"] == "unlikely"


def test_a_speedup_is_at_most_the_tokens_per_iteration() -> None:
    assert verdicts(row(speedup="2.40×", tokens_per_iteration="2.4"))["speedup"] == "consistent"
    found = judge([row(speedup="2.60×", tokens_per_iteration="2.4")])
    assert {one.figure: one.verdict for one in found}["speedup"] == "unlikely"
    # More than a length without the target's own token explains.
    assert verdicts(row(speedup="3.60×", tokens_per_iteration="2.4"))["speedup"] == "impossible"
    arms = {"engine": "ours", "regular_engine": "theirs"}
    other = row(speedup="3.60×", tokens_per_iteration="2.4", **arms)
    assert verdicts(other)["speedup"] == "not stated"
    # Its interval reaches down to what is possible.
    noisy = row(speedup="2.60× (2.30 to 2.90)", tokens_per_iteration="2.4")
    assert verdicts(noisy)["speedup"] == "consistent"


def test_speeds_and_speedup_agree() -> None:
    arms = {"tokens_per_second": "365", "regular_tokens_per_second": "187"}
    assert verdicts(row(speedup="1.95×", **arms))["speedup"] == "consistent"
    averaged = next(one for one in judge([row(speedup="2.01×", **arms)]) if one.figure == "speedup")
    assert averaged.verdict == "consistent"
    assert "mean of prompts' ratios" in averaged.reason
    assert verdicts(row(speedup="1.89×", **arms))["speedup"] == "consistent"
    assert verdicts(row(speedup="2.40×", **arms))["speedup"] == "unlikely"
    # Where all other rows have the ratio itself, one that is near it is odd.
    table = [row(f"row {place}", speedup="1.95×", **arms) for place in (1, 2)]
    found = {one.verdict for one in judge([*table, row("row 3", speedup="2.01×", **arms)])}
    assert "unlikely" in found
    times = {"ms_per_token": "4.00", "regular_ms_per_token": "8.00"}
    assert verdicts(row(speedup="2.00", **times))["speedup"] == "consistent"
    assert verdicts(row(speedup="2.50", **times))["speedup"] == "unlikely"
    speed = {"tokens_per_second": "250.0", "ms_per_token": "4.00"}
    assert verdicts(row(batch_size=1, **speed)) == {"tokens_per_second": "consistent"}
    assert verdicts(row(batch_size=2, **speed)) == {"tokens_per_second": "unlikely"}
    of_batch = {"tokens_per_second": "500.0", "ms_per_token": "4.00"}
    assert verdicts(row(batch_size=2, **of_batch)) == {"tokens_per_second": "consistent"}
    # With an unknown number of requests at once, nothing follows.
    assert verdicts(row(**speed)) == {"tokens_per_second": "not stated"}


def test_weights_are_read_no_faster_than_the_memory_gives_them() -> None:
    """Qwen3 8B: 15.1 GB at 3,900 GB/s, of the fastest H100, are 258 per second."""
    stated = {"model": "Qwen/Qwen3-8B", "devices": "1× H100", "batch_size": 1, "dtype": "bfloat16"}
    possible = row(regular_tokens_per_second="158.34", **stated)
    assert verdicts(possible) == {"regular_tokens_per_second": "consistent"}
    found = only(row(regular_tokens_per_second="270", **stated))
    assert found.verdict == "impossible"
    assert "15.1 GB" in found.reason
    for other in (
        {"devices": "2× H100"},
        {"devices": "H100 x8"},
        {"devices": "H100 (TP=2)"},
        {"dtype": "FP8"},
        {"batch_size": 4},
        {"dtype": ""},
    ):
        loose = row(regular_tokens_per_second="270", **{**stated, **other})
        assert verdicts(loose) == {"regular_tokens_per_second": "consistent"}, other
    fp8 = row(regular_tokens_per_second="530", **{**stated, "dtype": "FP8"})
    assert verdicts(fp8) == {"regular_tokens_per_second": "impossible"}
    pruned = row(regular_tokens_per_second="270", **{**stated, "model": "Qwen/Qwen3-8B-pruned-3B"})
    assert verdicts(pruned) == {"regular_tokens_per_second": "not stated"}
    # Experts: not all of the weights are read.
    unknown = row(regular_tokens_per_second="270", **{**stated, "model": "openai/gpt-oss-120b"})
    assert verdicts(unknown) == {"regular_tokens_per_second": "not stated"}


def curve(*lengths: float, **stated: object) -> list[Stated]:
    return [
        row(f"row {k}", tokens_per_iteration=f"{length:.2f}", num_draft_tokens=k, **stated)
        for k, length in enumerate(lengths, start=1)
    ]


def test_a_curve_does_not_fall_and_its_steps_do_not_grow() -> None:
    stated = {"num_prompts": 80, "max_new_tokens": 4096}
    honest = curve(1.84, 2.50, 2.99, 3.33, 3.61, 3.78, 3.91, 4.06, **stated)
    assert {*verdicts(*honest).values()} == {"consistent"}
    falling = only(*curve(1.92, 2.61, 2.97, 3.00, 3.10, 3.16, 3.00, 3.11, **stated))
    assert (falling.row.place, falling.verdict) == ("row 7", "unlikely")
    assert "0.15 below 3.16 at K=6" in falling.reason
    growing = only(*curve(1.84, 2.52, 2.93, 3.41, 3.59, 3.57, 3.85, 4.06, **stated))
    assert "0.17 below the line from K=5 to K=8" in growing.reason
    # At K=0 there is one token.
    assert "0.49 below the line from K=0 to K=2" in only(*curve(1.20, 2.40, **stated)).reason
    # Heads that draft blocks may, and few prompts may.
    blocks = curve(1.84, 2.51, 3.01, 3.36, 3.61, 3.77, 3.73, 3.47, draft="dspark", **stated)
    judged = {one.row.place: one for one in judge(blocks)}
    assert {one.verdict for one in judged.values()} == {"consistent"}
    assert "heads that draft blocks" in judged["row 8"].reason
    few = curve(1.92, 2.61, 2.97, 3.00, 3.10, 3.16, 3.00, 3.11, num_prompts=5)
    assert {*verdicts(*few).values()} == {"consistent"}
    unknown = judge(curve(1.92, 2.61, 2.97, 3.00, 3.10, 3.16, 3.00, 3.11))
    assert unknown[6].verdict == "not stated"
    assert "the number of prompts is not stated" in unknown[6].reason


def test_an_impossible_point_is_no_evidence_against_others() -> None:
    rows = curve(1.80, 4.90, 2.60, num_prompts=80)
    assert only(*rows).row.place == "row 2"


def test_rows_of_other_settings_are_other_curves() -> None:
    stated = {"num_prompts": 80, "max_new_tokens": 4096}
    two = [
        *curve(1.84, 2.50, 2.99, prompts="gsm8k", **stated),
        row("row 9", tokens_per_iteration="2.10", num_draft_tokens=4, prompts="qa", **stated),
    ]
    assert {*verdicts(*two).values()} == {"consistent"}


def test_prompts_limit_how_exact_a_length_is() -> None:
    stated = {"num_draft_tokens": 4, "num_prompts": 8, "max_new_tokens": 64}
    (found,) = judge([row(tokens_per_iteration="2.26", **stated)])
    assert "8 prompts leave ± 0.1 at least" in found.reason
    # Where nearly all draft tokens are accepted, answers hardly differ.
    assert {*verdicts(row(tokens_per_iteration="4.95 (4.93 to 4.97)", **stated)).values()} == {
        "consistent"
    }
    narrow = only(row(tokens_per_iteration="2.26 (2.25 to 2.27)", **stated))
    assert narrow.verdict == "unlikely"


def test_arms_that_differ_in_more_than_the_draft() -> None:
    stated = {"latency_s": "0.62 s", "regular_latency_s": "1.66 s", "speedup": "2.7×"}
    arms = {"engine": "SGLang", "regular_engine": "vLLM", "dtype": "FP8", "regular_dtype": "BF16"}
    assert verdicts(row(**stated)) == {"speedup": "consistent"}
    found = only(row(**stated, **arms))
    assert found.verdict == "not stated"
    assert "engine (vLLM, SGLang) and precision (BF16, FP8)" in found.reason


def test_a_larger_k_adds_no_more_proposals_than_a_smaller() -> None:
    """Of a draft that often has few tokens: 0.84, 1.64 and 2.43 at K = 2, 4 and 6, the second also called K = 3."""

    def proposals(*ks: int, middle: str = "1.64", draft: str = "lookup") -> list[Stated]:
        return [
            row(f"row {k}", draft=draft, num_draft_tokens=k, mean_num_draft_tokens=text)
            for k, text in zip(ks, ("0.84", middle, "2.43"), strict=True)
        ]

    assert {one.verdict for one in judge(proposals(2, 4, 6))} == {"not stated"}
    found = [one for one in judge(proposals(2, 3, 6)) if one.verdict == "unlikely"]
    assert [one.row.place for one in found] == ["row 2"]
    assert "the line from K=0 to K=3" in found[0].reason
    below = [one for one in judge(proposals(2, 4, 6, middle="0.90")) if one.verdict == "unlikely"]
    assert "is below 1.64, the line from K=2 to K=6" in below[0].reason
    # Of a tree K is a depth, and two rows of one K differ in something that is not read.
    for honest in (proposals(2, 4, 6, middle="0.90", draft="tree"), proposals(2, 2, 6)):
        assert "unlikely" not in {one.verdict for one in judge(honest)}


def test_a_ratio_is_exact_in_the_same_way_in_every_row() -> None:
    """A speed-up of means of ms/token: 2.10 for 2.01 in one row, which the ratio of tokens/s allows."""

    def means(place: int, speedup: str) -> Stated:
        return row(
            f"row {place}",
            speedup=speedup,
            num_draft_tokens=place,
            ms_per_token="10.00",
            regular_ms_per_token="20.10",
            tokens_per_second=f"{102 + place}.0",
            regular_tokens_per_second="50.0",
        )

    rows = [means(place, "2.01×") for place in (2, 4, 6)]
    assert "unlikely" not in {one.verdict for one in judge(rows)}
    found = only_unlikely([*rows[:2], means(6, "2.10×")])
    assert (found.row.place, found.figure) == ("row 6", "speedup")
    assert "as it is in every other row" in found.reason


def only_unlikely(rows: list[Stated]) -> Judged:
    (found,) = [one for one in judge(rows) if one.verdict == "unlikely"]
    return found
