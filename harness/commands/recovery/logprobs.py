"""Log-probabilities: those that a server reports of given texts, as a reference in place of weights, and
those that it returns with new tokens, which are tested.

Servers show the n likeliest tokens at each place. What they leave out is treated as tokens that are
equally likely, so that a token among them has a quantile at random in all of their mass: quantiles
are then uniform as before, and shifts within the rest are invisible. That is exact at temperature 1.
At another one the mass of the rest also depends on how it is spread: least if it is even and
temperatures are below 1. `logits_again` has the other extreme, tokens that are as likely as the n-th,
and the difference counts as rounding.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.commands.recovery.workload import Sampling
from harness.engines.checks.divergence import check_known
from harness.engines.protocol import Margin
from harness.engines.server.engine import ServerArm
from harness.engines.server.logprobs import Likeliest
from harness.results.statistics.arrays import Floats

# Rounding explains this much of a difference of log-probabilities in any case.
_LEAST_ROUNDING = 0.001
# Texts that are scored twice, to see rounding.
_NUM_TWICE = 16
# Without a regular server to compare with, returned log-probabilities may be as far from the
# reference's.
TOLERANCE = 0.1
# The share of them that may be further away.
_MOST_OUTSIDE = 0.01
# A reading explains wrong ones if it is within the tolerance of this share of them.
_EXPLAINED = 0.9
_READINGS = {
    "raw": "the model's own",
    "processed": "those after temperature and truncation",
    "before": "those of the tokens before",
    "after": "those of the tokens after",
    "zero": "0",
}


@dataclass
class ReturnedLogprobs:
    """Log-probabilities that came with tokens, and what they could be.

    Attributes:
        returned: None of a token without one.
        readings: what each would be by the reference; NaN where that is not known.
    """

    returned: list[float | None] = field(default_factory=list)
    readings: dict[str, list[float]] = field(default_factory=dict)

    def add(self, returned: Sequence[float | None], raw: Floats, processed: Floats) -> None:
        """Add those of one text, with the reference's."""
        self.returned += returned
        readings = {
            "raw": raw,
            "processed": processed,
            "before": np.concatenate([[math.nan], raw[:-1]]),
            "after": np.concatenate([raw[1:], [math.nan]]),
            "zero": np.zeros(len(raw)),
        }
        for name, values in readings.items():
            self.readings.setdefault(name, []).extend(values.tolist())

    def columns(self, documented: str | None, tolerance: float) -> dict[str, Any]:
        """The columns of the check; empty where no log-probability came at all.

        Args:
            documented: `Dialect.logprobs`; either is right where this is None.
            tolerance: a larger difference is no rounding.
        """
        returned = np.array([math.nan if one is None else one for one in self.returned])
        num_missing = int(np.isnan(returned).sum())
        if num_missing == len(returned):
            return {}
        differences = {
            name: np.abs(returned - np.array(values)) for name, values in self.readings.items()
        }
        allowed = ("raw", "processed") if documented is None else (documented,)
        reading = min(allowed, key=lambda name: (differences[name] > tolerance).sum())
        is_wrong = differences[reading] > tolerance
        num_wrong = int(is_wrong.sum())
        num_compared = int((~np.isnan(differences[reading])).sum())
        findings = []
        if num_missing:
            findings.append(f"{num_missing:,} are missing")
        if num_wrong > _MOST_OUTSIDE * num_compared:
            median = np.median(differences[reading][is_wrong])
            finding = f"{num_wrong:,} are wrong, by {median:.2g} in the median"
            for name, of_reading in differences.items():
                known = of_reading[is_wrong & ~np.isnan(of_reading)]
                if len(known) and (known <= tolerance).mean() >= _EXPLAINED:
                    finding = f"{num_wrong:,} are {_READINGS[name]}"
                    break
            findings.append(finding)
        return {
            "check": "logprobs",
            "verdict": "wrong" if findings else "right",
            "num_tokens": len(returned),
            "num_wrong": num_wrong + num_missing,
            "finding": "; ".join(findings) or f"all are {_READINGS[reading]}",
        }

    def rounding(self) -> float:
        """How far those of the model itself that came are from the reference's, but for a few."""
        returned = np.array([math.nan if one is None else one for one in self.returned])
        return float(np.nanquantile(np.abs(returned - self.readings["raw"]), 1 - _MOST_OUTSIDE))


