"""One turn of a loop: a forward pass of the target over all rows, and what was decided by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from harness.engines.arrivals import Origin
from harness.local.decoding.batch import Rows
from harness.local.decoding.iteration import Iteration
from harness.local.decoding.protocols import NonFiniteError, Runner, Step
from harness.local.decoding.randomness import Purpose, inverse_cdf
from harness.local.decoding.transfer import to_device
from harness.local.decoding.verify import Verdict


class Figures(NamedTuple):
    """All that the host must know of the verdict over one row. Those of all rows are packed, so
    that one copy brings them to the host.
    """

    num_accepted: int
    next_token: int
    num_finite: int  # draft tokens before the first whose probability under the target is nan
    num_finite_drafted: int  # the same, under the drafter
    draft_tokens: list[int]

    @classmethod
    def read(cls, verdict: Verdict, draft_tokens: Tensor) -> list[Figures]:
        """Copy the figures of all rows to the host."""
        probabilities = torch.stack([verdict.target_probability, verdict.draft_probability], dim=1)
        is_finite = probabilities == probabilities  # only nan differs from itself
        num_finite = is_finite.cumprod(-1, dtype=torch.int64).sum(-1)
        decided = torch.stack([verdict.num_accepted, verdict.next_token], dim=1)
        packed = torch.cat([decided, num_finite, draft_tokens], dim=1)
        figures = []
        for num_accepted, next_token, finite, finite_drafted, *tokens in packed.tolist():
            figures.append(cls(num_accepted, next_token, finite, finite_drafted, tokens))
        return figures


@dataclass(frozen=True)
class Turn:
    """What a forward pass decided.

    Attributes:
        step: the outputs of the target's forward pass.
        limits: how many tokens the drafter was asked for, for each row.
        lengths: how many each row was then offered.
        figures: of each row, on the host.
        verdict: None in regular decoding.
    """

    step: Step
    limits: Sequence[int]
    lengths: Sequence[int]
    figures: Sequence[Figures]
    verdict: Verdict | None = None

    @property
    def num_accepted(self) -> list[int]:
        return [figures.num_accepted for figures in self.figures]

    def taken(self, rows: Rows) -> Iteration:
        """Give the rows their tokens.

        Raises a NonFiniteError for the first token of a row whose logits were nan.
        """
        taken: list[list[int]] = []
        origins: list[list[Origin]] = []
        proposed: list[list[int]] = []
        kept_logits: dict[int, Tensor] = {}
        for place, (row, figures) in enumerate(zip(rows.members, self.figures, strict=True)):
            length = self.lengths[place]
            self._check_finite(rows, place)
            accepted = figures.draft_tokens[: figures.num_accepted]
            tokens = row.take([*accepted, figures.next_token])
            last_origin = Origin.BONUS
            if not length:
                last_origin = Origin.TARGET
            elif figures.num_accepted < length:
                last_origin = Origin.RECOVERED
            from_draft = [Origin.DRAFT] * len(accepted)
            taken.append(tokens)
            origins.append([*from_draft, last_origin][: len(tokens)])
            proposed.append(figures.draft_tokens[:length])
            if row.request.keeps_logits:
                kept_logits[row.number] = self.step.logits[place]
        return Iteration(
            rows=[row.number for row in rows.members],
            tokens=taken,
            origins=origins,
            proposed=proposed,
            num_accepted=self.num_accepted,
            verdict=self.verdict,
            logits=kept_logits,
        )

    def _check_finite(self, rows: Rows, place: int) -> None:
        # All that was offered must be finite, not only what was accepted: a rule may accept a token
        # whatever the target's probability of it is (`AcceptByCoin`). The padding behind a shorter
        # row's tokens has figures, too, and counts.
        row = rows.members[place]
        figures = self.figures[place]
        width = max(self.lengths)
        position = row.num_generated
        if figures.num_finite < width:
            raise NonFiniteError("model", position + figures.num_finite, row.number)
        if figures.num_finite_drafted < width:
            raise NonFiniteError("draft", position + figures.num_finite_drafted, row.number)
        rows.check_exists(figures.next_token, position + figures.num_accepted, row.number)


def regular_turn(target: Runner, rows: Rows) -> Turn:
    """Run one forward pass over the last token of each row, and draw the next ones."""
    uniforms = rows.uniforms_from(rows.num_generated, 1)[:, 0, Purpose.TARGET]
    last_tokens = to_device(rows.last_tokens, rows.uniforms.device).unsqueeze(1)

    def draw(logits: Tensor) -> Tensor:
        return inverse_cdf(rows.warp.current(logits[:, -1]), uniforms)

    step, drawn = target.decide(last_tokens, draw)
    none = [0] * len(rows.members)
    figures = [
        Figures(0, token, num_finite=0, num_finite_drafted=0, draft_tokens=[])
        for token in drawn.tolist()
    ]
    return Turn(step, limits=none, lengths=none, figures=figures)


def undrafted_turn(target: Runner, rows: Rows, limits: Sequence[int]) -> Turn:
    """Take a turn of a speculative loop in which no row is offered a draft token.

    It costs as much as a turn of regular decoding, and its verdict accepts nothing.
    """
    turn = regular_turn(target, rows)
    device = rows.uniforms.device
    next_token = to_device([figures.next_token for figures in turn.figures], device)
    empty = torch.empty(len(next_token), 0, device=device)
    verdict = Verdict(torch.zeros_like(next_token), next_token, empty, empty)
    return replace(turn, limits=limits, verdict=verdict)
