"""What `plan` prints: what a pair takes, where its layers go, and how fast it can be at best; in 80 columns."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]

_WIDTH = 80
_BAR = 40
# A mark and a colour for each part of a bar: Okabe and Ito's palette, and marks that differ without colour.
_PARTS = {
    "model": ("█", "#0072B2"),
    "draft": ("▓", "#009E73"),
    "KV cache": ("▒", "#CC79A7"),
    "reserve": ("░", "#E69F00"),
    "free": ("·", "dim"),
}
_OVER = "#D55E00"
_STATUS = {"ok": "fits", "does_not_fit": "no"}


def print_report(row: Row) -> None:
    """Print the plan of one pair on stdout: `row` as in the CSV file, as text or as values."""
    console = _console()
    fits = row["status"] == "ok"
    draft = f" with draft {row['draft']}" if row["draft"] else ""
    console.print(f"{row['model']}{draft} on {row['devices']}", style="bold")
    console.print(_lengths(row), style="dim")
    if not _number(row["num_gpus"]):
        console.print("No GPU here: planned for main memory; gpus=4 gpu_memory=40GB pretends GPUs.", style="yellow")
    console.print(_models(row))
    for line in _devices(row):
        console.print(line)
    console.print()
    console.print(_verdict(row), style="bold green" if fits else "bold red")
    if not fits:
        _print_instead(console, row)
    if row["note"]:
        console.print(f"Note: {row['note']}.", style="yellow")
    console.print()
    _print_limits(console, row)


def print_plans(rows: Sequence[Row]) -> None:
    """Print one table of many pairs on stdout: `rows` as in the CSV file, as text or as values.

    The lowest time is that of the slowest bandwidth the plan knows; empty where it knows none.
    """
    console = _console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("model", "draft"):
        table.add_column(heading, overflow="fold")
    for heading in ("needs\nGB", "free\nGB", "ms/token\nat least", "with\ndraft", "speed-up\nat most"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fits", overflow="fold")
    for row in rows:
        bandwidth = min(_bandwidths(row).values(), default=None)
        if row["status"] == "ok":
            verdict = Text("yes", style="green")
        elif row["status"] == "does_not_fit":
            instead = (row["instead"] or "").splitlines()
            # The first remedy, in short.
            short = [remedy.partition(" (")[0].replace(".quantization=", " in ") for remedy in instead[:1]]
            verdict = Text("; ".join(["no", *short]), style="red")
        else:
            verdict = Text(f"{row['status']}: {row['error']}", style="red")
        needed, free = _number(row["needed_bytes"]), _number(row["free_bytes"])
        highest = _number(row["highest_speedup"])
        table.add_row(
            str(row["model"]),
            str(row["draft"] or "–"),
            "" if needed is None else f"{needed / 1e9:.1f}",
            "" if free is None else _times(_number(row["num_gpus"]), free),
            *("" if ms is None else _ms(ms) for ms in _lowest(row, bandwidth)),
            "" if highest is None else f"{highest:.2f}×",
            verdict,
        )
    console.print(table)
    num_fitting = sum(row["status"] == "ok" for row in rows)
    console.print(f"{num_fitting} of {len(rows)} fit.", style="bold")
    names = {min(known, key=lambda name: known[name]) for known in map(_bandwidths, rows) if known}
    if names:
        times = " or ".join(_bandwidth_name(name) for name in sorted(names))
        console.print(f"Times: what reading the weights takes at least on {times}.", style="dim")


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else _WIDTH)


def _lengths(row: Row) -> str:
    parts = [
        f"batch {row['batch_size']}" if int(row["batch_size"]) > 1 else "one row",
        f"{row['prompt_length']} prompt + {row['max_new_tokens']} new tokens",
    ]
    parts += [f"K={row['num_draft_tokens']}"] if row["draft"] else []
    return " · ".join([*parts, f"placement {row['placement']}"])


def _models(row: Row) -> Table:
    """What each model takes, and llama-ssp's rule of thumb beside it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    for heading in ("parameters", "held in", "weights", "KV cache", "llama-ssp's\nrule"):
        table.add_column(heading, justify="right", no_wrap=True)
    for prefix, name in (("", row["model"]), ("draft_", row["draft"])):
        if not name:
            continue
        quantization = row[f"{prefix}quantization"]
        weights, cache = _number(row[f"{prefix or 'model_'}bytes"]), _number(row[f"{prefix}cache_bytes"])
        table.add_row(
            str(name),
            _parameters(_value(row[f"{prefix}num_parameters"])),
            row[f"{prefix}dtype"] if quantization == "none" else quantization,
            _amount(weights) if weights else "the model's",
            "unknown" if cache is None else _amount(cache),
            _amount(_value(row[f"{prefix}rule_of_thumb_bytes"])),
        )
    return table


