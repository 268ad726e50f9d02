"""The interfaces of runners and drafters. A runner hides the KV cache, and a drafter hides how tokens are proposed."""

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
        logits: from `Runner.start`, the logits after each prompt, [B, V]; from `Runner.extend`, the logits after each
            new token, [B, n, V].
        hidden: the hidden states of the L layers that were requested when the runner was made; None if none were. From
            `Runner.extend`, they are the states at each new token, [B, n, L, D]. From `Runner.start`, they are the
            states at each token of the prompts, [B, longest, L, D]. There, prompts are aligned at the right: the last
            token of each row is at [:, -1], and the values to the left of a row's first token are undefined.
    """

    logits: Tensor
    hidden: Tensor | None = None


class Runner(Protocol):
    """A batch of sequences that can be extended and rolled back. All runners inherit from this class."""

    def start(self, prompts: TokenRows, num_slots: int = 0, *, alone: bool = False) -> Step:
        """Begin a new batch with the token ids of B prompts.

        A prompt without tokens begins an empty row, whose logits are meaningless.

        Args:
            num_slots: the largest number of tokens that a row will have, with its prompt and the draft tokens of its
                last pass. 0 means 128 tokens (`config.amounts.BUCKET`) more than the longest prompt. A runner whose
                state grows as needed (`SnapshotRunner`) ignores this.
            alone: whether different prompts are read one after the other, so that each is rounded as if it were the
                only prompt. `SnapshotRunner` ignores this.
        """
        ...

    def extend(self, tokens: Tensor, starts: Starts, *, goes_on: bool = False) -> Step:
        """Read tokens [B, n]. In row b they become the tokens from index starts[b] on, and replace any tokens that the
        row had read from there on. So rolling back means to begin the next pass at an earlier index.

        For example, with starts=[5] a row that has read 8 tokens keeps its tokens 0 to 4, and the new tokens become its
        tokens 5, 6, and so on.

        Args:
            starts: one index per row; None for a row that rests. An index is at most the number of tokens that the row
                has read, and at least the number that it had read before its last pass. A runner with fixed slots also
                accepts a tensor [B], which makes the pass a function of tensors.
            goes_on: whether this pass continues the previous one, as when a draft model draws each token of a proposal
                in a pass of its own. The next pass may then discard tokens of both, as if the two had been a single
                pass.
        """
        ...

    def close(self) -> None:
        """Free the memory of the batch and of compiled passes. After this, only `start` may be called."""


class Proposal(NamedTuple):
    """Draft tokens for each row.

    Attributes:
        tokens: [B, K], K >= 0.
        probabilities: [B, K, V] float32, the distributions that the tokens were drawn from; None if the drafter is
            deterministic.
        lengths: how many of the K tokens each row is offered, 0 to K; None if each row is offered all K. A `Drafter`
            may return a list. A `TensorDrafter` and `Calls.propose` return a tensor [B].
    """

    tokens: Tensor
    probabilities: Tensor | None = None
    lengths: Sequence[int] | Tensor | None = None


class AnyDrafter(Protocol):
    """The interface that all drafters have in common.

    Attributes:
        layers: the target's layers whose hidden states the drafter reads: 0 is the embedding, i the output of layer i;
            () for none. (For the last layer, it is the output after the final norm.) The target's runner returns these
            hidden states.
    """

    layers: tuple[int, ...]

    def start(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        """Begin a new batch.

        Args:
            prompts: the token ids of B prompts. Rows that only fill the batch up have the prompt of the first request.
            first_tokens: for each prompt, the token that was decided after it.
            step: the outputs of the target's pass over the prompts.
        """
        ...


class Drafter(AnyDrafter, Protocol):
    """A drafter that works on the host, between the calls of an iteration. Examples are drafters that read only the
    text, and many drafters that users write.

    Attributes:
        draws: whether `propose` draws with random numbers. If not, its argument `uniforms` is empty, [B, 0], unless a
            text is replayed.
    """

    draws: bool = True

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """Propose up to K >= 1 tokens for each of B rows, including rows that rest.

        Args:
            num_draft_tokens: K.
            uniforms: [B, K], the random numbers with which tokens are drawn. They may be the tokens of a text that is
                replayed (`acceptance` does this), as for `TensorDrafter.draft`.
        """
        ...

    def observe(self, num_accepted: Sequence[int], decided: TokenRows, step: Step) -> None:
        """Learn what was decided about the proposal. This is called after every iteration, even if nothing was
        proposed.

        Args:
            num_accepted: how many proposed tokens of each row were accepted.
            decided: for each row, its accepted tokens and the token after them, cut at the end of the row. Empty for a
                row that had ended before this iteration.
            step: the outputs of the target's pass over each row's last token and its proposed tokens. The logits are
                [B, n, V], where n is at least 1 + the length of the longest proposal. In row b, the first
                num_accepted[b] + 1 entries belong to tokens that were kept; the others must be ignored. The next pass
                may overwrite the logits, but not the hidden states. While a text is replayed, n is 1, and the logits
                are meaningless.
        """
        ...


class TensorDrafter(AnyDrafter):
    """A drafter that works within the calls of an iteration, usually with a model or a head. Such drafters inherit from
    this class.

    `draft` and `learn` are functions of tensors. They read tensors of the rows, and write in place only to the
    drafter's own tensors. On the host they read only `RowState.lengths`.

    Attributes:
        device: the device of the drafter's tensors; None for the target's device.
    """

    device: torch.device | None = None

    def make_room(self, num_rows: int, num_draft_tokens: int, num_slots: int) -> None:
        """Allocate the drafter's tensors for a batch, before `start` begins it. Tensors that are large enough must be
        kept, because captured calls read them at their addresses.

        Args:
            num_rows: B.
            num_draft_tokens: K.
            num_slots: as for `Runner.start`.
        """

    def draft(self, rows: RowState, uniforms: Tensor) -> Proposal:
        """Propose up to K tokens for each row.

        Args:
            uniforms: [B, K], the random numbers with which tokens are drawn. While a text is replayed, they are whole
                numbers: the tokens of the text. So tokens must be drawn with `randomness.existing_index`, which returns
                whole numbers unchanged.
        """
        raise NotImplementedError

    def learn(self, hidden: Tensor) -> None:
        """Read the target's hidden states [B, n, L, D]; `hidden[:, i]` belongs to the token before
        `RowState.decided[:, i]`. Here n is 1 + the number of draft tokens that the pass verified, so at most 1 + K.

        This is called after each iteration, even if nothing was proposed, if the target's runner returns hidden states.
        """


class NonFiniteError(ArithmeticError):
    """A model gave logits that are nan or infinite.

    Attributes:
        role: the model that gave these logits, `model` (the target) or `draft`.
        position: the index of the token that the logits were for: among the new tokens of its row, or in the whole text
            if a text was read.
        row: the row's index in the batch.
    """

    def __init__(self, role: str, position: int, row: int = 0) -> None:
        super().__init__(f"logits of the {role} are not finite at new token {position}")
        self.role = role
        self.position = position
        self.row = row
