"""Checks greedy texts: each token must be the target's likeliest one, except for rounding."""

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
    """A greedy answer of n tokens, scored by the reference's logits before each token.

    Attributes:
        largest: [n], the largest logit at each place.
        margins: [n], the largest logit minus that of the answer's token.
        differs: whether any token is not the first of those with the largest logit.
    """

    answer: Answer
    largest: Floats
    margins: Floats
    differs: bool

    @classmethod
    def of(cls, answer: Answer, logits: Floats) -> Self:
        """The score by logits [n, V], which are not kept."""
        tokens = answer.record.token_ids
        largest = logits.max(-1)
        margins = largest - logits[range(len(tokens)), tokens]
        return cls(answer, largest, margins, tokens != logits.argmax(-1).tolist())


@dataclass
class GreedyTexts:
    """The greedy texts of a run that were compared, with what was found.

    Attributes:
        end_tokens: the tokens at which the target ends a text.
        divergences: one for each comparison, None if the texts differ at most by ties.
        num_tied: number of texts without a divergence in which some token is not the first of several that share the
            largest logit.
        num_tokens: number of tokens that were compared: all of a scored text; of two texts, those before their first
            difference.
        num_cut_short: number of comparisons with a text that was cut short, so that its end was not compared.
    """

    end_tokens: frozenset[int]
    divergences: list[Divergence | None] = field(default_factory=list)
    num_tied: int = 0
    num_tokens: int = 0
    num_cut_short: int = 0

    def add_scored(self, score: GreedyScore, tolerances: Floats) -> None:
        """Add a text whose tokens must all be the likeliest ones, except for rounding.

        Args:
            score: the text.
            tolerances: [n], the largest difference of two logits that rounding explains, at each place.
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
        """Add a comparison by token ids: of two texts, of a text with the one that the model writes, or of an empty
        text, in which there is nothing to compare.

        Args:
            divergence: where the texts differ; None if they do not.
            texts: the compared answers to the request, one or two.
        """
        shortest = min(text.num_tokens for text in texts)
        self.num_tokens += shortest if divergence is None else min(shortest, divergence.position)
        self._add(divergence, request, *texts)

    def _add(
        self, divergence: Divergence | None, request: PlannedRequest, *texts: RequestRecord
    ) -> None:
        # A text that may end early is never cut short, because a server may know further tokens that end a text.
        num_asked = 0 if request.ends else request.num_tokens
        self.divergences.append(divergence)
        for text in texts:
            has_ended = bool(text.token_ids) and text.token_ids[-1] in self.end_tokens
            if text.num_tokens < num_asked and not has_ended:
                self.num_cut_short += 1
                break

    def judged(self) -> tuple[Finding, Divergence | None]:
        """Whether the texts are the expected ones, and the difference that decides this; None if there is none.

        `lossy` if any difference is known to exceed rounding (an `excess` above 1); the one with the largest excess
        decides. Otherwise `undecided` if the margin of any difference is unknown (there is no reference, or a text
        ended earlier), if a text was cut short, or if no token was compared. Otherwise `lossless`.
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