def _devices(row: Row) -> list[Text]:
    """A bar for each device, and below it which layers lie there."""
    devices: dict[str, dict[str, int]] = json.loads(row["devices_bytes"])
    maps = {
        part: json.loads(row[f"{prefix}device_map"])
        for part, prefix in (("model", ""), ("draft", "draft_"))
        if row[f"{prefix}device_map"]
    }
    parts = {name: _parts(name, device, _value(row["reserve_bytes"])) for name, device in devices.items()}
    longest = max(max(sum(part.values()), devices[name]["free"]) for name, part in parts.items())
    lines, seen = [], set()
    for name, part in parts.items():
        used, free = sum(part.values()), devices[name]["free"]
        seen |= {kind for kind, size in part.items() if size}
        amount = f"{used / 1e9:.1f} of {free / 1e9:.1f} GB" if free else f"{used / 1e9:.1f} GB"
        lines.append(
            Text.assemble(
                (f"{_device(name):12}", "bold"),
                *_bar(part, free, longest),
                (f" {amount}", _OVER if used > free else ""),
            )
        )
        for which, device_map in maps.items():
            if here := layers_on(device_map, name):
                lines.append(Text(f"{'':12}{which}: {here}", style="dim"))
    legend = [(f"{mark} {kind}  ", style) for kind, (mark, style) in _PARTS.items() if kind in {*seen, "free"}]
    return [*lines, Text.assemble(f"{'':12}", *legend)]


def layers_on(device_map: Mapping[str, int | str], device: str) -> str:
    """Which modules of a device map lie on `device`, runs of layers as ranges: `embed_tokens, layers 0–19`."""
    here = [module for module, place in device_map.items() if device in (str(place), f"cuda:{place}")]
    if here == [""]:
        return "all of it"
    words: list[str] = []
    run: list[str | int] = []  # name, first, last

    def end() -> None:
        if run:
            words.append(f"{run[0]} {run[1]}" + (f"–{run[2]}" if run[2] != run[1] else ""))
            run.clear()

    for module in here:
        numbered = re.fullmatch(r"(?:.*\.)?([^.]+)\.(\d+)", module)
        if numbered is None:
            end()
            words.append(module.rpartition(".")[2])
        elif run and run[0] == numbered[1] and int(numbered[2]) == int(run[2]) + 1:
            run[2] = int(numbered[2])
        else:
            end()
            run[:] = [numbered[1], int(numbered[2]), int(numbered[2])]
    end()
    return ", ".join(words)


def _parts(name: str, device: Mapping[str, int], reserve: float) -> dict[str, float]:
    """What a bar shows before the free end; the cache lies inside the reserve as far as that goes."""
    gpu = name.startswith("cuda")
    return {
        "model": device["model"],
        "draft": device["draft"],
        "KV cache": device["cache"],
        "reserve": max(0.0, reserve - device["cache"]) if gpu else 0.0,
    }


def _bar(parts: Mapping[str, float], free: float, longest: float) -> list[tuple[str, str]]:
    """Marks of a bar that is `_BAR` wide for `longest` bytes; what lies beyond `free` has the colour of a warning."""
    marks: list[tuple[str, str]] = []
    end, drawn = 0.0, 0
    for kind, size in parts.items():
        end += size
        wide = round(_BAR * end / longest) - drawn
        marks += [_PARTS[kind]] * wide
        drawn += wide
    limit = round(_BAR * free / longest)
    marks += [_PARTS["free"]] * (limit - drawn)
    if free and len(marks) > limit:
        # Where the memory ends.
        marks = [*marks[:limit], ("│", "bold"), *((mark, _OVER) for mark, _ in marks[limit + 1 :])]
    return [*marks, (" " * (_BAR + 1 - len(marks)), "")]


