"""Which rule of acceptance cuts texts into as many iterations as an engine needed? From outside, by both models.

By each rule draft token j of an iteration that begins after token s is accepted with a chance a(s, j), if those before
it were and given the text (`iterations`). With the target's probability p of the text's token, and the draft's q:

    rejection    min(1, q / p)      kept with min(1, p / q) (Leviathan et al. 2023)
    block        min(1, q / (h p))  the same over whole blocks (Sun et al. 2024)
    comparison   q                  kept where the target draws the same token (mlx-lm): over all texts Σ p q and not
                                    Σ min(p, q)
    greedy       q of likeliest     kept where it is the target's likeliest token, which follows otherwise
    typical      `_typical_chances` kept where it is typical; the likeliest follows otherwise (Medusa)

The first three are lossless. Texts by the last two are not the target's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from harness.results.statistics.arrays import Flags, Floats
from harness.results.statistics.interval import Interval
from harness.results.statistics.iterations import acceptance_chances

RuleName = Literal["rejection", "block", "comparison", "greedy", "typical"]
# Standard deviations of the number of iterations. Chance alone exceeds them, in either direction, twice in a million.
_DEVIATIONS = 4.75
# What rounding and ties may change, as a share of the tokens per iteration.
_TOLERATED_ROUNDING = 0.03
# The share of tokens that a rule or a model cannot write, which rounding and ties explain.
MOST_IMPOSSIBLE = 0.005


@dataclass(frozen=True)
class TextProbabilities:
    """What both models make of a text of n tokens.

    Attributes:
        target: [n], the target's probability of each token.
        draft: [n - 1, M], the draft's, as `acceptance_chances` takes them.
        is_likeliest: [n], whether the token is the target's likeliest one.
        is_typical: [n], whether typical acceptance keeps it.
        others_typical: [n], whether it would keep another token there as well.
    """

    target: Floats
    draft: Floats
    is_likeliest: Flags
    is_typical: Flags
    others_typical: Flags


class RuleFit(NamedTuple):
    """What an engine with these weights does by a rule.

    Attributes:
        tokens_per_iteration: expected. An engine is in its limits, but for two runs in a million.
        writes: whether texts like these are written by the rule.
    """

    rule: RuleName
    tokens_per_iteration: Interval
    writes: bool

    def explains(self, tokens_per_iteration: float) -> bool:
        return self.writes and not self.tokens_per_iteration.excludes(tokens_per_iteration)


def expected_by_rule(
    texts: Sequence[TextProbabilities], num_draft_tokens: int, *, own_texts: bool
) -> list[RuleFit]:
    """What each rule would make of texts. One that does the same as an earlier one is left out.

    Args:
        own_texts: whether they are as likely as the target's own.
    """
    num_tokens = sum(len(text.target) - 1 for text in texts)
    # The first token of a text comes with its prompt, by no rule, and nothing is offered for its last one.
    most = MOST_IMPOSSIBLE * num_tokens
    are_likeliest = sum(int((~text.is_likeliest[1:-1]).sum()) for text in texts) <= most
    are_typical = sum(int((~text.is_typical[1:-1]).sum()) for text in texts) <= most
    # By typical acceptance such texts come only of a draft that proposes nothing else, and then both do the same.
    of_rule = {"greedy": are_likeliest, "typical": are_typical and not are_likeliest}
    found: list[RuleFit] = []
    for rule in get_args(RuleName):
        writes = of_rule.get(rule, own_texts)
        allowed = [
            _allowed(_chances(rule, texts, num_draft_tokens, share))
            for share in ((1.0, 0.0) if rule == "typical" else (1.0,))
        ]
        low = min(each.low for each in allowed)
        high = max(each.high for each in allowed)
        mean = sum(each.estimate for each in allowed) / len(allowed)
        fit = RuleFit(rule, Interval(mean, low, high), writes)
        if not any(_do_the_same(fit, earlier) for earlier in found):
            found.append(fit)
    return found


def _do_the_same(one: RuleFit, other: RuleFit) -> bool:
    estimates = one.tokens_per_iteration.estimate, other.tokens_per_iteration.estimate
    return math.isclose(*estimates, rel_tol=1e-9) and one.writes == other.writes


def _allowed(chances: Sequence[Floats]) -> Interval:
    """The tokens per iteration of texts with these chances [n - 1, K], for this K alone (`iterations`)."""
    texts = _side_by_side(chances)
    num_texts, num_places, k = texts.shape
    limits = _limits(texts, [len(of_text) for of_text in chances])
    is_offered = np.arange(k) < limits[..., np.newaxis]
    reach = np.ones((num_texts, num_places, k + 2))
    reach[..., 1:-1] = np.where(is_offered, texts, 0.0).cumprod(-1)
    reach[..., -1] = 0
    # [texts, places, K + 1], of so many accepted.
    ends = reach[..., :-1] - reach[..., 1:]
    # The chance that an iteration begins after a token, and of the number of iterations until then, where one does,
    # the expected number and square, each times that chance.
    moments = np.zeros((3, num_texts, num_places + k + 1))
    moments[0, :, 0] = 1
    for place in range(num_places):
        visits, counts, squares = moments[..., place]
        further = np.stack([visits, counts + visits, squares + 2 * counts + visits])
        moments[..., place + 1 : place + k + 2] += further[..., np.newaxis] * ends[:, place]
    last = [len(of_text) for of_text in chances]
    _, means, squares = moments[:, range(num_texts), last]
    iterations = float(means.sum())
    spread = _DEVIATIONS * math.sqrt(float(np.maximum(squares - means**2, 0).sum()))
    num_tokens = sum(last)
    return Interval(
        num_tokens / iterations,
        num_tokens / (iterations + spread) * (1 - _TOLERATED_ROUNDING),
        num_tokens / max(iterations - spread, 1.0) * (1 + _TOLERATED_ROUNDING),
    )


def _side_by_side(parts: Sequence[Floats]) -> Floats:
    """[texts, longest, K] of parts [n - 1, K]; nan beyond each."""
    filled = np.full((len(parts), max(map(len, parts)), parts[0].shape[1]), np.nan)
    for row, part in zip(filled, parts, strict=True):
        row[: len(part)] = part
    return filled


def _limits(offers: Floats, lengths: Sequence[int]) -> NDArray[np.int64]:
    """How many draft tokens are offered after each place [texts, places]: one fewer than there are tokens left."""
    offered = np.cumprod(~np.isnan(offers), axis=-1).sum(axis=-1)
    left = np.array(lengths)[:, np.newaxis] - np.arange(offers.shape[1])
    return np.clip(left - 1, 0, offered)


def _chances(
    rule: RuleName,
    texts: Sequence[TextProbabilities],
    num_draft_tokens: int,
    refused_share: float,
) -> Sequence[Floats]:
    drafts = [text.draft[:, :num_draft_tokens] for text in texts]
    pairs = zip(texts, drafts, strict=True)
    match rule:
        case "rejection" | "block":
            is_block = rule == "block"
            return [acceptance_chances(one.target, draft, block=is_block) for one, draft in pairs]
        case "comparison":
            return drafts
        case "greedy":
            return [draft * _ahead(one.is_likeliest, num_draft_tokens) for one, draft in pairs]
        case "typical":
            return _typical_chances(texts, drafts, refused_share)


def _typical_chances(
    texts: Sequence[TextProbabilities], drafts: Sequence[Floats], refused_share: float
) -> Sequence[Floats]:
    """The chances that typical acceptance keeps draft tokens.

    A token that is not the likeliest is a draft token that was kept. The likeliest is that as well, or it follows one
    that was refused. What follows in the text counts: an iteration cannot have ended with a token that is not the
    likeliest.

    Args:
        drafts: of each text [n - 1, K].
        refused_share: of the draft's mass on other tokens what is refused, where some of them are typical: unknown,
            from 0 to 1.
    """
    k = drafts[0].shape[1]
    draft = _side_by_side(drafts)

    def ahead(flags: Iterable[Flags]) -> Floats:
        return _side_by_side([_ahead(of_text, k) for of_text in flags])

    likeliest = ahead(text.is_likeliest for text in texts)
    others = ahead(text.others_typical for text in texts)
    share = np.where((others > 0) & (draft > 0), refused_share, 1.0)
    kept = draft * ahead(text.is_typical for text in texts)
    refused = (1 - draft) * share * likeliest
    num_texts, num_places, _ = draft.shape
    lengths = [len(of_text) for of_text in drafts]
    limits = _limits(draft, lengths)
    is_offered = np.arange(k) < limits[..., np.newaxis]
    reached = np.ones((num_texts, num_places, k + 1))
    reached[..., 1:] = np.where(is_offered, kept, 0.0).cumprod(-1)
    # By how many are accepted: one is refused, or all are kept and the likeliest follows. What nothing is offered
    # for is drawn.
    ends = np.zeros((num_texts, num_places, k + 1))
    ends[..., :-1] = np.where(is_offered, refused, 0.0)
    likeliest_next = np.concatenate([likeliest, np.ones((num_texts, num_places, 1))], axis=-1)
    after_all = np.take_along_axis(likeliest_next, limits[..., np.newaxis], axis=-1)
    after_all[limits == 0] = 1.0
    np.put_along_axis(ends, limits[..., np.newaxis], after_all, axis=-1)
    ends *= reached
    # How likely each text is from a place on, but for a factor that all in reach have.
    onward = np.ones((num_texts, num_places + k + 1))
    chances = np.full(draft.shape, np.nan)
    for place in range(num_places - 1, -1, -1):
        going_on = ends[:, place] * onward[:, place + 1 : place + k + 2]
        # [texts, K + 1], of at least so many accepted.
        reach = going_on[:, ::-1].cumsum(-1)[:, ::-1]
        zeros = np.zeros((num_texts, k))
        chances[:, place] = np.divide(
            reach[:, 1:], reach[:, :-1], out=zeros, where=reach[:, :-1] > 0
        )
        # Where rounding made a text impossible it goes on as if its next token were possible. Beyond it all is 1.
        total = np.where(reach[:, 0] > 0, reach[:, 0], onward[:, place + 1])
        is_within = place < np.array(lengths)
        onward[:, place] = np.where(is_within, total, 1.0)
        scale = np.where(is_within, total, 1.0)[:, np.newaxis]
        onward[:, place : place + k + 1] /= scale
    chances[~is_offered] = np.nan
    rows = zip(np.minimum(chances, 1), lengths, strict=True)
    return [of_text[:length] for of_text, length in rows]


def _ahead(values: Flags, num_draft_tokens: int) -> Floats:
    """[n - 1, K] of values [n]: entry (s, j) is that of token s + 1 + j, and 0 beyond the text."""
    padded = np.append(values[1:], np.zeros(num_draft_tokens - 1)).astype(float)
    return np.lib.stride_tricks.sliding_window_view(padded, num_draft_tokens)
