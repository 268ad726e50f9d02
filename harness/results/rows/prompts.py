"""The rows about the single answers of a run of `latency`: one row per prompt and arm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from harness.results.drafts import DraftColumns
from harness.results.files import read_rows
from harness.results.row import Row, figure
from harness.results.schema import AcceptedByIteration, MaybeBool, MaybeFloat, MaybeInt, MaybeText

# The file's name in the directory of a run.
PROMPTS_FILE = "latency_prompts.csv"
# About a month. A longer time comes from a damaged file.
_MOST_MS = 3e9


@dataclass(frozen=True, kw_only=True)
class LatencyPromptRow(DraftColumns, AcceptedByIteration, Row):
    """`latency_prompts.csv`: one row per prompt and arm."""

    kind = "latency_prompts"
    recognised_by = ("prompt_index", "prompt", "completion", "time_to_first_token_ms")

    prompt_index: MaybeInt = figure(
        "number of the request, which determines its random numbers, together with the seed: for first turns the"
        " prompt's place; for later turns and repetitions higher numbers"
    )
    prompt_place: MaybeInt = figure(
        "place of the prompt in the prompt set, from 0: the same for every turn and repetition"
    )
    category: MaybeText = figure("category of the prompt, if the set has categories")
    turn: MaybeInt = figure("turn of a conversation, from 1; empty if only first turns are sent")
    prompt: MaybeText = figure("the prompt; for a chat, its last message")
    arm: MaybeText = figure("`regular` or `speculative`")
    completion: MaybeText = figure("generated text")
    num_tokens: MaybeInt = figure("generated tokens", "tokens")
    time_ms: MaybeFloat = figure(
        "time of the batch that contains the prompt, or of the request to a server", "ms"
    )
    time_to_first_token_ms: MaybeFloat = figure("time to the first token", "ms")
    last_token_ms: MaybeFloat = figure("time to the last token", "ms")
    num_arrivals: MaybeInt = figure("number of arrivals, each of one or more tokens")
    cached_tokens: MaybeInt = figure(
        "tokens of the prompt that the server took from a cache, as it reports", "tokens"
    )
    unit: MaybeInt = figure(
        "number of the prompt's unit (batch or lap), from 0; the same if the same batch or lap is sent again"
    )
    moment: MaybeInt = figure(
        "number of the batch or lap in the order of sending; unlike `unit`, it is new if a batch or lap is sent again"
    )
    lap_ms: MaybeFloat = figure(
        "time of the prompt's batch or lap; if further requests kept up the load, their share is left out",
        "ms",
    )
    num_prompt_tokens: MaybeInt = figure("tokens of the prompt", "tokens")
    read_tokens: MaybeInt = figure("tokens of the prompt, as the server counted them", "tokens")
    error: MaybeText = figure("why the request failed")
    compared: MaybeBool = figure("whether its greedy text was compared with the regular arm's")
    divergence_position: MaybeInt = figure(
        "first token at which a greedy text differs from the regular arm's"
    )
    logit_margin: MaybeFloat = figure(
        "logit of the regular arm's token minus the logit of this arm's token, at the divergence"
    )
    logit_tolerance: MaybeFloat = figure("largest margin at the divergence that rounding explains")

    @property
    def unit_number(self) -> int:
        """The number of the answer's unit. Files of older versions contain no units; there, each prompt is a unit."""
        return (self.prompt_index or 0) if self.unit is None else self.unit

    @property
    def place(self) -> int:
        """The prompt's place in the prompt set; in files of older versions, the number of the request."""
        return (self.prompt_index or 0) if self.prompt_place is None else self.prompt_place

    @property
    def is_timed(self) -> bool:
        """Whether the prompt was answered, in a known and plausible time. A damaged file may contain any number."""
        return self.is_answered and 0 < (self.time_ms or 0) < _MOST_MS

    @property
    def is_answered(self) -> bool:
        """Whether the answer is complete, with at least one token."""
        return (self.num_tokens or 0) > 0 and not self.error

    @property
    def time_per_output_token_ms(self) -> float | None:
        """Mean time per token after the first (TPOT), whether tokens arrive singly or together.

        None if all tokens arrived together, if there is only one token, or if a time is not known.
        """
        first_ms, last_ms = self.time_to_first_token_ms, self.last_token_ms
        if first_ms is None or last_ms is None or last_ms <= first_ms or not self.num_decoded:
            return None
        return (last_ms - first_ms) / self.num_decoded

    @property
    def excess(self) -> float:
        """`margin_excess` at the position at which the text diverged from the regular arm's."""
        return margin_excess(self.logit_margin, self.logit_tolerance)

    @property
    def num_decoded(self) -> int:
        """Tokens after the first, which iterations decided."""
        return max(0, (self.num_tokens or 0) - 1)


def margin_excess(margin: float | None, tolerance: float | None) -> float:
    """The size of a logit margin divided by the largest margin that rounding explains. Rounding explains values up to
    1. Infinite if the margin or the tolerance is not known, because then nothing shows that the two tokens tied.
    """
    if margin is None or not tolerance:
        return math.inf
    return abs(margin) / tolerance


def read_prompts(directory: str | Path | None, run: str | None) -> list[LatencyPromptRow]:
    """Read the rows that a run wrote about its prompts, from its directory; [] if the directory is not known, or the
    file is gone.

    Raises:
        OSError: if the file exists and cannot be read.
    """
    if not directory:
        return []
    rows = read_rows(Path(directory, PROMPTS_FILE), LatencyPromptRow)
    return [row for row in rows if row.run == run]
