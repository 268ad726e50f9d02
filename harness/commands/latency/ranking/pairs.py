"""Many runs of `latency` as a frame, a row per run: which runs may be ranked together, and which K is the best."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pandas as pd

from harness.reporting.names import distinct_names
from harness.reporting.words import called, labels
from harness.results.runs import Run
from harness.results.schema import NO_VERDICT, RunnerNames
from harness.results.verdict import verdict_of, why_no_ranking

# Columns in which rows must be equal for their regular arms to do the same work. A method may need
# another runner, placement and rule.
CONDITIONS = (
    "model quantization dtype devices engine server regular_url temperature top_k top_p batch_size request_rate"
    " max_new_tokens ignore_eos prompts weights num_threads"
).split()


def latency_pairs(runs: Sequence[Run]) -> pd.DataFrame:
    """The pairs of each model below each other, the fastest first, and made-up ones after all others.

    Made up are random weights and synthetic acceptance. Runs of one pair are ordered by load and
    then by K, ascending: 30B with 7B at K=2 and 4 (2.4×), then 13B with 7B at batch size 1 and 4
    (2.1×).

    Returns:
        A frame with these columns; empty without runs.

        run, regular, row: the run, the row of its regular arm, and that of its speculative one; in a
            run without a draft the regular one.
        name: among the pairs of the frame; `model`, `draft` and `method` are parts of it.
        k, k_order: K as it was set (a number, `auto` or None), and a number to sort by: inf for `auto`, 0 for None.
        load: requests per second where they are sent at a rate, else `batch_size`.
        real: neither random weights nor synthetic acceptance.
        partial: whether the run failed or was stopped, so that its figures cover a part of the prompts.
        has_interval: whether the verdict has one, of a run that is whole.
        regular_ms: `ms_per_token` of the regular arm; nan without one.
        target: a number, equal for pairs over the same regular decoding, which may be ranked.
        series: a number, equal for pairs that differ only in K or circumstances.
        curve: a number, equal for pairs that differ only in `load`, which counts `unit_of_load`.
        verdict: on the pair alone; `speedup` as far as it may be stated, nan for a partial run.
        num_compared: the number of pairs with an interval of its target.
        none_quiet: whether no run of the frame was, so that the word would be in every line.
        why_not: why times of the target's pairs cannot be compared, and so pairs that are close are not ordered; empty
            where they can.
        sound: whether it has an interval, from a quiet machine.
        shown: whether it is shown to pay, by an interval that holds for all pairs of its target at once.
        best: whether it is the fastest of its series, of those that are shown to pay if there are any, else of sound
            ones: the one that is compared with other series.
        best_k: whether its K is the best of several.
    """
    # Tables, sentences and plots ask for the same.
    return _pairs(tuple(runs))


@functools.lru_cache(maxsize=1)
def _pairs(runs: tuple[Run, ...]) -> pd.DataFrame:
    shown = [run for run in runs if run.status != "incomplete"]
    records = []
    for run, name in zip(shown, distinct_names([run.last for run in shown]), strict=True):
        row = run.last
        regular = run.row("regular")
        verdict = verdict_of(row)
        partial = run.status not in ("ok", NO_VERDICT)
        others = {column: text for column, text in name.settings.items() if column != "batch_size"}
        unit = "requests in flight, or rows of a batch"
        if row.request_rate is not None:
            unit = "requests per second"
        record = {
            "run": run,
            "regular": regular,
            "row": row,
            "name": name,
            "model": called(row.model or "unknown model"),
            "draft": called(row.draft or "none"),
            "method": " · ".join([called(row.draft or "none"), *labels(row), *name.details]),
            "k": name.num_draft_tokens,
            "k_order": name.k_order,
            "real": row.real,
            "quiet": row.was_quiet,
            "partial": partial,
            "target": (
                *(getattr(row, column) for column in CONDITIONS),
                RunnerNames.parse(row.runner or "").target,
                # That of the regular server comes first.
                (row.server_command or "").partition("; ")[0],
            ),
            "series": name.group,
            "curve": (unit, name.pair, *others.items()),
            "load": row.request_rate or row.batch_size or 1,
            "unit_of_load": unit,
            "verdict": verdict,
            "has_interval": verdict.has_interval and not partial,
            "speedup": None if partial else verdict.speedup.estimate,
            "regular_ms": regular and regular.ms_per_token,
        }
        records.append(record)
    if not records:
        return pd.DataFrame()
    # As objects, because K is a number, `auto` or None.
    pairs = pd.DataFrame(records, dtype=object)
    numbers = ["k_order", "load", "speedup", "regular_ms"]
    pairs = pairs.astype(
        dict.fromkeys(numbers, float)
        | dict.fromkeys(["real", "quiet", "partial", "has_interval"], bool)
    )
    for column in ("target", "series", "curve"):
        pairs[column] = pairs.groupby(column, sort=False, dropna=False).ngroup()
    pairs["none_quiet"] = not pairs.quiet.any()
    of_target = pairs.groupby("target")
    pairs["num_compared"] = of_target.has_interval.transform("sum").clip(lower=1)
    of_whole_runs = pairs.regular_ms.where(~pairs.partial).groupby(pairs.target)
    pairs["why_not"] = pairs.target.map(of_whole_runs.agg(why_no_ranking)).fillna("")
    # A few prompts, or a machine that is busy, may show any speed-up: others are preferred.
    pairs["sound"] = pairs.has_interval & pairs.quiet
    at_once = map(verdict_of, pairs.row, pairs.num_compared.astype(int))
    pairs["shown"] = [verdict.pays for verdict in at_once]
    pairs["shown"] &= pairs.has_interval
    complete = pairs[pairs.speedup.notna()]
    complete = complete.sort_values(["sound", "shown", "speedup"], kind="stable")
    pairs["best"] = pairs.index.isin(complete.drop_duplicates("series", keep="last").index)
    # With an interrupted rival, or points without an interval, the best is not known.
    num_k = pairs[pairs.has_interval].groupby("series").k.nunique()
    # Those that are sound are faster by chance, as far as is known, than the best one.
    unsound = pairs.speedup.where(~pairs.sound).groupby(pairs.series).transform("max")
    is_first = ~(unsound > pairs.speedup)
    pays = pairs.verdict.map(lambda verdict: verdict.pays).astype(bool)
    is_known = pairs.sound & is_first & pays & (pairs.why_not == "")
    pairs["best_k"] = pairs.best & is_known & (pairs.series.map(num_k) > 1)
    for column in ("model", "curve"):
        by = ["real", column]
        pairs[f"best_of_{column}"] = pairs.groupby(by).speedup.transform("max").fillna(0)
    order = ["real", "best_of_model", "model", "best_of_curve", "curve", "load", "k_order"]
    ascending = [False, False, True, False, True, True, True]
    return pairs.sort_values(order, ascending=ascending, kind="stable", ignore_index=True)
