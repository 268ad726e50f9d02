"""Settings in words, once for every command: titles, lines of settings, labels and warnings."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.config.acceptance_rules import PARAMETERS, RULES, changed_parameters
from harness.config.amounts import counted
from harness.config.command_line import Words, setting_in
from harness.config.model_names import SECOND_COMMAND
from harness.config.settings import DecodingSettings
from harness.results.runs import Run
from harness.results.schema import RunRow

# What a lossy rule means, and what prompts that were left out are.
LOSSY = "the speculative output no longer follows the target (lossy)"
TOO_LONG = "(too long for the context)"


def settings_line(rows: Sequence[RunRow]) -> str:
    """The settings of one run: `15 prompts (english) · 64 new tokens · K=4 · greedy · float16`."""
    # Of a run that ended early the number of prompts is shown too: those that it finished.
    row = replace(rows[-1], status="ok")
    texts = {column: in_words(row, column) for column in _LINE}
    texts["max_new_tokens"] = _lengths(rows)
    return " · ".join(filter(None, texts.values()))


def typed_again(changes: str, *, command: str = "", leaving_out: Collection[str] = ()) -> str:
    """The command that was typed, with other settings: `harness latency draft=lookup K=8`.

    Args:
        changes: settings as they are typed, `K=8` or `batch_size=1 K=8`.
        command: another one, in place of that which was typed.
        leaving_out: names of settings that the other command lacks.
    """
    words = Words.noted()
    changing = shlex.split(changes)
    # The directory of this run is its own: `hydra.run.dir`, `hydra.sweep.dir`.
    replaced = ["details", "dir", *leaving_out, *map(setting_in, changing)]
    kept = []
    for place, word in enumerate(words.typed, start=1):
        name = setting_in(word)
        # Of a setting that was typed twice the last value counts.
        is_last = name not in map(setting_in, words.typed[place:])
        if is_last and not any(_is_replaced(name, by) for by in replaced):
            kept.append(word)
    if command:
        kept = [command, *kept[1:]]
    return str(Words([*kept, *changing], words.servers))


def _is_replaced(name: str, by: str) -> bool:
    """Whether a setting goes where another one is typed: `decoding.num_draft_tokens` with `num_draft_tokens` and the
    reverse, and `draft.max_ngram` with `draft`.
    """
    last = name.rpartition(".")[2]
    return by in (name, last, name.partition(".")[0]) or name == by.rpartition(".")[2]


def device_of(row: RunRow) -> str:
    if row.is_simulated:
        return "planted costs, no measurement"
    if row.devices:
        return row.devices
    return f"{row.url}, device not known" if row.url else "device not known"


def _lengths(rows: Sequence[RunRow]) -> str | None:
    """Lengths of the answers: `64 new tokens`, `8 to 29 new tokens`; else what was asked for."""
    shortest = [getattr(row, "shortest_answer", None) for row in rows]
    longest = [getattr(row, "longest_answer", None) for row in rows]
    least = min(filter(None, shortest), default=None)
    most = max(filter(None, longest), default=None)
    if least is None or most is None:
        return in_words(rows[-1], "max_new_tokens")
    return counted(most, "new token") if least == most else f"{least} to {most} new tokens"


def labels(row: RunRow) -> list[str]:
    """`random weights` and `synthetic 0.8`, as far as they apply; none for a real measurement."""
    applying = []
    if row.weights == "random":
        applying.append("random weights")
    if row.synthetic:
        applying.append(f"synthetic {synthetic_value(row)}")
    return applying


def synthetic_value(row: Any) -> str:
    """`decoding.synthetic_acceptance` as it is typed: `0.8`, or `[0.8,0.75,0.7]`."""
    rates = row.synthetic_acceptance
    if isinstance(rates, list | tuple):
        return f"[{','.join(f'{rate:.3g}' for rate in rates)}]"
    return f"{rates:g}"


def pair_name(row: RunRow, joint: str = " with ") -> str:
    """`13B with 7B`, or the target alone; with the labels of a pair that is not real."""
    target = called(row.model) if row.model else "unknown model"
    if row.server:
        target += f" ({row.server})"
    return ", ".join([f"{target}{_draft_name(row, joint)}", *labels(row)])


def _draft_name(row: RunRow, joint: str) -> str:
    if not row.draft or row.is_simulated:
        return ""
    if not row.is_elsewhere:
        return f"{joint}{called(row.draft)}"
    # A server does not report its draft. The user may have named it.
    if row.draft == "server":
        return " with its own draft"
    if row.draft == SECOND_COMMAND:
        return " against the first command"
    # A command says what it drafts with.
    return f"{joint}{called(row.draft)}{'' if row.server_command else ' (as labelled)'}"


def called(typed: str) -> str:
    """A model or method as people call it: `llama` of `./models/llama`, `MyMethod` of `./my.py:MyMethod`."""
    is_path = typed.startswith((".", "/", "~")) or typed.count("/") > 1
    last = typed.rstrip("/").rpartition("/")[2]
    return last.rpartition(".py:")[2] if is_path and last else typed


def arm_name(row: Any) -> str:
    """`speculative (lossy)` where the output may differ from the target's."""
    if row.draft == SECOND_COMMAND:
        return "first" if row.arm == "regular" else "second"
    return f"{row.arm} (lossy)" if row.lossy and row.arm != "regular" else row.arm


