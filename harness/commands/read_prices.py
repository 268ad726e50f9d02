"""What `costs=` and `acceptance=` name: runs of `latency` and `acceptance`, a `costs.json`, somebody's table,
counters of a server, or a histogram of what was accepted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.commands.read_runs import every_run
from harness.config.errors import SettingError
from harness.engines.registry import ENGINES
from harness.measuring.prices import (
    iteration_cost,
    k_of,
    served_of,
    tokens_by_k,
    why_no_price,
)
from harness.measuring.rows import LatencyRow
from harness.results.cost_tables import LoadKey, Served, Table, read_table
from harness.results.files import read_kind
from harness.results.iteration_cost import COSTS_FILE, IterationCost
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import Interval

# What an iteration costs is the same while these are.
_OF_COSTS = ("model", "engine", "devices", "dtype", "quantization")
_ALONE = (
    "passes of a plain server were timed, over 1 to 16 new tokens behind a cached prefix: drafting is left out, and so"
    " are the logits of all tokens but the last. So a draft gives these speed-ups at most"
)
# Names of histograms: of a whole run in AIPerf's profile_export_aiperf.json, and of each request by vLLM and AIPerf.
_HISTOGRAMS = ("pooled_spec_decode_acceptance_histogram", "acceptance_histogram")
_ORIGIN = ("model", "engine", "devices")
# And what it yields.
_OF_YIELDS = ("model", "prompts", "prompts_digest", "temperature", "rule")


def read_prices(setting: str, path: str, context: int = 128, key: str | None = None) -> Table:
    """The costs and yields in a directory, a CSV file of results, a `costs.json`, a table (`FILE`, `FILE@WORD`), or by
    a server at an address.

    Args:
        context: tokens before those that a server is timed with.
        key: of a server's API; None without one.

    Raises:
        SettingError: it has none, or those of different machines, models or texts.
    """
    if path.startswith(("http://", "https://")):
        if setting == "acceptance":
            return Table(yields={"": _counted(path, key)})
        rounds = ENGINES["server"].pass_times(path, context, key)
        cost = IterationCost.of_passes(rounds, path)
        return Table({"": cost}, notes=[_ALONE])
    place = Path(path).expanduser()
    if place.suffix == ".json":
        costs = _read_json(setting, place)
        if costs is not None:
            return Table({"": costs})
    if setting == "acceptance" and place.suffix in (".json", ".jsonl"):
        histogram = _histogram(place)
        if histogram:
            return Table(yields={"": _of_histogram(histogram)})
    if not place.is_dir() and not _is_ours(place):
        return read_table(setting, path)
    try:
        runs = every_run(place).runs
    except SettingError as error:
        if (place / COSTS_FILE).is_file():
            return read_prices(setting, str(place / COSTS_FILE))
        raise SettingError(setting, error.rule, path) from error
    latency = [run for run in runs if isinstance(run.last, LatencyRow) and run.status == "ok"]
    if setting == "costs" and not latency and (place / COSTS_FILE).is_file():
        # A run of `map`.
        return read_prices(setting, str(place / COSTS_FILE))
    read = [run for run in runs if isinstance(run.last, AcceptanceRow)]
    if setting == "costs":
        return _costs(latency, path)
    return _yields(latency, read, path)


def _costs(runs: Sequence[Run[LatencyRow]], path: str) -> Table:
    _check_alike("costs", runs, _OF_COSTS, path)
    costs = {}
    reasons = []
    with_draft = [run for run in runs if run.last.arm == "speculative"]
    alone = [run for run in runs if run.last.arm == "regular"]
    for draft, of_draft in grouped(with_draft, _draft).items():
        known = []
        for run in of_draft:
            reason = why_no_price(run)
            if reason:
                reasons.append(reason)
            else:
                known.append(run)
        if known:
            costs[draft] = iteration_cost([*known, *alone], path)
    if not costs:
        rule = "has no run of latency with a draft"
        if reasons:
            rule = f"has no price of an iteration: {reasons[0]}"
        raise SettingError("costs", rule, path)
    last = with_draft[-1].last
    origin = {name: value for name in _ORIGIN if (value := getattr(last, name, None))}
    return Table(costs, origin=origin, notes=list(dict.fromkeys(reasons)))


def _yields(
    runs: Sequence[Run[LatencyRow]], read: Sequence[Run[AcceptanceRow]], path: str
) -> Table:
    _check_alike("acceptance", [*runs, *read], _OF_YIELDS, path)
    yields: dict[str, Mapping[int, Interval]] = {}
    measured = {}
    served: dict[tuple[str, int, LoadKey], Served] = {}
    with_draft = [run for run in runs if run.last.arm == "speculative"]
    for draft, of_draft in grouped(with_draft, _draft).items():
        for one in of_draft:
            load = (None if one.last.request_rate else one.last.batch_size, one.last.request_rate)
            for row, k in ((one.rows[0], 0), (one.last, k_of(one.last))):
                answered = served_of(one, row)
                if answered is not None and k is not None:
                    served[draft, k, load] = answered
        known = tokens_by_k(of_draft)
        if known:
            yields[draft] = known
        priced = iteration_cost([run for run in of_draft if not why_no_price(run)])
        for point in priced.points:
            k = point.width - 1
            if k in known and any(k_of(run.last) == k for run in of_draft):
                measured[draft, k, point.rows] = known[k].estimate / point.steps.estimate
    # One pass over texts says more than the answers of a run.
    for run in read:
        of_run = {
            row.num_draft_tokens: row.tokens_per_iteration
            for row in run.rows
            if isinstance(row.num_draft_tokens, int) and row.tokens_per_iteration is not None
        }
        if of_run:
            yields[_draft(run)] = of_run
    if not yields:
        raise SettingError("acceptance", "has no tokens per iteration of any K", path)
    return Table(yields=yields, measured=measured, served=served)


def _counted(url: str, key: str | None) -> dict[int, Interval]:
    """Tokens per iteration at each K by a server's counters since its start."""
    counts = ENGINES["server"].counted(url, key)
    if counts is None or not counts.drafts:
        why = "shows no counters (/metrics)" if counts is None else "has counted no drafts yet"
        raise SettingError("acceptance", why, url)
    length = 1.0
    yields = {}
    for position, accepted in sorted(counts.accepted_at.items()):
        length += accepted / counts.drafts
        yields[position + 1] = Interval(length)
    if not yields:
        length = 1 + (counts.accepted or 0.0) / counts.drafts
        rule = f"counts no acceptance by position; with its K, type acceptance={length:.2f}@K"
        raise SettingError("acceptance", rule, url)
    return yields


