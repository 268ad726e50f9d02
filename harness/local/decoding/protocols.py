"""The two seams, runners and drafters.

A runner hides the KV cache, a drafter hides how tokens are proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from harness.local.decoding.state import RowState, Starts

# Token ids, a list for each row.
TokenRows = Sequence[Sequence[int]]


class Step(NamedTuple):
    """The outputs of a forward pass: logits [B, V] after prompts, or [B, n, V] after each new
    token.

    `hidden` has the states of the layers that the runner captures, None if it captures none: [B, n,
    L, D], or for prompts [B, longest, L, D], right-aligned: a row's last token is at [:, -1], the
    padding before its first undefined.
    """

    logits: Tensor
    hidden: Tensor | None = None


class Runner(Protocol):
    """A batch of sequences that can be extended and rolled back, to inherit from.

    A prompt without tokens is an empty row: its logits mean nothing.
    """

    def start(self, prompts: TokenRows, num_slots: int = 0, *, alone: bool = False) -> Step:
        """Begin a new batch with the token ids of B prompts.

        Args:
            num_slots: the most tokens that a row will have; 0 for `BUCKET` more than the longest prompt.
            alone: read prompts that differ one after the other, so that each is rounded as by itself.
        """
        ...

    def extend(self, tokens: Tensor, starts: Starts, *, goes_on: bool = False) -> Step:
        """Read tokens [B, n], those of row b as its tokens from number starts[b] on. What it had there is forgotten.

        Args:
            starts: where the row has as many tokens, or fewer, but no fewer than before its last pass. A tensor for
                fixed slots alone, over which this is a function of tensors.
            goes_on: behind all that was read last, which may still be forgotten as if the two passes were one.
        """
        ...

    def close(self) -> None:
        """Give back the memory of the batch and of compiled passes. No other call follows."""


class Proposal(NamedTuple):
    """Draft tokens for each row.

    Attributes:
        tokens: [B, K], K >= 0.
        probabilities: [B, K, V] float32, what the tokens were drawn from; None if the drafter is
            deterministic.
        lengths: how many of the K tokens each row is offered, 0 to K; None for all. Of a `TensorDrafter` a tensor [B].
    """

    tokens: Tensor
    probabilities: Tensor | None = None
    lengths: Sequence[int] | Tensor | None = None


class AnyDrafter(Protocol):
    """The part that is common to all ways to propose tokens.

    Attributes:
        layers: the target's layers whose hidden states it reads; the target's runner captures them.
    """

    layers: tuple[int, ...]

    def start(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        """Begin a new batch: B prompts, the token decided after each, the target's step."""
        ...


class Drafter(AnyDrafter, Protocol):
    """A way to propose tokens that works on the host, such as one that reads the text alone, or one of a user's own.

    Attributes:
        draws: whether it reads random numbers; without, `propose` is given none.
    """

    draws: bool = True

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """Propose up to K >= 1 tokens per row, drawn with the random numbers `uniforms` [B, K]."""
        ...

    def observe(self, num_accepted: Sequence[int], decided: TokenRows, step: Step) -> None:
        """Learn that row b keeps the first num_accepted[b] proposed tokens. decided[b] are these and
        the token that follows, cut where the row ends; none for a row that has ended before.

        `step` is the target's pass over the token before the proposal and the proposal itself, as wide as
        the longest. Of row b its first num_accepted[b] + 1 entries are of kept tokens; the others are to be
        ignored.
        """
        ...


class TensorDrafter(AnyDrafter):
    """A way to propose tokens by a model, to inherit from: `draft` and `learn` are functions of tensors, of the
    rows' and of the drafter's own, which they write in place. They read nothing on the host but `RowState.lengths`.

    Attributes:
        device: of all these tensors; None for the target's.
    """

    device: torch.device | None = None

    def make_room(self, num_rows: int, num_draft_tokens: int, num_slots: int) -> None:
        """Make room for a batch, which `start` begins: B rows, K draft tokens and `num_slots` tokens of each. Room in
        which it fits stays where it is.
        """

    def draft(self, rows: RowState, uniforms: Tensor) -> Proposal:
        """Propose K tokens for each row, drawn with the random numbers `uniforms` [B, K]."""
        raise NotImplementedError

    def learn(self, hidden: Tensor) -> None:
        """Learn the states [B, 1 + K, L, D] of the target at the token before each of `RowState.decided`, where its
        runner captures any.
        """


class NonFiniteError(ArithmeticError):
    """A model gave logits that are nan or infinite.

    Attributes:
        role: `model` or `draft`.
        position: index of the token that they were for, among those generated.
        row: its number in the loop.
    """

    def __init__(self, role: str, position: int, row: int = 0) -> None:
        super().__init__(f"logits of the {role} are not finite at new token {position}")
        self.role = role
        self.position = position
        self.row = row
