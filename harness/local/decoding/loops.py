"""Regular and speculative decoding, as generators of records (`Iteration`): one for the first
tokens, then one for each turn. Arms of engines read them; a reader may send a `batch.Change` after
a record, to end rows or let others join.

A loop says how one turn is queued and what follows its verdict. `turns` repeats that while rows
leave and join, and lets a device work ahead of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from harness.local.decoding.adaptive import DraftLength, draft_length_of
from harness.local.decoding.batch import Progress, Records, Request, Rows
from harness.local.decoding.protocols import Drafter, Runner
from harness.local.decoding.speculation import Speculation
from harness.local.decoding.transfer import added
from harness.local.decoding.turns import Turn, Turns, regular_turn, undrafted_turn
from harness.local.decoding.verify import Offer, Verdict, verify
from harness.local.decoding.warp import BatchWarp


@torch.inference_mode()
def autoregressive(target: Runner, request: Request, ahead: bool = False) -> Records:
    """Regular decoding: one token per row and forward pass.

    Args:
        ahead: queue each step on the device before the host reads the tokens of the one before it.
            That changes no token, only when each record is yielded.
    """
    rows = Rows(BatchWarp())

    def step(progress: Progress) -> Turn:
        return regular_turn(target, rows, progress)

    def keep(turn: Turn, num_accepted: Sequence[int], next_tokens: Sequence[int]) -> None:
        target.keep(added(num_accepted, 1))

    turns = Turns(rows, step, keep, num_tokens_ahead=1 if ahead else None)
    yield from turns.decode(request, target)


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
) -> Records:
    """Speculative decoding: up to K proposed tokens, one target pass over them, one verdict.

    Args:
        num_draft_tokens: K, or what chooses it before every iteration; 0 is regular decoding.
        lenience, verification: the rule of acceptance, called where a row is offered a token.
        redraw: propose and accept with new random numbers in every iteration, for a rule whose
            decision depends on the tokens that it discards (block verification).
        warp: the drafter's own, if rows with other settings may join: it then follows the batch.
        ahead: as in `autoregressive`. Nothing is queued ahead where K is chosen or the
            drafter reads verdicts on the host, nor where a row may reach its length meanwhile.
    """
    rows = Rows(warp or BatchWarp())
    draft_length = draft_length_of(num_draft_tokens)
    most = draft_length.most
    num_per_iteration = most if redraw else 0
    works_ahead = ahead and isinstance(num_draft_tokens, int) and not drafter.reads_verdicts
    # The turn that is read decides up to K + 1 tokens, and the one queued behind it drafts K more.
    num_tokens_ahead = 2 * most + 1 if works_ahead else None
    steps = Speculation(target, drafter, rows, lenience, verification)

    # An iteration is Leviathan et al. 2023, algorithm 1, and Chen et al. 2023, algorithm 2.
    def draft_and_verify(progress: Progress) -> Turn:
        limits = rows.draft_limits(draft_length.choose(len(rows.members)), progress)
        if not max(limits):
            return undrafted_turn(target, rows, limits, progress)
        uniforms = rows.turn_uniforms(progress, max(limits), num_per_iteration)
        proposal = steps.propose(limits, uniforms.draft)
        return steps.verify(proposal, uniforms, limits, progress)

    def roll_back(turn: Turn, num_accepted: Sequence[int], next_tokens: Sequence[int]) -> None:
        # The token before the proposal stays, and so do those accepted. The next is not read yet.
        target.keep(added(num_accepted, 1))
        if rows.going_on():
            drafter.observe(num_accepted, next_tokens, turn.step)
        draft_length.observe(turn.limits, num_accepted)

    turns = Turns(rows, queue=draft_and_verify, settle=roll_back, num_tokens_ahead=num_tokens_ahead)
    yield from turns.decode(request, target, drafter)
