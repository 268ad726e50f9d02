"""A plan: the memory a pair takes, where its layers go, and how fast it can be at best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.config.amounts import amount
from harness.report.names import told_apart
from harness.report.table import Column, Document, Line, Table, TableRow, grouped, times
from harness.report.words import pair_name, title
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
    batch = f"batch {row.batch_size}" if (row.batch_size or 1) > 1 else "one row"
    k = [f"K={row.num_draft_tokens}"] if row.draft else []
    lengths = [batch, f"{row.prompt_length} prompt + {row.max_new_tokens} new tokens", *k]
    settings = " · ".join([*lengths, f"placement {row.placement}"])
    document: list[Line | Table] = [Line(title(row), "strong"), Line(settings, "dim")]
    if not row.num_gpus:
        document.append(
            Line(
                "No GPU here: planned for main memory; gpus=4 gpu_memory=40GB pretends GPUs.",
                "warning",
            )
        )
    document += [_models(row), _devices(row), Line(""), _verdict(row)]
    if row.status != "ok":
        instead = (row.instead or "").splitlines()
        document.append(
            Line("What would fit instead:" if instead else "A smaller model is needed.")
        )
        document += [Line(f"  {remedy}") for remedy in instead]
    if row.note:
        document.append(Line(f"Note: {row.note}.", "warning"))
    return [*document, Line(""), *_limits(row)]


def _plans(rows: Sequence[PlanRow]) -> Document:
    """The lowest time is that of the slowest bandwidth the plan knows; empty where it knows none."""
    # The settings in which plans for the same pair differ.
    pairs = grouped(rows, pair_name).values()
    named = {
        id(row): name for plans in pairs for row, name in zip(plans, told_apart(plans), strict=True)
    }
    several = len({row.num_draft_tokens for row in rows if row.draft}) > 1
    columns = (
        Column("model", of="model", text=True),
        Column("draft", of=lambda row: row.draft or "–", text=True),
        Column(
            "K", of=lambda row: row.num_draft_tokens if several else None, optional=True, names=True
        ),
        Column(
            "settings",
            of=lambda row: "\n".join(named[id(row)].settings) or None,
            text=True,
            optional=True,
        ),
        Column("needs\nGB", _gigabytes, "needed_bytes"),
        Column("free\nGB", of=_free),
        Column("ms/token\nat least", _ms, lambda row: _lowest(row, _slowest(row))[0]),
        Column("with\ndraft", _ms, lambda row: _lowest(row, _slowest(row))[1]),
        Column("speed-up\nat most", times, "highest_speedup"),
        Column("fits", of=_fits, text=True),
    )
    document: list[Line | Table] = [Table.of("plans", "", rows, columns, look="plain")]
    document.append(
        Line(f"{sum(_fits(row) == 'yes' for row in rows)} of {len(rows)} fit.", "strong")
    )
    if names := sorted({name for row in rows if (name := _slowest(row))}):
        document.append(
            Line(f"Times: what reading the weights takes at least on {' or '.join(names)}.", "dim")
        )
    return document


def _is_split(row: PlanRow) -> bool:
    return row.placement == "tensor_parallel" and (row.num_gpus or 0) > 1


def _free(row: PlanRow) -> str | None:
    count = f"{row.num_gpus} × " if row.num_gpus else ""
    return None if row.free_bytes is None else f"{count}{_gigabytes(row.free_bytes)}"


def _fits(row: PlanRow) -> str:
    if row.status == "ok":
        return "yes" if row.needed_bytes is not None else "the weights do"
    if row.status != "does_not_fit":
        return f"{row.status}: {row.error}"
    # The first remedy, in short.
    first = (
        (row.instead or "").partition("\n")[0].partition(" (")[0].replace(".quantization=", " in ")
    )
    return f"no; {first}" if first else "no"


def _models(row: PlanRow) -> Table:
    """The memory of each model, next to llama-ssp's rule of thumb."""
    columns = (
        Column("model", text=True),
        Column("parameters", _parameters),
        Column("held in"),
        Column("weights", lambda size: amount(size) if size else "the model's"),
        Column("KV cache"),
        Column("llama-ssp's\nrule", amount),
    )
    rows = []
    for prefix, name, size in (
        ("", row.model, row.model_bytes),
        ("draft_", row.draft, row.draft_bytes),
    ):
        # A method without weights has no figures.
        if name and getattr(row, f"{prefix}num_parameters") is not None:
            parameters, dtype, quantization, cache, rule = (
                getattr(row, prefix + column) for column in _OF_EACH
            )
            held = dtype if quantization == "none" else quantization
            rows.append(
                TableRow(
                    (
                        name,
                        parameters,
                        held,
                        size,
                        "unknown" if cache is None else amount(cache),
                        rule,
                    )
                )
            )
    return Table("models", "", columns, tuple(rows), look="plain")


def _devices(row: PlanRow) -> Table:
    """A bar for each device, with the layers that are there."""
    devices, parts = row.devices_bytes or {}, _parts(row)
    longest = max(max(sum(part.values()), devices[name]["free"]) for name, part in parts.items())
    maps = {"model": row.device_map or {}, "draft": row.draft_device_map or {}}
    rows = []
    for name, part in parts.items():
        free = devices[name]["free"]
        size = _gigabytes(sum(part.values())) + (f" of {_gigabytes(free)} GB" if free else " GB")
        layers = [
            f"{which}: {here}" for which, found in maps.items() if (here := layers_on(found, name))
        ]
        if _is_split(row):
            layers = [
                line.replace("model: all of it", "model: its part of every layer")
                for line in layers
            ]
        rows.append(
            (_device(name), "\n".join([f"{_bar(part, free, longest):{_BAR + 1}} {size}", *layers]))
        )
    seen = {kind for part in parts.values() for kind, size in part.items() if size} | {"free"}
    rows.append(("", "  ".join(f"{mark} {kind}" for kind, mark in _MARKS.items() if kind in seen)))
    return Table.of_lines("devices", rows)


