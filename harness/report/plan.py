"""What `plan` found: what a pair takes, where its layers go, and how fast it can be at best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.config.amounts import amount
from harness.report.table import Column, Document, Line, Table, TableRow, times
from harness.report.words import title
from harness.results.schema import PlanRow

_BAR = 40
# Columns that the target and, with `draft_`, the draft have.
_OF_EACH = ("num_parameters", "dtype", "quantization", "cache_bytes", "rule_of_thumb_bytes")
# A mark for each part of a bar.
_MARKS = {"model": "█", "draft": "▓", "KV cache": "▒", "reserve": "░", "free": "·"}


def plan_document(rows: Sequence[PlanRow]) -> Document:
    """The plan of one pair in full, or one table of several."""
    return _plan(rows[0]) if len(rows) == 1 and rows[0].devices_bytes else _plans(rows)


def _plan(row: PlanRow) -> Document:
    fits = row.status == "ok"
    document: list[Line | Table] = [Line(title(row), "strong"), Line(_lengths(row), "dim")]
    if not row.num_gpus:
        document.append(Line("No GPU here: planned for main memory; gpus=4 gpu_memory=40GB pretends GPUs.", "warning"))
    document += [_models(row), _devices(row), Line(""), Line(_verdict(row), "good" if fits else "bad")]
    if not fits:
        instead = (row.instead or "").splitlines()
        document.append(Line("What would fit instead:" if instead else "A smaller model is needed."))
        document += [Line(f"  {remedy}") for remedy in instead]
    if row.note:
        document.append(Line(f"Note: {row.note}.", "warning"))
    return [*document, Line(""), *_limits(row)]


def _plans(rows: Sequence[PlanRow]) -> Document:
    """The lowest time is that of the slowest bandwidth the plan knows; empty where it knows none."""
    columns = (
        Column("model", text=True),
        Column("draft", text=True),
        Column("needs\nGB", lambda size: f"{size / 1e9:.1f}"),
        Column("free\nGB"),
        Column("ms/token\nat least", _ms),
        Column("with\ndraft", _ms),
        Column("speed-up\nat most", times),
        Column("fits", text=True),
    )
    cells = []
    for row in rows:
        free = None if row.free_bytes is None else f"{row.free_bytes / 1e9:.1f}"
        free = f"{row.num_gpus} × {free}" if free and row.num_gpus else free
        lowest = _lowest(row, min((row.bandwidths or {}).values(), default=None))
        cells.append((row.model, row.draft or "–", row.needed_bytes, free, *lowest, row.highest_speedup, _fits(row)))
    document: list[Line | Table] = [Table("plans", "", columns, tuple(map(TableRow, cells)), look="plain")]
    document.append(Line(f"{sum(row.status == 'ok' for row in rows)} of {len(rows)} fit.", "strong"))
    known = [row.bandwidths for row in rows if row.bandwidths]
    if names := sorted({_bandwidth_name(min(rates, key=lambda name: rates[name])) for rates in known}):
        document.append(Line(f"Times: what reading the weights takes at least on {' or '.join(names)}.", "dim"))
    return document


def _fits(row: PlanRow) -> str:
    if row.status == "ok":
        return "yes"
    if row.status != "does_not_fit":
        return f"{row.status}: {row.error}"
    # The first remedy, in short.
    first = (row.instead or "").partition("\n")[0].partition(" (")[0].replace(".quantization=", " in ")
    return f"no; {first}" if first else "no"


def _lengths(row: PlanRow) -> str:
    parts = [
        f"batch {row.batch_size}" if (row.batch_size or 1) > 1 else "one row",
        f"{row.prompt_length} prompt + {row.max_new_tokens} new tokens",
    ]
    parts += [f"K={row.num_draft_tokens}"] if row.draft else []
    return " · ".join([*parts, f"placement {row.placement}"])


def _models(row: PlanRow) -> Table:
    """What each model takes, next to llama-ssp's rule of thumb."""
    columns = (
        Column("model", text=True),
        Column("parameters", _parameters),
        Column("held in"),
        Column("weights", lambda size: amount(size) if size else "the model's"),
        Column("KV cache"),
        Column("llama-ssp's\nrule", amount),
    )
    rows = []
    for prefix, name, size in (("", row.model, row.model_bytes), ("draft_", row.draft, row.draft_bytes)):
        if name:
            parameters, dtype, quantization, cache, rule = (getattr(row, prefix + column) for column in _OF_EACH)
            held = dtype if quantization == "none" else quantization
            rows.append(TableRow((name, parameters, held, size, "unknown" if cache is None else amount(cache), rule)))
    return Table("models", "", columns, tuple(rows), look="plain")


