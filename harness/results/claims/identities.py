"""What must hold among the figures of a table whatever was measured.

A claim is impossible if no value that rounds to it is possible, by any usual definition and whatever the noise; where
another average, definition or run may explain it, it is unlikely.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from harness.results.claims.stated import RATES, Stated

Verdict = Literal["consistent", "not stated", "unlikely", "impossible"]
# From the best to the worst.
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
# Tokens of an answer where none are stated: its last iterations propose less than K.
SHORT_ANSWER = 32


class Form(NamedTuple):
    """One way in which an identity may hold.

    Attributes:
        limits: the lowest and the highest value of the figure, by the numbers that the identity is given.
        sentence: what is so if the figure is within them.
    """

    limits: Callable[..., tuple[float, float]]
    sentence: str
    verdict: Verdict = "consistent"


class Identity(NamedTuple):
    """What must hold of a figure.

    Attributes:
        given: the numbers by which it is judged.
        forms: the first that holds decides. One that a single row of at least three has is
            unlikely, unless it is the first of all.
        broken: the sentence where none does; `{low}` and `{high}` are the limits of the first form.
        holds_for: whether it must hold of a row.
        otherwise: the verdict where no form holds.
        is_measured: whether noise may break it, so that an interval counts where one is printed.
    """

    figure: str
    given: tuple[str, ...]
    forms: tuple[Form, ...]
    broken: str
    holds_for: Callable[[Stated], bool] = lambda row: True
    otherwise: Verdict = "unlikely"
    is_measured: bool = False

    @property
    def is_of_rates(self) -> bool:
        return self.figure in RATES


def _least_proposed(k: float, length: float, tokens: float) -> float:
    """The fewest draft tokens per iteration: the last K tokens of an answer leave room for fewer.

    If iterations begin anywhere, length / tokens of them lose K (K + 1) / (2 tokens) together. Where all tokens are
    accepted, each answer's last iteration may lose K, which is twice as much; and few answers may all end badly.
    """
    lost = 1.5 * k * (k + 1) / (2 * length - 1) * min(2.0, 1 + (tokens - 1) / k)
    return max(k - lost, k / 4)


def _with_first(length: float) -> float:
    """How much an answer's first token, which no iteration yields, adds to tokens ÷ iterations at most."""
    shortest = min(length, SHORT_ANSWER)
    return shortest / max(shortest - 1, 1)


def _of_proposed(tokens: float, k: float, length: float) -> tuple[float, float]:
    return (tokens - 1) / k, (tokens - 1) / _least_proposed(k, length, tokens)


def _without_first(tokens: float, k: float, length: float) -> tuple[float, float]:
    return (tokens * (1 - 1 / length) - 1) / k, (tokens - 1) / k


def _of_tested(tokens: float, k: float, length: float) -> tuple[float, float]:
    """Accepted over tested draft tokens, whatever the share of iterations that accept all K.

    At least max(0, A - K + 1) of them do for A accepted tokens per iteration, at most A / K.
    """
    accepted = min(tokens - 1, k)
    low = accepted / (accepted + 1 - max(0.0, accepted - k + 1))
    high = accepted / (accepted + 1 - accepted / k)
    return low, high * k / _least_proposed(k, length, tokens)


def exact_ratio(over: float, under: float) -> tuple[float, float]:
    return over / under, over / under


def _nearly(over: float, under: float) -> tuple[float, float]:
    return 0.85 * over / under, 1.15 * over / under


def _agreeing(figure: str, over: str, under: str, means: str) -> Identity:
    """A figure as a ratio of two stated means."""
    averaged = f"is near {means}, {{low}} to {{high}}, as a mean of prompts' ratios may be"
    return Identity(
        figure,
        (over, under),
        (Form(exact_ratio, f"is {means}"), Form(_nearly, averaged)),
        f"is not {means}, {{low}} to {{high}}, unless one of them covers other requests or the prompt's time",
    )


def _within_bandwidth(
    broken: str, otherwise: Verdict, holds_for: Callable[[Stated], bool]
) -> Identity:
    return Identity(
        "regular_tokens_per_second",
        ("gigabytes", "bandwidth", "batch_size"),
        (
            Form(
                lambda size, rate, rows: (0, rate * rows / size),
                "is at most what the memory's bandwidth allows",
            ),
        ),
        broken,
        holds_for,
        otherwise,
    )


