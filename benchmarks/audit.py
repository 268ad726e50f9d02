"""Tests `audit` on honest figures, and on figures of which one was changed.

    python benchmarks/audit.py

5,000 tables in 11 layouts are filled with figures of simulated decoding, in the ways in which people print them: as
means, medians or ratios of sums, with or without an answer's first token, about decoding only or about whole requests,
and with 0 to 3 decimals. Printed is how many honest tables `audit` doubts. Then one figure of a row is changed, and
printed is how often `audit` finds this.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from harness.commands.audit.command import VERDICTS, Check, judge
from harness.commands.audit.rows import stated_rows

# The figures of a row, as typed.
Row = dict[str, str]
# Each layout has, for each argument of `audit`, the name of a figure of `simulated_rows`, or the text that is typed.
_LAYOUTS: Sequence[Mapping[str, str]] = (
    {"K": "k", "speed": "tps", "baseline": "base", "acceptance": "rate"},
    {"K": "k", "acceptance": "rate", "length": "al", "speedup": "speedup"},
    {"topk": "2", "K": "16", "speed": "tps", "baseline": "base", "length": "al"},
    {"K": "k", "speed": "tps", "baseline": "base", "speedup": "speedup", "length": "al"},
    {"speed": "tps", "baseline": "base", "speedup": "gain"},
    {"K": "k", "p_min": "0.75", "speed": "tps", "baseline": "base", "acceptance": "share"},
    # The layout for drafts without a fixed K.
    {"speed": "tps", "baseline": "base", "length": "al"},
    {"K": "k", "acceptance": "rate", "latency_s": "s", "regular_latency_s": "base_s"},
    {"K": "k", "acceptance": "rate", "speedup": "speedup"},
    {"K": "k", "length": "al", "ms_per_token": "tpot", "regular_ms_per_token": "base_tpot"},
    {"K": "k", "speed": "tps", "baseline": "base", "acceptance": "rate", "length": "al"},
)
_OF_VARYING_LENGTH = 6
# The layout for changed figures: all figures that a row may have.
_WHOLE = {
    "K": "k", "speed": "tps", "baseline": "base", "speedup": "speedup", "length": "al", "acceptance": "rate",
}  # fmt: skip


def decoded(
    rng: random.Random, k: int, chance: float, length: float, tokens: int, cost: float
) -> dict[str, float]:
    """Simulate the decoding of one prompt, and return counts and times (ms).

    Args:
        k: the most tokens of a proposal.
        chance: the probability that a draft token is accepted.
        length: the mean number of tokens of a proposal if it varies; 0 if all have K tokens.
        tokens: number of tokens of the answer.
        cost: the cost of an iteration, in regular steps.
    """
    step = rng.uniform(9.8, 10.2)
    left, iterations, proposed, tested, accepted = tokens - 1, 0, 0, 0, 0
    while left > 0:
        drafted = min(k, int(rng.expovariate(1 / length)) if length else k, left - 1)
        right = next((place for place in range(drafted) if rng.random() > chance), drafted)
        iterations += 1
        proposed += drafted
        tested += min(right + 1, drafted)
        accepted += right
        left -= right + 1
    return {
        "tokens": tokens,
        "ms": iterations * step * cost * rng.uniform(0.97, 1.03),
        "regular_ms": (tokens - 1) * step,
        "iterations": iterations,
        "accepted": accepted,
        "proposed": proposed,
        "tested": tested,
    }


def simulated_rows(rng: random.Random, varies: bool = False) -> list[Row]:
    """Simulate decoding with several K, and return the figures that people might print, a row for each K.

    Args:
        varies: whether proposals vary in length.
    """
    mean, num_prompts = rng.uniform(0.05, 0.97), rng.choice([1, 5, 10, 40])
    chances = [min(0.99, max(0.02, rng.gauss(mean, 0.1))) for _ in range(num_prompts)]
    answers = [rng.randint(16, 400) for _ in range(num_prompts)]
    fixed, per_token = rng.uniform(1, 1.4), rng.uniform(0.01, 0.3)
    reading_ms = rng.choice([0, 0, 60, 250])
    counts_first = rng.random() < 0.5
    pools = {name: rng.choice(["sum", "mean", "median"]) for name in ("length", "rate", "speed")}
    decimals, digits = rng.choice([1, 2, 3]), rng.choice([0, 1, 2])

    def pooled(name: str, top: list[float], bottom: list[float]) -> float:
        ratios = [one / other for one, other in zip(top, bottom, strict=True)]
        if pools[name] == "sum":
            return sum(top) / sum(bottom)
        return fmean(ratios) if pools[name] == "mean" else median(ratios)

    rows = []
    for k in sorted(rng.sample(range(1, 13), rng.randint(1, 4))):
        length = rng.uniform(1, 4) if varies else 0
        cost = fixed + per_token * k
        runs = [
            decoded(rng, k, chance, length, tokens, cost)
            for chance, tokens in zip(chances, answers, strict=True)
        ]
        column = {name: [run[name] for run in runs] for name in runs[0]}
        tokens = [count - (not counts_first) for count in column["tokens"]]
        ours, regular = ([ms + reading_ms for ms in column[name]] for name in ("ms", "regular_ms"))
        proposed, tested = (
            [max(1, count) for count in column[name]] for name in ("proposed", "tested")
        )
        rate = pooled("rate", column["accepted"], proposed)
        gain = pooled("speed", regular, ours)
        rows.append(
            {
                "k": f"{k}",
                "al": f"{pooled('length', tokens, column['iterations']):.{decimals}f}",
                "rate": f"{100 * rate:.{digits}f}%",
                "tested": f"{100 * pooled('rate', column['accepted'], tested):.{digits}f}%",
                "share": f"{rate:.{decimals}f}",
                "tps": f"{1000 * pooled('speed', tokens, ours):.{digits}f}",
                "base": f"{1000 * pooled('speed', tokens, regular):.{digits}f}",
                "tpot": f"{pooled('speed', ours, tokens):.{decimals}f}",
                "base_tpot": f"{pooled('speed', regular, tokens):.{decimals}f}",
                "speedup": f"{gain:.{decimals}f}x",
                "gain": f"{100 * (gain - 1):+.{digits}f}%",
                "s": f"{fmean(ours) / 1000:.{decimals}f}",
                "base_s": f"{fmean(regular) / 1000:.{decimals}f}",
            }
        )
    return rows


def judged_row(row: Row, layout: Mapping[str, str]) -> list[Check]:
    """The checks of `audit` for a row in a layout. A figure that is rounded to 0 is left out."""
    typed = {name: [row.get(cell, cell)] for name, cell in layout.items()}
    stated = {name: texts for name, texts in typed.items() if re.search("[1-9]", texts[0])}
    return [claim for read in stated_rows(stated) for claim in judge(read)]


def judged_tables(number: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Judge `number` simulated tables. Return how many have each verdict as their worst, and a line for each table that
    is not consistent.
    """
    rng = random.Random(seed)
    verdicts: Counter[str] = Counter()
    accused = []
    for place in range(number):
        index = place % len(_LAYOUTS)
        claims: list[Check] = []
        for row in simulated_rows(rng, index == _OF_VARYING_LENGTH):
            claims += judged_row(row, _LAYOUTS[index])
        worst = max((VERDICTS.index(claim.verdict) for claim in claims), default=0)
        verdicts[VERDICTS[worst]] += 1
        if worst:
            told = next(str(claim) for claim in claims if claim.verdict == VERDICTS[worst])
            accused.append(f"layout {index}: {VERDICTS[worst]}: {told}")
    return verdicts, accused


