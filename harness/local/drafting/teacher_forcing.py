"""Teacher forcing: the probabilities that a drafter gives to the tokens of an existing text.

`results.statistics.iterations` computes acceptance from them. A drafter that can give them has a method `along`
(`TextFollower`): a model reads the text in one pass; a parallel model and a head draft at all places of
it at once, with the text's tokens in place of those that they would draw. Any other drafter is asked at every
place for a proposal (`by_prefixes`), which is enough where proposals are deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from harness.local.decoding.protocols import Drafter, NonFiniteError, Runner, Step
from harness.local.decoding.warp import AnyWarp

# Tokens of a text that are read in one pass: their logits and probabilities are in memory at once.
CHUNK = 256
# A token that no model has.
NO_TOKEN = 2**31
# Places of a text at which proposals are drafted at once.
PLACES = 64


@runtime_checkable
class TextFollower(Protocol):
    """A drafter that gives probabilities to a text."""

    def along(
        self, tokens: Sequence[int], answers: Sequence[range], hidden: Tensor | None, most: int
    ) -> Tensor:
        """Return the probabilities [places, most] that it gives to the tokens of answers.

        The places are those of each answer's tokens but the last (`places_of`), in order. Entry (s, j) is of
        the token 1 + j after place s, as the draft token number j of an iteration that begins after that
        place and has drafted the text's own tokens so far. It is nan where nothing is offered. What it is
        beyond an answer does not matter.

        Args:
            tokens: all tokens, of prompts and answers.
            answers: their places in `tokens`, ascending; none begins with the first token.
            hidden: [tokens but the last, L, D], the target's states of the L layers that the drafter reads;
                None for none.
        """
        ...


def probabilities_along(
    drafter: Drafter,
    tokens: Sequence[int],
    answers: Sequence[range],
    hidden: Tensor | None,
    most: int,
) -> Tensor | None:
    """Return what `TextFollower.along` does, of any drafter; None for a drafter that draws and has no `along`."""
    if isinstance(drafter, TextFollower):
        return drafter.along(tokens, answers, hidden, most)
    return by_prefixes(drafter, tokens, answers, hidden, most)


def places_of(answers: Sequence[range]) -> list[int]:
    """Return the places after which an iteration can begin: each answer's tokens but the last."""
    return [place for answer in answers for place in answer[:-1]]


def overlap(places: range, others: range) -> range:
    """Return the places that both have."""
    begin = max(places.start, others.start)
    return range(begin, max(begin, min(places.stop, others.stop)))


class ReadPart(NamedTuple):
    """Part of a text that a model has read.

    Attributes:
        begin, end: the places after which there are logits.
        logits: [B, end - begin, V], after the tokens at these places.
        hidden: [B, n, L, D] of the tokens that were read; None without layers.
    """

    begin: int
    end: int
    logits: Tensor
    hidden: Tensor | None

    def logits_after(self, row: int, places: Sequence[int]) -> Tensor:
        """Return the logits [m, V] of a row after m places."""
        index = torch.tensor(places, device=self.logits.device) - self.begin
        return self.logits[row, index]


