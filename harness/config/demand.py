"""The memory that a run needs, in numbers by which a pair is placed."""

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
        num_draft_tokens: K, or the nodes of a tree; 0 without a draft.
        rows_setting, tokens_setting: the settings of `batch_size` and `new_tokens`, which advice
            names.
    """

    batch_size: int
    prompt_tokens: int
    new_tokens: int
    num_draft_tokens: int
    runner: RunnerName
    rows_setting: str = "batch_size"
    tokens_setting: str = "decoding.max_new_tokens"

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row: its prompt, the new tokens and the draft tokens."""
        return self.prompt_tokens + self.new_tokens + self.num_draft_tokens

    def cached_tokens(self, runner: RunnerName, spare_slots: int | None = None) -> int:
        """The most tokens whose keys and values are kept for a row.

        Args:
            spare_slots: the spare slots of a head's own cache; None for a cache that a runner
                holds.
        """
        if spare_slots is not None:
            first_size = self.prompt_tokens + self.num_draft_tokens + spare_slots
            if self.row_tokens <= first_size:
                return first_size
            # The old buffer stays allocated until its contents have been copied.
            return 2 * self.row_tokens + spare_slots
        if runner == "eager":
            return self.row_tokens
        # The prompt is read into a separate cache and copied from there.
        return round_up(self.row_tokens + 1) + self.prompt_tokens
