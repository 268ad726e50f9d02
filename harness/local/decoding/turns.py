"""How a loop takes its turns: one after the other or ahead of the host, while rows leave and join.

A turn is queued on the device first, and read by the host later. A loop of `loops` or
`tree_speculation` says how to queue a turn and how to settle it (roll the caches back, let the
drafter learn); `Turns.decode` repeats that. Ahead of the host, the order of calls is

    queue turn 1    settle turn 1    queue turn 2    read turn 1    settle turn 2    ...

where turn 1 is settled, and turn 2 begins, with numbers that are still on the device
(`transfer.Arriving`): code that reads them as a list waits, and is right; code that hands them to
`to_device` does not wait. The records are the same.

Lengths are known on the host one verdict late, and bounded until then. A row that has ended, by a
stop token or by a `Change` of the consumer, is still part of the turn that was queued; that turn's
record leaves it out, and only then does the row leave the batch, or others join it. Nothing is
queued ahead where K=auto chooses by the last verdict, where the drafter reads it on the host
(`Drafter.reads_verdicts`), within two iterations of a row's length, and on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from harness.engines.arrivals import Origin
from harness.local.decoding.batch import Progress, Records, Request, Rows
from harness.local.decoding.decisions import Draw, Figures
from harness.local.decoding.iteration import Iteration
from harness.local.decoding.protocols import (
    Drafter,
    NonFiniteError,
    Runner,
    Step,
)
from harness.local.decoding.randomness import Purpose
from harness.local.decoding.transfer import Arriving, added, to_device, to_host
from harness.local.decoding.verify import Verdict


@dataclass(frozen=True)
class Turn:
    """An iteration that is queued on the device. Its decisions may not have reached the host yet.

    Attributes:
        step: the outputs of the target's forward pass.
        limits: how many tokens the drafter was asked for, for each row.
        lengths: how many each row was then offered.
        next_tokens: [B] on the device, those that follow the accepted ones.
        read_figures: waits for the figures of each row, whose copy to the host has begun.
        verdict: None in regular decoding.
    """

    step: Step
    limits: Sequence[int]
    lengths: Sequence[int]
    next_tokens: Tensor
    read_figures: Callable[[], list[Any]]
    verdict: Verdict | None = None

    @cached_property
    def figures(self) -> list[Any]:
        """The `Figures` or `TreeFigures` of each row. The first time, the host waits for the
        device.
        """
        return self.read_figures()

    @property
    def num_accepted(self) -> list[int]:
        return [figures.num_accepted for figures in self.figures]

    def arriving(self, vocabulary_size: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return `num_accepted` and `next_tokens` without waiting for them.

        A token beyond the vocabulary (drawn from nan) is replaced by the last one: a GPU fails on
        an index that does not exist, before the host could say which model gave nan.
        """
        largest = vocabulary_size - 1
        next_tokens = Arriving(
            self.next_tokens.clamp(max=largest),
            lambda: [figures.next_token for figures in self.figures],
            largest,
        )
        most_accepted = max(self.lengths)
        if self.verdict is None or most_accepted == 0:
            return [0] * len(self.lengths), next_tokens
        num_accepted = Arriving(self.verdict.num_accepted, lambda: self.num_accepted, most_accepted)
        return num_accepted, next_tokens

    def read(self, rows: Rows) -> Iteration:
        """Wait for the device, and give the rows their tokens; none to a row that had ended before
        the turn, which the host did not know when it queued the turn.
        """
        places = rows.going_on()
        self._check_finite(rows, places)
        numbers: list[int] = []
        taken: list[list[int]] = []
        origins: list[list[Origin]] = []
        proposed: list[list[int]] = []
        kept_logits: dict[int, Tensor] = {}
        for place in places:
            row = rows.members[place]
            figures = self.figures[place]
            accepted = figures.draft_tokens[: figures.num_accepted]
            tokens = row.take([*accepted, figures.next_token])
            last_origin = Origin.BONUS
            if not self.lengths[place]:
                last_origin = Origin.TARGET
            elif self._is_rejection(place):
                last_origin = Origin.RECOVERED
            from_draft = [Origin.DRAFT] * len(accepted)
            numbers.append(row.number)
            taken.append(tokens)
            origins.append([*from_draft, last_origin][: len(tokens)])
            proposed.append(figures.draft_tokens[: self.lengths[place]])
            if row.request.keeps_logits:
                kept_logits[row.number] = self._logits_in_order(place)
        return Iteration(
            rows=numbers,
            tokens=taken,
            origins=origins,
            proposed=proposed,
            num_accepted=[self.figures[place].num_accepted for place in places],
            verdict=self._verdict_of(places),
            logits=kept_logits,
        )

    def _logits_in_order(self, place: int) -> Tensor:
        """Return the target's logits [n, V] after a row's tokens, the kept ones first."""
        return self.step.logits[place]

    def _verdict_of(self, places: list[int]) -> Verdict | None:
        """Return the verdict over the rows at these places of the batch, one at least: a turn for
        which no row is left is dropped.
        """
        if self.verdict is None or len(places) == len(self.lengths):
            return self.verdict
        width = max(self.lengths[place] for place in places)
        index = to_device(places, self.next_tokens.device)
        return self.verdict.select(index, width)

    def _check_finite(self, rows: Rows, places: list[int]) -> None:
        """Raise a NonFiniteError for the first token of a row whose logits were nan."""
        raise NotImplementedError

    def _is_rejection(self, place: int) -> bool:
        """Return whether a draft token of a row was rejected."""
        raise NotImplementedError


