"""Teacher forcing: the probabilities that a drafter gives to the tokens of an existing text.

`results.statistics.iterations` computes acceptance from them. A draft model reads the text in one
pass. Any other drafter replays it: after each token of an answer it proposes, taking the text's own
tokens in place of those that it would draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.local.decoding.protocols import Drafter, NonFiniteError, Proposal, Runner, Step
from harness.local.decoding.warp import AnyWarp

# Tokens of a text that are read in one pass: their logits and probabilities are in memory at once.
CHUNK = 256


def replayed(
    drafter: Drafter,
    tokens: Sequence[int],
    answer: range,
    hidden: Tensor | None,
    most: int,
    vocabulary_size: int,
) -> Tensor | None:
    """Replay an answer: propose `most` tokens after each of its tokens but the last, of which the
    text's next one is always kept.

    Args:
        tokens: all tokens, of prompt and answer.
        answer: the answer's places in `tokens`; the first token is not among them.
        hidden: [tokens but the last, L, D], the target's states of the L layers that the drafter
            reads; None for none.
        vocabulary_size: of the target's logits, which no drafter reads.

    Returns:
        Probabilities [len(answer) - 1, most]. Entry (s, j) is of the token 1 + j after the s-th, as
        the draft token number j of an iteration that has drafted the text's own tokens so far. It
        is nan where nothing is offered, and beyond the text. None for a drafter that draws by other
        means than `randomness.existing_index`, and so does not take the text's tokens.
    """
    first = answer.start
    logits = torch.empty(1, vocabulary_size)
    begun = Step(logits, None if hidden is None else hidden[:first].unsqueeze(0))
    drafter.start([tokens[:first]], [tokens[first]], begun)
    found = torch.full((len(answer) - 1, most), torch.nan)
    for number, place in enumerate(answer[:-1]):
        upcoming = tokens[place + 1 : place + 1 + most]
        # Any token beyond the text.
        taken = [*upcoming, *[0] * (most - len(upcoming))]
        proposal = drafter.propose(most, torch.tensor([taken]))
        probabilities = _offered(proposal, taken)
        if probabilities is None:
            return None
        probabilities = probabilities[: len(upcoming)]
        found[number, : len(probabilities)] = probabilities
        states = None if hidden is None else hidden[place].unsqueeze(0).unsqueeze(0)
        drafter.observe([0], [tokens[place + 1]], Step(logits, states))
    return found


def _offered(proposal: Proposal, taken: Sequence[int]) -> Tensor | None:
    """Return the probabilities [n] of the tokens of a text in a proposal of n tokens for one row;
    None if another token was drawn in place of one that could have been.
    """
    tokens = proposal.tokens[0].cpu()
    wanted = torch.tensor(taken[: len(tokens)], dtype=torch.long)
    is_taken = tokens == wanted
    probabilities = is_taken.float()
    if proposal.probabilities is not None:
        probabilities = chosen(proposal.probabilities[0].cpu(), wanted.tolist())
        if not is_taken.all():
            # What follows it is never accepted.
            first_other = int(is_taken.int().argmin())
            if probabilities[first_other] > 0:
                return None
    return probabilities if proposal.lengths is None else probabilities[: proposal.lengths[0]]


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
    """Return the probabilities [m] of m tokens in distributions [m, V]; 0 of tokens beyond V."""
    wanted = torch.tensor(tokens, dtype=torch.long, device=probabilities.device)
    is_known = wanted < probabilities.shape[-1]
    index = wanted.where(is_known, 0).unsqueeze(-1)
    return probabilities.gather(-1, index).squeeze(-1) * is_known


def windows(probabilities: Tensor, most: int) -> Tensor:
    """Return [m, most] from [m] probabilities that do not depend on where an iteration began; nan beyond the text.

    Entry (s, j) is entry s + j.
    """
    beyond = probabilities.new_full((most - 1,), torch.nan)
    return (
        torch.cat([probabilities, beyond]).unfold(0, most, 1).clone()
    )  # a view shares its entries
