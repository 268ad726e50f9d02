"""The rows about the prompts of a run of `latency`, one per prompt and arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.results.files import rows_in
from harness.results.row import Row, figure
from harness.results.schema import MaybeFloat, MaybeInt, MaybeText

# In the directory of a run.
PROMPTS_FILE = "latency_prompts.csv"
# About a month.
_MOST_MS = 3e9


@dataclass(frozen=True, kw_only=True)
class LatencyPromptRow(Row):
    """`latency_prompts.csv`: one row per prompt and arm."""

    kind = "latency_prompts"
    recognised_by = ("prompt_index", "prompt", "completion", "time_to_first_token_ms")

    prompt_index: MaybeInt = figure(
        "number of the request, which with the seed determines its random numbers: the place of the prompt for first"
        " turns; later turns of conversations and repetitions count on behind the set"
    )
    prompt_place: MaybeInt = figure(
        "place of the prompt in the prompt set, from 0: the same for every turn and repetition"
    )
    category: MaybeText = figure("category of the prompt, where the set has them")
    turn: MaybeInt = figure(
        "turn of a conversation, from 1; empty where only first turns are asked"
    )
    prompt: MaybeText = figure("the prompt; the user's last message of a chat")
    arm: MaybeText = figure("`regular` or `speculative`")
    completion: MaybeText = figure("generated text")
    num_tokens: MaybeInt = figure("generated tokens", "tokens")
    time_ms: MaybeFloat = figure("time of the prompt's batch, or of its request to a server", "ms")
    time_to_first_token_ms: MaybeFloat = figure("time to the first token", "ms")
    cached_tokens: MaybeInt = figure(
        "tokens of the prompt that the server took from a cache, by its own count", "tokens"
    )
    unit: MaybeInt = figure("number of the batch or lap that it was part of, from 0")
    error: MaybeText = figure("why the request failed")
    impossible_counts: MaybeText = figure(
        "counts of the server that cannot be true, with its words; no figure follows from them"
    )
    acceptance_rate: MaybeFloat = figure("accepted / proposed draft tokens")
    conditional_acceptance_rate: MaybeFloat = figure("accepted / tested draft tokens")
    mean_acceptance_length: MaybeFloat = figure(
        "tokens per iteration that proposed something", "tokens"
    )
    mean_proposed: MaybeFloat = figure(
        "draft tokens per iteration that proposed something", "tokens"
    )
    num_iterations: MaybeInt = figure("iterations, also those that proposed nothing")
    tokens_per_iteration: MaybeFloat = figure("tokens per iteration, over all of them", "tokens")
    acceptance_by_position: list[float | None] | None = figure(
        "accepted / tested at each draft position"
    )
    acceptance_histogram: list[int] | None = figure(
        "iterations with 0, 1, ... accepted draft tokens"
    )
    divergence_position: MaybeInt = figure(
        "first token at which a greedy text differs from the regular arm's"
    )
    logit_margin: MaybeFloat = figure(
        "logit of the regular arm's token minus that of this arm's, at that place"
    )
    logit_tolerance: MaybeFloat = figure("the largest margin there that rounding explains")

    @property
    def unit_number(self) -> int:
        """The number of its unit; in files of older versions each prompt is one."""
        return (self.prompt_index or 0) if self.unit is None else self.unit

    @property
    def place(self) -> int:
        """Its place in the prompt set; in files of older versions the number of its request."""
        return (self.prompt_index or 0) if self.prompt_place is None else self.prompt_place

    @property
    def is_timed(self) -> bool:
        """Whether it was answered, and how long that took is known. A damaged file may hold any number."""
        has_time = 0 < (self.time_ms or 0) < _MOST_MS
        return has_time and (self.num_tokens or 0) > 0 and not self.error

    @property
    def num_decoded(self) -> int:
        """Its tokens after the first, which iterations decide."""
        return max(0, (self.num_tokens or 0) - 1)

    @property
    def counted_iterations(self) -> int | None:
        """Its iterations as they count beside those of other answers: one per token where it reports none, as llama.cpp
        leaves out answers that drafted nothing. None where it reports draft tokens alone.
        """
        if self.num_iterations:
            return self.num_iterations
        return None if self.acceptance_rate is not None else self.num_decoded


def read_prompts(directory: str | Path | None, run: str | None) -> list[LatencyPromptRow]:
    """The rows that a run wrote about its prompts, from its directory; [] where that is gone."""
    if not directory:
        return []
    rows = rows_in(Path(directory, PROMPTS_FILE), LatencyPromptRow)
    return [row for row in rows if row.run == run]


def iterations_of(rows: Sequence[LatencyPromptRow]) -> int | None:
    """Iterations of an arm over these answers; None where those of one are unknown, or none of them reports any."""
    numbers = [row.counted_iterations for row in rows]
    if None in numbers or not any(row.num_iterations for row in rows):
        return None
    return sum(filter(None, numbers))
