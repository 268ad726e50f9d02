"""Words for settings and runs that all commands use: titles, lines of settings, labels and warnings."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.config.acceptance_rules import RULES, changed_lenience
from harness.config.amounts import counted
from harness.config.command_line import Words, setting_in
from harness.config.model_names import SECOND_COMMAND
from harness.config.settings import DecodingSettings
from harness.results.schema import RunRow

# Launchers whose jobs slow each other down, so that the next command is better typed without them.
_SIDE_BY_SIDE = {
    "+launcher=submitit_local",
    "hydra/launcher=submitit_local",
    "hydra/launcher=joblib",
}
# The meaning of a lossy rule.
LOSSY = "the speculative output no longer follows the target (lossy)"


def settings_line(rows: Sequence[RunRow]) -> str:
    """The settings of one run: `15 prompts (english) · 64 new tokens · K=4 · greedy · float16`."""
    # The status is set to `ok` so that the number of prompts is shown even if the run ended early; it is then the
    # number of prompts that were answered.
    row = replace(rows[-1], status="ok")
    texts = {column: setting_in_words(row, column) for column in _LINE}
    texts["max_new_tokens"] = _lengths(rows)
    return " · ".join(filter(None, texts.values()))


def typed_again(changes: str, *, command: str = "", leaving_out: Collection[str] = ()) -> str:
    """The command that was typed, with some settings replaced or added: `harness latency draft=lookup K=8`.

    Args:
        changes: the new settings, as they are typed, such as `batch_size=1 K=8`.
        command: name of another command, which replaces the name of the typed command; empty to keep that.
        leaving_out: the full names of settings that the other command does not have.
    """
    words = Words.noted()
    changing = shlex.split(changes)
    # Directories (`hydra.run.dir`, `hydra.sweep.dir`) belong only to the typed run, and are left out.
    replaced = ["details", "dir", *map(setting_in, changing)]
    if not _SIDE_BY_SIDE.isdisjoint(words.typed):
        replaced += ["hydra/launcher", "hydra.launcher"]
    kept = [
        word
        for word in words.typed
        if setting_in(word) not in leaving_out
        and not any(_is_replaced(setting_in(word), by) for by in replaced)
    ]
    if command:
        kept = [command, *kept[1:]]
    return str(Words([*kept, *changing], words.servers))


def _is_replaced(name: str, by: str) -> bool:
    """Whether a typed setting (`name`) must be left out because another setting (`by`) replaces it.

    For example, `num_draft_tokens` replaces `decoding.num_draft_tokens`, and the reverse; and `draft` replaces
    `draft.max_ngram`.
    """
    last = name.rpartition(".")[2]
    return f"{name}.".startswith(f"{by}.") or last == by or name == by.rpartition(".")[2]


def device_of(row: RunRow) -> str:
    """The devices that computed, or the reason why a title names none."""
    if row.is_simulated:
        return "made-up costs, no measurement"
    if row.devices:
        if row.num_threads and {*(row.weight_bytes or ())} == {"cpu"}:
            return f"{row.devices}, {counted(row.num_threads, 'thread')}"
        return row.devices
    return f"{row.url}, device not known" if row.url else "device not known"


def _lengths(rows: Sequence[RunRow]) -> str | None:
    """The lengths of the answers: `64 new tokens`, `8 to 29 new tokens`. If they are not known, `up to 64 new tokens`,
    from the setting `max_new_tokens`.
    """
    shortest = [getattr(row, "shortest_answer", None) for row in rows]
    longest = [getattr(row, "longest_answer", None) for row in rows]
    least = min(filter(None, shortest), default=None)
    most = max(filter(None, longest), default=None)
    if least is None or most is None:
        limit = setting_in_words(rows[-1], "max_new_tokens")
        return limit and f"up to {limit}"
    return counted(most, "new token") if least == most else f"{least} to {most} new tokens"


def labels(row: RunRow) -> list[str]:
    """Those of the labels `random weights` and `synthetic 0.8` that apply to a row; [] for a real measurement."""
    applying = []
    if row.weights == "random":
        applying.append("random weights")
    if row.synthetic:
        applying.append(f"synthetic {synthetic_value(row)}")
    return applying


def synthetic_value(row: Any) -> str:
    """The value of `decoding.synthetic_acceptance` as it is typed: `0.8`, or `[0.8,0.75,0.7]`."""
    rates = row.synthetic_acceptance
    if isinstance(rates, list | tuple):
        return f"[{','.join(f'{rate:.3g}' for rate in rates)}]"
    return f"{rates:g}"


def pair_name(row: RunRow, joint: str = " with ") -> str:
    """The name of a pair, such as `13B with 7B`, or of the target alone; followed by the `labels` of the row."""
    target = called(row.model) if row.model else "unknown model"
    if row.server:
        target += f" ({row.server})"
    return ", ".join([f"{target}{_draft_name(row, joint)}", *labels(row)])


def _draft_name(row: RunRow, joint: str) -> str:
    """The second part of a pair's name, such as ` with 7B`; empty for a target alone, and for a simulated pair."""
    if not row.draft or row.is_simulated:
        return ""
    if not row.is_elsewhere:
        return f"{joint}{called(row.draft)}"
    if row.has_one_server or row.has_same_command:
        return " against itself"
    # A server does not report its draft, but the user may have named it.
    if row.draft == "server":
        return " with the server's draft"
    if row.draft == SECOND_COMMAND:
        return " against the first command"
    return f"{joint}{called(row.draft)}{' (as labelled)' if row.is_labelled else ''}"


