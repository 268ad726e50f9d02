"""Measures how large a difference rounding explains: a few texts are read in a second way, which differs by rounding
only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from harness.commands.recovery.rows import MOST_APART
from harness.commands.recovery.workload import Answer, Columns
from harness.engines.divergence import margin_deviation
from harness.engines.door.reading import KernelDeviations, Reference
from harness.results.statistics import Floats
from harness.results.statistics.drawn_tokens import NO_ROUNDING, DrawnText, rounding_between

# For each sampling setting, rounding is estimated from at most this many texts.
_NUM_READ_TWICE = 8
# The key for texts at the one place that many requests continue. All other keys are names of sampling settings.
_AT_PLACE = "at the one place"


class Rounding:
    """Measures the rounding of a reference's logits, from texts that the reference reads in two ways
    (`logits_by_another_route`).
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        # For each sampling setting, the prompts of the texts that were read twice. Each prompt is used once, because
        # rounding differs between prompts. At the one place all texts have the same prompt, so texts are added to it.
        self._read_twice: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        # For each sampling setting except greedy, and for `_AT_PLACE`: the rounding of each text that was read twice,
        # an array in the form of `NO_ROUNDING`.
        self._of_probabilities: dict[str, list[Floats]] = defaultdict(list)
        # For each text that was read twice, with any setting: how far the differences between its logits move
        # (`margin_deviation`).
        self._of_margins: list[float] = []
        self._kernels: list[KernelDeviations] = []

    def read_again(self, answer: Answer, logits: Floats) -> None:
        """Read a text in the second way, and keep the differences from the usual way.

        The text is not read if it is greedy and any text was read twice before, if enough texts of its setting were,
        or if its prompt was used before with this setting. (At the one place, where all prompts are equal, the text
        counts in place of the prompt.)

        Args:
            answer: an answer of n tokens.
            logits: [n, V], the reference's logits before each token, read in the usual way.
        """
        request, record = answer
        # Greedy texts only matter for tolerances, for which one text is enough.
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
        self._of_margins.append(margin_deviation(logits, again))
        if not request.is_greedy:
            probabilities = request.sampling.probabilities_along
            self._of_probabilities[name].append(
                rounding_between(probabilities(logits), probabilities(again))
            )

    def tolerances(self, largest: Floats) -> Floats:
        """The largest difference between two logits that rounding explains, [n], at places where the largest logits are
        `largest`, [n].
        """
        return self._reference.tolerance(largest, root_mean_square(self._of_margins))

    def of_drawn(self, texts: Sequence[DrawnText]) -> list[Floats]:
        """For each drawn text, how far its distributions may move by rounding; each array is like `NO_ROUNDING`.

        This is the mean distance between the two ways of reading, over the texts that were read twice with the same
        sampling setting; 0 if there are none. At the one place, where about half of the tokens are drawn, each entry is
        the maximum of this mean and of all distances that were measured there.
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
        """A check of whether the passes that decode compute the same logits as the eager model; [] if the reference
        cannot compare them.
        """
        if not self._kernels:
            return []
        passes = root_mean_square([kernels.passes for kernels in self._kernels])
        rounding = root_mean_square([kernels.rounding for kernels in self._kernels])
        is_explained = passes <= MOST_APART * rounding
        return [
            {
                "check": "kernels",
                "verdict": "lossless" if is_explained else "lossy",
                "kernel_deviation": passes,
                "rounding_deviation": rounding,
            }
        ]


def root_mean_square(values: Sequence[float]) -> float:
    """The root of the mean square; 0 without values."""
    return float(np.sqrt(np.mean(np.square(values)))) if values else 0.0
