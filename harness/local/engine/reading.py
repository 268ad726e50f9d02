"""Texts that are there already, read by both models of a pair: how often a draft is accepted on them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings
from harness.engines.door.reading import ReadText, Transcript, num_together
from harness.engines.protocol import in_batches
from harness.engines.record import Preparation
from harness.local.decoding.protocols import NonFiniteError
from harness.local.drafting.methods import SampledDraftSettings
from harness.local.drafting.model import ModelDrafter
from harness.local.drafting.teacher_forcing import (
    chosen,
    read_along,
    replayed,
    require_finite,
    windows,
)
from harness.local.engine.pair import Pair
from harness.local.engine.pair_runners import open_runners
from harness.local.engine.reference import not_finite
from harness.local.engine.rules import warp_of
from harness.results.statistics.iterations import acceptance_chances, cut


class PairReader:
    """Reads texts with a pair, in one pass of the target, and of the draft one for each depth at most.

    Args:
        decoding: temperature, top-k, top-p and rule of acceptance.
        most: the largest K.
        greedy_draft: whether the draft proposes its likeliest tokens, whatever its settings say.
    """

    def __init__(
        self, pair: Pair, decoding: DecodingSettings, most: int, *, greedy_draft: bool = False
    ) -> None:
        if greedy_draft:
            assert isinstance(pair.draft_settings, SampledDraftSettings)
            greedy = dataclasses.replace(pair.draft_settings, sampling="greedy")
            pair = dataclasses.replace(pair, draft_settings=greedy)
        preparation = Preparation(decoding=decoding, runner="eager")
        self._pair = pair
        self._most = most
        self._is_block = decoding.rule == "block"
        self._warp = warp_of(decoding)
        # The eager runner is what every model can have.
        self._runners = open_runners(pair, preparation)
        assert self._runners.make_drafter is not None
        self._drafter = self._runners.make_drafter(self._warp)

    def close(self) -> None:
        """Give the caches back."""
        self._runners.close()

    def read(self, transcripts: Iterable[Transcript]) -> Iterator[list[ReadText]]:
        """Read the answers of transcripts; transcripts with one prompt that follow each other together.

        Raises:
            SettingError: for a draft that draws its tokens and gives no probabilities to a text.
            RunError: logits that are nan or infinite.
        """
        for _, same in itertools.groupby(
            transcripts, key=lambda transcript: list(transcript.prompt)
        ):
            alike = list(same)
            longest = max(len(transcript.token_ids) for transcript in alike)
            for together in in_batches(alike, num_together(longest)):
                try:
                    yield from self._read_together(together)
                except NonFiniteError as error:
                    place = f"token {error.position} of a text"
                    raise not_finite(self._pair, error.role, place) from error

    @torch.inference_mode()
    def _read_together(self, transcripts: Sequence[Transcript]) -> Iterator[list[ReadText]]:
        """Read transcripts with one prompt, in one pass of the target over all of them."""
        longest = max(len(transcript.token_ids) for transcript in transcripts)
        # Shorter ones go on with any token, which is not looked at. Nothing follows the last token.
        rows = [
            [*transcript.token_ids[:-1], *[0] * (longest - len(transcript.token_ids))]
            for transcript in transcripts
        ]
        hidden: list[list[Tensor]] = [[] for _ in transcripts]
        # For each token of a transcript's answers, in parts: its probability, and the mean and the variance of the
        # log-probability if a token were drawn in its place.
        figures: list[list[Tensor]] = [[] for _ in transcripts]
        device = self._pair.target.input_device
        num_first = len(transcripts[0].prompt)
        for read in read_along(self._runners.target, rows, num_first, device):
            for row, transcript in enumerate(transcripts):
                if read.hidden is not None:
                    hidden[row].append(read.hidden[row])
                places = [
                    token - 1
                    for answer in transcript.answers
                    for token in answer
                    if read.begin < token <= read.end
                ]
                if not places:
                    continue
                probabilities = self._warp(read.logits_after(row, places))
                require_finite(probabilities, "model", places)
                wanted = [transcript.token_ids[place + 1] for place in places]
                logarithms = probabilities.clamp(min=torch.finfo(torch.float32).tiny).log()
                means = (probabilities * logarithms).sum(-1)
                squares = (probabilities * logarithms.square()).sum(-1)
                variances = (squares - means.square()).clamp(min=0)
                given = chosen(probabilities, wanted)
                figures[row].append(torch.stack([given, means, variances]).double())
        for row, transcript in enumerate(transcripts):
            token_ids = transcript.token_ids
            features = torch.cat(hidden[row])[: len(token_ids) - 1] if hidden[row] else None
            hidden[row] = []
            lengths = [len(answer) for answer in transcript.answers]
            target = torch.cat(figures[row], dim=1).split(lengths, dim=1)
            yield [
                self._read_text(
                    answer_figures, self._draft_probabilities(token_ids, answer, features)
                )
                for answer_figures, answer in zip(target, transcript.answers, strict=True)
            ]

    def _draft_probabilities(
        self, token_ids: Sequence[int], answer: range, features: Tensor | None
    ) -> Tensor:
        """The draft's probabilities [tokens but the first, K] of an answer, as `replayed` returns them."""
        if isinstance(self._drafter, ModelDrafter):
            return windows(self._drafter.along(token_ids, answer), self._most)
        found = replayed(
            self._drafter, token_ids, answer, features, self._most, self._pair.vocabulary_size
        )
        if found is None:
            draft = self._pair.draft_settings
            rule = "must draw by harness.local.decoding.randomness.existing_index, so that texts can be replayed"
            raise SettingError("draft", rule, draft and draft.name)
        return found

    def _read_text(self, figures: Tensor, draft: Tensor) -> ReadText:
        target, means, variances = figures
        chances = acceptance_chances(
            target.cpu().numpy(), draft.cpu().numpy(), block=self._is_block
        )
        # Tokens that cannot be drawn have no log-probability: they count apart.
        possible = target > 0
        return ReadText(
            cut=cut(chances),
            num_tokens=len(target),
            num_impossible=int((~possible).sum()),
            log_probability=float(target[possible].log().sum()),
            expected=float(means[possible].sum()),
            variance=float(variances[possible].sum()),
        )
