"""The two decoding loops, as generators of records. Printing, timing and files consume the records.

A consumer that sends a `Change` after a record lets rows leave and join while the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from harness.decoding.adaptive import Constant, DraftLength
from harness.decoding.protocols import Drafter, Iteration, NonFiniteError, Origin, Proposal, Runner
from harness.decoding.randomness import Purpose, inverse_cdf
from harness.decoding.transfer import to_device
from harness.decoding.verify import Verdict, verify
from harness.decoding.warp import RowWarp, Warp


@dataclass(frozen=True)
class Request:
    """What to generate, the same for every arm.

    Attributes:
        prompts: token ids of B prompts, none empty.
        uniforms: [B, at least max_new_tokens + 1, len(Purpose)] from `randomness.uniforms`, on the target's device; for
            `speculative` with `redraw` at least (max_new_tokens + 1) (K + 1).
        warp: how logits become probabilities.
        max_new_tokens: a row ends when it has this many tokens,
        stop_tokens: or after the first of these; none to generate exactly max_new_tokens.
    """

    prompts: Sequence[Sequence[int]]
    uniforms: Tensor
    warp: Warp
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()

    def cut(self, tokens: list[int], num_generated: int) -> tuple[list[int], bool]:
        """Those of `tokens` that a row with `num_generated` tokens may take, and whether the row ends with them."""
        tokens = tokens[: self.max_new_tokens - num_generated]
        for index, token in enumerate(tokens):
            if token in self.stop_tokens:
                return tokens[: index + 1], True
        return tokens, num_generated + len(tokens) == self.max_new_tokens


@dataclass(frozen=True)
class Change:
    """What a consumer may send to a loop after a record.

    Attributes:
        ended: rows that end here, whatever their request says.
        joining: requests whose prompts join the batch; their first tokens are the next record. Its rows are numbered on
            from the last that ever joined. Needs a runner and a drafter with `add`.
    """

    ended: Collection[int] = ()
    joining: Sequence[Request] = ()


Records = Generator[Iteration, Change | None, None]


@dataclass
class _Rows:
    """The rows of a batch that have not ended; all lists are parallel.

    Attributes:
        numbers: as in `Iteration.rows`.
        num_generated, num_iterations: of each row until now.
        next_tokens: the last token of each, which the target has not read yet.
        ended: whether the last record was a row's last.
        uniforms: [B, P, len(Purpose)]; those of a shorter request are filled up with zeros that are never used.
    """

    warp: RowWarp
    numbers: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    num_generated: list[int] = field(default_factory=list)
    num_iterations: list[int] = field(default_factory=list)
    next_tokens: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    uniforms: Tensor = field(default_factory=lambda: torch.empty(0))
    num_joined: int = 0

    def join(self, joining: Sequence[Request], logits: Tensor) -> Iteration:
        """Append the rows of some requests, with the first tokens that the logits [B, V] after their prompts give."""
        requests = [request for request in joining for _ in request.prompts]
        parts = logits.split([len(request.prompts) for request in joining])
        tokens = []
        for request, part in zip(joining, parts, strict=True):
            tokens += inverse_cdf(request.warp(part), request.uniforms[:, 0, Purpose.TARGET]).tolist()
        _check_finite(tokens, logits.shape[-1], [0] * len(tokens))
        parts = [*([self.uniforms] if self.numbers else []), *(request.uniforms for request in joining)]
        length = max(part.shape[1] for part in parts)
        self.uniforms = torch.cat([torch.nn.functional.pad(part, (0, 0, 0, length - part.shape[1])) for part in parts])
        numbers = [self.num_joined + index for index in range(len(tokens))]
        self.num_joined += len(tokens)
        self.numbers = self.numbers + numbers
        self.requests = self.requests + requests
        self.num_generated += [1] * len(tokens)
        self.num_iterations += [0] * len(tokens)
        self.next_tokens = self.next_tokens + tokens
        ended = [request.cut([token], 0)[1] for request, token in zip(requests, tokens, strict=True)]
        self.ended = [False] * len(self.ended) + ended
        self.warp.rows = [one.warp for one in self.requests]
        return _regular(numbers, [[token] for token in tokens])

    def take(self, decided: Sequence[list[int]]) -> list[list[int]]:
        """Give each row the tokens that were decided, at least one; returns those that it may take."""
        taken = []
        for i, tokens in enumerate(decided):
            new, self.ended[i] = self.requests[i].cut(tokens, self.num_generated[i])
            self.num_generated[i] += len(new)
            self.num_iterations[i] += 1
            taken.append(new)
        self.next_tokens = [tokens[-1] for tokens in decided]
        return taken

    def going_on(self, ended: Collection[int] = ()) -> list[int]:
        """The rows that have not ended, nor are among these numbers, as positions in the lists."""
        return [i for i, number in enumerate(self.numbers) if not self.ended[i] and number not in ended]

    def select(self, kept: list[int]) -> None:
        self.numbers = [self.numbers[i] for i in kept]
        self.requests = [self.requests[i] for i in kept]
        self.num_generated = [self.num_generated[i] for i in kept]
        self.num_iterations = [self.num_iterations[i] for i in kept]
        self.next_tokens = [self.next_tokens[i] for i in kept]
        self.ended = [False] * len(kept)
        if kept:
            self.uniforms = self.uniforms[to_device(kept, self.uniforms.device)]
        self.warp.rows = [one.warp for one in self.requests]


@torch.inference_mode()
def autoregressive(target: Runner, request: Request) -> Records:
    """Regular decoding: one token per row and forward pass."""
    rows = _Rows(RowWarp())
    change: Change | None = Change(joining=[request])
    while rows.numbers or (change and change.joining):
        if change and change.joining:
            prompts = [prompt for request in change.joining for prompt in request.prompts]
            record = rows.join(change.joining, (target.add if rows.numbers else target.start)(prompts).logits)
        else:
            pending = to_device(rows.next_tokens, rows.uniforms.device).unsqueeze(1)
            logits = target.extend(pending).logits[:, -1]
            target.keep([1] * len(rows.numbers))
            uniforms = _from_position(rows.uniforms, rows.num_generated, 1)[:, 0, Purpose.TARGET]
            tokens = [[token] for token in inverse_cdf(rows.warp(logits), uniforms).tolist()]
            _check_finite([token for [token] in tokens], logits.shape[-1], rows.num_generated)
            record = _regular(rows.numbers, rows.take(tokens))
        change = yield record
        going_on = rows.going_on(change.ended if change else ())
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
    verification: Callable[..., Verdict] = verify,
    redraw: bool = False,
    warp: RowWarp | None = None,
) -> Records:
    """Speculative decoding: up to K proposed tokens, one forward pass of the target over them, one verdict.

    `num_draft_tokens` is K, or chooses it before every iteration; 0 is an iteration of regular decoding.

    Near the end of a generation fewer tokens are proposed, so that the cache never holds more than prompt and
    `max_new_tokens`. `verification` takes what `verify` takes; it is not called where no row is offered a token.
    `redraw` proposes and accepts with new random numbers in every iteration. It is needed for a rule whose decision
    depends on the tokens that it discards, as block verification does; see `decoding.randomness`. `warp` is the
    drafter's, if rows with other settings may join.
    """
    rows = _Rows(warp or RowWarp())
    chosen = Constant(num_draft_tokens) if isinstance(num_draft_tokens, int) else num_draft_tokens
    change: Change | None = Change(joining=[request])
    while rows.numbers or (change and change.joining):
        begin: Callable[[], None] | None = None
        if change and change.joining:
            prompts, is_first = [prompt for request in change.joining for prompt in request.prompts], not rows.numbers
            step = (target.start if is_first else target.add)(prompts)
            record = rows.join(change.joining, step.logits)
            first_tokens = [token for [token] in record.tokens]
            begin = partial(drafter.start if is_first else drafter.add, prompts, first_tokens, step)
        else:
            record = _iterate(target, drafter, rows, chosen, lenience, verification, redraw)
        change = yield record
        going_on = rows.going_on(change.ended if change else ())
        if begin and going_on:
            begin()  # not before: a reader waits for the first tokens
        if len(going_on) < len(rows.numbers):
            if going_on:
                target.select(going_on)
                drafter.select(going_on)
            rows.select(going_on)


def _iterate(
    target: Runner,
    drafter: Drafter,
    rows: _Rows,
    draft_length: DraftLength,
    lenience: float,
    verification: Callable[..., Verdict],
    redraw: bool,
) -> Iteration:
    """One turn of `speculative`."""
    num_rows, uniforms = len(rows.numbers), rows.uniforms
    # The last token of a row is the next token of a verdict, so one fewer needs to be drafted than is missing. Each
    # row has its own limit, however many tokens the others need: an answer must not depend on its batch.
    num_draft_tokens = draft_length.choose(num_rows)
    limits = [
        min(num_draft_tokens, request.max_new_tokens - count - 1)
        for request, count in zip(rows.requests, rows.num_generated, strict=True)
    ]
    fitting = _from_position(uniforms, rows.num_generated, max(limits) + 1)
    tried = fitting[:, :-1]
    if redraw:
        unused = [
            request.max_new_tokens + 1 + (1 + count) * draft_length.most
            for request, count in zip(rows.requests, rows.num_iterations, strict=True)
        ]
        tried = _from_position(uniforms, unused, max(limits))
    if max(limits):
        proposal = drafter.propose(max(limits), tried[:, :, Purpose.DRAFT])
    else:
        proposal = Proposal(torch.empty(num_rows, 0, dtype=torch.long, device=uniforms.device))
    draft_length.drafted()
    widest = [proposal.tokens.shape[1]] * num_rows
    lengths = [min(pair) for pair in zip(limits, proposal.lengths or widest, strict=True)]
    width = max(lengths)
    draft_tokens, draft_probabilities = proposal.tokens[:, :width], proposal.probabilities
    pending = to_device(rows.next_tokens, draft_tokens.device).unsqueeze(1)
    step = target.extend(torch.cat([pending, draft_tokens], dim=1))
    verdict = (verification if width else verify)(
        rows.warp(step.logits),
        draft_tokens,
        None if draft_probabilities is None else draft_probabilities[:, :width],
        tried[:, :width, Purpose.ACCEPT],
        fitting[:, : width + 1, Purpose.TARGET],
        lenience,
        to_device(lengths, step.logits.device) if min(lengths) < width else None,
    )

    # The one synchronisation with the device: all that the host must know, in one transfer.
    # Of both models, the number of draft tokens before the first whose probability is nan.
    probabilities = verdict.target_probability, verdict.draft_probability
    sound = [(~probability.isnan()).long().cumprod(-1).sum(-1) for probability in probabilities]
    figures = torch.stack([verdict.num_accepted, verdict.next_token, *sound], dim=1)
    decided = torch.cat([figures, draft_tokens], dim=1).tolist()
    num_accepted = [row[0] for row in decided]
    next_tokens = [row[1] for row in decided]
    proposed = [row[4 : 4 + length] for row, length in zip(decided, lengths, strict=True)]
    # What a rule accepts need not depend on the target's probability of it.
    for column, role in ((2, "model"), (3, "draft")):
        for row, count in zip(decided, rows.num_generated, strict=True):
            if row[column] < width:
                raise NonFiniteError(role, count + row[column])
    positions = [count + accepted for count, accepted in zip(rows.num_generated, num_accepted, strict=True)]
    _check_finite(next_tokens, step.logits.shape[-1], positions)
    target.keep([count + 1 for count in num_accepted])

    accepted = [tokens[:count] for tokens, count in zip(proposed, num_accepted, strict=True)]
    tokens = rows.take([[*kept, last] for kept, last in zip(accepted, next_tokens, strict=True)])
    origins = [
        [*[Origin.DRAFT] * count, _last_origin(count, offered)][: len(new)]
        for count, offered, new in zip(num_accepted, lengths, tokens, strict=True)
    ]
    if rows.going_on():
        drafter.observe(num_accepted, next_tokens, step)
    draft_length.observe(limits, lengths, num_accepted)
    return Iteration(rows.numbers, tokens, origins, proposed, num_accepted, verdict)


def _check_finite(tokens: list[int], vocabulary_size: int, positions: Sequence[int]) -> None:
    """Raise a NonFiniteError for a token that does not exist, which is what is drawn from nan."""
    for token, position in zip(tokens, positions, strict=True):
        if token >= vocabulary_size:
            raise NonFiniteError("model", position)


def _regular(rows: list[int], tokens: list[list[int]]) -> Iteration:
    """The record of tokens drawn from the target, one per row."""
    return Iteration(rows, tokens, [[Origin.TARGET]] * len(rows), [[]] * len(rows), [0] * len(rows))


def _last_origin(num_accepted: int, num_offered: int) -> Origin:
    """Where the token that follows the accepted ones comes from."""
    if num_accepted < num_offered:
        return Origin.RECOVERED
    return Origin.BONUS if num_offered else Origin.TARGET


def _from_position(uniforms: Tensor, positions: Sequence[int], count: int) -> Tensor:
    """`count` uniforms per row, starting at each row's own position: [B, P, purposes] -> [B, count, purposes]."""
    if len(set(positions)) == 1:
        return uniforms[:, positions[0] : positions[0] + count]
    index = to_device(positions, uniforms.device).unsqueeze(1) + torch.arange(count, device=uniforms.device)
    # A row near its end may not need them all; positions beyond the stream are never decided.
    index = index.clamp(max=uniforms.shape[1] - 1)
    return uniforms[torch.arange(len(positions), device=uniforms.device).unsqueeze(1), index]
