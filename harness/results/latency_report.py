"""The table that `latency` prints: what was measured, and the reason."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.results.acceptance import Acceptance
from harness.results.labels import labels

# Without a terminal the table goes into a file or a pull request: wide enough not to wrap.
_PLAIN_WIDTH = 110


class DivergenceLike(Protocol):
    """Where a greedy text left the regular one: position among the new tokens, and the logit margin there."""

    @property
    def position(self) -> int: ...
    @property
    def logit_margin(self) -> float: ...


@dataclass(frozen=True)
class CategoryLine:
    """One category of prompts."""

    category: str
    num_prompts: int
    speedup: float
    acceptance: Acceptance


@dataclass(frozen=True)
class LatencyReport:
    """Figures of one run: the arm rows as in the CSV, and what is too long for a row.

    Attributes:
        rows: regular first.
        acceptance: of the speculative arm.
        categories: empty where prompts have none, or a batch holds several prompts.
        divergences: of a greedy run, one a prompt; empty otherwise.
    """

    rows: Sequence[Mapping[str, Any]]
    acceptance: Acceptance
    categories: Sequence[CategoryLine]
    divergences: Sequence[DivergenceLike | None]


@dataclass(frozen=True)
class OperatorLine:
    """An operator, or on a GPU a kernel, without what it calls; `share` is of all of them."""

    name: str
    calls: int
    self_ms: float
    share: float


@dataclass(frozen=True)
class Profile:
    """The top of an arm's profile.

    Attributes:
        device: `CPU` or `GPU`: whose time it is.
        lines: the longest first.
        file: the trace.
    """

    arm: str
    num_tokens: int
    num_iterations: int
    device: str
    lines: Sequence[OperatorLine]
    file: str


def print_report(report: LatencyReport) -> None:
    """Print the report on stdout."""
    console = _console()
    console.print(_title(report.rows[0]), style="bold")
    console.print(_settings(report.rows), style="dim")
    console.print(_arms(report.rows))
    speculative = report.rows[-1]
    if speculative["speedup"] is not None and report.acceptance.num_iterations:
        console.print(_verdict(speculative), style="bold")
        console.print(_reason(report.rows[0], speculative, report.acceptance))
    elif roof := _roof("target reads", report.rows[0], "", report.rows[0].get("target_step_ms")):
        grid = _grid()
        grid.add_row(*roof)
        console.print(grid)
    if report.categories and len(report.categories) > 1:
        console.print(_categories(report.categories))
    if report.divergences:
        console.print(_identity(report.divergences))
    for warning in _warnings(report.rows[0]):
        console.print(warning, style="yellow")


def print_profiles(profiles: Sequence[Profile]) -> None:
    """Print the top of each profile on stdout."""
    console = _console()
    for profile in profiles:
        console.print(
            f"Where {profile.num_tokens} tokens of {profile.arm} decoding spend {profile.device} time"
            f" ({profile.num_iterations} iterations, slowed down by the profiler)",
            style="bold",
        )
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("kernel" if profile.device == "GPU" else "operator", overflow="ellipsis", no_wrap=True)
        for heading in ("calls", "ms", "share"):
            table.add_column(heading, justify="right")
        for line in profile.lines:
            # A kernel's name may look like markup.
            table.add_row(Text(line.name), str(line.calls), f"{line.self_ms:.2f}", f"{line.share:.1%}")
        console.print(table)
        console.print(f"trace for https://ui.perfetto.dev: {profile.file}", style="dim", soft_wrap=True)


def why_not(predicted: float, length: float, draft: float, verify: float, num_proposed: float) -> str:
    """What holds the speed-up back most: the one ideal that would raise the prediction most, with the numbers.

    Args:
        predicted: speed-up from the other four.
        length: mean acceptance length.
        draft: one draft step in target steps (c).
        verify: verifying in target steps (v).
        num_proposed: draft tokens an iteration (K).
    """
    free_draft = length / verify
    free_verification = length / (num_proposed * draft + min(verify, 1))
    never_rejected = (num_proposed + 1) / (num_proposed * draft + verify)
    ideals = {
        f"the draft is too slow: one of its steps costs {draft:.2f} of the target's; if it were free": free_draft,
        f"verification is too dear: {num_proposed:.3g} draft tokens cost {verify:.2f} target steps; at one step": (
            free_verification
        ),
        f"acceptance is too low: {length:.2f} of {num_proposed + 1:.3g} tokens an iteration; with all of them": (
            never_rejected
        ),
    }
    cause, ideal = max(ideals.items(), key=lambda item: item[1])
    return f"{cause} it would be {ideal:.2f}× instead of {predicted:.2f}×"


def _title(row: Mapping[str, Any]) -> str:
    devices = row.get("devices") or "unknown device"
    draft = f" with draft {row['draft']}" if row["draft"] else ""
    pair = ", ".join([f"{row['model']}{draft}", *labels(row)])
    return f"{pair} on {devices}"


def _settings(rows: Sequence[Mapping[str, Any]]) -> str:
    row = rows[-1]
    parts = [f"{row['num_prompts']} prompts ({row['prompts']})", f"{row['max_new_tokens']} new tokens"]
    if row["batch_size"] > 1:
        parts.append(f"batches of {row['batch_size']}")
    if row["num_draft_tokens"]:
        parts.append(f"K={row['num_draft_tokens']}")
    parts.append("greedy" if row["temperature"] == 0 else f"temperature {row['temperature']:g}")
    parts += [f"top_k {row['top_k']}"] if row["top_k"] else []
    parts += [f"top_p {row['top_p']:g}"] if row["top_p"] < 1 else []
    parts.append(str(row["dtype"]) if row["quantization"] == "none" else f"{row['quantization']}, {row['dtype']}")
    parts += [f"runner {row['runner']}"] if row["runner"] not in (None, "eager") else []
    return " · ".join([*parts, *labels(row)])


def _arms(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.ROUNDED)
    memory = any(row["peak_memory_bytes"] for row in rows)
    table.add_column("arm")
    for heading in ("ms/token", "tokens/s", "first token ms", *(["peak memory GB"] if memory else []), "speed-up"):
        table.add_column(heading, justify="right")
    for row in rows:
        spread = "" if row["ms_per_token_std"] is None else f" ± {row['ms_per_token_std']:.2f}"
        cells = [
            row["arm"] + (" (lossy)" if row["lossy"] and row["arm"] != "regular" else ""),
            f"{row['ms_per_token']:.2f}{spread}" if row["ms_per_token"] else "",
            f"{row['tokens_per_second']:.1f}" if row["tokens_per_second"] else "",
            f"{row['time_to_first_token_ms']:.1f}" if row["time_to_first_token_ms"] else "",
        ]
        if memory:
            cells.append(f"{row['peak_memory_bytes'] / 1e9:.2f}" if row["peak_memory_bytes"] else "")
        table.add_row(*cells, f"{row['speedup']:.2f}×" if row["speedup"] else "")
    return table


def _interval(row: Mapping[str, Any]) -> str:
    if row["speedup_low"] is None:
        return "no interval from one batch"
    return f"95 % interval {row['speedup_low']:.2f} to {row['speedup_high']:.2f}"


def _verdict(row: Mapping[str, Any]) -> str:
    speedup, low, high = row["speedup"], row["speedup_low"], row["speedup_high"]
    if low is not None and low <= 1 <= high:
        return f"Speculative decoding makes no sure difference here: {speedup:.2f}× ({_interval(row)})."
    if speedup > 1:
        return f"Speculative decoding is {speedup:.2f}× faster ({_interval(row)})."
    return f"Speculative decoding does not pay here: {speedup:.2f}× ({_interval(row)})."


def _reason(regular: Mapping[str, Any], speculative: Mapping[str, Any], acceptance: Acceptance) -> Table:
    """Acceptance, costs and prediction, one a line."""
    grid = _grid()
    length, proposed = acceptance.mean_acceptance_length or 1.0, acceptance.mean_proposed or 0.0
    rates = [acceptance.acceptance_rate, acceptance.conditional_acceptance_rate]
    grid.add_row(
        "acceptance",
        f"{rates[0]:.1%} of the draft tokens ({rates[1]:.1%} of those tested); {length:.2f} tokens an iteration",
    )
    grid.add_row("by position", "  ".join("–" if rate is None else f"{rate:.0%}" for rate in acceptance.by_position))
    total = acceptance.num_iterations
    grid.add_row(
        "accepted",
        "  ".join(f"{count}: {times / total:.0%}" for count, times in enumerate(acceptance.histogram))
        + f"  of {total} iterations",
    )
    step_ms, draft_ms, verify_ms = regular["target_step_ms"], speculative["draft_ms"], speculative["verify_ms"]
    predicted, iteration_ms = speculative["predicted_speedup"], speculative["iteration_ms"]
    drafting_ms = draft_ms / proposed if draft_ms and proposed else None
    for roof in (
        _roof("target reads", regular, "", step_ms),
        _roof("draft reads", speculative, "draft_", drafting_ms),
    ):
        if roof is not None:
            grid.add_row(*roof)
    if None in (step_ms, draft_ms, verify_ms, predicted, iteration_ms):
        return grid
    rest_ms = max(0.0, iteration_ms - draft_ms - verify_ms)
    grid.add_row(
        "an iteration",
        f"{iteration_ms:.2f} ms = drafting {draft_ms:.2f} + verifying {verify_ms:.2f} + rest {rest_ms:.2f};"
        f" a target step takes {step_ms:.2f} ms",
    )
    draft, verify = draft_ms / proposed / step_ms, verify_ms / step_ms
    grid.add_row(
        "predicted",
        f"{length:.2f} / ({proposed:.2f} × {draft:.3f} + {verify:.2f}) = {predicted:.2f}×;"
        f" measured is {speculative['speedup'] / predicted:.0%} of it",
    )
    if speculative["batch_size"] > 1:
        grid.add_row("", "(of each row for itself; a batch lasts as long as its slowest row)")
    if speculative["speedup"] < 1:
        grid.add_row("why", why_not(predicted, length, draft, verify, proposed))
    return grid


def _roof(name: str, row: Mapping[str, Any], prefix: str, step_ms: float | None) -> tuple[str, str] | None:
    """What a step must read, how long that takes at least, and how near a step comes to it; None where not known."""
    size, floor_ms = row.get(f"{prefix}step_bytes"), row.get(f"{prefix}floor_ms")
    if not size or not floor_ms or not step_ms:
        return None
    amount = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
    return name, (
        f"{amount} a step; from memory, at the {size / floor_ms / 1e6:.4g} GB/s of a large copy here, {floor_ms:.2f} ms"
        f" at least; a step takes {step_ms:.2f} ms, {floor_ms / step_ms:.0%} of that rate"
        + (" (above 100%: caches hold much of it)" if floor_ms > step_ms else "")
    )


def _grid() -> Table:
    """Lines with a name before them."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    return grid


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def _categories(lines: Sequence[CategoryLine]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("category")
    for heading in ("prompts", "speed-up", "acceptance", "tokens/iteration"):
        table.add_column(heading, justify="right")
    for line in lines:
        rate, length = line.acceptance.acceptance_rate, line.acceptance.mean_acceptance_length
        table.add_row(
            line.category,
            str(line.num_prompts),
            f"{line.speedup:.2f}×",
            "" if rate is None else f"{rate:.1%}",
            "" if length is None else f"{length:.2f}",
        )
    return table


def _identity(divergences: Sequence[DivergenceLike | None]) -> str:
    parted = [divergence for divergence in divergences if divergence is not None]
    identical = f"{len(divergences) - len(parted)} of {len(divergences)}"
    if not parted:
        return f"Greedy output is identical token for token on {identical} prompts."
    first = min(parted, key=lambda divergence: divergence.position)
    margin = max(abs(divergence.logit_margin) for divergence in parted)
    return (
        f"Greedy output is identical on {identical} prompts. The earliest difference is at token {first.position}; the"
        f" largest logit margin at a difference is {margin:.2g} (near 0: a tie that rounding broke differently)."
    )


def _warnings(row: Mapping[str, Any]) -> list[str]:
    warnings = []
    if row["test"]:
        warnings.append("test=true: two short prompts show that the pair works, not how fast it is.")
    if row.get("weights") == "random":
        warnings.append(
            "weights=random: times are those of the architecture; texts, and acceptance by the rule, mean nothing."
            " Prompts were read byte by byte."
        )
    if any(label.startswith("synthetic") for label in labels(row)):
        warnings.append(
            f"decoding.synthetic_acceptance={row['synthetic_acceptance']:g}: a coin accepted the draft tokens; the"
            " speed-up is what the pair would have if it agreed that often."
        )
    if row["lenience"] < 1:
        warnings.append(f"lenience {row['lenience']:g}: the speculative output no longer follows the target (lossy).")
    if row["status"] != "ok":
        warnings.append(f"{row['status']}: the figures cover {row['num_prompts']} prompts only.")
    return warnings