def _devices(row: PlanRow) -> Table:
    """A bar for each device, with the layers that are there."""
    devices = row.devices_bytes or {}
    parts = {name: _parts(row, name) for name in devices}
    longest = max(max(sum(part.values()), devices[name]["free"]) for name, part in parts.items())
    rows = []
    for name, part in parts.items():
        used, free = sum(part.values()), devices[name]["free"]
        size = f"{used / 1e9:.1f} of {free / 1e9:.1f} GB" if free else f"{used / 1e9:.1f} GB"
        maps = {"model": row.device_map, "draft": row.draft_device_map}
        layers = [f"{which}: {here}" for which, found in maps.items() if found and (here := layers_on(found, name))]
        rows.append((_device(name), "\n".join([f"{_bar(part, free, longest):{_BAR + 1}} {size}", *layers])))
    seen = {kind for part in parts.values() for kind, size in part.items() if size} | {"free"}
    rows.append(("", "  ".join(f"{mark} {kind}" for kind, mark in _MARKS.items() if kind in seen)))
    return Table.of_lines("devices", rows)


def layers_on(device_map: Mapping[str, int | str], device: str) -> str:
    """Which modules of a device map are on `device`, numbered ones as ranges: `embed_tokens, layers 0–19`."""
    here = [module for module, place in device_map.items() if device in (str(place), f"cuda:{place}")]
    if here == [""]:
        return "all of it"
    ranges: list[list[str]] = []  # name, and the numbers that follow each other
    for module in here:
        parent, _, last = module.rpartition(".")
        name = parent.rpartition(".")[2] if last.isdecimal() else last
        if ranges and last.isdecimal() and ranges[-1][0] == name and int(ranges[-1][-1]) == int(last) - 1:
            ranges[-1].append(last)
        else:
            ranges.append([name, last] if last.isdecimal() else [name])
    return ", ".join(f"{name} {'–'.join(dict.fromkeys(n[:1] + n[-1:]))}".strip() for name, *n in ranges)


def _parts(row: PlanRow, name: str) -> dict[str, float]:
    """What a bar shows before its free end. The reserve is kept on each GPU that holds anything."""
    device = (row.devices_bytes or {})[name]
    held = {"model": device["model"], "draft": device["draft"], "KV cache": device["cache"]}
    reserve = (row.reserve_bytes or 0) if name.startswith("cuda") and any(held.values()) else 0
    return {**held, "reserve": reserve}


def _bar(parts: Mapping[str, float], free: float, longest: float) -> str:
    """Marks, `_BAR` of them for `longest` bytes; a stroke where the memory ends, if more than that is needed."""
    marks, end = "", 0.0
    for kind, size in parts.items():
        end += size
        marks += _MARKS[kind] * (round(_BAR * end / longest) - len(marks))
    limit = round(_BAR * free / longest)
    marks += _MARKS["free"] * (limit - len(marks))
    return f"{marks[:limit]}│{marks[limit + 1 :]}" if free and len(marks) > limit else marks


def _verdict(row: PlanRow) -> str:
    if row.status != "ok":
        return f"{(row.error or '').partition(': ')[2]}."
    devices = row.devices_bytes or {}
    spare = {
        name: device["free"] - sum(_parts(row, name).values()) for name, device in devices.items() if device["free"]
    }
    tightest = min(spare, key=lambda name: spare[name])
    where = "on the fullest GPU" if len(spare) > 1 else f"{'in' if tightest == 'cpu' else 'on'} {_device(tightest)}"
    needed = f"{amount(row.needed_bytes or 0)} of weights and KV cache"
    return f"It fits: {needed}; {amount(spare[tightest])} stay free {where}."


def _limits(row: PlanRow) -> list[Line | Table]:
    """What a token must read, and the least times that follow."""
    read, bandwidths = row.read_bytes or 0, row.bandwidths or {}
    batch = f" for the {row.batch_size} rows of a batch" if (row.batch_size or 1) > 1 else ""
    found: list[Line | Table] = [
        Line(f"One forward of {row.model} must read {amount(read)}{batch}, by any implementation.")
    ]
    if bandwidths:
        columns = (
            Column("ms/token, at least", _bandwidth_name, text=True),
            Column("GB/s", lambda rate: f"{rate:g}"),
            Column("alone", _ms),
            Column("with the draft, all accepted", _ms, optional=True),
        )
        rows = tuple(TableRow((name, rate, *_lowest(row, rate))) for name, rate in bandwidths.items())
        found.append(Table("limits", "", columns, rows, look="plain"))
    else:
        example = f"bandwidth=100 (GB/s) would make that {_ms(read / 100e6)} ms per token at least."
        found.append(Line(f"No bandwidth is known here: {example}", "dim"))
    if row.highest_speedup is not None:
        pays = f"Speculation pays from {row.break_even_tokens:.2f} tokens per iteration"
        found.append(Line(f"{pays}, and gains {times(row.highest_speedup)} at most (K={row.num_draft_tokens})."))
    return found


def _lowest(row: PlanRow, bandwidth: float | None) -> list[float | None]:
    """Milliseconds per token of the model alone and with its draft, at a bandwidth in GB/s."""
    read = (row.read_bytes, row.speculative_read_bytes)
    return [None if bandwidth is None or size is None else size / bandwidth / 1e6 for size in read]


def _bandwidth_name(name: str) -> str:
    return "the given bandwidth" if name == "bandwidth=" else name


def _device(name: str) -> str:
    return {"cpu": "main memory", "disk": "disk"}.get(name, name.replace("cuda:", "GPU "))


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _parameters(count: float) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 0.1e9 else f"{count / 1e6:.1f} million"
