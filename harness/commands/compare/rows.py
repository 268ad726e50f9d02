"""The rows of `compare`: one per prompt that was typed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.results.row import figure, setting
from harness.results.schema import DecodedRow, MaybeBool, MaybeFloat, MaybeInt, MaybeText
from harness.results.statistics.interval import Interval
from harness.results.verdict import ArmEvidence, refusal


@dataclass(frozen=True, kw_only=True)
class CompareRow(DecodedRow):
    """`compare.csv`: one row per prompt that was typed."""

    kind = "compare"
    filled_if_measured = ("regular_ms_per_token",)
    recognised_by = ("prompt", "num_rejections", "regular_ms_per_token", "speculative_ms_per_token")
    # Runs with equal settings need not repeat each other, because prompts are typed.
    is_repeatable = False

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    prompt_index: MaybeInt = figure("number of the prompt within the session, from 0")
    prompt: MaybeText = figure("the prompt")
    num_prompt_tokens: MaybeInt = figure("its tokens", "tokens")
    speedup: MaybeFloat = figure("regular / speculative time per token")
    num_compared: MaybeInt = figure(
        "tokens at the beginning of both texts whose times the speed-up compares, where lengths"
        " differ",
        "tokens",
    )
    acceptance_histogram: list[int] | None = figure(
        "iterations with 0, 1, ... accepted draft tokens"
    )
    tokens_per_iteration: MaybeFloat = figure(
        "tokens per iteration, also of those that proposed nothing", "tokens"
    )
    num_rejections: MaybeInt = figure("draft tokens that the target rejected")
    identical: MaybeBool = figure("whether both texts are the same tokens")
    parted_at: MaybeInt = figure("first token at which they differ")
    logit_margin: MaybeFloat = figure("greedy: logit margin there")
    logit_tolerance: MaybeFloat = figure("the largest margin there that rounding explains")
    regular_completion: MaybeText = figure("text of the regular arm")
    regular_num_tokens: MaybeInt = figure("its tokens", "tokens")
    regular_ms_per_token: MaybeFloat = figure("its time per token", "ms")
    regular_tokens_per_second: MaybeFloat = figure("its rate", "tokens/s")
    regular_time_to_first_token_ms: MaybeFloat = figure("its time to the first token", "ms")
    speculative_completion: MaybeText = figure("text of the speculative arm")
    speculative_num_tokens: MaybeInt = figure("its tokens", "tokens")
    speculative_ms_per_token: MaybeFloat = figure("its time per token", "ms")
    speculative_tokens_per_second: MaybeFloat = figure("its rate", "tokens/s")
    speculative_time_to_first_token_ms: MaybeFloat = figure("its time to the first token", "ms")
    view: MaybeText = setting("how it was shown", "view")

    @property
    def why_no_verdict(self) -> str | None:
        """Why the arms cannot be compared; None if they can, or if one of them is missing."""

        speedup = self.speedup if self.speedup is not None else math.nan
        regular = self.regular_num_tokens
        speculative = self.speculative_num_tokens
        if regular is None or speculative is None:
            return None
        if self.num_compared is not None:
            # Only as many tokens were compared in both arms.
            regular = speculative = self.num_compared
        return refusal(
            ArmEvidence(arm="regular", num_prompts=1, num_tokens=regular),
            ArmEvidence(
                arm="speculative",
                draft=self.draft,
                tokens_per_iteration=self.tokens_per_iteration,
                num_prompts=1,
                num_tokens=speculative,
                identical_prompts=int(bool(self.identical)),
                differing_prompts=int(not self.identical),
                margin_over_rounding=self.margin_over_rounding,
                lossy=bool(self.lossy),
            ),
            # A race has no interval: only its own figure is claimed.
            Interval(speedup, speedup, speedup),
        )

    @property
    def margin_over_rounding(self) -> float | None:
        """The logit margin divided by the largest that rounding explains: above 1, it was not a tie. None if
        unknown.
        """
        if self.logit_margin is None or self.logit_tolerance is None:
            return None
        return abs(self.logit_margin) / self.logit_tolerance