def lossy_rule(row: Any) -> str | None:
    """`rule ./likely.py:Likely`, `lenience 0.8`, or what was typed of a server; None for a lossless rule."""
    rule = getattr(row, "rule", None)
    if row.is_elsewhere:
        return "engine.lossy=true" if row.lossy else None
    record = None if rule is None else RULES.loaded(rule)
    is_lossless = record is not None and record.is_lossless(row.temperature)
    if rule and row.lossy and not is_lossless:
        return f"rule {rule}"
    changed = changed_parameters(row).items()
    return ", ".join(f"{name} {value:g}" for name, value in changed) or None


def lossy_warning(row: Any) -> str | None:
    """A warning about a lossy rule; None for a lossless one."""
    rule = lossy_rule(row)
    return rule and f"{rule}: {LOSSY}."


def explained_by_rounding(excess: float | None) -> str:
    """The end of a sentence about greedy texts that differ.

    Args:
        excess: the logit margin at the difference, in units of what rounding explains; None where that is not known.
    """
    if excess is None:
        return ""
    if excess > 1:
        return f": {excess:.3g} times what rounding explains"
    return " (a tie that rounding broke)"


def disturbed_runs(runs: Sequence[Run[Any]]) -> str | None:
    """`3 of 5 runs drifted, or shared the processor with other programs`; None where all were quiet."""
    number = sum(not run.last.was_quiet for run in runs)
    if not number:
        return None
    share = f"{number} of {counted(len(runs), 'run')}"
    return f"{share} drifted, or shared the processor with other programs"


def too_long(row: Any) -> str | None:
    """`3 prompts were left out`: those longer than the context; None where there were none."""
    number = row.num_skipped or row.num_truncated
    if not number:
        return None
    were = "was" if number == 1 else "were"
    action = "left out" if row.num_skipped else "cut to the last tokens"
    return f"{counted(number, 'prompt')} {were} {action}"


def common_settings(rows: Sequence[RunRow]) -> str:
    """The settings that all rows share, in one line; what is unknown of a row is not shared."""
    shared: list[str] = []
    for column in FIRST_SETTINGS:
        texts = {in_words(row, column) for row in rows}
        if len(texts) == 1:
            shared += filter(None, texts)
    return " · ".join(shared)


def short_commit(commit: str) -> str:
    """`17a8ca98e-dirty`."""
    return commit[:9] + ("-dirty" if commit.endswith("-dirty") else "")


