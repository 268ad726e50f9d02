"""Recomputes the figures of runs from the answers in their prompts files, and prints the figures that differ.

It is an independent check: nothing of harness is imported. The definitions are in docs/numbers.md.

    python benchmarks/recompute.py outputs/latency/2026-11-24/08-31-46 ...

Figures of a row that do not follow from answers, such as facts about the machine, are listed but not checked. The exit
code is 1 if a figure differs.
"""

import json
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

# The bounds of intervals may differ by this share of the width (in logarithms), because the bootstrap used here is not
# the method of harness.
OF_THE_WIDTH = 0.75
Figures = list[tuple[Any, dict[str, Any]]]  # rows, each with its figures by name


def place_sums(cells: pd.Series) -> np.ndarray:
    """The sum, element by element, of the lists in cells. Shorter lists are padded with zeros."""
    lists = [json.loads(cell) for cell in cells.dropna()]
    longest = max(map(len, lists), default=0)
    return np.sum([np.pad(entries, (0, longest - len(entries))) for entries in lists], axis=0)


def drafts(answers: pd.DataFrame) -> dict[str, Any]:
    """Rates over all iterations of these answers. An answer without counts is one without drafts: each of its
    iterations yielded one token.
    """
    reported = answers[answers.num_iterations.notna()]
    # If one answer does not report a count, the sum of this count is unknown.
    counts = reported[["num_drafting", "num_proposed", "num_accepted"]].sum(skipna=False)
    drafting, proposed, accepted = counts
    decoded = (answers.num_tokens - 1).clip(lower=0)
    iterations = answers.num_iterations.fillna(decoded).sum()
    found = {
        "acceptance_rate": accepted / proposed, "mean_acceptance_length": 1 + accepted / drafting,
        "mean_proposed": proposed / drafting, "mean_num_draft_tokens": proposed / iterations,
        "tokens_per_iteration": max(1.0, decoded.sum() / iterations),
    }  # fmt: skip
    if reported[reported.num_proposed > 0].tested_by_position.notna().all():
        tested = place_sums(reported.tested_by_position)
        histogram = place_sums(reported.acceptance_histogram)
        accepted_at = np.pad(np.cumsum(histogram[::-1])[::-1][1:], (0, len(tested)))[: len(tested)]
        found["conditional_acceptance_rate"] = accepted / tested.sum()
        with np.errstate(invalid="ignore"):
            found["acceptance_by_position"] = accepted_at / tested
        found["marginal_acceptance_by_position"] = accepted_at / drafting
    return found


def waits(answers: pd.DataFrame, batched: bool, after_first: bool = False) -> pd.DataFrame:
    """The milliseconds and tokens of each answer. A batch has one time, and counts as one answer with the mean number
    of tokens.

    Args:
        after_first: whether to leave out the first token and the time to it.
    """
    together = answers.groupby(
        ["moment", "turn"] if batched else "prompt_index", sort=False, dropna=False
    )
    found = pd.DataFrame({"ms": together.time_ms.first(), "tokens": together.num_tokens.mean()})
    found["unit"] = together.unit.first()
    if after_first:
        first_ms = together.time_to_first_token_ms.first()
        found.ms -= first_ms.fillna(0)
        found.tokens -= first_ms.notna()
    return found


def speedup(answers: pd.DataFrame, batched: bool, after_first: bool) -> tuple[float, float, float]:
    """The regular time per token divided by the speculative one, over prompts that both arms answered; and the bounds
    of its interval, by a percentile bootstrap.
    """
    both = answers.groupby("prompt_index").arm.nunique() == 2
    answered = answers[answers.prompt_index.map(both)]
    regular, speculative = (
        waits(answered[answered.arm == arm], batched, after_first).groupby("unit").sum()
        for arm in ("regular", "speculative")
    )
    kept = (regular.min(axis=1) > 0) & (speculative.min(axis=1) > 0)
    arms = np.stack([regular[kept], speculative[kept]])
    number = arms.shape[1]
    drawn = np.random.default_rng(0).integers(0, number, (4000, number))
    # The first sum is over all units, each once; the others are over drawn units.
    sums = arms[:, np.concatenate([[np.arange(number)], drawn])].sum(axis=2)
    per_token = sums[..., 0] / sums[..., 1]
    ratios = per_token[0] / per_token[1]
    return ratios[0], *np.quantile(ratios[1:], (0.025, 0.975))


