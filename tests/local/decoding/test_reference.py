"""The loop that is written to be read decides the same tokens as the loop that runs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chains import GREEDY, RAGGED, SIZE, chain, request, texts
from fakes import MarkovRunner
from harness.engines.arrivals import Origin
from harness.local.decoding import reference
from harness.local.decoding.loop import Request
from harness.local.decoding.protocols import Step
from harness.local.decoding.randomness import Purpose
from harness.local.decoding.reference import speculative_reference
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter
from loops import speculative

WARPS = [GREEDY, Warp(1.0), Warp(0.8, top_k=5, top_p=0.9)]
PAGE = Path(__file__).parents[3] / "docs" / "method.md"


class SumRunner(MarkovRunner):
    """What follows a text depends on the sum of all its tokens, so that a cache that is rolled back
    wrongly shows.
    """

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        super().start(prompts)
        return Step(self._logits[torch.tensor([sum(row) % SIZE for row in self.rows])])

    def extend(self, tokens: Tensor) -> Step:
        before = torch.tensor([[sum(row)] for row in self.rows])
        super().extend(tokens)
        return Step(self._logits[(before + tokens.cumsum(dim=1)) % SIZE])


def referred(target: Tensor, draft: Tensor, one: Request, k: int) -> list[int]:
    [prompt] = one.prompts
    return speculative_reference(
        SumRunner(target),
        SumRunner(draft),
        prompt,
        one.uniforms[0],
        one.warp,
        num_draft_tokens=k,
        max_new_tokens=one.max_new_tokens,
        stop_tokens=one.stop_tokens,
    )


@pytest.mark.parametrize("k", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("warp", WARPS, ids=["greedy", "sampled", "top-k and top-p"])
@pytest.mark.parametrize("stop", [(), (9,)], ids=["no stop tokens", "stop tokens"])
def test_it_decides_the_tokens_of_the_real_loop(k: int, warp: Warp, stop: tuple[int, ...]) -> None:
    target = chain(0)
    draft = 0.5 * target + 0.5 * chain(1)  # agrees sometimes
    origins: set[Origin] = set()
    lengths: set[int] = set()
    for index in range(2):
        for prompt in RAGGED:
            one = request([prompt], warp, 20, stop, indices=[index])
            drafter = ModelDrafter(SumRunner(draft), warp)
            records = list(speculative(SumRunner(target), drafter, one, k))
            [expected] = texts(records, 1)
            assert referred(target, draft, one, k) == expected
            lengths.add(len(expected))
            origins.update(origin for record in records for origin in record.origins[0])
    if stop:
        assert min(lengths) < 20
    else:
        assert lengths == {20}
        assert origins == (set(Origin) if k else {Origin.TARGET})


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_lengths_up_to_one_proposal(length: int) -> None:
    target = chain(0)
    one = request(RAGGED[:1], Warp(1.0), length)
    drafter = ModelDrafter(SumRunner(target), one.warp)
    [expected] = texts(speculative(SumRunner(target), drafter, one, 4), 1)
    assert referred(target, target, one, 4) == expected
    assert len(expected) == length


def test_a_rejection_between_models_that_differ_by_rounding_alone() -> None:
    """It leaves no residual, and the next token is drawn from the target."""
    half = torch.tensor(0.5)
    target = torch.tensor([[0.5, 0.5]]).expand(2, 2)
    draft = torch.stack([half.nextafter(torch.tensor(1.0)), half]).expand(2, 2)
    one = Request([[0]], torch.full((1, 6, 3), 0.25), _as_they_are, 5)
    one.uniforms[..., Purpose.ACCEPT] = 1 - 2**-24
    drafter = ModelDrafter(_Probabilities(draft), _as_they_are)
    records = list(speculative(_Probabilities(target), drafter, one, 2))
    assert {record.num_accepted[0] for record in records} == {0}
    text = speculative_reference(
        _Probabilities(target), _Probabilities(draft), [0], one.uniforms[0], _as_they_are, 2, 5
    )
    assert [text] == texts(records, 1) == [[0] * 5]


def _as_they_are(probabilities: Tensor) -> Tensor:
    return probabilities


class _Probabilities(MarkovRunner):
    """Gives transition probabilities in place of logits, so that no rounding changes them."""

    def __init__(self, transitions: Tensor) -> None:
        super().__init__(transitions)
        self._logits = transitions


def test_the_page_shows_these_lines() -> None:
    """The blocks of the page, one after the other, are the function below its docstring."""
    source = Path(reference.__file__).read_text(encoding="utf-8")
    body = textwrap.dedent(source.split('"""\n')[-1])
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert "\n".join(blocks) == body
