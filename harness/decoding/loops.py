"""The two decoding loops, as generators of records. Printing, timing and files consume the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.decoding.protocols import Drafter, Iteration, Origin, Runner
from harness.decoding.randomness import Purpose, inverse_cdf
from harness.decoding.transfer import to_device
from harness.decoding.verify import Verdict, verify
from harness.decoding.warp import Warp


@dataclass(frozen=True)
class Request:
    """What to generate, alike for every arm.

    Attributes:
        prompts: token ids of B prompts, none empty.
        uniforms: [B, at least max_new_tokens + 1, len(Purpose)] from `randomness.uniforms`, on the target's device.
        warp: how logits become probabilities.
        max_new_tokens: a row ends with this many tokens,
        stop_tokens: or with the first of these; none to generate exactly max_new_tokens.
    """

    prompts: Sequence[Sequence[int]]
    uniforms: Tensor
    warp: Warp
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()

    def cut(self, tokens: list[int], num_generated: int) -> tuple[list[int], bool]:
        """`tokens` as far as a row with `num_generated` tokens may take them, and whether the row ends with them."""
        tokens = tokens[: self.max_new_tokens - num_generated]
        for index, token in enumerate(tokens):
            if token in self.stop_tokens:
                return tokens[: index + 1], True
        return tokens, num_generated + len(tokens) == self.max_new_tokens


@torch.inference_mode()
def autoregressive(target: Runner, request: Request) -> Iterator[Iteration]:
    """Regular decoding: one token a row and forward pass."""
    rows = list(range(len(request.prompts)))
    uniforms = request.uniforms[:, :, Purpose.TARGET]
    logits = target.start(request.prompts)
    for position in range(request.max_new_tokens):
        token = inverse_cdf(request.warp(logits), uniforms[:, position])
        tokens = [[decided] for decided in token.tolist()]
        yield Iteration(rows, tokens, [[Origin.TARGET]] * len(rows), [[]] * len(rows), [0] * len(rows))
        going_on = [i for i, new in enumerate(tokens) if not request.cut(new, position)[1]]
        if not going_on:
            return
        if len(going_on) < len(rows):
            target.select(going_on)
            rows = [rows[i] for i in going_on]
            kept = to_device(going_on, token.device)
            token, uniforms = token[kept], uniforms[kept]
        logits = target.extend(token.unsqueeze(1))[:, -1]
        target.keep([1] * len(rows))


@torch.inference_mode()
def speculative(
    target: Runner,
    drafter: Drafter,
    request: Request,
    num_draft_tokens: int,
    lenience: float = 1.0,
    verification: Callable[..., Verdict] = verify,
) -> Iterator[Iteration]:
    """Speculative decoding: K proposed tokens, one forward pass of the target over them, one verdict.

    Near the end of a generation fewer tokens are proposed, so that the cache never holds more than prompt and
    `max_new_tokens`. `verification` takes what `verify` takes.
    """
    rows = list(range(len(request.prompts)))
    uniforms = request.uniforms
    first = inverse_cdf(request.warp(target.start(request.prompts)), uniforms[:, 0, Purpose.TARGET])
    next_tokens = first.tolist()
    yield Iteration(
        rows, [[token] for token in next_tokens], [[Origin.TARGET]] * len(rows), [[]] * len(rows), [0] * len(rows)
    )
    num_generated = [1] * len(rows)
    going_on = [i for i, token in enumerate(next_tokens) if not request.cut([token], 0)[1]]
    if not going_on:
        return
    drafter.start(request.prompts, next_tokens)

    while True:
        if len(going_on) < len(rows):
            target.select(going_on)
            drafter.select(going_on)
            rows = [rows[i] for i in going_on]
            num_generated = [num_generated[i] for i in going_on]
            next_tokens = [next_tokens[i] for i in going_on]
            uniforms = uniforms[to_device(going_on, uniforms.device)]

        # The last token of a row is the next token of a verdict, so one fewer needs to be drafted than is wanted. Each
        # row has its own limit, whatever the others need: an answer must not depend on its batch.
        limits = [min(num_draft_tokens, request.max_new_tokens - count - 1) for count in num_generated]
        num_proposed = max(1, *limits)
        fitting = _from_position(uniforms, num_generated, num_proposed + 1)
        proposal = drafter.propose(num_proposed, fitting[:, :num_proposed, Purpose.DRAFT])
        pending = to_device(next_tokens, proposal.tokens.device).unsqueeze(1)
        logits = target.extend(torch.cat([pending, proposal.tokens], dim=1))
        verdict = verification(
            request.warp(logits),
            proposal.tokens,
            proposal.probabilities,
            fitting[:, :num_proposed, Purpose.ACCEPT],
            fitting[:, :, Purpose.TARGET],
            lenience,
            to_device(limits, logits.device) if min(limits) < num_proposed else None,
        )

        # The one synchronisation with the device: everything the host must know, in one transfer.
        decided = torch.cat([verdict.num_accepted[:, None], verdict.next_token[:, None], proposal.tokens], 1).tolist()
        num_accepted = [row[0] for row in decided]
        next_tokens = [row[1] for row in decided]
        proposed = [row[2 : 2 + limit] for row, limit in zip(decided, limits, strict=True)]
        target.keep([count + 1 for count in num_accepted])
        drafter.observe(num_accepted, next_tokens)

        tokens: list[list[int]] = []
        origins: list[list[Origin]] = []
        going_on = []
        for i, count in enumerate(num_accepted):
            new, ended = request.cut([*proposed[i][:count], next_tokens[i]], num_generated[i])
            tokens.append(new)
            origins.append([*[Origin.DRAFT] * count, _last_origin(count, limits[i])][: len(new)])
            num_generated[i] += len(new)
            if not ended:
                going_on.append(i)
        yield Iteration(rows, tokens, origins, proposed, num_accepted, verdict)
        if not going_on:
            return


def _last_origin(num_accepted: int, num_proposed: int) -> Origin:
    """Who wrote the token that follows the accepted ones."""
    if num_accepted < num_proposed:
        return Origin.RECOVERED
    return Origin.BONUS if num_proposed else Origin.TARGET


def _from_position(uniforms: Tensor, positions: Sequence[int], count: int) -> Tensor:
    """`count` uniforms a row from each row's own position on: [B, P, purposes] -> [B, count, purposes]."""
    if len(set(positions)) == 1:
        return uniforms[:, positions[0] : positions[0] + count]
    index = to_device(positions, uniforms.device).unsqueeze(1) + torch.arange(count, device=uniforms.device)
    # A row near its end may not need them all; what lies beyond the stream is never decided.
    index = index.clamp(max=uniforms.shape[1] - 1)
    return uniforms[torch.arange(len(positions), device=uniforms.device).unsqueeze(1), index]
