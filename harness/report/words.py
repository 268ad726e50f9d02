"""Settings in words, once for every command: titles, lines of settings, labels, and what distinguishes rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from harness.results.schema import EvalRow, RunRow


def title(row: RunRow) -> str:
    """`13B with draft 7B, random weights on NVIDIA A100`."""
    return f"{pair_name(row, ' with draft ')} on {row.devices or 'unknown device'}"


def settings_line(rows: Sequence[RunRow]) -> str:
    """The settings of one run: `15 prompts (english) · 64 new tokens · K=4 · greedy · float16`."""
    # A run that ended early has a number of prompts too: those it finished.
    row = replace(rows[-1], status="ok")
    texts = [in_words(row, column) for column in _LINE]
    texts[_LINE.index("max_new_tokens")] = _lengths(rows)
    texts.insert(3, f"K={row.num_draft_tokens}" if row.draft and row.num_draft_tokens else "")
    return " · ".join(text for text in [*texts, *labels(row)] if text)


def _lengths(rows: Sequence[RunRow]) -> str | None:
    """How long the answers are: `64 new tokens`, `8 to 29 new tokens`; else what was asked for."""
    shortest = [length for row in rows if (length := getattr(row, "shortest_answer", None))]
    longest = [length for row in rows if (length := getattr(row, "longest_answer", None))]
    if not shortest or not longest:
        return in_words(rows[-1], "max_new_tokens")
    least, most = min(shortest), max(longest)
    return f"{most} new tokens" if least == most else f"{least} to {most} new tokens"


def labels(row: RunRow) -> list[str]:
    """`random weights` and `synthetic 0.8`, as far as they apply; empty for a real measurement."""
    found = ["random weights"] if row.weights == "random" else []
    return [*found, f"synthetic {row.synthetic_acceptance:g}"] if row.synthetic else found  # type: ignore[attr-defined]


def pair_name(row: RunRow, joint: str = " with ") -> str:
    """`13B with 7B`, or the target alone; with the labels of a pair that is not real."""
    target = row.model or "unknown model"
    if row.server:
        target += f" ({row.server})"
    return ", ".join([f"{target}{_draft_name(row, joint)}", *labels(row)])


def _draft_name(row: RunRow, joint: str) -> str:
    """With what it drafts. What drafts in a server is known from the user alone, if at all."""
    if not row.draft:
        return ""
    if row.engine != "server":
        return f"{joint}{row.draft}"
    return " with its own draft" if row.draft == "server" else f"{joint}{row.draft} (as labelled)"


def arm_name(row: Any) -> str:
    """`speculative (lossy)` where the output may differ from the target's."""
    return f"{row.arm} (lossy)" if row.lossy and row.arm != "regular" else str(row.arm)


def lossy_warning(row: Any) -> str | None:
    """What a lossy rule means; None for a lossless one."""
    if row.rule == "typical":
        return "rule typical: the speculative output no longer follows the target (lossy)."
    if row.lenience is None or row.lenience >= 1:
        return None
    return (
        f"lenience {row.lenience:g}: the speculative output no longer follows the target (lossy)."
    )


def smaller_batch(row: Any) -> str | None:
    """A note that the last batch was smaller; None where all batches were full."""
    smallest, full = row.smallest_batch, row.batch_size
    return (
        f"The last batch had {smallest} row{'' if smallest == 1 else 's'} instead of {full}."
        if smallest and full and smallest < full
        else None
    )


def too_long_warning(row: Any) -> str | None:
    """How prompts that are longer than the context were treated; None where there were none."""
    done = "Left out" if row.num_skipped else "Cut to their last tokens"
    number = row.num_skipped or row.num_truncated
    return (
        f"{done} because they are too long for the context: {number} of the prompts."
        if number
        else None
    )


def common_settings(rows: Sequence[RunRow]) -> str:
    """The settings that all rows share, in one line."""
    alike = [{in_words(row, column) for row in rows} - {None} for column in _FIRST]
    return " · ".join(text for texts in alike if len(texts) == 1 for text in texts if text)


def short_commit(commit: str) -> str:
    """`17a8ca98e-dirty`."""
    return commit[:9] + ("-dirty" if commit.endswith("-dirty") else "")


@dataclass
class Name:
    """What a row is called among others.

    Attributes:
        pair: see `pair_name`.
        settings: those in which the rows of the report, or of the pair, differ; K left out.
        further: circumstances that distinguish the row from others that would read the same.
    """

    pair: str
    num_draft_tokens: int | str | None
    settings: list[str] = field(default_factory=list)
    further: list[str] = field(default_factory=list)

    @property
    def group(self) -> tuple[str, ...]:
        """The same for rows that differ in K alone."""
        return self.pair, *self.settings

    @property
    def place(self) -> float:
        """Orders names by K, `auto` last."""
        return math.inf if isinstance(self.num_draft_tokens, str) else self.num_draft_tokens or 0

    @property
    def cell(self) -> str:
        """The first cell of a table: the pair, and below it what else distinguishes the row, K left out."""
        return f"{self.pair}\n{' · '.join((*self.settings, *self.further))}".strip()

    def label(self, separator: str = " · ") -> str:
        """The name in one line."""
        k = [f"K={self.num_draft_tokens}"] if self.num_draft_tokens else []
        return separator.join([self.pair, *k, *self.settings, *self.further])


