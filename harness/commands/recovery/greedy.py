"""Greedy texts, each token of which must be the target's likeliest one, but for rounding."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from harness.commands.recovery.workload import Answer, Columns, PlannedRequest
from harness.engines.divergence import Divergence
from harness.engines.requests import RequestRecord
from harness.results.statistics import Floats
from harness.results.statistics.drawn_tokens import Finding


class GreedyScore(NamedTuple):
    """A greedy answer by the logits before each of its n tokens.

    Attributes:
        largest: [n], the largest logits.
        margins: [n], by how much the tokens' own are smaller.
        differs: whether a token is not the first of those with the largest logit.
    """

    answer: Answer
    largest: Floats
    margins: Floats
    differs: bool

    @classmethod
    def of(cls, answer: Answer, logits: Floats) -> Self:
        """A score by logits [n, V], which are not kept."""
        tokens = answer.record.token_ids
        largest = logits.max(-1)
        margins = largest - logits[range(len(tokens)), tokens]
        return cls(answer, largest, margins, tokens != logits.argmax(-1).tolist())


@dataclass
class GreedyTexts:
    """The greedy texts of a run that were compared.

    Attributes:
        end_tokens: those at which the target ends a text.
        divergences: one per text, None where nothing differs but by ties.
        num_tied: texts without a divergence that have another token than the likeliest one, with the same logit.
        num_tokens: compared: all of a scored text, of two texts those before their first difference.
        num_cut_short: comparisons with a text that is cut short, so that its end was not compared.
    """

    end_tokens: frozenset[int]
    divergences: list[Divergence | None] = field(default_factory=list)
    num_tied: int = 0
    num_tokens: int = 0
    num_cut_short: int = 0

    def add_scored(self, score: GreedyScore, tolerances: Floats) -> None:
        """Add a text each of whose tokens must be the likeliest one, but for rounding.

        Args:
            tolerances: [n], the largest difference of two logits that rounding explains.
        """
        divergence = None
        if score.margins.any():
            place = int((score.margins / tolerances).argmax())
            divergence = Divergence(place, float(score.margins[place]), float(tolerances[place]))
        elif score.differs:
            self.num_tied += 1
        self.num_tokens += len(score.margins)
        self._add(divergence, *score.answer)

    def add(
        self, divergence: Divergence | None, request: PlannedRequest, *texts: RequestRecord
    ) -> None:
        """Add the comparison of two texts, of one with the text that the model writes, or an empty text, which has
        nothing to compare.
        """
        shortest = min(text.num_tokens for text in texts)
        self.num_tokens += shortest if divergence is None else min(shortest, divergence.position)
        self._add(divergence, request, *texts)

    def _add(
        self, divergence: Divergence | None, request: PlannedRequest, *texts: RequestRecord
    ) -> None:
        # A text that may end early is never cut short: a server may know more tokens that end one.
        num_asked = 0 if request.ends else request.num_tokens
        self.divergences.append(divergence)
        for text in texts:
            has_ended = bool(text.token_ids) and text.token_ids[-1] in self.end_tokens
            if text.num_tokens < num_asked and not has_ended:
                self.num_cut_short += 1
                break

    def judged(self) -> tuple[Finding, Divergence | None]:
        """Whether the texts are those that were expected, and the difference that decides it.

        `lossy` if a difference is known to be beyond rounding (an `excess` above 1), of which the largest one
        decides. Else `undecided` if the margin of one is unknown (there is no reference, or a text ended earlier), if
        a text is cut short, or if no token was compared. Else `lossless`.
        """
        differing = [divergence for divergence in self.divergences if divergence is not None]
        measured = [divergence for divergence in differing if divergence.logit_margin is not None]
        unknown = [divergence for divergence in differing if divergence.logit_margin is None]
        worst = max(measured, key=operator.attrgetter("excess"), default=None)
        if worst is not None and worst.excess > 1:
            return "lossy", worst
        if unknown:
            return "undecided", unknown[0]
        is_whole = self.num_tokens > 0 and not self.num_cut_short
        return "lossless" if is_whole else "undecided", worst

    def columns(self) -> Columns:
        verdict, worst = self.judged()
        return {
            "check": "greedy",
            "temperature": 0.0,
            "verdict": verdict,
            "num_prompts": len(self.divergences),
            "num_tokens": self.num_tokens,
            "num_cut_short": self.num_cut_short,
            "identical_prompts": self.divergences.count(None),
            "tied_prompts": self.num_tied,
            **(worst.columns if worst else {}),
        }
