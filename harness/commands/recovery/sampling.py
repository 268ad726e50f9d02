"""The sampling settings of requests, and the exact distribution from which tokens must be drawn with each of them.

This file deliberately does not use `local.decoding.warp`: the target and the draft share that code, so a mistake there
would look lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from scipy.special import softmax

from harness.commands.recovery.record import SamplingName
from harness.config.settings import DecodingSettings
from harness.results.statistics import Floats


@dataclass(frozen=True)
class Sampling:
    """A sampling setting, which a request asks for.

    Attributes:
        name: the name in reports, which is also a key.
        decoding: the decoding settings of such a request.
    """

    name: str
    decoding: DecodingSettings

    def probabilities_along(self, logits: Floats) -> Floats:
        """The distributions [n, V] from which the tokens of a text should have been drawn.

        Args:
            logits: [n, V], the model's logits before each token, without temperature and truncation.
        """
        probabilities = exact_probabilities(logits, self.decoding)
        # A server's reference (`ReportedReference`) gives all tokens that the server does not report one logit, the
        # lowest. It is unknown which of these tokens the server kept, so what top-k and top-p leave of them is divided
        # equally: (0.7, 0.3, 0) becomes (0.7, 0.15, 0.15) if the last two tokens have the lowest logit. Logits of
        # weights rarely tie there, so they change little.
        lowest = np.where(np.isinf(logits), np.inf, logits).min(-1, keepdims=True)
        alike = logits == lowest
        mass = (probabilities * alike).sum(-1, keepdims=True)
        return np.where(alike, mass / alike.sum(-1, keepdims=True), probabilities)

    def explained_by_rounding(
        self,
        logits: Floats,
        text: Sequence[int],
        places: Sequence[int],
        tolerances: Floats,
    ) -> list[int]:
        """The places whose tokens could have been drawn if the logits of all likelier tokens were lower by as much as
        rounding explains. There the token is so near the edge of top-k or top-p that rounding decides whether it is
        kept.

        Args:
            logits: [n, V], the model's logits before each token, without temperature and truncation.
            text: the n tokens.
            places: the places to examine, whose tokens have a probability of 0.
            tolerances: [n], the largest difference between two logits that rounding explains, at each place.
        """
        explained = []
        for place in places:
            row, token = logits[place], text[place]
            moved = np.where(row > row[token], row - tolerances[place], row)
            [probabilities] = self.probabilities_along(moved[np.newaxis])
            if probabilities[token] > 0:
                explained.append(place)
        return explained

    def is_known_by(self, num_top: int) -> bool:
        """Whether log-probabilities of the `num_top` likeliest tokens (-1 for all) are enough to compute the
        distribution.

        With top-k, the k likeliest are needed. Without top-k any number is enough, because the tokens that are not
        reported share the probability that is left (`probabilities_along`); `references.Rounding` covers the error.
        """
        return num_top < 0 or self.decoding.top_k <= num_top


def samplings(
    decoding: DecodingSettings, names: Sequence[SamplingName] = get_args(SamplingName)
) -> list[Sampling]:
    """The sampling settings to test: the run's own, and three others, or those among them that are wanted.

    The three others (`temperature`, `top_k`, `top_p`) have another temperature than the run's. One has neither top-k
    nor top-p, one has top-k alone, and one has top-p alone.

    Args:
        decoding: the run's decoding settings.
        names: the settings that are wanted, in the order of the result; by default all four.
    """
    other = 1.0 if decoding.temperature != 1 else 0.7
    plain = replace(decoding, temperature=other, top_k=0, top_p=1.0)
    known: dict[SamplingName, Sampling] = {
        "as_asked": Sampling("as asked", decoding),
        "temperature": Sampling(f"temperature={other:g}", plain),
        "top_k": Sampling("top_k=5", replace(plain, top_k=5)),
        "top_p": Sampling("top_p=0.8", replace(plain, top_p=0.8)),
    }
    return [known[name] for name in names]


def exact_probabilities(logits: Floats, decoding: DecodingSettings) -> Floats:
    """Turn logits [..., V] into probabilities [..., V] in float64, with the settings' temperature (above 0), top-k and
    top-p.
    """
    values = np.asarray(logits, dtype=np.float64) / decoding.temperature
    if 0 < decoding.top_k < values.shape[-1]:
        least = np.partition(values, -decoding.top_k)[..., [-decoding.top_k]]
        values = np.where(values < least, -np.inf, values)
    probabilities: Floats = softmax(values, axis=-1)
    if decoding.top_p < 1:
        # If equally likely tokens are at the edge of top-p, only as many as needed are kept, those with the smallest
        # ids. Harness's own loop does the same.
        order = np.argsort(-probabilities, kind="stable")
        descending = np.take_along_axis(probabilities, order, -1)
        likelier_mass = descending.cumsum(-1) - descending
        kept = np.where(likelier_mass < decoding.top_p, descending, 0.0)
        np.put_along_axis(probabilities, order, kept, -1)
        probabilities /= probabilities.sum(-1, keepdims=True)
    return probabilities
