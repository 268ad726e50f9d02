"""Columns that are known by their heading, as a whole and with its unit, or that a user names; nothing is guessed."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from harness.results.printed.cells import AGAIN, Cells
from harness.results.printed.figures import MARKS, NUMBERS, SPEEDS, PrintedFigure, is_stated

# What a column may be but a number: the name of an arm; what both arms must share; neither, for example a remark.
ARM, CONDITION, UNUSED = "draft", "condition", "unused"
# One spelling of a heading, by replacements in this order.
_SPELLINGS = {
    r"[*`_()\[\]:,†‡#~]|\.(?!\w)|--|(?<=\w)-(?=\w)": " ",
    r"\s+": " ",
    r"\s*(?:/|\bper\b)\s*": "/",
    r"\b(?:toks?|tokens?|tk|t)/(?:s|sec|seconds?)\b|\btps\b": "tok/s",
    r"\b(?:toks?|tokens?)/(?:iter\w*|step|round|forward|pass|cycle|verif\w*)\b": "tok/step",
    r"\bms/tok(?:en)?\b|\b(?:tpot|time/output token)\b(?: ms)?": "tpot",
    r"\blen\b": "length",
    r"\b(?:avg|average)\b": "mean",
    r"\bpercent\b": "%",
    r"\s*%": " %",
    r"\bspeed up\b": "speedup",
}
# Headings in that spelling, by our name.
KNOWN = {
    "num_draft_tokens": "k, k draft tokens, γ, gamma, n max, best n max, draft max, n draft, draft n max,"
    " spec draft n max, num speculative tokens, speculative tokens",
    "tokens_per_iteration": "τ, tau, al, mal, acceptance length, accept length, acc length, mean acceptance length,"
    " mean accept length, mean acc length, tok/step, mean tok/step,"
    " expected tok/step, emitted/verify",
    "acceptance_rate": "acceptance, acceptance rate, accept, accept rate, acc rate, accepted,"
    " draft acceptance, draft acceptance rate, mean acceptance rate, mean accept rate, draft tokens accepted,"
    " draft accept, mean draft acceptance, mtp acceptance rate",
    "speedup": "speedup, decode speedup, net speedup, speedup x, speedup ×, speedup over ar, speedup vs baseline",
    "user_tokens_per_second": "tok/s/user, decode tok/s/user, output tok/s/user",
    "tokens_per_second": "tok/s, decode tok/s, output tok/s, generation tok/s, gen tok/s, tg tok/s, mean tok/s,"
    " tok/s mean, pooled tok/s, mean decode tok/s, throughput tok/s, output throughput tok/s, speed tok/s,"
    " decode speed tok/s, generation speed tok/s, output token throughput tok/s, mean pred tok/s",
    "ms_per_token": "tpot, mean tpot, median tpot, tpot after the first, latency tpot",
    "latency_s": "latency s, mean latency s, e2e latency s, end to end latency s, request latency s",
    "topk": "topk, eagle topk",
    "p_min": "p min, draft p min, spec draft p min",
    "batch_size": "batch, batch size, bs, concurrency, max concurrency, in flight, rows, users, streams",
    "input_tokens": "input tokens",
    "output_tokens": "output tokens",
    "width": "width",
    "ms": "ms",
    "ms_low": "low, ms low",
    "ms_high": "high, ms high",
    # Also a column without a heading.
    ARM: ", draft, draft model, drafter, method, mode, arm, config, configuration, setup, variant, condition, strategy,"
    " spec, mtp, speculation, speculative decoding, decoding, run, kind",
    UNUSED: "seed, ttft, ttft ms, ttft s, mean ttft ms, itl, itl ms, latency, throughput, wall s, total s, vram,"
    " vram gb, peak vram gb, memory gb, peak memory gb, prompt tok/s, prefill tok/s, pp tok/s, prompt"
    " processing tok/s, input tok/s, total tok/s, draft tok/s, steps, num steps,"
    " num draft, draft length, num draft tokens, mean draft tokens, drafted, draft/accepted, δ, delta, change, gain,"
    " vs base, vs baseline, vs none, runs, ms/step, quality, note, notes, remark, remarks, comment",
}
_NAMES = {heading: name for name, text in KNOWN.items() for heading in text.split(", ")}
_REGULAR_COLUMN = re.compile(
    r"(?:baseline|base(?= mean pred)|regular|plain|vanilla|no (?:spec|speculation|mtp|draft)) (.+)"
)
# Cells of arms, as a whole or with another one in brackets, that say that nothing is drafted.
REGULAR_ARMS = (
    "baseline, regular, none, n/a, plain, vanilla, serial, autoregressive, standard autoregressive, ar, no draft,"
    " no drafts, no spec, no speculation, no speculative decoding, without speculation, no mtp, mtp off, spec off,"
    " speculation off, target only"
)
REGULAR = "regular"
_REGULAR_ARMS = {*REGULAR_ARMS.split(", ")}
_PER_SECOND = re.compile(
    r"[\d.,]+ ?(?:tps|(?:toks?|tokens?|tk|t) ?(?:/|per) ?s(?:ec\w*)?)\s*(?:[(\[].*)?", re.I
)


class PrintedColumn(NamedTuple):
    """The meaning of a column.

    Attributes:
        name: ours of a number, or one of the kinds above.
        in_percent: whether its shares are in percent.
    """

    name: str
    in_percent: bool = False

    def read(self, text: str) -> PrintedFigure | None:
        """The figure of a cell; None for `n/a`, and K = 0 for `none`.

        Raises:
            ValueError: why it is no such number.
        """
        if self.name == "num_draft_tokens" and is_regular_arm(text):
            return PrintedFigure.exactly(0, text)
        return PrintedFigure.read(self.name, text, self.in_percent)


def is_regular_arm(text: str) -> bool:
    """Whether a cell names the regular arm, as `baseline (no MTP)` does."""
    parts = {part.strip(MARKS) for part in re.split(r"[()\[\]]", text.lower().replace("-", " "))}
    return bool(text) and _REGULAR_ARMS.issuperset(parts - {""})


def columns_of(
    rows: Sequence[Cells], names: Collection[str], named: Cells
) -> dict[str, PrintedColumn]:
    """The meaning of each column, by heading; a column that is not known is a condition.

    Args:
        names: of columns that are looked for.
        named: some of these by heading, which the user names.
    """
    headings = {}
    for heading in rows[0]:
        text, _, _ = heading.partition(AGAIN)
        headings[heading] = _spelled(text, [row[heading] for row in rows])
    meanings = {heading: named.get(heading, _meaning(text)) for heading, text in headings.items()}
    for name, unit in SPEEDS.items():
        if f"regular_{name}" not in meanings.values() or name in named.values():
            continue
        # What else has the unit of the regular arm's speed is the other arm, if it is one column.
        arms = [
            heading
            for heading, text in headings.items()
            if text.endswith(unit) and meanings[heading] in (CONDITION, name)
        ]
        meanings |= dict.fromkeys(arms, name if len(arms) == 1 else CONDITION)
    columns = {}
    for heading, name in meanings.items():
        is_one_of_several = name in NUMBERS and [*meanings.values()].count(name) > 1
        is_read = name in names and (heading in named or not is_one_of_several)
        columns[heading] = PrintedColumn(name if is_read else CONDITION, "%" in headings[heading])
    return columns


def _spelled(heading: str, cells: Sequence[str]) -> str:
    """A heading in one spelling, with the unit of its cells where all have one."""
    text = heading.lower()
    for pattern, replacement in _SPELLINGS.items():
        text = re.sub(pattern, replacement, text).strip()
    stated = [cell.strip(MARKS) for cell in cells if is_stated(cell)]
    if "tok/s" not in text and stated and all(map(_PER_SECOND.fullmatch, stated)):
        text = f"{text} tok/s".strip()
    return text


def _meaning(heading: str) -> str:
    if regular := _REGULAR_COLUMN.fullmatch(heading):
        name = _NAMES.get(regular[1])
        return f"regular_{name}" if name in SPEEDS else CONDITION
    name = _NAMES.get(heading.removesuffix(" %"), CONDITION)
    return CONDITION if "%" in heading and name != "acceptance_rate" else name