def layers_on(device_map: Mapping[str, int | str], device: str) -> str:
    """The modules of a device map that are on `device`, numbered ones as ranges: `embed_tokens, layers 0–19`."""
    here = [
        module for module, place in device_map.items() if device in (str(place), f"cuda:{place}")
    ]
    if here == [""]:
        return "all of it"
    ranges: list[list[str]] = []  # name, and the numbers that follow each other
    for module in here:
        parent, _, last = module.rpartition(".")
        name = parent.rpartition(".")[2] if last.isdecimal() else last
        if (
            ranges
            and last.isdecimal()
            and ranges[-1][0] == name
            and int(ranges[-1][-1]) == int(last) - 1
        ):
            ranges[-1].append(last)
        else:
            ranges.append([name, last] if last.isdecimal() else [name])
    return ", ".join(
        f"{name} {'–'.join(dict.fromkeys(n[:1] + n[-1:]))}".strip() for name, *n in ranges
    )


def _parts(row: PlanRow) -> dict[str, dict[str, int]]:
    """By device, what a bar shows before its free end. The reserve is kept on each GPU that holds anything."""
    parts = {}
    for name, size in (row.devices_bytes or {}).items():
        held = {"model": size["model"], "draft": size["draft"], "KV cache": size["cache"]}
        kept = name.startswith("cuda") and any(held.values())
        parts[name] = {**held, "reserve": (row.reserve_bytes or 0) if kept else 0}
    return parts


def _bar(parts: Mapping[str, float], free: float, longest: float) -> str:
    """Marks, `_BAR` of them for `longest` bytes; a stroke where the memory ends, if more than that is needed."""
    marks, end = "", 0.0
    for kind, size in parts.items():
        end += size
        marks += _MARKS[kind] * (round(_BAR * end / longest) - len(marks))
    limit = round(_BAR * free / longest)
    marks += _MARKS["free"] * (limit - len(marks))
    return f"{marks[:limit]}│{marks[limit + 1 :]}" if free and len(marks) > limit else marks


def _verdict(row: PlanRow) -> Line:
    if row.status != "ok":
        return Line(f"{(row.error or '').partition(': ')[2]}.", "bad")
    frees = {name: size["free"] for name, size in (row.devices_bytes or {}).items() if size["free"]}
    spare = {name: free - sum(_parts(row)[name].values()) for name, free in frees.items()}
    tightest = min(spare, key=lambda name: spare[name])
    where = (
        "on the fullest GPU"
        if len(spare) > 1
        else f"{'in' if tightest == 'cpu' else 'on'} {_device(tightest)}"
    )
    stays = f"{amount(spare[tightest])} stay free {where}"
    if row.needed_bytes is None:
        return Line(f"The weights fit; {stays}, for a KV cache of unknown size.", "warning")
    needed = f"{amount(row.needed_bytes)} of weights and KV cache"
    return Line(f"It fits: {needed}; {stays}.", "good")


def _limits(row: PlanRow) -> list[Line | Table]:
    """The bytes that a token must read, and the least times that follow."""
    if row.read_bytes is None:
        unknown = f"What a forward of {row.model} must read is not known: its KV cache is not."
        return [Line(unknown, "dim")]
    read = row.read_bytes
    batch = f" for the {row.batch_size} rows of a batch" if (row.batch_size or 1) > 1 else ""
    each = " on each GPU" if _is_split(row) else ""
    must = (
        f"One forward of {row.model} must read {amount(read)}{each}{batch}, by any implementation."
    )
    columns = (
        Column("ms/token, at least", of=str, text=True),
        Column("GB/s", of=lambda name: f"{(row.bandwidths or {})[name]:g}"),
        Column("alone", _ms, lambda name: _lowest(row, name)[0]),
        Column(
            "with the draft, all accepted", _ms, lambda name: _lowest(row, name)[1], optional=True
        ),
    )
    example = f"bandwidth=100 (GB/s) would make that {_ms(read / 100e6)} ms per token at least."
    no_rate = Line(f"No bandwidth is known here: {example}", "dim")
    known = Table.of("limits", "", row.bandwidths or {}, columns, look="plain")
    found: list[Line | Table] = [Line(must), known if row.bandwidths else no_rate]
    if row.highest_speedup is not None:
        pays = f"Speculation pays from {row.break_even_tokens:.2f} tokens per iteration"
        found.append(
            Line(
                f"{pays}, and gains {times(row.highest_speedup)} at most (K={row.num_draft_tokens})."
            )
        )
    return found


def _slowest(row: PlanRow) -> str | None:
    """The name of the lowest bandwidth that the plan knows."""
    rates = row.bandwidths or {}
    return min(rates, key=lambda name: rates[name], default=None)


def _lowest(row: PlanRow, name: str | None) -> list[float | None]:
    """Milliseconds per token of the model alone and with its draft, at one of the plan's bandwidths."""
    rate = (row.bandwidths or {}).get(name or "")
    return [
        rate and size and size / rate / 1e6 for size in (row.read_bytes, row.speculative_read_bytes)
    ]


def _device(name: str) -> str:
    return {"cpu": "main memory", "disk": "disk"}.get(name, name.replace("cuda:", "GPU "))


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f}"


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _parameters(count: float) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 0.1e9 else f"{count / 1e6:.1f} million"
