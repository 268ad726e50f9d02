"""Answers to requests, scored by a reference, and the place where many further requests go on.

Most tokens of a text are nearly certain, and there a wrong verification draws what a correct one draws. So a place is
chosen where a recovered token has most to decide. It is chosen among the texts of the first round, and all draws after
it are in the second one, so that the choice does not change the false-alarm rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.commands.recovery.drawn import DrawnText, Rounding, quantile_ranges, tilts_of
from harness.commands.recovery.greedy import GreedyTexts, require_token_ids
from harness.commands.recovery.reported import ReturnedLogprobs
from harness.commands.recovery.workload import Answer
from harness.engines.divergence import check_known, first_divergence
from harness.engines.door.reference import TextReference
from harness.engines.protocol import in_batches
from harness.engines.requests import RequestRecord
from harness.measuring.progress import progress
from harness.results.statistics.arrays import Floats

# Texts, and logits, that are computed together at most.
_MOST_TOGETHER = 64
_MOST_LOGITS = 2**25
# Texts of each sampling setting from which its rounding is estimated.
_NUM_ROUNDED = 8
# Places whose proposals are looked at.
_MOST_LOOKED_AT = 256
# A quantile is below 1.
_LARGEST_QUANTILE = np.nextafter(1.0, 0.0)


class _Text(NamedTuple):
    """What a score depends on: equal texts are scored once."""

    prompt: tuple[int, ...]
    sampling: str
    tokens: tuple[int, ...]


class Scores:
    """The scores of all answers that were added.

    Args:
        end_tokens: those that end a greedy text.
        num_together: the most texts that the reference has room for at once.
        seed: of the random parts of quantiles.

    Attributes:
        greedy: each greedy text against the likeliest tokens.
        drawn: the other texts.
        returned: the log-probabilities of drawn requests that asked for them.
    """

    def __init__(
        self,
        reference: TextReference,
        end_tokens: frozenset[int],
        num_together: int,
        seed: Sequence[int],
    ) -> None:
        self.greedy = GreedyTexts(end_tokens)
        self.drawn: list[DrawnText] = []
        self.returned = ReturnedLogprobs()
        self._reference = reference
        self._num_together = min(num_together, _MOST_TOGETHER)
        self._generator = np.random.default_rng(seed)
        # By sampling setting and prompt: of one text of each prompt, because rounding differs by prompt.
        self._roundings: dict[str, dict[tuple[int, ...], Rounding]] = defaultdict(dict)

    def add(self, answers: Sequence[Answer]) -> None:
        """Score answers. Raises RunError where one came without token ids, or with unknown ones."""
        require_token_ids([answer.record for answer in answers if answer.record.token_ids])
        by_text: dict[_Text, list[Answer]] = defaultdict(list)
        for answer in answers:
            request = answer.request
            tokens = tuple(answer.record.token_ids)
            if tokens:
                check_known([*request.prompt, *tokens], self._reference.vocabulary_size)
                text = _Text(request.prompt, request.sampling.name, tokens)
                by_text[text].append(answer)
            elif request.is_greedy:
                self.greedy.add(None, request.num_tokens, answer.record)
        # A prompt is read once for all texts of a batch. Longer texts come first: they say most about rounding.
        distinct = sorted(by_text, key=lambda text: (text.prompt, len(text.tokens)), reverse=True)
        longest = max((len(text.tokens) for text in distinct), default=1)
        room = _MOST_LOGITS // (longest * self._reference.vocabulary_size)
        num_before = len(self.drawn)
        with progress("comparing", len(distinct)) as advance:
            for batch in in_batches(distinct, max(1, min(self._num_together, room))):
                logits = self._reference.logits_along(
                    [text.prompt for text in batch], [text.tokens for text in batch]
                )
                for row, text in enumerate(batch):
                    alike = by_text[text]
                    own_logits = logits[row, : len(text.tokens)]
                    if alike[0].request.is_greedy:
                        likeliest = own_logits.argmax(-1).tolist()
                        parting = first_divergence(
                            self._reference, text.prompt, likeliest, text.tokens
                        )
                        for answer in alike:
                            self.greedy.add(parting, answer.request.num_tokens, answer.record)
                    else:
                        self._add_drawn(alike, own_logits)
                    advance(None)
        # Bets go on from one text to the next: their order must not depend on what was drawn.
        asked = {answer.request.index: number for number, answer in enumerate(answers)}
        added = sorted(self.drawn[num_before:], key=lambda text: asked[text.request.index])
        self.drawn[num_before:] = added

    def rounding(self) -> dict[str, Rounding]:
        """By sampling setting, how far the distributions along a text of each of some prompts are apart by the
        reference's two routes: many texts in one pass, and a text again (`logits_again`).
        """
        return {
            name: Rounding.mean([*by_prompt.values()])
            for name, by_prompt in self._roundings.items()
            if by_prompt
        }

    def _add_drawn(self, alike: Sequence[Answer], logits: Floats) -> None:
        """Add answers with one text, by the reference's logits [n, V] before each of its tokens."""
        request = alike[0].request
        tokens = tuple(alike[0].record.token_ids)
        rows = range(len(tokens))
        along = request.sampling.probabilities_along
        exact = along(logits, request.prompt, tokens)
        of_setting = self._roundings[request.sampling.name]
        if len(of_setting) < _NUM_ROUNDED and request.prompt not in of_setting:
            again = self._reference.logits_again(request.prompt, tokens)
            if again is not None:
                other = along(again, request.prompt, tokens)
                of_setting[request.prompt] = Rounding.between(exact, other)
        lowest, widths, ranks = quantile_ranges(exact, tokens)
        tilts = tilts_of(exact, tokens)
        entropies = -(exact * np.log(exact, out=np.zeros_like(exact), where=exact > 0)).sum(-1)
        for answer in alike:
            random_parts = self._generator.random(len(tokens)) * widths
            self.drawn.append(
                DrawnText(
                    request=answer.request,
                    tokens=tokens,
                    widths=widths,
                    quantiles=np.minimum(lowest + random_parts, _LARGEST_QUANTILE),
                    entropies=entropies,
                    ranks=ranks,
                    tilts=tilts,
                    rejected=rejected_places(answer.record),
                )
            )
        if "logprobs" in request.sampling.parameters:
            values = logits.astype(np.float64)
            own_logits = values[rows, tokens]
            # A regular arm shows its likeliest tokens, and all others have one logit: those are not known.
            is_known = (values == own_logits[:, np.newaxis]).sum(-1) == 1
            with np.errstate(divide="ignore"):
                raw = np.where(is_known, own_logits - np.logaddexp.reduce(values, axis=-1), np.nan)
                processed = np.where(is_known, np.log(exact[rows, tokens]), np.nan)
            for answer in alike:
                # An answer without any has no entries.
                returned = answer.record.logprobs or [None] * len(tokens)
                self.returned.add(returned[: len(tokens)], raw, processed)