def _histogram(file: Path) -> dict[int, float]:
    """Iterations by accepted draft tokens, in answers of vLLM or in what AIPerf writes, JSON or a JSON text a line; {}
    without any. Where it has been summed up, the sum alone.
    """
    found: dict[str, list[Any]] = {name: [] for name in _HISTOGRAMS}

    def search(value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name in found and inner:
                    found[name].append(inner)
                else:
                    search(inner)
        elif isinstance(value, list):
            for inner in value:
                search(inner)

    try:
        text = file.read_text(encoding="utf-8")
        texts = text.splitlines() if file.suffix == ".jsonl" else [text]
        contents = [json.loads(text) for text in texts if text.strip()]
        if not any(isinstance(content, dict) and "rows" in content for content in contents):
            # Results of this project have rows.
            search(contents)
        total: Counter[int] = Counter()
        for histogram in next((several for several in found.values() if several), []):
            counts = histogram.items() if isinstance(histogram, dict) else enumerate(histogram)
            for accepted, number in counts:
                total[int(accepted)] += number
    except (OSError, ValueError, TypeError) as error:
        raise SettingError("acceptance", f"is not understood: {error}", str(file)) from error
    return dict(total)


def _of_histogram(histogram: Mapping[int, float]) -> dict[int, Interval]:
    """Tokens per iteration at each K up to the most that were accepted."""
    num_iterations = sum(histogram.values())
    yields = {}
    for k in range(1, max(histogram) + 1):
        accepted = sum(min(k, number) * times for number, times in histogram.items())
        yields[k] = Interval(1 + accepted / num_iterations)
    return yields


def _check_alike(setting: str, runs: Sequence[Run], names: Sequence[str], path: str) -> None:
    """Raise a SettingError for runs whose figures cannot be taken together."""
    for name in names:
        values = list(dict.fromkeys(getattr(run.last, name, None) for run in runs))
        known = [str(value) for value in values if value is not None]
        if len(known) > 1:
            rule = (
                f"has runs that differ in {name}: {', '.join(known[:3])}; name one run's directory"
            )
            raise SettingError(setting, rule, path)


def _draft(run: Run) -> str:
    """What the draft is called, `tiny_draft` of a directory and of a file `tiny_draft.gguf`; empty where a server does
    not say what it drafts with.
    """
    draft = str(run.last.draft)
    if draft == "server":
        return ""
    # Of a repository the owner belongs to the name.
    is_path = draft.startswith(("/", "./", "../", "~"))
    return (Path(draft).name if is_path else draft).removesuffix(".gguf")


def _read_json(setting: str, file: Path) -> IterationCost | None:
    """The costs in a file; None for a file of another kind."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "points" not in content:
            return None
        return replace(IterationCost.from_json(content), source=str(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(setting, f"is no file of costs: {error}", str(file)) from error


def _is_ours(file: Path) -> bool:
    """Whether a file has rows of a command, by the columns that only these have."""
    try:
        return file.suffix == ".json" or read_kind(file, (LatencyRow, AcceptanceRow)) is not None
    except OSError:
        return False
