"""The two decoding loops, as generators of records. Printing, timing and files consume the records.

A consumer that sends a `Change` after a record lets rows leave and join while the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from harness.decoding.adaptive import Constant, DraftLength
from harness.decoding.batch import Agree, Change, Records, Request, Rows, itself, regular_record
from harness.decoding.protocols import Drafter, Iteration, NonFiniteError, Origin, Proposal, Runner, Step
from harness.decoding.randomness import Purpose, inverse_cdf
from harness.decoding.transfer import Arriving, added, to_device, to_host
from harness.decoding.verify import Offer, Verdict, verify
from harness.decoding.warp import RowWarp


@torch.inference_mode()
def autoregressive(target: Runner, request: Request, ahead: bool = False, agree: Agree = itself) -> Records:
    """Regular decoding: one token per row and forward pass.

    With `ahead` the device goes on while the host reads: a step is queued before the tokens of the one before it are
    read, where these cannot end a row and the consumer sends nothing. It changes no record, only when each is yielded.
    `agree` is for several processes that decode together, see `Rows`.
    """
    rows = Rows(RowWarp(), agree)
    queued: Tensor | None = None
    change: Change | None = Change(joining=[request])
    while rows.numbers or (change and change.joining):
        if change and change.joining:
            record = rows.join(change.joining, (target.add if rows.numbers else target.start)(change.prompts).logits)
        else:
            if queued is None:
                pending = to_device(rows.next_tokens, rows.uniforms.device)
                _, queued = _step(target, rows, pending, rows.num_generated)
            read, drawn, queued = to_host(queued), queued, None
            if ahead and change is None and rows.all_outlast(1):
                # A token that does not exist is noticed when it is read, and no model survives to be fed it.
                pending = drawn.clamp(max=rows.vocabulary_size - 1)
                _, queued = _step(target, rows, pending, [count + 1 for count in rows.num_generated])
            tokens = read()
            rows.check_finite(tokens, rows.num_generated)
            record = regular_record(rows.numbers, rows.take([[token] for token in tokens]))
        change = yield record
        going_on = rows.going_on(change.ended if change else ())
        if queued is not None and (len(going_on) < len(rows.numbers) or (change and change.joining)):
            raise ValueError("a batch that is worked on ahead cannot change")
        if len(going_on) < len(rows.numbers):
            if going_on:
                target.select(going_on)
            rows.select(going_on)


def _step(target: Runner, rows: Rows, pending: Tensor, positions: Sequence[int]) -> tuple[Step, Tensor]:
    """Queue one turn of regular decoding over the last token of each row -> also the tokens [B] at these positions."""
    step = target.extend(pending.unsqueeze(1))
    target.keep([1] * len(rows.numbers))
    drawn = inverse_cdf(rows.warp(step.logits[:, -1]), rows.uniforms_from(positions, 1)[:, 0, Purpose.TARGET])
    return step, rows.agree(drawn)


@torch.inference_mode()
def speculative(
    target: Runner,
    drafter: Drafter,
    request: Request,
    num_draft_tokens: int | DraftLength,
    lenience: float = 1.0,
    verification: Callable[[Offer], Verdict] = verify,
    redraw: bool = False,
    warp: RowWarp | None = None,
    ahead: bool = False,
    agree: Agree = itself,
) -> Records:
    """Speculative decoding: up to K proposed tokens, one forward pass of the target over them, one verdict.

    `num_draft_tokens` is K, or chooses it before every iteration; 0 is an iteration of regular decoding.

    Near the end of a generation fewer tokens are proposed, so that the cache never holds more than prompt and
    `max_new_tokens`. `verification` takes what `verify` takes; it is not called where no row is offered a token.
    `redraw` proposes and accepts with new random numbers in every iteration. It is needed for a rule whose decision
    depends on the tokens that it discards, as block verification does; see `decoding.randomness`. `warp` is the
    drafter's, if rows with other settings may join. `ahead` and `agree` are as in `autoregressive`: an iteration is
    queued behind another one if K is a number and no row can end within two.
    """
    rows = Rows(warp or RowWarp(), agree)
    chosen = Constant(num_draft_tokens) if isinstance(num_draft_tokens, int) else num_draft_tokens
    ahead = ahead and isinstance(num_draft_tokens, int)
    queue = partial(_queue, target, drafter, rows, chosen, lenience, verification, redraw)
    queued: _Turn | None = None
    change: Change | None = Change(joining=[request])
    while rows.numbers or (change and change.joining):
        begin: Callable[[], None] | None = None
        if change and change.joining:
            prompts, is_first = change.prompts, not rows.numbers
            step = (target.start if is_first else target.add)(prompts)
            record = rows.join(change.joining, step.logits)
            first_tokens = [token for [token] in record.tokens]
            begin = partial(drafter.start if is_first else drafter.add, prompts, first_tokens, step)
        elif not (asked := chosen.choose(len(rows.numbers))):
            record = _undrafted(target, drafter, rows, chosen)
        else:
            turn, queued = queued or queue(asked), None
            if ahead and change is None and rows.all_outlast(2 * asked + 1):
                verdict = num_accepted, next_tokens = turn.arriving(rows.vocabulary_size)
                target.keep(added(num_accepted, 1))
                drafter.observe(num_accepted, next_tokens, turn.step)
                queued = queue(asked, verdict)
            record = _decide(rows, turn)
            if not queued:
                target.keep([count + 1 for count in record.num_accepted])
                if rows.going_on():
                    drafter.observe(record.num_accepted, rows.next_tokens, turn.step)
                chosen.observe(turn.limits, record.num_accepted)
        change = yield record
        going_on = rows.going_on(change.ended if change else ())
        if queued and (len(going_on) < len(rows.numbers) or (change and change.joining)):
            raise ValueError("a batch that is worked on ahead cannot change")
        if begin and going_on:
            begin()  # not before: a reader waits for the first tokens
        if len(going_on) < len(rows.numbers):
            if going_on:
                target.select(going_on)
                drafter.select(going_on)
            rows.select(going_on)


@dataclass(frozen=True)
class _Turn:
    """An iteration of `speculative` that is queued, and its verdict, which the host may not have read.

    Attributes:
        limits, lengths: how many tokens each row was asked for, and offered.
        figures: [B, 4 + K] num_accepted and next_token, of target and draft the number of draft tokens before the first
            whose probability is nan, and the draft tokens. All that the host must know, in one transfer,
        read: which has begun.
    """

    limits: list[int]
    lengths: list[int]
    step: Step
    verdict: Verdict
    figures: Tensor
    read: Callable[[], list[list[int]]]

    @cached_property
    def decided(self) -> list[list[int]]:
        """The figures. The first time, the host waits for the device."""
        return self.read()

    def arriving(self, vocabulary_size: int) -> tuple[Sequence[int], Sequence[int]]:
        """`num_accepted` and `next_token`, for a device that goes on with them, and with none that does not exist."""
        accepted, following = self.figures[:, 0], self.figures[:, 1].clamp(max=vocabulary_size - 1)
        return (
            Arriving(accepted, lambda: [row[0] for row in self.decided], max(self.lengths)),
            Arriving(following, lambda: [row[1] for row in self.decided], vocabulary_size - 1),
        )


def _queue(
    target: Runner,
    drafter: Drafter,
    rows: Rows,
    draft_length: DraftLength,
    lenience: float,
    verification: Callable[[Offer], Verdict],
    redraw: bool,
    num_draft_tokens: int,
    before: tuple[Sequence[int], Sequence[int]] | None = None,
) -> _Turn:
    """Draft and verify, behind all that `rows` knows of, or also behind the verdict `before`, far from the end."""
    num_rows, uniforms = len(rows.numbers), rows.uniforms
    num_generated: Sequence[int] = rows.num_generated
    next_tokens: Sequence[int] = rows.next_tokens
    num_iterations = rows.num_iterations
    if before:
        num_accepted, next_tokens = before
        num_generated = added(num_accepted, [count + 1 for count in rows.num_generated])
        num_iterations = [count + 1 for count in rows.num_iterations]
        limits = [num_draft_tokens] * num_rows
    else:
        # The last token of a row is the next token of a verdict, so one fewer needs to be drafted than is missing. Each
        # row has its own limit, however many tokens the others need: an answer must not depend on its batch.
        limits = [
            min(num_draft_tokens, request.max_new_tokens - count - 1)
            for request, count in zip(rows.requests, rows.num_generated, strict=True)
        ]
    fitting = rows.uniforms_from(num_generated, max(limits) + 1)
    tried = fitting[:, :-1]
    if redraw:
        unused = [
            request.max_new_tokens + 1 + (1 + count) * draft_length.most
            for request, count in zip(rows.requests, num_iterations, strict=True)
        ]
        tried = rows.uniforms_from(unused, max(limits))
    if max(limits):
        proposal = drafter.propose(max(limits), tried[:, :, Purpose.DRAFT])
    else:
        proposal = Proposal(torch.empty(num_rows, 0, dtype=torch.long, device=uniforms.device))
    widest = [proposal.tokens.shape[1]] * num_rows
    lengths = [min(pair) for pair in zip(limits, proposal.lengths or widest, strict=True)]
    width = max(lengths)
    draft_tokens, draft_probabilities = rows.agree(proposal.tokens[:, :width]), proposal.probabilities
    pending = to_device(next_tokens, draft_tokens.device).unsqueeze(1)
    step = target.extend(torch.cat([pending, draft_tokens], dim=1))
    offer = Offer(
        rows.warp(step.logits),
        draft_tokens,
        None if draft_probabilities is None else draft_probabilities[:, :width],
        tried[:, :width, Purpose.ACCEPT],
        fitting[:, : width + 1, Purpose.TARGET],
        lenience,
        to_device(lengths, step.logits.device) if min(lengths) < width else None,
    )
    verdict = verification(offer) if width else verify(offer)
    probabilities = verdict.target_probability, verdict.draft_probability
    sound = [(~probability.isnan()).long().cumprod(-1).sum(-1) for probability in probabilities]
    figures = torch.stack([verdict.num_accepted, verdict.next_token, *sound], dim=1)
    figures = rows.agree(torch.cat([figures, draft_tokens], dim=1))
    return _Turn(limits, lengths, step, verdict, figures, to_host(figures))


def _decide(rows: Rows, turn: _Turn) -> Iteration:
    """Read a verdict, and give the rows their tokens."""
    decided, width = turn.decided, max(turn.lengths)
    num_accepted = [row[0] for row in decided]
    next_tokens = [row[1] for row in decided]
    proposed = [row[4 : 4 + length] for row, length in zip(decided, turn.lengths, strict=True)]
    # What a rule accepts need not depend on the target's probability of it.
    for column, role in ((2, "model"), (3, "draft")):
        for row, count in zip(decided, rows.num_generated, strict=True):
            if row[column] < width:
                raise NonFiniteError(role, count + row[column])
    rows.check_finite(next_tokens, added(rows.num_generated, num_accepted))
    accepted = [tokens[:count] for tokens, count in zip(proposed, num_accepted, strict=True)]
    tokens = rows.take([[*kept, last] for kept, last in zip(accepted, next_tokens, strict=True)])
    origins = [
        [*[Origin.DRAFT] * count, _last_origin(count, offered)][: len(new)]
        for count, offered, new in zip(num_accepted, turn.lengths, tokens, strict=True)
    ]
    return Iteration(rows.numbers, tokens, origins, proposed, num_accepted, turn.verdict)


def _undrafted(target: Runner, drafter: Drafter, rows: Rows, draft_length: DraftLength) -> Iteration:
    """One turn of `speculative` without draft tokens, at the cost of regular decoding."""
    step, drawn = _step(target, rows, to_device(rows.next_tokens, rows.uniforms.device), rows.num_generated)
    tokens, none = drawn.tolist(), [0] * len(rows.numbers)
    rows.check_finite(tokens, rows.num_generated)
    record = regular_record(rows.numbers, rows.take([[token] for token in tokens]))
    if rows.going_on():
        drafter.observe(none, tokens, step)
    draft_length.observe(none, none)
    empty = torch.empty(len(none), 0, device=drawn.device)
    return replace(record, verdict=Verdict(to_device(none, drawn.device), drawn, empty, empty))


def _last_origin(num_accepted: int, num_offered: int) -> Origin:
    """Where the token that follows the accepted ones comes from."""
    if num_accepted < num_offered:
        return Origin.RECOVERED
    return Origin.BONUS if num_offered else Origin.TARGET