IDENTITIES = (
    Identity(
        "tokens_per_iteration",
        ("num_draft_tokens", "max_new_tokens"),
        (
            Form(lambda k, length: (1, k + 1), "is between 1 and K + 1"),
            Form(
                lambda k, length: (0, 1),
                "is below 1, so that it leaves out the target's own token",
                "not stated",
            ),
            Form(
                lambda k, length: (0, (k + 1) * _with_first(length)),
                "is above {high}: it may count an answer's first token, which comes from reading the prompt",
                "unlikely",
            ),
        ),
        "is above {high}: K={num_draft_tokens} draft tokens and the target's own",
        otherwise="impossible",
    ),
    Identity(
        "acceptance_rate",
        (),
        (Form(lambda: (0, 1), "is a share"),),
        "is no share",
        otherwise="impossible",
    ),
    Identity(
        "conditional_acceptance_rate",
        (),
        (Form(lambda: (0, 1), "is a share"),),
        "is no share",
        otherwise="impossible",
    ),
    Identity(
        "conditional_acceptance_rate",
        ("tokens_per_iteration", "num_draft_tokens", "max_new_tokens"),
        (
            Form(_of_tested, "is accepted ÷ tested"),
            Form(_of_proposed, "is accepted ÷ proposed, not ÷ tested"),
        ),
        "is neither accepted ÷ tested, {low} to {high} by the tokens per iteration, nor accepted ÷ proposed",
        lambda row: row.has_fixed_k,
    ),
    Identity(
        "acceptance_rate",
        ("num_accepted", "num_drafted"),
        (Form(exact_ratio, "is accepted ÷ drafted"),),
        "is not accepted ÷ drafted, {low}, unless these count other requests",
    ),
    Identity(
        "acceptance_rate",
        ("tokens_per_iteration", "num_draft_tokens", "max_new_tokens"),
        (
            Form(_of_proposed, "is accepted ÷ proposed"),
            Form(_of_tested, "is accepted ÷ tested, not ÷ proposed"),
            Form(
                _without_first,
                "is accepted ÷ proposed if the tokens per iteration count an answer's first one",
            ),
            Form(
                lambda tokens, k, length: (tokens / k, tokens / _least_proposed(k, length, tokens)),
                "is accepted ÷ proposed if the tokens per iteration leave out the target's own one",
            ),
        ),
        "is neither accepted ÷ proposed, {low} to {high} by the tokens per iteration, nor accepted ÷ tested:"
        " it may be of first draft tokens, of a tree, or a mean of prompts",
        lambda row: row.has_fixed_k,
    ),
    Identity(
        "acceptance_rate",
        ("tokens_per_iteration", "num_draft_tokens"),
        (Form(lambda tokens, k: (0.8 * (tokens - 1) / k, 1), "is possible where K varies"),),
        "is below {low}, which {tokens_per_iteration} tokens per iteration at K={num_draft_tokens} need",
        lambda row: not row.has_fixed_k,
    ),
    Identity(
        "acceptance_rate",
        ("tokens_per_iteration", "mean_num_draft_tokens", "num_draft_tokens"),
        (
            Form(lambda tokens, mean, k: exact_ratio(tokens - 1, mean), "is accepted ÷ proposed"),
            Form(
                lambda tokens, mean, k: _of_tested(tokens, k, math.inf),
                "is accepted ÷ tested, not ÷ proposed",
            ),
        ),
        "is not accepted ÷ proposed, {low} to {high} by {mean_num_draft_tokens} draft tokens per iteration",
    ),
    Identity(
        "mean_num_draft_tokens",
        ("num_draft_tokens", "max_new_tokens"),
        (
            Form(
                lambda k, length: (_least_proposed(k, length, k + 1), k),
                "is K, but for the ends of answers",
            ),
        ),
        "is not {low} to {high}, as K={num_draft_tokens} gives unless it varies or is the depth of a tree",
        lambda row: row.has_fixed_k,
    ),
    Identity(
        "speedup",
        ("num_draft_tokens",),
        (
            Form(lambda k: (0, k + 1), "is at most K + 1"),
            Form(
                lambda k: (0, 1.05 * (k + 1)),
                "is above {high}, all of K={num_draft_tokens} draft tokens and the target's own in a regular step:"
                " noise may explain it",
                "unlikely",
            ),
        ),
        "is above {high}: K={num_draft_tokens} draft tokens and the target's own, in no less than a regular step",
        lambda row: not row.differing_arms and not row.varies_by_text,
        otherwise="impossible",
        is_measured=True,
    ),
    Identity(
        "speedup",
        ("tokens_per_iteration",),
        (
            Form(lambda tokens: (0, tokens), "is at most the tokens per iteration"),
            Form(
                lambda tokens: (0, tokens + 1),
                "is above the {tokens_per_iteration} tokens per iteration, and these take at least a regular step:"
                " noise, or lengths without the target's own token, may explain it",
                "unlikely",
            ),
        ),
        "is above the {tokens_per_iteration} tokens per iteration by more than one: something else made it faster",
        lambda row: not row.differing_arms,
        otherwise="impossible",
        is_measured=True,
    ),
    _agreeing(
        "speedup",
        "tokens_per_second",
        "regular_tokens_per_second",
        "the ratio of the tokens/s",
    ),
    _agreeing(
        "speedup",
        "user_tokens_per_second",
        "regular_user_tokens_per_second",
        "the ratio of the tokens/s per user",
    ),
    _agreeing("user_tokens_per_second", "thousand", "ms_per_token", "what the ms/token give"),
    _agreeing("speedup", "regular_ms_per_token", "ms_per_token", "the ratio of the ms/token"),
    _agreeing("speedup", "regular_latency_s", "latency_s", "the ratio of the latencies"),
    *(
        _agreeing(
            f"{arm}tokens_per_second",
            "thousand_batch_size",
            f"{arm}ms_per_token",
            "what the ms/token give",
        )
        for arm in ("", "regular_")
    ),
    _within_bandwidth(
        "is above {high}: {bandwidth} GB/s read {gigabytes} GB of weights for each token",
        "impossible",
        lambda row: "of several" not in row.numbers,
    ),
    _within_bandwidth(
        "is above {high}, what {bandwidth} GB/s of one such device allow; how many there are is not stated",
        "not stated",
        lambda row: "of several" in row.numbers,
    ),
)
