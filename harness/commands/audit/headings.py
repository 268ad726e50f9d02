"""Our names of a table's columns, by headings that others use and by the kind of their cells."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.commands.audit.figures import (
    CLAIMS,
    MARKS,
    NAMES,
    SPEEDS,
    is_regular_arm,
    leading_numbers,
)
from harness.commands.audit.formats import KEYS, Cells

_MEAN = r"(?:(?:avg|average|mean|median|pooled|overall|measured|effective|expected) )"
_ARM = (
    r"baseline|base|regular|vanilla|without mtp|without spec\w*|without|no spec\w*|no mtp|no draft"
    r"|plain|classic|autoregressive|ar|off"
)
_SPECULATIVE = r"(?:with )?(?:spec|speculative|speculation|mtp|sd|eagle\d?|dflash|draft)"
_PER_SECOND = r"(?:tok\w*|tk|t)(?: ?(?:/|per) ?| )s(?:ec\w*)?|tps"
_OUTPUT = (
    r"decod\w*|output|generation|gen|tg ?\d*|eval|pred|token|text|throughput|speed|rate"
    r"|single stream|aggregate|system"
)
_SPEED = (
    rf"{_MEAN}*(?:(?:{_OUTPUT}) )*(?:{_PER_SECOND}|throughput|tg ?\d*)"
    rf"(?: (?:{_OUTPUT}|{_PER_SECOND}))*"
)
_USER = r"(?:per|/) ?(?:user|stream|request)"
_ITERATION = r"(?:per |/ ?)(?:iter\w*|step|round|forward\w*|verif\w*|cycle|pass)"
_ACCEPT = r"acc(?:ept(?:ance|ed)?)?\.?"
_THAN = rf"(?:vs\.?|versus|over|relative to) (?:the )?(?:{_ARM})(?: .*)?"
_GAIN = (
    rf"(?:speed ?ups?|uplift|gains?|improvement|faster)(?: (?:factor|ratio|x|×|%))?(?: {_THAN})?"
)
# Whole headings, in lower case and without marks; the first that fits counts.
_HEADINGS = {
    "speedup": rf"{_MEAN}*(?:(?:{_OUTPUT}|{_PER_SECOND}|wall|end to end|e2e) )*(?:{_GAIN}|{_THAN})"
    r"|[δΔ](?: ?%)?|delta(?: %)?",
    "mean_num_draft_tokens": rf"{_MEAN}*(?:proposed|drafted|draft)(?: tokens)? ?{_ITERATION}",
    "acceptance_rate": rf"{_MEAN}*(?:(?:draft|mtp|token|spec\w*) )*(?:tokens )?{_ACCEPT}"
    rf"(?: ?(?:rate|ratio|%|pct|percent|share|pooled))*|(?:%|rate) ?{_ACCEPT}",
    "tokens_per_iteration": rf"{_MEAN}*(?:m?al|tau|τ|(?:(?:mtp|draft|spec\w*) )?m?{_ACCEPT} ?len\w*)|{_MEAN}len\w*"
    rf"|a\.?len|block efficiency|#?{_MEAN}accepted tokens|{_MEAN}*(?:accepted )?tok\w*\.? ?{_ITERATION}",
    "user_tokens_per_second": rf"{_SPEED} ?{_USER}|{_USER} {_SPEED}|user {_SPEED}",
    "tokens_per_second": _SPEED,
    "ms_per_token": rf"{_MEAN}*(?:latency )?(?:tpot(?: ms)?|ms ?(?:/|per) ?tok\w*)(?: after the first)?",
    "latency_s": rf"{_MEAN}*(?:(?:request|e2e|end to end|total|wall) )*(?:latency|seconds|time|wall)(?: m?s\w*)?",
    "topk": r"(?:speculative )?(?:eagle )?top ?k",
    "num_draft_tokens": r"k|γ|gamma|(?:spec )?(?:draft )?n ?max|(?:n|num) ?draft|draft max|block(?: size)?"
    r"|(?:draft |mtp )?depth|draft (?:len\w*|size)|(?:num )?(?:draft|spec|speculative|assistant) tokens|mtp [kn]",
    "p_min": r"(?:spec )?(?:draft )?p ?min",
    "temperature": r"t|temp|temperature",
    "batch_size": r"(?:max )?(?:batch(?: size)?|bs|concurrency|conc|(?:requests )?in flight|parallel(?: requests)?)"
    r"|streams?|users?|clients?|concurrent (?:requests|users|streams)",
    "dtype": r"precision|quant\w*|dtype",
    "prompts": r"prompts?(?: type)?|data ?set|bench(?:mark)?|task|content|workload|category|domain",
    "devices": r"devices?|gpus?|cards?|hardware|machine|backend / gpu",
    "engine": r"engine|framework|backend",
    "draft": r"(?:draft|drafter|spec\w*)(?: model)?|method|head|mode|arm|config\w*|setup|variant|condition|strategy",
    "model": r"model|target(?: model)?",
}
# SGLang's depth of a tree, and its nodes, the root among them.
_DEPTH = r"(?:(?:speculative|spec) )?(?:num )?steps"
_NODES = r"(?:speculative )?(?:num )?draft(?: tokens)?|nodes"
_LARGEST_K = 64

# Headings below which `45 %` is 1.45×.
_IS_GAIN = re.compile(r"faster|gain|uplift|improve|[δΔ]|delta")
_PERCENT = re.compile(r"%|percent|pct")
# No draft has as many accepted tokens per iteration on average.
_LONGEST = 20


def names_of_columns(rows: Sequence[Cells], known: Cells) -> dict[str, str]:
    """Our name of what each column holds, by heading; the first column names the rows if nothing else does.

    Args:
        known: names of some columns by heading, which are not guessed.
    """
    names = {heading: known[heading] for heading in rows[0] if heading in known}
    cells = {heading: [row[heading].strip(MARKS) for row in rows] for heading in rows[0]}
    unknown = {heading: plain(heading) for heading in rows[0] if heading not in names}
    # Steps without a top-k are many things.
    has_depth = all(
        any(re.fullmatch(pattern, words) for words in unknown.values())
        for pattern in (_HEADINGS["topk"], _DEPTH)
    )
    # Beside their length K is the number of drafts.
    has_length = not {"l", "γ", "gamma"}.isdisjoint(unknown.values())
    for heading, words in unknown.items():
        name = KEYS.get(heading) or _meaning(words, cells[heading])
        if has_depth and re.fullmatch(_DEPTH, words):
            name = "num_draft_tokens"
        elif has_depth and re.fullmatch(_NODES, words):
            name = "num_nodes"
        elif words == "k" and has_length:
            name = None
        if name and name not in names.values():
            names[heading] = name
    # By its cells: a column in which some rows are called regular.
    for heading in [heading for heading in unknown if heading not in names]:
        are_regular = {is_regular_arm(text) for text in cells[heading] if text}
        if "draft" not in names.values() and are_regular == {True, False}:
            names[heading] = "draft"
    if is_turned(rows):
        # A change is of another figure in each row.
        names = {heading: name for heading, name in names.items() if name != "speedup"}
    first = next(iter(rows[0]))
    if first not in names and not _are_numbers(cells[first]):
        names[first] = "name"
    return names


def is_turned(rows: Sequence[Cells]) -> bool:
    """Whether a table has a row for each figure, and a column for each arm."""
    first = next(iter(rows[0]))
    figures = {_meaning(plain(row[first].strip(MARKS)), ()) for row in rows}
    return plain(first) == "metric" or not figures.isdisjoint((*CLAIMS, *SPEEDS))


def is_in_percent(name: str, words: str, cells: Sequence[str]) -> bool:
    """Whether numbers of a column that have no sign are in percent."""
    if name == "speedup":
        return bool(_PERCENT.search(words)) or not re.search("speed ?up", words)
    if name != "acceptance_rate" or any("%" in cell for cell in cells):
        return False
    return bool(_PERCENT.search(words)) or max(leading_numbers(cells), default=0) > 1


def plain(heading: str) -> str:
    """A heading in lower case, without marks."""
    words = re.sub(r"[*`_()\[\]:,]|95 ?% ci|--|(?<=\w)-(?=\w)", " ", heading.lower())
    return " ".join(words.split())


def _meaning(words: str, cells: Sequence[str]) -> str | None:
    for name, pattern in _HEADINGS.items():
        if re.fullmatch(pattern, words) and _fits(name, words, cells):
            return name
    arm = re.search(rf"\b({_ARM})\b", words)
    if arm:
        shared = _meaning(" ".join(f"{words[: arm.start()]} {words[arm.end() :]}".split()), cells)
        return f"regular_{shared}" if f"regular_{shared}" in NAMES else None
    rest = re.sub(rf"^{_SPECULATIVE} | {_SPECULATIVE}$", "", words)
    return _meaning(rest, cells) if rest != words else None


def _fits(name: str, words: str, cells: Sequence[str]) -> bool:
    """Whether a column may have such cells: by its heading alone it may be a count, or have no unit."""
    numbers = leading_numbers(cells)
    most = max(numbers, default=0)
    if name == "speedup" and is_in_percent(name, words, cells) and not _IS_GAIN.search(words):
        # `195 %` may be 1.95× or 2.95×.
        return any(re.search(r"[-+−]\d|\d ?[x×]", cell) for cell in cells)
    if name == "draft":
        return not _are_numbers(cells)
    if name == "num_draft_tokens":
        return most <= _LARGEST_K
    if name == "latency_s":
        return bool(re.search(r"\bs\b|sec", words)) or any("s" in cell for cell in cells)
    if name == "acceptance_rate" and not _PERCENT.search(" ".join([words, *cells])):
        # Shares, or percent; else it may be a length or a count.
        return most <= 1 or (min(numbers) > 1 and _LONGEST < most <= 100)
    return True


def _are_numbers(cells: Sequence[str]) -> bool:
    return all(re.fullmatch(r"[\d.,]*", cell) for cell in cells)
