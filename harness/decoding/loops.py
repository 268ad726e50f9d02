"""The two decoding loops, as generators of records. Printing, timing and files consume the records.

A consumer that sends a `Change` after a record lets rows leave and join while the others go on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from harness.decoding.adaptive import Constant, DraftLength
from harness.decoding.batch import Agree, Change, Records, Request, Rows, itself
from harness.decoding.protocols import Drafter, Runner
from harness.decoding.transfer import added, to_device, to_host
from harness.decoding.turns import Turn, Turns, regular_step
from harness.decoding.verify import Offer, Verdict, verify
from harness.decoding.warp import RowWarp


@torch.inference_mode()
def autoregressive(
    target: Runner, request: Request, ahead: bool = False, agree: Agree = itself
) -> Records:
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
            record = rows.join(
                change.joining,
                (target.add if rows.numbers else target.start)(change.prompts).logits,
            )
        else:
            if queued is None:
                pending = to_device(rows.next_tokens, rows.uniforms.device)
                _, queued = regular_step(target, rows, pending, rows.num_generated)
            read, drawn, queued = to_host(queued), queued, None
            if ahead and change is None and rows.all_outlast(1):
                # A token that does not exist is noticed when it is read, and no model survives to be fed it.
                pending = drawn.clamp(max=rows.vocabulary_size - 1)
                _, queued = regular_step(
                    target, rows, pending, [count + 1 for count in rows.num_generated]
                )
            record = rows.take_drawn(read())
        change = yield record
        going_on = rows.going_on(change.ended if change else ())
        if queued is not None and (
            len(going_on) < len(rows.numbers) or (change and change.joining)
        ):
            raise ValueError("a batch that is worked on ahead cannot change")
        if len(going_on) < len(rows.numbers):
            if going_on:
                target.select(going_on)
            rows.select(going_on)


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
    turns = Turns(target, drafter, rows, chosen, lenience, verification, redraw)
    queued: Turn | None = None
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
            record = turns.undrafted()
        else:
            turn, queued = queued or turns.queue(asked), None
            if ahead and change is None and rows.all_outlast(2 * asked + 1):
                verdict = num_accepted, next_tokens = turn.arriving(rows.vocabulary_size)
                target.keep(added(num_accepted, 1))
                drafter.observe(num_accepted, next_tokens, turn.step)
                queued = turns.queue(asked, verdict)
            record = turn.decide(rows)
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
