"""The loop that is written to be read decides the same tokens as the loop that runs."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chains import GREEDY, RAGGED, SIZE, chain, request, speculative, texts
from fakes import MarkovRunner
from harness.engines.arrivals import Origin
from harness.local.decoding import reference
from harness.local.decoding.protocols import Step
from harness.local.decoding.reference import speculative_reference
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter

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


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("warp", WARPS, ids=["greedy", "sampled", "top-k and top-p"])
@pytest.mark.parametrize("stop", [(), (9,)], ids=["no stop tokens", "stop tokens"])
def test_it_decides_the_tokens_of_the_real_loop(k: int, warp: Warp, stop: tuple[int, ...]) -> None:
    target = chain(0)
    draft = 0.5 * target + 0.5 * chain(1)  # agrees sometimes
    origins: set[Origin] = set()
    lengths: set[int] = set()
    for index, (length, prompt) in enumerate(itertools.product((1, 2, 3, 20), RAGGED)):
        one = request([prompt], warp, length, stop, indices=[index])
        drafter = ModelDrafter(SumRunner(draft), warp)
        records = list(speculative(SumRunner(target), drafter, one, k))
        [expected] = texts(records, 1)
        reference = speculative_reference(
            SumRunner(target),
            SumRunner(draft),
            prompt,
            one.uniforms[0],
            warp,
            k,
            length,
            one.stop_tokens,
        )
        assert reference == expected
        lengths.add(len(expected))
        origins.update(origin for record in records for origin in record.origins[0])
    if stop:
        assert lengths - {1, 2, 3, 20}
    else:
        assert lengths == {1, 2, 3, 20}
        assert origins == (set(Origin) if k else {Origin.TARGET})


def test_the_page_shows_these_lines() -> None:
    """The blocks of the page, one after the other, are the function below its docstring."""
    source = Path(reference.__file__).read_text(encoding="utf-8")
    body = textwrap.dedent(source.split('"""\n')[-1])
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert "\n".join(blocks) == body
