"""Readers of `costs=` and `acceptance=`: runs of `latency` and `acceptance`, a `costs.json`, somebody's table, or a
plain server, whose passes are timed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.commands.read_runs import Findings, every_run
from harness.config.acceptance_rules import PARAMETERS
from harness.config.errors import SettingError
from harness.config.settings import check_address
from harness.measuring.prices import (
    iteration_cost,
    k_of,
    tokens_by_k,
    why_no_price,
)
from harness.measuring.rows import LatencyRow
from harness.results.files import read_kind
from harness.results.judging.series import why_same_setting
from harness.results.price.table import PriceTable, read_table
from harness.results.price.value import COSTS_FILE, IterationCost
from harness.results.printed.cells import tables_of
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import Interval

# Runs whose costs are read together must agree in these columns.
_COST_CONDITIONS = ("model", "engine", "devices", "dtype", "quantization", "settings")
_NOTE_ON_PASSES = (
    "passes of a plain server were timed, over 1 to 16 new tokens after a cached prefix: drafting is left out, and so"
    " are the logits of all tokens but the last. So a draft gains at most this"
)
_ORIGIN = ("model", "engine", "devices")
# Runs whose yields are read together must agree in these.
_YIELD_CONDITIONS = (
    *"model quantization prompts prompts_digest temperature top_k top_p rule".split(),
    *PARAMETERS,
)
# Runs of one draft may differ in K and load only.
_DRAFT_CONDITIONS = (
    "draft draft_repository draft_quantization draft_sampling draft_layers max_ngram max_new_tokens"
    " settings"
).split()


def read_prices(setting: str, path: str, context: int = 128, key: str | None = None) -> PriceTable:
    """The costs and yields of one of:

    - a directory or a CSV file of results; `FILE@DRAFT` for those of one draft,
    - a `costs.json`,
    - a table: `FILE`, or `FILE@WORD` for its rows with that word,
    - a server at an address.

    Args:
        context: tokens before the timed ones, of a server.
        key: of a server's API; None without one.

    Raises:
        SettingError: there are no prices, or they are of different machines, models or texts.
    """
    if setting == "costs" and path.startswith(("http://", "https://")):
        check_address(setting, path)
        from harness.servers.passes import pass_times

        rounds = pass_times(path, context, key)
        cost = IterationCost.from_passes(rounds, path)
        return PriceTable({"": cost}, notes=[_NOTE_ON_PASSES])
    file = Path(path).expanduser()
    if file.suffix == ".json" and (costs := _read_json(setting, file)):
        return PriceTable({"": costs})
    name, _, draft = path.rpartition("@")
    if name and not file.exists() and _holds_runs(Path(name).expanduser()):
        return read_prices(setting, name).for_draft(setting, draft, path)
    if not _holds_runs(file):
        return read_table(setting, path)
    costs_file = file / COSTS_FILE
    try:
        findings = every_run(file)
    except SettingError as error:
        if not costs_file.is_file():
            raise SettingError(setting, error.rule, path) from error
        findings = Findings()
    # Rows of a `map` are of their own kind, and not among these.
    latency = [run for run in findings.runs_of(LatencyRow) if run.status == "ok"]
    if setting == "costs" and not latency and costs_file.is_file():
        # A run of `map`, or what a server was timed for.
        return replace(read_prices(setting, str(costs_file)), origin=_origin(findings.runs))
    read = findings.runs_of(AcceptanceRow)
    used: Sequence[Run] = latency if setting == "costs" else [*latency, *read]
    for runs_of_draft in grouped(used, lambda run: (run.command, _draft(run))).values():
        _check_alike(setting, runs_of_draft, _DRAFT_CONDITIONS, path)
    return _costs(latency, path) if setting == "costs" else _yields(latency, read, path)


def _costs(runs: Sequence[Run[LatencyRow]], path: str) -> PriceTable:
    _check_alike("costs", runs, _COST_CONDITIONS, path)
    costs = {}
    reasons = []
    with_draft = [run for run in runs if run.last.arm == "speculative"]
    regular_runs = [run for run in runs if run.last.arm == "regular"]
    for draft, runs_of_draft in grouped(with_draft, _draft).items():
        priced = []
        for run in runs_of_draft:
            reason = why_same_setting(run, runs_of_draft) or why_no_price(run)
            if reason:
                reasons.append(reason)
            else:
                priced.append(run)
        if priced:
            costs[draft] = iteration_cost([*priced, *regular_runs], path)
    if not costs:
        rule = "has no run of latency with a draft"
        if reasons:
            rule = f"has no price of an iteration: {reasons[0]}"
        raise SettingError("costs", rule, path)
    origin = _origin(with_draft)
    return PriceTable(costs, origin=origin, notes=list(dict.fromkeys(reasons)))


def _origin(runs: Sequence[Run[Any]]) -> dict[str, Any]:
    """Model, engine, devices and command of the last of these runs; empty without one."""
    if not runs:
        return {}
    run = runs[-1]
    columns = {name: value for name in _ORIGIN if (value := getattr(run.last, name))}
    if run.command == "latency":
        columns["cost_command"] = run.typed
    return columns


def _yields(
    runs: Sequence[Run[LatencyRow]], read: Sequence[Run[AcceptanceRow]], path: str
) -> PriceTable:
    _check_alike("acceptance", [*runs, *read], _YIELD_CONDITIONS, path)
    yields: dict[str, Mapping[int, Interval]] = {}
    lengths: dict[str, float] = {}
    measured = {}
    with_draft = [run for run in runs if run.last.arm == "speculative"]
    for draft, runs_of_draft in grouped(with_draft, _draft).items():
        measured_yields = tokens_by_k(runs_of_draft)
        if measured_yields:
            yields[draft] = measured_yields
            known_lengths = [run.last.mean_answer_length for run in runs_of_draft]
            if any(known_lengths):
                lengths[draft] = fmean(filter(None, known_lengths))
        priced = iteration_cost([run for run in runs_of_draft if not why_no_price(run)])
        for point in priced.points:
            # Points of smaller K are computed, and not measured.
            k = point.width - 1
            if k in measured_yields and any(k_of(run.last) == k for run in runs_of_draft):
                measured[draft, k, point.rows] = measured_yields[k].estimate / point.steps.estimate
    # `acceptance` reads texts once, which tells more than the answers of a run.
    for run in read:
        if read_yields := yields_of(run):
            yields[_draft(run)] = read_yields
            # Every token of a text but the first comes from an iteration.
            lengths[_draft(run)] = 1 + (run.last.num_tokens or 0) / (run.last.num_texts or 1)
    return PriceTable(yields=yields, lengths=lengths, measured=measured)


def yields_of(run: Run[AcceptanceRow]) -> dict[int, Interval]:
    """The tokens per iteration of each K of a run of `acceptance`."""
    return {
        row.num_draft_tokens: row.tokens_per_iteration
        for row in run.rows
        if isinstance(row.num_draft_tokens, int) and row.tokens_per_iteration is not None
    }


def _check_alike(setting: str, runs: Sequence[Run], names: Sequence[str], path: str) -> None:
    """Refuse runs that may not be combined."""
    for name in names:
        values = [_value(run, name) for run in runs]
        different = list(dict.fromkeys(str(value) for value in values if value is not None))
        if len(different) > 1:
            rule = f"has runs that differ in {name}: {', '.join(different[:3])}; name one run's directory"
            raise SettingError(setting, rule, path)


def _value(run: Run, column: str) -> Any:
    """The value of a column, for comparison. Of `settings` those of the engine, without commands, and without a setting
    that only sets K.
    """
    value = getattr(run.last, column, None)
    if column != "settings":
        return value
    kept = {}
    for name, setting in (value or {}).items():
        is_k = name.startswith("vary.") and str(setting) == str(run.last.num_draft_tokens)
        is_own = name.startswith(("engine.", "vary.")) and not name.endswith("_command")
        if is_own and not is_k:
            kept[name] = setting
    return kept


def _draft(run: Run) -> str:
    """The name of the draft: of a path its last part, without `.gguf`; empty if a server does not name it."""
    draft = str(run.last.draft)
    if draft == "server":
        return ""
    # A repository's owner is part of its name.
    is_path = draft.startswith(("/", "./", "../", "~"))
    return (Path(draft).name if is_path else draft).removesuffix(".gguf")


def _read_json(setting: str, file: Path) -> IterationCost | None:
    """The costs in a file; None for a file of another kind."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
        if not isinstance(content, dict) or "points" not in content:
            return None
        return replace(IterationCost.from_json(content), source=str(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SettingError(setting, f"is no file of costs: {error}", str(file)) from error


def _holds_runs(file: Path) -> bool:
    """Whether it is a directory, or a file with rows of a command, by the columns that only these have.

    A JSON file that is no result file of a benchmark counts as runs, so that their reader says what is wrong with it.
    """
    if file.is_dir():
        return True
    try:
        if file.suffix == ".json":
            return not tables_of(file.read_text(encoding="utf-8-sig"))
        return read_kind(file, (LatencyRow, AcceptanceRow)) is not None
    except (OSError, UnicodeDecodeError):
        return file.suffix == ".json"
