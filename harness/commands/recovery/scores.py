"""Scores the answers of `recovery load=8` by the model's exact probabilities.

Texts go in. Out come, of greedy texts, the places where they leave the likeliest tokens, and of
drawn texts the quantiles of their tokens, which are uniform if they were drawn as asked (see
`quantiles`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from harness.commands.recovery.lossless import GreedyTexts
from harness.commands.recovery.quantiles import cell_masses, num_cells_for, quantiles
from harness.commands.recovery.samplings import Sampling
from harness.commands.recovery.workload import PlannedRequest
from harness.engines.checks.divergence import check_known, first_divergence
from harness.engines.local.batches import in_batches
from harness.engines.protocol import Reference
from harness.engines.requests import RequestRecord
from harness.results.statistics.arrays import Floats

# Texts of each sampling setting from which rounding is estimated.
_NUM_ROUNDED = 8
# Texts whose logits are computed together: of a large vocabulary, those of one text are many.
_MOST_TOGETHER = 8


class TokenGroup(NamedTuple):
    """Drawn tokens of a sampling setting that are tested together.

    Attributes:
        name: `first tokens` or `later tokens`.
        quantiles: of the tokens in the exact distribution.
        rounded_masses: shares of quantiles in the cells of the test, if tokens were drawn from
            logits that are rounded in another way; None if not known.
    """

    name: str
    quantiles: Floats
    rounded_masses: Floats | None


class Scores:
    """The scores of all texts that were added.

    Args:
        num_in_flight: as many texts are scored together, up to a limit.

    Attributes:
        greedy: each greedy text against the likeliest tokens.
    """

    def __init__(
        self,
        reference: Reference,
        end_tokens: frozenset[int],
        num_in_flight: int,
        seed: int,
    ) -> None:
        self.greedy = GreedyTexts(end_tokens)
        self._reference = reference
        self._batch_size = min(num_in_flight, _MOST_TOGETHER)
        self._generator = np.random.default_rng([seed, 1])
        # By name of the sampling setting: the quantiles of each text, and of some texts the
        # probabilities [n, V] by two routes that differ by rounding alone.
        self._quantiles: dict[str, list[Floats]] = defaultdict(list)
        self._two_routes: dict[str, list[tuple[Floats, Floats]]] = defaultdict(list)

    def add(self, answered: Sequence[tuple[PlannedRequest, RequestRecord]]) -> Iterator[None]:
        """Score texts; yields after each."""
        for planned, answer in answered:
            if planned.is_greedy and not answer.token_ids:
                self.greedy.add(None, planned.num_tokens, answer)
        # Texts of about the same length need little filling.
        with_tokens = [pair for pair in answered if pair[1].token_ids]
        by_length = sorted(with_tokens, key=lambda pair: len(pair[1].token_ids))
        for batch in in_batches(by_length, self._batch_size):
            for planned, answer in batch:
                check_known([*planned.prompt, *answer.token_ids], self._reference.vocabulary_size)
            prompts = [planned.prompt for planned, _ in batch]
            texts = [answer.token_ids for _, answer in batch]
            logits = self._reference.logits_along(prompts, texts)
            for row, (planned, answer) in enumerate(batch):
                own_logits = logits[row, : len(answer.token_ids)]
                if planned.is_greedy:
                    self._add_greedy(planned, answer, own_logits)
                else:
                    self._add_drawn(planned, answer.token_ids, own_logits)
                yield

    def groups(self, sampling: Sampling) -> list[TokenGroup]:
        """The first tokens of a setting's texts, and the later ones."""
        return [
            self._group("first tokens", sampling, slice(0, 1)),
            self._group("later tokens", sampling, slice(1, None)),
        ]

    @property
    def quantiles_by_text(self) -> list[Floats]:
        """The quantiles of each drawn text, of all sampling settings."""
        return [of_text for texts in self._quantiles.values() for of_text in texts]

    def _group(self, name: str, sampling: Sampling, positions: slice) -> TokenGroup:
        values = _joined([of_text[positions] for of_text in self._quantiles[sampling.name]])
        rounded_masses = None
        routes = self._two_routes[sampling.name]
        exact = _joined([probabilities[positions] for probabilities, _ in routes])
        others = _joined([others[positions] for _, others in routes])
        if len(exact):
            rounded_masses = cell_masses(exact, others, num_cells_for(len(values)))
        return TokenGroup(name, values, rounded_masses)

    def _add_greedy(self, planned: PlannedRequest, answer: RequestRecord, logits: Tensor) -> None:
        likeliest = logits.argmax(-1).tolist()
        divergence = first_divergence(self._reference, planned.prompt, likeliest, answer.token_ids)
        self.greedy.add(divergence, planned.num_tokens, answer)

    def _add_drawn(self, planned: PlannedRequest, text: Sequence[int], logits: Tensor) -> None:
        sampling = planned.sampling
        exact = sampling.probabilities_along(logits, planned.prompt, text)
        self._quantiles[sampling.name].append(quantiles(exact, text, self._generator))
        routes = self._two_routes[sampling.name]
        if len(routes) < _NUM_ROUNDED and len(planned.prompt) > 1:
            # The same logits by another route: in a batch of one, with a prompt one token shorter.
            *prompt, last = planned.prompt
            other_logits = self._reference.logits_along([prompt], [[last, *text]])[0, 1:]
            others = sampling.probabilities_along(other_logits, planned.prompt, text)
            routes.append((exact, others))


def _joined(arrays: Sequence[Floats]) -> Floats:
    return np.concatenate(arrays) if arrays else np.zeros(0)
