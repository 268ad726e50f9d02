"""The rows of `recovery`, one per check, and those of its texts."""

from __future__ import annotations

from dataclasses import dataclass

from harness.results.row import Row, figure, setting
from harness.results.schema import MaybeFloat, MaybeInt, MaybeText, PromptedRow

TEXTS_FILE = "recovery_texts.csv"


@dataclass(frozen=True, kw_only=True)
class RecoveryTextRow(Row):
    """`recovery_texts.csv`: one row per answer, with which the checks can be made again."""

    kind = "recovery_texts"
    recognised_by = ("sampling", "prompt_token_ids", "token_ids")

    arm: MaybeText = figure("the arm that wrote the text")
    sampling: MaybeText = figure("the sampling setting that it was asked for, or `greedy`")
    prompt_token_ids: list[int] | None = figure("tokens before the text")
    token_ids: list[int] | None = figure("its tokens, as far as they are known")
    is_tested: bool | None = figure("whether it was waited for; others were left midway")


@dataclass(frozen=True, kw_only=True)
class RecoveryRow(PromptedRow):
    """`recovery.csv`: one row per check."""

    kind = "recovery"
    filled_if_measured = ("verdict",)
    recognised_by = ("check", "verdict", "p_value")

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    arm: MaybeText = figure("the arm under test")
    prepared_share: MaybeFloat = figure(
        "share of its tokens that were decided by the prepared calls that `latency` times"
    )
    check: MaybeText = figure(
        "`greedy` texts; `sampled`: drawn tokens; `reference`: both for a regular server as the reference, or that"
        " there is none; `kernels`: the passes that decode against the eager model"
    )
    sampling: MaybeText = figure("of `sampled`: the sampling settings that tokens were drawn with")
    verdict: MaybeText = figure(
        "`lossless` (never of a rule that is lossy by definition), `lossy` or `undecided`"
    )
    finding: MaybeText = figure(
        "of `reference`: why there is none; else the weights that judged, if the servers name another model"
    )
    num_prompts: MaybeInt = figure("greedy texts compared")
    num_tokens: MaybeInt = figure("of `greedy`: tokens compared", "tokens")
    num_cut_short: MaybeInt = figure(
        "comparisons with a greedy text that ended early, without an end token"
    )
    num_past_end: MaybeInt = figure("texts with tokens after one that should have ended them")
    identical_prompts: MaybeInt = figure(
        "greedy texts of the likeliest tokens alone, or equal to the regular arm's"
    )
    tied_prompts: MaybeInt = figure(
        "of these, texts with another token than the first of several likeliest ones"
    )
    divergence_position: MaybeInt = figure(
        "token of the greedy texts that differs most, by its margin over what rounding explains"
    )
    logit_margin: MaybeFloat = figure("difference of the likeliest token's logit and its own there")
    logit_tolerance: MaybeFloat = figure("largest margin there that rounding explains, as measured")
    kernel_deviation: MaybeFloat = figure(
        "standard deviation of logits between the passes that decode and the eager model"
    )
    rounding_deviation: MaybeFloat = figure(
        "the same of the eager model with embeddings changed by an epsilon"
    )
    num_draws: MaybeInt = figure("sampled tokens", "tokens")
    num_impossible: MaybeInt = figure(
        "sampled tokens that have a probability of 0, beyond rounding", "tokens"
    )
    num_explained: MaybeInt = figure(
        "sampled tokens with a probability of 0 that rounding explains, at the edge of top-k or top-p",
        "tokens",
    )
    evidence: MaybeFloat = figure(
        "how far bets against the target's distribution grew, as a power of 10"
    )
    num_draws_until: MaybeInt = figure(
        "sampled tokens until that was enough to call it lossy", "tokens"
    )
    p_value: MaybeFloat = figure(
        "upper bound of the probability that bets ever win so much by luck"
    )
    power: MaybeFloat = figure(
        "lower bound of the probability that the test detects any change as large as `shift` between 2 to 16 equal"
        " parts of the tokens, sorted from the likeliest down"
    )
    visible_shift: MaybeFloat = figure(
        "smallest such shift that the test detects with a probability of at least 99 %"
    )
    num_draws_needed: MaybeInt = figure(
        "for an undecided check: the least `num_draws` that it needs"
    )
    refused: MaybeText = figure("sampling settings that the engine refused, or that may end it")
    rounding: MaybeFloat = figure("largest such shift that rounding explains")
    shift: MaybeFloat = setting(
        "total variation between parts of the tokens' distribution that must be detected", "shift"
    )
    false_alarm_rate: MaybeFloat = setting(
        "probability that a lossless pair is called lossy", "false_alarm_rate"
    )
