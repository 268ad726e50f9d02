"""Makes names that distinguish rows from each other: the pair, and the settings and circumstances in which the rows
differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, NamedTuple

from harness.config.model_names import SECOND_COMMAND
from harness.reporting.words import FIRST_SETTINGS, k_in_words, pair_name, setting_in_words
from harness.results.runs import AnyRunRow, Run, grouped
from harness.results.schema import RunRow

# Columns that names leave out. They identify a run, repeat the pair's name or the words of other columns, or are shown
# in another place of a report.
_SKIPPED_COLUMNS = frozenset(
    "run job repeat repeats status error timestamp directory measurement settings setup_s model draft num_draft_tokens"
    " weights synthetic_acceptance lossy operands view server output".split()
)
# The settings with a server's command as it was typed. The command with which the server was started is shown instead.
STARTS_SERVERS = ("engine.first_command", "engine.start_command")
# By the first word of a setting's path: a setting is compared only among rows that are equal in these columns. For
# example, `draft.repository` is compared only among rows with the same `draft`, because rows with different drafts
# always differ in it.
_COMPARED_WITHIN = {
    "model": ("model",),
    "draft": ("draft",),
    "engine": ("engine", "server"),
    "prompts": ("prompts",),
}

# The length of the date and time at the beginning of a run's id.
_MOMENT = len("20261122T164306")
# Matches a flag with its value, or any other word of a command.
_FLAG_OR_WORD = r"-\S+(?:\s+[^-\s]\S*)?|\S+"


@dataclass
class Name:
    """The name of a row, which distinguishes the row from others.

    Attributes:
        pair: the pair's name, from `pair_name`.
        num_draft_tokens: K; None if there is none.
        k: K in words (`k_in_words`).
        settings: the settings in which the rows differ, in words, by column; K is left out. For a setting without a
            column, the key is `settings.` and its name, such as `settings.draft.sampling`.
        circumstances: circumstances that distinguish the row from others with the same settings, in words.
    """

    pair: str
    num_draft_tokens: int | str | None
    k: str | None
    settings: dict[str, str] = field(default_factory=dict)
    circumstances: list[str] = field(default_factory=list)

    @property
    def group(self) -> tuple[str, ...]:
        """A key that is equal for rows that differ only in K, or in circumstances such as versions.

        Devices and runners count as settings here (`FIRST_SETTINGS`).
        """
        return self.pair, *self.settings.values()

    @property
    def k_order(self) -> float:
        """A key that sorts names by K, with `auto` last."""
        return math.inf if isinstance(self.num_draft_tokens, str) else self.num_draft_tokens or 0

    @property
    def details(self) -> list[str]:
        # A setting and a circumstance may have the same words; these are shown only once.
        return [*dict.fromkeys([*self.settings.values(), *self.circumstances])]

    @property
    def server_words(self) -> list[str]:
        """The words in which the row's server command differs from those of other rows, each flag together with its
        value.
        """
        own, _, _ = self.settings.get("server_command", "").partition("against ")
        return re.findall(_FLAG_OR_WORD, own)

    @property
    def cell(self) -> str:
        """The text of a row's first cell in a table: the pair, and its details in a second line."""
        return f"{self.pair}\n{' · '.join(self.details)}".strip()

    def label(self, separator: str = " · ") -> str:
        """The whole name in one line, with K."""
        k = [f"K={self.k}"] if self.k else []
        return separator.join([self.pair, *k, *self.details])


class Named(NamedTuple, Generic[AnyRunRow]):
    """A run, the name that distinguishes it from others, and the row of it that a table shows, which is usually
    `run.last`.
    """

    name: Name
    run: Run[AnyRunRow]
    row: AnyRunRow


def name_of(row: RunRow) -> Name:
    """The name of a single row, which need not be distinguished from other rows."""
    return Name(pair_name(row), row.num_draft_tokens, k_in_words(row))