def told_apart(rows: Sequence[RunRow]) -> list[Name]:
    """The name of each row among the others.

    A setting that readers look at first is in the names if the rows differ in it; another one if the rows of the same
    pair do; a circumstance only where two rows would read the same without it.
    """
    names = [Name(pair_name(row), row.num_draft_tokens if row.draft else None) for row in rows]
    for column, part, rivals in _steps(rows):
        found = [
            (name, rivals(name), in_words(row, column))
            for name, row in zip(names, rows, strict=True)
        ]
        among: dict[object, set[str]] = {}
        for _, key, text in found:
            if text is not None:
                among.setdefault(key, set()).add(text)
        for name, key, text in found:
            if text and len(among[key]) > 1:
                getattr(name, part).append(text)
    return names


def in_words(row: RunRow, column: str) -> str | None:
    """A setting or circumstance; empty for one that goes without saying, None for one that is not known."""
    if column in _MADE:
        return _MADE[column](row)
    # `settings.draft.threshold` is an entry of the column `settings`.
    column, _, entry = column.partition(".")
    value, phrase = getattr(row, column, None), _PHRASES.get(column, f"{column} {{}}")
    if entry:
        value, phrase = (value or {}).get(entry), f"{entry} {{}}"
    if value is None or (not entry and value in _USUAL.get(column, ())):
        return ""
    if isinstance(value, list | tuple):
        return phrase.format(", ".join(map(str, value)))
    if isinstance(value, dict):
        return phrase.format(json.dumps(value))
    text = (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
    return _SPECIAL.get((column, value), phrase).format(text)


def _steps(rows: Sequence[RunRow]) -> Iterator[tuple[str, str, Callable[[Name], object]]]:
    """Columns whose values can be in a name, the part of the name, and which rows must differ in them."""
    for column in _FIRST:
        yield column, "settings", lambda name: None
    told = set(_FIRST) | _NEVER
    kinds = (
        {name: about["kind"] for name, about in type(rows[0]).columns().items() if name not in told}
        if rows
        else {}
    )
    kinds |= dict.fromkeys(
        sorted({f"settings.{entry}" for row in rows for entry in row.settings or ()}), "setting"
    )
    for kind, part, rivals in (
        ("setting", "settings", attrgetter("group")),
        ("circumstance", "further", Name.label),
    ):
        yield from ((column, part, rivals) for column in kinds if kinds[column] == kind)


def _prompts(row: Any) -> str | None:
    if isinstance(row, EvalRow):
        return f"{row.task} of {(row.operands or '').replace('-', ' to ')}"
    if row.status not in (None, "ok"):
        # It ended early and does not say how many prompts it was asked for.
        return None
    number, name = getattr(row, "num_prompts", None), getattr(row, "prompts", None)
    return f"{number} prompts ({name})" if number and name else ""


def _batch(row: RunRow) -> str:
    size = row.batch_size or 1
    if row.engine == "server":
        return f"{row.request_rate:g} requests/s" if row.request_rate else f"{size} in flight"
    return "" if size == 1 else f"batches of {size}"


# What readers look at first, in one run's line and among many runs.
_LINE = "prompts max_new_tokens batch_size temperature top_k top_p rule lenience draft_sampling shared".split()
_LINE += ["weights", "engine", "runner"]
_FIRST = (*_LINE, "devices", "test", "fault")
# Shown elsewhere, or no reason for a difference.
_NEVER = frozenset(
    "run job repeat status error timestamp directory measurement settings setup_s model draft num_draft_tokens"
    " quantization dtype synthetic_acceptance lossy task operands view server".split()
)
# The others are said as `name value`.
_PHRASES = {
    "max_new_tokens": "{} new tokens",
    "lenience": "lenience {} (lossy)",
    "devices": "on {}",
    "test": "test={}",
    "draft_layers": "layers {}",
    "max_ngram": "n-grams of up to {}",
}
_SPECIAL: dict[tuple[str, object], str] = {
    ("temperature", 0): "greedy",
    ("ignore_eos", False): "ends where the model does",
    ("rule", "typical"): "rule typical (lossy)",
    ("draft_sampling", "greedy"): "drafts by argmax",
    ("shared", True): "searches earlier answers",
}
# Values that are left out.
_USUAL: dict[str, tuple[object, ...]] = {
    "rule": ("deepmind",), "draft_sampling": ("target",), "shared": (False,), "top_k": (0,), "top_p": (1,),
    "lenience": (1,), "test": (False,), "engine": ("local",), "runner": ("static", "generate"), "fault": ("none",),
    "ignore_eos": (True,),
}  # fmt: skip
# Those that are more than a value.
_MADE: Mapping[str, Callable[[Any], str | None]] = {
    "prompts": _prompts,
    "batch_size": _batch,
    "weights": lambda row: ", ".join(
        part for part in (row.quantization, row.dtype) if part not in (None, "none")
    ),
    "weight_bytes": lambda row: f"target on {', '.join(row.weight_bytes or ())}",
    "draft_weight_bytes": lambda row: f"draft on {', '.join(row.draft_weight_bytes or ())}",
    "commit": lambda row: f"commit {short_commit(row.commit)}" if row.commit else "",
}