def rejected_places(record: RequestRecord) -> list[int] | None:
    """The places of tokens that took the place of a rejected one; None where they are not known."""
    rejected = []
    # The first token is decided without a proposal.
    place = 1
    for num_proposed, num_accepted in record.outcomes:
        place += num_accepted
        if num_accepted < num_proposed and place < record.num_tokens:
            rejected.append(place)
        place += 1
    # Only a last token may be decided without one as well: iterations that propose nothing are left out.
    is_whole = place >= record.num_tokens - 1
    return rejected if record.outcomes and record.outcomes_in_order and is_whole else None


class _Place(NamedTuple):
    """The place before a text's token `end - 1`, and how open the token behind that is."""

    text: DrawnText
    end: int
    openness: float

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.text.request.prompt, *self.text.tokens[: self.end - 1])


def choose_place(
    texts: Sequence[DrawnText], reference: TextReference, num_together: int
) -> tuple[int, ...]:
    """The tokens after which a recovered token decides most.

    The first token after a place is the target's own, and a proposal is tested from the second one on.
    For example: after `Once upon a` a text goes on with `time`, which has 0.9; the draft's proposal
    behind it is rejected with 0.4; the residual distribution, from which the recovered token is then
    drawn, has an entropy of 1.2 nats. That makes 0.9 * 0.4 * 1.2. Where the draft's distribution is
    not known, a proposal counts as always rejected, and its residual is the target's distribution.

    Args:
        texts: of one sampling setting.
        num_together: the most texts that the reference has room for at once.
    """
    by_tokens: dict[tuple[int, ...], _Place] = {}
    for text in texts:
        ends = range(1, len(text.tokens)) if text.rejected is None else text.rejected
        for end in ends:
            openness = float(text.widths[end - 1] * text.entropies[end])
            place = _Place(text, end, openness)
            by_tokens.setdefault((*place.token_ids, text.tokens[end - 1]), place)
    if not by_tokens:
        return texts[0].request.prompt
    places = sorted(by_tokens.values(), key=lambda place: place.openness, reverse=True)
    decided: list[float] = []
    for batch in in_batches(places[:_MOST_LOOKED_AT], num_together):
        decided += _decided(batch, reference)
    return places[int(np.argmax(decided))].token_ids


def _decided(places: Sequence[_Place], reference: TextReference) -> list[float]:
    """How much the recovered token behind each place decides, in nats."""
    prompts = [place.token_ids for place in places]
    first_tokens = [place.text.tokens[place.end - 1] for place in places]
    sampling = places[0].text.request.sampling
    drafted = reference.draft_probabilities(prompts, first_tokens, sampling.decoding)
    if drafted is None:
        return [place.openness for place in places]
    # Before the first token, and behind it, before any other.
    logits = reference.logits_along(prompts, [[token, token] for token in first_tokens])
    decided = []
    for place, token, own_logits, drafts in zip(places, first_tokens, logits, drafted, strict=True):
        target: Floats = sampling.probabilities_along(own_logits, place.token_ids, [token, token])[
            1
        ]
        residual = np.clip(target - drafts, 0, None)
        rejected = float(residual.sum())
        known = residual[residual > 0] / rejected if rejected else residual[:0]
        entropy = float(-(known * np.log(known)).sum())
        decided.append(float(place.text.widths[place.end - 1]) * rejected * entropy)
    return decided