def latency(rows: pd.DataFrame, prompts: pd.DataFrame) -> Figures:
    """The rows of `latency` for single runs, with their recomputed figures."""
    found = []
    for _, row in rows[rows["repeat"].astype(str) != "all"].iterrows():
        asked = prompts[prompts.run == row.run]
        both = asked[(asked.num_tokens > 0) & asked.error.isna()]
        answers = both[both.arm == row.arm]
        if answers.empty:
            continue
        served = pd.notna(row.requests_per_second)
        batched = row.batch_size > 1 and not served
        times, tokens = waits(answers, batched), answers.num_tokens
        per_token = times.ms / times.tokens
        laps = asked[asked.arm == row.arm].groupby(["moment", "turn"], dropna=False).lap_ms.first()
        seconds = laps.sum() / 1000
        figures: dict[str, Any] = {
            "num_tokens": tokens.sum(), "shortest_answer": tokens.min(), "longest_answer": tokens.max(),
            "num_prompt_tokens": answers.num_prompt_tokens.sum(), "measured_s": seconds,
            "ms_per_token": times.ms.sum() / times.tokens.sum(), "ms_per_token_std": per_token.std(),
            "ms_per_token_per_answer": per_token.mean(), "tokens_per_second": tokens.sum() / seconds,
            "time_to_first_token_ms": answers.time_to_first_token_ms.mean(),
        }  # fmt: skip
        if served:
            arrived = answers[answers.num_arrivals > 0]
            after_first = (arrived.last_token_ms - arrived.time_to_first_token_ms).where(
                lambda ms: ms > 0
            )
            p50, p99 = (after_first / (arrived.num_tokens - 1)).quantile([0.5, 0.99])
            late = 1 - arrived.last_token_ms.sum() / arrived.time_ms.sum()
            figures |= {
                "requests_per_second": len(answers) / seconds, "share_after_last_token": late,
                "tokens_per_arrival": arrived.num_tokens.sum() / arrived.num_arrivals.sum(),
                "time_per_output_token_p50_ms": p50, "time_per_output_token_p99_ms": p99,
            }  # fmt: skip
        if answers.num_proposed.sum() and pd.isna(row.acceptance_source):
            figures |= drafts(answers)
        if answers.compared.notna().any():
            figures["differing_prompts"] = answers.divergence_position.notna().sum()
            figures["identical_prompts"] = (
                answers.compared.notna().sum() - figures["differing_prompts"]
            )
        for name in ("speedup", "decode_speedup"):
            if pd.notna(row[name]):
                ends = speedup(both, batched, name == "decode_speedup")
                figures |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
        found.append((row, figures))
    return found


def evaluation(rows: pd.DataFrame, answers: pd.DataFrame) -> Figures:
    """The rows of `eval` for single seeds, with their recomputed figures: accuracy, and the bounds of Wald's method."""
    found = []
    for _, row in rows[rows.seed.astype(str) != "all"].iterrows():
        own = answers[(answers.arm == row.arm) & (answers.seed == int(row.seed))]
        share = own.correct.mean()
        bound = NormalDist().inv_cdf(0.975) * np.sqrt(share * (1 - share) / len(own))
        figures = {"accuracy": share, "num_correct": own.correct.sum(), "num_tokens": own.num_tokens.sum(),
                   "wald_low": max(0, share - bound), "wald_high": min(1, share + bound)}  # fmt: skip
        found.append((row, figures))
    return found


def differences(row: Any, figures: dict[str, Any]) -> list[str]:
    """A line for each figure that differs between a row and its answers. Figures that the row lacks are left out."""
    found = []
    for name, figure in figures.items():
        stored = np.array(json.loads(row[name]) if isinstance(row[name], str) else row[name], float)
        # Rates by position are stored with four decimals.
        tolerance = 1e-4 if name.endswith("position") else 1e-9
        if name.startswith(("speedup_", "decode_speedup_")):
            tolerance += OF_THE_WIDTH * np.nan_to_num(np.log(row.speedup_high / row.speedup_low))
        # If rejections are rare, harness widens the interval on purpose.
        is_widened = "unseen" in str(row.get("speedup_covers")) and name.endswith(("_low", "_high"))
        is_close = np.allclose(stored, np.array(figure, float), tolerance, tolerance, True)
        if not (np.isnan(stored).all() or is_widened or is_close):
            found.append(f"{row.run} {row.arm} {name}: the row has {stored}, its answers {figure}")
    return found


def main(directories: list[str]) -> int:
    """Check the runs in these directories and below. Return 1 if a figure differs, or if none was computed."""
    num_figures, wrong = 0, []
    for kind, figures_of in (("latency", latency), ("eval", evaluation)):
        for file in [
            path for each in directories for path in Path(each).rglob(f"{kind}_prompts.csv")
        ]:
            for row, figures in figures_of(
                pd.read_csv(file.with_name(f"{kind}.csv")), pd.read_csv(file)
            ):
                facts = row.dropna().index.difference([*figures])
                print(
                    f"{row.run} {row.arm}: {len(figures)} figures computed; not from answers:",
                    *facts,
                )
                num_figures += len(figures)
                wrong += differences(row, figures)
    print(*wrong, f"{num_figures} figures computed from answers, {len(wrong)} differ", sep="\n")
    return int(bool(wrong) or not num_figures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
