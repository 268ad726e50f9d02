"""Checks greedy texts: each token must be the target's likeliest one, apart from differences that rounding explains."""

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
    """A greedy answer of n tokens, compared with the reference's logits before each token.

    Attributes:
        answer: the request, and the record of its answer.
        largest: [n], the largest logit at each place.
        margins: [n], the largest logit minus the logit of the answer's token; 0 if that token has the largest logit.
        differs: whether, at any place, the answer's token is not the first of the tokens with the largest logit.
    """

    answer: Answer
    largest: Floats
    margins: Floats
    differs: bool

    @classmethod
    def of(cls, answer: Answer, logits: Floats) -> Self:
        """The score of an answer of one token or more by the reference's logits [n, V], which are not stored."""
        tokens = answer.record.token_ids
        largest = logits.max(-1)
        margins = largest - logits[range(len(tokens)), tokens]
        return cls(answer, largest, margins, tokens != logits.argmax(-1).tolist())


@dataclass
class GreedyTexts:
    """The results of comparing the greedy texts of a run.

    Attributes:
        end_tokens: the tokens at which the target ends a text.
        divergences: one for each comparison. None if two texts have the same tokens, or if each token of a scored text
            has the largest logit.
        num_tied: number of scored texts without a divergence that have another token than the first of the likeliest
            tokens. For example, the logits are 5, 5 and 3, and the answer has the second token.
        num_tokens: number of tokens that were compared: all tokens of a scored text; if two texts were compared, those
            before the first difference.
        num_cut_short: number of comparisons in which a text was cut short, so that its end could not be compared.
    """

    end_tokens: frozenset[int]
    divergences: list[Divergence | None] = field(default_factory=list)
    num_tied: int = 0
    num_tokens: int = 0
    num_cut_short: int = 0

    def add_scored(self, score: GreedyScore, tolerances: Floats) -> None:
        """Add a text whose tokens must all be the likeliest ones, apart from differences that rounding explains.

        Args:
            score: the text's score.
            tolerances: [n], the largest difference between two logits that rounding explains, at each place.
        """
        divergence = None
        if score.margins.any():
            place = int((score.margins / tolerances).argmax())
            divergence = Divergence(place, float(score.margins[place]), float(tolerances[place]))
        elif score.differs:
            self.num_tied += 1
        self.num_tokens += len(score.margins)
        # An `Answer` is a pair of a request and its record.
        self._add(divergence, *score.answer)

    def add(
        self, divergence: Divergence | None, request: PlannedRequest, *texts: RequestRecord
    ) -> None:
        """Add a comparison of a text with another arm's text or with the text that the weights give; or add an empty
        text, which counts as identical, because it has nothing to compare.

        Args:
            divergence: where the texts differ; None if they do not.
            texts: the answers to the request that were compared, one or two.
        """
        shortest = min(text.num_tokens for text in texts)
        self.num_tokens += shortest if divergence is None else min(shortest, divergence.position)
        self._add(divergence, request, *texts)

    def _add(
        self, divergence: Divergence | None, request: PlannedRequest, *texts: RequestRecord
    ) -> None:
        """Note the result of a comparison, and whether one of its texts was cut short."""
        # A text that may end early has no expected length, so it never counts as cut short: a server may end texts at
        # tokens that are not known here.
        num_asked = 0 if request.ends else request.num_tokens
        self.divergences.append(divergence)
        for text in texts:
            has_ended = bool(text.token_ids) and text.token_ids[-1] in self.end_tokens
            if text.num_tokens < num_asked and not has_ended:
                self.num_cut_short += 1
                break

    def judged(self) -> tuple[Finding, Divergence | None]:
        """The verdict on the texts, and the divergence to show with it; None if there is none.

        The first condition that applies decides:

        condition                                                     verdict      divergence
        a margin exceeds what rounding explains (`excess` above 1)    lossy        the largest excess
        a margin is unknown: no reference, or a text ended earlier    undecided    the first one without a margin
        a text was cut short, or no token was compared                undecided    the largest excess, not the reason
        otherwise                                                     lossless     the largest excess, at most 1: a tie
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
        """The columns of the check."""
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
