"""Answers to requests, scored by a reference: the target's own probabilities along their texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from harness.commands.recovery.drawn import DrawnText, quantile_ranges
from harness.commands.recovery.greedy import GreedyTexts, require_token_ids
from harness.commands.recovery.returned_logprobs import ReturnedLogprobs
from harness.commands.recovery.workload import PlannedRequest
from harness.engines.divergence import check_known, first_divergence
from harness.engines.protocol import TextReference, in_batches
from harness.engines.requests import RequestRecord
from harness.measuring.progress import progress
from harness.results.statistics.arrays import Floats

# Texts, and logits, that are computed together at most.
_MOST_TOGETHER = 64
_MOST_LOGITS = 2**25
# A quantile is below 1.
_LARGEST_QUANTILE = np.nextafter(1.0, 0.0)


class Scores:
    """The scores of all answers that were added.

    Args:
        end_tokens: those that end a greedy text.
        num_together: the most texts that the reference has room for at once.
        seed: of the random parts of quantiles.

    Attributes:
        greedy: each greedy text against the likeliest tokens.
        drawn: the other texts.
        returned: the log-probabilities of drawn requests that asked for them.
    """

    def __init__(
        self,
        reference: TextReference,
        end_tokens: frozenset[int],
        num_together: int,
        seed: Sequence[int],
    ) -> None:
        self.greedy = GreedyTexts(end_tokens)
        self.drawn: list[DrawnText] = []
        self.returned = ReturnedLogprobs()
        self._reference = reference
        self._num_together = min(num_together, _MOST_TOGETHER)
        self._generator = np.random.default_rng(seed)
        # A dictionary and no `functools.cache`, whose reference to this object would be a circle: the memory of the
        # reference's engine would wait for the collector.
        self._two_routes: dict[DrawnText, tuple[Floats, Floats] | None] = {}

    def add(self, answered: Sequence[tuple[PlannedRequest, RequestRecord]]) -> None:
        """Score answers. Raises RunError where one came without token ids, or with unknown ones."""
        require_token_ids([answer for _, answer in answered if answer.token_ids])
        # Equal texts are scored once.
        by_text: dict[tuple[tuple[int, ...], str, tuple[int, ...]], list[int]] = defaultdict(list)
        for number, (planned, answer) in enumerate(answered):
            text = tuple(answer.token_ids)
            if text:
                check_known([*planned.prompt, *text], self._reference.vocabulary_size)
                by_text[planned.prompt, planned.sampling.name, text].append(number)
            elif planned.is_greedy:
                self.greedy.add(None, planned.num_tokens, answer)
        # Texts of about the same length need little filling.
        distinct = sorted(by_text, key=lambda key: len(key[2]))
        longest = len(distinct[-1][2]) if distinct else 1
        room = _MOST_LOGITS // (longest * self._reference.vocabulary_size)
        with progress("comparing", len(distinct)) as advance:
            for batch in in_batches(distinct, max(1, min(self._num_together, room))):
                prompts = [prompt for prompt, _, _ in batch]
                texts = [text for _, _, text in batch]
                logits = self._reference.logits_along(prompts, texts)
                for row, key in enumerate(batch):
                    alike = [answered[number] for number in by_text[key]]
                    own_logits = logits[row, : len(key[2])]
                    advance(None)
                    if not alike[0][0].is_greedy:
                        self._add_drawn(alike, own_logits)
                        continue
                    likeliest = own_logits.argmax(-1).tolist()
                    for planned, answer in alike:
                        divergence = first_divergence(
                            self._reference, planned.prompt, likeliest, answer.token_ids
                        )
                        self.greedy.add(divergence, planned.num_tokens, answer)

    def two_routes(self, text: DrawnText) -> tuple[Floats, Floats] | None:
        """The distributions [n, V] along a text by the reference's two routes: many texts in one pass,
        and this text again (`logits_again`), which differ by rounding alone. None without a second one.
        """
        if text not in self._two_routes:
            both = None
            again = self._reference.logits_again(text.prompt, text.tokens)
            if again is not None:
                [logits] = self._reference.logits_along([text.prompt], [text.tokens])
                exact = text.sampling.probabilities_along(logits, text.prompt, text.tokens)
                both = exact, text.sampling.probabilities_along(again, text.prompt, text.tokens)
            self._two_routes[text] = both
        return self._two_routes[text]

    def _add_drawn(
        self, alike: Sequence[tuple[PlannedRequest, RequestRecord]], logits: Floats
    ) -> None:
        """Add answers with one text, by the reference's logits [n, V] before each of its tokens."""
        planned, answer = alike[0]
        tokens = tuple(answer.token_ids)
        rows = range(len(tokens))
        exact = planned.sampling.probabilities_along(logits, planned.prompt, tokens)
        lowest, widths = quantile_ranges(exact, tokens)
        for _ in alike:
            quantiles = lowest + self._generator.random(len(tokens)) * widths
            quantiles = np.minimum(quantiles, _LARGEST_QUANTILE)
            text = DrawnText(planned.prompt, planned.sampling, tokens, lowest, quantiles)
            self.drawn.append(text)
        if planned.sampling.asks_logprobs:
            values = logits.astype(np.float64)
            own_logits = values[rows, tokens]
            # A regular arm shows its likeliest tokens, and all others have one logit: those are not known.
            is_known = (values == own_logits[:, np.newaxis]).sum(-1) == 1
            with np.errstate(divide="ignore"):
                raw = np.where(is_known, own_logits - np.logaddexp.reduce(values, axis=-1), np.nan)
                processed = np.where(is_known, np.log(exact[rows, tokens]), np.nan)
            for _, each in alike:
                # An answer without any has no entries.
                returned = each.logprobs or [None] * len(tokens)
                self.returned.add(returned[: len(tokens)], raw, processed)
