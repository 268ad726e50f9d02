"""Texts that are there already, read by both models of a pair: how often a draft is accepted on them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings
from harness.engines.door.reading import TOGETHER, ReadText
from harness.engines.protocol import in_batches
from harness.engines.record import Preparation
from harness.local.decoding.protocols import NonFiniteError
from harness.local.drafting.methods.model import SampledDraftSettings
from harness.local.drafting.teacher_forcing import (
    chosen,
    probabilities_along,
    read_along,
    require_finite,
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

    def read(self, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Iterator[ReadText]:
        """Read texts of two tokens or more, each after its prompt; those of one prompt that follow each other together.

        Raises:
            SettingError: for a draft that draws its tokens and gives no probabilities to a text.
            RunError: logits that are nan or infinite.
        """
        for prompt, answered in itertools.groupby(texts, key=itemgetter(0)):
            for some in in_batches([text for _, text in answered], TOGETHER):
                try:
                    yield from self._read_after(prompt, some)
                except NonFiniteError as error:
                    place = f"token {error.position} of a text"
                    raise not_finite(self._pair, error.role, place) from error

    @torch.inference_mode()
    def _read_after(self, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> list[ReadText]:
        """Read texts after their prompt, in one pass of the target over all of them."""
        longest = max(map(len, texts))
        # Shorter texts go on with any token, which is not looked at.
        rows = [[*text[:-1], *[0] * (longest - len(text))] for text in texts]
        hidden: list[list[Tensor]] = [[] for _ in texts]
        # For each text [3, n] in parts: the probability of each token, and the mean and the variance of the
        # log-probability, if a token were drawn in its place.
        figures: list[list[Tensor]] = [[] for _ in texts]
        device = self._pair.target.input_device
        # A step has logits after the tokens `begin`, `begin` + 1, ... of each text; the first after the prompt (-1).
        for begin, step in read_along(self._runners.target, prompt, rows, device):
            for row, text in enumerate(texts):
                logits = step.logits[row : row + 1] if begin < 0 else step.logits[row]
                wanted = text[begin + 1 : begin + 1 + len(logits)]
                if not wanted:
                    continue
                probabilities = self._warp(logits[: len(wanted)])
                require_finite(probabilities, "model", begin + 1)
                logarithms = probabilities.clamp(min=torch.finfo(torch.float32).tiny).log()
                means = (probabilities * logarithms).sum(-1)
                squares = (probabilities * logarithms.square()).sum(-1)
                variances = (squares - means.square()).clamp(min=0)
                figures[row].append(torch.stack([chosen(probabilities, wanted), means, variances]))
                if step.hidden is not None:
                    hidden[row].append(step.hidden[row])
        read = []
        for row, text in enumerate(texts):
            of_target, means, variances = torch.cat(figures[row], dim=1)
            features = (
                torch.cat(hidden[row])[: len(prompt) + len(text) - 1] if hidden[row] else None
            )
            of_draft = probabilities_along(self._drafter, prompt, text, features, self._most)
            if of_draft is None:
                draft = self._pair.draft_settings
                rule = "draws its tokens, and gives no probabilities to a text: its class needs a method `along`"
                raise SettingError("draft", rule, draft and draft.name)
            chances = acceptance_chances(
                of_target.cpu().numpy(), of_draft.cpu().numpy(), block=self._is_block
            )
            # Tokens that cannot be drawn have no log-probability: they count apart.
            possible = of_target > 0
            found = ReadText(
                cut=cut(chances),
                num_tokens=len(text),
                num_impossible=int((~possible).sum()),
                log_probability=float(of_target[possible].log().sum()),
                expected=float(means[possible].sum()),
                variance=float(variances[possible].sum()),
            )
            read.append(found)
        return read
