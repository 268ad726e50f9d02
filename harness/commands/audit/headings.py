"""What the columns of a table hold, by the headings that others use and by what their cells can be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from harness.results.claims.stated import CLAIMS, NAMES, Printed, Stated

# What columns hold, by words in their headings in lower case; the first that is found counts.
_SPEED = r"(tok\w*.?(/|per )\s?s|\btps\b|\bt[ok]{0,2}/s|throughput"
_ARM = r"baseline|regular|vanilla|without|no.spec\w*|no.mtp|plain|classic|autoregressive|ar|off"
_ITERATION = r"(iter|step|round|forward|verif|cycle)"
_HEADINGS = (
    ("speedup", r"speed.?up|faster|\bgains?\b|uplift|^[δΔ]|\bdelta\b"),
    ("speedup", rf"\b(vs\.?|versus|over|relative to) (the )?({_ARM})"),
    ("speedup", r"^speed$|^ratio$"),
    ("mean_num_draft_tokens", rf"(proposed|drafted|draft tokens).*(per |/)\s?{_ITERATION}"),
    ("num_accepted", r"^(n|num|#)? ?accept(ed)?( draft)?( tokens)?$"),
    ("num_drafted", r"^(n|num|#)? ?(drafted|draft|proposed|generated)( tokens)?$"),
    ("conditional_acceptance_rate", r"\balpha\b|α|conditional accept"),
    ("acceptance_rate", r"^((draft|mtp|avg\.?|mean|token) )?accept(ed|ance)?( \(.*\))?$"),
    ("acceptance_rate", r"accept\w*\.? ?(rate|ratio|%|pct|percent)"),
    ("acceptance_rate", r"(rate|%) accepted|^acc\.? (rate|%)"),
    ("tokens_per_iteration", r"(?<!et )\bm?al\b|\btau\b|τ|accept\w*\.? len|\ba\.?len\b|^mean len|block efficiency"),
    ("tokens_per_iteration", rf"(mean|avg\.?|average) accepted (tokens|len)|tok\w*.?(per |/)\s?{_ITERATION}"),
    ("user_tokens_per_second", rf"^(?!.*(total|input|prompt|req/)).*{_SPEED}|speed).*(per.|/ ?)(user|request|stream)"),
    ("user_tokens_per_second", rf"per.(user|stream|request).*{_SPEED}|speed)"),
    ("tokens_per_second", rf"^(?!.*(total|input|prompt|prefill|\bpp\b|req)).*{_SPEED})"),
    ("ms_per_token", r"ms.?(/|per )\s?tok|tpot|\bitl\b"),
    ("latency_s", r"^(\w+ )?latency( \(?s\)?)?$|^(\w+ )?seconds$|^(wall|time)( time)? ?\(s\)$"),
    ("num_draft_tokens", r"^k$|^n.?draft$|γ|gamma"),
    ("num_draft_tokens", r"\bn.?max|draft.?max|^block( size)?$|^depth$|draft (len\w*|size|depth)"),
    ("num_draft_tokens", r"^(?!.*(accept|mean|avg|average|total)).*(draft|spec\w*|assistant) tokens"),
    ("num_prompts", r"(num|number of|#) ?(prompts|samples|questions)|^n$"),
    ("max_new_tokens", r"(max|new|output) .*(tokens|len)|^n.predict$"),
    ("temperature", r"^t$|^temp"),
    ("batch_size", r"batch|concurren|\bbs\b|in.?flight|^parallel|^streams?$|^users?$|^clients?$"),
    ("tensor_parallel", r"^tp( size)?$|tensor.parallel"),
    ("num_devices", r"^(#|n|num|number of) ?(gpus?|devices|cards)$|^gpus$|^devices$"),
    ("dtype", r"precision|quant|^dtype$"),
    ("prompts", r"^prompts?( type)?$|data ?set|bench|task|^content$|workload|category|domain"),
    ("devices", r"device|gpu|hardware"),
    ("engine", r"engine|framework|backend"),
    ("draft", r"^(?!.*tokens).*(draft|method|head)|^(mode|arm|config\w*|setup|variant|condition|spec\w*)$"),
    ("model", r"model|target"),
)  # fmt: skip
_OF_REGULAR = re.compile(rf"\b({_ARM})\b")
# More are counts of draft tokens.
_LARGEST_K = 64

Cells = Mapping[str, str]


def names_of_columns(table: Sequence[Cells], columns: Cells) -> dict[str, str]:
    """Our name of what each column holds, by heading; the first column names the rows if nothing else is known."""
    headings = list(dict.fromkeys(heading for row in table for heading in row))
    names = {heading: columns.get(heading, heading) for heading in headings}
    names = {heading: name for heading, name in names.items() if name in NAMES}
    # The columns of this project's own files, which have `run`, have these names exactly.
    unknown = [one for one in headings if one not in names] if "run" not in headings else []
    cells = {one: [row.get(one, "").strip("*~≈ ") for row in table] for one in unknown}
    # K drafts, each of L tokens.
    by_words = {plain(heading): heading for heading in unknown}
    if "k" in by_words and (
        length := next((by_words[one] for one in ("l", "γ", "gamma") if one in by_words), None)
    ):
        names |= {by_words["k"]: "num_drafts", length: "num_draft_tokens"}
    for heading in unknown:
        meant = meaning(heading, cells[heading])
        if meant is not None and heading not in names and meant not in names.values():
            names[heading] = meant
    for heading in unknown:
        # A column in which some rows are called regular is that of the arms.
        regular = [Stated("", {"draft": cell}).is_regular for cell in cells[heading] if cell]
        if (
            heading not in names
            and "draft" not in names.values()
            and any(regular)
            and not all(regular)
        ):
            names[heading] = "draft"
    if headings and "name" not in names.values():
        names.setdefault(headings[0], "name")
    return names


def plain(heading: str) -> str:
    """A heading in lower case, without marks."""
    return " ".join(heading.lower().replace("_", " ").strip("*` ").split())


def meaning(heading: str, cells: Sequence[str]) -> str | None:
    """Our name of what a column holds, by its heading and by what its cells can be."""
    words = plain(heading)
    stated = [cell for cell in cells if Printed.is_stated(cell)]
    counts = [int(cell.replace(",", "")) for cell in stated if re.fullmatch(r"\d[\d,]*", cell)]
    are_counts = bool(counts) and len(counts) == len(stated)
    for name, pattern in _HEADINGS:
        if not re.search(pattern, words):
            continue
        if name == "speedup":
            has_signs = all(re.search(r"[×xX%]", cell) for cell in stated)
            if re.search(r"speed.?up", words) or (has_signs and stated):
                # `Speedup over vanilla` is not that of vanilla.
                return name
            continue
        if name in ("num_accepted", "num_drafted"):
            # `accepted` may be a rate, and `draft` a name or K.
            least = 1 if name == "num_accepted" else _LARGEST_K
            if not are_counts or max(counts) <= least:
                continue
        if (
            name == "acceptance_rate"
            and words in ("accepted", "accept")
            and are_counts
            and max(counts) > 1
        ):
            return None
        if name == "num_devices" and not are_counts:
            continue
        if name == "num_draft_tokens" and are_counts and max(counts) > _LARGEST_K:
            name = "num_drafted"
        if _OF_REGULAR.search(words) and f"regular_{name}" in NAMES:
            name = f"regular_{name}"
        elif _OF_REGULAR.search(words) and name in CLAIMS:
            return None
        return name
    # Units of the cells, where the heading has none.
    is_speed = stated and all(re.search(r"\b(tok\w*|tk|t)/s", cell) for cell in stated)
    return (
        "tokens_per_second"
        if is_speed and not re.search(r"prompt|prefill|\bpp\b|total", words)
        else None
    )
