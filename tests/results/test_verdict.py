"""The verdict: which evidence refuses a comparison, and what an interval allows to say."""

from dataclasses import replace
from typing import Any

import pytest

from harness.commands.registry import measurement
from harness.config.model_names import SECOND_COMMAND
from harness.measuring.rows import LatencyRow
from harness.results.statistics.interval import Coverage, Interval
from harness.results.verdict import ArmEvidence, judged, refusal, verdict_of

PAYS = Interval(2.0, 1.9, 2.1, Coverage(200, "prompt"))
UNTIMED = Interval()


def arm(name: str, **evidence: Any) -> ArmEvidence:
    return ArmEvidence(**{"arm": name, "num_prompts": 200, "num_tokens": 1600} | evidence)


def rows(**columns: Any) -> list[LatencyRow]:
    """A run's rows; `columns` are of the speculative one."""
    regular = LatencyRow(arm="regular", status="ok", num_prompts=9, num_tokens=80)
    figures: dict[str, Any] = {"speedup": Interval(2.0, 1.9, 2.1), "decode_speedup": Interval(2.0)}
    return [regular, replace(regular, arm="speculative", **figures | columns)]


def test_the_scarcest_unit_decides_how_much_wider_intervals_of_several_pairs_are() -> None:
    """15 prompts and 3 runs leave Student's t two degrees of freedom; without a unit the prompts count."""

    def width(coverage: Coverage | None) -> float:
        interval = Interval(2.0, 1.9, 2.1, coverage)
        (_, row) = rows(speedup=interval, num_prompts=15)
        speedup = verdict_of(row, family=6).interval
        return speedup.high - speedup.low

    of_prompts = width(Coverage(15, "prompt"))
    of_runs = width(Coverage(15, "prompt", num_runs=3))
    assert 0.2 < of_prompts < 0.6 * of_runs
    assert width(None) == pytest.approx(of_prompts)


def test_why_there_is_no_interval() -> None:
    for speedup, why in [
        (Interval(2, covers=Coverage(7, "prompt", num_effective=2)), "no interval from fewer than 8 prompts"),
        (
            Interval(2, covers=Coverage(8, "prompt", num_effective=2)),
            "no interval from 8 prompts (of which 2 count): the others' answers are much shorter",
        ),
        # As two runs that differ by as much as ten times leave it.
        (
            Interval(3.9, covers=Coverage(15, "prompt")),
            "no interval: the file has no bounds of the speed-up, or they do not contain it",
        ),
        (Interval(2, 1e-9, 4e9, Coverage(8, "prompt")), "no interval: its ends are not between 0 and a million"),
    ]:  # fmt: skip
        assert verdict_of(rows(speedup=speedup)[1]).why == why


TEXTS = {"identical_prompts": 0, "differing_prompts": 100, "tokens_per_difference": 2.0}
UNSALTED = {"salted": False}
CACHED = {"cached_tokens": 900}
NUM_FAILED = {"num_failed": 1}


def read(number: int, **evidence: Any) -> dict[str, Any]:
    """Each of 200 prompts has so many tokens."""
    return {"read": dict.fromkeys([(index, 7) for index in range(200)], number)} | evidence


