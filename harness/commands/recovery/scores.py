"""Answers to requests, scored by a reference, and the place where many further requests go on.

Most tokens of a text are nearly certain, and there a wrong verification draws what a correct one draws. So a place is
chosen where a recovered token has most to decide. It is chosen among the texts of the first round, and all draws after
it are in the second one, so that the choice does not change the false-alarm rate.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
from scipy.special import entr

from harness.commands.recovery.workload import Answer, Asking, Columns, PlannedRequest
from harness.config.acceptance_rules import RULES
from harness.config.errors import RunError
from harness.engines.divergence import Divergence, check_known, margin_deviation
from harness.engines.door.reading import KernelDeviations, Reference
from harness.engines.protocol import in_batches
from harness.engines.requests import RequestRecord
from harness.measuring.progress import progress
from harness.results.statistics.arrays import Floats
from harness.results.statistics.drawn_tokens import (
    NO_ROUNDING,
    DrawnText,
    Finding,
    Recovered,
    TokenResult,
    rounding_between,
)

# Texts that are scored together.
_TOGETHER = 8
# Logits that are computed together at most.
_MOST_LOGITS = 2**25
# Texts of each sampling setting from which its rounding is estimated.
_NUM_ROUNDED = 8
# The name of texts at the one place among sampling settings.
_AT_PLACE = "at the one place"
# The share of log-probabilities that may be further off than rounding, and the largest difference, in nats, that is
# taken for rounding.
_FEW = 0.01
_MOST_ROUNDING = 0.1
# The kernels' deviation from the eager model may be this many times that of rounding.
_MOST_APART = 5.0


class GreedyScore(NamedTuple):
    """A greedy answer by the logits before each of its n tokens.

    Attributes:
        likeliest: [n], the largest logits.
        margins: [n], by how much the tokens' own are smaller.
        differs: whether a token is not the first of those with the largest logit.
    """

    answer: Answer
    likeliest: Floats
    margins: Floats
    differs: bool

    @classmethod
    def of(cls, answer: Answer, logits: Floats) -> Self:
        """A score by logits [n, V], which are not kept."""
        tokens = answer.record.token_ids
        likeliest = logits.max(-1)
        margins = likeliest - logits[range(len(tokens)), tokens]
        return cls(answer, likeliest, margins, tokens != logits.argmax(-1).tolist())


@dataclass
class GreedyTexts:
    """The greedy texts of a run that were compared.

    Attributes:
        end_tokens: those at which the target ends a text.
        divergences: one per prompt, None where nothing differs.
        num_tied: texts without a divergence that have another token than the likeliest one, with the same logit.
        num_tokens: compared: all of a scored text, of two texts those before their first difference.
        num_cut_short: prompts with a text that is cut short, so that its end was not compared.
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
        """Add the comparison of two texts, or of one with the text that the model writes."""
        shortest = min(text.num_tokens for text in texts)
        self.num_tokens += shortest if divergence is None else min(shortest, divergence.position)
        self._add(divergence, request, *texts)

    def _add(
        self, divergence: Divergence | None, request: PlannedRequest, *texts: RequestRecord
    ) -> None:
        # Where a text may end early it is not known where it should: a server may know more tokens that end one.
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


def require_token_ids(requests: Sequence[RequestRecord]) -> None:
    """Raise a RunError if token ids of an answer were made from its text: other tokens with the
    same text may have been drawn.
    """
    num_incomplete = sum(request.from_text for request in requests)
    if num_incomplete:
        raise RunError(
            f"{num_incomplete} of {len(requests)} answers came without the ids of all their tokens: take other prompts"
            " (llama.cpp sends no id for a token that ends within a character)"
        )


class ScoredText(NamedTuple):
    """A drawn answer, and the entropies [n] of the distributions that its tokens were drawn from, in nats."""

    answer: Answer
    text: DrawnText
    entropies: Floats