def read_along(
    runner: Runner,
    rows: Sequence[Sequence[int]],
    num_first: int,
    device: torch.device | None = None,
) -> Iterator[ReadPart]:
    """Read texts of one length, whose first `num_first` tokens are the same, in parts of all rows together.

    Logits after these tokens but the last may be missing.
    """
    num_first = min(num_first, CHUNK)
    step = runner.start([row[:num_first] for row in rows])
    yield ReadPart(num_first - 1, num_first, step.logits.unsqueeze(1), step.hidden)
    tokens = torch.tensor(rows, device=device or step.logits.device)
    width = max(1, CHUNK // len(rows))
    for begin in range(num_first, tokens.shape[1], width):
        part = tokens[:, begin : begin + width]
        step = runner.extend(part)
        yield ReadPart(begin, begin + part.shape[1], step.logits, step.hidden)
        runner.keep([part.shape[1]] * len(rows))


def own_probabilities(
    runner: Runner, warp: AnyWarp, tokens: Sequence[int], wanted: Mapping[int, int]
) -> Tensor:
    """Return the probabilities [m] that a model gives to m tokens of a text, or others in their stead.

    Args:
        wanted: a token by the place before it, ascending.
    """
    first, last = min(wanted), max(wanted)
    parts = []
    for read in read_along(runner, [tokens[: last + 1]], first + 1):
        places = [place for place in range(read.begin, read.end) if place in wanted]
        if places:
            probabilities = warp(read.logits_after(0, places))
            require_finite(probabilities, "draft", places)
            parts.append(chosen(probabilities, [wanted[place] for place in places]))
    return torch.cat(parts)


def require_finite(probabilities: Tensor, role: str, places: Sequence[int]) -> None:
    """Raise a NonFiniteError for distributions [n, V] that are nan: in figures it would stand for a token
    that is not offered, or cannot be drawn.

    Args:
        role: as in the error.
        places: of the tokens before them.
    """
    are_finite = probabilities.isfinite().all(-1).tolist()
    if not all(are_finite):
        raise NonFiniteError(role, places[are_finite.index(False)] + 1, row=0)


def chosen(probabilities: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the probabilities [..., m] of m tokens in distributions [..., m, V]; 0 of tokens beyond V."""
    wanted = torch.tensor(tokens, device=probabilities.device)
    is_known = wanted < probabilities.shape[-1]
    index = wanted.where(is_known, 0).unsqueeze(-1).expand(*probabilities.shape[:-1], 1)
    return probabilities.gather(-1, index).squeeze(-1) * is_known


def windows(probabilities: Tensor, most: int) -> Tensor:
    """Return [m, most] from [m] probabilities that do not depend on where an iteration began; nan beyond the text.

    Entry (s, j) is entry s + j.
    """
    beyond = probabilities.new_full((most - 1,), torch.nan)
    return (
        torch.cat([probabilities, beyond]).unfold(0, most, 1).clone()
    )  # a view shares its entries


def as_offered(
    found: Tensor, expected: Tensor, lengths: Tensor | Sequence[int] | None = None
) -> Tensor:
    """Return [places, most] from what was found for the first tokens [places, n] after each place.

    Args:
        expected: the upcoming tokens.
        lengths: how many tokens were offered at each place; None for n.
    """
    num_missing = expected.shape[1] - found.shape[1]
    entries = torch.nn.functional.pad(found, (0, num_missing), value=torch.nan)
    if lengths is not None:
        ahead = torch.arange(expected.shape[1], device=found.device)
        num_offered = torch.as_tensor(lengths, device=found.device).unsqueeze(1)
        entries = entries.masked_fill(ahead >= num_offered, torch.nan)
    return entries.masked_fill(expected < 0, torch.nan)


def upcoming(text: Sequence[int], places: Sequence[int], most: int) -> Tensor:
    """Return the `most` tokens [places, most] of a text after each of these places; -1 beyond the text."""
    padded = [*text, *[-1] * most]
    return torch.tensor([padded[place + 1 : place + 1 + most] for place in places])


def by_prefixes(
    drafter: Drafter,
    tokens: Sequence[int],
    answers: Sequence[range],
    hidden: Tensor | None,
    most: int,
) -> Tensor | None:
    """Return the probabilities 0 and 1 of deterministic proposals, each drafted from a batch that has the text
    up to one place; None if a proposal is drawn.
    """
    parts = []
    for places in in_parts(places_of(answers)):
        prefixes = [tokens[:place] for place in places]
        longest = len(prefixes[-1])
        # Right-aligned, as a target's step has them.
        states = None
        if hidden is not None:
            states = hidden.new_zeros(len(places), longest, *hidden.shape[1:])
            for row, prefix in enumerate(prefixes):
                states[row, longest - len(prefix) :] = hidden[: len(prefix)]
        # No drafter reads the logits.
        drafter.start(prefixes, [tokens[place] for place in places], Step(torch.empty(0), states))
        proposal = drafter.propose(most, torch.zeros(len(places), most))
        drawn = proposal.probabilities
        if drawn is not None and not bool(((drawn == 0) | (drawn == 1)).all()):
            return None
        proposed = proposal.tokens.cpu()
        expected = upcoming(tokens, places, most)
        agreement = (proposed == expected[:, : proposed.shape[1]]).float()
        parts.append(as_offered(agreement, expected, proposal.lengths))
    return torch.cat(parts)


def in_parts(places: Sequence[int], at_once: int = 2**31) -> Iterator[Sequence[int]]:
    """Yield so many places at a time as are drafted at once."""
    at_once = min(at_once, PLACES)
    for first in range(0, len(places), at_once):
        yield places[first : first + at_once]
