"""One turn of a loop: what is queued on the device, and what the host reads of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from harness.decoding.adaptive import DraftLength
from harness.decoding.batch import Rows
from harness.decoding.decisions import Draw, Judge
from harness.decoding.protocols import (
    Drafter,
    Iteration,
    NonFiniteError,
    Origin,
    Proposal,
    Runner,
    Step,
)
from harness.decoding.randomness import Purpose
from harness.decoding.transfer import Arriving, added, first_columns, to_device, to_host
from harness.decoding.verify import Offer, Verdict, verify


def regular_step(
    target: Runner, rows: Rows, pending: Tensor, positions: Sequence[int]
) -> tuple[Step, Tensor]:
    """Queue one turn of regular decoding over the last token of each row -> also the tokens [B] at these positions."""
    uniforms = rows.uniforms_from(positions, 1)[:, 0, Purpose.TARGET]
    step, (drawn,) = target.decide(pending.unsqueeze(1), Draw(rows.warp), uniforms)
    target.keep([1] * len(rows.numbers))
    return step, rows.agree(drawn)


@dataclass(frozen=True)
class Turn:
    """An iteration of `speculative` that is queued, and its verdict, which the host may not have read.

    Attributes:
        limits, lengths: how many tokens each row was asked for, and offered.
        read: waits for the figures of the `Judge`, in one transfer that has begun.
    """

    limits: list[int]
    lengths: list[int]
    step: Step
    verdict: Verdict
    read: Callable[[], list[list[int]]]

    @cached_property
    def decided(self) -> list[list[int]]:
        """The figures. The first time, the host waits for the device."""
        return self.read()

    def arriving(self, vocabulary_size: int) -> tuple[Sequence[int], Sequence[int]]:
        """`num_accepted` and `next_token`, for a device that goes on with them, and with none that does not exist."""
        accepted, following = (
            self.verdict.num_accepted,
            self.verdict.next_token.clamp(max=vocabulary_size - 1),
        )
        return (
            Arriving(accepted, lambda: [row[0] for row in self.decided], max(self.lengths)),
            Arriving(following, lambda: [row[1] for row in self.decided], vocabulary_size - 1),
        )

    def decide(self, rows: Rows) -> Iteration:
        """Read the verdict, and give the rows their tokens."""
        decided, width = self.decided, max(self.lengths)
        num_accepted = [row[0] for row in decided]
        next_tokens = [row[1] for row in decided]
        proposed = [row[4 : 4 + length] for row, length in zip(decided, self.lengths, strict=True)]
        # What a rule accepts need not depend on the target's probability of it.
        for column, role in ((2, "model"), (3, "draft")):
            for row, count in zip(decided, rows.num_generated, strict=True):
                if row[column] < width:
                    raise NonFiniteError(role, count + row[column])
        rows.check_finite(next_tokens, added(rows.num_generated, num_accepted))
        accepted = [tokens[:count] for tokens, count in zip(proposed, num_accepted, strict=True)]
        tokens = rows.take(
            [[*kept, last] for kept, last in zip(accepted, next_tokens, strict=True)]
        )
        origins = [
            [*[Origin.DRAFT] * count, _last_origin(count, offered)][: len(new)]
            for count, offered, new in zip(num_accepted, self.lengths, tokens, strict=True)
        ]
        return Iteration(rows.numbers, tokens, origins, proposed, num_accepted, self.verdict)


@dataclass(frozen=True)
class Turns:
    """The turns of `speculative`; see there."""

    target: Runner
    drafter: Drafter
    rows: Rows
    draft_length: DraftLength
    lenience: float
    verification: Callable[[Offer], Verdict]
    redraw: bool

    def queue(
        self, num_draft_tokens: int, before: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Turn:
        """Draft and verify, behind all that `rows` knows of, or also behind the verdict `before`, far from the end."""
        rows, num_rows = self.rows, len(self.rows.numbers)
        num_generated: Sequence[int] = rows.num_generated
        next_tokens: Sequence[int] = rows.next_tokens
        num_iterations = rows.num_iterations
        if before:
            num_accepted, next_tokens = before
            num_generated = added(num_accepted, [count + 1 for count in rows.num_generated])
            num_iterations = [count + 1 for count in rows.num_iterations]
            limits = [num_draft_tokens] * num_rows
        else:
            # The last token of a row is the next token of a verdict, so one fewer needs to be drafted than is missing.
            # Each row has its own limit, however many tokens the others need: an answer must not depend on its batch.
            limits = [
                min(num_draft_tokens, request.max_new_tokens - count - 1)
                for request, count in zip(rows.requests, rows.num_generated, strict=True)
            ]
        # In the order of `Purpose`.
        to_draft, to_accept, to_follow = rows.uniforms_from(num_generated, max(limits) + 1).unbind(
            -1
        )
        if self.redraw:
            unused = [
                request.max_new_tokens + 1 + (1 + count) * self.draft_length.most
                for request, count in zip(rows.requests, num_iterations, strict=True)
            ]
            to_draft, to_accept, _ = rows.uniforms_from(unused, max(limits)).unbind(-1)
        if max(limits):
            proposal = self.drafter.propose(max(limits), first_columns(to_draft, max(limits)))
        else:
            proposal = Proposal(
                torch.empty(num_rows, 0, dtype=torch.long, device=rows.uniforms.device)
            )
        offered: Sequence[int] = [proposal.tokens.shape[1]] * num_rows
        if proposal.lengths is not None:
            offered = rows.agree(torch.tensor(proposal.lengths)).tolist()
        lengths = [min(pair) for pair in zip(limits, offered, strict=True)]
        width = max(lengths)
        draft_tokens, probabilities = (
            rows.agree(first_columns(proposal.tokens, width)),
            proposal.probabilities,
        )
        inputs = [
            draft_tokens,
            first_columns(to_accept, width),
            first_columns(to_follow, width + 1),
        ]
        inputs += [] if probabilities is None else [first_columns(probabilities, width)]
        rule = self.verification if width else verify
        decision: Callable[..., tuple[Tensor, ...]] = Judge(
            rows.warp, rule, self.lenience, probabilities is None
        )
        if min(lengths) < width:
            decision = partial(decision, lengths=to_device(lengths, draft_tokens.device))
        pending = to_device(next_tokens, draft_tokens.device).unsqueeze(1)
        step, (figures, *chosen) = self.target.decide(
            torch.cat([pending, draft_tokens], dim=1), decision, *inputs
        )
        figures = rows.agree(figures)
        verdict = Verdict(*figures.unbind(1)[:2], *chosen)
        return Turn(limits, lengths, step, verdict, to_host(figures))

    def undrafted(self) -> Iteration:
        """A turn without draft tokens, at the cost of regular decoding."""
        rows = self.rows
        pending = to_device(rows.next_tokens, rows.uniforms.device)
        step, drawn = regular_step(self.target, rows, pending, rows.num_generated)
        tokens, none = drawn.tolist(), [0] * len(rows.numbers)
        record = rows.take_drawn(tokens)
        if rows.going_on():
            self.drafter.observe(none, tokens, step)
        self.draft_length.observe(none, none)
        empty = torch.empty(len(none), 0, device=drawn.device)
        return replace(record, verdict=Verdict(to_device(none, drawn.device), drawn, empty, empty))


def _last_origin(num_accepted: int, num_offered: int) -> Origin:
    """Where the token that follows the accepted ones comes from."""
    if num_accepted < num_offered:
        return Origin.RECOVERED
    return Origin.BONUS if num_offered else Origin.TARGET
