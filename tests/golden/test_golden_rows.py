"""Whole pages of planted rows, in full: what no quick run of a real pair shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from harness.commands.acceptance.page import acceptance_page
from harness.commands.compare.rows import CompareRow
from harness.commands.compare.tables import races_page, verdict
from harness.commands.eval.page import eval_page
from harness.commands.latency.page import latency_page
from harness.commands.pages import pages_about
from harness.commands.recovery.rows import RecoveryRow
from harness.commands.recovery.tables import recovery_page
from harness.commands.registry import measurement
from harness.config.command_line import Words
from harness.reporting.page import below_each_other, in_short
from harness.reporting.terminal import as_text
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.runs import Run
from harness.results.statistics.interval import NAN, Coverage, Interval
from pages import full, short
from report_files import eval_run, latency_run, over, prompt_rows

Changes = dict[str, Any]
SURE = {"speedup_covers": over(15)}
SEEDS = {"seeds": (0, 1)}
ONE = {"seeds": (0,), "num_different_prompts": 900, "published_accuracy": None}
BETTER = {
    "mcnemar_p_value": 0.01,
    "difference": 0.12,
    "difference_low": 0.11,
    "difference_high": 0.13,
}
EXACT = {"dtype": "float32", "temperature": 0.0, "identical_prompts": 990}
UNKNOWN = dict.fromkeys(
    ("difference", "difference_low", "difference_high", "ms_per_answer", "wald_high")
)
EVALS: dict[str, list[Changes]] = {
    "two seeds": [SEEDS],
    "greedy, and exact": [ONE | EXACT],
    "exact but quantized": [ONE | EXACT | {"quantization": "8bit", "num_parsed": 990}],
    "identical": [ONE | EXACT | {"identical_prompts": 1000, "num_resumed": 3, "accuracy": 1.0, "wald_high": 1.0}],
    "all questions": [ONE | {"num_prompts": 100, "operands": "1-20"}],
    "more than all": [ONE | {"num_prompts": 101, "operands": "1-20"}],
    "all asked": [ONE | {"num_prompts": 100, "num_different_prompts": 100, "operands": "1-10"}],
    "at the level": [ONE | {"mcnemar_p_value": 0.05, "difference": 0.005, "difference_low": 0.0}],
    "below the level": [SEEDS | {"mcnemar_p_value": 0.0499, "lossy": True, "lenience": 0.8}],
    "better": [ONE | BETTER | {"num_different_prompts": 1000}],
    "no difference at all": [ONE | BETTER | {"difference": 0.0, "difference_low": -0.01, "difference_high": 0.01}],
    "interrupted": [ONE | {"status": "interrupted", "accuracy": 0.0, "wald_high": 0.0}],
    "nothing to compare": [ONE | UNKNOWN],
    "without a draft": [ONE | {"draft": None, "identical_prompts": None, "temperature": 0.0}],
    "several": [SEEDS, ONE | {"draft": "a", "mcnemar_p_value": 0.01}, ONE | {"status": "failed", "error": "killed"}],
}  # fmt: skip


def test_no_page_says_none_where_a_value_is_meant() -> None:
    for file in Path(__file__).with_name("__snapshots__").glob("*.ambr"):
        pages = file.read_text(encoding="utf-8")
        assert re.findall(r".*\bNone\b(?! is | that ).*", pages) == [], file


@pytest.mark.parametrize("case", EVALS)
def test_an_evaluation(snapshot: SnapshotAssertion, case: str) -> None:
    Words.divide(["eval"]).note()
    runs = [eval_run(**changes) for changes in EVALS[case]]
    known = [Run([row for row in rows if row.draft or row.arm == "regular"]) for rows in runs]
    assert full(eval_page(known)) == snapshot


# Changes of both arms, and of the regular one.
HELD = {
    "identical_prompts": 15,
    "cached_tokens": 0,
    "foreign_tokens": 0,
    "drafted": True,
    "num_tokens": 960,
}
STEADY = {
    "drift": 1.0,
    "drifted": False,
    "lowest_gpu_clock_mhz": 1400,
    "num_throttled_units": 0,
    "other_gpu_processes": 0,
}
UNSURE = {"speedup": 1.02, "speedup_low": 0.99, "speedup_high": 1.05}
NO_BOUNDS = {"speedup_low": None, "speedup_high": None}
PRECISE = {"precision": 0.05, "stopped_by": "budget", "speedup_covers": over(15)}
COMMANDS = {
    "engine": "server",
    "server_command": ["vllm A", "vllm A -x"],
    "directory": "outputs/1",
    "url": "http://a/v1",
    "regular_url": "http://b/v1",
}
SLOWER = {"speedup": 0.9, "speedup_low": 0.8, "speedup_high": 0.95, "speedup_covers": over(15)}
UNKNOWN_COSTS = dict.fromkeys(
    "acceptance_rate tokens_per_iteration mean_acceptance_length predicted_speedup time_to_first_token_ms".split()
)
TWO_GPUS = {"weight_bytes": {"cuda:0": 1, "cuda:1": 1}, "draft_repository": "owner/7b"}
BUSY = {"load": 9.0, "num_cores": 2, "num_threads": 2, "target_step_ms": 100.0}
HARDLY = {"speedup": 0.87, "speedup_low": 0.57, "speedup_high": 1.33}
KNOWN_COSTS = {
    "target_step_ms": 100.0,
    "draft_ms": 40.0,
    "verify_ms": 110.0,
    "speedup_covers": over(15),
}
LATENCIES: dict[str, tuple[Changes, Changes]] = {
    "all held": (HELD | STEADY | {"processor_share": 0.9}, {"drafted": False}),
    "nothing held": (HELD | STEADY | {"drifted": True, "num_throttled_units": 1},
                     {"num_tokens": 961, "cached_tokens": 1, "foreign_tokens": 1}),
    "not known to hold": (HELD | STEADY | {"processor_share": 0.9, "foreign_tokens": None, "url": "http://a/v1"},
                          {"drafted": False, "held_back": True, "tokens_per_arrival": 9.0}),
    "starved": (STEADY | {"num_cores": 2, "processor_share": 0.8}, {}),
    "as precise as asked": (PRECISE | {"speedup_low": 1.91}, {}),
    "less precise": (PRECISE, {}),
    "all prompts": (PRECISE | {"stopped_by": "num_prompts", "precision": 0.01}, {}),
    "blocks": (PRECISE | {"stopped_by": "blocks", "speedup_covers": over(4, "block"), "precision": 0.01}, {}),
    "a budget": (PRECISE | NO_BOUNDS | {"speedup_covers": over(3), "settings": {"budget": "2min"}}, {}),
    "a server alone": (COMMANDS | {"regular_url": None, "server": "harness 1", "server_command": None}, {}),
    "a server alone of others": (COMMANDS | {"regular_url": None, "server": "vLLM 1"}, {}),
    "no verdict": ({"status": "no_verdict", "error": "the regular server drafts", "speedup": None}, {}),
    "laps": (UNSURE | {"speedup_covers": over(15, "lap"), "num_prompts": 31}, {}),
    "one command": (COMMANDS | {"server_command": ["vllm A", "vllm A"], "speedup_covers": over(15)}, {}),
    "more drafted than K": (COMMANDS | {"mean_proposed": 16.7, "speedup_covers": over(15)}, {}),
    "two commands": (COMMANDS | {"speedup_covers": over(15)}, {}),
    "blocks without an interval": (NO_BOUNDS | {"speedup_covers": over(1, "block")}, {}),
    "as many prompts as anybody measures": (UNSURE | {"speedup_covers": over(250), "num_prompts": 250}, {}),
    "more than that": (UNSURE | {"speedup_covers": over(251), "num_prompts": 251}, {}),
    "no difference to see": (UNSURE | {"speedup": 1.0, "speedup_covers": over(15)}, {}),
    "answers of one token": (UNSURE | {"speedup_covers": over(15), "max_new_tokens": 1}, {}),
    "runs": (UNSURE | {"speedup_covers": over(15, num_runs=3)}, {}),
    "no phases": ({"draft_ms": None}, {}),
    "slow": (SLOWER | {"mean_num_draft_tokens": 0.4}, {}),
    "the draft proposes nothing": (UNSURE | {"mean_num_draft_tokens": 0.0, "tokens_per_iteration": 1.0,
                                             "acceptance_rate": None, "speedup_covers": over(15)}, {}),
    "slow, and drafts seldom": (SLOWER | {"mean_num_draft_tokens": 0.02, "tokens_per_iteration": 1.02}, {}),
    "unknown": (UNKNOWN_COSTS, {}),
    "unknown, of a server": (UNKNOWN_COSTS | COMMANDS, {}),
    "impossible counts": (UNKNOWN_COSTS | COMMANDS | {"impossible_counts": "9 accepted of 8 draft tokens"}, {}),
    "nothing drafted": (UNKNOWN_COSTS | COMMANDS | {"drafted": False}, {}),
    "a regular step of a server": ({"requests_per_second": 1.0, "acceptance_rate": None}, {}),
    "failed": (NO_BOUNDS | {"status": "failed", "error": "wrong", "speedup_covers": over(1, "block")}, {}),
    "a pipeline of layers": (TWO_GPUS | {"num_cores": 2, "processor_share": 0.4}, {}),
    "a layer in main memory": (TWO_GPUS | {"weight_bytes": {"cuda:0": 1, "cpu": 1}}, {}),
    "too few batches": (NO_BOUNDS | {"speedup_covers": over(4, "batch"), "batch_size": 4}, {}),
    "too few prompts, asked again": (
        NO_BOUNDS | {"speedup_covers": over(3), "num_different_prompts": 3, "num_prompts_in_set": 3}, {}
    ),
    "too few conversations": (NO_BOUNDS | {"speedup_covers": over(3)}, {}),
    "one prompt": ({"num_different_prompts": 1, "speedup_covers": over(15)}, {}),
    "threads that wait": (BUSY | {"processor_share": 0.18, "speedup_covers": over(15)}, {}),
    "one thread that waits": (BUSY | {"processor_share": 0.18, "num_threads": 1, "speedup_covers": over(15)}, {}),
    "started servers that wait": (COMMANDS | BUSY | {"processor_share": 0.4, "url": None, "regular_url": None}, {}),
    "slow verification": (HARDLY | KNOWN_COSTS | {"verify_ms": 500.0}, {}),
    "slow beside others": (HARDLY | KNOWN_COSTS | BUSY | {"verify_ms": 500.0, "processor_share": 0.16}, {}),
    "a busy machine and servers elsewhere": (COMMANDS | BUSY | {"processor_share": 0.4, "server_command": None}, {}),
    "a busy machine and its own servers": (COMMANDS | BUSY | {"processor_share": 0.4, "url": "http://127.0.0.1:1/v1",
                                           "regular_url": "http://127.0.0.1:2/v1", "server_command": None}, {}),
    "a slow server": (COMMANDS | {"speedup": 0.8, "speedup_low": 0.7, "speedup_high": 0.9}, {}),
    "a command to show": (COMMANDS | {"speedup_covers": over(15), "num_tokens": 960}, {}),
}  # fmt: skip


ADDRESS = ["url=http://a/v1"]
TYPED = {
    "a server alone": ADDRESS, "a server alone of others": ADDRESS, "blocks without an interval": ["engine=simulated"],
    "a budget": ["precision=2%", "budget=30s"], "runs": ["precision=2%", "budget=30s", "prompts=english"],
}  # fmt: skip


@pytest.mark.parametrize("case", LATENCIES)
def test_a_latency(snapshot: SnapshotAssertion, case: str) -> None:
    Words.divide(["latency", *TYPED.get(case, ())]).note()
    both, regular_columns = LATENCIES[case]
    regular, speculative = latency_run(run="20261120T100000.000001-abcdef")
    first = regular.from_values(regular.values() | both | {"speedup": None} | regular_columns)
    second = speculative.from_values(speculative.values() | both)
    assert short(latency_page([Run([first, second])])) == snapshot


# Of the figures below the answer.
DETAILS: dict[str, Changes] = {
    "a target alone": {"draft": None},
    "costs are unknown": {"predicted_speedup": None, "draft_ms": None, "conditional_acceptance_rate": None},
    "little is known": UNKNOWN_COSTS | {"draft_ms": None, "time_to_first_token_ms": None},
    "answers that end by themselves": {
        "num_tokens": 261, "shortest_answer": 3, "batch_size": 2, "requests_per_second": 1.0,
    },
    "texts are equal": {"identical_prompts": 15, "differing_prompts": 0},
    "texts differ within rounding": {
        "identical_prompts": 1, "differing_prompts": 2, "margin_over_rounding": 0.3,
        "decode_speedup": 2.51, "decode_speedup_low": 2.4, "decode_speedup_high": 2.6,
    },
    "iterations that draft nothing": {"tokens_per_iteration": 1.1, "mean_acceptance_length": 1.5},
    "a batch has one time": {"batch_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("case", DETAILS)
def test_details_of_a_latency(snapshot: SnapshotAssertion, case: str) -> None:
    Words.divide(["latency"]).note()
    rows = latency_run(run="20261120T100000.000001-abcdef", model="mine", **SURE | DETAILS[case])
    regular, *speculative = rows
    unknown = dict.fromkeys(("speedup", "tokens_per_iteration", "mean_acceptance_length"))
    run = Run([regular.from_values(regular.values() | unknown), *speculative])
    run.prompt_rows = prompt_rows(rows, [("story", 40.0), ("sum", 80.0)])
    assert full(latency_page([run])) == snapshot


ALONE = {"draft": None, "num_draft_tokens": None}
SECOND = COMMANDS | {"draft": "second command"}
DRAFTS: list[Changes] = [{"draft": f"draft{number}"} for number in range(6)]
WIDE = SURE | {"speedup_low": 1.05, "speedup_high": 3.9}
LOSS_AT_99 = {"speedup_low": 0.5, "speedup_high": 0.99}
MANY: dict[str, list[tuple[float, Changes]]] = {
    "one gains most": [(3.0, DRAFTS[0] | SURE), *((1.3, draft | SURE) for draft in DRAFTS[1:])],
    "three rivals": [(2.0, draft | SURE) for draft in DRAFTS[:4]],
    "four rivals": [(2.0, draft | SURE) for draft in DRAFTS[:5]],
    "no draft": [(1.0, ALONE), (1.0, ALONE | {"model": "30B"})],
    "no draft, over loads": [(1.0, ALONE | {"batch_size": load}) for load in (1, 4)],
    "no draft, stopped": [(1.0, ALONE | {"status": "interrupted", "ms_per_token": 90.0}), (1.0, ALONE)],
    "eight targets": [(2.0, SURE | {"model": str(number), "repeats": 2}) for number in range(8)],
    "a target with a draft": [(1.0, ALONE), (2.0, SURE | {"model": "30B"})],
    "made up": [(3.0, SURE | {"weights": "random", "model": "30B"}), (2.0, SURE)],
    "two temperatures": [(2.0, draft | SURE | {"temperature": t}) for t in (0.0, 1.0) for draft in DRAFTS[:2]],
    "several K": [(1.5, SURE | {"k": 2}), (2.0, SURE | {"k": 4}), (1.9, SURE | {"k": 8}), (2.4, WIDE | {"k": 6})],
    "a faster draft may not pay": [(1.5, DRAFTS[0] | SURE), (2.0, DRAFTS[1] | WIDE), (1.2, DRAFTS[2] | SURE)],
    "a faster one on a busy machine": [(1.5, DRAFTS[0] | SURE), (2.0, DRAFTS[1] | SURE | {"processor_share": 0.5})],
    "only one on a busy machine pays": [(1.0, DRAFTS[0] | SURE), (2.0, DRAFTS[1] | SURE | {"processor_share": 0.5})],
    "a busy target beside a quiet one": [
        (2.0, SURE | {"placement": "cpu"}), (1.5, SURE), (2.0, SURE | {"model": "30B", "processor_share": 0.5}),
    ],
    "busy all the time": [(speedup, DRAFTS[0] | SURE | {"processor_share": 0.5, "k": 2}) for speedup in (1.5, 2.0)],
    "one drifted": [(1.5, SURE | {"k": 2}), (2.0, SURE | {"drifted": True})],
    "one drifted, one busy": [(1.5, SURE | {"k": 2, "drifted": True}), (2.0, SURE | BUSY | {"processor_share": 0.4})],
    "none pays": [(1.0, ALONE), *((0.8, draft | SURE) for draft in DRAFTS[:2])],
    "two drafts with several K": [(1 + k / 9, draft | SURE | {"k": k}) for k in (2, 4, 8) for draft in DRAFTS[:2]],
    "none is shown to": [(0.7, DRAFTS[0] | SURE), (0.74, DRAFTS[1] | SURE | LOSS_AT_99)],
    "servers of other targets": [
        (3.0, SURE | COMMANDS), (1.5, SURE | COMMANDS | {"server_command": ["vllm B", "vllm A -x"]}),
    ],
    "one of two second commands": [
        (2.0, SECOND | SURE | {"server_command": ["vllm A", "vllm A -x 1"]}),
        (1.0, SECOND | NO_BOUNDS | {"server_command": ["vllm A", "vllm A -y 2"], "speedup_covers": over(4)}),
    ],
    "no intervals": [(2.0, NO_BOUNDS | {"k": k, "speedup_covers": over(4, "lap"), "batch_size": 4}) for k in (2, 6)],
    "over loads": [
        (speedup * factor, SURE | draft | {"batch_size": load})
        for load, speedup in ((16, 1.1), (1, 2.5), (64, 1.4), (4, 1.2))
        for draft, factor in zip(DRAFTS, (1.0, 1.1), strict=False)
    ],
    "regular arms apart": [(2.0, DRAFTS[ms] | SURE | {"ms_per_token": 10.0 * ms}) for ms in (5, 4, 3)],
    "regular arms apart in three series": [
        (2.0, DRAFTS[ms] | SURE | {"ms_per_token": 10.0 * ms, "batch_size": size, "temperature": temperature})
        for size, temperature in ((1, 0.0), (2, 0.0), (2, 0.7)) for ms in (5, 3)
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", MANY)
def test_many_latencies(snapshot: SnapshotAssertion, case: str) -> None:
    Words.divide(["latency", "-m"]).note()
    runs = []
    for number, (speedup, changes) in enumerate(MANY[case]):
        found = latency_run(speedup=speedup, run=f"20261120T100000.00000{number}-abcdef", **changes)
        runs.append(Run(found))
    pages = pages_about([measurement("latency")], runs, [])
    assert as_text(below_each_other(pages, in_short), 100) == snapshot


PAIR = {
    "run": "1", "model": "tiny", "draft": "tiny_draft", "devices": "cpu", "dtype": "float16", "quantization": "none",
    "arm": "speculative", "status": "ok", "batch_size": 8, "false_alarm_rate": 1e-9,
    "num_draft_tokens": 4, "shift": 0.05, "runner": "static", "lossy": False, "temperature": 0.5,
}  # fmt: skip
GREEDY = {
    "check": "greedy",
    "verdict": "lossless",
    "num_prompts": 15,
    "identical_prompts": 14,
    "num_tokens": 960,
}
SAMPLED = {
    "check": "sampled", "sampling": "as asked, top_k=5", "verdict": "lossless", "num_draws": 25_000, "p_value": 0.57,
    "power": 0.999, "rounding": 0.001, "acceptance_rate": 0.7, "visible_shift": 0.031,
}  # fmt: skip
KERNELS = {
    "check": "kernels",
    "verdict": "lossless",
    "kernel_deviation": 0.056,
    "rounding_deviation": 0.048,
}
LOSS = {"verdict": "lossy", "p_value": 0.0, "num_draws_until": 712}
UNSEEN = SAMPLED | {"visible_shift": None}
WEAK = {"verdict": "undecided", "power": 0.4, "num_draws_needed": 12000}
MARGIN = {"divergence_position": 7, "logit_margin": -0.3, "logit_tolerance": 0.3}
RECOVERIES: dict[str, list[list[Changes]]] = {
    "all kinds of checks": [[
        GREEDY | MARGIN, SAMPLED | LOSS | {"power": 0.9995, "num_impossible": 40},
    ]],
    "lossless": [[
        GREEDY | {"batch_size": 1, "refused": "seed", "tied_prompts": 2}, KERNELS,
        SAMPLED | {"rounding": 0.002, "num_explained": 14},
    ]],
    "wrong kernels": [[GREEDY, KERNELS | {"verdict": "lossy", "kernel_deviation": 0.9}, SAMPLED]],
    "beyond rounding": [[GREEDY | MARGIN | {"verdict": "lossy", "logit_margin": 0.31, "dtype": None}, UNSEEN]],
    "a margin without a tolerance": [[GREEDY | {"logit_margin": 0.31, "num_skipped": 2}]],
    "random weights": [[GREEDY | {"weights": "random"}, SAMPLED]],
    "a coin": [[GREEDY | {"lossy": True, "synthetic_acceptance": 0.8}, SAMPLED | {"num_past_end": 2}]],
    "a lossy rule": [[
        GREEDY | {"lossy": True, "rule": "./likely.py:Likely", "verdict": "undecided"}, SAMPLED | WEAK,
    ]],
    "too few draws": [[GREEDY, SAMPLED | WEAK, SAMPLED | WEAK | {"power": None}]],
    "cut short": [[GREEDY | {"num_cut_short": 2, "verdict": "undecided"}, SAMPLED | WEAK]],
    "no reference": [[GREEDY, {"check": "reference", "verdict": "undecided", "finding": "no reference"}, SAMPLED]],
    "greedy texts differ": [[GREEDY | {"verdict": "undecided"}, SAMPLED | {"num_draws": 0}]],
    "interrupted": [[GREEDY, SAMPLED | WEAK | {"status": "interrupted", "p_value": 7.8e-6, "evidence": 5.1}]],
    "interrupted while the regular server was asked": [[
        {"check": "reference", "verdict": "undecided", "arm": "regular", "status": "interrupted", "engine": "server"}
    ]],
    "rounding as large as the shift": [[GREEDY, SAMPLED | WEAK | {"num_draws_needed": None, "rounding": 0.04}]],
    "nothing drafted": [[GREEDY | {"drafted": False}, SAMPLED | {"drafted": False}]],
    "not yet decisive": [[GREEDY, SAMPLED | WEAK | {"p_value": 7.8e-6, "evidence": 5.1}]],
    "no token": [[GREEDY | {"verdict": "undecided", "num_tokens": 0}]],
    "several": [[GREEDY, SAMPLED], [GREEDY | {"draft": "b"}, SAMPLED | LOSS],
                [GREEDY | {"draft": "c", "status": "failed"}], [GREEDY | {"draft": "d"}, SAMPLED | WEAK]],
    "several shifts": [[GREEDY], [GREEDY | {"shift": 0.1}, SAMPLED | WEAK]],
}  # fmt: skip


@pytest.mark.parametrize("case", RECOVERIES)
def test_a_recovery(snapshot: SnapshotAssertion, case: str) -> None:
    Words.divide(["recovery"]).note()
    runs = []
    for number, checks in enumerate(RECOVERIES[case]):
        shared = {name: checks[0].get(name, value) for name, value in PAIR.items()}
        rows = [RecoveryRow(**shared | {"run": str(number)} | check) for check in checks]
        runs.append(Run(rows))
    page = recovery_page(runs)
    assert full(page) == snapshot
    # Pages as text do not show which rows are bold.
    for row in page.tables[0].rows if len(runs) > 1 else ():
        assert row.strong == ("lossy" in row.cells)


UNLIKELY = {"likelihood_z": -4.8, "log_probability": -2.5, "own_log_probability": -1.5}
TEXTS = {
    "text_source": "given",
    "num_tokens": 12345,
    "temperature": 0.5,
    "max_new_tokens": 64,
    "batch_size": 4,
    "acceptance_rate": 0.8,
    "conditional_acceptance_rate": 0.9,
}
SERVED = {"weights_tokens_per_iteration": Interval(4.05, 3.8, 4.31), "served_tokens_per_iteration": 1.52}  # fmt: skip
ENGINES = {
    "engine not known": {"engine_unknown": "the engine may draft fewer than K=7"},
    "other texts": UNLIKELY | {"impossible_share": 0.0, "engine_unknown": "the texts are not the model's"},
    "accepts less": {"card_tokens_per_iteration": 4.2}, "accepts more": {"served_tokens_per_iteration": 4.6},
    "counts that are wrong": {"arrived_tokens_per_iteration": 4.0, "repeated_share": 0.61},
}  # fmt: skip
ACCEPTANCES: dict[str, list[Changes]] = {
    "greedy, and no interval": [{"temperature": 0.0, "low": (NAN, 7)}],
    "without temperature": [{"temperature": None}],
    "unlikely texts": [UNLIKELY],
    "likely texts": [UNLIKELY | {"likelihood_z": 4.75, "impossible_share": 0.005}],
    "impossible texts": [UNLIKELY | {"impossible_share": 0.0051}],
    "iterations not counted": [{"text_source": "served", "tokens_per_iteration": None}],
    "likely without their own": [UNLIKELY | {"own_log_probability": None}],
    **{name: [{"at_k": columns}] for name, columns in ENGINES.items()},
    "several": [{}, {"draft": "7B", "best": 5.0}, UNLIKELY | {"model": "30B", "text_source": "own"}],
    "of one name": [{"draft": "./a/step_100"}, {"draft": "./b/step_100", "best": 1.7}],
    "counted, and computed": [{"text_source": "served"}, {}],
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTANCES)
def test_an_acceptance(snapshot: SnapshotAssertion, case: str) -> None:
    Words.divide(["acceptance", "up_to=8", "seed=3"]).note()
    runs = []
    for number, changes in enumerate(ACCEPTANCES[case]):
        columns = {"run": str(number), "model": "13B", "draft": "a", "status": "ok", "best": 2.5}
        columns |= TEXTS | changes
        best = columns.pop("best")
        low, units = columns.pop("low", (best - 0.1, 9))
        at_k = columns.pop("at_k", {})
        tokens = Interval(best, low, best + 0.1, Coverage(units, "prompt"))
        rows = []
        for k in (1, 2, 5, 7):
            k_columns = columns | (SERVED | at_k if k == 7 and at_k else {})
            k_columns = {"num_draft_tokens": k, "tokens_per_iteration": tokens} | k_columns
            rows.append(AcceptanceRow(**k_columns))
        runs.append(Run(rows))
    page = acceptance_page(runs)
    assert f"{short(page)}\n\n{full(page)}" == snapshot


RACED = {
    "model": "13B", "draft": "7B", "num_draft_tokens": 4, "speedup": 2.0, "acceptance_rate": 0.75, "lossy": False,
    "mean_acceptance_length": 4.0, "lenience": 1.0, "identical": True, "temperature": 0.0, "regular_ms_per_token": 3.0,
    "regular_num_tokens": 64, "speculative_num_tokens": 64,
}  # fmt: skip
PARTED = {"identical": False, "parted_at": 3, "logit_margin": -0.5, "logit_tolerance": 0.01}
RACES: dict[str, Changes] = {
    "identical": {"tokens_per_iteration": 3.2},
    "slower": {"speedup": 0.5, "lossy": True, "lenience": 0.5},
    "other work": {"speculative_num_tokens": 5},
    "nearly as many tokens": {"speculative_num_tokens": 60},
    "over the first tokens": {"speculative_num_tokens": 25, "num_compared": 25},
    "a tie": PARTED | {"logit_margin": 1e-6, "logit_tolerance": 1e-5},
    "beyond rounding": PARTED,
    "a lossy rule": PARTED | {"lossy": True, "rule": "./likely.py:Likely"},
    "two samples": {"identical": False, "parted_at": 0, "temperature": 0.5},
    "one ends": {"identical": False, "parted_at": 2, "num_compared": 2, "speculative_num_tokens": 2},
    "no logits": {"identical": False, "parted_at": 2},
    "nothing drafted": {"acceptance_rate": None, "tokens_per_iteration": 1.0},
    "a server": {"acceptance_rate": None, "engine": "server"},
    "a coin": {"synthetic_acceptance": 0.8, "weights": "random"},
    "one arm": {"speedup": None, "speculative_num_tokens": None},
    "one arm of random weights": {"speedup": None, "speculative_num_tokens": None, "weights": "random"},
}  # fmt: skip


@pytest.mark.parametrize("case", RACES)
def test_a_race(snapshot: SnapshotAssertion, case: str) -> None:
    row = CompareRow(**RACED | RACES[case])
    assert as_text(verdict(row)) == snapshot


def test_many_races(snapshot: SnapshotAssertion) -> None:
    changes: list[Changes] = [
        {}, {"speedup": 3.0, "acceptance_rate": 0.25}, {"num_draft_tokens": 2},
        {"speedup": 1.2, "engine": "huggingface"}, {"speedup": None, "regular_ms_per_token": None},
    ]  # fmt: skip
    runs = [Run([CompareRow(**RACED | changed)]) for changed in changes]
    assert full(races_page(runs)) == snapshot
    assert races_page(runs[-1:]) is None