def in_words(row: RunRow, column: str) -> str | None:
    """A setting or circumstance of a row: `64 new tokens`, `greedy`, `commit 17a8ca98e`.

    Args:
        column: of the row, or one of the keys of `_COMPOSED`; `settings.draft.sampling` is an
            entry of the column `settings`.

    Returns:
        Empty for a value that goes without saying, as the defaults of decoding do, and where there is none.
        None for the prompts of a run that ended early, which does not record how many it was asked for.
    """
    if column in _COMPOSED:
        return _COMPOSED[column](row)
    column, _, entry = column.partition(".")
    value = getattr(row, column, None)
    if column == "seed" and getattr(row, "repeat", None) == "all":
        # A pooled row has the first one of several.
        return ""
    if entry:
        value = (value or {}).get(entry)
    if value is None:
        return None if column in _PLACES else ""
    # Of a path its last part: checkouts of one model are at different places.
    text = called(f"./{value}") if column in _PLACES else _as_text(value)
    if entry.removeprefix("decoding.") in PARAMETERS:
        # Said where its rule is.
        return ""
    if entry.startswith("vary."):
        return f"{entry.removeprefix('vary.')}={text}"
    if entry and isinstance(value, list):
        # As it is typed.
        return f"{entry}=[{','.join(map(str, value))}]"
    if entry:
        return f"{entry} {text}"
    described = type(row).columns()[column]
    for single, words in described.said_as.items():
        if value == single:
            return words
    return (described.phrase or f"{column} {{}}").format(text)


def _as_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    # Of a server its host: a URL is no name.
    return re.sub(r"https?://([^/,; ]+)[^,; ]*", r"\1", str(value))


def _prompts(row: RunRow) -> str | None:
    if row.questions_in_words is not None:
        return row.questions_in_words
    if row.status not in (None, "ok"):
        # A run that ended early does not record how many prompts it was asked for.
        return None
    number = getattr(row, "num_prompts", None)
    name = getattr(row, "prompts", None)
    if not number or not name:
        return ""
    different = getattr(row, "num_different_prompts", None)
    if different is not None:
        return f"{counted(different, 'prompt')} ({name}) asked {number} times in all"
    return f"{counted(number, 'prompt')} ({name})"


def _batch(row: RunRow) -> str:
    size = row.batch_size
    if row.is_elsewhere:
        return f"{size} in flight" if size else ""
    return "" if size in (None, 1) else f"batches of {size}"


def _rule(row: RunRow) -> str:
    rule = getattr(row, "rule", None)
    if rule in (None, DecodingSettings.rule):
        return ""
    by = lossy_rule(row)
    return f"{by} (lossy)" if by in (rule, f"rule {rule}") else f"rule {rule}"


def _parameter(name: str, row: RunRow) -> str:
    value = changed_parameters(row).get(name)
    if value is None:
        return ""
    # A lossless rule is so at the defaults alone; the name of a lossy one says so already.
    is_lossy = lossy_rule(row) != f"rule {getattr(row, 'rule', None)}"
    return f"{name} {_as_text(value)}" + (" (lossy)" if is_lossy else "")


# The line of settings of one run.
_LINE = [
    "prompts",
    "max_new_tokens",
    "batch_size",
    "num_draft_tokens",
    "temperature",
    "top_k",
    "top_p",
    "rule",
    *PARAMETERS,
    "draft_sampling",
    "shared",
    "quantization",
    "dtype",
    "engine",
    "runner",
]
# Settings that readers look at first among many runs; K has a column of its own in their tables.
FIRST_SETTINGS = [name for name in [*_LINE, "devices"] if name != "num_draft_tokens"]
# Columns with a directory or a hub repository.
_PLACES = ("repository", "draft_repository")
# What is said of a row by more than the value of one column.
_COMPOSED: Mapping[str, Callable[[Any], str | None]] = {
    "prompts": _prompts,
    "batch_size": _batch,
    "num_draft_tokens": lambda row: f"K={row.num_draft_tokens}" if row.num_draft_tokens else "",
    "weight_bytes": lambda row: f"target on {', '.join(row.weight_bytes or ())}",
    "draft_weight_bytes": lambda row: f"draft on {', '.join(row.draft_weight_bytes or ())}",
    "commit": lambda row: f"commit {short_commit(row.commit)}" if row.commit else "",
    "rule": _rule,
    **{name: functools.partial(_parameter, name) for name in PARAMETERS},
}
