"""The two decoding loops, as generators of records. Printing, timing and files consume the records.

A loop says how one turn is queued and what follows its verdict. `turns` repeats that while rows
leave and join, and lets a device work ahead of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from harness.decoding.adaptive import Constant, DraftLength
from harness.decoding.batch import Agree, Progress, Records, Request, Rows, itself
from harness.decoding.protocols import Drafter, Runner
from harness.decoding.speculation import Speculation
from harness.decoding.transfer import added
from harness.decoding.turns import AnyTurn, Turns, decode_batch, regular_turn, undrafted_turn
from harness.decoding.verify import Offer, Verdict, verify
from harness.decoding.warp import BatchWarp


@torch.inference_mode()
def autoregressive(
    target: Runner, request: Request, ahead: bool = False, agree: Agree = itself
) -> Records:
    """Regular decoding: one token per row and forward pass.

    Args:
        ahead: queue each step before the host reads the tokens of the one before it. A row that
            these end is left out of the step that is queued already. It changes no token of a row,
            only when each record is yielded.
        agree: for several processes that decode together, see `batch.Agree`.
    """
    rows = Rows(BatchWarp(), agree)

    def step(progress: Progress) -> AnyTurn:
        return regular_turn(target, rows, progress)

    def keep(turn: AnyTurn, num_accepted: Sequence[int], next_tokens: Sequence[int]) -> None:
        target.keep(added(num_accepted, 1))

    turns = Turns(rows, step, keep, num_tokens_ahead=1 if ahead else None)
    yield from decode_batch(request, rows, turns, target)


@torch.inference_mode()
def speculative(
    target: Runner,
    drafter: Drafter,
    request: Request,
    num_draft_tokens: int | DraftLength,
    lenience: float = 1.0,
    verification: Callable[[Offer], Verdict] = verify,
    redraw: bool = False,
    warp: BatchWarp | None = None,
    ahead: bool = False,
    agree: Agree = itself,
) -> Records:
    """Speculative decoding: up to K proposed tokens, one target pass over them, one verdict.

    Args:
        num_draft_tokens: K, or what chooses it before every iteration; 0 is regular decoding.
        verification: takes what `verify` takes; it is not called where no row is offered a token.
        redraw: propose and accept with new random numbers in every iteration, for a rule whose
            decision depends on the tokens that it discards; see `decoding.randomness`.
        warp: the drafter's, if rows with other settings may join.
        ahead, agree: as in `autoregressive`, if K is a number and the drafter need not read the
            verdict first; no row may reach its length within the two iterations.
    """
    rows = Rows(warp or BatchWarp(), agree)
    draft_length = num_draft_tokens
    if isinstance(draft_length, int):
        draft_length = Constant(draft_length)
    works_ahead = ahead and isinstance(draft_length, Constant) and not drafter.reads_verdicts
    most = draft_length.most
    # The turn that is read decides up to K + 1 tokens, and the one queued behind it drafts K more.
    num_tokens_ahead = 2 * most + 1 if works_ahead else None
    num_per_iteration = most if redraw else 0
    steps = Speculation(target, drafter, rows, lenience, verification)

    # An iteration is Leviathan et al. 2023, algorithm 1, and Chen et al. 2023, algorithm 2.
    def draft_and_verify(progress: Progress) -> AnyTurn:
        limits = rows.draft_limits(draft_length.choose(len(rows.members)), progress)
        if not max(limits):
            return undrafted_turn(target, rows, limits, progress)
        uniforms = rows.turn_uniforms(progress, max(limits), num_per_iteration)
        proposal = steps.propose(limits, uniforms.draft)
        return steps.verify(proposal, uniforms, limits, progress)

    def roll_back(turn: AnyTurn, num_accepted: Sequence[int], next_tokens: Sequence[int]) -> None:
        # The token before the proposal stays, and so do those accepted. The next is not read yet.
        target.keep(added(num_accepted, 1))
        if rows.going_on():
            drafter.observe(num_accepted, next_tokens, turn.step)
        draft_length.observe(turn.limits, num_accepted)

    turns = Turns(rows, queue=draft_and_verify, settle=roll_back, num_tokens_ahead=num_tokens_ahead)
    yield from decode_batch(request, rows, turns, target, drafter)
