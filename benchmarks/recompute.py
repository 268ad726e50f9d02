"""Computes the figures of runs again from the answers in their prompts files, and says which differ: for a person who
trusts nobody. Definitions are in docs/numbers.md; nothing of harness is imported. Exit code 1 where a figure differs.

    python benchmarks/recompute.py outputs/latency/2026-11-24/08-31-46 ...
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd


def drafts(answers: pd.DataFrame) -> dict[str, Any]:
    """Rates over all iterations of these answers; an answer without counts drafted nothing, one token an iteration."""
    reported = answers[answers.num_iterations.notna()]
    # A count that one answer does not report is unknown for all.
    counts = reported[["num_drafting", "num_proposed", "num_accepted"]].sum(skipna=False)
    drafting, proposed, accepted = counts
    decoded = (answers.num_tokens - 1).clip(lower=0)
    iterations = answers.num_iterations.fillna(decoded).sum()
    found = {
        **counts, "num_iterations": iterations, "acceptance_rate": accepted / proposed,
        "mean_acceptance_length": 1 + accepted / drafting, "mean_proposed": proposed / drafting,
        "mean_num_draft_tokens": proposed / iterations, "num_decoded": decoded.sum(),
        "tokens_per_iteration": max(1.0, decoded.sum() / iterations),
    }  # fmt: skip
    if reported[reported.num_proposed > 0].tested_by_position.notna().all():
        # The lists of all answers, added up place by place.
        tested = reported.tested_by_position.dropna().map(json.loads).apply(pd.Series).sum()
        histogram = reported.acceptance_histogram.dropna().map(json.loads).apply(pd.Series).sum()
        # A position's token was accepted in the iterations that accepted more tokens than come before it.
        accepted_at = (histogram.sum() - histogram.cumsum()).reindex(tested.index, fill_value=0)
        found |= {"tested_by_position": tested, "acceptance_by_position": accepted_at / tested,
                  "acceptance_histogram": histogram, "marginal_acceptance_by_position": accepted_at / drafting,
                  "conditional_acceptance_rate": accepted / tested.sum()}  # fmt: skip
    return found


def waits(answers: pd.DataFrame, batched: bool) -> pd.DataFrame:
    """Milliseconds and tokens of each answer; a batch shares one time, and is one answer of mean length."""
    keys = ["arm", "moment", "turn"] if batched else ["arm", "prompt_index"]
    together = answers.groupby(keys, sort=False, dropna=False)
    times = together[["time_ms", "time_to_first_token_ms", "unit"]].first()
    return times.assign(tokens=together.num_tokens.mean())


def speedup(answers: pd.DataFrame, batched: bool, after_first: bool) -> tuple[float, float, float]:
    """Regular over speculative time per token, on prompts that both answered; ends by a percentile bootstrap."""
    both = answers.groupby("prompt_index").arm.nunique() == 2
    times = waits(answers[answers.prompt_index.map(both)], batched)
    if after_first:
        times.time_ms -= times.time_to_first_token_ms.fillna(0)
        times.tokens -= times.time_to_first_token_ms.notna()
    sums = times.groupby(["arm", "unit"])[["time_ms", "tokens"]].sum()
    # Arms, units, and time or tokens. Both arms have the same units.
    arms = sums.to_numpy().reshape(2, -1, 2)
    arms = arms[:, (arms > 0).all(axis=(0, 2))]
    number = arms.shape[1]
    drawn = np.random.default_rng(0).integers(0, number, (4000, number))
    # The first set of units are all of them, each once.
    totals = arms[:, np.concatenate([[np.arange(number)], drawn])].sum(axis=2)
    per_token = totals[..., 0] / totals[..., 1]
    ratios = per_token[0] / per_token[1]
    return ratios[0], *np.quantile(ratios[1:], (0.025, 0.975))


def latency(rows: pd.DataFrame, prompts: pd.DataFrame) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the rows of single runs, each with its figures. Rows of batches have none of requests kept in flight."""
    for _, row in rows[rows.num_tokens > 0].iterrows():
        asked = prompts[prompts.run == row.run]
        both = asked[(asked.num_tokens > 0) & asked.error.isna()]
        answers = both[both.arm == row.arm]
        batched = row.batch_size > 1 and pd.isna(row.requests_per_second)
        times, tokens = waits(answers, batched), answers.num_tokens
        per_token = times.time_ms / times.tokens
        laps = asked[asked.arm == row.arm].groupby(["moment", "turn"], dropna=False).lap_ms.first()
        seconds = laps.sum() / 1000
        arrived = answers[answers.num_arrivals > 0]
        later = arrived.last_token_ms - arrived.time_to_first_token_ms
        p50, p99 = (later[later > 0] / (arrived.num_tokens - 1)).quantile([0.5, 0.99])
        figures: dict[str, Any] = {
            "num_tokens": tokens.sum(), "shortest_answer": tokens.min(), "longest_answer": tokens.max(),
            "num_prompt_tokens": answers.num_prompt_tokens.sum(), "requests_per_second": len(answers) / seconds,
            "ms_per_token": times.time_ms.sum() / times.tokens.sum(), "ms_per_token_std": per_token.std(),
            "ms_per_token_per_answer": per_token.mean(), "tokens_per_second": tokens.sum() / seconds,
            "time_to_first_token_ms": answers.time_to_first_token_ms.mean(), "measured_s": seconds,
            "identical_prompts": (answers.compared.notna() & answers.divergence_position.isna()).sum(),
            "differing_prompts": answers.divergence_position.notna().sum(),
            "tokens_per_arrival": arrived.num_tokens.mean() / arrived.num_arrivals.mean(),
            "time_per_output_token_p50_ms": p50, "time_per_output_token_p99_ms": p99,
        }  # fmt: skip
        if answers.num_proposed.sum() and pd.isna(row.acceptance_source):
            figures |= drafts(answers)
        for name in row[["speedup", "decode_speedup"]].dropna().index:
            ends = speedup(both, batched, name == "decode_speedup")
            figures |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
        yield row, figures


