"""Teacher forcing: the probabilities that a drafter gives to the tokens of an existing text.

`results.statistics.iterations` computes acceptance from them. A drafter that can give them has a method `along`
(`TextFollower`): a model reads the text in one pass; a parallel model and a head draft at all places of
it at once, with the text's tokens in place of those that they would draw. Any other drafter is asked at every
place for a proposal (`by_prefixes`), which is enough where proposals are deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

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
        self, prompt: Sequence[int], text: Sequence[int], hidden: Tensor | None, most: int
    ) -> Tensor:
        """Return the probabilities [n - 1, most] that it gives to the n tokens of a text after a prompt.

        Entry (s, j) is of token s + 1 + j, as the draft token number j of an iteration that begins after
        token s and has drafted the text's own tokens so far. It is nan where nothing is offered, and beyond
        the text.

        Args:
            hidden: [prompt and text but its last token, L, D], the target's states of the L layers that the
                drafter reads; None for none.
        """
        ...


def probabilities_along(
    drafter: Drafter, prompt: Sequence[int], text: Sequence[int], hidden: Tensor | None, most: int
) -> Tensor | None:
    """Return what `TextFollower.along` does, of any drafter; None for a drafter that draws and has no `along`."""
    if isinstance(drafter, TextFollower):
        return drafter.along(prompt, text, hidden, most)
    return by_prefixes(drafter, prompt, text, hidden, most)


def read_along(
    runner: Runner, prompt: Sequence[int], texts: Sequence[Sequence[int]], device: torch.device
) -> Iterator[tuple[int, Step]]:
    """Read a prompt once, then texts of one length after it in parts, a row each, and yield the place where each part
    begins, with its step.

    The first step is the prompt's, at place -1.
    """
    yield -1, runner.start([prompt] * len(texts))
    tokens = torch.tensor(texts, device=device)
    width = max(1, CHUNK // len(texts))
    for begin in range(0, tokens.shape[1], width):
        part = tokens[:, begin : begin + width]
        yield begin, runner.extend(part)
        runner.keep([part.shape[1]] * len(texts))


def own_probabilities(
    runner: Runner,
    warp: AnyWarp,
    prompt: Sequence[int],
    read: Sequence[int],
    wanted: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Return the probabilities [m] that a model gives to the m tokens `wanted`, one after each of the tokens `read`."""
    parts = []
    for begin, step in read_along(runner, prompt, [read], device):
        if begin >= 0:
            probabilities = warp(step.logits[0])
            require_finite(probabilities, "draft", begin + 1)
            parts.append(chosen(probabilities, wanted[begin : begin + len(probabilities)]))
    return torch.cat(parts) if parts else torch.empty(0)


def require_finite(probabilities: Tensor, role: str, first: int) -> None:
    """Raise a NonFiniteError for distributions [n, V] that are nan: in figures it would stand for a token
    that is not offered, or cannot be drawn.

    Args:
        role: as in the error.
        first: the place in the text of the token that the first of them is for.
    """
    are_finite = probabilities.isfinite().all(-1).tolist()
    if not all(are_finite):
        raise NonFiniteError(role, first + are_finite.index(False), row=0)


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


def places_of(text: Sequence[int]) -> Iterator[range]:
    """Yield the places of a text's tokens but the last, so many at a time as are drafted at once."""
    for begin in range(0, len(text) - 1, PLACES):
        yield range(begin, min(begin + PLACES, len(text) - 1))


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
    drafter: Drafter, prompt: Sequence[int], text: Sequence[int], hidden: Tensor | None, most: int
) -> Tensor | None:
    """Return the probabilities 0 and 1 of deterministic proposals, each drafted from a batch that has the text
    up to one place; None if a proposal is drawn.
    """
    parts = []
    for places in places_of(text):
        prefixes = [[*prompt, *text[:place]] for place in places]
        longest = len(prefixes[-1])
        # Right-aligned, as a target's step has them.
        states = None
        if hidden is not None:
            states = hidden.new_zeros(len(places), longest, *hidden.shape[1:])
            for row, prefix in enumerate(prefixes):
                states[row, longest - len(prefix) :] = hidden[: len(prefix)]
        # No drafter reads the logits.
        drafter.start(prefixes, [text[place] for place in places], Step(torch.empty(0), states))
        proposal = drafter.propose(most, torch.zeros(len(places), most))
        drawn = proposal.probabilities
        if drawn is not None and not bool(((drawn == 0) | (drawn == 1)).all()):
            return None
        tokens = proposal.tokens.cpu()
        expected = upcoming(text, places, most)
        agreement = (tokens == expected[:, : tokens.shape[1]]).float()
        parts.append(as_offered(agreement, expected, proposal.lengths))
    return torch.cat(parts)