class ServedReference:
    """A regular server's log-probabilities of texts, as the logits of a `Reference`.

    Args:
        arm: the regular server.
        prompt: any, to see whether it does, and how many tokens it knows.
        num_tokens: those of the tokenizer.
        num_top: how many of the likeliest are asked for at each place; -1 for all.

    Attributes:
        rounding: the largest difference of two log-probabilities' errors that rounding explains.

    Raises (each method):
        RunError: the server does not give log-probabilities of texts.
    """

    def __init__(
        self,
        arm: ServerArm,
        prompt: Sequence[int],
        num_tokens: int,
        num_top: int,
        num_in_flight: int,
    ) -> None:
        self.arm = arm
        [[likeliest]] = arm.text_logprobs([(prompt, prompt[:1])], num_top, 1)
        # Some models know more tokens than their tokenizer.
        self.vocabulary_size = max(num_tokens, 1 + max(likeliest))
        self.rounding = _LEAST_ROUNDING
        self._num_top = num_top
        self._num_in_flight = num_in_flight

    def knows(self, sampling: Sampling) -> bool:
        """Whether log-probabilities determine what a sampling setting makes of them.

        A repetition penalty depends on the sign of logits. What others do to tokens that are not
        shown is unknown.
        """
        if "repetition_penalty" in sampling.parameters:
            return False
        if self._num_top < 0:
            return True
        changed = {"presence_penalty", "frequency_penalty", "logit_bias"}
        return changed.isdisjoint(sampling.parameters) and sampling.decoding.top_k <= self._num_top

    def learn_rounding(
        self, texts: Sequence[tuple[Sequence[int], Sequence[int]]], returned: ReturnedLogprobs
    ) -> None:
        """See what the server's rounding is: the same texts scored alone and beside others, and tokens
        as it scored them when it drew them.

        Args:
            texts: prompts, and texts of the server after them.
            returned: of its own new tokens.
        """
        twice = texts[:_NUM_TWICE]
        together = self.arm.text_logprobs(twice, self._num_top, self._num_in_flight)
        differences = [0.0]
        for text, first in zip(twice, together, strict=True):
            [second] = self.arm.text_logprobs([text], self._num_top, 1)
            for one, other in zip(first, second, strict=True):
                likeliest = max(one, key=lambda token: one[token])
                differences.append(abs(one[likeliest] - other.get(likeliest, -math.inf)))
        if returned.columns("raw", TOLERANCE).get("verdict") == "right":
            differences.append(3 * returned.rounding())
        self.rounding = max(_LEAST_ROUNDING, 2 * max(differences))

    def margin(self, token_ids: Sequence[int], wanted: int, other: int) -> Margin:
        pairs = [(token_ids, [wanted]), (token_ids, [other])]
        scored = self.arm.text_logprobs(pairs, self._num_top, 1)
        either = {**scored[0][0], **scored[1][0]}
        # Of a token that is not shown no more is known than that it is less likely than those.
        least = min(either.values())
        return Margin(either.get(wanted, least) - either.get(other, least), self.rounding)

    def logits_along(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Tensor:
        pairs = list(zip(prompts, texts, strict=True))
        scored = self.arm.text_logprobs(pairs, self._num_top, self._num_in_flight)
        logits = torch.zeros(len(texts), max(map(len, texts)), self.vocabulary_size)
        for row, of_text in enumerate(scored):
            logits[row, : len(of_text)] = self._logits(of_text, is_even=True)
        return logits

    def logits_again(self, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
        """The same by another request, with the tokens that are not shown as unevenly likely as can be."""
        [scored] = self.arm.text_logprobs([(prompt, text)], self._num_top, 1)
        return self._logits(scored, is_even=False)

    def _logits(self, scored: Sequence[Likeliest], is_even: bool) -> Tensor:
        """Logits [n, V] from the log-probabilities that are shown."""
        logits = torch.full((len(scored), self.vocabulary_size), -math.inf, dtype=torch.float64)
        for row, likeliest in zip(logits, scored, strict=True):
            shown = sorted(likeliest.items(), key=operator.itemgetter(1), reverse=True)
            if self._num_top > 0:
                # A server may add the token of the text. Whether it is shown must not depend on it.
                shown = shown[: self._num_top]
            tokens, logprobs = map(list, zip(*shown, strict=True))
            check_known(tokens, self.vocabulary_size)
            row[tokens] = torch.tensor(logprobs, dtype=torch.float64)
            mass_left = 1 - sum(map(math.exp, logprobs))
            left = row.isinf().nonzero().flatten()
            if len(left) and mass_left > 0:
                num_alike = len(left)
                if not is_even:
                    num_alike = max(1, min(num_alike, round(mass_left / math.exp(logprobs[-1]))))
                row[left[:num_alike]] = math.log(mass_left / num_alike)
        logits[:, sorted(self.arm.never_drawn)] = -math.inf
        return logits
