"""Computes the figures of runs again from their answers, as docs/numbers.md defines them, and without harness:
python benchmarks/recompute.py outputs/latency/2026-11-24/08-31-46 ...
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd


def drafts(answers: pd.DataFrame) -> dict[str, Any]:
    """Rates over all iterations of these answers; an answer without counts drafted nothing, one token an iteration."""
    has_counts = answers[["num_iterations", "num_proposed"]].notna().any(axis=1)
    reported = answers[has_counts]  # A count that one of them does not report is unknown for all.
    counts = reported[["num_drafting", "num_proposed", "num_accepted"]].sum(skipna=False)
    drafting, proposed, accepted = counts
    decoded = (answers.num_tokens - 1).clip(lower=0)
    iterations = answers.num_iterations.where(has_counts, decoded).sum(skipna=False)
    found = {
        **counts, "num_iterations": iterations, "num_decoded": decoded.sum(), "acceptance_rate": accepted / proposed,
        "mean_acceptance_length": 1 + accepted / drafting, "mean_num_draft_tokens": proposed / iterations,
        "mean_proposed": proposed / drafting, "tokens_per_iteration": np.maximum(1.0, decoded.sum() / iterations),
    }  # fmt: skip
    if reported[reported.num_proposed > 0].tested_by_position.notna().all():
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
    times.time_ms -= after_first * times.time_to_first_token_ms.fillna(0)
    times.tokens -= after_first * times.time_to_first_token_ms.notna()
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


def latency(row: pd.Series, asked: pd.DataFrame) -> dict[str, Any]:
    """The figures of a row, from all answers of its run. Rows of batches have none of requests kept in flight."""
    both = asked[(asked.num_tokens > 0) & asked.error.isna()]
    answers = both[both.arm == row.arm]
    batched = row.batch_size > 1 and pd.isna(row.requests_per_second)
    times, tokens = waits(answers, batched), answers.num_tokens
    per_token = times.time_ms / times.tokens
    seconds = asked[asked.arm == row.arm].drop_duplicates(["moment", "turn"]).lap_ms.sum() / 1000
    arrived = answers[answers.num_arrivals > 0]
    later = arrived.last_token_ms - arrived.time_to_first_token_ms
    p50, p99 = (later[later > 0] / (arrived.num_tokens - 1)).quantile([0.5, 0.99])
    figures: dict[str, Any] = {
        "num_tokens": tokens.sum(), "shortest_answer": tokens.min(), "longest_answer": tokens.max(),
        "num_prompt_tokens": answers.num_prompt_tokens.sum(), "requests_per_second": len(answers) / seconds,
        "ms_per_token": times.time_ms.sum() / times.tokens.sum(), "ms_per_token_std": per_token.std(),
        "ms_per_token_per_answer": per_token.mean(), "tokens_per_second": tokens.sum() / seconds,
        "tokens_per_arrival": arrived.num_tokens.mean() / arrived.num_arrivals.mean(), "measured_s": seconds,
        "time_to_first_token_ms": answers.time_to_first_token_ms.mean(), "time_per_output_token_p50_ms": p50,
        "time_per_output_token_p99_ms": p99, "differing_prompts": answers.divergence_position.notna().sum(),
        "identical_prompts": (answers.compared.notna() & answers.divergence_position.isna()).sum(),
    }  # fmt: skip
    if answers.num_proposed.sum() and pd.isna(row.acceptance_source):
        figures |= drafts(answers)
    for name in row[["speedup", "decode_speedup"]].dropna().index:
        ends = speedup(both, batched, name == "decode_speedup")
        figures |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
    return figures


def evaluation(row: pd.Series, asked: pd.DataFrame) -> dict[str, Any]:
    """The figures of a row about one seed: accuracy with Wald's bounds."""
    own = asked[(asked.arm == row.arm) & (asked.seed == int(row.seed))]
    share = own.correct.mean()
    bound = 1.959963984540 * np.sqrt(share * (1 - share) / len(own))
    return {"accuracy": share, "num_correct": own.correct.sum(), "num_tokens": own.num_tokens.sum(),
            "wald_low": share - bound, "wald_high": share + bound}  # fmt: skip


def differences(row: Any, figures: dict[str, Any]) -> Iterator[str]:
    """Yield the figures that a row has otherwise, in words; not bounds that rare rejections moved on purpose."""
    for name, figure in figures.items():
        stored = np.array(json.loads(row[name]) if isinstance(row[name], str) else row[name], float)
        tolerance = 1e-4 if name.endswith("position") else 1e-9  # Rates have four decimals.
        if name.startswith(("speedup_", "decode_speedup_")):
            # The row's ends are of another method: they may differ by this share of the width in logs.
            tolerance += 0.75 * np.nan_to_num(np.log(row.speedup_high / row.speedup_low))
        is_widened = "unseen" in str(row.get("speedup_covers")) and name.endswith(("_low", "_high"))
        is_close = np.allclose(stored, np.array(figure, float), tolerance, tolerance, True)
        if not (np.isnan(stored).all() or is_widened or is_close):
            yield f"{row.run} {row.arm} {name}: the row has {stored}, its answers {figure}"


def answers_of(row: pd.Series, file: Path) -> pd.DataFrame:
    """The answers of a row's run, from the file's directory or, if a sweep lists or reuses the run, from the run's."""
    own = Path(str(row.get("directory")))
    files = [at / f"{file.stem}_prompts.csv" for at in (file.parent, file.parent / own.name, own)]
    found = [pd.read_csv(each).query(f"run == '{row.run}'") for each in files if each.exists()]
    return next((answers for answers in found if len(answers)), pd.DataFrame())


def main(directories: list[str]) -> int:
    """Check the rows below these directories; 1 where a figure differs, or where none or not all are computed."""
    num_figures, num_combined, others = 0, 0, []
    wrong = [f"{each}: no such directory" for each in directories if not Path(each).is_dir()]
    for kind, figures_of in (("latency", latency), ("eval", evaluation)):
        for file in [f for each in directories for f in Path(each).rglob(f"{kind}.csv")]:
            for _, row in pd.read_csv(file).query("num_tokens > 0").iterrows():
                answers = answers_of(row, file)
                if "all" in (row.get("repeat"), row.get("seed")) or row.get("num_resumed", 0) > 0:
                    num_combined += 1
                elif answers.empty:
                    wrong.append(f"{row.run} {row.arm}: its answers are not found")
                else:
                    figures = figures_of(row, answers)
                    others.extend(f"{kind}." + row.dropna().index.difference([*figures]))
                    num_figures += row[[*figures]].count()
                    wrong += differences(row, figures)
    print("Columns that were not computed, of some row at least:", *sorted({*others}))
    print(f"{num_combined} rows with answers of several runs or seeds were not computed")
    print(*wrong, f"{num_figures} figures computed from answers, {len(wrong)} errors", sep="\n")
    return int(bool(wrong) or not num_figures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
