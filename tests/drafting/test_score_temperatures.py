"""The temperature at which a row's trees are scored follows from what its draft was right about."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chains import GREEDY, RAGGED, chain, p_value_of_texts, small_chain, texts
from fakes import MarkovRunner, PlanDrafter
from harness.decoding.batch import Request
from harness.decoding.randomness import uniforms
from harness.decoding.tree_rules import verify_rounds
from harness.decoding.tree_speculation import speculative_trees
from harness.decoding.warp import RowWarp, Warp
from harness.drafting.trees.growth import Grown
from harness.drafting.trees.plan import TreePlan
from harness.drafting.trees.score_temperatures import CANDIDATES, ScoreTemperatures
from verifiers import FALSE_ALARM_RATE

CPU = torch.device("cpu")
AUTO = TreePlan("dynamic", 8, score_temperature="auto")


def grown(probabilities: Tensor) -> Grown:
    """A tree of one level for each row: all tokens, with these probabilities [B, V] at temperature 1."""
    at_each = [(probabilities.log() / one).log_softmax(-1) for one in CANDIDATES]
    num_rows, size = probabilities.shape
    tokens = torch.arange(size).expand(num_rows, -1)
    return Grown(tokens, tokens, torch.zeros_like(tokens), torch.stack(at_each, dim=-1))


def after_tokens(scores: ScoreTemperatures, drawn: Tensor, trees: Grown) -> list[float]:
    """The temperatures after tokens [B, n] of each row were decided, each instead of the same tree."""
    num_rows = len(drawn)
    for tokens in drawn.unbind(1):
        scores.remember(trees)
        scores.observe(torch.empty(num_rows, 0), [0] * num_rows, tokens.tolist())
    return scores.of_rows(Warp(), CPU).tolist()


def test_each_row_finds_the_temperature_of_its_own_tokens() -> None:
    """A draft says 0.7, 0.2, 0.1. The first row's tokens are all the likeliest, those of the second as
    likely as it says, and those of the third equally likely.
    """
    probabilities = torch.tensor([[0.7, 0.2, 0.1]]).expand(3, -1)
    sure = [0] * 30
    calibrated = [0, 1, 0, 0, 2, 0, 0, 1, 0, 0] * 3
    confused = [0, 1, 2] * 10
    scores = ScoreTemperatures("auto")
    scores.add(3)
    first = scores.of_rows(Warp(), CPU).tolist()
    drawn = torch.tensor([sure, calibrated, confused])
    found = after_tokens(scores, drawn, grown(probabilities))
    assert len(set(first)) == 1
    assert found[0] == pytest.approx(CANDIDATES[0])
    assert found[0] < found[1] <= 1 < found[2] == CANDIDATES[-1]
    scores.select([2, 0])
    scores.add(1)
    assert scores.of_rows(Warp(), CPU).tolist() == [found[2], found[0], first[0]]


def test_a_single_mistake_does_not_outweigh_what_was_right() -> None:
    """A draft that is sure is right nine times, and wrong in the end."""
    scores = ScoreTemperatures("auto")
    scores.add(1)
    drawn = torch.tensor([[*[0] * 9, 1]])
    assert after_tokens(scores, drawn, grown(torch.tensor([[0.999, 0.001]])))[0] < 1


def test_a_number_is_the_lowest_temperature_of_a_row() -> None:
    scores = ScoreTemperatures(0.5)
    scores.add(2)
    assert scores.of_rows(Warp(0), CPU).tolist() == [0.5, 0.5]
    rows = RowWarp((Warp(0.25), Warp(2.0)))
    assert scores.of_rows(rows, CPU).tolist() == [0.5, 2.0]


def turns(
    target: Tensor, draft: Tensor, prompts: list[list[int]], indices: list[int], warp: Warp
) -> dict[int, list[tuple[list[int], list[int]]]]:
    """What each row was proposed and what it took, turn by turn, by the index of its prompt."""
    length = 24
    numbers = uniforms(0, indices, (length + 1) * (AUTO.budget + 1))
    drafter = PlanDrafter(draft, AUTO, warp)
    what = Request(prompts, numbers, warp, length)
    found: dict[int, list[tuple[list[int], list[int]]]] = {index: [] for index in indices}
    runner = MarkovRunner(target)
    for record in speculative_trees(runner, drafter, what, 4, AUTO.budget, verify_rounds):
        for place, row in enumerate(record.rows):
            proposed = record.proposed[place] if record.proposed else []
            found[indices[row]].append((proposed, record.tokens[place]))
    return found


@pytest.mark.parametrize("warp", [GREEDY, Warp(0.8)], ids=["greedy", "sampled"])
def test_a_row_s_trees_do_not_depend_on_its_batch(warp: Warp) -> None:
    target, draft = chain(0), chain(0, 6.0)
    together = turns(target, draft, RAGGED, [0, 1, 2], warp)
    for index, prompt in enumerate(RAGGED):
        assert turns(target, draft, [prompt], [index], warp)[index] == together[index]


def test_the_loop_keeps_the_target_s_distribution() -> None:
    """Chi-square over six tokens; the draft is far too sure, so that temperatures change."""
    num_rows, length = 2000, 6
    target, draft = small_chain(5, 0.8, 3), small_chain(6, 5.0, 3).float()
    numbers = uniforms(0, range(num_rows), (length + 1) * (AUTO.budget + 1))
    what = Request([[0]] * num_rows, numbers, Warp(1.0), length)
    drafter = PlanDrafter(draft, AUTO, Warp(1.0))
    runner = MarkovRunner(target.float())
    records = speculative_trees(runner, drafter, what, 2, AUTO.budget, verify_rounds)
    assert p_value_of_texts(texts(records, num_rows), target, 0) > FALSE_ALARM_RATE
