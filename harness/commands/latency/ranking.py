"""Names, orders and describes many runs of `latency`: their places on a page, and sentences about each series."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from harness.commands.latency.answer import headline
from harness.measuring.rows import LatencyRow
from harness.reporting.names import Name, distinct_names, name_of
from harness.reporting.table import Line
from harness.reporting.words import called
from harness.results.judging.series import (
    Member,
    Series,
    best_of,
    for_vllm,
    judged_at_once,
    load_of,
    schedule_in_words,
    schedule_of,
    series_of,
)
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import Interval

# The most rivals that a sentence names.
_MOST_NAMED = 3
# The beginnings of sentences about the runs that are compared with the reference, by the words of their standing. The
# sentences are in this order. Runs with other words get no sentence.
_STANDINGS = {
    "gains more": "Significantly more than {first}, but not significantly faster than regular decoding",
    "not significantly different": "Not significantly different from {first}",
    "gains less": "Significantly less than {first}",
    "not ranked": "Not ranked",
}


@dataclass(eq=False)
class RankedRun(Member):
    """A run among others on a page: a pair, or a target without a draft.

    Attributes:
        name: the name that distinguishes the run from the others.
        is_best_of_draft: whether the run has the best K of its draft.
    """

    series: Series = field(kw_only=True)
    name: Name = field(kw_only=True)
    is_best_of_draft: bool = False

    @property
    def row(self) -> LatencyRow:
        """The row of the speculative arm; without a draft, the row of the regular arm."""
        return self.run.last

    @property
    def regular(self) -> LatencyRow | None:
        """The row of the regular arm; None if the run has none."""
        return self.run.row("regular")

    @property
    def has_verdict(self) -> bool:
        """Whether the run is complete and allows a conclusion. A run of a single arm needs no interval for that."""
        return self.has_interval or self.is_arm_alone

    @property
    def is_reference(self) -> bool:
        """Whether the other runs of its series are compared with this one."""
        reference = self.series.reference
        return reference is not None and reference.run is self.run

    @property
    def is_first(self) -> bool:
        """Whether this is the reference of a series with several compared runs."""
        return self.is_reference and bool(self.series.standings)

    @property
    def remark(self) -> str:
        """The words in the column after the speed-up; empty if there is nothing to remark.

        if runs of the series are compared    `unsteady` if the run drifted or the machine was busy; otherwise
                                              `best` if this run is significantly faster than all others
        otherwise                             the words of the verdict, then `unsteady` likewise
        """
        disturbed = "" if self.row.was_quiet else "unsteady"
        if self.series.standings:
            is_best = self.is_reference and self.series.is_reference_best
            return disturbed or ("best" if is_best else "")
        words = "" if self.speedup is None else self.verdict.words
        return "\n".join(filter(None, [words, disturbed]))

    @property
    def model(self) -> str:
        return called(self.row.model or "unknown model")

    @property
    def k(self) -> int | str | None:
        """K as it was set: a number, `auto` or None."""
        return self.name.num_draft_tokens

    @property
    def load(self) -> int:
        """The number of requests in flight, or of rows of a batch."""
        return load_of(self)

    @property
    def curve(self) -> Sequence[str]:
        """A key that is equal for runs with one prompt set that differ only in K and `load`.

        It leaves out the words for `prompts`, because they include the number of prompts, which grows with the load.
        """
        settings = self.name.settings.items()
        with_load = ("batch_size", "prompts")
        return self.name.pair, *(text for column, text in settings if column not in with_load)

    @property
    def curve_of_k(self) -> Sequence[str]:
        """A key that is equal for runs that differ only in `load`."""
        return *self.curve, *([f"K={self.k}"] if self.k else [])


def ranked_runs(runs: Sequence[Run[Any]]) -> list[RankedRun]:
    """The runs, each in its series, named and ordered by `among_themselves`.

    Runs without figures, and runs that lack an arm, are left out.
    """
    shown = [run for run in runs if run.has_figures and run.status != "incomplete"]
    pairs = []
    for series in series_of(shown):
        for member in series.members:
            name = name_of(member.run.last)
            pairs.append(RankedRun(**vars(member), series=series, name=name))
    return among_themselves(pairs)


def among_themselves(pairs: Sequence[RankedRun]) -> list[RankedRun]:
    """These pairs in the order of the page, with new names that contain only what distinguishes these pairs from each
    other, and with the best K of each draft marked.

    All runs of a model stand together, and within a model all runs of a `curve` (a pair with its settings except load
    and K). Models and curves are ordered by their fastest time per token. Those of which no run has a speed-up come
    last. Runs of a curve are ordered by load and then by K, ascending. For example: 13B with 7B at K=2 and 4 (12 ms),
    then 30B with 7B at batch size 1 and 4 (25 ms).
    """
    names = distinct_names([pair.row for pair in pairs])
    named = [replace(pair, name=name) for pair, name in zip(pairs, names, strict=True)]
    for same_draft in grouped(named, attrgetter("name.group")).values():
        best = best_of(same_draft)
        for pair in same_draft:
            pair.is_best_of_draft = pair is best
    ordered = []
    named.sort(key=lambda pair: (pair.speedup is None, pair.row.ms_per_token or 0.0))
    for same_model in grouped(named, attrgetter("model")).values():
        for curve in grouped(same_model, attrgetter("curve")).values():
            ordered += sorted(curve, key=attrgetter("load", "name.k_order"))
    return ordered


def shared_details(pairs: Sequence[RankedRun]) -> list[str]:
    """The details that all these names share, and that distinguish these pairs from others on the page.

    Args:
        pairs: at least one.
    """
    names = [pair.name for pair in pairs]
    details = [text for text in names[0].details if all(text in name.details for name in names)]
    # If the names share not the whole words about their servers' commands, but some of these:
    if names[0].settings.get("server_command") not in details:
        words = names[0].server_words
        in_all = [word for word in words if all(word in name.server_words for name in names)]
        if in_all:
            details.append(" ".join(in_all))
    return details


def certainty(pairs: Sequence[RankedRun]) -> str:
    """What the bounds of these speed-ups are: `95 % interval`, `95 % for 3 at once` in a series of three runs, or
    `95 % for 1 to 3 at once` if runs of several series are mixed.
    """
    families = [pair.verdict.family for pair in pairs]
    if max(families) == 1:
        return "95 % interval"
    ends = dict.fromkeys(map(str, [min(families), max(families)]))
    return f"95 % for {' to '.join(ends)} at once"


def answers(pairs: Sequence[RankedRun]) -> list[Line]:
    """Sentences about one series, or about single runs.

    For a series: a sentence about its reference, bold if there is a conclusion about it; then, for each way in which
    other runs compare with the reference, a sentence that names these runs. Single runs get one sentence each.

    The sentences include the time per token, because the speed-ups of different series are relative to different times.
    """
    first = next((pair for pair in pairs if pair.is_first), None)
    others = [pair for pair in pairs if pair.standing is not None]
    if first is None or not others:
        compared = [pair for pair in pairs if pair.speedup is not None]
        said = [(_with_time(pair), headline(pair.verdict)) for pair in compared]
        return [replace(line, text=f"{name}: {line.text}") for name, line in said]
    others.sort(key=lambda pair: -(pair.speedup or 0.0))
    # The words of a standing are keys of `_STANDINGS`, such as `gains less`.
    by_words = grouped(others, attrgetter("standing.words"))
    # A pair with an unsteady run may be shown to pay, but it cannot be the reference, unless all pairs have such a run.
    pays_unsteadily = any(pair.is_shown and pair.is_sound != first.is_sound for pair in others)
    if first.series.is_reference_best and first.is_shown:
        beginning = "Fastest"
    elif first.is_shown and pays_unsteadily:
        beginning = "Of the pairs without an unsteady run, the best significant speed-up"
    elif first.is_shown:
        beginning = "Best significant speed-up"
    elif pays_unsteadily:
        beginning = (
            "Of the pairs without an unsteady run, none is significantly faster; the highest ranked"
        )
    elif all(pair.verdict.relation == "below" for pair in [first, *others]):
        beginning = "All are significantly slower; the highest ranked"
    else:
        beginning = "None is significantly faster; the highest ranked"
    answer = headline(first.verdict)
    # Bold only for a conclusion: `cannot tell` must not look like one.
    style = answer.style if first.verdict.is_conclusion else "plain"
    lines = [Line(f"{beginning}: {_with_time(first)}: {answer.text}", style, answer.more)]
    is_same_pair = {pair.name.group for pair in others} == {first.name.group}
    for words, sentence in _STANDINGS.items():
        by_reason = grouped(by_words.get(words, []), attrgetter("standing.why"))
        for why, rivals in by_reason.items():
            because = f" ({why})" if why else ""
            standing = sentence.format(first=_label(first, is_same_pair))
            lines.append(Line(f"{standing}{because}: {_named(rivals, is_same_pair)}."))
    return lines


def _with_time(pair: RankedRun) -> str:
    name = pair.name.label(", ")
    return f"{name}, {pair.row.ms_per_token:.3g} ms/token" if pair.row.ms_per_token else name


def _label(pair: RankedRun, is_same_pair: bool) -> str:
    """`K=2`; the whole name of the pair if the sentence is about several pairs, or if no K is known."""
    if is_same_pair and pair.name.k is not None:
        return ", ".join([f"K={pair.name.k}", *pair.name.circumstances])
    return pair.name.label(", ")


def _named(rivals: Sequence[RankedRun], is_same_pair: bool) -> str:
    """The rivals in a sentence: each with its share of the reference's speed-up, if the share has an interval.

    `K=2 with 0.81 (0.74 to 0.88) of that speed-up; K=8 (simultaneous 95 % intervals)`
    """
    names = []
    has_bounds = False
    for rival in rivals:
        name = _label(rival, is_same_pair)
        share = rival.standing.interval if rival.standing else Interval()
        if share.has_bounds:
            name += f" with {share:.2f} of that speed-up"
            has_bounds = True
        names.append(name)
    if len(names) > _MOST_NAMED:
        names[_MOST_NAMED:] = [f"and {len(names) - _MOST_NAMED} more"]
    return "; ".join(names) + (" (simultaneous 95 % intervals)" if has_bounds else "")


def schedules(pairs: Sequence[RankedRun]) -> Iterator[tuple[str, str]]:
    """The K to use at each load, for each pair and settings that were measured at several loads: a heading and words,
    `("Use", "K=3 at 1, 4; none at 16")`, and then the same as an option of vLLM.

    The words begin with the pair and settings, `13B with 7B, K as labelled: `, unless all runs of the page have the
    same. The intervals of all runs of a schedule hold simultaneously.
    """
    curves = grouped(pairs, attrgetter("row.prompts", "curve"))
    have_same_prompts = len({pair.row.prompts for pair in pairs}) == 1
    for (prompts, curve), members in curves.items():
        have_both_arms = all(len(pair.run.rows) == 2 for pair in members)
        if len({pair.load for pair in members}) < 2 or not have_both_arms:
            continue
        ranges, why_none = schedule_of(judged_at_once([pair.run for pair in members]))
        words = [*curve] if len(curves) > 1 else []
        if not have_same_prompts:
            words.append(f"prompts {prompts}")
        if any(pair.row.is_labelled and pair.row.num_draft_tokens for pair in members):
            words.append("K as labelled")
        whose = f"{', '.join(words)}: " if words else ""
        if not ranges:
            yield "Use", f"{whose}no schedule: {why_none}"
            continue
        yield "Use", f"{whose}{schedule_in_words(ranges)} (requests in flight, or rows of a batch)"
        yield "vLLM", f"--speculative-config '{for_vllm(ranges)}'"
