"""The rows of `recovery`: one per check."""

from __future__ import annotations

from dataclasses import dataclass

from harness.results.row import figure, setting
from harness.results.schema import MaybeFloat, MaybeInt, MaybeText, PromptedRow


@dataclass(frozen=True, kw_only=True)
class RecoveryRow(PromptedRow):
    """`recovery.csv`: one row per check."""

    kind = "recovery"
    filled_if_measured = ("verdict",)
    recognised_by = ("check", "verdict", "p_value", "significance_level")

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    arm: MaybeText = figure("the arm under test")
    load: MaybeInt = setting("requests in flight; empty for one question after the other", "load")
    check: MaybeText = figure(
        "`greedy` or `sampled`; `reference`: both for a regular server as the reference; `logprobs`: of"
        " log-probabilities that came with tokens"
    )
    sampling: MaybeText = figure(
        "under load: the sampling setting, and which tokens; empty for all together"
    )
    verdict: MaybeText = figure(
        "`lossless`, `lossy` or `undecided`; of `logprobs` `right` or `wrong`"
    )
    finding: MaybeText = figure("of `logprobs`: what came")
    num_wrong: MaybeInt = figure("of `logprobs`: tokens with a wrong one, or without any", "tokens")
    prompt_index: MaybeInt = figure(
        "prompt that the draws continue; empty for all contexts together"
    )
    context_end: MaybeInt = figure("how many of the prompt's tokens the draws continue", "tokens")
    num_prompts: MaybeInt = figure("prompts compared, or contexts drawn from")
    num_tokens: MaybeInt = figure(
        "greedy: tokens compared, up to where texts part; sampled: tokens counted per draw",
        "tokens",
    )
    num_cut_short: MaybeInt = figure(
        "greedy: prompts with a text that ended, without an end token, before the length asked for"
    )
    identical_prompts: MaybeInt = figure("greedy texts equal to the regular arm's")
    divergence_position: MaybeInt = figure(
        "first differing token of the greedy texts that differ most beyond rounding"
    )
    logit_margin: MaybeFloat = figure("difference of both tokens' logits there")
    logit_tolerance: MaybeFloat = figure(
        "largest margin there that rounding explains, as measured there"
    )
    num_draws: MaybeInt = figure("sampled continuations; under load sampled tokens")
    statistic: MaybeFloat = figure("chi-square statistic")
    degrees_of_freedom: MaybeInt = figure(
        "degrees of freedom of the test; with 0 nothing was tested"
    )
    p_value: MaybeFloat = figure("p-value of the test; empty where nothing was tested")
    significance_level: MaybeFloat = figure("a p-value below this is called lossy")
    power: MaybeFloat = figure("chance that the test sees a change as large as `shift`")
    num_draws_needed: MaybeInt = figure("of an undecided check: a `num_draws` that would be enough")
    refused: MaybeText = figure(
        "under load: sampling settings that the engine refused, which were not tested"
    )
    rounding: MaybeFloat = figure("how much of the statistic rounding may add on average")
    shift: MaybeFloat = setting(
        "total variation of a token's distribution that must be seen", "shift"
    )
    false_alarm_rate: MaybeFloat = setting(
        "chance that a lossless pair is called lossy", "false_alarm_rate"
    )
    fault: MaybeText = setting("mistake planted on purpose, or `none`", "fault")
