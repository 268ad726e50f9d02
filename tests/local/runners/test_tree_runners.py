"""Runners extended by trees compute what plain passes over each path compute, and keep a path of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from architectures import (
    PROMPTS,
    SERVED,
    VOCABULARY,
    close,
    logits_without_cache,
    random_model,
)
from harness.local.decoding.trees import TreeShape
from harness.local.runners.base import CacheRunner
from harness.local.runners.compiled import PreparedRunner
from harness.local.runners.eager import EagerRunner
from harness.local.runners.prepared_calls import RunnerShapes
from harness.local.runners.slots import UnsupportedModelError
from harness.local.runners.static import StaticRunner
from harness.local.runners.tree_passes import TreeDemand


def prepared(model: PreTrainedModel) -> PreparedRunner:
    """Whole trees, and parts that are filled up."""
    runner = PreparedRunner(model, compiled=False, captured=True)
    runner.prepare(RunnerShapes(3, 64, (1, 2), trees=TreeDemand((4, 7), 7)))
    return runner


RUNNERS: list[Callable[..., CacheRunner]] = [EagerRunner, StaticRunner, prepared]
FEW = ["llama", "gpt2", "mistral"]
SHAPES = [(0, 0, 1, 3, 2, 4), (0, 1, 1, 2, 2, 2), (0, 0, 0, 0, 3, 5)]
# The nodes that each row keeps.
KEPT = [[2, 5], [1, 3], [3, 5, 6]]


def path_to(parents: tuple[int, ...], node: int) -> list[int]:
    path: list[int] = []
    while node:
        path.insert(0, node)
        node = parents[node - 1]
    return path


def tree_tokens(num_rows: int = 3, num_nodes: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(1, VOCABULARY, (num_rows, num_nodes + 1), generator=generator)


@pytest.mark.parametrize(
    ("make", "name"),
    [(make, name) for make in RUNNERS for name in (FEW if make is prepared else SERVED)],
)
def test_trees_agree_with_plain_passes(make: Callable[..., CacheRunner], name: str) -> None:
    """Over prompts longer than every sliding window; then texts go on behind the paths that are kept."""
    model = random_model(name)
    runner = make(model)
    runner.start(PROMPTS)
    tokens = tree_tokens()
    logits = runner.extend(tokens, TreeShape(SHAPES)).logits
    texts = [list(prompt) for prompt in PROMPTS]
    for row, (text, parents) in enumerate(zip(texts, SHAPES, strict=True)):
        for node in range(7):
            path = tokens[row, [0, *path_to(parents, node)]].tolist()
            expected = logits_without_cache(model, [*text, *path])[-1]
            assert close(logits[row, node], expected), (name, row, node)
    paths = [[0, *kept, *(set(range(1, 7)) - set(kept))] for kept in KEPT]
    runner.keep_path(torch.tensor(paths), [len(kept) + 1 for kept in KEPT])
    for row, kept in enumerate(KEPT):
        texts[row] += tokens[row, [0, *kept]].tolist()
    behind = runner.extend(torch.full((3, 1), 7)).logits[:, -1]
    for row, text in enumerate(texts):
        assert close(behind[row], logits_without_cache(model, [*text, 7])[-1])


@pytest.mark.parametrize("make", RUNNERS)
def test_a_node_that_is_read_alone_does_not_see_its_siblings(
    make: Callable[..., CacheRunner],
) -> None:
    """Of one row, where a single token of a text needs no mask."""
    model = random_model("llama")
    runner = make(model)
    runner.start(PROMPTS[:1])
    runner.extend(torch.tensor([[5, 6, 7]]), TreeShape([(0, 0)]))
    behind_first = runner.extend(torch.tensor([[8]]), TreeShape([(0, 0, 1)])).logits[0, -1]
    assert close(behind_first, logits_without_cache(model, [*PROMPTS[0], 5, 6, 8])[-1])


@pytest.mark.parametrize("make", RUNNERS)
@pytest.mark.parametrize("name", FEW)
def test_a_tree_can_be_read_in_parts(make: Callable[..., CacheRunner], name: str) -> None:
    """Rows of different lengths, and a sliding window: the parts see what they see in one pass."""
    model, tokens = random_model(name), tree_tokens()
    runner = make(model)
    runner.start(PROMPTS)
    whole = runner.extend(tokens, TreeShape(SHAPES)).logits
    runner.keep([0, 0, 0])
    parts = [
        runner.extend(
            tokens[:, first:end], TreeShape([parents[: end - 1] for parents in SHAPES])
        ).logits
        for first, end in [(0, 1), (1, 4), (4, 7)]
    ]
    assert close(torch.cat(parts, dim=1), whole)
    with pytest.raises(ValueError, match="before a tree"):
        runner.extend(tokens, TreeShape(SHAPES))


def test_a_model_without_explicit_positions_is_refused() -> None:
    runner = EagerRunner(random_model("bloom"))
    runner.start(PROMPTS)
    with pytest.raises(UnsupportedModelError, match="positions"):
        runner.extend(tree_tokens(), TreeShape(SHAPES))