def distinct_names(rows: Sequence[RunRow]) -> list[Name]:
    """Return a name for each row that distinguishes it from the others, in the order of the rows.

    A name includes every setting in which rows differ, so that a table never hides that two settings were changed at
    once. Settings of a model, a draft, an engine or a prompt set are compared only among rows with the same model,
    draft, engine or prompt set. Circumstances are included only if settings do not distinguish some rows. Then all
    circumstances in which these rows differ are included.

    For example, these are three rows of one pair. A batch size of 1 has no words, and neither have the defaults of
    decoding:

        batch_size=1 seed=0    13B with 7B · seed 0
        batch_size=4 seed=0    13B with 7B · batches of 4 · seed 0
        batch_size=4 seed=1    13B with 7B · batches of 4 · seed 1
    """
    names = [name_of(row) for row in rows]
    if len(rows) < 2:
        return names
    for name, words in zip(names, _words_of_servers(rows, names), strict=True):
        if words:
            name.settings["server_command"] = words
    pairs = [name.pair for name in names]
    for column in ("model", "draft"):
        # Different values may have the same short name: `30B` and `./30B`.
        for index, text in _differing(rows, column, pairs):
            names[index].settings[column] = text
    for column, path in _paths_of_settings(rows).items():
        shared = _COMPARED_WITHIN.get(path.partition(".")[0], ())
        groups = [tuple(getattr(row, name, None) for name in shared) for row in rows]
        for index, text in _differing(rows, column, groups):
            names[index].settings[column] = text
    labels = [name.label() for name in names]
    for column, described in type(rows[0]).columns().items():
        if described.kind == "circumstance" and column not in _SKIPPED_COLUMNS:
            for index, text in _differing(rows, column, labels):
                names[index].circumstances.append(text)
    # If nothing else distinguishes rows, the times of their runs do. For example, a user's own file was changed between
    # the runs.
    for alike in grouped(zip(names, rows, strict=True), lambda item: item[0].label()).values():
        moments = [str(row.run)[:_MOMENT] for _, row in alike]
        if len(set(moments)) > 1:
            for (name, _), moment in zip(alike, moments, strict=True):
                name.circumstances.append(f"run {moment}")
    return names


def _paths_of_settings(rows: Sequence[RunRow]) -> dict[str, str]:
    """The path of each setting in which rows may differ, by its column; the most important settings come first.

    An empty path means that the setting is compared among all rows.
    """
    # The number of threads is a circumstance, but no run is compared with one of another number.
    paths = dict.fromkeys([*FIRST_SETTINGS, "num_threads"], "")
    for column, described in type(rows[0]).columns().items():
        if described.kind == "setting" and column not in _SKIPPED_COLUMNS:
            paths.setdefault(column, described.path)
    # Settings that differ from their defaults and have no column.
    for entry in sorted({entry for row in rows for entry in row.settings or ()}):
        if entry not in STARTS_SERVERS:
            paths[f"settings.{entry}"] = entry
    return paths


