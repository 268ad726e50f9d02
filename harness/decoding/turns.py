"""How a loop takes its turns: one after the other or ahead of the host, while rows leave and join.

A turn is queued on the device first, and read by the host later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from harness.decoding.batch import Change, Progress, Records, Request, Rows
from harness.decoding.decisions import Draw, Figures
from harness.decoding.protocols import Drafter, Iteration, NonFiniteError, Origin, Runner, Step
from harness.decoding.transfer import Arriving, added, to_device, to_host
from harness.decoding.verify import Verdict


@dataclass(frozen=True)
class Turn:
    """An iteration that is queued on the device, and what was decided, which the host may not have
    read.

    Attributes:
        step: the forward pass of the target.
        limits, lengths: how many draft tokens each row was asked for, and offered.
        next_tokens: [B], which follow the accepted ones.
        read_figures: waits for the figures of each row, in a transfer that has begun.
        verdict: None in regular decoding.
    """

    step: Step
    limits: Sequence[int]
    lengths: Sequence[int]
    next_tokens: Tensor
    read_figures: Callable[[], list[Figures[int]]]
    verdict: Verdict | None = None

    @cached_property
    def figures(self) -> list[Figures[int]]:
        """The figures of each row. The first time, the host waits for the device."""
        return self.read_figures()

    @property
    def num_accepted(self) -> list[int]:
        return [figures.num_accepted for figures in self.figures]

    def arriving(self, vocabulary_size: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return `num_accepted` and `next_tokens` without waiting, for a device that goes on with
        them.

        A token that does not exist is replaced by one that does: no model survives to be fed it.
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
        """Wait for the device, and give the rows their tokens."""
        self._check_finite(rows)
        proposed: list[list[int]] = []
        origins: list[list[Origin]] = []
        taken: list[list[int]] = []
        for row, figures, length in zip(rows.members, self.figures, self.lengths, strict=True):
            accepted = figures.draft_tokens[: figures.num_accepted]
            tokens = row.take([*accepted, figures.next_token])
            from_draft = [Origin.DRAFT] * len(accepted)
            proposed.append(figures.draft_tokens[:length])
            origins.append([*from_draft, _last_origin(len(accepted), length)][: len(tokens)])
            taken.append(tokens)
        return Iteration(rows.numbers, taken, origins, proposed, self.num_accepted, self.verdict)

    def _check_finite(self, rows: Rows) -> None:
        """Raise a NonFiniteError for the first token of a row whose logits were nan."""
        # A rule need not look at the target's probability of a token to accept it.
        width = max(self.lengths)
        for row, figures in zip(rows.members, self.figures, strict=True):
            position = row.num_generated
            if figures.num_finite < width:
                raise NonFiniteError("model", position + figures.num_finite)
            if figures.num_finite_drafted < width:
                raise NonFiniteError("draft", position + figures.num_finite_drafted)
            rows.check_finite(figures.next_token, position + figures.num_accepted)


def regular_turn(target: Runner, rows: Rows, next_tokens: Sequence[int], uniforms: Tensor) -> Turn:
    """Queue one forward pass over the last token of each row, and draw the next ones with uniforms
    [B].
    """
    last_tokens = to_device(next_tokens, rows.uniforms.device).unsqueeze(1)
    step, (drawn,) = target.decide(last_tokens, Draw(rows.warp.current), uniforms)
    drawn = rows.agree(drawn)
    read = to_host(drawn)
    none = [0] * len(next_tokens)
    return Turn(step, none, none, drawn, lambda: [Figures(0, token, 0, 0, []) for token in read()])


def _last_origin(num_accepted: int, num_offered: int) -> Origin:
    """Return where the token that follows the accepted ones comes from."""
    if num_accepted < num_offered:
        return Origin.RECOVERED
    return Origin.BONUS if num_offered else Origin.TARGET


class Turns:
    """Takes the turns of a loop.

    Args:
        queue: queues a turn behind the given progress of the rows.
        settle: rolls back and learns, given a turn with its `num_accepted` and `next_tokens`, both
            of which may be `transfer.Arriving`.
        num_tokens_ahead: queue each turn before the host reads the one before it, while every row
            goes on after this many tokens. None: never.
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

    def take(self, may_work_ahead: bool) -> Iteration:
        """Finish a turn, which may have been queued already."""
        rows = self._rows
        turn = self._queued or self._queue(rows.progress)
        self._queued = None
        ahead = self._num_tokens_ahead
        if may_work_ahead and ahead is not None and rows.all_outlast(ahead):
            self._queued = self._queue_behind(turn)
            return turn.read(rows)
        record = turn.read(rows)
        self._settle(turn, record.num_accepted, rows.progress.next_tokens)
        return record

    def _queue_behind(self, turn: Turn) -> Turn:
        num_accepted, next_tokens = turn.arriving(self._rows.vocabulary_size)
        self._settle(turn, num_accepted, next_tokens)
        before = self._rows.progress
        num_generated = added(num_accepted, [count + 1 for count in before.num_generated])
        num_iterations = [count + 1 for count in before.num_iterations]
        return self._queue(Progress(num_generated, num_iterations, next_tokens))

    def require_nothing_queued(self) -> None:
        """Raise a ValueError if a turn is queued for the rows as they are."""
        if self._queued:
            raise ValueError("a batch that is worked on ahead cannot change")


def decode_batch(
    request: Request, rows: Rows, turns: Turns, target: Runner, drafter: Drafter | None = None
) -> Records:
    """Take turns until all rows have ended; after each record rows may leave, and others join."""
    change: Change | None = Change(joining=[request])
    while rows.members or (change and change.joining):
        first_step: Step | None = None
        is_first = not rows.members
        if change and change.joining:
            prompts = change.prompts
            first_step = target.start(prompts) if is_first else target.add(prompts)
            record = rows.join(change.joining, first_step.logits)
        else:
            record = turns.take(may_work_ahead=change is None)
        change = yield record
        staying = rows.going_on(change.ended if change else ())
        some_leave = len(staying) < len(rows.members)
        if some_leave or (change and change.joining):
            turns.require_nothing_queued()
        if drafter and first_step and staying:
            # Only now, because a reader waits for the first tokens.
            begin = drafter.start if is_first else drafter.add
            begin(prompts, [token for [token] in record.tokens], first_step)
        if some_leave:
            if staying:
                target.select(staying)
            if drafter and staying:
                drafter.select(staying)
            rows.select(staying)
