"""The record and the settings of `latency`, which compares regular and speculative decoding on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.commands.command import Command
from harness.config.amounts import SECONDS, as_share, quantity
from harness.config.run import PromptedSettings, RepeatedSettings
from harness.config.settings import require, require_at_least
from harness.measuring.rows import LatencyRow
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL

# How many prompts are measured by default: with one request in flight the first number. With more in flight it is as
# many as an interval needs, but at most the second number.
_PROMPTS = 15
_MOST_PROMPTS = 1024


@dataclass(frozen=True, kw_only=True)
class LatencySettings(PromptedSettings, RepeatedSettings):
    """`latency`: regular against speculative decoding on the same prompts.

    Attributes:
        num_prompts: number of prompts to measure. If the set has fewer, they are sent again, in another order each
            time. `auto` is 15; for larger batches or several requests in flight, it is as many as an interval
            needs, at most 1024; with `precision`, the whole set.
        precision: stop once half of the interval's width is at most this share of the speed-up, `2%`; at the latest
            after `num_prompts`.
        budget: time limit for measured answers, `10min`; loading, warm-ups and starts of servers are not counted. The
            result rests on what has been measured by then.
        num_warmup: number of batches that each arm decodes first, without counting them.
    """

    num_prompts: int | Literal["auto"] = "auto"
    precision: float | str | None = None
    budget: str | None = None
    num_warmup: int = 1

    # `RunSettings` and `PromptedSettings` explain the names in capitals.
    COMPARES_TIMES = True
    GPU_RUNNER = "compiled"
    ANSWERS_TURNS = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision is not None:
            share = self.half_width
            rule = "must be a share of the speed-up, such as 2%"
            require(share is not None and 0 < share < 1, "precision", rule, self.precision)
            rule = "needs a draft: it is the precision of the speed-up"
            require(self.draft is not None, "precision", rule, self.precision)
        if self.budget is not None:
            rule = "must be a time above 0 with its unit, such as 10min, 90s or 2h"
            require((self.budget_s or 0) > 0, "budget", rule, self.budget)
        # All requests are in memory at once.
        rule = "must be from 1 to 10^6"
        require(1 <= self.num_asked <= 10**6, "num_prompts", rule, self.num_prompts)
        require_at_least(self, num_warmup=0)
        most = self.decoding.max_new_tokens
        rule = "must be at least 2 with a draft: it proposes nothing for an answer's first token"
        require(self.draft is None or most > 1, "decoding.max_new_tokens", rule, most)

    @property
    def is_until_precise(self) -> bool:
        return self.precision is not None

    @property
    def half_width(self) -> float | None:
        """Half of the width at which the speed-up's interval is narrow enough, as a share of the speed-up; None without
        `precision`.
        """
        return as_share(self.precision)

    @property
    def budget_s(self) -> float | None:
        """Seconds of measured answers after which no further question is asked; None without a limit."""
        return None if self.budget is None else quantity(self.budget, SECONDS)

    @property
    def num_over_starts(self) -> int:
        """The number of prompts that may be divided among several starts of the servers; 0 with `precision`, because
        how many are sent is not known in advance.
        """
        return 0 if self.is_until_precise else self.num_asked

    @property
    def num_asked(self) -> int:
        """The number of prompts that are sent, repetitions included. A conversation counts once, with all of its turns.

        With `precision`, `auto` means the whole set; that is decided once the set is loaded (`LatencyExperiment`).
        """
        if self.num_prompts != "auto":
            return self.num_prompts
        together = self.batch_size
        if together == 1:
            return _PROMPTS
        return max(_PROMPTS, min(FEWEST_FOR_INTERVAL * together, _MOST_PROMPTS))


class Latency(Command[LatencySettings, LatencyRow]):
    """The record of `latency`, which times both arms on a set of prompts."""

    name = "latency"
    summary = "how much faster speculative decoding is for a pair of models, and why"
    example = "model=30B draft=7B"
    examples = (
        ("", "the shipped tiny pair, on any machine"),
        ("model=30B draft=7B", "a pair of presets"),
        ("model=7B_8bit_4GPUs", "suffixes: _8bit _4bit _NGPUs, in any order"),
        ("model=./my-model draft=none", "a directory or a hub repository; without a draft"),
        (
            "model=65B draft=7B weights=random synthetic_acceptance=0.8",
            "without a download",
        ),
        (
            "-m model=13B,30B draft=7B,7B_4bit K=2,4,8",
            "a sweep over comma-separated values",
        ),
        (
            "-- llama-server -m X.gguf --spec-type draft-mtp",
            "a server by its own command, with and without speculation",
        ),
        (
            "-- vllm serve A -- vllm serve A --kv-cache-dtype fp8",
            "any two commands, the second against the first",
        ),
    )
    question = "Is it faster?"
    settings = LatencySettings
    experiment = "harness.commands.latency.measure:LatencyExperiment"
    row = LatencyRow
    shown_by = "harness.commands.latency.page:latency_page"
    tabled_by = "harness.commands.latency.table_row:table_rows"
    further_rows = (LatencyPromptRow,)

    def line(self, rows: Sequence[LatencyRow]) -> str:
        """The speed-up, or the time per token without one.

        Args:
            rows: the rows of one run; with a draft, the last is that of the speculative arm.
        """
        from harness.commands.latency.answer import result_line

        return result_line(rows[-1]) + ("" if rows[-1].was_quiet else ", unsteady")
