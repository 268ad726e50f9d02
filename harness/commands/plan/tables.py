"""`plan`: the memory a pair takes, and how fast it can be at best.

A row is the plan of one pair. Sizes are in bytes, and `devices_bytes` has those of each device:
`{"cuda:0": {"free": 40e9, "model": 30e9, "draft": 0, "cache": 1e9}}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from harness.commands.plan.rows import PlanRow
from harness.config.amounts import amount
from harness.config.demand import Remedy
from harness.config.settings import DecodingSettings
from harness.reporting.names import distinct_names
from harness.reporting.page import Page, Step, heading, title_of_many
from harness.reporting.table import Bar, Bars, Column, Line, Table, TableRow, times
from harness.reporting.words import pair_name
from harness.results.runs import grouped
from harness.results.statistics.interval import Interval

_NO_GPU = "No GPU here: planned for main memory; gpus=4 gpu_memory=40GB pretends GPUs."
# Devices that an answer shows, and those below a doubt.
_MOST_DEVICES = 4
_FEW_DEVICES = 2
# A verification that costs at least this many steps costs noticeably more than one.
_COSTLY_VERIFICATION = 1.2


def plan_page(rows: Sequence[PlanRow]) -> Page | None:
    """Whether a pair fits, or how many of several do; None where nothing was planned."""
    if len(rows) > 1:
        return _page_of_many(rows)
    (row,) = rows
    if not row.devices_bytes:
        return None
    doubts = [] if row.num_gpus else [_NO_GPU]
    doubts += [f"{note[:1].upper()}{note[1:]}." for note in (row.note or "").split("; ") if note]
    used = _used(row)
    free = {name: sizes["free"] for name, sizes in row.devices_bytes.items()}
    shares = {name: used[name] / free[name] for name in used if free[name]}
    amounts = {name: f"{gigabytes(used[name])} of {gigabytes(free[name])} GB" for name in shares}
    # Neighbouring GPUs that are equally full share a bar.
    alike = {name: amounts[name] if name.startswith("cuda:") else name for name in shares}
    groups = [list(names) for _, names in groupby(shares, alike.__getitem__)]
    # The fullest ones, where there is no room for all.
    most = _FEW_DEVICES if doubts else _MOST_DEVICES
    fullest = sorted(groups, key=lambda names: shares[names[0]])[-most:]
    bars = [
        Bar(_devices_called(names), shares[names[0]], (amounts[names[0]],))
        for names in groups
        if names in fullest
    ]
    whole = max([1.0, *(bar.size for bar in bars)])
    return Page(
        heading(row, _settings(row)),
        [_finding(row)],
        doubts,
        [Bars(tuple(bars), whole), _models(row), _devices(row), _limits(row)],
        [*_least_times(row)],
        [*_next_step(row)],
    )


def _settings(row: PlanRow) -> str:
    settings = [
        f"batch {row.batch_size}" if (row.batch_size or 1) > 1 else "",
        f"{row.prompt_length} prompt + {row.max_new_tokens} new tokens",
        f"K={row.num_draft_tokens}" if row.draft else "",
        "" if row.placement == "auto" else f"placement {row.placement}",
    ]
    return " · ".join(filter(None, settings))


def _devices_called(names: Sequence[str]) -> str:
    """`main memory`, `GPU 2`, or `GPUs 2 to 5 each` of neighbours."""
    first = _device(names[0])
    if len(names) == 1:
        return first
    return f"{first.replace('GPU', 'GPUs')} to {names[-1].removeprefix('cuda:')} each"


def _finding(row: PlanRow) -> Line:
    used = _used(row)
    frees = {name: size["free"] for name, size in (row.devices_bytes or {}).items() if size["free"]}
    spare = {name: free - used[name] for name, free in frees.items()}
    tightest = min(spare, key=lambda name: spare[name])
    where = f"{'in' if tightest == 'cpu' else 'on'} {_device(tightest)}"
    if len(spare) > 1 and tightest != "cpu":
        where = "on the fullest GPU"
    stays = f"{amount(spare[tightest])} stay free {where}"
    weights = amount((row.model_bytes or 0) + (row.draft_bytes or 0))
    needed = f"{weights} of weights"
    if row.needed_bytes is not None:
        needed = f"{amount(row.needed_bytes)} of weights and KV cache"
    if row.status != "ok":
        text = f"{needed}, and {free_in_words(row)} GB are free"
        if row.num_gpus and row.reserve_bytes:
            text += f" less {amount(row.reserve_bytes)} reserve"
        return Line("does not fit", "bad", text)
    if row.needed_bytes is None:
        return Line("the weights fit", "strong", f"{stays}, for a KV cache of unknown size")
    return Line("fits", "good", f"{needed}; {stays}")


def _least_times(row: PlanRow) -> Iterator[tuple[str, str]]:
    """The least times at the bandwidths that are possible, the most that speculation can gain, and the prediction."""
    rates = row.bandwidths or {}
    fastest = max(rates, key=lambda name: rates[name], default="")
    alone = least_ms(row.read_bytes, rates.get(fastest))
    if alone is not None:
        text = f"{_ms(alone)} ms/token at least"
        with_draft = least_ms(row.speculative_read_bytes, rates[fastest])
        if with_draft is not None and row.highest_speedup is not None:
            text += f", {_ms(with_draft)} with all drafts accepted: at most {times(row.highest_speedup)}"
        text += f" ({fastest})"
        slowest = _slowest(row)
        if rates[slowest] < rates[fastest]:
            text += f"; {_ms(_least_ms_alone(row) or 0.0)} ms/token ({slowest})"
        yield "Time", text
    if row.predicted_speedup is not None:
        yield "Gain", f"{_predicted(row)} at best{_of_acceptance(row.predicted_speedup)}"


def _next_step(row: PlanRow) -> Iterator[Step]:
    if row.status == "ok":
        draft = f" draft={row.draft}" if row.draft else ""
        if row.best_num_draft_tokens is not None:
            draft += f" K={row.best_num_draft_tokens}"
            if row.temperature not in (None, DecodingSettings().temperature):
                draft += f" temperature={row.temperature:g}"
        yield Step("measure it", command=f"harness latency model={row.model}{draft}")
    for remedy in _remedies(row)[:1]:
        change = remedy.change
        if remedy.num_gpus is not None:
            # GPUs that are not here can be planned for.
            change = f"gpus={remedy.num_gpus}"
        yield Step("would fit", change)


def _remedies(row: PlanRow) -> list[Remedy]:
    return [Remedy.read(line) for line in (row.instead or "").splitlines()]


@dataclass(frozen=True)
class _NamedPlan:
    """A plan, and the settings in which it differs from other plans of its pair."""

    row: PlanRow
    settings: str


def _page_of_many(rows: Sequence[PlanRow]) -> Page:
    """How many plans fit, a row for each, and which to measure."""
    several_k = len({row.num_draft_tokens for row in rows if row.draft}) > 1
    plans = _named(rows)
    pair = [
        Column("model", of="row.model", text=True),
        Column("draft", of=lambda plan: plan.row.draft or "–", text=True),
    ]
    # One pair alone is in the heading, and its plans are distinguished by their settings.
    has_settings = any(plan.settings for plan in plans)
    several_pairs = len({pair_name(row) for row in rows}) > 1
    by_settings = not several_pairs and (several_k or has_settings)
    unnamed = "default" if by_settings and has_settings else None
    k = Column("K", of="row.num_draft_tokens")
    columns = (
        *([] if by_settings else pair),
        *([k] if several_k else []),
        Column("", of=lambda plan: plan.settings or unnamed, text=True, optional=True),
        Column("fits", of=_fits, text=True).at("row"),
        Column("needs\nGB", gigabytes, "row.needed_bytes"),
        Column("ms/token\nat least", _ms, _least_ms_alone).at("row"),
        Column("with\ndraft", _ms, _least_ms_with_draft).at("row"),
        Column("all drafts\naccepted", times, "row.highest_speedup"),
        Column("predicted\nat best", of=_predicted, text=True, optional=True).at("row"),
    )
    table = Table.of("plans", "", plans, columns, look="bare")
    fitting = [row for row in rows if row.status == "ok"]
    findings = [Line(f"{len(fitting)} of {len(rows)} fit", "good" if fitting else "bad")]
    slowest = {_slowest(row) for row in rows if row.bandwidths}
    why = []
    if slowest:
        names = " or ".join(sorted(slowest))
        why.append(("Time", f"the least that reading the weights takes on {names}"))
    steps: list[Step] = []
    if fitting:
        fastest = max(fitting, key=lambda row: row.highest_speedup or 0.0)
        steps += _next_step(fastest)
    return Page(title_of_many(rows), findings, (), [table], why, steps)


def _named(rows: Sequence[PlanRow]) -> list[_NamedPlan]:
    """The plans in their order, each with the settings that distinguish it from the others of its pair."""
    # By identity, because rows hold dictionaries and cannot be keys.
    settings: dict[int, str] = {}
    for plans in grouped(rows, pair_name).values():
        names = distinct_names(plans)
        has_batches = any("batch_size" in name.settings for name in names)
        for row, name in zip(plans, names, strict=True):
            # The number of pretended GPUs is among the devices already.
            differing = {**name.settings, "settings.gpus": ""} if row.num_gpus else name.settings
            if has_batches and row.batch_size == 1:
                differing = {"batch_size": "batches of 1", **differing}
            text = "\n".join(filter(None, differing.values()))
            settings[id(row)] = text.replace("pretended ", "")
    return [_NamedPlan(row, settings[id(row)]) for row in rows]


def _predicted(row: PlanRow) -> str | None:
    """`2.31× at K=6`."""
    speedup = row.predicted_speedup
    return (
        None if speedup is None else f"{times(speedup.estimate)} at K={row.best_num_draft_tokens}"
    )


def _of_acceptance(speedup: Interval) -> str:
    """` (95 % interval 1.90 to 2.71, of acceptance alone)`; empty without bounds. What it costs is by bytes."""
    bounds = speedup.bounds()
    return f" (95 % interval {bounds}, of acceptance alone)" if bounds else ""


def free_in_words(row: PlanRow) -> str | None:
    count = f"{row.num_gpus} × " if row.num_gpus else ""
    return None if row.free_bytes is None else f"{count}{gigabytes(row.free_bytes)}"


def _fits(row: PlanRow) -> str:
    if row.status == "ok":
        return "yes" if row.needed_bytes is not None else "the weights do"
    if row.status != "does_not_fit":
        return f"{row.status}: {row.error}"
    remedies = _remedies(row)
    return f"no; {remedies[0].change}" if remedies else "no"


def _models(row: PlanRow) -> Table:
    """Sizes of each model."""
    columns = (
        Column("model", text=True),
        Column("parameters", _parameters),
        Column("held in"),
        Column("weights", lambda size: amount(size) if size else "the model's"),
        Column("KV cache"),
    )
    rows = [_sizes(row, prefix="", name=row.model, weights=row.model_bytes)]
    # A method without weights has no figures.
    if row.draft_num_parameters is not None:
        rows.append(_sizes(row, prefix="draft_", name=row.draft, weights=row.draft_bytes))
    return Table("models", "", columns, tuple(rows), look="plain")


def _sizes(row: PlanRow, prefix: str, name: str | None, weights: int | None) -> TableRow:
    """Cells about a model, from the columns that begin with `prefix`."""

    def value(column: str) -> Any:
        return getattr(row, f"{prefix}{column}")

    quantization = value("quantization")
    held_in = value("dtype") if quantization == "none" else quantization
    cache = value("cache_bytes")
    cached = "unknown" if cache is None else amount(cache)
    return TableRow((name, value("num_parameters"), held_in, weights, cached))


def _devices(row: PlanRow) -> Table:
    """What goes where: the answer shows the fullest devices alone."""
    rows = []
    for name, sizes in (row.devices_bytes or {}).items():
        draft = sizes["draft"] if row.draft else None
        rows.append(
            TableRow((_device(name), sizes["model"], draft, sizes["cache"], sizes["free"] or None))
        )
    columns = (
        Column("GB", text=True),
        Column("model", gigabytes),
        Column("draft", gigabytes, optional=True),
        Column("KV cache", gigabytes),
        Column("free\nbefore", gigabytes),
    )
    instead: list[str] = []
    if row.status != "ok":
        remedies = _remedies(row)
        beginning = "What would fit instead:" if remedies else "A smaller model is needed."
        instead = [beginning, *(f"  {remedy}" for remedy in remedies)]
    return Table("devices", "", columns, tuple(rows), notes=tuple(instead), look="plain")


def _used(row: PlanRow) -> dict[str, int]:
    """Bytes by device that are not free: weights and caches, and the reserve of a GPU that holds any."""
    used = {}
    for name, sizes in (row.devices_bytes or {}).items():
        size = sizes["model"] + sizes["draft"] + sizes["cache"]
        keeps_reserve = name.startswith("cuda") and size
        used[name] = size + (row.reserve_bytes or 0) if keeps_reserve else size
    return used


def _limits(row: PlanRow) -> Table:
    """The bytes that a token must read, and the least times that follow."""
    if row.read_bytes is None:
        unknown = f"What a forward of {row.model} must read is not known: its KV cache is not."
        return Table.of_lines("limits", [("at least", unknown)])
    batch = f" for the {row.batch_size} rows of a batch" if (row.batch_size or 1) > 1 else ""
    read = f"{amount(row.read_bytes)}{batch}"
    about = f"One forward of {row.model} must read {read}, by any implementation."
    notes = []
    if row.highest_speedup is not None:
        pays = f"Speculation pays from {row.break_even_tokens:.2f} tokens per iteration"
        gains = f"gains at most {times(row.highest_speedup)} at K={row.num_draft_tokens}"
        notes.append(f"{pays}, and {gains}.")
    if (row.verification_steps or 1) > _COSTLY_VERIFICATION:
        costs = f"A verification reads {row.verification_steps:.1f} times what a step reads"
        cause = "because the tokens that it checks take different experts"
        notes.append(f"{costs}, {cause}: speculation gains less than with a dense model.")
    if not row.bandwidths:
        example = f"that {_ms(least_ms(row.read_bytes, 100) or 0)} ms per token at least"
        unknown = f"No bandwidth is known here: bandwidth=100 (GB/s) would make {example}."
        limits = Table.of_lines("limits", [("ms/token", unknown)])
        return replace(limits, about=about, notes=tuple(notes))
    rows = []
    for name, rate in row.bandwidths.items():
        alone = least_ms(row.read_bytes, rate)
        with_draft = least_ms(row.speculative_read_bytes, rate)
        rows.append(TableRow((name, rate, alone, with_draft)))
    columns = (
        Column("ms/token, at least", text=True),
        Column("GB/s", "{:g}".format),
        Column("alone", _ms),
        Column("with the draft, all accepted", _ms, optional=True),
    )
    return Table("limits", "", columns, tuple(rows), about, tuple(notes), look="plain")


def _slowest(row: PlanRow) -> str:
    """The name of the lowest bandwidth that the plan knows: `A100 40GB`."""
    rates = row.bandwidths or {}
    return min(rates, key=lambda name: rates[name])


def _least_ms_alone(row: PlanRow) -> float | None:
    """Milliseconds per token of the target alone at the lowest bandwidth that the plan knows."""
    return least_ms(row.read_bytes, _lowest_rate(row))


def _least_ms_with_draft(row: PlanRow) -> float | None:
    """The same with the draft, if all that it proposes is accepted."""
    return least_ms(row.speculative_read_bytes, _lowest_rate(row))


def _lowest_rate(row: PlanRow) -> float | None:
    return min((row.bandwidths or {}).values(), default=None)


def least_ms(num_bytes: float | None, rate: float | None) -> float | None:
    """Milliseconds to read this many bytes at a rate in GB/s; None where one is unknown."""
    return num_bytes / rate / 1e6 if rate and num_bytes else None


def _device(name: str) -> str:
    return {"cpu": "main memory", "disk": "disk"}.get(name, name.replace("cuda:", "GPU "))


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f}"


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _parameters(count: float) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 0.1e9 else f"{count / 1e6:.1f} million"