def evaluation(rows: pd.DataFrame, answers: pd.DataFrame) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the rows of one seed, each with its figures: accuracy with Wald's bounds."""
    for _, row in rows.iterrows():
        asked = answers[(answers.run == row.run) & (answers.arm == row.arm)]
        own = asked[asked.seed == int(row.seed)]
        share = own.correct.mean()
        bound = NormalDist().inv_cdf(0.975) * np.sqrt(share * (1 - share) / len(own))
        yield row, {"accuracy": share, "num_correct": own.correct.sum(), "num_tokens": own.num_tokens.sum(),
                    "wald_low": share - bound, "wald_high": share + bound}  # fmt: skip


def differences(row: Any, figures: dict[str, Any]) -> Iterator[str]:
    """Yield the figures that a row has otherwise, in words; those that it does not have are left out."""
    for name, figure in figures.items():
        stored = np.array(json.loads(row[name]) if isinstance(row[name], str) else row[name], float)
        tolerance = 1e-4 if name.endswith("position") else 1e-9  # Rates have four decimals.
        if name.startswith(("speedup_", "decode_speedup_")):
            # The row's ends are of another method: they may differ by this share of the width in logs.
            tolerance += 0.75 * np.nan_to_num(np.log(row.speedup_high / row.speedup_low))
        # Rare rejections widen an interval on purpose.
        is_widened = "unseen" in str(row.get("speedup_covers")) and name.endswith(("_low", "_high"))
        is_close = np.allclose(stored, np.array(figure, float), tolerance, tolerance, True)
        if not (np.isnan(stored).all() or is_widened or is_close):
            yield f"{row.run} {row.arm} {name}: the row has {stored}, its answers {figure}"


def main(directories: list[str]) -> int:
    """Check the runs below these directories; 1 where a figure differs, or none was computed."""
    num_figures, num_combined, wrong = 0, 0, []
    for kind, figures_of in (("latency", latency), ("eval", evaluation)):
        for file in [f for each in directories for f in Path(each).rglob(f"{kind}.csv")]:
            rows = pd.read_csv(file)
            combined = rows.filter(["repeat", "seed"]).eq("all").any(axis=1)
            combined |= rows.get("num_resumed", 0) > 0
            num_combined += combined.sum()
            answers = file.with_name(f"{kind}_prompts.csv")
            found = figures_of(rows[~combined], pd.read_csv(answers)) if answers.exists() else ()
            for row, figures in found:
                others = row.dropna().index.difference([*figures])
                print(f"{row.run} {row.arm}: columns that are not computed:", *others)
                num_figures += row[[*figures]].count()
                wrong += differences(row, figures)
    print(*wrong, f"{num_figures} figures computed from answers, {len(wrong)} differ", sep="\n")
    print(f"{num_combined} rows with answers of several runs or seeds were not computed")
    return int(bool(wrong) or not num_figures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
