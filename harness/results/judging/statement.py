"""A comparison as a value: the two runs that are compared, the interval, and the number of comparisons seen
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from harness.results.schema import RunRow
from harness.results.statistics.interval import Interval

# How the subject compares with the reference: its figure is above or below the reference's, or nothing is concluded
# (open). Statements of kind `lossless` are lossless, lossy or open instead.
Relation = Literal["above", "below", "open", "lossless", "lossy"]
# The kinds of comparison, with their subject and reference. Those after `lossless` are made by `acceptance`.
#
#     kind       subject                                  reference
#     pays       the speculative arm                      the regular arm of the same run
#     compared   a run                                    the reference of its series
#     changed    the accuracy of the speculative arm      the accuracy of the regular arm
#     lossless   texts                                    the target's distribution
#     engine     the draft tokens that an engine accepts  those that its weights predict
#     texts      the engine's texts                       the model's own texts
#     card       a draft                                  the figures that its card promises
#     cause      answers under another condition          answers under the condition as typed
Kind = Literal[
    "pays",
    "compared",
    "changed",
    "lossless",
    "engine",
    "texts",
    "card",
    "cause",
]

# The words for each relation. An open relation has two cases. Without a reason (`why`), the interval itself leaves the
# relation open: the words are under `open`. With a reason, nothing follows from the interval, if there is one: the
# words are under `unknown`, if the kind has them, and otherwise under `open`.
WORDS: Mapping[Kind, Mapping[str, str]] = {
    "pays": {"above": "faster", "below": "slower", "open": "cannot tell"},
    "compared": {
        "above": "gains more",
        "below": "gains less",
        "open": "not significantly different",
        "unknown": "not ranked",
    },
    "changed": {
        "above": "better",
        "below": "worse",
        "open": "no significant difference",
        "unknown": "cannot tell",
    },
    "lossless": {"lossless": "lossless", "lossy": "lossy", "open": "undecided"},
    "engine": {
        "above": "accepts more than the weights predict",
        "below": "accepts less than the weights predict",
        "open": "as the weights predict",
        "unknown": "cannot tell",
    },
    "texts": {"above": "not the model's", "below": "not the model's", "open": "the model's"},
    "card": {
        "above": "above its card",
        "below": "below its card",
        "open": "as its card says",
        "unknown": "not compared with its card",
    },
    "cause": {
        "above": "accepts more",
        "below": "accepts less",
        "open": "no difference shown",
        "unknown": "not measured",
    },
}
# A bound that is at most this far from the limit counts as equal to it. Rounding moves the bounds of equal units by
# about this much.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Statement:
    """A comparison. Pages may say that something is faster, better, lossless or the best only by printing a statement.

    The names and the figures of its sentence come from the same rows, so that they cannot belong to different runs.

    Attributes:
        subject: the row that the statement is about; None for figures that come from no row.
        reference: the row with which the subject is compared; None for the regular arm of the subject's own run, and
            for references that are no run.
        interval: the subject's figure, or its ratio to the reference's figure (for accuracies and for engines, the
            difference), as far as it may be stated.
        family: the number of statements that a reader sees together. Their intervals hold simultaneously; for
            accuracies, a significant difference is significant among all of them.
        why: the reason why nothing can be concluded; empty for a conclusion, and if an interval was judged but leaves
            the relation open.
        figure: name of the figure that is compared.
        evidence: for kind `lossless`, which has no interval, the figures on which a conclusion rests; otherwise empty.

    Raises:
        ValueError: for a conclusion without bounds or evidence, or with a reason why nothing can be concluded.
    """

    kind: Kind
    relation: Relation
    interval: Interval = field(default_factory=Interval)
    why: str = ""
    subject: Any = None
    reference: Any = None
    family: int = 1
    figure: str = "speed-up"
    evidence: str = ""

    def __post_init__(self) -> None:
        is_founded = self.interval.has_bounds or self.evidence
        if self.is_conclusion and (self.why or not is_founded):
            raise ValueError(
                f"{self.relation} without bounds or evidence, or with a reason: {self}"
            )

    @classmethod
    def ordered(
        cls, kind: Kind, interval: Interval, why: str = "", *, limit: float = 1.0, **about: Any
    ) -> Self:
        """Make the statement that follows from an interval: above or below if the interval excludes the limit,
        otherwise open.

        Args:
            why: a reason why nothing can be concluded, whatever the interval is; empty if there is none. If the
                interval has no bounds, the default is "no interval".
            limit: the value with which the interval is compared: 1 for ratios, 0 for differences.
            about: the other fields.
        """
        if not interval.has_bounds:
            why = why or "no interval"
        relation: Relation = "open"
        if not why and interval.low > limit + _ROUNDING:
            relation = "above"
        elif not why and interval.high < limit - _ROUNDING:
            relation = "below"
        return cls(kind, relation, interval, why, **about)

    @property
    def words(self) -> str:
        """The relation in words, such as `faster` or `not significantly different` (`WORDS`)."""
        words = WORDS[self.kind]
        if self.why and "unknown" in words:
            return words["unknown"]
        return words[self.relation]

    @property
    def is_conclusion(self) -> bool:
        return self.relation != "open"

    @property
    def is_judged(self) -> bool:
        """Whether the interval or the evidence counts, whatever the outcome, because there is no reason against it."""
        return not self.why

    @property
    def is_judged_open(self) -> bool:
        """Whether an interval counts, and leaves the relation open: the two may be equal."""
        return self.is_judged and not self.is_conclusion

    @property
    def reason(self) -> str:
        """The reason why nothing is concluded, or otherwise the evidence for the conclusion; may be empty."""
        return self.why or self.evidence

    @property
    def pays(self) -> bool:
        return self.kind == "pays" and self.relation == "above"

    def as_json(self) -> dict[str, Any]:
        """The statement for `result.json`. Each row is identified by its run's id, its job in the sweep, and a few
        settings.
        """
        return {
            "kind": self.kind,
            "relation": self.relation,
            "words": self.words,
            "figure": self.figure,
            "subject": _identity(self.subject),
            "reference": _identity(self.reference),
            "interval": self.interval.parts(),
            "family": self.family,
            "why": self.why or None,
            "evidence": self.evidence or None,
        }


def _identity(row: RunRow | None) -> dict[str, Any] | None:
    if row is None:
        return None
    columns = "run job model draft num_draft_tokens batch_size engine cause condition position"
    return {name: getattr(row, name, None) for name in columns.split()}
