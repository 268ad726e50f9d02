"""The rows of `compare`: one per prompt that was typed."""

from __future__ import annotations

from dataclasses import dataclass

from harness.results.row import figure, setting
from harness.results.rows.prompts import margin_excess
from harness.results.schema import DecodedRow, MaybeBool, MaybeFloat, MaybeInt, MaybeText
from harness.results.verdict import ArmEvidence, refusal


@dataclass(frozen=True, kw_only=True)
class CompareRow(DecodedRow):
    """`compare.csv`: one row per prompt that was typed."""

    # `results.schema.RunRow` and `results.row.Row` explain these class attributes.
    kind = "compare"
    filled_if_measured = ("regular_ms_per_token",)
    recognised_by = ("prompt", "num_rejections", "regular_ms_per_token", "speculative_ms_per_token")
    # Runs with equal settings are not taken for repeats of one measurement, because users type different prompts.
    is_repeatable = False

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    prompt_index: MaybeInt = figure("number of the prompt within the session, from 0")
    prompt: MaybeText = figure("the prompt")
    num_prompt_tokens: MaybeInt = figure("tokens of the typed prompt", "tokens")
    speedup: MaybeFloat = figure("regular / speculative time per token")
    num_compared: MaybeInt = figure(
        "if the texts have different lengths: the speed-up compares the times of this many first tokens",
        "tokens",
    )
    acceptance_histogram: list[int] | None = figure(
        "iterations with 0, 1, ... accepted draft tokens"
    )
    tokens_per_iteration: MaybeFloat = figure(
        "tokens per iteration, including iterations that proposed nothing", "tokens"
    )
    num_rejections: MaybeInt = figure("draft tokens that the target rejected")
    identical: MaybeBool = figure("whether both texts have the same tokens")
    parted_at: MaybeInt = figure("index of the first token at which the texts differ, from 0")
    logit_margin: MaybeFloat = figure(
        "greedy decoding: the logit of the regular arm's token minus that of the other, at `parted_at`"
    )
    logit_tolerance: MaybeFloat = figure("the largest margin there that rounding explains")
    regular_completion: MaybeText = figure("text of the regular arm")
    regular_num_tokens: MaybeInt = figure("tokens of the regular arm's text", "tokens")
    regular_ms_per_token: MaybeFloat = figure("time per token of the regular arm", "ms")
    regular_time_to_first_token_ms: MaybeFloat = figure(
        "time to the first token of the regular arm", "ms"
    )
    speculative_completion: MaybeText = figure("text of the speculative arm")
    speculative_num_tokens: MaybeInt = figure("tokens of the speculative arm's text", "tokens")
    speculative_ms_per_token: MaybeFloat = figure("time per token of the speculative arm", "ms")
    speculative_time_to_first_token_ms: MaybeFloat = figure(
        "time to the first token of the speculative arm", "ms"
    )
    view: MaybeText = setting("how the race was shown: `race` or `log`", "view")

    @property
    def why_no_verdict(self) -> str | None:
        """The reason why the arms cannot be compared; None if they can, or if an arm is missing."""
        regular = self.regular_num_tokens
        speculative = self.speculative_num_tokens
        if regular is None or speculative is None:
            return None
        if self.num_compared is not None:
            # The speed-up compares only this many tokens of each arm.
            regular = speculative = self.num_compared
        return refusal(
            ArmEvidence(arm="regular", num_prompts=1, num_tokens=regular),
            ArmEvidence(
                arm="speculative",
                draft=self.draft,
                num_prompts=1,
                num_tokens=speculative,
                identical_prompts=int(bool(self.identical)),
                differing_prompts=int(not self.identical),
                margin_over_rounding=self.margin_over_rounding,
                lossy=bool(self.lossy),
            ),
        )

    @property
    def margin_over_rounding(self) -> float | None:
        """The logit margin divided by the largest margin that rounding explains; above 1, the two tokens did not tie.

        None if either is unknown.
        """
        if self.logit_margin is None or self.logit_tolerance is None:
            return None
        return margin_excess(self.logit_margin, self.logit_tolerance)
