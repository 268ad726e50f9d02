"""The target's exact distribution over the first tokens of a continuation, as probabilities of
prefixes.

With a vocabulary of V tokens there are V^n continuations of n tokens, and nearly all of them are
never drawn. So a prefix is known, with its probability, only if enough draws are expected to begin
with it, and each draw is counted under the longest known prefix of its tokens. These counts are the
cells of a χ² test.

For example, two tokens are counted, and prefixes are known from a probability of 0.14. The first
token is a, b or c with 0.1, 0.6 and 0.3; after b it is c with 0.6, and after c it is a with 0.5:

    prefix    probability    continuations counted under it    probability of the cell
    ()        1              a a, a b, a c                     1 - 0.6 - 0.3 = 0.1
    b         0.6            b a, b b                          0.6 - 0.36 = 0.24
    c         0.3            c b, c c                          0.3 - 0.15 = 0.15
    b c       0.36           b c                               0.36
    c a       0.15           c a                               0.15

Where every next token is too rare to be known, although the prefix itself is common, tokens are put
together in groups that are common enough. A group ends a prefix as a token does, so a change of the
next token's distribution shows there too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import TopKLogitsWarper, TopPLogitsWarper

from harness.config.settings import DecodingSettings
from harness.engines.checks.reference import REFERENCE_BATCH
from harness.engines.protocol import Reference, in_batches
from harness.results.statistics.arrays import Floats
from harness.results.statistics.chi_square import least_visible_shift

Prefix = tuple[int, ...]

# Only so many of the tokens after a prefix, the likeliest, can be in groups.
_MOST_GROUPED = 1000

# Where rounding decides whether a token belongs to the top p, one draw of it must not refute
# everything: a cell of probability 0 gets this one, and is pooled with the rare ones.
_NEVER = 1e-12


@dataclass(frozen=True)
class PrefixDistribution:
    """Probabilities of the known prefixes after one prompt, the empty prefix included.

    Attributes:
        prefixes: from forward passes over prompt and prefix, without a cache.
        cached: the same from forward passes over the prefix behind a cached prompt. The two differ
            by rounding alone.
        groups: by prefix, the group of each rare token after it, a negative number. It stands for
            the last token of a prefix in the other two: (5, -2) is token 5, then any of group -2.
    """

    prefixes: dict[Prefix, float]
    cached: dict[Prefix, float]
    groups: dict[Prefix, dict[int, int]]

    def first(self, num_tokens: int) -> PrefixDistribution:
        """The distribution over the first tokens only."""
        known = [prefix for prefix in self.prefixes if len(prefix) <= num_tokens]
        return PrefixDistribution(
            {prefix: self.prefixes[prefix] for prefix in known},
            {prefix: self.cached[prefix] for prefix in known},
            {prefix: of for prefix, of in self.groups.items() if len(prefix) < num_tokens},
        )

    @property
    def cells(self) -> Floats:
        """Probabilities of being counted under each prefix, in the order of `prefixes`."""
        return _cells(self.prefixes)

    @property
    def cached_cells(self) -> Floats:
        """The same from `cached`."""
        return _cells(self.cached)

    def shifted_cells(self, position: int, distance: float) -> Floats:
        """`cells` if the token at `position` had another distribution after any tokens before it.

        Args:
            distance: total variation between that distribution and the exact one; of all such
                distributions it is the one that a χ² test sees least.
        """
        shifted = self.cells
        cells_by_beginning: dict[Prefix, list[int]] = {}
        for cell, prefix in enumerate(self.prefixes):
            if len(prefix) >= position:
                cells_by_beginning.setdefault(prefix[:position], []).append(cell)
        for cells in cells_by_beginning.values():
            mass = shifted[cells].sum()
            shifted[cells] = mass * least_visible_shift(shifted[cells] / mass, distance)
        return shifted

    def count(self, continuations: Iterable[Sequence[int]]) -> NDArray[np.int64]:
        """How many of the continuations are counted under each prefix, in the order of `prefixes`."""
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


def exact_distribution(
    reference: Reference,
    prompt: Sequence[int],
    decoding: DecodingSettings,
    num_tokens: int,
    min_probability: float,
) -> PrefixDistribution:
    """The exact distribution over the first `num_tokens` tokens after `prompt`.

    Args:
        min_probability: of the prefixes that are known.
    """
    known = PrefixDistribution({(): 1.0}, {(): 1.0}, {})
    level: list[Prefix] = [()]
    for _ in range(num_tokens):
        longer: list[Prefix] = []
        for batch in in_batches(level, REFERENCE_BATCH):
            logits = reference.logits([[*prompt, *prefix] for prefix in batch])
            rows = exact_probabilities(logits, decoding)
            cached_rows = rows
            if batch[0]:
                behind_cache = reference.logits([prompt] * len(batch), batch)
                cached_rows = exact_probabilities(behind_cache, decoding)
            for prefix, row, cached_row in zip(batch, rows, cached_rows, strict=True):
                longer += _extend(known, prefix, row, cached_row, min_probability)
        level = longer
    return known


def _extend(
    known: PrefixDistribution, prefix: Prefix, row: Floats, cached_row: Floats, least: float
) -> list[Prefix]:
    """Add what follows a known prefix, by the distributions [V] of the next token.

    Returns the known prefixes that are one token longer, without groups.
    """
    masses = known.prefixes[prefix] * row
    cached_masses = known.cached[prefix] * cached_row
    is_common = masses >= least
    found: list[Prefix] = []
    for token in np.flatnonzero(is_common).tolist():
        longer = (*prefix, token)
        found.append(longer)
        known.prefixes[longer] = float(masses[token])
        known.cached[longer] = float(cached_masses[token])
    rare = np.where(is_common, 0.0, masses)
    for number, tokens in enumerate(_grouped(rare, least), start=1):
        group = -number
        members = known.groups.setdefault(prefix, {})
        members.update(dict.fromkeys(tokens.tolist(), group))
        known.prefixes[*prefix, group] = float(masses[tokens].sum())
        known.cached[*prefix, group] = float(cached_masses[tokens].sum())
    return found


def _grouped(masses: Floats, least: float) -> list[NDArray[np.intp]]:
    """Groups of tokens, the likeliest first, each of at least the mass `least`.

    The tokens in no group have this mass together, too: they are counted under the prefix itself.
    """
    total = float(masses.sum())
    if total < 2 * least:
        return []
    order = np.argsort(-masses, kind="stable")[:_MOST_GROUPED]
    sums = masses[order].cumsum()
    found: list[NDArray[np.intp]] = []
    begin = 0
    mass_before = 0.0
    while total - mass_before >= 2 * least > 0 and sums[-1] - mass_before >= least:
        end = int(np.searchsorted(sums, mass_before + least)) + 1
        found.append(order[begin:end])
        begin = end
        mass_before = float(sums[end - 1])
    return found


def observed_distribution(
    continuations: Sequence[Sequence[int]], num_tokens: int, min_count: int
) -> PrefixDistribution:
    """The distribution over the first tokens of drawn continuations, where no exact one is known.

    Args:
        min_count: how often a prefix must occur to be known.
    """
    counts = Counter(
        tuple(tokens[:length])
        for tokens in continuations
        for length in range(min(num_tokens, len(tokens)) + 1)
    )
    prefixes = {
        prefix: count / len(continuations) for prefix, count in counts.items() if count >= min_count
    }
    return PrefixDistribution(prefixes, prefixes, {})


def exact_probabilities(logits: Tensor, decoding: DecodingSettings) -> Floats:
    """Logits [B, V] -> probabilities [B, V] in float64, with the settings' temperature, top-k and
    top-p.

    The code differs from `decoding.warp` on purpose: target and draft share that one, so a mistake
    there would not look like a loss.
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
    """The probability of each prefix, less those of the known prefixes that are one token longer."""
    remaining = dict(prefixes)
    for prefix, probability in prefixes.items():
        if prefix:
            remaining[prefix[:-1]] -= probability
    cells = np.maximum(list(remaining.values()), _NEVER)
    return np.asarray(cells / cells.sum())
