"""Scores answers by a reference, and chooses the place that many further requests continue.

Most tokens of a text are nearly certain: there, a wrong verification draws the same tokens as a correct one. So a place
is chosen after which recovered tokens are frequent and uncertain. It is chosen from texts of the first round of
requests, and the tokens after it are drawn in the second round, so that the choice does not change the false-alarm
rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import entr

from harness.commands.recovery.greedy import GreedyScore, GreedyTexts
from harness.commands.recovery.rounding import Rounding
from harness.commands.recovery.workload import Answer, Asking, Columns
from harness.config.acceptance_rules import RULES
from harness.config.errors import RunError
from harness.engines.divergence import check_known
from harness.engines.door.reading import Reference
from harness.engines.protocol import in_batches
from harness.engines.requests import RequestRecord
from harness.measuring.progress import progress
from harness.results.drafts import Drafts
from harness.results.statistics import Floats
from harness.results.statistics.drawn_tokens import DrawnText, Recovered, TokenResult

# The most texts that are scored together.
_TOGETHER = 8
# The most logits that are computed together, unless one text alone has more. In float32 they take 128 MiB.
_MOST_LOGITS = 2**25
# The log-probabilities that differ most are ignored, up to this share of all, because they may differ by more than
# rounding, for example at ties. If one of the others differs by more than `_MOST_ROUNDING` nats, it is not rounding.
_FEW = 0.01
_MOST_ROUNDING = 0.1


def require_token_ids(requests: Sequence[RequestRecord]) -> None:
    """Raise a RunError if the token ids of any answer were made from its text, because the engine may have drawn other
    tokens that give the same text.
    """
    num_incomplete = sum(request.from_text for request in requests)
    if num_incomplete:
        raise RunError(
            f"{num_incomplete} of {len(requests)} answers came without the ids of all their tokens: take other prompts"
            " (llama.cpp sends no id for a token that ends within a character)"
        )


class ScoredText(NamedTuple):
    """A drawn answer of n tokens, as it is tested.

    Attributes:
        answer: the request, and the record of its answer.
        text: the tokens with their probabilities, for the bets of `results.statistics.drawn_tokens`.
        entropies: [n], the entropy of the distribution from which each token was drawn, in nats.
    """

    answer: Answer
    text: DrawnText
    entropies: Floats


class Scores:
    """The scores of all answers that were added, and the checks that follow from them.

    Attributes:
        so_far: the columns of the checks at the last `look`; empty before the first.
        answers: all answers, also those that were left midway.
        greedy: the comparison of greedy texts with the likeliest tokens.
        drawn: the drawn texts of at least one token.
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
        self._rounding = Rounding(reference)

    def add(self, answers: Sequence[Answer]) -> None:
        """Score the answers, without those that were left midway.

        Raises:
            RunError: if the token ids of an answer were made from its text, or are not in the vocabulary.
        """
        self.answers += answers
        waited_for = [answer for answer in answers if answer.request.is_compared]
        require_token_ids([answer.record for answer in waited_for if answer.record.token_ids])
        # Texts that differ only in their last token have the same logits, and are scored once: after the same prompt,
        # `a b c` and `a b d` are both scored by the logits before `a`, `b` and the last token.
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
        # A batch reads a prompt once for all texts after it, so the texts of a prompt are put next to each other. The
        # longest text of a prompt comes first: `Rounding` reads only the first one twice, and the longest shows most
        # about rounding.
        distinct = sorted(
            by_context.values(),
            key=lambda alike: (alike[0].request.prompt, len(alike[0].record.token_ids)),
            reverse=True,
        )
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
                    self._rounding.read_again(alike[0], along)
                    if alike[0].request.is_greedy:
                        greedy += [GreedyScore.of(answer, along) for answer in alike]
                    else:
                        draft = None if draft_logits is None else draft_logits[row][: len(text)]
                        self._add_drawn(alike, along, draft)
                    advance(None)
        # Greedy texts are added last, so that all texts that were read twice decide the tolerances.
        for score in greedy:
            self.greedy.add_scored(score, self._rounding.tolerances(score.largest))
        # The test bets on one text after the other (`drawn_tokens`), so their order must not depend on what was drawn.
        asked = {answer.request.index: number for number, answer in enumerate(answers)}
        added = sorted(self.drawn[num_before:], key=lambda text: asked[text.answer.request.index])
        self.drawn[num_before:] = added

    def _draft_logits(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Floats | None:
        """The draft's logits; None if the reference has no draft, or if under this rule the distribution of recovered
        tokens does not follow from the target's and the draft's at the same place.
        """
        # `tests_each_token`: a token is accepted by a test of its own, so what replaces it depends on this place alone.
        # `rule=block` judges several draft tokens together.
        rule = RULES[self._asking.settings.decoding.rule]
        if not (rule.lossless and rule.tests_each_token):
            return None
        return self._reference.draft_logits_along(prompts, texts)

    def _add_drawn(
        self, alike: Sequence[Answer], logits: Floats, draft_logits: Floats | None
    ) -> None:
        """Add drawn texts that differ at most in their last token, and so have the same logits before each token.

        Args:
            alike: the answers with these texts, of n tokens each.
            logits: [n, V], the reference's logits before each token.
            draft_logits: [n, V], the draft's logits; None if they are unknown.
        """
        request = alike[0].request
        sampling = request.sampling
        exact = sampling.probabilities_along(logits)
        entropies = entr(exact).sum(-1)
        tolerances = self._rounding.tolerances(logits.max(-1))
        draft = None if draft_logits is None else sampling.probabilities_along(draft_logits)
        for answer in alike:
            text = answer.record.token_ids
            places = verified_places(answer.record)
            recovered = None
            if draft is not None and places is not None:
                recovered = Recovered.of(exact, draft, text, places.recovered)
            impossible = np.flatnonzero(exact[range(len(text)), text] == 0).tolist()
            drawn = DrawnText.of(
                exact,
                text,
                prompt=request.prompt,
                setting=sampling.name,
                is_at_place=answer.request.is_at_place,
                explained=sampling.explained_by_rounding(logits, text, impossible, tolerances),
                recovered=recovered,
                bonus=places.bonus if places is not None else (),
            )
            self.drawn.append(ScoredText(answer, drawn, entropies))
            if self._asking.with_logprobs:
                self._note_logprobs(answer.record, logits)

    def _note_logprobs(self, record: RequestRecord, logits: Floats) -> None:
        """Record how much the log-probabilities that an engine sent with drawn tokens differ from the reference's.

        Args:
            logits: [n, V], the reference's logits before each token.
        """
        tokens = record.token_ids
        values = logits.astype(np.float64)
        # [n], the logit of each token of the answer.
        own_logits = values[range(len(tokens)), tokens]
        # If the reference is a regular arm, all tokens that it did not report share one logit, and their
        # log-probabilities are unknown.
        is_known = (values == own_logits[:, np.newaxis]).sum(-1) == 1
        expected = own_logits - np.logaddexp.reduce(values, axis=-1)
        # An engine may send no log-probabilities at all.
        for sent, own, known in zip(record.logprobs, expected, is_known, strict=False):
            if sent is not None and known:
                self._logprob_errors.append(abs(sent - own))

    def rounding_of_drawn(self) -> float:
        """How much the log-probabilities that an engine sent with drawn tokens differ from the reference's.

        This is the largest difference after the share `_FEW` with the largest differences is left out. 0 if the engine
        sent no log-probabilities, or if the result is too large for rounding: then they are not those of the model
        itself, for example because they were computed after top-k.
        """
        if not self._logprob_errors:
            return 0.0
        most = float(np.quantile(self._logprob_errors, 1 - _FEW))
        return most if most <= _MOST_ROUNDING else 0.0

    def sampled(self) -> TokenResult:
        """The test of all drawn tokens."""
        texts = [scored.text for scored in self.drawn]
        return self._asking.token_test.check(texts, self._rounding.of_drawn(texts))

    def look(self) -> None:
        """Replace `so_far` by the checks of all answers up to now.

        The checks are, in this order: greedy texts; kernels, if the passes that decode were compared; and drawn tokens,
        if the run has sampling settings.
        """
        checks = [
            with_ends(self.greedy.columns(), [a for a in self.answers if a.request.is_greedy])
        ]
        checks += self._rounding.kernel_checks()
        if self._asking.samplings:
            check = {
                **vars(self.sampled()),
                "check": "sampled",
                "sampling": ", ".join(sampling.name for sampling in self._asking.samplings),
                # A reader needs the acceptance of all answers: without rejections most of the algorithm never ran.
                "acceptance": Drafts.total(answer.record.as_drafts for answer in self.answers),
            }
            checks.append(with_ends(check, [a for a in self.answers if not a.request.is_greedy]))
        self.so_far = checks


def with_ends(check: Columns, answers: Sequence[Answer]) -> Columns:
    """The check with the number of texts that continue after a token that should have ended them. Any such text makes
    the check `lossy`.
    """
    num_past_end = sum(
        not request.ends.isdisjoint(record.token_ids[:-1])
        for request, record in answers
        if request.is_compared
    )
    found = check | {"num_past_end": num_past_end}
    return found | {"verdict": "lossy"} if num_past_end else found


def is_lossy(checks: Sequence[Columns]) -> bool:
    """Whether one of the checks has found a loss."""
    return any(check["verdict"] == "lossy" for check in checks)


class VerifiedPlaces(NamedTuple):
    """Places, in a text, of tokens that the target decided after a proposal.

    Attributes:
        recovered: places of tokens that replaced a rejected one.
        bonus: places of tokens that followed a wholly accepted proposal.
    """

    recovered: list[int]
    bonus: list[int]


def verified_places(record: RequestRecord) -> VerifiedPlaces | None:
    """The places of the tokens that the target decided after the proposals of a text; None if they are unknown.

    `outcomes` has, for each iteration, the numbers of proposed and of accepted tokens. After the first token, the
    outcomes (4, 2) and (4, 4) give two accepted tokens (places 1 and 2), a recovered one (3), four accepted ones (4 to
    7) and a bonus token (8).
    """
    places = VerifiedPlaces([], [])
    # The first token is decided without a proposal. (With engine=huggingface it is not, and places are unknown.)
    index = 1
    for num_proposed, num_accepted in record.outcomes:
        index += num_accepted
        if num_proposed and index < record.num_tokens:
            is_bonus = num_accepted == num_proposed
            (places.bonus if is_bonus else places.recovered).append(index)
        index += 1
    # The record should account for all tokens except the last, which may be decided without a proposal. If more are
    # missing, iterations without a proposal are not in the record, and the places are unknown.
    is_whole = index >= record.num_tokens - 1
    return places if record.outcomes and record.outcomes_in_order and is_whole else None


def choose_place(texts: Sequence[ScoredText]) -> tuple[int, ...]:
    """The prefix after which an error in recovered tokens would show most: the tokens of a prompt and of the beginning
    of a text.

    An engine decides the first token after the prefix without speculation, so recovered tokens come from the second
    token on. For example, after `Once upon a` a text continues with `time`, which has a probability of 0.9. The draft
    token after `time` was rejected, and the target's distribution there has an entropy of 1.2 nats. This gives `Once
    upon a` the value 0.9 * 1.2. The prefix with the largest value is chosen; the first text's prompt if no text has a
    value above 0.

    Args:
        texts: texts with one sampling setting, at least one. If it is unknown which tokens of a text were recovered,
            all count except the first.
    """
    best = texts[0].text.prompt
    most = 0.0
    for answer, text, entropies in texts:
        places = verified_places(answer.record)
        for recovered in range(1, len(text.tokens)) if places is None else places.recovered:
            # `widths[i]` is the probability of token i and of all equally likely tokens together.
            expected_entropy = float(text.widths[recovered - 1]) * float(entropies[recovered])
            if expected_entropy > most:
                most = expected_entropy
                best = (*text.prompt, *text.tokens[: recovered - 1])
    return best
