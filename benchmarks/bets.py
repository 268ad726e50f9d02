"""Bets on drawn tokens (`recovery`) beside χ² tests of the same tokens, in simulation.

    python benchmarks/bets.py [--honest 500] [--runs 20] [--tokens 4000] [--level 1e-9]

Target and draft are random distributions over 50 tokens, other ones at each place. Drafts are verified with a mistake
or without one. The χ² test is of ten equal cells of the same quantiles, at a hundredth of the level, where its
approximation is known to hold. Honest runs are accused at 5 % if any of 2,000 looks accuses them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import common
import numpy as np
from scipy import stats

from harness.commands.recovery.sampling import exact_probabilities
from harness.config.settings import DecodingSettings
from harness.results.statistics.arrays import Floats
from harness.results.statistics.drawn_tokens import NO_ROUNDING, DrawnText, Rounding, TokenTest

NUM_TOKENS = 50
TEXT = 10
NUM_HONEST = 2000
T1 = DecodingSettings(temperature=1.0)

Verify = Callable[[Floats, Floats, np.random.Generator], list[int]]


def drawn(probabilities: Floats, generator: np.random.Generator) -> Floats:
    """A token of each of [n, V] distributions."""
    sums = probabilities.cumsum(-1)
    uniforms = generator.random((len(sums), 1)) * sums[:, -1:]
    return np.asarray((sums > uniforms).argmax(-1))


def verified(
    target: Floats,
    draft: Floats,
    generator: np.random.Generator,
    *,
    chance: Callable[[Floats, Floats], Floats] = lambda p, q: p / q,
    recovered: Callable[[Floats, Floats], Floats] = lambda p, q: np.clip(p - q, 1e-300, None),
) -> list[int]:
    """One draft token at each place is tested, and a rejected one replaced."""
    proposed = drawn(draft, generator)
    rows = np.arange(len(proposed))
    accepted = generator.random(len(rows)) < chance(target[rows, proposed], draft[rows, proposed])
    replaced = drawn(recovered(target, draft), generator)
    return [int(token) for token in np.where(accepted, proposed, replaced)]


def tempered(probabilities: Floats, temperature: float) -> Floats:
    return exact_probabilities(
        np.log(np.clip(probabilities, 1e-300, None)), DecodingSettings(temperature=temperature)
    )


def without(verify: Callable[[Floats], Floats]) -> Verify:
    """Draws from what a mistake makes of the target's distribution."""
    return lambda p, q, generator: [int(one) for one in drawn(verify(p), generator)]


FAULTS: dict[str, Verify] = {
    "none": verified,
    "residual of the target": lambda p, q, g: verified(p, q, g, recovered=lambda p, q: p),
    "residual warped twice": lambda p, q, g: verified(
        p, q, g, recovered=lambda p, q: tempered(np.clip(p - q, 0, None), 0.5)
    ),
    "draft probabilities ignored": lambda p, q, g: verified(
        p, q, g, chance=lambda p, q: p, recovered=lambda p, q: p
    ),
    "lenience 0.8": lambda p, q, g: verified(p, q, g, chance=lambda p, q: p / (0.8 * q)),
    "verified greedily": without(lambda p: np.eye(NUM_TOKENS)[p.argmax(-1)]),
    "temperature 0.9": without(lambda p: tempered(p, 0.9)),
    "temperature 1.1": without(lambda p: tempered(p, 1.1)),
    "min_p 0.1 left on": without(lambda p: p * (p >= 0.1 * p.max(-1, keepdims=True))),
    "one token in a hundred at random": without(lambda p: 0.99 * p + 0.01 / NUM_TOKENS),
}


def distributions(
    num_tokens: int, generator: np.random.Generator, decoding: DecodingSettings = T1
) -> tuple[Floats, Floats]:
    """Of target and draft [n, V]: often one token is nearly certain, and sometimes much is open."""
    scale = generator.uniform(1, 5, (num_tokens, 1))
    logits = scale * generator.standard_normal((num_tokens, NUM_TOKENS))
    other = logits + generator.standard_normal(logits.shape)
    return exact_probabilities(logits, decoding), exact_probabilities(other, decoding)


def as_texts(exact: Floats, tokens: list[int], generator: np.random.Generator) -> list[DrawnText]:
    """Texts of ten tokens, scored by distributions [n, V]."""
    return [
        DrawnText.of(
            exact[first : first + TEXT],
            tokens[first : first + TEXT],
            generator,
            prompt=(first,),
            setting="any",
        )
        for first in range(0, len(tokens), TEXT)
    ]


def chi_square(texts: list[DrawnText]) -> float:
    """The p-value of equal cells of quantiles."""
    counts, _ = np.histogram(np.concatenate([text.quantiles for text in texts]), 10, (0, 1))
    return float(stats.chisquare(counts).pvalue)


