"""The rows of `latency`: one per arm, and one per prompt and arm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.commands.latency.figures.acceptance import AcceptanceFigures
from harness.commands.latency.figures.answers import Answers
from harness.commands.latency.figures.costs import Costs
from harness.commands.latency.figures.ends import Ends
from harness.commands.latency.figures.experts import Experts
from harness.commands.latency.figures.goodput import Goodput
from harness.commands.latency.figures.machine import Energy, Machine
from harness.commands.latency.figures.paired import Speedup
from harness.commands.latency.figures.requests import Requests
from harness.commands.latency.figures.server import Server
from harness.commands.latency.figures.texts import Texts
from harness.results.files import rows_in
from harness.results.row import Row, figure, pooled, setting
from harness.results.schema import (
    ComparedRow,
    MaybeBool,
    MaybeFloat,
    MaybeInt,
    MaybeText,
    PromptedRow,
)

# In the directory of a run: one row per prompt and arm.
PROMPTS_FILE = "latency_prompts.csv"
# A machine counts as quiet if the process got at least this share of the processor time it asked for.
QUIET = 0.9
# About a month.
_MOST_MS = 3e9


@dataclass(frozen=True, kw_only=True)
class _Settings(PromptedRow, ComparedRow):
    """Settings of `latency` alone."""

    repeats: MaybeInt = setting(
        "how many runs were asked for; in a pooled row, how many were pooled", "repeats"
    )
    repeat: int | Literal["all"] | None = setting(
        "number of the run among its repetitions; `all` for the row that pools them, with means",
        "repeat",
    )
    pooled_runs: list[str] | None = pooled("none", "`run` of those that a row pools, as JSON")
    num_warmup: MaybeInt = setting("warm-up batches that were not counted", "num_warmup")
    laps: int | Literal["auto"] | None = setting(
        "how often the arms of an engine that keeps requests in flight take turns, or `auto`",
        "laps",
    )
    test: MaybeBool = setting("whether this was a short trial, `test=true`", "test")


@dataclass(frozen=True, kw_only=True)
class LatencyRow(
    Answers,
    Requests,
    Goodput,
    Server,
    Speedup,
    Machine,
    Energy,
    AcceptanceFigures,
    Ends,
    Costs,
    Texts,
    Experts,
    _Settings,
):
    """`latency.csv`: one row per arm."""

    kind = "latency"
    filled_if_measured = ("ms_per_token",)
    recognised_by = ("arm", "ms_per_token", "speedup", "tokens_per_second")

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    arm: MaybeText = pooled("same", "`regular` or `speculative`")

    @property
    def was_quiet(self) -> bool:
        # A server computes elsewhere.
        share = 1.0 if self.url is not None else self.processor_share
        return not self.drifted and (share is None or share >= QUIET)


@dataclass(frozen=True, kw_only=True)
class LatencyPromptRow(Row):
    """`latency_prompts.csv`: one row per prompt and arm."""

    kind = "latency_prompts"
    recognised_by = ("prompt_index", "prompt", "completion", "time_to_first_token_ms")

    prompt_index: MaybeInt = figure(
        "number that with the seed determines the random numbers: the place of the prompt; later turns of"
        " conversations and repetitions follow the set"
    )
    prompt_place: MaybeInt = figure(
        "place of the prompt in the prompt set, from 0: the same for every turn and repetition"
    )
    asked_before: MaybeInt = figure("how often the run had asked it before")
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
    joules: MaybeFloat = figure("energy of the GPUs during its batch or lap, by NVML", "J")
    gpu_throttled: MaybeText = figure("why clocks of a GPU were lowered at its end, by NVML")
    error: MaybeText = figure("why the request failed")
    acceptance_rate: MaybeFloat = figure("accepted / proposed draft tokens")
    conditional_acceptance_rate: MaybeFloat = figure("accepted / tested draft tokens")
    mean_acceptance_length: MaybeFloat = figure(
        "tokens per iteration that proposed something", "tokens"
    )
    mean_proposed: MaybeFloat = figure("draft tokens per such iteration", "tokens")
    num_iterations: MaybeInt = figure("iterations, also those that proposed nothing")
    tokens_per_iteration: MaybeFloat = figure("tokens per iteration, over all of them", "tokens")
    acceptance_by_position: list[float | None] | None = figure(
        "accepted / tested at each draft position, as JSON"
    )
    acceptance_histogram: list[int] | None = figure(
        "iterations with 0, 1, ... accepted draft tokens, as JSON"
    )
    divergence_position: MaybeInt = figure(
        "first token at which a greedy text differs from the regular arm's"
    )
    logit_margin: MaybeFloat = figure(
        "logit of the regular arm's token minus that of this arm's, at that place"
    )
    logit_tolerance: MaybeFloat = figure("the largest margin there that rounding explains")

    @property
    def place(self) -> int:
        """Its place in the prompt set; of older files, which lack it, its index."""
        place = self.prompt_index if self.prompt_place is None else self.prompt_place
        return place or 0

    @property
    def is_timed(self) -> bool:
        """Whether it was answered, and how long that took is known. A damaged file may hold any number."""
        has_time = 0 < (self.time_ms or 0) < _MOST_MS
        return has_time and (self.num_tokens or 0) > 0 and not self.error

    @property
    def ms_per_token(self) -> float:
        return (self.time_ms or 0.0) / (self.num_tokens or 1)


def read_prompts(directory: str | Path | None, run: str | None) -> list[LatencyPromptRow]:
    """The rows that a run wrote about its prompts, from its directory; [] where that is gone."""
    if not directory:
        return []
    rows = rows_in(Path(directory, PROMPTS_FILE), LatencyPromptRow)
    return [row for row in rows if row.run == run]
