from __future__ import annotations

import pytest
import torch

from architectures import random_model
from harness.local.engine.reference import NUM_POSITIONS, largest_rounding, recompute
from harness.local.runners.snapshot import SnapshotRunner


def test_routes_that_agree_leave_the_rounding_of_two_logits() -> None:
    """Below 16 a bfloat16 is a multiple of 1/16; each of both logits may be off by half of that, in each text."""
    logits = torch.tensor([15.0, 14.0, 3.0, 25.0]).expand(4, 3, 4)
    epsilon = torch.finfo(torch.bfloat16).eps
    assert largest_rounding(logits, (0, 1), epsilon) == 2 / 16
    assert largest_rounding(logits, (3, 0), epsilon) == 2 / 8


def test_routes_that_differ_raise_the_allowance() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(5, 4, 50, generator=generator)
    logits = torch.linspace(20, 1, 50) + noise
    # Of a margin, which has two errors.
    expected = 5 * 0.1 * 2**0.5
    assert largest_rounding(logits, (0, 1), 1e-7) == pytest.approx(expected, rel=0.3)


@pytest.mark.parametrize("length", [1, 2, 6, 20])
def test_every_route_computes_the_same_logits(length: int) -> None:
    model = random_model("llama", seed=1, vocab_size=32)
    runner = SnapshotRunner(model)

    def logits(
        prompts: list[list[int]], continuations: list[list[int]] | None = None
    ) -> torch.Tensor:
        found = runner.start(prompts).logits
        if continuations is not None:
            found = runner.extend(torch.tensor(continuations)).logits[:, -1]
        return found

    text = torch.randint(32, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    routes = recompute(logits, model, text)
    assert routes.shape[1] == min(length if length < 6 else length - 5, NUM_POSITIONS)
    expected = torch.stack(
        [logits([text[: length - place]])[0] for place in range(routes.shape[1])]
    )
    torch.testing.assert_close(routes, expected.expand(len(routes), -1, -1), atol=1e-5, rtol=1e-4)
    # Changed embeddings round differently.
    assert not torch.equal(routes[-1], routes[0])
