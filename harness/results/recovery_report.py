"""What `recovery` prints: every check, and the verdict that people quote."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from harness.results.labels import labels

# Without a terminal the table goes into a file or a pull request: wide enough not to wrap.
_PLAIN_WIDTH = 110
_STYLES = {"lossless": "bold green", "lossy": "bold red", "undecided": "bold yellow"}

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Summary:
    """The verdict over all checks of a run.

    Attributes:
        sentence: with the numbers that it rests on.
        in_short: one line for an error message.
    """

    verdict: Literal["lossless", "lossy", "undecided"]
    sentence: str
    in_short: str


def summarise(rows: Rows) -> Summary:
    """One loss is a loss; without one, all prompts together must decide. Lenience, or a coin, is one by definition."""
    verdicts = [row["verdict"] for row in rows]
    decisive = [row for row in rows if row["prompt_index"] is None]
    findings = _findings(rows)
    if "lossy" in verdicts:
        return Summary("lossy", f"Lossy: {findings}.", f"lossy: {findings}")
    if rows[0]["lossy"]:
        bias = rows[0].get("synthetic_acceptance")
        what = f"lenience {rows[0]['lenience']:g}" if bias is None else f"acceptance by a coin of bias {bias:g}"
        why = f"{what} is lossy by definition, although these checks do not show it"
        return Summary("lossy", f"Lossy: {why}; {findings}.", f"lossy: {why}")
    if undecided := [row for row in decisive if row["verdict"] == "undecided"]:
        weakest = min(undecided, key=lambda row: row["power"])
        why = (
            f"{weakest['num_draws']:,} draws with K={weakest['num_draft_tokens']} would see a shift of"
            f" {weakest['shift']:.0%} in a token's distribution with a chance of {_share(weakest['power'])} only;"
            " raise num_draws, shift or decoding.temperature"
        )
        return Summary("undecided", f"Not enough draws to tell: {findings}, but {why}.", f"undecided: {why}")
    return Summary("lossless", f"Lossless: {findings}.", "lossless")


def print_report(rows: Rows) -> None:
    """Print the report on stdout: `rows` as in the CSV file, at least one check."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    row, summary = rows[0], summarise(rows)
    pair = ", ".join([f"{row['model']} with draft {row['draft']}", *labels(row)])
    console.print(f"{pair} on {row['devices'] or 'unknown device'}", style="bold")
    console.print(_settings(rows), style="dim")
    console.print(_checks(rows))
    if row["status"] != "ok":
        console.print(f"{row['status']}: these checks were finished, and no verdict follows from them.", style="yellow")
        return
    if row["fault"] != "none":
        console.print(f"A control: fault={row['fault']} was planted, and the checks must find it.", style="yellow")
    if made_up := labels(row):
        console.print(f"Of {' and '.join(made_up)}: this says nothing about the pair itself.", style="yellow")
    console.print(summary.sentence, style=_STYLES[summary.verdict])
    for line in _fine_print(rows):
        console.print(line, style="dim")


def _settings(rows: Rows) -> str:
    row = rows[-1]
    parts = [f"prompts {row['prompts']}", f"K={row['num_draft_tokens']}"]
    parts.append("greedy" if row["temperature"] == 0 else f"temperature {row['temperature']:g}")
    parts += [f"top_k {row['top_k']}"] if row["top_k"] else []
    parts += [f"top_p {row['top_p']:g}"] if row["top_p"] < 1 else []
    parts += [f"lenience {row['lenience']:g} (lossy)"] if row["lenience"] < 1 else []
    parts += labels(row)
    parts.append(str(row["dtype"]) if row["quantization"] == "none" else f"{row['quantization']}, {row['dtype']}")
    parts.append(f"seed {row['seed']}")
    return " · ".join(parts)


def _checks(rows: Rows) -> Table:
    table = Table(box=box.ROUNDED)
    table.add_column("check", no_wrap=True)
    for heading in ("K", "tokens", "draws", "accepted", "outcome", "p-value", "power", "verdict"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row["prompt_index"] is not None and row["verdict"] != "lossy":
            continue  # of the prompts, those alone that have something to say
        if row["check"] == "greedy":
            outcome = f"{row['identical_prompts']} of {row['num_prompts']} identical"
            cells = ["greedy", str(row["num_draft_tokens"]), f"{row['num_tokens']:,}", "", "", outcome, "", ""]
        else:
            cells = [
                f"sampled, {row['num_prompts']} prompts"
                if row["prompt_index"] is None
                else f"sampled, prompt {row['prompt_index']}",
                str(row["num_draft_tokens"]),
                f"first {row['num_tokens']}",
                f"{row['num_draws']:,}",
                "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}",
                f"χ² {row['statistic']:.1f}, df {row['degrees_of_freedom']}",
                _p_value(row["p_value"]),
                _share(row["power"]),
            ]
        table.add_row(*cells, row["verdict"])
    return table


def _findings(rows: Rows) -> str:
    """What was seen, in numbers."""
    findings = []
    for row in rows:
        if row["check"] == "greedy":
            identical = f"{row['identical_prompts']} of {row['num_prompts']}"
            found = f"greedy output is identical token for token on {identical} prompts ({row['num_tokens']:,} tokens)"
            if row["logit_margin"] is not None:
                explained = "within" if row["verdict"] == "lossless" else "beyond"
                found += (
                    f"; where it differs most, at token {row['divergence_position']}, the logit margin"
                    f" {abs(row['logit_margin']):.2g} is {explained} the rounding of {row['dtype']},"
                    f" {row['logit_tolerance']:.2g}"
                )
            findings.append(found)
    sampled = [row for row in rows if row["check"] == "sampled"]
    if sampled:
        draws = sum(row["num_draws"] for row in sampled if row["prompt_index"] is not None)
        failed = sum(row["verdict"] == "lossy" for row in sampled)
        smallest = _p_value(min(row["p_value"] for row in sampled))
        follow = f"fail {failed} of {len(sampled)} tests against" if failed else "follow"
        findings.append(
            f"{draws:,} sampled continuations {follow} the target's exact distribution (smallest p-value {smallest}"
            + ("" if failed else f" of {len(sampled)} tests")
            + ")"
        )
    return "; ".join(findings)


def _fine_print(rows: Rows) -> list[str]:
    sampled = [row for row in rows if row["check"] == "sampled"]
    if not sampled:
        return ["At temperature 0 the output has one possible value; nothing was sampled."]
    row, weakest = sampled[0], min(row["power"] for row in sampled if row["prompt_index"] is None)
    lines = [
        f"A lossless pair is called lossy in at most {row['false_alarm_rate']:.0e} of such runs (each test at"
        f" p < {row['significance_level']:.1e}); a shift of {row['shift']:.0%} in a token's distribution is seen with a"
        f" chance of {_share(weakest)}."
    ]
    rounding = max(row["rounding"] for row in sampled)
    if rounding >= 0.01:
        lines.append(f"The tests put a χ² of up to {rounding:.2g} down to the rounding of {row['dtype']}.")
    return lines


def _p_value(value: float) -> str:
    if value == 0:
        return "< 1e-300"
    return f"{value:.2g}"


def _share(value: float) -> str:
    return "> 99.9 %" if value > 0.999 else f"{100 * value:.1f} %"
