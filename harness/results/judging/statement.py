"""A sentence that compares, as a value: which run against which, by which interval, among how many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from harness.results.schema import RunRow
from harness.results.statistics.interval import Interval

# Where the subject is, compared with the reference: above is better. Texts are lossless or lossy.
Relation = Literal["above", "below", "open", "lossless", "lossy"]
# A speculative arm and its regular one; a run and the reference of its series; the accuracy of both arms; a text and
# the target's distribution. Of acceptance: an engine and its weights; its texts and the model's own; a draft and its
# card, or a guess that is always the same; a cause and the answers as they were.
Kind = Literal[
    "pays",
    "compared",
    "changed",
    "lossless",
    "engine",
    "texts",
    "card",
    "guess",
    "cause",
]

# How each relation is said. `unknown` is an open one for a reason (`why`), without which the interval leaves it open.
WORDS: Mapping[Kind, Mapping[str, str]] = {
    "pays": {"above": "faster", "below": "slower", "open": "cannot tell"},
    "compared": {
        "above": "gains more",
        "below": "gains less",
        "open": "cannot be told apart",
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
        "above": "accepts more than its weights",
        "below": "accepts less than its weights",
        "open": "as its weights say",
        "unknown": "cannot tell",
    },
    "texts": {"above": "not the model's", "below": "not the model's", "open": "the model's"},
    "card": {"above": "above its card", "below": "below its card", "open": "as its card says"},
    "guess": {"above": "learned", "below": "no better than a guess", "open": "cannot tell"},
    "cause": {
        "above": "accepts more",
        "below": "accepts less",
        "open": "no difference shown",
        "unknown": "not measured",
    },
}
# Bounds of this distance to the limit are on it: floating point moves those of equal units.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Statement:
    """The only way to say that something is faster, better, lossless or the best. Name and figure cannot part: both are
    those of the rows here.

    Attributes:
        subject: the row that it is about; None of figures without one.
        reference: the row that the subject's figure was divided by; None for the regular arm of the subject's own run.
        interval: the subject's figure, or its share of the reference's (of accuracies the difference), as far as it may
            be stated.
        family: how many statements a reader sees together: their intervals hold all at once, or what is significant is
            so among all.
        why: why nothing can be concluded; empty for a conclusion, and where the interval leaves it open.
        figure: what is compared.
        evidence: of texts, which have no interval, the figures of the checks that a conclusion rests on.

    Raises:
        ValueError: a conclusion without bounds or evidence, or despite a reason why there is none.
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
        """The statement that an interval allows.

        Args:
            why: why nothing can be concluded, whatever the interval is.
            limit: the value that the subject is above, or below.
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
        """`faster`, `gains less`, `cannot be told apart`."""
        words = WORDS[self.kind]
        if self.why and "unknown" in words:
            return words["unknown"]
        return words[self.relation]

    @property
    def is_conclusion(self) -> bool:
        return self.relation != "open"

    @property
    def is_judged(self) -> bool:
        """Whether there was an interval to judge by, whatever it says."""
        return not self.why

    @property
    def is_judged_open(self) -> bool:
        """Whether an interval was judged, and concludes nothing: both may be equal."""
        return self.is_judged and not self.is_conclusion

    @property
    def reason(self) -> str:
        """Why nothing is concluded, or the evidence that a conclusion rests on."""
        return self.why or self.evidence

    @property
    def pays(self) -> bool:
        return self.kind == "pays" and self.relation == "above"

    def as_json(self) -> dict[str, Any]:
        """For `result.json`: rows by the id of their run and their place in the sweep."""
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
