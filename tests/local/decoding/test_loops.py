import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from chains import (
    GREEDY,
    RAGGED,
    SIZE,
    autoregressive,
    chain,
    requests,
    row_steps,
    speculative,
    texts,
)
from fakes import MarkovRunner, TableDrafter
from harness.engines.arrivals import Origin
from harness.local.decoding.iteration import Calls
from harness.local.decoding.loop import Loop, RowRequest
from harness.local.decoding.protocols import NonFiniteError, Proposal, Step
from harness.local.decoding.randomness import Purpose, inverse_cdf, uniforms
from harness.local.decoding.state import Column, RowState, Starts
from harness.local.decoding.verify import AcceptByCoin, Offer, Verdict, verify, verify_block
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter


@pytest.mark.parametrize("warp", [GREEDY, Warp(0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "following", [{}, {9: 8}, {0: 1, 1: 5, 3: 4, 4: 7, 5: 9, 7: 0, 9: 2}], ids=len
)
def test_rows_are_offered_what_the_drafter_has(following: dict[int, int], warp: Warp) -> None:
    """Some rows of a batch get K tokens, some fewer and some none; `TableDrafter` checks what it is given."""
    target, num_rows = MarkovRunner(chain(0)), 40
    what = requests([[row % 5, row % SIZE] for row in range(num_rows)], warp)
    drafter = TableDrafter(following)
    iterations = list(speculative(target, drafter, what, 4))
    if warp == GREEDY:
        regular = autoregressive(MarkovRunner(chain(0)), what)
        assert texts(iterations, num_rows) == texts(regular, num_rows)
    assert set(drafter.num_offered) == {0: {0}, 1: {0, 1}, 7: {0, 1, 2, 3, 4}}[len(following)]
    lasts = {
        (len(row_step.proposed), row_step.num_accepted, row_step.origins[-1])
        for row_step in row_steps(iterations[1:])
        if len(row_step.tokens) > row_step.num_accepted
    }
    for offered, accepted, origin in lasts:
        whole = Origin.BONUS if offered else Origin.TARGET
        assert origin == (whole if accepted == offered else Origin.RECOVERED)
    assert len({origin for _, _, origin in lasts}) >= {0: 1, 1: 2, 7: 3}[len(following)]


def test_without_an_offer_the_target_sees_the_pending_token_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths: list[int] = []
    original = MarkovRunner.extend

    def extend(self: MarkovRunner, tokens: Tensor, starts: Starts) -> Step:
        widths.append(tokens.shape[1])
        return original(self, tokens, starts)

    def never(offer: Offer) -> Verdict:
        raise AssertionError("nothing to verify")

    monkeypatch.setattr(MarkovRunner, "extend", extend)
    what = requests(RAGGED, Warp(1.0), 6)
    iterations = speculative(MarkovRunner(chain(0)), TableDrafter({}), what, 4, verification=never)
    silent = list(iterations)
    assert widths == [1] * 5
    assert texts(silent, 3) == texts(autoregressive(MarkovRunner(chain(0)), what), 3)
    origins = {origin for row_step in row_steps(silent) for origin in row_step.origins}
    assert origins == {Origin.TARGET}
    assert all(row_step.rejection is None for row_step in row_steps(silent))


@pytest.mark.parametrize("warp", [GREEDY, Warp(temperature=1)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("role", ["model", "draft"])
@pytest.mark.parametrize(
    "rule", [verify, verify_block, AcceptByCoin((1.0,))], ids="default block coin".split()
)
def test_no_rule_accepts_past_logits_that_are_not_finite(
    rule: Callable[..., Verdict], role: str, warp: Warp
) -> None:
    """The text is 1 2 3 4 ..., and after 3 one of the models has no numbers."""
    sound = torch.eye(SIZE).roll(1, dims=1)
    broken = sound.clone()
    broken[3] = torch.nan
    target, draft = (broken, sound) if role == "model" else (sound, broken)
    drafter = ModelDrafter(MarkovRunner(draft), warp)
    what = requests([[5], [0]], warp)
    with pytest.raises(NonFiniteError) as caught:
        list(speculative(MarkovRunner(target), drafter, what, 4, verification=rule))
    assert (caught.value.role, caught.value.position) == (role, 3)


def test_the_last_tokens_begin_where_compiled_code_reads_without_a_copy() -> None:
    for num_rows in (1, 2, 3):
        last = RowState.resting(num_rows, 1, 1, "cpu").last
        assert last.storage_offset() * last.itemsize % 16 == 0


def test_a_row_that_has_ended_rests_while_others_go_on() -> None:
    loop = Loop(Calls(MarkovRunner(chain(0))))
    asked = ((5, 3), (0, 12))
    loop.start([requests([[row]], length=number, num_positions=13)[0] for row, number in asked])
    while loop.num_running == 2:
        loop.step()
    running, decided = (
        loop._state.numbers[column].tolist() for column in (Column.RUNNING, Column.DECIDED)
    )
    assert (running, decided) == ([0, 1], [3, 3])
    while loop.num_running:
        loop.step()
    running, decided = (
        loop._state.numbers[column].tolist() for column in (Column.RUNNING, Column.DECIDED)
    )
    assert (running, decided) == ([0, 0], [3, 12])


WARPS = [GREEDY, Warp(1.0), Warp(0.8, top_k=5, top_p=0.9)]
PAGE = Path(__file__).parents[3] / "docs" / "method.md"


def the_pages_method() -> Any:
    """The blocks of the page, one after the other, as one function."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    given = "target, draft, prompt, uniforms, warp, num_draft_tokens, max_new_tokens, stop_tokens"
    source = f"def method({given}):\n" + textwrap.indent("\n".join(blocks), "    ")
    names: dict[str, Any] = {"inverse_cdf": inverse_cdf, "Purpose": Purpose, "torch": torch}
    exec(source, names)
    return names["method"]


class SumRunner(MarkovRunner):
    """What follows a text depends on the sum of all its tokens, so that a cache that is rolled back
    wrongly shows.
    """

    def start(
        self, prompts: Sequence[Sequence[int]], num_slots: int = 0, *, alone: bool = False
    ) -> Step:
        super().start(prompts)
        return Step(self._logits[torch.tensor([sum(row) % SIZE for row in self.rows])])

    def extend(self, tokens: Tensor, starts: Starts, *, goes_on: bool = False) -> Step:
        super().extend(tokens, starts, goes_on=goes_on)
        num_new = tokens.shape[1]
        before = torch.tensor([[sum(row[:-num_new])] for row in self.rows])
        return Step(self._logits[(before + tokens.cumsum(dim=1)) % SIZE])


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("warp", WARPS, ids=["greedy", "sampled", "top-k and top-p"])
@pytest.mark.parametrize("stop", [(), (9,)], ids=["no stop tokens", "stop tokens"])
def test_it_decides_the_tokens_of_the_real_loop(k: int, warp: Warp, stop: tuple[int, ...]) -> None:
    target = chain(0)
    draft = 0.5 * target + 0.5 * chain(1)  # agrees sometimes
    origins: set[Origin] = set()
    lengths: set[int] = set()
    for index, (length, prompt) in enumerate(itertools.product((1, 2, 3, 20), RAGGED)):
        [one] = requests([prompt], warp, length, stop, indices=[index])
        drafter = ModelDrafter(SumRunner(draft), warp)
        records = list(speculative(SumRunner(target), drafter, [one], k))
        [expected] = texts(records, 1)
        models = SumRunner(target), SumRunner(draft)
        given = *models, prompt, one.uniforms, warp, k, length, one.stop_tokens
        assert the_pages_method()(*given) == expected
        lengths.add(len(expected))
        origins.update(origin for row_step in row_steps(records) for origin in row_step.origins)
    if stop:
        assert lengths - {1, 2, 3, 20}
    else:
        assert lengths == {1, 2, 3, 20}
        assert origins == (set(Origin) if k else {Origin.TARGET})


def test_a_stream_is_uniform_and_depends_on_seed_and_prompt_alone() -> None:
    batch = torch.stack([uniforms(3, index, 10) for index in range(3)])
    assert batch.shape == (3, 10, len(Purpose))
    assert torch.equal(uniforms(3, 1, 4), batch[1, :4])
    assert not torch.equal(uniforms(4, 0, 10), batch[0])
    assert len(batch.unique()) == batch.numel()
    numbers = torch.cat([uniforms(0, index, 100) for index in range(200)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for purpose in Purpose:
        assert stats.kstest(numbers[..., purpose].flatten().numpy(), "uniform").pvalue > 1e-9


class Noting(TableDrafter):
    """Keeps the numbers that it is given to draft with."""

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        self.given = uniforms
        return super().propose(num_draft_tokens, uniforms)


@pytest.mark.parametrize(("redraw", "begin"), [(False, 3), (True, 10 + 2 * 3)])
def test_an_iteration_may_have_numbers_that_no_other_and_no_position_has(
    redraw: bool, begin: int
) -> None:
    """In the third iteration of a row that has accepted nothing, by position 1 + 2."""
    stream = uniforms(seed=0, prompt_index=0, num_positions=30)
    offers: list[Offer] = []

    def reject(offer: Offer) -> Verdict:
        offers.append(offer)
        return verify(replace(offer, accept_uniforms=torch.full_like(offer.accept_uniforms, 2)))

    drafter = Noting(dict.fromkeys(range(SIZE), 0))
    runner = MarkovRunner(torch.eye(SIZE).roll(1, dims=1).add(0.01).log().softmax(-1))
    loop = Loop(Calls(runner, drafter, 3, verification=reject, redraw=redraw))
    loop.start([RowRequest([1], stream, Warp(1.0), max_new_tokens=9)])
    for _ in range(3):
        loop.step()
    assert torch.equal(drafter.given, stream[None, begin : begin + 3, Purpose.DRAFT])
    assert torch.equal(offers[-1].accept_uniforms, stream[None, begin : begin + 3, Purpose.ACCEPT])
    assert torch.equal(offers[-1].next_uniforms, stream[None, 3:7, Purpose.TARGET])


def test_inverse_cdf_draws_the_right_cell_and_none_without_weight() -> None:
    weights = torch.tensor([2.0, 0.0, 1.0, 1.0, 0.0])
    for uniform, expected in [(0.0, 0), (0.49, 0), (0.5, 2), (0.74, 2), (0.75, 3), (0.999, 3)]:
        assert inverse_cdf(weights, torch.tensor(uniform)).item() == expected
    almost_one = torch.tensor(1 - 2**-24)
    weights = torch.rand(1000, 300, generator=torch.Generator().manual_seed(0))
    weights[:, 150:] = 0
    weights[:, :3] = 0
    for uniform in (torch.zeros(1000), almost_one.expand(1000)):
        drawn = inverse_cdf(weights, uniform)
        assert ((drawn >= 3) & (drawn < 150)).all()
    assert inverse_cdf(torch.tensor([0.0, 1e-30, 0.0]), almost_one).item() == 1


@pytest.mark.parametrize("size", [4097, 50_257])
def test_large_vocabularies_draw_what_one_scan_would(size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(6, 40, size, generator=generator).mul(4).softmax(-1)
    weights[:, ::2] *= (
        torch.rand(weights[:, ::2].shape, generator=generator) < 0.01
    )  # whole blocks without weight
    numbers = torch.rand(6, 40, generator=generator)
    numbers[:, :5], numbers[:, 5:10] = 0.0, 1 - 2**-24
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    expected = torch.searchsorted(
        cumulative, numbers.unsqueeze(-1) * cumulative[..., -1:], right=True
    ).squeeze(-1)
    drawn = inverse_cdf(weights, numbers)
    assert torch.equal(drawn, expected)
    assert (weights.gather(-1, drawn.unsqueeze(-1)) > 0).all()
    broken = torch.rand(2, size)
    broken[0, -1], broken[1] = torch.nan, 0
    assert inverse_cdf(broken, torch.tensor([0.1, 0.1])).tolist() == [size, size], "no token"
