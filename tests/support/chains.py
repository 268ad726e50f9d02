"""Requests through the loop, and Markov chains as models: texts, and the exact distribution of these."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from harness.engines import protocol
from harness.local.decoding.iteration import Calls
from harness.local.decoding.loop import Loop, RowRequest, RowStep
from harness.local.decoding.protocols import Drafter, Runner
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.warp import Warp
from harness.local.engine.engine import LocalArm

SIZE = 12
GREEDY = Warp(temperature=0)
RAGGED = [[5, 9, 3, 4, 7, 1, 8], [11, 3], [10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]]


def chain(seed: int, sharpness: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(SIZE, SIZE, generator=generator)).softmax(-1)


def small_chain(seed: int, sharpness: float, size: int) -> Tensor:
    """A chain over so few tokens that whole texts can be counted."""
    corner = chain(seed, sharpness)[:size, :size].double()
    return corner / corner.sum(-1, keepdim=True)


def p_value_of_texts(drawn: list[list[int]], transitions: Tensor, last: int) -> float:
    """Chi-square over texts as long as each other, all their tokens together, that follow the token `last`."""
    size, length = len(transitions), len(drawn[0])
    exact = transitions[last]
    for _ in range(length - 1):
        exact = exact.unsqueeze(-1) * transitions
    codes = torch.tensor(drawn) @ size ** torch.arange(length - 1, -1, -1)
    counts = codes.bincount(minlength=exact.numel()).numpy()
    return float(stats.chisquare(counts, len(drawn) * exact.flatten().numpy()).pvalue)


def requests(
    prompts: Sequence[Sequence[int]],
    warp: Warp = GREEDY,
    length: int = 20,
    stop: Iterable[int] = (),
    indices: Iterable[int] = (),
    num_positions: int = 0,
) -> list[RowRequest]:
    return [
        RowRequest(
            prompt, uniforms(0, index, num_positions or length + 1), warp, length, frozenset(stop)
        )
        for prompt, index in zip(prompts, list(indices) or range(len(prompts)), strict=True)
    ]


def texts(iterations: Iterable[list[RowStep]], num_rows: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    for iteration in iterations:
        for row_step in iteration:
            rows[row_step.row] += row_step.tokens
    return rows


def row_steps(iterations: Iterable[list[RowStep]]) -> list[RowStep]:
    return [row_step for iteration in iterations for row_step in iteration]


def decoded(loop: Loop, requests: Sequence[RowRequest]) -> Iterator[list[RowStep]]:
    """Decode requests together, from their first tokens on, until all their rows have ended."""
    yield loop.start(requests)
    while loop.num_running:
        yield loop.step()


def autoregressive(target: Runner, requests: Sequence[RowRequest]) -> Iterator[list[RowStep]]:
    return decoded(Loop(Calls(target)), requests)


def speculative(
    target: Runner,
    drafter: Drafter,
    requests: Sequence[RowRequest],
    num_draft_tokens: int,
    *options: Any,
    **named: Any,
) -> Iterator[list[RowStep]]:
    """The options are those of `Calls`, behind K."""
    return decoded(Loop(Calls(target, drafter, num_draft_tokens, *options, **named)), requests)


def records_of(arm: Any, requests: Sequence[protocol.Request]) -> Iterator[list[RowStep]]:
    """The records of requests that share their K and rule, as an arm of our engine decides them."""
    assert isinstance(arm, LocalArm)
    with arm.explained(requests):
        loop, iteration = arm.begin(requests)
        yield iteration
        while loop.num_running:
            yield loop.step()