def _verdict(row: Row) -> str:
    devices = json.loads(row["devices_bytes"])
    if row["status"] != "ok":
        return f"{str(row['error']).partition(': ')[2]}."
    spare = {
        name: device["free"] - sum(_parts(name, device, _value(row["reserve_bytes"])).values())
        for name, device in devices.items()
        if device["free"]
    }
    tightest = min(spare, key=lambda name: spare[name])
    where = "on the fullest GPU" if len(spare) > 1 else f"{'in' if tightest == 'cpu' else 'on'} {_device(tightest)}"
    needed = _amount(_value(row["needed_bytes"]))
    return f"It fits: {needed} of weights and KV cache; {_amount(spare[tightest])} stay free {where}."


def _print_instead(console: Console, row: Row) -> None:
    instead = (row["instead"] or "").splitlines()
    console.print("What would fit instead:" if instead else "A smaller model is needed.")
    for remedy in instead:
        console.print(f"  {remedy}")


def _print_limits(console: Console, row: Row) -> None:
    """What a token must read, and the lowest possible times that follow."""
    read, bandwidths = _value(row["read_bytes"]), _bandwidths(row)
    batch = f" for the {row['batch_size']} rows of a batch" if int(row["batch_size"]) > 1 else ""
    console.print(f"One forward of {row['model']} must read {_amount(read)}{batch}, by any implementation.")
    if bandwidths:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("ms/token, at least")
        for heading in ("GB/s", "alone", *(["with the draft, all accepted"] if row["draft"] else [])):
            table.add_column(heading, justify="right")
        for name, bandwidth in bandwidths.items():
            times = [_ms(ms) for ms in _lowest(row, bandwidth) if ms is not None]
            table.add_row(_bandwidth_name(name), f"{bandwidth:g}", *times)
        console.print(table)
    else:
        example = f"bandwidth=100 (GB/s) would make that {_ms(read / 100e6)} ms a token at least."
        console.print(f"No bandwidth is known here: {example}", style="dim")
    highest = _number(row["highest_speedup"])
    if highest is not None:
        console.print(
            f"Speculation pays from {_value(row['break_even_tokens']):.2f} tokens an iteration on,"
            f" and gains {highest:.2f}× at most (K={row['num_draft_tokens']})."
        )


def _lowest(row: Row, bandwidth: float | None) -> list[float | None]:
    """Milliseconds a token of the model alone and with its draft, at a bandwidth in GB/s."""
    read = (_number(row["read_bytes"]), _number(row["speculative_read_bytes"]))
    return [None if bandwidth is None or size is None else size / bandwidth / 1e6 for size in read]


def _bandwidths(row: Row) -> dict[str, float]:
    return json.loads(row["bandwidths"]) if row["bandwidths"] else {}


def _bandwidth_name(name: str) -> str:
    return "the given bandwidth" if name == "bandwidth=" else name


def _times(count: float | None, free: float) -> str:
    return f"{count:.0f} × {free / 1e9:.1f}" if count else f"{free / 1e9:.1f}"


def _device(name: str) -> str:
    return {"cpu": "main memory", "disk": "disk"}.get(name, name.replace("cuda:", "GPU "))


def _amount(size: float) -> str:
    return f"{size / 1e6:.1f} MB" if size < 0.1e9 else f"{size / 1e9:.2f} GB" if size < 10e9 else f"{size / 1e9:.1f} GB"


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _parameters(count: float) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 0.1e9 else f"{count / 1e6:.1f} million"


def _number(value: Any) -> float | None:
    """A cell as a number; None for an empty one."""
    return None if value is None or value == "" else float(value)


def _value(value: Any) -> float:
    return float(value)
