"""Our names of a table's columns, by the words of their headings and by the kind of their cells."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from harness.results.printed.cells import KEYS, Cells
from harness.results.printed.figures import (
    MARKS,
    RATES,
    SETTINGS,
    SPEEDS,
    PrintedFigure,
    is_regular_arm,
    is_stated,
    leading_numbers,
)

# Spellings of a word, each replaced in this order.
_SPELLINGS = {
    " ": r"[*`_()\[\]:,†‡#~]|\.(?!\w)|--|95 ?% ci|(?<=\w)-(?=\w)",
    "vs": r"\b(vs\b\.?|versus|over|relative to|compared (to|with))( the)?",
    "regular": r"\b(baseline|base|vanilla|plain|classic|autoregressive|ar|off|none|without|w/o)\b"
    r"|\bnon?\b(?= (spec|mtp\b|draft))",
    " /user": r"( ?/ ?|\bper )(user|stream|request)s?\b",
    "tps": r"\b(tok\w*|tk|t)( ?/ ?| per | )s(ec\w*)?\b|\btps\b",
    "tpot": r"\bms ?(/|per) ?tok\w*|\btpot( ms)?|\btime per output token( ms)?",
    " /iter": r"( ?/ ?|\bper )(iter|step|round|forward|verif|cycle|pass)\w*",
    "accept": r"\bacc(ept(ance|ed)?)?\b\.?",
    "speedup": r"\bspeed ?ups?\b",
    "speedup gain": r"\bfaster\b",
    "gain": r"\b(gains|uplift|improvement)\b",
    " change ": r"[δ∆]|\b(delta|diff)\b",
    " % ": r"\bpercent(age)?\b|\bpct\b|%",
    "mean": r"\b(avg|average|median|pooled|measured|effective|expected)\b",
    "token": r"\b(tok|toks|tokens|emitted)\b",
    "length": r"\blen\w*",
    "draft": r"\b(drafted|proposed)\b",
    "spec": r"\bspecul\w*",
    "mtp": r"\b(sd|eagle\d?|dflash|with)\b|\bw/",
    "max": r"\b(num|number|best|maximum|optimal)\b",
    "topk": r"\btop k\b",
    "γ": r"\bgamma\b",
    "τ": r"\b(tau|m?al|a\.length)\b",
    "e2e": r"\b(end to end|wall( clock)?)\b",
    "tg": r"\btg ?\d+\b",
}
_OUTPUT = (
    "decode decoding output generation gen eval pred token tg text throughput speed rate single aggregate system stream"
    " spec mtp"
)
_CHANGE = "vs regular change gain % x × in mean"
_TIMES = ("tpot", "latency", "s")
# By our name the words of its headings, in any order, and behind a + those that may stand among them.
_MEANINGS = {
    "speedup": f"speedup + {_OUTPUT} tps e2e factor ratio x × vs regular",
    "change": f"vs regular|change|gain|% + {_CHANGE} {_OUTPUT} speedup tps tpot latency s",
    "mean_num_draft_tokens": "draft /iter + token",
    "tokens_per_iteration": "τ|accept length|draft accept length|mean length|block efficiency|mean accept token"
    "|token /iter|draft accept token /iter + accept token mtp spec τ",
    "acceptance_rate": "accept + draft spec mtp token rate ratio % share",
    "user_tokens_per_second": f"tps /user|user tps + {_OUTPUT}",
    "tokens_per_second": f"tps|throughput|tg + tps {_OUTPUT}",
    "ms_per_token": "tpot + latency after the first spec mtp",
    "latency_s": "latency|seconds|time|e2e + request total e2e latency s sec seconds time spec mtp",
    "topk": "topk + draft spec",
    "steps": "steps + max spec",
    "width": "width|verified",
    "ms": "ms|milliseconds + iteration /iter",
    "ms_low": "low + ms",
    "ms_high": "high + ms",
    "num_draft_tokens": "k|γ|n max|n draft|n mtp|block|depth|draft length|draft size|draft max|draft token|spec token"
    "|assistant token + k n max draft spec mtp size token",
    "num_nodes": "nodes",
    "p_min": "p min + draft spec",
    "temperature": "t|temp|temperature",
    "batch_size": "batch|bs|c|conc|concurrency|in flight|parallel|stream|streams|users|clients|concurrent|rows"
    " + max size request requests users streams in flight",
    "dtype": "precision|quant|quantization|dtype",
    "prompts": "prompt|prompts|dataset|data set|bench|benchmark|task|content|workload|category|domain + type",
    "devices": "device|devices|gpu|gpus|card|cards|hardware|machine + backend /",
    "engine": "engine|framework|backend",
    "draft": "draft|drafter|spec|method|head|mode|arm|config|configuration|setup|variant|condition|strategy + model",
    "model": "model|target + model",
}
# No draft has as many accepted tokens per iteration on average.
_LONGEST = 20


class PrintedColumn(NamedTuple):
    """What a column holds, by our name.

    Attributes:
        in_percent: whether its numbers are in percent: shares, or what a speed-up gains.
        of: the speed that a speed-up is a change of.
    """

    name: str
    in_percent: bool = False
    of: str = ""

    def __str__(self) -> str:
        return f"{self.name} (of {self.of})" if self.of else self.name

    def read(self, text: str) -> PrintedFigure | None:
        """The figure of a cell; None for `n/a`. A change of a time is turned round: `-40 %` is 1.67 times as fast.

        Raises:
            ValueError: it is no such number, or a change without a sign.
        """
        is_time = bool(self.of) and self.of not in RATES
        text = text.strip(MARKS)
        if self.of and is_stated(text) and not re.match("[-+−]" if is_time else ".*[-+−x×%]", text):
            raise ValueError(text)
        figure = PrintedFigure.read(self.name, text, self.in_percent)
        return (
            PrintedFigure(1 / figure.high, 1 / figure.low, text) if figure and is_time else figure
        )

    def reads(self, cells: Sequence[str]) -> bool:
        """Whether any of these cells is such a number, or none states anything."""
        stated = [cell for cell in cells if is_stated(cell)]
        for cell in stated:
            with suppress(ValueError):
                return self.read(cell) is not None
        return not stated


def columns_of(
    rows: Sequence[Cells], known: Cells, names: Collection[str]
) -> dict[str, PrintedColumn]:
    """What each column holds, by heading; the first column names the rows if nothing else does.

    Args:
        known: names of some columns by heading, which are not guessed.
        names: those that are looked for.
    """
    cells = {heading: [row[heading].strip(MARKS) for row in rows] for heading in rows[0]}
    words = {heading: _words(heading, cells[heading]) for heading in rows[0]}
    guesses = {heading: KEYS.get(heading) or meaning(words[heading]) for heading in rows[0]}
    if {"steps", "topk"} <= {*guesses.values()}:
        # SGLang's depth of a tree, and its nodes.
        of_trees = {"steps": "num_draft_tokens", "num_draft_tokens": "num_nodes"}
        guesses = {heading: of_trees.get(name, name) for heading, name in guesses.items()}
    columns: dict[str, PrintedColumn] = {}
    # Our name of the last column that is no change.
    left = ""
    for heading, guess in guesses.items():
        name = known.get(heading, guess)
        column = _column(name, words[heading], cells[heading], left)
        if name != "change":
            left = name.removeprefix("regular_")
        # Beside the length of a draft K is the number of drafts.
        is_count = words[heading] == {"k"} and {"γ"} in words.values()
        taken = {other.name for other in columns.values()}
        if column and column.name in {*names} - taken and not is_count:
            columns[heading] = column
    # By its cells: a column in which some rows are called regular.
    arms = [
        heading
        for heading in rows[0]
        if heading not in columns
        and {*map(is_regular_arm, filter(None, cells[heading]))} == {True, False}
    ]
    if arms and "draft" not in {column.name for column in columns.values()}:
        columns[arms[0]] = PrintedColumn("draft")
    first = next(iter(rows[0]))
    if first not in columns and not are_numbers(cells[first]):
        columns[first] = PrintedColumn("name")
    return columns


def _column(name: str, words: set[str], cells: Sequence[str], left: str) -> PrintedColumn | None:
    """A column with this meaning, where its cells are such figures.

    Args:
        left: our name of the column before it, which it may be a change of.
    """
    text = " ".join([*words, *cells])
    numbers = leading_numbers(cells) or [0]
    of, in_percent = "", False
    if name == "change":
        own = words - {*_CHANGE.split()}
        of = left if not own else RATES[0] if own.isdisjoint(_TIMES) else SPEEDS[-1]
        name, in_percent = "speedup", "gain" in words
        # A gain of a time may be meant in either direction.
        if of not in (RATES if in_percent else SPEEDS):
            return None
    if name == "acceptance_rate":
        # Shares, or percent; else it may be a length or a count.
        in_percent = "%" in words or ("%" not in text and max(numbers) > 1)
        are_percent = min(numbers) > 1 and _LONGEST < max(numbers) <= 100
        if in_percent and "%" not in text and not are_percent:
            return None
    if name.endswith("latency_s") and not re.search(r"\ds|\b(s|sec|seconds)\b", text):
        return None
    column = PrintedColumn(name, in_percent, of)
    is_text = name in SETTINGS and name != "temperature"
    return column if (not are_numbers(cells) if is_text else column.reads(cells)) else None


def _words(heading: str, cells: Sequence[str]) -> set[str]:
    """The words of a heading, each in one spelling, and the unit that all of its cells are in."""
    words = {*spelled(heading).split()}
    if words.isdisjoint(("tps", "tpot", "/iter")) and any("tps" in spelled(cell) for cell in cells):
        are_speeds = all(PrintedColumn("tokens_per_second").reads([cell]) for cell in cells)
        words |= {"tps"} if are_speeds else set()
    return words


def spelled(text: str) -> str:
    """A text in lower case, with one spelling of each word."""
    text = text.lower()
    for word, pattern in _SPELLINGS.items():
        text = " ".join(re.sub(pattern, word, text).split())
    return text


def meaning(words: set[str]) -> str:
    """Our name of a column with these words in its heading; empty if it is not known."""
    for name, words_of_name in _MEANINGS.items():
        headings, _, further = words_of_name.partition(" + ")
        for heading in map(str.split, headings.split("|")):
            if {*heading} <= words <= {*heading, *further.split(), "mean"}:
                return name
    name = meaning(words - {"regular"}) if "regular" in words else ""
    return f"regular_{name}" if name in SPEEDS else ""


def are_numbers(cells: Sequence[str]) -> bool:
    return all(re.fullmatch(r"[\d.,]*", cell) for cell in cells)
