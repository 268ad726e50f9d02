"""The rows of `recovery`: one per check, and one per text."""

from __future__ import annotations

from dataclasses import dataclass

from harness.results.row import Row, figure, setting
from harness.results.schema import MaybeBool, MaybeFloat, MaybeInt, MaybeText, PromptedRow

TEXTS_FILE = "recovery_texts.csv"

# The passes that decode may deviate from the eager model by this many times the deviation that rounding causes. The
# factor is a choice, not a measurement.
MOST_APART = 5.0


@dataclass(frozen=True, kw_only=True)
class RecoveryTextRow(Row):
    """`recovery_texts.csv`: one row per answer, with which the checks can be made again."""

    kind = "recovery_texts"
    recognised_by = ("sampling", "prompt_token_ids", "token_ids")

    arm: MaybeText = figure("the arm that wrote the text")
    sampling: MaybeText = figure("the requested sampling setting, or `greedy`")
    prompt_token_ids: list[int] | None = figure("token ids before the text")
    token_ids: list[int] | None = figure("token ids of the text, as far as they are known")
    is_tested: bool | None = figure(
        "whether the text was tested; false if the request was left midway on purpose"
    )


@dataclass(frozen=True, kw_only=True)
class RecoveryRow(PromptedRow):
    """`recovery.csv`: one row per check."""

    # `results.schema.RunRow` and `results.row.Row` explain these class attributes.
    kind = "recovery"
    filled_if_measured = ("verdict",)
    recognised_by = ("check", "verdict", "p_value")

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    arm: MaybeText = figure("the arm under test")
    prepared_share: MaybeFloat = figure(
        "share of the arm's tokens that were decided by the prepared calls that `latency` times"
    )
    drafted: MaybeBool = figure("whether the arm drafted any token; empty if nothing reports it")
    check: MaybeText = figure(
        "what was checked. `greedy`: greedy texts; `sampled`: drawn tokens; `reference`: whether the regular"
        " server's texts can be the reference; `kernels`: the logits of the passes that decode, compared with the eager"
        " model's"
    )
    sampling: MaybeText = figure(
        "for `sampled` and `reference`: the sampling settings with which tokens were drawn"
    )
    verdict: MaybeText = figure(
        "`lossless` (never for a rule that is lossy by definition), `lossy` or `undecided`"
    )
    finding: MaybeText = figure(
        "for `reference`: why there is no reference; otherwise why `lossless` was not the verdict, or the weights that"
        " answers were compared with, if the servers report another model"
    )
    num_prompts: MaybeInt = figure("greedy texts compared")
    num_tokens: MaybeInt = figure("for `greedy` and `reference`: tokens compared", "tokens")
    num_cut_short: MaybeInt = figure(
        "comparisons in which a greedy text is shorter than asked and has no end token"
    )
    num_past_end: MaybeInt = figure("texts that continue after a token that should have ended them")
    identical_prompts: MaybeInt = figure(
        "greedy texts that only have the likeliest tokens, or that equal the regular arm's"
    )
    tied_prompts: MaybeInt = figure(
        "those of `identical_prompts` that took another of several exactly equally likely tokens"
    )
    divergence_position: MaybeInt = figure(
        "index of the greedy token with the largest ratio of its margin to what rounding explains"
    )
    logit_margin: MaybeFloat = figure(
        "at `divergence_position`: the likeliest token's logit minus that of the text's token"
    )
    logit_tolerance: MaybeFloat = figure(
        "at `divergence_position`: the largest margin that rounding explains, as measured"
    )
    kernel_deviation: MaybeFloat = figure(
        "standard deviation of logits between the passes that decode and the eager model"
    )
    rounding_deviation: MaybeFloat = figure(
        "standard deviation of logits between the eager model and itself with embeddings changed by an epsilon"
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
        "power of 10 by which the capital of bets against the target's distribution has grown"
    )
    num_draws_until: MaybeInt = figure(
        "sampled tokens after which the evidence was enough to call the pair lossy", "tokens"
    )
    p_value: MaybeFloat = figure(
        "upper bound of the probability that bets against a lossless pair ever win this much"
    )
    power: MaybeFloat = figure(
        "lower bound of the probability that the test detects any change as large as `shift`, if the tokens are sorted"
        " from the likeliest down and cut into 2 to 16 equal parts"
    )
    visible_shift: MaybeFloat = figure(
        "smallest shift between such parts (see `power`) that the test detects with a probability of at least 99 %"
    )
    num_draws_needed: MaybeInt = figure(
        "for an undecided check: the least `num_draws` that it needs"
    )
    refused: MaybeText = figure("sampling settings that the engine refused")
    rounding: MaybeFloat = figure(
        "largest shift between such parts (see `power`) that rounding explains"
    )
    shift: MaybeFloat = setting(
        "total variation between parts of the tokens' distribution that must be detected", "shift"
    )
    false_alarm_rate: MaybeFloat = setting(
        "probability that a lossless pair is called lossy", "false_alarm_rate"
    )
