"""The figures of a race, in which both arms answer one prompt, such as its speed-up and its rejections."""

from __future__ import annotations

from typing import Any, NamedTuple

from harness.engines.arrivals import Origin
from harness.engines.protocol import Answered, Question, Weights
from harness.engines.tokenizer import Tokenizer
from harness.measuring.figures.texts import answers_divergence
from harness.results.drafts import Drafts

# Times until fewer tokens than this are not compared: the first tokens contain the pass over the prompt, and a single
# iteration may yield several tokens.
_FEWEST_COMPARED = 8


class Rejection(NamedTuple):
    """A draft token that the target rejected, with its position in the new text, counted from 0.

    Both probabilities are those of the rejected token; they are None if the engine does not report them.
    """

    position: int
    rejected: str
    target_probability: float | None
    draft_probability: float | None
    replacement: str


def arm_columns(answered: Answered, tokenizer: Tokenizer) -> dict[str, Any]:
    """The columns of `CompareRow` about one arm, by name: `regular_completion`, `regular_num_tokens` and so on. Times
    are left out if the answer has no token.

    Args:
        answered: the answer to a question with a single request.
    """
    [request] = answered.requests
    columns: dict[str, Any] = {
        "completion": tokenizer.decode(request.token_ids, skip_special_tokens=True),
        "num_tokens": request.num_tokens,
    }
    if request.num_tokens:
        columns |= {
            "ms_per_token": answered.ms_per_token,
            "time_to_first_token_ms": request.time_to_first_token_ms,
        }
    return {f"{answered.arm}_{name}": value for name, value in columns.items()}


def comparison_columns(
    weights: Weights | None,
    tokenizer: Tokenizer,
    question: Question,
    regular: Answered,
    speculative: Answered,
) -> dict[str, Any]:
    """The figures that compare the two arms, by name. `acceptance` is a `Drafts`; the others are columns of
    `CompareRow`.

    Args:
        weights: the models, whose logits give the margin where greedy texts diverge; None if they are not in this
            process.

    Raises:
        RunError: the margin cannot be measured, as from `answers_divergence`.
    """
    [expected], [actual] = regular.requests, speculative.requests
    reference = None
    if weights is not None and question.decoding.temperature == 0:
        reference = weights.reference
    divergence = answers_divergence(reference, tokenizer, question.prompts[0], expected, actual)
    return {
        **_speedup(regular, speculative),
        "acceptance": Drafts.total(each.as_drafts for each in speculative.requests),
        "identical": divergence is None,
        "parted_at": divergence and divergence.position,
        "logit_margin": divergence and divergence.logit_margin,
        "logit_tolerance": divergence and divergence.logit_tolerance,
    }


def _speedup(regular: Answered, speculative: Answered) -> dict[str, Any]:
    """The speed-up: regular time divided by speculative time, for as many tokens as the shorter text has
    (`num_compared`).

    Sampled texts end at different lengths. Only the beginnings are compared, because the rest of the longer text has no
    counterpart, and a longer text spreads the time of its prompt over more tokens.

    The speed-up is the ratio of the times per token instead, without `num_compared`, if the texts are equally long, if
    the shorter text has fewer than `_FEWEST_COMPARED` tokens, or if arrival times are missing. {} if either text has no
    token.
    """
    lengths = [regular.num_tokens, speculative.num_tokens]
    num_compared = min(lengths)
    if num_compared == 0:
        return {}
    has_times = regular.has_token_times and speculative.has_token_times
    if max(lengths) > num_compared >= _FEWEST_COMPARED and has_times:
        regular_s = _seconds_until(regular, num_compared)
        speculative_s = _seconds_until(speculative, num_compared)
        if regular_s and speculative_s:
            return {"speedup": regular_s / speculative_s, "num_compared": num_compared}
    return {"speedup": regular.ms_per_token / speculative.ms_per_token}


def _seconds_until(answered: Answered, num_compared: int) -> float | None:
    """The seconds until the text had `num_compared` tokens; None if fewer arrived.

    Tokens that arrived together are assumed to be spread evenly over the time since the previous arrival. For example,
    1 token arrives at 0.2 s, and 4 tokens arrive at 0.6 s: the text had 3 tokens after 0.2 + 2/4 · 0.4 = 0.4 s.
    """
    seconds = 0.0
    num_before = 0
    for arrival in answered.arrivals:
        num_new = len(arrival.tokens)
        if num_before + num_new >= num_compared:
            share = (num_compared - num_before) / num_new
            return seconds + share * (arrival.seconds - seconds)
        num_before += num_new
        seconds = arrival.seconds
    return None


def find_rejections(answered: Answered, tokenizer: Tokenizer) -> list[Rejection]:
    """Every draft token that was rejected, in order, with the token that replaced it; [] for an arm that does not
    report its proposals (`Traits.reports_drafts`).

    For example, the arrivals are [A] from the prompt, then [B, X] from the proposal B C D. C was rejected, at position
    2, and X replaced it. D was not tested, and so is not a rejection.
    """
    rejections = []
    num_generated = 0
    for arrival in answered.arrivals:
        num_accepted = arrival.origins.count(Origin.DRAFT)
        # If the text ends with an accepted token, a rejection after it does not change the text.
        if num_accepted < len(arrival.proposed) and len(arrival.tokens) > num_accepted:
            # The probabilities of the rejected token.
            target, draft = arrival.probabilities or (None, None)
            rejections.append(
                Rejection(
                    position=num_generated + num_accepted,
                    rejected=token_text(tokenizer, arrival.proposed[num_accepted]),
                    target_probability=target,
                    draft_probability=draft,
                    replacement=token_text(tokenizer, arrival.tokens[num_accepted]),
                )
            )
        num_generated += len(arrival.tokens)
    return rejections


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """One token as text; if it is only a part of a character, the vocabulary's notation of it."""
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    if "\N{REPLACEMENT CHARACTER}" in text:
        return str(tokenizer.convert_ids_to_tokens(token))
    return text
