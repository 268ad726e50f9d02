"""The two decoding loops, as generators of records. Printing, timing and files consume the records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.decoding.protocols import Drafter, Iteration, NonFiniteError, Origin, Proposal, Runner
from harness.decoding.randomness import Purpose, inverse_cdf
from harness.decoding.transfer import to_device
from harness.decoding.verify import Verdict, verify
from harness.decoding.warp import Warp


@dataclass(frozen=True)
class Request:
    """What to generate, the same for every arm.

    Attributes:
        prompts: token ids of B prompts, none empty.
        uniforms: [B, at least max_new_tokens + 1, len(Purpose)] from `randomness.uniforms`, on the target's device; for
            `speculative` with `redraw` at least (max_new_tokens + 1) (K + 1).
        warp: how logits become probabilities.
        max_new_tokens: a row ends when it has this many tokens,
        stop_tokens: or after the first of these; none to generate exactly max_new_tokens.
    """

    prompts: Sequence[Sequence[int]]
    uniforms: Tensor
    warp: Warp
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()

    def cut(self, tokens: list[int], num_generated: int) -> tuple[list[int], bool]:
        """Those of `tokens` that a row with `num_generated` tokens may take, and whether the row ends with them."""
        tokens = tokens[: self.max_new_tokens - num_generated]
        for index, token in enumerate(tokens):
            if token in self.stop_tokens:
                return tokens[: index + 1], True
        return tokens, num_generated + len(tokens) == self.max_new_tokens


@torch.inference_mode()
def autoregressive(target: Runner, request: Request) -> Iterator[Iteration]:
    """Regular decoding: one token per row and forward pass."""
    rows = list(range(len(request.prompts)))
    uniforms = request.uniforms[:, :, Purpose.TARGET]
    logits = target.start(request.prompts).logits
    for position in range(request.max_new_tokens):
        token = inverse_cdf(request.warp(logits), uniforms[:, position])
        tokens = [[decided] for decided in token.tolist()]
        _check_finite(tokens, logits.shape[-1], [position] * len(rows))
        yield _regular(rows, tokens)
        going_on = [i for i, new in enumerate(tokens) if not request.cut(new, position)[1]]
        if not going_on:
            return
        if len(going_on) < len(rows):
            target.select(going_on)
            rows = [rows[i] for i in going_on]
            kept = to_device(going_on, token.device)
            token, uniforms = token[kept], uniforms[kept]
        logits = target.extend(token.unsqueeze(1)).logits[:, -1]
        target.keep([1] * len(rows))


@torch.inference_mode()
def speculative(
    target: Runner,
    drafter: Drafter,
    request: Request,
    num_draft_tokens: int,
    lenience: float = 1.0,
    verification: Callable[..., Verdict] = verify,
    redraw: bool = False,
) -> Iterator[Iteration]:
    """Speculative decoding: up to K proposed tokens, one forward pass of the target over them, one verdict.

    Near the end of a generation fewer tokens are proposed, so that the cache never holds more than prompt and
    `max_new_tokens`. `verification` takes what `verify` takes; it is not called where no row is offered a token.
    `redraw` proposes and accepts with new random numbers in every iteration. It is needed for a rule whose decision
    depends on the tokens that it discards, as block verification does; see `decoding.randomness`.
    """
    rows = list(range(len(request.prompts)))
    uniforms = request.uniforms
    step = target.start(request.prompts)
    next_tokens = inverse_cdf(request.warp(step.logits), uniforms[:, 0, Purpose.TARGET]).tolist()
    _check_finite([[token] for token in next_tokens], step.logits.shape[-1], [0] * len(rows))
    yield _regular(rows, [[token] for token in next_tokens])
    num_generated = [1] * len(rows)
    going_on = [i for i, token in enumerate(next_tokens) if not request.cut([token], 0)[1]]
    if not going_on:
        return
    drafter.start(request.prompts, next_tokens, step)

    for turn in itertools.count(1):
        if len(going_on) < len(rows):
            target.select(going_on)
            drafter.select(going_on)
            rows = [rows[i] for i in going_on]
            num_generated = [num_generated[i] for i in going_on]
            next_tokens = [next_tokens[i] for i in going_on]
            uniforms = uniforms[to_device(going_on, uniforms.device)]

        # The last token of a row is the next token of a verdict, so one fewer needs to be drafted than is missing. Each
        # row has its own limit, however many tokens the others need: an answer must not depend on its batch.
        limits = [min(num_draft_tokens, request.max_new_tokens - count - 1) for count in num_generated]
        fitting = _from_position(uniforms, num_generated, max(limits) + 1)
        unused = request.max_new_tokens + 1 + turn * num_draft_tokens
        tried = uniforms[:, unused : unused + max(limits)] if redraw else fitting[:, :-1]
        if max(limits):
            proposal = drafter.propose(max(limits), tried[:, :, Purpose.DRAFT])
        else:
            proposal = Proposal(torch.empty(len(rows), 0, dtype=torch.long, device=uniforms.device))
        offered = proposal.lengths or [proposal.tokens.shape[1]] * len(rows)
        lengths = [min(pair) for pair in zip(limits, offered, strict=True)]
        width = max(lengths)
        draft_tokens, draft_probabilities = proposal.tokens[:, :width], proposal.probabilities
        pending = to_device(next_tokens, draft_tokens.device).unsqueeze(1)
        step = target.extend(torch.cat([pending, draft_tokens], dim=1))
        verdict = (verification if width else verify)(
            request.warp(step.logits),
            draft_tokens,
            None if draft_probabilities is None else draft_probabilities[:, :width],
            tried[:, :width, Purpose.ACCEPT],
            fitting[:, : width + 1, Purpose.TARGET],
            lenience,
            to_device(lengths, step.logits.device) if min(lengths) < width else None,
        )

        # The one synchronisation with the device: all that the host must know, in one transfer.
        broken = verdict.draft_probability.isnan().any(-1)
        figures = torch.stack([verdict.num_accepted, verdict.next_token, broken.long()], dim=1)
        decided = torch.cat([figures, draft_tokens], dim=1).tolist()
        num_accepted = [row[0] for row in decided]
        next_tokens = [row[1] for row in decided]
        proposed = [row[3 : 3 + length] for row, length in zip(decided, lengths, strict=True)]
        positions = [count + accepted for count, accepted in zip(num_generated, num_accepted, strict=True)]
        _check_finite([[token] for token in next_tokens], step.logits.shape[-1], positions)
        _check_finite([row[2:3] for row in decided], 1, positions, "draft")
        target.keep([count + 1 for count in num_accepted])

        tokens: list[list[int]] = []
        origins: list[list[Origin]] = []
        going_on = []
        for i, count in enumerate(num_accepted):
            new, ended = request.cut([*proposed[i][:count], next_tokens[i]], num_generated[i])
            tokens.append(new)
            origins.append([*[Origin.DRAFT] * count, _last_origin(count, lengths[i])][: len(new)])
            num_generated[i] += len(new)
            if not ended:
                going_on.append(i)
        if going_on:
            drafter.observe(num_accepted, next_tokens, step)
        yield Iteration(rows, tokens, origins, proposed, num_accepted, verdict)
        if not going_on:
            return


def _check_finite(tokens: list[list[int]], limit: int, positions: Sequence[int], role: str = "model") -> None:
    """Raise a NonFiniteError for a row whose number is not below the limit, as the index drawn from nan is not."""
    for (token,), position in zip(tokens, positions, strict=True):
        if token >= limit:
            raise NonFiniteError(role, position)


def _regular(rows: list[int], tokens: list[list[int]]) -> Iteration:
    """The record of tokens drawn from the target, one per row."""
    return Iteration(rows, tokens, [[Origin.TARGET]] * len(rows), [[]] * len(rows), [0] * len(rows))


def _last_origin(num_accepted: int, num_offered: int) -> Origin:
    """Where the token that follows the accepted ones comes from."""
    if num_accepted < num_offered:
        return Origin.RECOVERED
    return Origin.BONUS if num_offered else Origin.TARGET


def _from_position(uniforms: Tensor, positions: Sequence[int], count: int) -> Tensor:
    """`count` uniforms per row, starting at each row's own position: [B, P, purposes] -> [B, count, purposes]."""
    if len(set(positions)) == 1:
        return uniforms[:, positions[0] : positions[0] + count]
    index = to_device(positions, uniforms.device).unsqueeze(1) + torch.arange(count, device=uniforms.device)
    # A row near its end may not need them all; positions beyond the stream are never decided.
    index = index.clamp(max=uniforms.shape[1] - 1)
    return uniforms[torch.arange(len(positions), device=uniforms.device).unsqueeze(1), index]
