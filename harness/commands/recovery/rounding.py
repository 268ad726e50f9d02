"""What rounding explains: a few texts are read by a second route, and what differs there is rounding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from harness.commands.recovery.workload import Answer, Columns
from harness.engines.divergence import margin_deviation
from harness.engines.door.reading import KernelDeviations, Reference
from harness.results.statistics import Floats
from harness.results.statistics.drawn_tokens import NO_ROUNDING, DrawnText, rounding_between

# Texts of each sampling setting from which its rounding is estimated.
_NUM_READ_TWICE = 8
# The name of texts at the one place among sampling settings.
_AT_PLACE = "at the one place"
# The kernels' deviation from the eager model may be this many times that of rounding.
_MOST_APART = 5.0


class Rounding:
    """The rounding of a reference's logits, by texts that it reads along two routes (`logits_by_another_route`)."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        # Of each sampling setting the prompts whose texts were read twice: rounding differs by prompt. At the one place
        # all texts share a prompt, so that whole texts are kept.
        self._read_twice: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        self._of_probabilities: dict[str, list[Floats]] = defaultdict(list)
        self._of_margins: list[float] = []
        self._kernels: list[KernelDeviations] = []

    def read_again(self, answer: Answer, logits: Floats) -> None:
        """Read a text by the other route, unless enough of its kind were.

        Args:
            logits: [n, V] by the first route, before each of its tokens.
        """
        request, record = answer
        # Of greedy texts one is enough for tolerances.
        if request.is_greedy and self._of_margins:
            return
        name, text = request.sampling.name, request.prompt
        if request.is_at_place:
            name, text = _AT_PLACE, (*text, *record.token_ids)
        if len(self._read_twice[name]) >= _NUM_READ_TWICE or text in self._read_twice[name]:
            return
        self._read_twice[name].add(text)
        kernels = self._reference.kernel_deviations(request.prompt, record.token_ids, logits)
        if kernels is not None:
            self._kernels.append(kernels)
        again = self._reference.logits_by_another_route(request.prompt, record.token_ids)
        if again is None:
            return
        self._of_margins.append(margin_deviation(logits, again))
        if not request.is_greedy:
            probabilities = request.sampling.probabilities_along
            self._of_probabilities[name].append(
                rounding_between(probabilities(logits), probabilities(again))
            )

    def tolerances(self, largest: Floats) -> Floats:
        """The largest difference [n] of two logits that rounding explains, where the largest logits are these [n]."""
        return self._reference.tolerance(largest, root_mean_square(self._of_margins))

    def of_drawn(self, texts: Sequence[DrawnText]) -> list[Floats]:
        """The distance between a drawn text's distributions by both routes: of its sampling setting the mean, and at
        the one place, where most is drawn, the largest.
        """
        means = {name: np.mean(along, axis=0) for name, along in self._of_probabilities.items()}
        at_place = self._of_probabilities.get(_AT_PLACE, [])
        allowed = []
        for text in texts:
            rounding = means.get(text.setting, NO_ROUNDING)
            if text.is_at_place:
                rounding = np.max([rounding, *at_place], axis=0)
            allowed.append(rounding)
        return allowed

    def kernel_checks(self) -> list[Columns]:
        """Whether the passes that decode compute what the eager model computes; [] where those passes score nothing."""
        if not self._kernels:
            return []
        passes = root_mean_square([kernels.passes for kernels in self._kernels])
        rounding = root_mean_square([kernels.rounding for kernels in self._kernels])
        is_explained = passes <= _MOST_APART * rounding
        return [
            {
                "check": "kernels",
                "verdict": "lossless" if is_explained else "lossy",
                "kernel_deviation": passes,
                "rounding_deviation": rounding,
            }
        ]


def root_mean_square(values: Sequence[float]) -> float:
    """0 without any."""
    return float(np.sqrt(np.mean(np.square(values)))) if values else 0.0
