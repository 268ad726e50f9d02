"""Regular and speculative decoding, as generators of records (`Iteration`): one for the first
tokens, then one for each turn. Arms of engines read them; a reader may send a `batch.Change` after
a record, to end rows or let others join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.local.decoding.adaptive import DraftLength, draft_length_of
from harness.local.decoding.batch import Records, Request, Rows, TurnUniforms
from harness.local.decoding.iteration import Iteration
from harness.local.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.local.decoding.transfer import to_device
from harness.local.decoding.turns import Figures, Turn, regular_turn, undrafted_turn
from harness.local.decoding.verify import Offer, Verdict, verify
from harness.local.decoding.warp import BatchWarp


@torch.inference_mode()
def autoregressive(target: Runner, request: Request) -> Records:
    """Regular decoding: one token per row and forward pass."""
    rows = Rows(BatchWarp())

    def step() -> Iteration:
        turn = regular_turn(target, rows)
        record = turn.taken(rows)
        target.keep([1] * len(rows.members))
        return record

    yield from _decode(request, rows, step, target)


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
) -> Records:
    """Speculative decoding: up to K proposed tokens, one target pass over them, one verdict.

    Args:
        num_draft_tokens: K, or what chooses it before every iteration; 0 is regular decoding.
        lenience, verification: the rule of acceptance, called where a row is offered a token.
        redraw: propose and accept with new random numbers in every iteration, for a rule whose
            decision depends on the tokens that it discards (block verification).
        warp: the drafter's own, if rows with other settings may join: it then follows the batch.
    """
    rows = Rows(warp or BatchWarp())
    draft_length = draft_length_of(num_draft_tokens)
    num_per_iteration = draft_length.most if redraw else 0

    # Leviathan et al. 2023, algorithm 1, and Chen et al. 2023, algorithm 2.
    def iteration() -> Iteration:
        limits = rows.draft_limits(draft_length.choose(len(rows.members)))
        if max(limits):
            uniforms = rows.turn_uniforms(max(limits), num_per_iteration)
            proposal = _propose(drafter, limits, uniforms.draft)
            turn = _verified(target, rows, proposal, uniforms, limits, verification, lenience)
        else:
            turn = undrafted_turn(target, rows, limits)
        record = turn.taken(rows)
        # The token before the proposal stays, and so do those accepted. The next is not read yet.
        target.keep([count + 1 for count in turn.num_accepted])
        if rows.going_on():
            drafter.observe(turn.num_accepted, rows.last_tokens, turn.step)
        draft_length.observe(limits, turn.num_accepted)
        return record

    yield from _decode(request, rows, iteration, target, drafter)


def _decode(
    request: Request,
    rows: Rows,
    take_turn: Callable[[], Iteration],
    target: Runner,
    drafter: Drafter | None = None,
) -> Records:
    """Take turns until all rows have ended; after each record rows may leave, and others join."""
    joining: list[Request] = [request]
    while rows.members or joining:
        first_step: Step | None = None
        is_first = not rows.members
        if joining:
            prompts = [prompt for request in joining for prompt in request.prompts]
            first_step = target.start(prompts) if is_first else target.add(prompts)
            record = rows.join(joining, first_step.logits)
        else:
            record = take_turn()
        change = yield record
        joining = []
        if change is not None:
            rows.end(change.ended)
            joining = list(change.joining)
        staying = rows.going_on()
        if drafter and first_step and staying:
            # After the record, because a reader waits for the first tokens.
            begin = drafter.start if is_first else drafter.add
            begin(prompts, [token for [token] in record.tokens], first_step)
        if len(staying) < len(rows.members):
            rows.select(staying)
            if staying:
                target.select(staying)
                if drafter:
                    drafter.select(staying)


def _propose(drafter: Drafter, limits: Sequence[int], uniforms: Tensor) -> Proposal:
    """Ask the drafter for as many tokens as the largest limit.

    The result's `lengths` say how many of them each row is offered, no more than its limit, and its
    tokens end with the longest offer: limits (4, 1) and a drafter that proposes (2, 3) tokens give
    the lengths (2, 1) and tokens [2, 2].
    """
    proposal = drafter.propose(max(limits), uniforms)
    offered = proposal.lengths
    if offered is None:
        offered = [proposal.tokens.shape[1]] * len(limits)
    lengths = [min(limit, count) for limit, count in zip(limits, offered, strict=True)]
    width = max(lengths)
    probabilities = proposal.probabilities
    if probabilities is not None:
        probabilities = probabilities[:, :width]
    return Proposal(proposal.tokens[:, :width], probabilities, lengths)


def _verified(
    target: Runner,
    rows: Rows,
    proposal: Proposal,
    uniforms: TurnUniforms,
    limits: Sequence[int],
    verification: Callable[[Offer], Verdict],
    lenience: float,
) -> Turn:
    """Run the target over the last token of each row and the proposal, and judge the proposal."""
    draft_tokens = proposal.tokens
    lengths = proposal.lengths
    assert lengths is not None  # `_propose` gives them
    width = max(lengths)
    if width == 0:
        return undrafted_turn(target, rows, limits)
    device = draft_tokens.device
    is_ragged = min(lengths) < width

    def judge(logits: Tensor) -> Verdict:
        offer = Offer(
            target_probabilities=rows.warp.current(logits),
            draft_tokens=draft_tokens,
            draft_probabilities=proposal.probabilities,
            accept_uniforms=uniforms.accept[:, :width],
            next_uniforms=uniforms.target[:, : width + 1],
            lenience=lenience,
            lengths=to_device(lengths, device) if is_ragged else None,
        )
        return verification(offer)

    last_tokens = to_device(rows.last_tokens, device).unsqueeze(1)
    step, verdict = target.decide(torch.cat([last_tokens, draft_tokens], dim=1), judge)
    figures = Figures.read(verdict, draft_tokens)
    return Turn(step, limits, lengths, figures, verdict)
