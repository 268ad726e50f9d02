"""Figures of acceptance against what servers did that report it in each of their ways."""

from __future__ import annotations

import pytest

from harness.engines.counts import Counts
from harness.engines.protocol import Answered
from harness.engines.requests import RequestRecord
from harness.measuring.figures.acceptance import AcceptanceFigures
from harness.servers.events import note_reports
from known_server import Outcomes, Reports, iterations_of, report_of
from measured_runs import figures

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
    ("reports", "drafts", "lengths"),
    [
        ("iterations", ALL_DRAFT, UNEQUAL),
        ("iterations", ((4, 2), (4, 4)), EARLY),
        ("histogram", ONE_K, WHOLE),
        ("histogram", BY_CHANCE, (15, 20, 15, 20)),
        ("histogram", ((4, 2), (4, 4)), EARLY),
        ("totals", ALL_DRAFT, WHOLE),
        ("totals", FEW_DRAFT, (2, 30, 2, 30)),
        ("totals", ((4, 2), (4, 4)), EARLY),
        ("counters", FEW_DRAFT, UNEQUAL),
        ("counters", ((4, 2), (4, 4)), EARLY),
    ],
)
def test_figures_are_those_of_what_the_server_did(
    reports: Reports, drafts: Outcomes, lengths: tuple[int, ...]
) -> None:
    ends_early = lengths == EARLY
    requests = []
    outcomes = []
    for index, length in enumerate(lengths):
        iterations = iterations_of(drafts, length, MOST if ends_early else length)
        request = RequestRecord(index, 3, num_tokens=length)
        # A server that knows the end was asked for so many.
        request.max_new_tokens = MOST if ends_early else length
        note_reports(request, report_of(reports, iterations), MOST)
        request.count_undrafted()
        requests.append(request)
        outcomes += iterations
    drafting = [outcome for outcome in outcomes if outcome[0]]
    num_drafted = sum(drafted for drafted, _ in outcomes)
    num_accepted = sum(accepted for _, accepted in outcomes)
    counted = Counts(sum(lengths), len(drafting), num_drafted, num_accepted)
    answered = Answered(
        requests=requests, seconds=1.0, counted=counted if reports == "counters" else None
    )
    found = figures(AcceptanceFigures, [answered])

    assert found.acceptance_rate == pytest.approx(num_accepted / num_drafted)
    over_all = found.tokens_per_iteration, found.mean_num_draft_tokens
    if reports == "totals" and ends_early:
        # Draft tokens behind the end of an answer are counted, too.
        assert over_all == (None, None)
    else:
        num_decoded = sum(lengths) - len(lengths)
        expected = num_decoded / len(outcomes), num_drafted / len(outcomes)
        assert over_all == pytest.approx(expected)
    if reports == "totals":
        assert found.mean_acceptance_length is None
    else:
        assert found.mean_acceptance_length == pytest.approx(1 + num_accepted / len(drafting))
        assert found.mean_proposed == pytest.approx(num_drafted / len(drafting))
    if reports in ("iterations", "histogram"):
        accepted = [number for _, number in drafting]
        numbers = [accepted.count(number) for number in range(max(accepted) + 1)]
        assert found.acceptance_histogram[: len(numbers)] == numbers
        assert sum(found.acceptance_histogram) == len(drafting)
    # Of a histogram the positions, and so K, follow only where every iteration drafted as many tokens.
    has_positions = reports == "iterations" or (reports == "histogram" and drafts is ONE_K)
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
    assert (found.mean_acceptance_length, found.mean_proposed) == (
        (4, 7) if rounds else (None, None)
    )


@pytest.mark.parametrize(("most", "tokens_per_iteration"), [(30, 29 / 10), (31, None)])
def test_counters_without_a_number_of_drafts_count_the_iterations_of_whole_answers(
    most: int, tokens_per_iteration: float | None
) -> None:
    """As those of `harness serve`: 30 tokens, of which 19 were drafted."""
    request = RequestRecord(0, 3, num_tokens=30, max_new_tokens=most)

    def found(**counts: float) -> AcceptanceFigures:
        counted = Counts(generated=30, proposed=40, **counts)
        return figures(
            AcceptanceFigures, [Answered(requests=[request], seconds=1.0, counted=counted)]
        )

    known = found(accepted=19)
    assert (known.acceptance_rate, known.mean_acceptance_length) == (19 / 40, None)
    assert known.tokens_per_iteration == tokens_per_iteration
    assert found().acceptance_rate is None
