"""Counters of servers: names of each, restarts, and what follows from their growth."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.settings import DecodingSettings
from harness.engines.counts import Counts, DraftCounts, growth
from harness.engines.protocol import Answered
from harness.engines.requests import Load, RequestError, RequestRecord
from harness.measuring.acceptance import counted_acceptance
from harness.measuring.figures.acceptance import AcceptanceFigures
from harness.measuring.figures.measured import MeasuredArm
from harness.measuring.figures.server import ServerFigures, counter_columns, traffic_columns
from harness.results.drafts import as_printed
from harness.servers import counters
from harness.servers.counters import CounterPage, read_counters
from harness.servers.http import RequestFailed
from measured_runs import figures, run_of
from report_files import latency_run
from some_questions import question_of

VLLM = """# HELP vllm:spec_decode_num_drafts Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts counter
vllm:generation_tokens_total{engine="0",model_name="a}b"} 100.0
vllm:generation_tokens_total{engine="1",model_name="m",position="1"} 20.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 80.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a}b"} 7.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 9.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.5
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 3.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:e2e_request_latency_seconds_bucket{le="0.3"} nan
"""
LLAMA_CPP = """llamacpp:tokens_predicted_total 120
llamacpp:spec_decode_num_drafts_total 40
llamacpp:spec_decode_num_draft_tokens_total 80
llamacpp:spec_decode_num_accepted_tokens_total 50
"""


def requests(*num_tokens: int) -> list[RequestRecord]:
    return [RequestRecord(index, 1, num_tokens=number) for index, number in enumerate(num_tokens)]


def test_names_of_vllm_are_summed_over_its_engines_and_those_of_llama_cpp_are_read() -> None:
    assert read_counters(VLLM) == Counts(
        generated=120, drafts=40, proposed=80, accepted=50, accepted_at={0: 30, 1: 20}, cached=9,
        first_tokens=3, first_token_s=1.5,
    )  # fmt: skip
    assert read_counters(LLAMA_CPP) == Counts(generated=120, drafts=40, proposed=80, accepted=50)


def test_names_of_tensorrt_llm() -> None:
    """Of 10 iterations, which drafted 3, 2 and 2 tokens, by position; older pages have totals alone."""
    page = "trtllm_generation_tokens_total 18\n"
    for name, numbers in (("drafted", (10, 10, 4)), ("accepted", (5, 2, 0))):
        for position, number in enumerate(numbers):
            page += (
                f'trtllm_spec_decode_{name}_tokens_total{{token_position="{position}"}} {number}\n'
            )
    accepted_at = {0: 5, 1: 2, 2: 0}
    expected = Counts(generated=18, drafts=10, proposed=24, accepted=7, accepted_at=accepted_at)
    assert read_counters(page) == expected
    totals = "trtllm_spec_decode_num_draft_tokens_total 24\ntrtllm_spec_decode_num_accepted_tokens_total 7\n"
    assert read_counters(page + totals) == expected
    assert read_counters(totals) == Counts(proposed=24, accepted=7)


@pytest.mark.parametrize(
    "damage",
    ["my-metric 1", "x 1,5", "x 1ms", "x", 'x{a="1 2', "# TYPE x y", "</html>",
     "vllm:spec_decode_num_draft_tokens_total NaN"],
)  # fmt: skip
def test_a_damaged_page_is_no_sign_that_nothing_was_drafted(damage: str) -> None:
    regular = "vllm:generation_tokens_total 500\n"
    speculative = f"{regular}vllm:spec_decode_num_drafts_total 100\n"
    assert (read_counters(regular).drafts, read_counters(speculative).drafts) == (0, 100)
    for page in (regular, speculative):
        counts = read_counters(f"{page}{damage}\n")
        assert counts.drafts in (None, 100)
        assert counts.proposed is None


def test_sglang_tells_verifications_and_tokens() -> None:
    page = "sglang:generation_tokens_total 102\nsglang:spec_verify_calls_total 40\n"
    counted = counted_acceptance(read_counters(page), [RequestRecord(0, 1)] * 2)
    columns = counted.columns()
    assert counted.drafting is None, "verifications of nothing are among them"
    # 102 tokens without the first of each of 2 requests, in 40 verifications.
    assert (columns["tokens_per_iteration"], columns["mean_acceptance_length"]) == (2.5, None)
    nothing = page.replace("102", "42")
    counted = counted_acceptance(read_counters(nothing), [RequestRecord(0, 1)] * 2)
    assert (counted.accepted, counted.drafting) == (0, None), (
        "nor is it known that nothing was drafted"
    )
    _, row = latency_run(**counted.count_columns() | counted.columns())
    assert (row.drafts.accepted, row.drafts.drafting) == (0, None)


def test_rates_follow_from_vllms_definitions_and_are_printed_as_by_vllm() -> None:
    columns = counted_acceptance(read_counters(VLLM), [RequestRecord(0, 1)]).columns()
    assert (columns["mean_acceptance_length"], columns["mean_proposed"]) == (1 + 50 / 40, 2)
    assert columns["marginal_acceptance_by_position"] == [0.75, 0.5]
    _, row = latency_run(server="vLLM 0.32.0", **columns)
    assert as_printed(row) == {
        "Mean acceptance length": "2.25",
        "Per-position acceptance rate": "0.750, 0.500",
        "Avg Draft acceptance rate": "62.5%",
    }
    assert as_printed(replace(row, server="another")) == {}
    thirds = Counts(drafts=3, accepted=1, accepted_at={0: 1})
    columns = counted_acceptance(thirds, [RequestRecord(0, 1)]).columns()
    assert columns["marginal_acceptance_by_position"] == [0.3333]


FAILED = RequestRecord(1, 1, error=RequestError(500, "before it began"))
CANCELLED = RequestRecord(2, 1, num_tokens=5, error=RequestError(499, "left"))
COUNTED = Counts(generated=16, drafts=4, proposed=8, accepted=6, cached=5)
TOTALS = {"drafts": DraftCounts(proposed=10, accepted=4)}


def lap(*extra: RequestRecord, counted: Counts | None = COUNTED, **reported: Any) -> list[Answered]:
    """An answer of 11 tokens and a failure, while other requests keep up the load."""
    answered = RequestRecord(0, 1, num_tokens=11, **reported)
    load = Load(seconds=1.0, request_seconds=1.0, share=1.0, extra=extra)
    return [Answered(requests=[answered, FAILED], seconds=1.0, counted=counted, load=load)]


def test_counted_acceptance_fills_in_what_answers_leave_out() -> None:
    """4 drafts of 2 tokens, 6 accepted; two requests have 14 tokens behind their first ones: 8 iterations."""
    found = figures(AcceptanceFigures, lap(CANCELLED))
    assert (found.acceptance_rate, found.mean_acceptance_length) == (6 / 8, 1 + 6 / 4)
    assert (found.acceptance_source, found.tokens_per_iteration) == ("metrics", 14 / 8)
    # All of a row's figures have one source: counters, where they know the iterations that drafted.
    found = figures(AcceptanceFigures, lap(counted=replace(COUNTED, generated=11), **TOTALS))
    assert (found.acceptance_rate, found.mean_acceptance_length) == (6 / 8, 1 + 6 / 4)
    counted = replace(COUNTED, generated=11, drafts=None)
    found = figures(AcceptanceFigures, lap(counted=counted, **TOTALS))
    assert (found.acceptance_rate, found.mean_acceptance_length) == (4 / 10, None)
    # Counters have the cancelled request, too, and answers do not.
    found = figures(AcceptanceFigures, lap(CANCELLED, **TOTALS))
    assert (found.acceptance_rate, found.mean_acceptance_length) == (4 / 10, None)
    unseen = replace(COUNTED, generated=5)
    shared = replace(COUNTED, generated=100)
    for laps in (
        lap(outcomes=[(2, 1)]), lap(counted=None, **TOTALS), lap(counted=unseen), lap(counted=shared),
    ):  # fmt: skip
        assert figures(AcceptanceFigures, laps).acceptance_source is None


def test_answers_come_before_counters_and_a_worker_of_several_counts_for_nothing() -> None:
    found = figures(ServerFigures, lap(CANCELLED))
    assert (found.cached_tokens, found.drafted) == (5, True)
    assert (found.server_tokens, found.foreign_tokens) == (16, 0)
    assert found.read_prompt_tokens is None
    reported = {"num_cached": 3, "num_read": 7, "drafts": DraftCounts(proposed=0, accepted=0)}
    found = figures(ServerFigures, lap(CANCELLED, **reported))
    assert (found.cached_tokens, found.read_prompt_tokens, found.drafted) == (3, 7, False)
    found = figures(ServerFigures, lap(counted=replace(COUNTED, generated=5)) + lap(counted=None))
    assert found.unseen_tokens == 6
    assert (found.cached_tokens, found.drafted, found.foreign_tokens) == (None, None, None)


def test_counts_that_cannot_be_are_kept_and_no_figure_follows_from_them() -> None:
    """Of counters, and of an answer."""
    accepted = {"accepted": "vllm:spec_decode_num_accepted_tokens"}
    counters = lap(counted=replace(COUNTED, accepted=72, words=accepted))
    for laps, said in (
        (counters, accepted["accepted"]),
        (lap(impossible="9 of 8"), "9 of 8 in 1 of 1"),
    ):
        found = figures(ServerFigures, laps)
        assert (found.cached_tokens, found.drafted) == (None, None)
        acceptance = figures(AcceptanceFigures, laps)
        assert said in acceptance.impossible_counts
        assert acceptance.acceptance_rate is None
        assert acceptance.tokens_per_iteration is None


def test_an_answer_has_the_servers_first_token_where_nothing_waited_in_its_queue() -> None:
    """The counters of a server have such waits too, so they count under load."""
    found = figures(ServerFigures, lap(prompt_ms=30.0) + lap(prompt_ms=10.0))
    assert found.server_time_to_first_token_ms == 20
    found = figures(ServerFigures, lap(prompt_ms=30.0), settings={"batch_size": 2})
    assert found.server_time_to_first_token_ms is None


def test_tokens_cached_from_before_are_those_that_no_other_prompt_begins_with() -> None:
    prompts = [[1, 2, 3, 4, 5], [7, 7], [1, 2, 3, 9], [7, 7], [8, 8]]
    # The second [7, 7] may be known from the first; [8, 8] is asked the second time.
    known = [(0, 4), (1, 2), (2, 3), (3, 2), (100, 2)]
    requests = [RequestRecord(index, 2, num_tokens=1, num_cached=cached) for index, cached in known]
    run = run_of([Answered(requests=requests, seconds=1.0)])
    [generation] = run.arms["regular"].generations
    generation.question = question_of(prompts, DecodingSettings())
    found: Any = ServerFigures.measured(run, run.arms["regular"])
    assert found.cached_from_before == (4 - 3) + 2 + (3 - 3)


def test_growth_is_what_counts_and_a_restart_is_no_growth() -> None:
    before = Counts(generated=10, drafts=4, accepted_at={0: 2}, running=3)
    now = Counts(generated=110, drafts=14, accepted_at={0: 10, 1: 2}, running=1)
    grown = Counts(generated=100, drafts=10, accepted_at={0: 8, 1: 2}, running=1)
    assert growth(now, before) == grown
    assert growth(now, before).is_known
    assert not growth(before, now).is_known
    assert not growth(Counts(accepted_at={0: 1}), Counts(accepted_at={0: 2})).is_known
    assert growth(now, Counts()) == now


def read_file(path: str | Path, key: str | None) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise RequestFailed(str(error)) from error


@pytest.fixture(autouse=True)
def pages_are_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "page", read_file)


def test_a_restart_is_a_new_start_or_else_a_counter_that_fell(tmp_path: Path) -> None:
    """Other workers behind an address, of which an earlier one answers again, are none."""
    file = tmp_path / "metrics"

    def restarts(*pages: str) -> list[float]:
        page = CounterPage("http://localhost/v1", None, [file.as_posix()])
        counts = []
        for text in pages:
            file.write_text(text)
            counts.append(page.read() or Counts(restarts=-1))
        return [counted.restarts for counted in counts]

    def told(*counted: tuple[int, float]) -> list[str]:
        name = "vllm:generation_tokens_total"
        return [f"{name} {tokens}\nprocess_start_time_seconds {at}\n" for tokens, at in counted]

    # The server's clock may be behind ours, and it may have counted more by now than before.
    for now in (time.time(), 1.7e9):
        pages = told((9, now), (5, now - 7), (12, now), (2, now + 500), (30, now + 500))
        assert restarts(*pages) == [0, 0, 0, 1, 1]
    assert restarts(*told((9, 7.0), (2, 8.0), (9, 7.0), (3, 8.0))) == [0, 1, 0, 0]
    pages = [f"llamacpp:tokens_predicted_total {tokens}\n" for tokens in (9, 12, 2, 3)]
    assert restarts(*pages) == [0, 0, 1, 1]
    assert growth(Counts(generated=3, restarts=1), Counts(generated=1)) == Counts(restarts=1)


def traffic(
    counted: Counts, requests: list[RequestRecord], between: Counts | None
) -> dict[str, Any]:
    """The columns of an arm whose server counted this growth during and between questions."""
    lap = Answered(requests=requests, seconds=1.0, counted=counted)
    return traffic_columns(MeasuredArm("regular", [lap], between=between))


def test_traffic_of_others_is_what_is_not_ours() -> None:
    ours = requests(100, 100)
    # Two requests ended by themselves. Of requests that got as many tokens as they could, no end is counted.
    whole = [replace(request, max_new_tokens=100) for request in ours]
    for asked, generated, foreign, unseen in (
        (ours, 204, 0, 0), (ours, 205, 5, 0), (ours, 196, 0, 0), (ours, 100, None, 100), (whole, 202, 0, 0),
        (whole, 203, 3, 0), (whole, 196, 0, 0),
    ):  # fmt: skip
        columns = traffic(Counts(generated=generated), asked, Counts())
        assert columns["server_tokens"] == generated
        assert (columns["foreign_tokens"], columns["unseen_tokens"]) == (foreign, unseen)
    assert traffic(Counts(), ours, Counts()) == {}
    # Nobody knows what those did that were not waited for, or that came while this run asked nothing.
    for running, between, foreign in (
        (1.0, Counts(), None), (0.0, None, None), (0.0, Counts(generated=4), 0), (0.0, Counts(generated=5), 5),
    ):  # fmt: skip
        columns = traffic(Counts(generated=200, running=running), ours, between)
        assert columns["foreign_tokens"] == foreign
    # Of prompts only those are compared that the server counted in its answers, too.
    for read, foreign in (([50, 50], 500), ([50, None], 0), ([300, 300], 0)):
        for request, number in zip(ours, read, strict=True):
            request.num_read = number
        columns = traffic(Counts(generated=202, read=600), ours, Counts())
        assert columns["foreign_tokens"] == foreign
    # A request that timed out may be answered on, and an answer that arrived is ours whatever it counts.
    late = RequestRecord(0, 1, num_tokens=10, max_new_tokens=50, error=RequestError(408, ""))
    halved = RequestRecord(0, 1, num_tokens=10, arrivals=[0.1] * 20)
    for request, most in ((late, 51), (halved, 21)):
        for generated, is_foreign in ((most, False), (most + 1, True)):
            columns = traffic(Counts(generated=generated), [request], Counts())
            assert (columns["foreign_tokens"] > 0) == is_foreign
    first_tokens = counter_columns(Counts(first_tokens=4, first_token_s=2))
    assert first_tokens == {"server_time_to_first_token_ms": 500}


@pytest.mark.parametrize(("num_missed", "is_asked"), [(2, True), (3, False)])
def test_a_server_without_counters_is_soon_not_asked_again(
    tmp_path: Path, num_missed: int, is_asked: bool
) -> None:
    file = tmp_path / "metrics"
    page = CounterPage("http://localhost/v1", None, [file.as_posix()])
    assert [page.read() for _ in range(num_missed)] == [None] * num_missed
    file.write_text(VLLM)
    assert (page.read() is not None) == is_asked


def test_counters_of_several_pages_are_added_up(tmp_path: Path) -> None:
    """One that cannot be read makes all of them unknown, and requests that run are no counter."""
    files = [tmp_path / "first", tmp_path / "second"]
    page = CounterPage("http://localhost/v1", None, [file.as_posix() for file in files])
    text = (
        "vllm:generation_tokens_total 7\nvllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"
    )
    files[0].write_text(text)
    assert page.read() is None
    files[1].write_text(text)
    before = page.read()
    assert (before.generated, before.running) == (14, 6)
    files[1].write_text("vllm:generation_tokens_total 9\nvllm:num_requests_running 0\n")
    after = page.read()
    assert after.restarts == 0
    assert growth(after, before).generated == 2


def test_a_page_once_read_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent, zero, full = tmp_path / "absent", tmp_path / "zero", tmp_path / "full"
    zero.write_text("llamacpp:tokens_predicted_total 0\n")
    full.write_text(VLLM)
    answers: list[Path] = []
    monkeypatch.setattr(counters, "page", lambda url, key: read_file(answers.pop(0), key))
    monkeypatch.setattr(counters, "_RETRY_S", 0.0)
    page = CounterPage("http://localhost/v1", None, ["http://localhost/metrics"])
    # What is read each time, and whether that is enough; all of it is asked for, and no more.
    for files in ([absent], [zero], [absent, absent, full], [absent] * 3):
        answers += files
        assert (page.read() is not None) == files[-1].exists()
        assert answers == []
