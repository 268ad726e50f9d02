"""The numbers on which the placement of a run's pair depends, and a change that would make the pair fit."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.amounts import round_up
from harness.config.run import RunnerName


@dataclass(frozen=True)
class Demand:
    """The numbers on which a run's use of memory depends.

    Attributes:
        batch_size: the most rows that are decoded at the same time.
        prompt_tokens: number of tokens of the longest prompt.
        new_tokens: the most new tokens of a row.
        num_draft_tokens: K; 0 without a draft.
        runner: the runner of both models. All except `eager` keep caches of a fixed size.
    """

    batch_size: int
    prompt_tokens: int
    new_tokens: int
    num_draft_tokens: int
    runner: RunnerName

    @property
    def row_tokens(self) -> int:
        """The number of tokens of the longest row: its prompt, the new tokens and the draft tokens."""
        return self.prompt_tokens + self.new_tokens + self.num_draft_tokens

    @property
    def slots(self) -> int:
        """The number of slots that a row needs in a cache of fixed size.

        It is one more than the row has tokens: the last pass of a draft model writes two tokens, of which the second
        one is after the row's end.
        """
        return self.row_tokens + 1

    @property
    def runner_tokens(self) -> int:
        """The most tokens for which a runner keeps keys and values in a row. For `eager` these are the row's tokens;
        for the others its slots, rounded up to a multiple of 128, plus the prompt's tokens, because the prompt is first
        read into a cache of its own.
        """
        if self.runner == "eager":
            return self.row_tokens
        return round_up(self.slots) + self.prompt_tokens

    def head_tokens(self, block_size: int) -> int:
        """The most tokens for which a draft head keeps keys and values in a row (`HeadDrafter.make_room`).

        A proposal writes K + 1 decided tokens and K draft tokens behind the row's slots. A block head writes its whole
        block in place of the K, if the block is larger.
        """
        k = self.num_draft_tokens
        return round_up(self.slots + k + 1 + max(k, block_size))


@dataclass(frozen=True)
class Remedy:
    """A change of settings that would make a pair fit.

    As text it is `model=65B_4bit (33.2 GB)`; if the machine has too few GPUs, `model=65B_4GPUs (4 GPUs with as much
    free)`.

    Attributes:
        change: the change as it would be typed.
        size: the size of the models after the change, `33.2 GB`; empty if the size stays the same.
        num_gpus: the number of GPUs that the change needs, if the machine has fewer; otherwise None.
    """

    change: str
    size: str = ""
    num_gpus: int | None = None

    def __str__(self) -> str:
        about = self.size
        if self.num_gpus is not None:
            about = f"{self.num_gpus} GPUs with as much free"
        return f"{self.change} ({about})" if about else self.change