# By what it is about: evidence of both arms, the speed-up, and what the refusal says; None for no refusal.
REFUSALS: dict[str, list[tuple[dict[str, Any], dict[str, Any], Interval, str | None]]] = {
    # One of 200 in one arm alone: even if it had taken ten times as long, a pair that pays would pay.
    "failures that could change the verdict": [
        ({}, {}, PAYS, None),
        ({"num_failed": 2}, {"num_failed": 2}, PAYS, None),
        ({"num_failed": 3}, {"num_failed": 3}, PAYS, "3 of 200 regular requests failed and 3 of 200 speculative"),
        ({}, NUM_FAILED, PAYS, None),
        (NUM_FAILED, {}, PAYS, None),
        ({}, NUM_FAILED, Interval(1.03, 1.01, 1.05), "1 of 200 speculative requests failed"),
        (NUM_FAILED, {}, Interval(0.97, 0.95, 0.99), "1 of 200 regular requests failed"),
    ],
    # A token more for each prompt is tolerated, and 2 % of all; of a server that leaves cached tokens out, these too.
    "prompts that servers read": [
        *((read(100), read(number), UNTIMED, None) for number in (97, 100, 103)),
        *((read(100), read(number), UNTIMED, "another chat template") for number in (96, 104)),
        (read(90), read(80, cached_tokens=2000), UNTIMED, None),
        # Turns after other answers are other prompts.
        ({"read": {(0, 7): 10, (1, 7, 8): 20}}, {"read": {(0, 7): 10, (1, 7, 9): 90}}, UNTIMED, None),
    ],
    # Rounding breaks ties: after many tokens, or in few texts.
    "greedy texts of one model": [
        ({}, TEXTS, UNTIMED, ""),
        ({}, TEXTS | {"tokens_per_difference": 20.0}, UNTIMED, None),
        ({}, TEXTS | {"identical_prompts": 100}, UNTIMED, None),
        ({}, TEXTS | {"tokens_per_difference": None}, UNTIMED, None),
        ({}, TEXTS | {"differing_prompts": 2}, UNTIMED, None),
        ({}, TEXTS | {"differing_prompts": 3}, UNTIMED, ""),
    ],
    "a tenth more tokens": [
        ({"num_tokens": 1000}, {"num_tokens": 900}, UNTIMED, None),
        ({"num_tokens": 1000}, {"num_tokens": 899}, UNTIMED,
         "the arms did not do the same work: regular generated 1000 tokens, speculative 899"),
        ({"num_tokens": 899}, {"num_tokens": 1000}, UNTIMED, ""),
    ],
    "other clients": [
        ({"foreign_tokens": 260}, {}, PAYS, None),
        ({}, {"foreign_tokens": 261}, PAYS, "processed 261 tokens for other clients and 2600 for"),
    ],
    # Asked again within the run, with and without salts; a server's own settings may differ.
    "a cache that answers": [
        (CACHED, CACHED, PAYS, None),
        (CACHED, {"cached_tokens": 100}, PAYS, None),
        (CACHED | UNSALTED, {"cached_tokens": 100} | UNSALTED, PAYS, "of the 1000 prompt tokens"),
        (UNSALTED, {"cached_tokens": 21} | UNSALTED, PAYS, "of the 1000 prompt tokens"),
        # Equal shares are no difference.
        (CACHED | UNSALTED, CACHED | UNSALTED, PAYS, None),
        # Speculation may cost the cache of the turns before.
        (CACHED, UNSALTED | {"in_turns": True}, PAYS, None),
        ({"cached_from_before": 21}, UNSALTED | {"in_turns": True}, PAYS, "of the 1000 prompt tokens"),
        (UNSALTED, {"cached_tokens": 20} | UNSALTED, PAYS, None),
        (CACHED | {"cached_from_before": 21}, CACHED, PAYS, "of the 1000 prompt tokens"),
        (CACHED, CACHED | {"cached_from_before": 20}, PAYS, None),
    ],
}  # fmt: skip


@pytest.mark.parametrize("about", REFUSALS)
def test_what_refuses_a_comparison(about: str) -> None:
    for regular, speculative, speedup, said in REFUSALS[about]:
        asked = {"num_prompt_tokens": 1000}
        arms = arm("regular", **asked | regular), arm("speculative", **asked | speculative)
        reason = refusal(*arms, speedup)
        assert (reason is None) == (said is None), (regular, speculative)
        assert (said or "") in (reason or "")
        for name, evidence in (("regular", regular), ("speculative", speculative)):
            is_named = f"{name} requests failed" in (reason or "")
            assert is_named == (reason is not None and "num_failed" in evidence)


