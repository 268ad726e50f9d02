"""A comparison as a value: which run is compared with which, by which interval, and among how many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from harness.results.schema import RunRow
from harness.results.statistics.interval import Interval

# The position of the subject relative to the reference; above is better. Texts are instead lossless or lossy.
Relation = Literal["above", "below", "open", "lossless", "lossy"]
# The subject and the reference of each kind of comparison. pays: a speculative arm and its regular arm. compared: a run
# and the reference of its series. changed: the accuracy of the two arms. lossless: texts and the target's distribution.
# The other kinds are about acceptance. engine: an engine and its weights. texts: the engine's texts and the model's
# own. card: a draft and its card. cause: answers under another
# condition and those as typed.
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

# The words for each relation. `unknown` is for an open relation with a reason (`why`); without a reason, an interval
# was judged and leaves the relation open.
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
    "card": {"above": "above its card", "below": "below its card", "open": "as its card says"},
    "cause": {
        "above": "accepts more",
        "below": "accepts less",
        "open": "no difference shown",
        "unknown": "not measured",
    },
}
# Bounds this close to the limit count as equal to it: rounding moves the bounds of equal units by about as much.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Statement:
    """A comparison, and the only way for a page to say that something is faster, better, lossless or the best. The
    names and the figures of its sentence come from the rows here, so that they cannot part.

    Attributes:
        subject: the row that the statement is about; None for figures that come from no row.
        reference: the row whose figure the subject's was divided by; None for the regular arm of the subject's own run.
        interval: the subject's figure, or its ratio to the reference's (for accuracies the difference), so far as it
            may be stated.
        family: how many statements a reader sees together. Their intervals all hold at once, or a significant
            difference is significant among all of them.
        why: why nothing can be concluded; empty for a conclusion, and if an interval was judged but leaves it open.
        figure: name of the figure that is compared.
        evidence: for texts, which have no interval, the figures that a conclusion rests on.

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
            raise ValueError(f"{self.relation} without bounds or evidence: {self}")

    @classmethod
    def ordered(
        cls, kind: Kind, interval: Interval, why: str = "", *, limit: float = 1.0, **about: Any
    ) -> Self:
        """The statement that an interval allows: above or below if it excludes the limit, otherwise open.

        Args:
            why: why nothing can be concluded, whatever the interval is; empty if there is no such reason.
            limit: the value that the interval is compared with: 1 for ratios, 0 for differences.
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
        """`faster`, `gains less`, `not significantly different`."""
        words = WORDS[self.kind]
        if self.why and "unknown" in words:
            return words["unknown"]
        return words[self.relation]

    @property
    def is_conclusion(self) -> bool:
        return self.relation != "open"

    @property
    def is_judged(self) -> bool:
        """Whether there was an interval to judge by, whatever it shows."""
        return not self.why

    @property
    def is_judged_open(self) -> bool:
        """Whether an interval was judged but shows nothing: the two may be equal."""
        return self.is_judged and not self.is_conclusion

    @property
    def reason(self) -> str:
        """Why nothing is concluded, or else the evidence for a conclusion."""
        return self.why or self.evidence

    @property
    def pays(self) -> bool:
        return self.kind == "pays" and self.relation == "above"

    def as_json(self) -> dict[str, Any]:
        """The statement for `result.json`. Each row is identified by its run's id and its place in the sweep."""
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
    columns = ("run", "job", "model", "draft", "num_draft_tokens", "batch_size")
    return {name: getattr(row, name, None) for name in columns}
