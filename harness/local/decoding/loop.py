"""Regular and speculative decoding of a batch that rows join and leave between iterations.

An iteration is Leviathan et al. 2023, algorithm 1, and Chen et al. 2023, algorithm 2, in every row at
once; `reference.py` has it for one row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.local.decoding.adaptive import DraftLength, draft_length_of
from harness.local.decoding.batch import Request, Rows, TurnUniforms
from harness.local.decoding.iteration import Iteration
from harness.local.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.local.decoding.transfer import to_device
from harness.local.decoding.turns import Figures, Turn, regular_turn, undrafted_turn
from harness.local.decoding.verify import Offer, Verdict, verify
from harness.local.decoding.warp import BatchWarp


class _Joined(NamedTuple):
    """Rows whose prompts the target has read, and the drafter has not."""

    prompts: list[Sequence[int]]
    first_tokens: list[int]
    step: Step
    are_first: bool


class Loop:
    """Decodes the rows of some requests together: `add` them, and take a `step` while rows go on.

    Args:
        target: the runner of the model that decides.
        drafter: proposes tokens; None for regular decoding, one token per row and forward pass.
        num_draft_tokens: K, or what chooses it before every iteration; 0 is regular decoding.
        lenience, verification: the rule of acceptance, called where a row is offered a token.
        redraw: propose and accept with new random numbers in every iteration, for a rule whose
            decision depends on the tokens that it discards (block verification).
        warp: the drafter's own, if rows with other settings may join: it then follows the batch.
    """

    def __init__(
        self,
        target: Runner,
        drafter: Drafter | None = None,
        num_draft_tokens: int | DraftLength = 0,
        lenience: float = 1.0,
        verification: Callable[[Offer], Verdict] = verify,
        redraw: bool = False,
        warp: BatchWarp | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._draft_length = draft_length_of(num_draft_tokens)
        self._lenience = lenience
        self._verification = verification
        self._num_per_iteration = self._draft_length.most if redraw else 0
        self._rows = Rows(warp or BatchWarp())
        self._joined: _Joined | None = None

    @property
    def is_running(self) -> bool:
        """Whether a row has not ended."""
        return bool(self._rows.going_on())

    @torch.inference_mode()
    def add(self, requests: Sequence[Request]) -> Iteration:
        """Read the prompts of requests, whose rows join behind the others, and decide their first
        tokens. Their rows are numbered on from the last that ever joined.
        """
        self._settle()
        prompts = [prompt for request in requests for prompt in request.prompts]
        are_first = not self._rows.members
        step = self._target.start(prompts) if are_first else self._target.add(prompts)
        record = self._rows.join(requests, step.logits)
        first_tokens = [token for [token] in record.tokens]
        # The drafter begins with the next call, because a reader waits for the first tokens.
        self._joined = _Joined(prompts, first_tokens, step, are_first)
        return record

    @torch.inference_mode()
    def step(self) -> Iteration:
        """Decide further tokens of all rows, at least one of each."""
        self._settle()
        rows = self._rows
        limits = [0] * len(rows.members)
        if self._drafter is None:
            turn = regular_turn(self._target, rows)
        else:
            limits = rows.draft_limits(self._draft_length.choose(len(rows.members)))
            turn = self._speculative_turn(self._drafter, limits)
        record = turn.taken(rows)
        # The token before the proposal stays, and so do those accepted. The next is not read yet.
        self._target.keep([count + 1 for count in turn.num_accepted])
        if self._drafter is not None:
            if self.is_running:
                self._drafter.observe(turn.num_accepted, rows.last_tokens, turn.step)
            self._draft_length.observe(limits, turn.num_accepted)
        return record

    def drop(self, numbers: Collection[int]) -> None:
        """End the rows with these numbers, those of them that are in the batch, even if their
        requests go on.
        """
        self._rows.end(numbers)

    def _settle(self) -> None:
        """Let the drafter read the prompts that joined, and rows that have ended leave."""
        rows = self._rows
        staying = rows.going_on()
        joined = self._joined
        self._joined = None
        if joined is not None and self._drafter is not None and staying:
            begin = self._drafter.start if joined.are_first else self._drafter.add
            begin(joined.prompts, joined.first_tokens, joined.step)
        if len(staying) < len(rows.members):
            rows.select(staying)
            if staying:
                self._target.select(staying)
                if self._drafter is not None:
                    self._drafter.select(staying)

    def _speculative_turn(self, drafter: Drafter, limits: Sequence[int]) -> Turn:
        """Draft up to limits[b] tokens for row b, and let the target judge them."""
        if not max(limits):
            return undrafted_turn(self._target, self._rows, limits)
        uniforms = self._rows.turn_uniforms(max(limits), self._num_per_iteration)
        proposal = _proposed(drafter, limits, uniforms.draft)
        assert proposal.lengths is not None  # `_proposed` gives them
        if not max(proposal.lengths):
            return undrafted_turn(self._target, self._rows, limits)
        return self._verified(proposal, proposal.lengths, uniforms, limits)

    def _verified(
        self,
        proposal: Proposal,
        lengths: Sequence[int],
        uniforms: TurnUniforms,
        limits: Sequence[int],
    ) -> Turn:
        """Run the target over the last token of each row and the proposal, and judge the proposal."""
        rows = self._rows
        draft_tokens = proposal.tokens
        device = draft_tokens.device
        width = max(lengths)
        is_ragged = min(lengths) < width

        def judge(logits: Tensor) -> Verdict:
            offer = Offer(
                target_probabilities=rows.warp.current(logits),
                draft_tokens=draft_tokens,
                draft_probabilities=proposal.probabilities,
                accept_uniforms=uniforms.accept[:, :width],
                next_uniforms=uniforms.target[:, : width + 1],
                lenience=self._lenience,
                lengths=to_device(lengths, device) if is_ragged else None,
            )
            return self._verification(offer)

        last_tokens = to_device(rows.last_tokens, device).unsqueeze(1)
        tokens = torch.cat([last_tokens, draft_tokens], dim=1)
        step, verdict = self._target.decide(tokens, judge)
        return Turn(step, limits, lengths, Figures.read(verdict, draft_tokens), verdict)


def decoded(loop: Loop, requests: Sequence[Request]) -> Iterator[Iteration]:
    """Decode requests together, from their first tokens on, until all their rows have ended."""
    yield loop.add(requests)
    while loop.is_running:
        yield loop.step()


def _proposed(drafter: Drafter, limits: Sequence[int], uniforms: Tensor) -> Proposal:
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
