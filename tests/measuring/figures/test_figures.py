"""Figures of a run, from answers that are written here: times in pairs, costs, ends, texts, and acceptance."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from echo_server import Dialect, Outcomes, iterations_of, report_of
from harness.engines.counts import Counts
from harness.engines.divergence import Divergence
from harness.engines.protocol import Answered, BatchTimes, Phases
from harness.engines.requests import RequestError, RequestRecord
from harness.measuring.figures import paired, texts
from harness.measuring.figures.acceptance import AcceptanceFigures
from harness.measuring.figures.costs import CostFigures
from harness.measuring.figures.paired import PairedTimes, SpeedupFigures
from harness.measuring.figures.requests import AnswerFigures
from harness.measuring.figures.texts import EndFigures, TextFigures
from harness.servers.events import note_reports
from measured_runs import figures, run_of


def request(
    index: int, seconds: float, failed: bool = False, num_tokens: int = 10
) -> RequestRecord:
    error = RequestError(500, "failed") if failed else None
    return RequestRecord(index, 3, seconds=seconds, num_tokens=num_tokens, error=error)


def lap(*requests: RequestRecord, sent: bool = True) -> Answered:
    batch = None if sent else BatchTimes(0.0, 0)
    return Answered(arm="regular", seconds=2.0, requests=requests, batch=batch)


def arm(seconds: Sequence[float], sent: bool = True) -> list[Answered]:
    return [lap(request(index, each), sent=sent) for index, each in enumerate(seconds)]


def paired_times(regular: Sequence[Answered], other: Sequence[Answered]) -> PairedTimes:
    return paired.paired_times(run_of(regular, other))


def test_requests_of_a_lap_are_one_unit() -> None:
    regular = [lap(request(0, 1.0), request(1, 2.0)), lap(request(2, 4.0), request(3, 5.0))]
    # A request that failed in one arm counts in none; the second lap answered first.
    other = [lap(request(0, 0.5), request(1, 9.0, failed=True)), lap(request(3, 1), request(2, 1))]
    times = paired_times(regular, other)
    assert times.unit == "lap"
    # One answer was compared in the first lap, and two in the second, each of 10 tokens.
    assert (15 * times.regular).tolist() == pytest.approx([1000, 9000])
    assert (15 * times.speculative).tolist() == pytest.approx([500, 2000])
    assert times.lengths.tolist() == [20, 40]
    twice_as_long = paired_times(arm([1.0]), [lap(request(0, 1.0, num_tokens=20))])
    assert twice_as_long.regular / twice_as_long.speculative == pytest.approx(2)


def test_a_batch_drafts_until_its_last_row_has_ended() -> None:
    rows = [request(0, 1.0, num_tokens=11), request(1, 1.0, num_tokens=21)]
    for row, accepted in zip(rows, (1, 3), strict=True):
        row.outcomes = [(4, accepted)] * 5
    for sent, numbers in ((False, (5, 4)), (True, (10, 6))):
        laps = [lap(*rows, sent=sent)]
        extra = paired_times(laps, laps).extra_iterations
        assert extra is not None
        assert (*extra.iterations, *extra.fewest) == numbers


def test_a_drift_is_of_the_second_half_over_the_first() -> None:
    found = figures(SpeedupFigures, arm([1.0] * 16), arm([0.5] * 8 + [0.25] * 8))
    assert (found.drift, found.drifted, found.interleaved) == (pytest.approx(2), True, True)
    assert found.decode_speedup is None, "it is not known when requests' first tokens were decoded"
    # 100 and 200 ms per token.
    two = figures(AnswerFigures, arm([1.0, 2.0]))
    assert two.ms_per_token_std == pytest.approx(100 / 2**0.5)
    batch = arm([1.0], sent=False)
    once = figures(SpeedupFigures, batch, batch)
    assert (once.drift, once.drifted, once.interleaved) == (None, None, False)
    assert once.decode_speedup.estimate == 1


END = 9


def answer(token_ids: list[int], **known: Any) -> RequestRecord:
    return RequestRecord(0, 3, token_ids=token_ids, num_tokens=len(token_ids), **known)


def share_after_end(request: RequestRecord) -> float | None:
    answered = [Answered(requests=[request], seconds=0.0)]
    return figures(EndFigures, answered, end_tokens={END}).share_after_end


@pytest.mark.parametrize(
    ("token_ids", "share"),
    [([1, 2, 3], 0), ([END, 5, 5, 5], 3 / 4), ([1, 2, 3, 4, END, 5, 5, 5], 3 / 8), ([], None)],
)
def test_tokens_after_the_end_are_a_share_of_all(token_ids: list[int], share: float | None) -> None:
    assert share_after_end(answer(token_ids)) == share
    sent = answer(token_ids, from_text=True)
    assert share_after_end(sent) is None, "text has no token that ends it"


# One beyond rounding, one within it, and one whose margin is unknown.
DIVERGENCES = {0: None, 1: Divergence(4, -0.75, 0.5), 2: Divergence(6, 0.5, 0.5), 3: Divergence(2)}


def found(batch: BatchTimes | None = None) -> Any:
    requests = [RequestRecord(index, 3, num_tokens=10) for index in range(5)]
    answered = [Answered(requests=requests, seconds=1.0, batch=batch)]
    run = run_of(answered, answered, divergences=DIVERGENCES)
    return TextFigures.measured(run, run.arms["speculative"])


def test_differences_beyond_rounding_are_counted_per_token_that_agrees() -> None:
    served = found()
    assert (served.identical_prompts, served.differing_prompts) == (1, 3)
    assert (served.tokens_per_difference, served.margin_over_rounding) == (22 / 2, 1.5)
    assert found(BatchTimes(0.0, 0)).tokens_per_difference is None


def test_without_a_tokenizer_texts_agree_by_ids_or_by_bytes() -> None:
    one = RequestRecord(0, 3, num_tokens=4, text="abcdefgh", shown_ids=[1, 2, 3, 4])
    other = RequestRecord(0, 3, num_tokens=3, text="axyz", shown_ids=[1, 2, 5])
    assert texts._num_leading(one, other) == 2
    other.shown_ids = [1]
    other.text = "abcdef"
    assert texts._num_leading(one, other) == 3, "6 of 8 bytes of 4 tokens"


def answered(num_accepted: int, seconds: float) -> Answered:
    """Ten iterations behind a prompt that takes 0.1 s."""
    request = RequestRecord(0, 1, [0.1], seconds, outcomes=[(4, num_accepted)] * 10)
    request.num_tokens = 1 + 10 * (num_accepted + 1)
    return Answered(requests=[request], seconds=seconds, batch=BatchTimes(0.1, 10))


def test_a_prediction_is_tokens_over_the_measured_cost() -> None:
    """Steps of 10 ms; iterations that draft for 4 ms, verify for 12 and yield 2 tokens: 2 · 10 / 16."""
    run = run_of([answered(0, 0.2)], [answered(1, 0.27)])
    regular, speculative = run.arms.values()
    regular.phases.add(Phases(defaultdict(float, forward=0.1), Counter(forward=10)))
    speculative.phases.add(Phases(defaultdict(float, forward=0.12), Counter(forward=10)))
    costs: Any = CostFigures.measured(run, speculative)
    assert costs.predicted_speedup is None, "drafting is unknown"
    speculative.phases.add(Phases(defaultdict(float, drafting=0.04), Counter(drafting=10)))
    costs = CostFigures.measured(run, speculative)
    assert (costs.draft_ms, costs.verify_ms, costs.target_step_ms) == (4.0, 12.0, None)
    assert costs.iteration_ms == pytest.approx(17.0)
    assert costs.predicted_speedup == pytest.approx(2 * 10 / 16)
    costs = CostFigures.measured(run, regular)
    assert (costs.target_step_ms, costs.predicted_speedup) == (10.0, None)


MOST = 30
ALL_DRAFT = ((4, 2), (4, 4), (4, 0))
# 30 tokens end with an iteration of one token, which has no room for a draft.
ONE_K = ((4, 2), (4, 4), (4, 1))
FEW_DRAFT = ((4, 4), *[(0, 0)] * 9)
# Drafts of 8 and 2 tokens, 4 on average.
BY_CHANCE = ((8, 2), (2, 2), (2, 0))
WHOLE = (MOST,) * 4
UNEQUAL = (3, 30, 3, 30)
# Most answers end by themselves, in an iteration that accepts more than the answer has.
EARLY = (7, 30, 12, 7)


@pytest.mark.parametrize(
    ("dialect", "drafts", "lengths"),
    [
        ("vllm", ALL_DRAFT, UNEQUAL),
        ("vllm", ((4, 2), (4, 4)), EARLY),
        ("vllm_histogram", ONE_K, WHOLE),
        ("vllm_histogram", BY_CHANCE, (15, 20, 15, 20)),
        ("vllm_histogram", ((4, 2), (4, 4)), EARLY),
        ("sglang", ONE_K, WHOLE),
        ("llama.cpp", ALL_DRAFT, WHOLE),
        ("llama.cpp", FEW_DRAFT, (2, 30, 2, 30)),
        ("llama.cpp", ((4, 2), (4, 4)), EARLY),
        # Nothing, but its page of counters is read.
        ("openai", FEW_DRAFT, UNEQUAL),
        ("openai", ((4, 2), (4, 4)), EARLY),
    ],
)
def test_figures_are_those_of_what_the_server_did(
    dialect: Dialect, drafts: Outcomes, lengths: tuple[int, ...]
) -> None:
    ends_early = lengths == EARLY
    requests = []
    outcomes = []
    for index, length in enumerate(lengths):
        iterations = iterations_of(drafts, length, MOST if ends_early else length)
        request = RequestRecord(index, 3, num_tokens=length)
        # A server that knows the end was asked for so many.
        request.max_new_tokens = MOST if ends_early else length
        note_reports(request, report_of(dialect, iterations), MOST)
        request.count_undrafted()
        requests.append(request)
        outcomes += iterations
    drafting = [outcome for outcome in outcomes if outcome[0]]
    num_drafted = sum(drafted for drafted, _ in outcomes)
    num_accepted = sum(accepted for _, accepted in outcomes)
    counted = Counts(sum(lengths), len(drafting), num_drafted, num_accepted)
    page = counted if dialect == "openai" else None
    answered = Answered(requests=requests, seconds=1.0, counted=page)
    found = figures(AcceptanceFigures, [answered])

    assert found.acceptance_rate == pytest.approx(num_accepted / num_drafted)
    over_all = found.tokens_per_iteration, found.mean_num_draft_tokens
    if dialect == "llama.cpp" and ends_early:
        # Draft tokens behind the end of an answer are counted, too.
        assert over_all == (None, None)
    else:
        num_decoded = sum(lengths) - len(lengths)
        expected = num_decoded / len(outcomes), num_drafted / len(outcomes)
        assert over_all == pytest.approx(expected)
    if dialect == "llama.cpp":
        assert found.mean_acceptance_length is None
    else:
        assert found.mean_acceptance_length == pytest.approx(1 + num_accepted / len(drafting))
        assert found.mean_proposed == pytest.approx(num_drafted / len(drafting))
    if dialect in ("vllm", "vllm_histogram", "sglang"):
        accepted = [number for _, number in drafting]
        numbers = [accepted.count(number) for number in range(max(accepted) + 1)]
        assert found.acceptance_histogram[: len(numbers)] == numbers
        assert sum(found.acceptance_histogram) == len(drafting)
    # Of a histogram the positions, and so K, follow only where every iteration drafted as many tokens.
    has_positions = dialect == "vllm" or (dialect != "llama.cpp" and drafts is ONE_K)
    assert (found.acceptance_by_position is not None) == has_positions
    if has_positions:
        first = sum(number > 0 for _, number in drafting) / len(drafting)
        assert found.acceptance_by_position[0] == pytest.approx(first, abs=1e-4)


@pytest.mark.parametrize(("rounds", "tokens_per_iteration"), [(5, 17 / 5), (None, None)])
def test_iterations_of_a_server_that_counts_behind_the_end_are_those_that_it_names(
    rounds: int | None, tokens_per_iteration: float | None
) -> None:
    """As mlx_vlm.server does: 18 tokens, 4 a round, of which the last round's second to fourth are behind the end."""
    request = RequestRecord(0, 3, num_tokens=18, max_new_tokens=18)
    timings = {"draft_n": 35, "draft_n_accepted": 15, "draft_rounds": rounds}
    note_reports(request, {"timings": timings}, 18, counts_within=False)
    found = figures(AcceptanceFigures, [Answered(requests=[request], seconds=1.0)])
    assert (found.acceptance_rate, found.tokens_per_iteration) == (15 / 35, tokens_per_iteration)
    expected = (4, 7) if rounds else (None, None)
    assert (found.mean_acceptance_length, found.mean_proposed) == expected


@pytest.mark.parametrize(("most", "tokens_per_iteration"), [(30, 29 / 10), (31, None)])
def test_counters_without_a_number_of_drafts_count_the_iterations_of_whole_answers(
    most: int, tokens_per_iteration: float | None
) -> None:
    """As those of `harness serve`: 30 tokens, of which 19 were drafted."""
    request = RequestRecord(0, 3, num_tokens=30, max_new_tokens=most)

    def found(**counts: float) -> AcceptanceFigures:
        counted = Counts(generated=30, proposed=40, **counts)
        answered = Answered(requests=[request], seconds=1.0, counted=counted)
        return figures(AcceptanceFigures, [answered])

    known = found(accepted=19)
    assert (known.acceptance_rate, known.mean_acceptance_length) == (19 / 40, None)
    assert known.tokens_per_iteration == tokens_per_iteration
    assert found().acceptance_rate is None
