"""Are greedy texts those of the target? Where they are not, does rounding explain the first difference?"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from harness.config.errors import RunError
from harness.engines.divergence import Divergence, first_divergence
from harness.engines.requests import RequestRecord
from harness.measuring.references import References

# Of a check's row, by name, with `acceptance` as `Session.row` takes it.
Columns = dict[str, Any]
Finding = Literal["lossless", "lossy", "undecided"]


class Judgement(NamedTuple):
    """Whether greedy texts are those that were expected, and the difference that decides it."""

    verdict: Finding
    worst: Divergence | None


def judge_greedy(divergences: Sequence[Divergence | None]) -> Judgement:
    """Judge greedy texts by where they differ.

    `lossy` if a difference is known to be beyond rounding (an `excess` above 1): the largest one
    decides. Else `undecided` if the margin of one is unknown (there is no reference, or a text
    ended earlier). Else `lossless`.

    Args:
        divergences: one per prompt, None where the texts are the same.
    """
    found = [divergence for divergence in divergences if divergence is not None]
    known = [divergence for divergence in found if divergence.logit_margin is not None]
    unknown = [divergence for divergence in found if divergence.logit_margin is None]
    worst = max(known, key=operator.attrgetter("excess"), default=None)
    if worst is not None and worst.excess > 1:
        return Judgement("lossy", worst)
    if unknown:
        return Judgement("undecided", unknown[0])
    return Judgement("lossless", worst)


@dataclass
class GreedyTexts:
    """The greedy texts of a run that were compared.

    Attributes:
        end_tokens: those at which the target ends a text.
        divergences: one per prompt, None where nothing differs.
        num_tokens: compared: those behind the first difference of a text are not.
        num_cut_short: prompts with a text that is cut short, so that its end was not compared.
    """

    end_tokens: frozenset[int]
    divergences: list[Divergence | None] = field(default_factory=list)
    num_tokens: int = 0
    num_cut_short: int = 0

    def add(self, divergence: Divergence | None, num_asked: int, *texts: RequestRecord) -> None:
        """Add the comparison of two texts, or of one with the model's own.

        Args:
            num_asked: tokens that each was to have.
        """
        shortest = min(text.num_tokens for text in texts)
        self.divergences.append(divergence)
        self.num_tokens += shortest if divergence is None else min(shortest, divergence.position)
        for text in texts:
            has_ended = bool(text.token_ids) and text.token_ids[-1] in self.end_tokens
            if text.num_tokens < num_asked and not has_ended:
                self.num_cut_short += 1
                break

    def compare(
        self,
        references: References,
        prompt: Sequence[int],
        num_asked: int,
        answer: RequestRecord,
        expected: RequestRecord | None,
    ) -> None:
        """Add the comparison of an answer with the regular arm's, or that of a request alone.

        An answer of text alone is compared with the text that the reference writes, if there is
        one: its tokens may have been decided as others.

        Args:
            num_asked: tokens that each was to have.
            expected: None if the reference alone is compared with.
        """
        divergence = None
        if expected is None or expected.token_ids != answer.token_ids:
            of_text = answer.from_text and references.for_texts() is not None
            if expected is None or of_text:
                divergence = references.text_divergence(prompt, answer.text, num_asked)
            else:
                # Of decided tokens the reference knows the margin.
                known = None if answer.from_text else references.for_tokens()
                divergence = first_divergence(known, prompt, expected.token_ids, answer.token_ids)
        if expected is None:
            # A text that the model would go on with parts from it at its end.
            self.add(divergence, 0, answer)
        else:
            self.add(divergence, num_asked, expected, answer)

    def judged(self) -> Judgement:
        verdict, worst = judge_greedy(self.divergences)
        if verdict == "lossless" and self.num_cut_short:
            verdict = "undecided"
        return Judgement(verdict, worst)

    def columns(self) -> Columns:
        verdict, worst = self.judged()
        columns: Columns = {
            "check": "greedy",
            "temperature": 0.0,
            "verdict": verdict,
            "num_prompts": len(self.divergences),
            "num_tokens": self.num_tokens,
            "num_cut_short": self.num_cut_short,
            "identical_prompts": self.divergences.count(None),
        }
        if worst is not None:
            columns["divergence_position"] = worst.position
            columns["logit_margin"] = worst.logit_margin
            columns["logit_tolerance"] = worst.logit_tolerance
        return columns


def require_token_ids(requests: Sequence[RequestRecord]) -> None:
    """Raise a RunError if token ids of an answer were made from its text: other tokens with the
    same text may have been drawn.
    """
    num_incomplete = sum(request.from_text for request in requests)
    if num_incomplete:
        raise RunError(
            f"{num_incomplete} of {len(requests)} answers came without the ids of all their tokens,"
            " so that these cannot be compared\n"
            "(llama.cpp tells none of a token that ends within a character)"
        )
