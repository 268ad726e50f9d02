"""`audit` on honest tables: does it accuse one, and does it find what was changed?

Without a directory, simulated decoding fills 5,000 tables of 12 layouts, as people print them: means, medians or ratios
of sums, an answer's first token counted or not, decoding alone or whole requests, 0 to 3 decimals.

With directories, runs of `latency` give the rows. For each table their prompts are drawn again with replacement, alike
for both arms and every K, and its figures are computed as `latency` computes them, and printed with the decimals that
people print. In half of the tables answers end after 0.2 to 1 of their tokens, so that means of prompts differ from
ratios of sums.

    harness latency -m draft=tiny_draft,tiny_eagle3,tiny_dflash,lookup K=2,4,6 temperature=0,1 num_prompts=10 tokens=128
    python benchmarks/audit.py multirun/latency/DAY/TIME
    python benchmarks/audit.py
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy
import pandas as pd

from harness.commands.audit.judge import VERDICTS, judge
from harness.commands.audit.texts import read_text

COLUMNS = (
    "draft", "K", "temperature", "num prompts", "tokens", "batch size", "regular ms/token", "ms/token", "regular tok/s",
    "tok/s", "speed-up", "tokens per iteration", "proposed per iteration", "accepted",
)  # fmt: skip
SHORT = ("draft", "K", "num prompts", "speed-up", "tokens per iteration", "accepted")
DIGITS = (
    "regular ms/token",
    "ms/token",
    "regular tok/s",
    "tok/s",
    "speed-up",
    "tokens per iteration",
    "accepted",
)


@dataclass
class Run:
    draft: str
    k: int
    temperature: float
    tokens: int
    prompts: pd.DataFrame  # one row per prompt: counts and times of both arms


def runs_below(directory: Path) -> list[Run]:
    sweep = pd.concat(map(pd.read_csv, directory.glob("**/latency.csv")))
    speculative = sweep[sweep.arm == "speculative"].drop_duplicates("run").set_index("run")
    runs = []
    for file in sorted(directory.glob("**/latency_prompts.csv")):
        prompts = pd.read_csv(file)
        if prompts.run[0] not in speculative.index:
            continue
        row = speculative.loc[prompts.run[0]]
        arms = {arm: rows.set_index("prompt_index") for arm, rows in prompts.groupby("arm")}
        ours = arms["speculative"]
        counts = pd.DataFrame(
            {
                "tokens": ours.num_tokens,
                "ms": ours.time_ms,
                "regular_ms": arms["regular"].time_ms,
                "iterations": ours.num_iterations,
                "drafting": [sum(json.loads(one)) for one in ours.acceptance_histogram],
                "accepted": [
                    sum(place * times for place, times in enumerate(json.loads(one)))
                    for one in ours.acceptance_histogram
                ],
            }
        )
        counts["proposed"] = ours.mean_proposed * counts.drafting
        counts["tested"] = (counts.accepted / ours.conditional_acceptance_rate).fillna(
            counts.drafting
        )
        runs.append(
            Run(
                row.draft,
                int(row.num_draft_tokens),
                row.temperature,
                int(row.max_new_tokens),
                counts,
            )
        )
    return runs


def decoded(
    rng: random.Random, k: int, chance: float, length: float, tokens: int, cost: float
) -> dict[str, float]:
    """Counts and times (ms) of one prompt: a draft of up to K tokens, each accepted with a chance.

    Args:
        length: mean tokens of a draft that varies; 0 for K.
        cost: of an iteration, in regular steps.
    """
    step = rng.uniform(9.8, 10.2)
    left, iterations, drafting, proposed, tested, accepted = tokens - 1, 0, 0, 0, 0, 0
    while left > 0:
        drafted = min(k, int(rng.expovariate(1 / length)) if length else k, left - 1)
        right = next((place for place in range(drafted) if rng.random() > chance), drafted)
        iterations += 1
        drafting += drafted > 0
        proposed += drafted
        tested += min(right + 1, drafted)
        accepted += right
        left -= right + 1
    return {
        "tokens": tokens,
        "ms": iterations * step * cost * rng.uniform(0.97, 1.03),
        "regular_ms": (tokens - 1) * step,
        "iterations": iterations,
        "drafting": drafting,
        "accepted": accepted,
        "proposed": proposed,
        "tested": tested,
    }


def simulated_table(rng: random.Random, layout: int) -> str:
    """A table as somebody would print it of decoding that was simulated."""
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
        length = rng.uniform(1, 4) if layout == 6 else 0
        cost = fixed + per_token * k
        runs = [
            decoded(rng, k, chance, length, tokens, cost)
            for chance, tokens in zip(chances, answers, strict=True)
        ]
        column = {name: [run[name] for run in runs] for name in runs[0]}
        tokens = [count - (not counts_first) for count in column["tokens"]]
        ours, regular = ([ms + reading_ms for ms in column[name]] for name in ("ms", "regular_ms"))
        proposed = [max(1, count) for count in column["proposed"]]
        rate = pooled("rate", column["accepted"], proposed)
        gain, change = pooled("speed", regular, ours), fmean(ours) / fmean(regular) - 1
        rows.append(
            {
                "k": k,
                "al": f"{pooled('length', tokens, column['iterations']):.{decimals}f}",
                "own": f"{pooled('length', column['accepted'], column['iterations']):.{decimals}f}",
                "rate": f"{100 * rate:.{digits}f}%",
                "share": f"{rate:.{decimals}f}",
                "tps": f"{1000 * pooled('speed', tokens, ours):.{digits}f}",
                "base": f"{1000 * pooled('speed', tokens, regular):.{digits}f}",
                "tpot": f"{pooled('speed', ours, tokens):.{decimals}f}",
                "base_tpot": f"{pooled('speed', regular, tokens):.{decimals}f}",
                "speedup": f"{gain:.{decimals}f}x",
                "gain": f"{100 * (gain - 1):+.{digits}f}%",
                "s": f"{fmean(ours) / 1000:.{decimals}f}",
                "base_s": f"{fmean(regular) / 1000:.{decimals}f}",
                "fewer": f"{100 * change:+.{digits}f}%",
            }
        )
    heading, regular_row, row = _LAYOUTS[layout]
    lines = [heading, regular_row.format(**rows[0]), *(row.format(**cells) for cells in rows)]
    return "\n".join(line for line in lines if line)


# Heading, the row of the regular arm if there is one, and a row of K.
_LAYOUTS = (
    ("n-max,mean tps,accept", "0,{base},", "{k},{tps},{rate}"),
    ("γ,acceptance rate,τ,speed-up", "0,,,1.00x", "{k},{rate},{al},{speedup}"),
    ("steps,topk,num_draft_tokens,throughput (tok/s),accept_length", "0,0,0,{base},1.0", "{k},2,16,{tps},{al}"),
    ("category,K,baseline tok/s,tok/s,speedup,tokens/step", "", "code,{k},{base},{tps},{speedup},{al}"),
    ("mode,tok/s,gain", "plain,{base},", "MTP n={k},{tps},{gain}"),
    ("n_max,p_min,tok/s,accept", "0,,{base},", "{k},0.75,{tps},{share}"),
    ("draft,K,AL,tok/s", "none,,,{base}", "ngram,{k},{al},{tps}"),
    ("config,K,acceptance,latency (s),vs baseline", "baseline,0,,{base_s},", "EAGLE-3,{k},{rate},{s},{fewer}"),
    ("K   accept rate   baseline tok/s   spec tok/s", "", "{k}   {rate}   {base}   {tps}"),
    ("K,mean accepted length,acceptance rate,speedup", "0,,,1.00x", "{k},{own},{rate},{speedup}"),
    ("draft,K,AL,TPOT ms", "vanilla,,,{base_tpot}", "EAGLE,{k},{al},{tpot}"),
    ("in flight,K,output tok/s,baseline tok/s,accept rate,tokens/step", "", "1,{k},{tps},{base},{rate},{al}"),
)  # fmt: skip


def judged_tables(number: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """The worst verdict on each of a number of simulated tables, and what was said of accused ones."""
    rng = random.Random(seed)
    verdicts: Counter[str] = Counter()
    accused = []
    for place in range(number):
        text = simulated_table(rng, place % len(_LAYOUTS))
        reading = read_text("table", text, {}, {})
        claims = [claim for row in reading.rows for claim in judge(row)]
        worst = max((VERDICTS.index(claim.verdict) for claim in claims), default=0)
        verdicts[VERDICTS[worst]] += 1
        if VERDICTS[worst] in ("unlikely", "impossible"):
            told = next(str(claim) for claim in claims if claim.verdict == VERDICTS[worst])
            accused.append(f"layout {place % len(_LAYOUTS)}: {VERDICTS[worst]}: {told}")
    return verdicts, accused


def table_of(runs: list[Run], drawn: list[int], lengths: numpy.ndarray) -> list[dict[str, str]]:
    """The rows of a table, one per K, with `tested`, the rate of the other definition."""
    rows = []
    for run in sorted(runs, key=lambda run: run.k):
        prompts = run.prompts.iloc[drawn].mul(lengths, axis=0)
        total = prompts.sum()
        regular, ours = ((prompts[name] / prompts.tokens).mean() for name in ("regular_ms", "ms"))
        again = numpy.random.default_rng(0).integers(len(prompts), size=(1000, len(prompts)))
        ratios = prompts.regular_ms.to_numpy()[again].sum(1) / prompts.ms.to_numpy()[again].sum(1)
        low, high = numpy.quantile(ratios, [0.025, 0.975])
        row = {
            "draft": run.draft,
            "K": str(run.k),
            "temperature": f"{run.temperature:g}",
            "num prompts": str(len(drawn)),
            "tokens": str(run.tokens),
            "batch size": "1",
            "regular ms/token": f"{regular:.2f}",
            "ms/token": f"{ours:.2f}",
            "regular tok/s": f"{1000 * total.tokens / total.regular_ms:.1f}",
            "tok/s": f"{1000 * total.tokens / total.ms:.1f}",
            "speed-up": f"{regular / ours:.2f}× ({low:.2f} to {high:.2f})",
            "tokens per iteration": f"{1 + total.accepted / total.iterations:.2f}",
            "proposed per iteration": f"{total.proposed / total.iterations:.2f}",
            "accepted": f"{100 * total.accepted / total.proposed:.1f} %",
            "tested": f"{100 * total.accepted / total.tested:.1f} %",
        }
        rows.append(row)
    return rows


def accusations(rows: list[dict[str, str]], columns: tuple[str, ...]) -> list[str]:
    """What `audit` says against a table."""
    lines = [columns, ["---"] * len(columns), *([row[name] for name in columns] for row in rows)]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    reading = read_text("table", text, {}, {})
    claims = [claim for row in reading.rows for claim in judge(row)]
    return [
        f"{claim.verdict}: {claim}"
        for claim in claims
        if claim.verdict in ("impossible", "unlikely")
    ]


def swapped(rng: random.Random, rows: list[dict[str, str]], columns: tuple[str, ...]) -> str | None:
    """Two neighbouring digits that differ change places in one figure."""
    row = rng.choice(rows)
    name = rng.choice([name for name in DIGITS if name in columns])
    figure, times, interval = row[name].partition("×")
    places = [one for one in re.finditer(r"(?=(\d)(\.?)(\d))", figure) if one[1] != one[3]]
    if not places:
        return None
    one = rng.choice(places)
    end = one.start() + 2 + len(one[2])
    row[name] = f"{figure[: one.start()]}{one[3]}{one[2]}{one[1]}{figure[end:]}{times}{interval}"
    return f"{name} {figure} -> {row[name]}"


def k_off_by_one(
    rng: random.Random, rows: list[dict[str, str]], columns: tuple[str, ...]
) -> str | None:
    row = rng.choice(rows)
    k = int(row["K"])
    other = k + rng.choice([-1, 1])
    if other < 1 or str(other) in {one["K"] for one in rows}:
        return None
    row["K"] = str(other)
    return f"K {k} -> {other}"


def other_rate(
    rng: random.Random, rows: list[dict[str, str]], columns: tuple[str, ...]
) -> str | None:
    row = rng.choice(rows)
    before, row["accepted"] = row["accepted"], row["tested"]
    return None if before == row["accepted"] else f"accepted {before} -> {row['accepted']}"


def too_fast(
    rng: random.Random, rows: list[dict[str, str]], columns: tuple[str, ...]
) -> str | None:
    row = rng.choice(rows)
    before = row["speed-up"]
    times = (
        float(row["tokens per iteration"])
        * rng.uniform(1.05, 1.5)
        / float(before.partition("×")[0])
    )
    # The whole claim, with its interval.
    row["speed-up"] = re.sub(r"[\d.]+", lambda number: f"{float(number[0]) * times:.2f}", before)
    return f"speed-up {before} -> {row['speed-up']}"


EDITS = (swapped, k_off_by_one, other_rate, too_fast)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directories", type=Path, nargs="*", help="of sweeps")
    parser.add_argument("--tables", type=int, default=5000, help="that are simulated")
    parser.add_argument("--honest", type=int, default=200)
    parser.add_argument("--edits", type=int, default=25, help="of each kind")
    arguments = parser.parse_args()
    if not arguments.directories:
        verdicts, lines = judged_tables(arguments.tables)
        print(f"{arguments.tables} honest tables: {dict(verdicts)}")
        by_layout = Counter(line.partition(":")[0] for line in lines)
        print(f"accused: {dict(by_layout)}")
        print(*lines[:10], sep="\n")
        return
    rng = random.Random(0)
    curves = defaultdict(list)
    for directory in arguments.directories:
        for run in runs_below(directory):
            curves[run.draft, run.temperature, run.tokens].append(run)
    print(f"{sum(map(len, curves.values()))} runs, {len(curves)} curves over K")

    def drawn_table() -> list[dict[str, str]]:
        runs = curves[rng.choice(sorted(curves))]
        num_prompts = len(runs[0].prompts)
        drawn = [rng.randrange(num_prompts) for _ in range(num_prompts)]
        shortest = rng.choice([0.2, 1])
        lengths = numpy.array([rng.uniform(shortest, 1) for _ in drawn])
        return table_of(runs, drawn, lengths)

    for name, columns in (("14 columns", COLUMNS), ("6 columns", SHORT)):
        accused = [
            found for _ in range(arguments.honest) if (found := accusations(drawn_table(), columns))
        ]
        print(f"\n{name}: {len(accused)} of {arguments.honest} honest tables are accused")
        for found in accused[:5]:
            print("  ", found[0])
        for edit in EDITS:
            outcomes: Counter[str] = Counter()
            while outcomes.total() < arguments.edits:
                rows = table = drawn_table()
                what = edit(rng, rows, columns)
                if what is None:
                    continue
                found = accusations(table, columns)
                outcomes["accused" if found else "missed"] += 1
                if not found:
                    print(f"   missed: {rows[0]['draft']}, {what}")
            print(f"{edit.__name__}: {dict(outcomes)} of {arguments.edits}")


if __name__ == "__main__":
    main()
