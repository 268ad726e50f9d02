"""Names of rows among others: the pair, and the settings and circumstances in which rows differ."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple

from harness.reporting.words import FIRST_SETTINGS, in_words, pair_name
from harness.results.runs import AnyRunRow, Run
from harness.results.schema import RunRow

# Columns that are no reason for a difference (`run` to `setup_s`), or that the pair's name or
# another place of the report shows.
_NEVER_IN_NAMES = frozenset(
    "run job repeat status error timestamp directory measurement settings setup_s model draft num_draft_tokens"
    " weights quantization dtype synthetic_acceptance lossy operands view server request_rate output".split()
)
# Settings by which a server is started: its command says what they came to.
STARTS_SERVERS = ("engine.first_command", "engine.start_command")
# By the first word of a setting's path, columns in which rows must be equal to be compared in that
# setting: rows with different drafts always differ in `draft.repository`, for example.
_COMPARED_WITHIN = {
    "model": ("model",),
    "draft": ("draft",),
    "engine": ("engine", "server"),
    "prompts": ("prompts",),
}

# A flag with its value, or any other word of a command.
_FLAG_OR_WORD = r"-\S+(?:\s+[^-\s]\S*)?|\S+"


@dataclass
class Name:
    """Name of a row among others.

    Attributes:
        pair: see `pair_name`.
        settings: those in which rows differ, in words, by column; K left out.
        circumstances: those that distinguish the row from others with the same settings, in words.
    """

    pair: str
    num_draft_tokens: int | str | None
    settings: dict[str, str] = field(default_factory=dict)
    circumstances: list[str] = field(default_factory=list)

    @property
    def group(self) -> tuple[str, ...]:
        """The same value for rows that differ in K or in circumstances, such as versions, alone.

        Devices and runners count as settings here (`FIRST_SETTINGS`).
        """
        return self.pair, *self.settings.values()

    @property
    def k_order(self) -> float:
        """Orders names by K, `auto` last."""
        return math.inf if isinstance(self.num_draft_tokens, str) else self.num_draft_tokens or 0

    @property
    def details(self) -> list[str]:
        # A setting and the column that it sets may say the same.
        return [*dict.fromkeys([*self.settings.values(), *self.circumstances])]

    @property
    def cell(self) -> str:
        """First cell of a table: the pair, and a second line with its details."""
        return f"{self.pair}\n{' · '.join(self.details)}".strip()

    def label(self, separator: str = " · ") -> str:
        """The name in one line."""
        k = [f"K={self.num_draft_tokens}"] if self.num_draft_tokens else []
        return separator.join([self.pair, *k, *self.details])


class Named(NamedTuple, Generic[AnyRunRow]):
    """A run with what distinguishes it from others, and the row that a table shows of it: `run.last`, or another."""

    name: Name
    run: Run[AnyRunRow]
    row: AnyRunRow


def name_of(row: RunRow) -> Name:
    """The name of a row that nothing else has to be distinguished from."""
    return Name(pair_name(row), (row.num_draft_tokens or _served_k(row)) if row.draft else None)


def _served_k(row: RunRow) -> int | None:
    """The K of a server that was not started here, by what it reported; None where that is unknown."""
    rates = getattr(row, "marginal_acceptance_by_position", None)
    proposed = getattr(row, "mean_proposed", None)
    if row.url is None or proposed is None:
        return None
    if rates:
        # The mean is below K: the last iterations of answers draft less.
        return max(len(rates), math.ceil(proposed))
    return int(proposed) if proposed == int(proposed) else None


def distinct_names(rows: Sequence[RunRow]) -> list[Name]:
    """The name of each row among the others.

    Names have every setting in which rows differ, so that a table never hides that two settings
    were changed at once. Settings of a model, a draft, an engine or a prompt set are compared among
    rows with the same one. Circumstances are named only where settings do not suffice: all those in
    which rows differ that would otherwise have the same name.

    Three rows of one pair, at batch size 1 with seed 0, at 4 with seed 0 and at 4 with seed 1, are
    `13B with 7B · seed 0`, `13B with 7B · batches of 4 · seed 0` and `13B with 7B · batches of 4 ·
    seed 1`. A batch of one prompt needs no word, as the defaults of decoding do.
    """
    names = [name_of(row) for row in rows]
    if len(rows) < 2:
        return names
    # By name, the path of a setting. Readers look at the first ones first, among all rows.
    settings = dict.fromkeys(FIRST_SETTINGS, "")
    circumstances = []
    for column, described in type(rows[0]).columns().items():
        if column in settings or column in _NEVER_IN_NAMES:
            continue
        if described.kind == "setting":
            settings[column] = described.path
        elif described.kind == "circumstance":
            circumstances.append(column)
    # Changed settings without a column of their own.
    for entry in sorted({entry for row in rows for entry in row.settings or ()}):
        if entry not in STARTS_SERVERS:
            settings[f"settings.{entry}"] = entry
    commands = [getattr(row, "server_command", None) or [] for row in rows]
    typed = [[(row.settings or {}).get(name) for name in STARTS_SERVERS] for row in rows]
    if any(typed[0]) and all(words == typed[0] for words in typed):
        # What was filled in, K and `vary`, has names.
        commands = [[] for _ in rows]
    draft_tokens = [name.num_draft_tokens for name in names]
    measured = _differing_words([" ".join(words[-1:]) for words in commands], draft_tokens)
    regular = _differing_words([" ".join(words[:-1]) for words in commands], draft_tokens)
    for name, its_words, others in zip(names, measured, regular, strict=True):
        alone = [word for word in others if word not in its_words]
        words = [*its_words, *(["against", *alone] if alone else [])]
        if words:
            name.settings["server_command"] = " ".join(words)
    pairs = [name.pair for name in names]
    for column in ("model", "draft"):
        # Typed otherwise, and called the same: `30B` and `./30B`.
        for index, text in _differing(rows, column, pairs):
            names[index].settings[column] = text
    peers: dict[tuple[str, ...], list[Hashable]] = {}
    for column, path in settings.items():
        shared = _COMPARED_WITHIN.get(path.partition(".")[0], ())
        if shared not in peers:
            peers[shared] = [tuple(getattr(row, name, None) for name in shared) for row in rows]
        for index, text in _differing(rows, column, peers[shared]):
            names[index].settings[column] = text
    labels = [name.label() for name in names]
    for column in circumstances:
        for index, text in _differing(rows, column, labels):
            names[index].circumstances.append(text)
    return names


def _differing_words(
    commands: Sequence[str], draft_tokens: Sequence[int | str | None]
) -> list[list[str]]:
    """The words of each command that not all have, values behind their flags: `--spec-type ngram-simple`.

    Args:
        draft_tokens: K of each. A word that differs in this alone is left out, because every table shows K.
    """
    split = [re.findall(_FLAG_OR_WORD, command) for command in commands]
    in_all = _in_all(split)
    for words, k in zip(split, draft_tokens, strict=True):
        for index, word in enumerate(words):
            if word not in in_all and k is not None:
                words[index] = re.sub(rf"(?<![\w.]){k}(?![\w.])", "{K}", word)
    in_all = _in_all(split)
    return [
        [word.replace("{K}", str(k)) for word in words if word not in in_all]
        for words, k in zip(split, draft_tokens, strict=True)
    ]


def _in_all(split: Sequence[Sequence[str]]) -> set[str]:
    """The words of every command; a run without one is told from them by its engine."""
    commands = [set(words) for words in split if words]
    return set.intersection(*commands) if commands else set()


def named_runs(runs: Sequence[Run[AnyRunRow]]) -> list[Named[AnyRunRow]]:
    """Runs with their names, sorted by pair and K."""
    rows = [run.last for run in runs]
    named = map(Named, distinct_names(rows), runs, rows)
    return sorted(named, key=lambda item: (item.name.group, item.name.k_order))


def _differing(
    rows: Sequence[RunRow], column: str, peers: Sequence[Hashable]
) -> Iterator[tuple[int, str]]:
    """The place and the words of each row that a peer differs from in a column.

    Args:
        peers: a value for each row; rows with the same one are compared with each other.
    """
    # None where a row does not know its value. Empty for one that goes without saying, a value all the same.
    words = [in_words(row, column) for row in rows]
    words_of_peers: dict[Hashable, set[str]] = {}
    for peer, text in zip(peers, words, strict=True):
        if text is not None:
            words_of_peers.setdefault(peer, set()).add(text)
    for index, (peer, text) in enumerate(zip(peers, words, strict=True)):
        if text and len(words_of_peers[peer]) > 1:
            yield index, text