@pytest.mark.parametrize(
    ("regular", "speculative", "reason"),
    [
        ({"drafted": True, "acceptance_rate": 0.534}, {}, "the regular server drafts: 53 %"),
        ({"drafted": True}, {"drafted": True}, "the regular server drafts"),
        ({"drafted": True}, {"drafted": False}, "drafts nothing: swap url= and regular_url="),
        ({"drafted": False}, {"drafted": False}, "the speculative server drafted nothing"),
        ({"drafted": False}, {"drafted": True}, None),
        ({}, {}, None),
        ({"num_restarts": 1}, {}, "the regular server's counters fell"),
    ],
)
def test_one_server_must_draft_and_the_other_must_not(
    regular: dict[str, Any], speculative: dict[str, Any], reason: str | None
) -> None:
    refused = refusal(arm("regular", **regular), arm("speculative", **speculative))
    assert (refused is None) == (reason is None)
    assert (reason or "") in (refused or "")
    # Two connections to one server compare it with itself.
    pair = rows(drafted=True, url="http://a/v1", regular_url="http://a/v1", served_model=["m"])
    assert judged([replace(pair[0], drafted=True), pair[1]])[1].speedup == Interval(2.0, 1.9, 2.1)
    pair[1] = replace(pair[1], served_model=["m", "m-eagle3"])
    assert judged([replace(pair[0], drafted=True), pair[1]])[1].speedup is None
    # Of two commands either may draft. The second one must where its K is known, or its flags make it draft.
    second = rows(drafted=False, draft=SECOND_COMMAND, flags_draft=False)
    assert judged(second)[1].speedup is not None
    for asked in ({"num_draft_tokens": 4}, {"flags_draft": True}):
        [_, judgement] = judged([second[0], replace(second[1], **asked)])
        assert judgement.error.startswith("the server compared with the first drafted nothing: ")


@pytest.mark.parametrize(
    ("excess", "lossy", "refused"),
    [(1.0, False, False), (1.1, False, True), (130.0, True, False), (None, False, False)],
)
def test_an_arm_that_calls_itself_lossless_keeps_greedy_texts(
    excess: float | None, lossy: bool, refused: bool
) -> None:
    found = {"num_prompts": 200, "identical_prompts": 3, "differing_prompts": 15}
    pair = rows(margin_over_rounding=excess, lossy=lossy, **found)
    judgement = judged(pair)[1]
    assert (judgement.status == "no_verdict") == refused
    assert (judgement.speedup is None) == refused
    if refused:
        assert judgement.error is not None
        assert "agree on 3 of 18 prompts, and part at a logit margin 1.1 times" in judgement.error


def drawn(name: str, lengths: dict[int, int]) -> ArmEvidence:
    return arm(name, lengths=lengths, num_tokens=sum(lengths.values()), drawn=True)


def test_drawn_texts_are_compared_in_pairs() -> None:
    """Eight of eight texts that end after 5 of 9 tokens are no chance, although 44 % fewer tokens are."""
    regular = drawn("regular", dict.fromkeys(range(8), 9))
    reason = refusal(regular, drawn("speculative", dict.fromkeys(range(8), 5)))
    assert reason is not None
    assert "the speculative arm's texts are shorter" in reason
    assert "72 tokens" in reason
    # Seven of seven are, once in 64 runs.
    arms = (("regular", 9), ("speculative", 5))
    seven = [drawn(name, dict.fromkeys(range(7), n)) for name, n in arms]
    assert refusal(*seven) is None
    mixed = {index: 5 if index % 2 else 13 for index in range(8)}
    assert refusal(regular, drawn("speculative", mixed)) is None
    # Lengths that scatter around the regular ones are chance, although 18 % fewer tokens are many.
    scattered = dict(enumerate((5, 13, 5, 13, 5, 5, 5, 13)))
    assert refusal(regular, drawn("speculative", scattered)) is None


