from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from chains import SIZE
from fakes import MarkovRunner, TableDrafter
from harness.local.decoding.loop import Loop, Request
from harness.local.decoding.protocols import Proposal
from harness.local.decoding.randomness import Purpose, inverse_cdf, uniforms
from harness.local.decoding.verify import Offer, Verdict, verify
from harness.local.decoding.warp import Warp


def test_a_stream_is_uniform_and_depends_on_seed_and_prompt_alone() -> None:
    batch = uniforms(seed=3, prompt_indices=[0, 1, 2], num_positions=10)
    assert batch.shape == (3, 10, len(Purpose))
    assert torch.equal(uniforms(3, [2], 10)[0], batch[2])
    assert torch.equal(uniforms(3, [1, 0], 4), batch[[1, 0], :4])
    assert not torch.equal(uniforms(4, [0], 10), batch[:1])
    assert len(batch.unique()) == batch.numel()
    numbers = uniforms(seed=0, prompt_indices=range(200), num_positions=100)
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
    stream = uniforms(seed=0, prompt_indices=[0], num_positions=30)
    offers: list[Offer] = []

    def reject(offer: Offer) -> Verdict:
        offers.append(offer)
        return verify(replace(offer, accept_uniforms=torch.full_like(offer.accept_uniforms, 2)))

    drafter = Noting(dict.fromkeys(range(SIZE), 0))
    runner = MarkovRunner(torch.eye(SIZE).roll(1, dims=1).add(0.01).log().softmax(-1))
    loop = Loop(runner, drafter, 3, verification=reject, redraw=redraw)
    loop.add([Request([[1]], stream, Warp(1.0), max_new_tokens=9)])
    for _ in range(3):
        loop.step()
    assert torch.equal(drafter.given, stream[:, begin : begin + 3, Purpose.DRAFT])
    assert torch.equal(offers[-1].accept_uniforms, stream[:, begin : begin + 3, Purpose.ACCEPT])
    assert torch.equal(offers[-1].next_uniforms, stream[:, 3:7, Purpose.TARGET])


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
