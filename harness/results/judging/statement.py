"""A sentence that compares, as a value: which run against which, by which interval, among how many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from harness.results.schema import RunRow
from harness.results.statistics.interval import Interval

# A speculative arm and its regular one; a run and the reference of its series; a figure after a change and before it;
# a text and the target's distribution; an engine's iterations and those of its weights.
Relation = Literal[
    "faster", "slower", "cannot tell",
    "best", "as good", "gains less", "gains more", "not ranked",
    "better", "worse", "no worse",
    "lossless", "lossy", "undecided",
    "as its weights say", "accepts less", "accepts more", "other texts",
]  # fmt: skip


@dataclass(frozen=True)
class Statement:
    """The only way to say that something is faster, best, as good or worse. Name and figure cannot part: both are those
    of the rows here.

    Attributes:
        subject: the row that it is about; None of figures without one.
        reference: the row that the subject's figure was divided by; None for the regular arm of the subject's own run.
        interval: the subject's figure, or its share of the reference's (of accuracies the difference), as far as it may
            be stated; all nan where it may not.
        family: how many intervals a reader sees together: they hold all at once, or what is significant is so among
            all.
        why: why there is no interval to conclude from; empty where there is one, also where it includes 1, so that
            the relation is `cannot tell`.
        figure: what is compared.
    """

    relation: Relation
    interval: Interval = field(default_factory=Interval)
    why: str = ""
    subject: Any = None
    reference: Any = None
    family: int = 1
    figure: str = "speed-up"

    @property
    def pays(self) -> bool:
        return self.relation == "faster"

    @property
    def has_interval(self) -> bool:
        """Whether there is an interval that may be stated, whatever it says about 1."""
        return not self.why

    @property
    def includes_1(self) -> bool:
        """Whether nothing can be concluded because the interval includes 1."""
        return self.relation == "cannot tell" and self.has_interval

    def as_json(self) -> dict[str, Any]:
        """For `result.json`: rows by the id of their run and their place in the sweep."""
        return {
            "relation": self.relation,
            "figure": self.figure,
            "subject": _identity(self.subject),
            "reference": _identity(self.reference),
            "interval": self.interval.parts(),
            "family": self.family,
            "why": self.why or None,
        }


def standing(share: Interval) -> Relation:
    """How something compares with a reference, by its share of that one's speed-up."""
    # Of units that are all alike it is known exactly, without bounds.
    low, high = (share.low, share.high) if share.has_bounds else (share.estimate,) * 2
    if high < 1:
        return "gains less"
    return "gains more" if low > 1 else "as good"


def _identity(row: RunRow | None) -> dict[str, Any] | None:
    if row is None:
        return None
    columns = ("run", "job", "model", "draft", "num_draft_tokens", "batch_size")
    return {name: getattr(row, name, None) for name in columns}
