"""The numbers of a run by which a pair is placed, and changes that would make it fit."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.amounts import round_up
from harness.config.run import RunnerName


@dataclass(frozen=True)
class Demand:
    """The settings of a run that its memory depends on.

    Attributes:
        batch_size: the most rows that are decoded at once.
        prompt_tokens: length of the longest prompt.
        new_tokens: the most new tokens of a row.
        num_draft_tokens: K; 0 without a draft.
        runner: of both models; all but `eager` keep caches of fixed size.
    """

    batch_size: int
    prompt_tokens: int
    new_tokens: int
    num_draft_tokens: int
    runner: RunnerName

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row: its prompt, the new tokens and the draft tokens."""
        return self.prompt_tokens + self.new_tokens + self.num_draft_tokens

    @property
    def slots(self) -> int:
        """The slots of a row in a cache of fixed size: a draft model's last pass writes two tokens, the second of them
        behind the row's end.
        """
        return self.row_tokens + 1

    @property
    def runner_tokens(self) -> int:
        """The most tokens whose keys and values a runner keeps for a row."""
        if self.runner == "eager":
            return self.row_tokens
        # The prompt is read into a separate cache and copied from there.
        return round_up(self.slots) + self.prompt_tokens

    @property
    def head_tokens(self) -> int:
        """The same of a draft head. Behind the row a proposal writes up to K + 1 tokens that were decided last, and K
        drafted ones.
        """
        return round_up(self.slots + 2 * self.num_draft_tokens + 1)


@dataclass(frozen=True)
class Remedy:
    """A change with which a pair would fit.

    As text `model=65B_4bit (33.2 GB)`, or `model=65B_4GPUs (4 GPUs with as much free)` where the machine has fewer.

    Attributes:
        change: as it is typed.
        size: of the models after the change, `33.2 GB`; empty where they stay as they are.
        num_gpus: that are needed, where the machine has fewer.
    """

    change: str
    size: str = ""
    num_gpus: int | None = None

    def __str__(self) -> str:
        about = self.size
        if self.num_gpus is not None:
            about = f"{self.num_gpus} GPUs with as much free"
        return f"{self.change} ({about})" if about else self.change
