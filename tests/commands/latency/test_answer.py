"""The answer that a run of `latency` prints: short at any width, and the same verdict as anywhere else."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from harness.commands.latency.tables.answer import page_of_run
from harness.config.machine import note_command_line
from harness.reporting.table import Bar, Bars
from harness.reporting.terminal import print_document
from in_process import Harness
from pages import full, short
from report_files import latency_run
from wording import mentions

FIGURES: dict[str, Any] = {
    "num_tokens": 960, "iteration_ms": 630.0, "mean_proposed": 4.0, "acceptance_rate": 0.625,
    "mean_num_draft_tokens": 4.0, "tokens_per_iteration": 3.5,
    "mean_acceptance_length": 3.5, "draft_ms": 80.0, "verify_ms": 330.0, "predicted_speedup": 1.9, "speedup": 1.83,
    "speedup_low": 1.7, "speedup_high": 1.95, "speedup_covers": "15 prompts", "processor_share": 1.0,
    "ignore_eos": True, "tokens_per_iteration_by_num_draft_tokens": [1.9, 2.6, 3.1, 3.5], "visible_difference": 0.05,
}  # fmt: skip


def answer(width: int = 80, arguments: str = "latency", **changes: Any) -> str:
    note_command_line(arguments.split())
    regular, speculative = latency_run(**FIGURES | changes)
    costs = dict.fromkeys(
        ("draft_ms", "verify_ms", "mean_acceptance_length", "tokens_per_iteration")
    )
    rows = [dataclasses.replace(regular, target_step_ms=320.0, **costs), speculative]
    return short(page_of_run(rows), width)


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_it_fits_thirteen_lines_and_bars_are_aligned(width: int, share: float) -> None:
    text = answer(width, processor_share=share)
    assert max(map(len, text.splitlines())) <= width
    if width >= 80:
        assert len(text.splitlines()) <= 13
    regular, speculative = (line for line in text.splitlines() if "ms/token" in line)
    assert regular.index("ms/token") == speculative.index("ms/token")
    assert width < 80 or "first token 400.0 ms" in regular
    assert regular.count("█") > 1.5 * speculative.count("█") > 0


def test_a_command_is_never_cut_in_two() -> None:
    typed = "latency model=some/long-name prompts=./my-chats.jsonl"
    text = answer(arguments=typed)
    assert f"\n           harness {typed} K=8\n" in text
    assert len(text.splitlines()) <= 13


def test_a_target_on_several_gpus_is_no_server_with_tensor_parallelism() -> None:
    two: dict[str, Any] = {"weight_bytes": {"cuda:0": 1, "cuda:1": 1}, "processor_share": 0.4}
    two |= {"draft_repository": "owner/7b"}
    text = " ".join(answer(200, **two).split())
    assert mentions(text, "take turns on 2 GPUs")
    assert not mentions(text, "quiet"), "the first doubt of all"
    assert mentions(
        text,
        "harness latency -- vllm serve huggyllama/llama-13b --tensor-parallel-size 2",
        '"model": "owner/7b", "num_speculative_tokens": 4',
    )
    for one in ({"cuda:0": 1}, {"cuda:0": 1, "cpu": 1}):
        text = answer(200, **two | {"weight_bytes": one})
        assert not mentions(text, "take turns")
        assert not mentions(text, "vllm serve")


def test_the_price_of_an_iteration_is_a_ratio_that_can_be_checked() -> None:
    """3.5 tokens for 4 draft steps of 0.0625 and a verification of 1.03 steps."""
    why = "62 % accepted: 3.5 tokens in the time of 1.28 steps, decode-only 2.73×"
    assert f"Why {why}" in " ".join(answer().split())
    slow = answer(speedup=0.8, speedup_low=0.75, speedup_high=0.85)
    assert "acceptance is too low: full acceptance would give 3.90×" in slow


def test_the_prompts_for_an_interval_fill_eight_batches() -> None:
    """15 prompts in batches of 4 are 4 batches, the last of 3: 24 prompts would be 6."""
    few = {"speedup_low": None, "speedup_high": None, "speedup_covers": "4 batches"}
    assert mentions(answer(**few, num_prompts=15, batch_size=4), "an interval", "num_prompts=32")


def test_prompts_that_are_asked_again_do_not_add_up_to_an_interval() -> None:
    """It once said num_prompts=40, and of these num_prompts=112."""
    few = {"speedup_low": None, "speedup_high": None, "speedup_covers": "3 prompts"}
    text = answer(**few, num_prompts=15)
    assert mentions(text, "an interval needs 8 different prompts", "prompts=FILE")
    assert "num_prompts=" not in text
    assert mentions(answer(**few, num_prompts=3), "an interval", "num_prompts=8")


@pytest.mark.parametrize(
    ("share", "threads", "is_told"), [(0.18, 2, False), (0.18, 1, True), (0.6, 2, True)]
)
def test_threads_that_wait_for_each_other_give_no_verdict(
    share: float, threads: int, is_told: bool
) -> None:
    """Of a pair that is 1.4 times as fast it said 2.3 times slower."""
    text = answer(200, processor_share=share, load=15.0, num_cores=2, num_threads=threads)
    assert ("1.83× faster" in text) == is_told
    expected = (
        "cannot tell: 1.83×",
        "2 threads got 18 % of the CPU time",
        "OMP_NUM_THREADS=1 harness",
    )
    assert [part in text for part in expected] == [not is_told] * 3


def test_a_doubt_stands_above_the_verdict() -> None:
    text = answer(processor_share=0.6, load=9.0, num_cores=4, num_threads=4, interleaved=False)
    assert mentions(text, "not quiet", "60 %", "OMP_NUM_THREADS=1")
    assert text.index("not quiet") < text.index("1.83× faster")
    assert "details=true" in text
    assert "take turns" not in text


def test_beside_other_programs_neither_the_draft_nor_the_verification_is_blamed() -> None:
    """Their time is in that of an iteration, too."""
    slower = {"speedup": 0.87, "speedup_low": 0.57, "speedup_high": 1.33, "verify_ms": 1500.0}
    ended = {"status": "interrupted", "ms_per_token": 100.0}
    costs = dict.fromkeys(("draft_ms", "verify_ms", "mean_acceptance_length"))
    said = {}
    for share in (1.0, 0.16):
        busy = {"processor_share": share, "load": 9.0, "num_cores": 2, "num_threads": 2}
        regular, speculative = latency_run(**FIGURES | slower | busy | ended)
        rows = [dataclasses.replace(regular, target_step_ms=320.0, **costs), speculative]
        page = page_of_run(rows)
        said[share] = short(page), " ".join(full(page).split())
    quiet, everything = said[1.0]
    assert "verification costs too much" in quiet
    assert "no K from 1 to 4 pays" in everything
    busy_page, everything = said[0.16]
    assert busy_page.index("16 % of the CPU time it wanted") < busy_page.index("cannot tell")
    assert "(1 more note: details=true)" in busy_page
    assert "62 % accepted: 3.5 tokens per iteration" in busy_page
    assert "costs too much" not in everything
    assert "no K from" not in everything
    assert "interrupted: the figures cover" in everything


@pytest.mark.parametrize(
    ("url", "is_doubted"), [("http://127.0.0.1:1/v1", True), ("http://gpu1:1/v1", False)]
)
def test_a_busy_machine_slows_a_server_that_it_has_itself(url: str, is_doubted: bool) -> None:
    served = {"engine": "server", "url": url, "regular_url": f"{url}2", "server_command": None}
    text = answer(processor_share=0.4, load=9.0, num_cores=4, **served)
    assert mentions(text, "not quiet", "40 %") == is_doubted


@pytest.mark.parametrize(
    "server", [{"url": "http://a/v1"}, {"server_command": "vllm serve A; vllm serve A -x"}]
)
def test_no_other_draft_is_advised_for_a_server(server: dict[str, Any]) -> None:
    slower: dict[str, Any] = {"speedup": 0.8, "speedup_low": 0.7, "speedup_high": 0.9}
    by_k: dict[str, Any] = {"tokens_per_iteration_by_num_draft_tokens": None}
    assert "draft=lookup" in answer(**slower, **by_k)
    assert "draft=lookup" not in answer(engine="server", **slower, **by_k, **server)


@pytest.mark.parametrize(
    ("lengths", "found", "setting"),
    [
        ([1.9, 2.6, 3.1, 3.5], "the speed-up still rises at K=4", "K=8"),
        ([1.9, 1.95, 1.96, 1.96], "K=1 is the best of 1 to 4", "K=1"),
        ([1.01, 1.01, 1.01, 1.01], "no K from 1 to 4 pays; a draft that costs nothing", "draft=lookup"),
    ],
)  # fmt: skip
def test_k_is_chosen_in_one_way(lengths: list[float], found: str, setting: str) -> None:
    changes: dict[str, Any] = {"tokens_per_iteration_by_num_draft_tokens": lengths}
    text = answer(tokens_per_iteration=lengths[-1], **changes)
    assert mentions(text, found, f"harness latency {setting}")


def test_the_next_command_is_the_one_that_was_typed_with_a_change() -> None:
    typed = answer(arguments="latency decoding.num_draft_tokens=4 seed=1 details=true")
    assert mentions(typed, "harness latency seed=1 K=8")
    assert mentions(answer(arguments="latency -m K=2,4"), "the same with K=8")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("latency -K 4", "harness latency K=8"),
        ("latency --K=4 seed=1", "harness latency seed=1 K=8"),
        ("latency -T 0 --num-draft-tokens 4 --details seed=1", "harness latency -T 0 seed=1 K=8"),
        ("latency gamma=4 --max-new-tokens -1", "harness latency --max-new-tokens -1 K=8"),
        ("latency --details -- llama-server -K 4", "harness latency K=8 -- llama-server -K 4"),
    ],
)
def test_what_is_typed_next_replaces_a_setting_however_it_was_typed(
    typed: str, expected: str
) -> None:
    assert f" {expected}\n" in f"{answer(arguments=typed)}\n"


def test_a_target_alone_has_its_times_and_its_roof_and_no_verdict() -> None:
    (regular,) = latency_run(draft=None, num_draft_tokens=None, step_bytes=10**9, floor_ms=50.0)
    text = short(page_of_run([regular]), 80)
    assert "ms/token" in text
    assert "×" not in text
    details = full(page_of_run([regular]))
    assert "1.00 GB per step" in details
    assert not mentions(details, "Speculative")
    assert "K=" not in details
    assert page_of_run(latency_run(status="failed", error="killed")) is None


def test_settings_of_the_output_make_no_other_measurement(harness: Harness) -> None:
    quick = ["latency", "engine=simulated", "num_prompts=2", "decoding.max_new_tokens=4"]
    harness(*quick)
    again = harness(*quick, "-m", "seed=0", "details=true")
    assert "measured before" in again.stderr


def test_bars_are_plain_where_letters_are() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    bars = Bars((Bar("a", 2.0, ("2",)), Bar("b", 1.0, ("1",))))
    print_document([bars], Console(file=stream, width=40))
    stream.flush()
    text = stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert text.count("#") == 36