class Scores:
    """The scores of the answers that were added, and the checks that follow from them.

    Attributes:
        so_far: the checks at the last look; none before the first.
        answers: all of them.
        greedy: each greedy text against the likeliest tokens.
        drawn: the other texts.
    """

    def __init__(self, reference: Reference, asking: Asking) -> None:
        self.so_far: Sequence[Columns] = []
        self.answers: list[Answer] = []
        self.greedy = GreedyTexts(asking.end_tokens)
        self.drawn: list[ScoredText] = []
        self._logprob_errors: list[float] = []
        self._num_together = min(asking.settings.batch_size, _TOGETHER)
        self._reference = reference
        self._asking = asking
        # Of each sampling setting the prompts whose texts were read twice: rounding differs by prompt. At the one place
        # all texts share a prompt, so that whole texts are kept.
        self._read_twice: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        self._roundings: dict[str, list[Floats]] = defaultdict(list)
        self._deviations: list[float] = []
        self._kernels: list[KernelDeviations] = []

    def add(self, answers: Sequence[Answer]) -> None:
        """Score the answers that somebody waited for.

        Raises:
            RunError: one came without token ids, or with unknown ones.
        """
        self.answers += answers
        waited_for = [answer for answer in answers if answer.request.is_compared]
        require_token_ids([answer.record for answer in waited_for if answer.record.token_ids])
        # Texts that differ in their last token alone are scored once.
        by_context: dict[object, list[Answer]] = defaultdict(list)
        for answer in waited_for:
            request = answer.request
            tokens = tuple(answer.record.token_ids)
            if tokens:
                check_known([*request.prompt, *tokens], self._reference.vocabulary_size)
                context = (request.prompt, request.sampling.name, tokens[:-1])
                by_context[context].append(answer)
            elif request.is_greedy:
                self.greedy.add(None, request, answer.record)
        # A prompt is read once for all texts of a batch, so that its texts are neighbours, the longest first: that one
        # says most about rounding.
        distinct = sorted(by_context.values(), key=_prompt_and_length, reverse=True)
        longest = max((len(alike[0].record.token_ids) for alike in distinct), default=1)
        room = _MOST_LOGITS // (longest * self._reference.vocabulary_size)
        num_before = len(self.drawn)
        greedy: list[GreedyScore] = []
        with progress("comparing", len(distinct)) as advance:
            for batch in in_batches(distinct, max(1, min(self._num_together, room))):
                texts = [alike[0].record.token_ids for alike in batch]
                prompts = [alike[0].request.prompt for alike in batch]
                logits = self._reference.logits_along(prompts, texts)
                draft_logits = self._draft_logits(prompts, texts)
                for row, (text, alike) in enumerate(zip(texts, batch, strict=True)):
                    along = logits[row][: len(text)]
                    again = self._read_again(alike[0], along)
                    if alike[0].request.is_greedy:
                        greedy += [GreedyScore.of(answer, along) for answer in alike]
                    else:
                        draft = None if draft_logits is None else draft_logits[row][: len(text)]
                        self._add_drawn(alike, along, again, draft)
                    advance(None)
        # By the rounding of all texts that were read twice.
        for score in greedy:
            self.greedy.add_scored(score, self._tolerances(score.likeliest))
        # Bets go on from one text to the next: their order must not depend on what was drawn.
        asked = {answer.request.index: number for number, answer in enumerate(answers)}
        added = sorted(self.drawn[num_before:], key=lambda text: asked[text.answer.request.index])
        self.drawn[num_before:] = added

    def _draft_logits(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Floats | None:
        """The draft's logits, where the rule lets both distributions say what recovered tokens follow."""
        rule = RULES[self._asking.settings.decoding.rule]
        if not (rule.lossless and rule.tests_each_token):
            return None
        return self._reference.draft_logits_along(prompts, texts)

    def _tolerances(self, likeliest: Floats) -> Floats:
        """The largest difference [n] of two logits that rounding explains, where the largest logits are these [n]."""
        return self._reference.tolerance(likeliest, root_mean_square(self._deviations))

    def _read_again(self, answer: Answer, logits: Floats) -> Floats | None:
        """The logits of a text by another route, which shows rounding: of some texts of each sampling setting."""
        request, record = answer
        # Of greedy texts one is enough for tolerances.
        if request.is_greedy and self._deviations:
            return None
        name, text = request.sampling.name, request.prompt
        if request.is_at_place:
            name, text = _AT_PLACE, (*text, *record.token_ids)
        if len(self._read_twice[name]) >= _NUM_ROUNDED or text in self._read_twice[name]:
            return None
        self._read_twice[name].add(text)
        kernels = self._reference.kernel_deviations(request.prompt, record.token_ids, logits)
        if kernels is not None:
            self._kernels.append(kernels)
        again = self._reference.logits_by_another_route(request.prompt, record.token_ids)
        if again is not None:
            self._deviations.append(margin_deviation(logits, again))
        return again

    def _add_drawn(
        self,
        alike: Sequence[Answer],
        logits: Floats,
        again: Floats | None,
        draft_logits: Floats | None,
    ) -> None:
        """Add texts of one context, by the reference's logits [n, V] before each of their tokens, those by another
        route, and the draft's.
        """
        request = alike[0].request
        sampling = request.sampling
        exact = sampling.probabilities_along(logits)
        if again is not None:
            other = sampling.probabilities_along(again)
            name = _AT_PLACE if request.is_at_place else sampling.name
            self._roundings[name].append(rounding_between(exact, other))
        entropies = entr(exact).sum(-1)
        tolerances = self._tolerances(logits.max(-1))
        draft = None if draft_logits is None else sampling.probabilities_along(draft_logits)
        for answer in alike:
            text = answer.record.token_ids
            places = rejected_places(answer.record)
            recovered = None
            if draft is not None and places is not None:
                recovered = Recovered.of(exact, draft, text, places)
            impossible = np.flatnonzero(exact[range(len(text)), text] == 0).tolist()
            drawn = DrawnText.of(
                exact,
                text,
                prompt=request.prompt,
                setting=sampling.name,
                is_at_place=answer.request.is_at_place,
                explained=sampling.explained_by_rounding(logits, text, impossible, tolerances),
                recovered=recovered,
            )
            self.drawn.append(ScoredText(answer, drawn, entropies))
            if self._asking.with_logprobs:
                self._note_logprobs(answer.record, logits)

    def _note_logprobs(self, record: RequestRecord, logits: Floats) -> None:
        """Note how far log-probabilities that came with drawn tokens are from the reference's logits [n, V]."""
        tokens = record.token_ids
        values = logits.astype(np.float64)
        own_logits = values[range(len(tokens)), tokens]
        # Tokens that a regular arm does not show have one logit in common: those are not known.
        is_known = (values == own_logits[:, np.newaxis]).sum(-1) == 1
        expected = own_logits - np.logaddexp.reduce(values, axis=-1)
        for came, own, known in zip(record.logprobs, expected, is_known, strict=False):
            if came is not None and known:
                self._logprob_errors.append(abs(came - own))

    def rounding_of_drawn(self) -> float:
        """How far log-probabilities that came with drawn tokens are from the reference's, a few aside; 0 where none
        came, or where they are not the model's own.
        """
        if not self._logprob_errors:
            return 0.0
        most = float(np.quantile(self._logprob_errors, 1 - _FEW))
        return most if most <= _MOST_ROUNDING else 0.0

    def sampled(self) -> TokenResult:
        """The test of all drawn tokens.

        Rounding is the distance between the distributions by the reference's two routes (`logits_by_another_route`),
        along a text of some prompts: their mean, and at the one place, where most is drawn, the largest.
        """
        means = {name: np.mean(roundings, axis=0) for name, roundings in self._roundings.items()}
        at_place = self._roundings.get(_AT_PLACE, [])
        texts = [scored.text for scored in self.drawn]
        allowed = []
        for text in texts:
            rounding = means.get(text.setting, NO_ROUNDING)
            if text.is_at_place:
                rounding = np.max([rounding, *at_place], axis=0)
            allowed.append(rounding)
        return self._asking.token_test.check(texts, allowed)

    def kernel_check(self) -> Columns:
        """Whether the passes that decode compute what the eager model computes, but for rounding."""
        passes = root_mean_square([kernels.passes for kernels in self._kernels])
        rounding = root_mean_square([kernels.rounding for kernels in self._kernels])
        is_explained = passes <= _MOST_APART * rounding
        return {
            "check": "kernels",
            "verdict": "lossless" if is_explained else "lossy",
            "kernel_deviation": passes,
            "rounding_deviation": rounding,
        }

    def look(self) -> None:
        """Take the checks of what was added: those of greedy texts, of kernels if the arm's own passes score, and of
        drawn tokens if any were asked for.
        """
        checks = [
            with_ends(self.greedy.columns(), [a for a in self.answers if a.request.is_greedy])
        ]
        if self._kernels:
            checks.append(self.kernel_check())
        if self._asking.samplings:
            records = [answer.record for answer in self.answers]
            check = self._asking.sampled_check(self.sampled(), records)
            checks.append(with_ends(check, [a for a in self.answers if not a.request.is_greedy]))
        self.so_far = checks


def root_mean_square(values: Sequence[float]) -> float:
    """0 without any."""
    return float(np.sqrt(np.mean(np.square(values)))) if values else 0.0


def with_ends(check: Columns, answers: Sequence[Answer]) -> Columns:
    """The check, made `lossy` where a text goes on behind its end."""
    num_past_end = sum(answer.passes_its_end for answer in answers if answer.request.is_compared)
    found = check | {"num_past_end": num_past_end}
    return found | {"verdict": "lossy"} if num_past_end else found


def _prompt_and_length(alike: Sequence[Answer]) -> tuple[tuple[int, ...], int]:
    return alike[0].request.prompt, len(alike[0].record.token_ids)


def is_lossy(checks: Sequence[Columns]) -> bool:
    return any(check["verdict"] == "lossy" for check in checks)


def rejected_places(record: RequestRecord) -> list[int] | None:
    """The places of tokens that took the place of a rejected one; None where they are not known."""
    rejected = []
    # The first token is decided without a proposal.
    index = 1
    for num_proposed, num_accepted in record.outcomes:
        index += num_accepted
        if num_accepted < num_proposed and index < record.num_tokens:
            rejected.append(index)
        index += 1
    # Only a last token may be decided without one as well: iterations that propose nothing are left out.
    is_whole = index >= record.num_tokens - 1
    return rejected if record.outcomes and record.outcomes_in_order and is_whole else None


def choose_place(texts: Sequence[ScoredText]) -> tuple[int, ...]:
    """The tokens after which a recovered token decides most.

    The first token after a place is the target's own, and a proposal is tested from the second one on.
    For example: after `Once upon a` a text goes on with `time`, which has 0.9, and a draft token behind it was
    rejected; the target's distribution there has an entropy of 1.2 nats. That makes 0.9 * 1.2 for `Once upon a`.

    Args:
        texts: of one sampling setting.
    """
    best = texts[0].text.prompt
    most = 0.0
    for answer, text, entropies in texts:
        rejected = rejected_places(answer.record)
        for recovered in range(1, len(text.tokens)) if rejected is None else rejected:
            expected_entropy = float(text.widths[recovered - 1]) * float(entropies[recovered])
            if expected_entropy > most:
                most = expected_entropy
                best = (*text.prompt, *text.tokens[: recovered - 1])
    return best