def _words_of_servers(rows: Sequence[RunRow], names: Sequence[Name]) -> list[str]:
    """For each row, the words in which its server command differs from those of other rows, or from the first of two
    commands.

    They are followed by `against` and the words that only the regular command has: `-k 2 against -p 1`.

    If two commands are compared, the words that both have, but not those of other rows, come last: `--spec-type
    ngram-simple, both -np 1` if the commands of another row have `-np 2`.
    """
    typed = [[(row.settings or {}).get(name) for name in STARTS_SERVERS] for row in rows]
    if any(typed[0]) and all(settings == typed[0] for settings in typed):
        # All rows come from one typed command. They differ only in K and `vary`, whose words are part of the name
        # already.
        return [""] * len(rows)
    commands = [getattr(row, "server_command", None) or [] for row in rows]
    ks = [name.num_draft_tokens for name in names]
    # The measured server's command is the last one. Before it is the regular one, if there are two.
    of_measured = _differing_words([" ".join(own[-1:]) for own in commands], ks)
    of_regular = _differing_words([" ".join(own[:-1]) for own in commands], ks)
    texts = []
    for row, own, measured, regular in zip(rows, commands, of_measured, of_regular, strict=True):
        in_both: list[str] = []
        second = re.findall(_FLAG_OR_WORD, " ".join(own[-1:]))
        alone = [word for word in regular if word not in second]
        if row.draft == SECOND_COMMAND and len(set(own)) == 2:
            # Two different commands are compared: each is named by the words that the other one lacks. Words that both
            # have, but not the commands of other rows, come last.
            first = re.findall(_FLAG_OR_WORD, own[0])
            in_both = [word for word in regular if word in second]
            measured = [word for word in second if word not in first]
            alone = [word for word in first if word not in second]
        text = " ".join([*measured, *(["against", *alone] if alone else [])])
        texts.append(f"{text}, both {' '.join(in_both)}" if in_both else text)
    return texts


def _differing_words(commands: Sequence[str], ks: Sequence[int | str | None]) -> list[list[str]]:
    """For each command, the words in which it differs from the others, each flag with its value.

    Flags whose value is K are left out where K is known, because every table shows K. With K=2 and K=3, the commands
    `serve -k 2 -a 2` and `serve -k 3 -a 2 -b` give [[], ["-b"]], and `serve -k 2 -a 1` and `serve -k 3 -a 5` give
    [["-a 1"], ["-a 5"]].

    Args:
        ks: K of each command.
    """
    split = [re.findall(_FLAG_OR_WORD, command) for command in commands]
    # Runs without a command are ignored, because another engine ran them.
    in_all = set.intersection(*[set(words) for words in split if words] or [set()])
    # The forms that each flag has with K in place of its number. A flag whose value is K has one form, with K in it.
    # `-np 4` may have the value of K by chance, and then has another form in another command.
    forms: dict[str, set[str]] = {}
    for words, k in zip(split, ks, strict=True):
        for word in words:
            if k is not None:
                form = re.sub(rf"(?<![\w.]){k}(?![\w.])", "{K}", word)
                forms.setdefault(_flag_of(word), set()).add(form)
    others = {
        flag for flag, found in forms.items() if len(found) > 1 or "{K}" not in next(iter(found))
    }
    return [
        [word for word in words if word not in in_all and (k is None or _flag_of(word) in others)]
        for words, k in zip(split, ks, strict=True)
    ]


def _flag_of(word: str) -> str:
    """The name of a flag, without its value: `-k` for `-k 2`, and `--k` for `--k=2`."""
    return re.split(r"[\s=]", word)[0]


def named_runs(
    runs: Sequence[Run[AnyRunRow]], row_of: Callable[[Run], AnyRunRow] = attrgetter("last")
) -> list[Named[AnyRunRow]]:
    """The runs with their names, sorted by pair, settings and K.

    Args:
        row_of: returns the row of a run by which it is named.
    """
    rows = [row_of(run) for run in runs]
    named = map(Named, distinct_names(rows), runs, rows)
    return sorted(named, key=lambda item: (item.name.group, item.name.k_order))


def _differing(
    rows: Sequence[RunRow], column: str, groups: Sequence[Hashable]
) -> Iterator[tuple[int, str]]:
    """For each row that differs in a column from another row of its group, yield its index, and its value in words.

    Args:
        groups: the group of each row.
    """
    # None stands for a value that is not known, and is not compared. An empty text stands for a default, which differs
    # from other values.
    words = [setting_in_words(row, column) for row in rows]
    words_of_group: dict[Hashable, set[str]] = {}
    for group, text in zip(groups, words, strict=True):
        if text is not None:
            words_of_group.setdefault(group, set()).add(text)
    for index, (group, text) in enumerate(zip(groups, words, strict=True)):
        if text and len(words_of_group[group]) > 1:
            yield index, text