def swapped(rng: random.Random, row: Row) -> bool:
    """Swap two neighbouring digits of a figure. False if the figure has no two that differ."""
    name = rng.choice(["al", "rate", "tps", "base", "speedup"])
    places = [one for one in re.finditer(r"(?=(\d)(\.?)(\d))", row[name]) if one[1] != one[3]]
    if not places:
        return False
    one = rng.choice(places)
    end = one.start() + 2 + len(one[2])
    row[name] = f"{row[name][: one.start()]}{one[3]}{one[2]}{one[1]}{row[name][end:]}"
    return True


def k_off_by_one(rng: random.Random, row: Row) -> bool:
    other = int(row["k"]) + rng.choice([-1, 1])
    row["k"] = str(other)
    return other >= 1


def other_rate(rng: random.Random, row: Row) -> bool:
    """Replace the rate by the rate of tested tokens. False if the two are equal."""
    is_changed = row["rate"] != row["tested"]
    row["rate"] = row["tested"]
    return is_changed


def too_fast(rng: random.Random, row: Row) -> bool:
    """Replace the speed-up by one above the tokens per iteration."""
    row["speedup"] = f"{float(row['al']) * rng.uniform(1.1, 1.5):.2f}x"
    return True


EDITS: Sequence[Callable[[random.Random, Row], bool]] = (
    swapped,
    k_off_by_one,
    other_rate,
    too_fast,
)


def found_edits(number: int, seed: int = 0) -> dict[str, int]:
    """For each kind of edit, how many of `number` edits `audit` finds, in rows that are consistent without the edit."""
    rng = random.Random(seed)
    found = {}
    for edit in EDITS:
        tried = accused = 0
        while tried < number:
            row = rng.choice(simulated_rows(rng))
            is_honest = all(claim.verdict == "consistent" for claim in judged_row(row, _WHOLE))
            if is_honest and edit(rng, row):
                tried += 1
                accused += any(claim.verdict != "consistent" for claim in judged_row(row, _WHOLE))
        found[edit.__name__] = accused
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=5000, help="that are simulated")
    parser.add_argument("--edits", type=int, default=100, help="of each kind")
    arguments = parser.parse_args()
    verdicts, lines = judged_tables(arguments.tables)
    print(f"{arguments.tables} honest tables: {dict(verdicts)}")
    print(*lines[:10], sep="\n")
    print(f"of {arguments.edits} edits each are accused: {found_edits(arguments.edits)}")


if __name__ == "__main__":
    main()
