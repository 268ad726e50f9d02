"""The target's exact distribution over the first tokens of a continuation, as a tree of prefixes.

With a vocabulary of V tokens there are V^n continuations of n tokens, and nearly all of them are never drawn. So the
probability of a prefix is computed only if enough draws are expected to begin with it, and each draw is counted under
the longest known prefix of its tokens. That is a partition: the probability of a prefix, less that of the known
prefixes which are one token longer, is the probability of being counted under it, and the sum over all is 1.

After a prefix every next token may be too rare to be known, although the prefix itself is common. Such tokens are put
together in groups that are common enough: a group ends a prefix as a token does, so a change of the next token's
distribution shows there too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import TopKLogitsWarper, TopPLogitsWarper

from harness.config.settings import DecodingSettings
from harness.engines.batches import in_batches
from harness.engines.protocol import Reference
from harness.engines.reference import REFERENCE_BATCH
from harness.results.statistics.chi_square import least_visible_shift

Floats = NDArray[np.float64]
Prefix = tuple[int, ...]

# Of the tokens after a prefix so many, the likeliest, can be in groups.
_MOST_GROUPED = 1000

# Where rounding decides whether a token belongs to the top p, one draw of it must not refute everything: an outcome of
# probability 0 gets this one, and is pooled with the rare ones.
_NEVER = 1e-12


@dataclass(frozen=True)
class Outcomes:
    """Probabilities of the known prefixes after one prompt, the empty prefix included.

    Attributes:
        prefixes: from forward passes over prompt and prefix, without a cache.
        cached: the same from forward passes over the prefix behind a cached prompt. The two differ by rounding alone.
        groups: of rare tokens after a prefix: the group of each, a negative number, which is the last token of a
            prefix in the other two.
    """

    prefixes: Mapping[Prefix, float]
    cached: Mapping[Prefix, float]
    groups: Mapping[Prefix, Mapping[int, int]] = field(default_factory=dict)

    def first(self, num_tokens: int) -> Outcomes:
        """The distribution over the first tokens only."""
        known = [prefix for prefix in self.prefixes if len(prefix) <= num_tokens]
        return Outcomes(
            {prefix: self.prefixes[prefix] for prefix in known},
            {prefix: self.cached[prefix] for prefix in known},
            {prefix: of for prefix, of in self.groups.items() if len(prefix) < num_tokens},
        )

    @property
    def probabilities(self) -> Floats:
        """Probabilities of being counted under each prefix, in the order of `prefixes`."""
        return _cells(self.prefixes)

    @property
    def cached_probabilities(self) -> Floats:
        """The same from `cached`."""
        return _cells(self.cached)

    def shifted(self, position: int, distance: float) -> Floats:
        """`probabilities` if the token at `position` had another distribution, regardless of the tokens before it.

        Args:
            distance: total variation between that distribution and the exact one; see `least_visible_shift`.
        """
        shifted = self.probabilities
        groups: dict[Prefix, list[int]] = {}
        for index, prefix in enumerate(self.prefixes):
            if len(prefix) >= position:
                groups.setdefault(prefix[:position], []).append(index)
        for group in groups.values():
            mass = shifted[group].sum()
            shifted[group] = mass * least_visible_shift(shifted[group] / mass, distance)
        return shifted

    def count(self, continuations: Iterable[Sequence[int]]) -> NDArray[np.int64]:
        """How many of the continuations are counted under each prefix."""
        counts = Counter(map(self._counted_under, continuations))
        return np.array([counts[prefix] for prefix in self.prefixes], dtype=np.int64)

    def _counted_under(self, tokens: Sequence[int]) -> Prefix:
        prefix: Prefix = ()
        for token in tokens:
            longer = (*prefix, token)
            if longer not in self.prefixes:
                group = self.groups.get(prefix, {}).get(token)
                return prefix if group is None else (*prefix, group)
            prefix = longer
        return prefix


def exact_outcomes(
    reference: Reference,
    prompt: Sequence[int],
    decoding: DecodingSettings,
    num_tokens: int,
    min_probability: float,
) -> Outcomes:
    """The exact distribution over the first `num_tokens` tokens after `prompt`.

    Args:
        min_probability: of the prefixes that are counted separately; a rarer one counts under the prefix it extends.
    """
    known = _Known(min_probability)
    level: list[Prefix] = [()]
    for _ in range(num_tokens):
        longer: list[Prefix] = []
        for batch in in_batches(level, REFERENCE_BATCH):
            whole = reference.logits([[*prompt, *prefix] for prefix in batch])
            behind_cache = reference.logits([prompt] * len(batch), batch) if batch[0] else whole
            rows, cached_rows = (
                exact_probabilities(logits, decoding) for logits in (whole, behind_cache)
            )
            for prefix, row, cached_row in zip(batch, rows, cached_rows, strict=True):
                longer += known.extend(prefix, row, cached_row)
        level = longer
    return Outcomes(known.prefixes, known.cached, known.groups)


class _Known:
    """The known prefixes while they are found; its attributes are those of `Outcomes`."""

    def __init__(self, min_probability: float) -> None:
        self.prefixes: dict[Prefix, float] = {(): 1.0}
        self.cached: dict[Prefix, float] = {(): 1.0}
        self.groups: dict[Prefix, dict[int, int]] = {}
        self._least = min_probability

    def extend(self, prefix: Prefix, row: Floats, cached_row: Floats) -> list[Prefix]:
        """Add what follows a prefix, by the distributions [V] of the next token.

        Returns the known prefixes that are one token longer, without groups.
        """
        masses = self.prefixes[prefix] * row
        cached_masses = self.cached[prefix] * cached_row
        is_common = masses >= self._least
        longer: list[Prefix] = []
        for token in np.flatnonzero(is_common).tolist():
            longer.append((*prefix, token))
            self.prefixes[longer[-1]] = float(masses[token])
            self.cached[longer[-1]] = float(cached_masses[token])
        rare = np.where(is_common, 0.0, masses)
        for number, tokens in enumerate(_grouped(rare, self._least), start=1):
            members = self.groups.setdefault(prefix, {})
            members.update(dict.fromkeys(tokens.tolist(), -number))
            self.prefixes[*prefix, -number] = float(masses[tokens].sum())
            self.cached[*prefix, -number] = float(cached_masses[tokens].sum())
        return longer


def _grouped(masses: Floats, least: float) -> list[NDArray[np.intp]]:
    """Groups of tokens, the likeliest first, each of at least this mass; as much is left for none."""
    total = float(masses.sum())
    if total < 2 * least:
        return []
    order = np.argsort(-masses, kind="stable")[:_MOST_GROUPED]
    sums = masses[order].cumsum()
    found: list[NDArray[np.intp]] = []
    begin = 0
    before = 0.0
    while total - before >= 2 * least > 0 and sums[-1] - before >= least:
        end = int(np.searchsorted(sums, before + least)) + 1
        found.append(order[begin:end])
        begin = end
        before = float(sums[end - 1])
    return found


def observed_outcomes(
    continuations: Sequence[Sequence[int]], num_tokens: int, min_count: int
) -> Outcomes:
    """The distribution over the first tokens of the draws; a prefix that occurs less often is not known."""
    counts = Counter(
        tuple(tokens[:length])
        for tokens in continuations
        for length in range(min(num_tokens, len(tokens)) + 1)
    )
    prefixes = {
        prefix: count / len(continuations) for prefix, count in counts.items() if count >= min_count
    }
    return Outcomes(prefixes, prefixes)


def exact_probabilities(logits: Tensor, decoding: DecodingSettings) -> Floats:
    """Logits [B, V] -> probabilities [B, V] in float64, with the settings' temperature, top-k and top-p.

    By other code on purpose: target and draft share `decoding.warp`, so a mistake there would not look like a loss.
    """
    values: Any = logits.double().cpu()
    if decoding.temperature == 0:
        return one_hot(values.argmax(-1), values.shape[-1]).double().numpy()
    values = values / decoding.temperature
    if decoding.top_k > 0:
        values = TopKLogitsWarper(decoding.top_k)(values, values)
    if decoding.top_p < 1:
        values = TopPLogitsWarper(decoding.top_p)(values, values)
    return np.asarray(values.softmax(-1))


def _cells(prefixes: Mapping[Prefix, float]) -> Floats:
    remaining = dict(prefixes)
    for prefix, probability in prefixes.items():
        if prefix:
            remaining[prefix[:-1]] -= probability
    cells = np.maximum(list(remaining.values()), _NEVER)
    return np.asarray(cells / cells.sum())
