"""The protocols of runners and drafters: a runner hides the KV cache, a drafter hides how tokens are proposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from harness.local.decoding.state import RowState, Starts

# Token ids: one sequence per row.
TokenRows = Sequence[Sequence[int]]


class Step(NamedTuple):
    """The outputs of a forward pass.

    Attributes:
        logits: [B, V], those after each prompt, as `Runner.start` returns them; [B, n, V], those after each new token,
            as `Runner.extend` does.
        hidden: the hidden states of the layers that the runner captures: [B, n, L, D] at each new token, or
            [B, longest, L, D] at each token of the prompts. Prompts are aligned at the right, so that a row's last
            token is at [:, -1], and the padding before its first token is undefined. None if the runner captures no
            layers.
    """

    logits: Tensor
    hidden: Tensor | None = None


class Runner(Protocol):
    """A batch of sequences that can be extended and rolled back. Runners inherit from it."""

    def start(self, prompts: TokenRows, num_slots: int = 0, *, alone: bool = False) -> Step:
        """Begin a new batch with the token ids of B prompts.

        A prompt without tokens begins an empty row, whose logits mean nothing.

        Args:
            num_slots: the most tokens that a row will have, its prompt included; 0 for `BUCKET` more than the longest
                prompt. A runner whose state grows as needed ignores it.
            alone: read different prompts one after the other, so that each is rounded as if it were read by itself. A
                runner for every model (`SnapshotRunner`) ignores it.
        """
        ...

    def extend(self, tokens: Tensor, starts: Starts, *, goes_on: bool = False) -> Step:
        """Read tokens [B, n] as the tokens of row b from index starts[b] on. The row's earlier tokens from that index
        on are discarded, so that a roll-back is a pass that begins earlier.

        With starts=[5] a row that has read 8 tokens keeps its tokens 0 to 4, and the new tokens become 5, 6, and so on.

        Args:
            starts: one index per row, None for a row that rests. It is at most the number of tokens that the row has
                read, and at least the number that it had read before its last pass. A tensor [B] is only for a runner
                with fixed slots, and makes the pass a function of tensors.
            goes_on: whether the pass begins at the end of the last one. The next pass may then discard tokens of both,
                as if the two had been one pass.
        """
        ...

    def close(self) -> None:
        """Free the memory of the batch and of compiled passes. No call but `start` may follow."""


class Proposal(NamedTuple):
    """Draft tokens for each row.

    Attributes:
        tokens: [B, K], K >= 0.
        probabilities: [B, K, V] float32, the distributions that the tokens were drawn from; None if the drafter is
            deterministic.
        lengths: how many of the K tokens each row is offered, 0 to K; None if every row is offered all K. A `Drafter`
            may give a list. A `TensorDrafter` gives a tensor [B], and so does `Calls.propose`.
    """

    tokens: Tensor
    probabilities: Tensor | None = None
    lengths: Sequence[int] | Tensor | None = None


class AnyDrafter(Protocol):
    """The part that all drafters have in common.

    Attributes:
        layers: the target's layers whose hidden states the drafter reads. The target's runner captures them.
    """

    layers: tuple[int, ...]

    def start(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        """Begin a new batch.

        Args:
            prompts: the token ids of B prompts. Rows that only fill the batch up have the first request's prompt.
            first_tokens: the token that was decided after each prompt.
            step: the target's pass over the prompts.
        """
        ...


class Drafter(AnyDrafter, Protocol):
    """A drafter that works on the host, such as one that reads only the text, or one that a user has written.

    Attributes:
        draws: whether `propose` draws with random numbers. If not, it gets `uniforms` [B, 0].
    """

    draws: bool = True

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """Propose up to K >= 1 tokens for each of B rows, those that rest included.

        Args:
            num_draft_tokens: K.
            uniforms: [B, K] random numbers to draw the tokens with. They may be the tokens of a text that is replayed,
                as for `TensorDrafter.draft`.
        """
        ...

    def observe(self, num_accepted: Sequence[int], decided: TokenRows, step: Step) -> None:
        """Learn what was decided about the proposal. Called after every iteration, also after one without a proposal.

        Args:
            num_accepted: how many proposed tokens of each row were accepted.
            decided: for each row its accepted tokens and the token after them, cut where the row ends. Empty for a
                row that had ended before this iteration.
            step: the target's pass over each row's last token and its proposed tokens: logits [B, n, V], n at least 1 +
                the longest proposal. The first num_accepted[b] + 1 entries of row b belong to kept tokens; ignore
                the others. The next pass may write over the logits and the hidden states: copy what is needed
                later.
        """
        ...


class TensorDrafter(AnyDrafter):
    """A drafter that proposes tokens by a model or a head. Such drafters inherit from it.

    `draft` and `learn` are functions of tensors: those of the rows, and the drafter's own, which they write in place.
    On the host they read nothing but `RowState.lengths`.

    Attributes:
        device: the device of the drafter's tensors; None for the target's device.
    """

    device: torch.device | None = None

    def make_room(self, num_rows: int, num_draft_tokens: int, num_slots: int) -> None:
        """Allocate tensors for a batch, before `start` begins it. Tensors that are large enough are kept, because
        captured calls read them by their addresses.

        Args:
            num_rows: B.
            num_draft_tokens: K.
            num_slots: the most tokens of a row.
        """

    def draft(self, rows: RowState, uniforms: Tensor) -> Proposal:
        """Propose up to K tokens for each row.

        Args:
            uniforms: [B, K] random numbers to draw the tokens with. They may be whole numbers instead, the tokens of a
                text that is replayed: draw by `randomness.existing_index`, which returns these tokens unchanged.
        """
        raise NotImplementedError

    def learn(self, hidden: Tensor) -> None:
        """Take the target's hidden states [B, 1 + K, L, D] at the token before each token of `RowState.decided`. Called
        after each iteration if the target's runner captures layers.
        """


class NonFiniteError(ArithmeticError):
    """A model gave logits that are nan or infinite.

    Attributes:
        role: the model that gave them, `model` (the target) or `draft`.
        position: index, among the generated tokens, of the token that the logits were for.
        row: the row's index in the batch.
    """

    def __init__(self, role: str, position: int, row: int = 0) -> None:
        super().__init__(f"logits of the {role} are not finite at new token {position}")
        self.role = role
        self.position = position
        self.row = row