def called(typed: str) -> str:
    """The short name of a model or method: `llama` for `./models/llama`, `MyMethod` for `./my.py:MyMethod`."""
    is_path = typed.startswith((".", "/", "~")) or typed.count("/") > 1
    last = typed.rstrip("/").rpartition("/")[2]
    return last.rpartition(".py:")[2] if is_path and last else typed


def arm_name(row: Any) -> str:
    """The name of a row's arm. It is `speculative (lossy)` if the output may differ from the target's, and `first` or
    `second` if two commands are compared.
    """
    if row.draft == SECOND_COMMAND:
        return "first" if row.arm == "regular" else "second"
    return f"{row.arm} (lossy)" if row.lossy and row.arm != "regular" else row.arm


def lossy_rule(row: Any) -> str | None:
    """The setting that makes the output lossy: `rule ./likely.py:Likely`, `lenience 0.8`, or for a server
    `engine.lossy=true`; None for a lossless rule.
    """
    rule = getattr(row, "rule", None)
    if row.is_elsewhere:
        return "engine.lossy=true" if row.lossy else None
    record = None if rule is None else RULES.loaded(rule)
    is_lossless = record is not None and record.is_lossless(row.temperature)
    if rule and row.lossy and not is_lossless:
        return f"rule {rule}"
    lenience = changed_lenience(row)
    return None if lenience is None else f"lenience {lenience:g}"


def lossy_warning(row: Any) -> str | None:
    """A warning about a lossy rule; None for a lossless one."""
    rule = lossy_rule(row)
    return rule and f"{rule}: {LOSSY}."


def too_long(row: Any) -> str | None:
    """`3 prompts were left out`, because they were too long; None if there were none."""
    if not row.num_skipped:
        return None
    were = "was" if row.num_skipped == 1 else "were"
    return f"{counted(row.num_skipped, 'prompt')} {were} left out"


def common_settings(rows: Sequence[RunRow]) -> str:
    """The settings that all rows share, in one line. A setting whose value is not known for some row is left out."""
    shared: list[str] = []
    for column in FIRST_SETTINGS:
        texts = {setting_in_words(row, column) for row in rows}
        if len(texts) == 1:
            shared += filter(None, texts)
    return " · ".join(shared)


def short_commit(commit: str) -> str:
    """A commit shortened to nine digits: `17a8ca98e-dirty`."""
    return commit[:9] + ("-dirty" if commit.endswith("-dirty") else "")