def test_nothing_is_faster_than_its_tokens_per_iteration() -> None:
    speculative = arm("speculative", tokens_per_iteration=1.5)
    reason = refusal(arm("regular"), speculative, PAYS)
    assert reason is not None
    assert "2.00× is impossible with 1.50 tokens per iteration" in reason
    assert refusal(arm("regular"), speculative, Interval(2.0)) is None
    # The same without an interval may be chance. To leave out what is above the limit would bias what is left.
    lucky = rows(speedup=Interval(2.0), tokens_per_iteration=1.5)[1]
    assert verdict_of(lucky).relation == "open"
    assert verdict_of(lucky).interval.estimate == 2.0
    # At a rate the slower server also has the longer queue.
    assert refusal(arm("regular"), replace(speculative, draft=SECOND_COMMAND), PAYS) is None
    for most in ({"tokens_per_iteration": 2.0}, {"mean_proposed": 1.0}):
        # By chance an interval begins a little above what is possible.
        for low, refused in ((2.04, False), (2.05, True)):
            found = refusal(arm("regular"), arm("speculative", **most), Interval(2.2, low, 2.3))
            assert (found is not None) == refused


def test_rows_of_arms_that_cannot_be_compared_lose_their_speedup() -> None:
    alone = [replace(rows()[0], ignore_eos=False)]
    assert judged(alone) == alone
    assert judged(rows()) == rows()
    other_caches = rows(salted=False, cached_tokens=50, num_prompt_tokens=100)
    assert judged(other_caches)[1].speedup is None
    in_turns = [replace(row, settings={"prompts.turns": "all"}) for row in other_caches]
    assert judged(in_turns) == in_turns
    refused = judged(rows(num_tokens=30))
    assert [row.status for row in refused] == ["no_verdict", "no_verdict"]
    assert "30" in str(refused[0].error)
    assert refused[1].num_tokens == 30
    assert refused[1].speedup is None
    assert refused[1].decode_speedup is None
    assert judged(refused) == refused
    bad_answer = measurement("latency").bad_answer(refused)
    assert str(bad_answer).startswith("no verdict: the arms did not do the same work")
    assert bad_answer.exit_code == 3
    assert verdict_of(refused[1]).why == refused[1].error
    assert measurement("latency").bad_answer(rows()) is None
    # Texts that are drawn and end by themselves may differ more.
    for temperature, refuses in ((1.0, False), (0.0, True)):
        pair = [replace(r, ignore_eos=False, temperature=temperature) for r in rows(num_tokens=40)]
        assert (judged(pair)[1].speedup is None) == refuses
    pair = [replace(row, ignore_eos=False, temperature=1.0) for row in rows(num_tokens=60)]
    # One prompt has an answer of one arm alone.
    shorter = {"regular": {"lengths": dict.fromkeys(range(9), 9)}}
    shorter["speculative"] = {"lengths": dict.fromkeys(range(8), 5)}
    assert "generated 72 tokens, speculative 40" in str(judged(pair, shorter)[1].error)
    # An interrupted run stays one.
    assert judged(rows(num_tokens=30, status="interrupted"))[1].status == "interrupted"


def test_random_weights_conclude_nothing() -> None:
    row = rows()[1]
    assert verdict_of(row).pays
    assert verdict_of(rows(speedup=Interval(0.5, 0.4, 0.6))[1]).relation == "below"
    assert verdict_of(replace(row, weights="random")).relation == "open"
    by_coin = replace(row, weights="random", draft="7B", synthetic_acceptance=0.8)
    assert verdict_of(by_coin).pays


def test_an_interval_among_many_is_wider() -> None:
    row = rows(speedup=Interval(2.0, 1.01, 3.96, Coverage(9, "prompt")))[1]
    assert verdict_of(row).pays
    among = verdict_of(row, family=5)
    assert (among.relation, among.is_judged, among.family) == ("open", True, 5)
    # The interval of a run that stopped by itself has a higher level already; one over several runs has the usual one.
    over_runs = replace(row, speedup=replace(row.speedup, covers=Coverage(9, "prompt", num_runs=5)))
    for measured, is_narrower in ((row, True), (over_runs, False)):
        usual = verdict_of(measured, family=5).interval
        stopped = verdict_of(replace(measured, precision=0.02), family=5).interval
        assert (stopped.high < usual.high) == is_narrower
    damaged = replace(row, speedup=Interval(2.0, -1.0, 3.96))
    assert not verdict_of(damaged).is_judged
    for speedup in (None, Interval(1e7, 1e7, 1e7)):
        assert verdict_of(replace(row, speedup=speedup)).why == "no speed-up was measured"