class ChainTurn(Turn):
    """A turn in which chains of draft tokens were verified, or none."""

    def _check_finite(self, rows: Rows, places: list[int]) -> None:
        # All that was offered must be finite, not only what was accepted: a rule may accept a token
        # whatever the target's probability of it is (`AcceptByCoin`). The padding behind a shorter
        # row's tokens has figures, too, and counts.
        width = max(self.lengths)
        for place in places:
            row = rows.members[place]
            figures = self.figures[place]
            position = row.num_generated
            if figures.num_finite < width:
                raise NonFiniteError("model", position + figures.num_finite, row.number)
            if figures.num_finite_drafted < width:
                drafted = position + figures.num_finite_drafted
                raise NonFiniteError("draft", drafted, row.number)
            next_position = position + figures.num_accepted
            rows.check_exists(figures.next_token, next_position, row.number)

    def _is_rejection(self, place: int) -> bool:
        return self.figures[place].num_accepted < self.lengths[place]


def regular_turn(target: Runner, rows: Rows, progress: Progress) -> ChainTurn:
    """Queue one forward pass over the last token of each row, and draw the next ones."""
    next_tokens = progress.next_tokens
    uniforms = rows.uniforms_from(progress.num_generated, 1)[:, 0, Purpose.TARGET]
    last_tokens = to_device(next_tokens, rows.uniforms.device).unsqueeze(1)
    step, (drawn,) = target.decide(last_tokens, Draw(rows.warp.current), uniforms)
    read = to_host(drawn)
    none = [0] * len(next_tokens)

    def read_figures() -> list[Figures]:
        return [
            Figures(0, token, num_finite=0, num_finite_drafted=0, draft_tokens=[])
            for token in read()
        ]

    return ChainTurn(step, limits=none, lengths=none, next_tokens=drawn, read_figures=read_figures)


def undrafted_turn(
    target: Runner, rows: Rows, limits: Sequence[int], progress: Progress
) -> ChainTurn:
    """Queue a turn of a speculative loop in which no row is offered a draft token.

    It costs as much as a turn of regular decoding, and its verdict accepts nothing.
    """
    turn = regular_turn(target, rows, progress)
    drawn = turn.next_tokens
    none = torch.zeros_like(drawn)
    empty = torch.empty(len(drawn), 0, device=drawn.device)
    return replace(
        turn,
        limits=limits,
        verdict=Verdict(
            num_accepted=none, next_token=drawn, target_probability=empty, draft_probability=empty
        ),
    )


class Turns:
    """Takes the turns of a loop.

    Args:
        queue: queues the turn that begins at this progress of the rows.
        settle: rolls the caches back to what a turn kept, and lets the drafter learn; gets the
            turn, its `num_accepted` and its `next_tokens`, both of which may be
            `transfer.Arriving`.
        num_tokens_ahead: queue each turn before the host reads the one before it, while no row can
            reach its length within this many tokens. None: never.
    """

    def __init__(
        self,
        rows: Rows,
        queue: Callable[[Progress], Turn],
        settle: Callable[[Turn, Sequence[int], Sequence[int]], None],
        num_tokens_ahead: int | None,
    ) -> None:
        self._rows = rows
        self._queue = queue
        self._settle = settle
        self._num_tokens_ahead = num_tokens_ahead
        self._queued: Turn | None = None

    def decode(self, request: Request, target: Runner, drafter: Drafter | None = None) -> Records:
        """Take turns until all rows have ended; after each record rows may leave, and others join.

        A turn that is queued already is for the rows of that moment. So rows leave and join after it,
        and its record leaves out the rows that have ended meanwhile.
        """
        rows = self._rows
        joining: list[Request] = [request]
        while rows.members or joining:
            first_step: Step | None = None
            is_first = not rows.members
            if joining and self._queued is None:
                prompts = [prompt for each in joining for prompt in each.prompts]
                first_step = target.start(prompts) if is_first else target.add(prompts)
                record = rows.join(joining, first_step.logits)
                joining = []
            else:
                record = self._take(may_work_ahead=not joining)
            change = yield record
            if change is not None:
                rows.end(change.ended)
                joining += change.joining
            staying = rows.going_on()
            if drafter and first_step and staying:
                # After the record, because a reader waits for the first tokens.
                begin = drafter.start if is_first else drafter.add
                begin(prompts, [token for [token] in record.tokens], first_step)
            if not staying:
                self._queued = None  # a turn that no row waits for
            if self._queued is None and len(staying) < len(rows.members):
                rows.select(staying)
                if staying:
                    target.select(staying)
                    if drafter:
                        drafter.select(staying)

    def _take(self, may_work_ahead: bool) -> Iteration:
        """Finish a turn, which may have been queued already."""
        rows = self._rows
        turn = self._queued or self._queue(rows.progress)
        self._queued = None
        ahead = self._num_tokens_ahead
        if may_work_ahead and ahead is not None and rows.all_go_on_beyond(ahead):
            self._queued = self._queue_behind(turn)
            return turn.read(rows)
        record = turn.read(rows)
        self._settle(turn, turn.num_accepted, rows.progress.next_tokens)
        return record

    def _queue_behind(self, turn: Turn) -> Turn:
        """Settle a turn that the host has not read, and queue the next one."""
        num_accepted, next_tokens = turn.arriving(self._rows.vocabulary_size)
        self._settle(turn, num_accepted, next_tokens)
        before = self._rows.progress
        num_generated = added(num_accepted, [count + 1 for count in before.num_generated])
        # Some rules take random numbers by iteration.
        num_iterations = [count + 1 for count in before.num_iterations]
        return self._queue(Progress(num_generated, num_iterations, next_tokens))