def setting_in_words(row: RunRow, column: str) -> str | None:
    """A setting or circumstance of a row in words: `64 new tokens`, `greedy`, `commit 17a8ca98e`.

    Args:
        column: a column of the row, or a key of `_COMPOSED`; or, such as `settings.draft.sampling`, an entry of the
            column `settings`.

    Returns:
        The words. Empty if there is no value, or if the value need not be mentioned, such as a default of decoding.
            None if the value is not known: for the prompts of a run that ended early, because the number of prompts
            that it should have answered is not recorded; for the seeds of a pooled row; and for a directory or hub
            repository that is not set.
    """
    if column in _COMPOSED:
        return _COMPOSED[column](row)
    column, _, entry = column.partition(".")
    value = getattr(row, column, None)
    if column == "seed" and getattr(row, "repeat", None) == "all":
        # A pooled row contains only the first of several seeds.
        return None
    if entry:
        value = (value or {}).get(entry)
    if value is None:
        return None if column in _PLACES else ""
    # Only the last part of a path is shown, because copies of one model are in different directories. The `./` makes
    # `called` take `org/model` for a path, too.
    text = called(f"./{value}") if column in _PLACES else _as_text(value)
    if entry.startswith("vary."):
        return f"{entry.removeprefix('vary.')}={text}"
    if entry and isinstance(value, list):
        # The list is shown as it is typed.
        return f"{entry}=[{','.join(map(str, value))}]"
    if entry:
        return f"{entry} {text}"
    described = type(row).columns()[column]
    for single, words in described.said_as.items():
        if value == single:
            return words
    return (described.phrase or f"{column} {{}}").format(text)


def _as_text(value: Any) -> str:
    """A value of a column as text: `1, 2`, `true`, `0.8`, `localhost:8000`."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    # Of a server's address, only the host is shown.
    return re.sub(r"https?://([^/,; ]+)[^,; ]*", r"\1", str(value))


def _prompts(row: RunRow) -> str | None:
    """The prompts in words, such as `15 prompts (english)`; None and empty as for `setting_in_words`."""
    if row.questions_in_words is not None:
        return row.questions_in_words
    if row.status not in (None, "ok"):
        # A run that ended early does not record how many prompts it should have answered.
        return None
    name = getattr(row, "prompts", None)
    if not name:
        return ""
    number = getattr(row, "num_prompts", None)
    if not number:
        return f"prompts {name}"
    different = getattr(row, "num_different_prompts", None)
    if different is not None:
        return f"{counted(different, 'prompt')} ({name}) in {number} requests"
    return f"{counted(number, 'prompt')} ({name})"


def _batch(row: RunRow) -> str:
    size = row.batch_size
    if row.is_elsewhere:
        return f"{size} in flight" if size else ""
    return "" if size in (None, 1) else f"batches of {size}"


def k_in_words(row: RunRow) -> str | None:
    """`4`, `auto`; `4 (as labelled)` for a server that was already running, whose K is only what the user typed; None
    without a K.
    """
    label = " (as labelled)" if row.is_labelled else ""
    return f"{row.num_draft_tokens}{label}" if row.num_draft_tokens else None


def _rule(row: RunRow) -> str:
    """The acceptance rule in words, marked if it is lossy by itself; empty for the default."""
    rule = getattr(row, "rule", None)
    if rule in (None, DecodingSettings.rule):
        return ""
    by = lossy_rule(row)
    return f"{by} (lossy)" if by == f"rule {rule}" else f"rule {rule}"


def _lenience(row: RunRow) -> str:
    """The lenience in words; empty if it is 1, or not recorded."""
    lenience = changed_lenience(row)
    if lenience is None:
        return ""
    # For a rule that is lossy by itself, the words for the rule already say it.
    text = f"lenience {lenience:g}"
    return f"{text} (lossy)" if lossy_rule(row) == text else text


# The columns in the line of settings of one run, in this order.
_LINE = [
    "prompts",
    "max_new_tokens",
    "batch_size",
    "num_draft_tokens",
    "temperature",
    "top_k",
    "top_p",
    "rule",
    "lenience",
    "draft_sampling",
    "shared",
    "quantization",
    "dtype",
    "engine",
    "runner",
]
# The settings that a name or title shows first. K is left out, because tables have a column for K.
FIRST_SETTINGS = [name for name in [*_LINE, "devices"] if name != "num_draft_tokens"]
# Columns that contain a directory or a hub repository.
_PLACES = ("repository", "draft_repository")
# Columns whose words depend on more than the value of one column.
_COMPOSED: Mapping[str, Callable[[Any], str | None]] = {
    "prompts": _prompts,
    "batch_size": _batch,
    "num_draft_tokens": lambda row: f"K={k}" if (k := k_in_words(row)) else "",
    "weight_bytes": lambda row: (
        f"target on {', '.join(row.weight_bytes)}" if row.weight_bytes else ""
    ),
    "draft_weight_bytes": lambda row: (
        f"draft on {', '.join(row.draft_weight_bytes)}" if row.draft_weight_bytes else ""
    ),
    "commit": lambda row: f"commit {short_commit(row.commit)}" if row.commit else "",
    "rule": _rule,
    "lenience": _lenience,
}