def power_rows(options: object) -> list[tuple[object, ...]]:
    num_runs, num_tokens, level = (getattr(options, name) for name in ("runs", "tokens", "level"))
    test = TokenTest(level, shift=0.05)
    rows: list[tuple[object, ...]] = []
    for fault, verify in FAULTS.items():
        by_bets, by_chi, until = [0, 0], [0, 0], []
        for seed in range(num_runs):
            generator = np.random.default_rng([seed, 1])
            target, draft = distributions(num_tokens, generator)
            tokens = verify(target, draft, generator)
            texts = as_texts(target, tokens, generator)
            for number, part in enumerate((texts[: len(texts) // 4], texts)):
                result = test.check(part)
                by_bets[number] += result.verdict == "lossy"
                by_chi[number] += chi_square(part) < level / 100
            until.append(result.num_draws_until or np.inf)
        rows.append((fault, *by_bets, *by_chi, f"{np.median(until):,.0f}"))
    return rows


def honest_rows(num_runs: int) -> list[tuple[object, ...]]:
    """Honest draws at 5 %, at temperatures, truncated, and where the reference rounds; runs of each in turn."""
    test = TokenTest(0.05, shift=0.05)
    ways = {
        "temperature 1": T1,
        "temperature 0.05": DecodingSettings(temperature=0.05),
        "top_k=5": DecodingSettings(temperature=1.0, top_k=5),
        "top_p=0.8": DecodingSettings(temperature=1.0, top_p=0.8),
        "logits rounded by 0.03, which is allowed": T1,
    }
    accused = dict.fromkeys(ways, 0)
    for seed in range(num_runs):
        generator = np.random.default_rng([seed, 2])
        name = list(ways)[seed % len(ways)]
        target, draft = distributions(NUM_HONEST, generator, ways[name])
        rounding = NO_ROUNDING
        drawn_from = target
        if "rounded" in name:
            # The arm's logits are as far from the reference's as those of a second route are.
            drawn_from, again = (
                exact_probabilities(
                    np.log(target) + 0.03 * generator.standard_normal(target.shape), T1
                )
                for _ in range(2)
            )
            of_texts = [slice(first, first + TEXT) for first in range(0, 8 * TEXT, TEXT)]
            rounding = Rounding.mean([Rounding.between(target[at], again[at]) for at in of_texts])
        tokens = verified(drawn_from, np.clip(draft, 1e-300, None), generator)
        texts = as_texts(target, tokens, generator)
        roundings = [rounding] * len(texts)
        accused[name] += test.check(texts, roundings).verdict == "lossy"
    each = num_runs // len(ways)
    return [(name, f"{number} of {each}") for name, number in accused.items()]


def order_rows(num_runs: int, num_tokens: int, level: float) -> list[tuple[object, ...]]:
    """The two faults that bend every token a little, with outcomes in three orders."""
    rows: list[tuple[object, ...]] = []
    test = TokenTest(level, shift=0.05)
    for fault in ("residual of the target", "temperature 0.9"):
        found = [0, 0, 0]
        for seed in range(num_runs):
            generator = np.random.default_rng([seed, 3])
            target, draft = distributions(num_tokens, generator)
            tokens = FAULTS[fault](target, draft, generator)
            by_draft = np.argsort(np.argsort(-target / draft, axis=-1), axis=-1)
            by_number = np.broadcast_to(np.arange(NUM_TOKENS), target.shape)
            likeliest = np.argsort(np.argsort(-target, axis=-1), axis=-1)
            for number, order in enumerate((likeliest, by_number, by_draft)):
                at = np.arange(num_tokens)
                own = order[at, tokens][:, np.newaxis]
                lowest = (target * (order < own)).sum(-1)
                quantiles = lowest + target[at, tokens] * generator.random(num_tokens)
                texts = [
                    dataclasses.replace(
                        text,
                        quantiles=np.minimum(quantiles[first : first + TEXT], 1 - 1e-12),
                        # What bets on tilts win does not depend on the order.
                        tilts=np.zeros_like(text.tilts),
                    )
                    for first, text in zip(
                        range(0, num_tokens, TEXT),
                        as_texts(target, tokens, generator),
                        strict=True,
                    )
                ]
                found[number] += test.check(texts).verdict == "lossy"
        rows.append((fault, *found))
    return rows


def main() -> None:
    parser = common.parser(__doc__, honest=500, runs=20, tokens=4000, level=1e-9)
    options = parser.parse_args()
    fewer = options.tokens // 4
    common.show("Honest runs accused at 5 %", ["drawn", "accused"], honest_rows(options.honest))
    common.show(
        f"Runs of {options.runs} that are found lossy",
        ["fault", f"bets, {fewer:,}", f"bets, {options.tokens:,}", f"χ², {fewer:,}", f"χ², {options.tokens:,}",
         "tokens until found, median"],
        power_rows(options),
    )  # fmt: skip
    common.show(
        f"The same by bets on cells alone, {4 * options.tokens:,} tokens, by the order of outcomes",
        ["fault", "likeliest first", "by number", "by target / draft"],
        order_rows(options.runs // 2, 4 * options.tokens, options.level),
    )


if __name__ == "__main__":
    main()
