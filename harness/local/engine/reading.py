"""Texts that are there already, read by both models of a pair: how often a draft is accepted on them, and whether an
engine that wrote them accepted as much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings
from harness.engines.protocol import in_batches
from harness.engines.record import Preparation
from harness.engines.requests import RequestRecord
from harness.local.decoding.protocols import NonFiniteError
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
from harness.results.statistics.iterations import Cut, acceptance_chances, cut
from harness.results.verdict import MOST_DEVIATIONS, MOST_IMPOSSIBLE, drafter_health

# Texts of a prompt that are read together.
TOGETHER = 8


@dataclass(frozen=True)
class ReadText:
    """A text of n tokens, two at least, after a prompt.

    Attributes:
        cut: into iterations, for every K.
        num_tokens: n.
        num_impossible: tokens that the target cannot draw.
        log_probability: of the others under the target, summed.
        expected, variance: of that sum, if the target drew each token.
    """

    cut: Cut
    num_tokens: int
    num_impossible: int
    log_probability: float
    expected: float
    variance: float


class TextReader:
    """Reads texts with a pair, in one pass of the target, and of the draft one for each depth at most.

    Args:
        decoding: temperature, top-k, top-p and rule of acceptance.
        most: the largest K.
    """

    def __init__(self, pair: Pair, decoding: DecodingSettings, most: int) -> None:
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


def likelihood_columns(texts: Sequence[ReadText]) -> dict[str, Any]:
    """How likely texts are under the target, against its own texts."""
    num_tokens = sum(text.num_tokens for text in texts)
    num_impossible = sum(text.num_impossible for text in texts)
    num_possible = num_tokens - num_impossible
    found = sum(text.log_probability for text in texts)
    expected = sum(text.expected for text in texts)
    deviation = math.sqrt(sum(text.variance for text in texts))
    return {
        "log_probability": found / num_possible if num_possible else None,
        "own_log_probability": expected / num_possible if num_possible else None,
        "likelihood_z": (found - expected) / deviation if deviation else None,
        "impossible_share": num_impossible / num_tokens,
    }


def most_drafted(requests: Sequence[RequestRecord]) -> int | None:
    """The K that an engine reports with its answers; None where it does not."""
    return max((k for request in requests for k, _ in request.outcomes), default=None)


def health_columns(
    texts: Sequence[ReadText], requests: Sequence[RequestRecord], num_draft_tokens: int
) -> dict[str, Any]:
    """Whether an engine accepted what the weights of its models do.

    Args:
        texts: its answers, read by the weights.
        requests: the same answers.
        num_draft_tokens: the K that it drafts with.
    """
    reported = []
    for request, text in zip(requests, texts, strict=True):
        if request.outcomes:
            reported.append(len(request.outcomes))
        elif request.num_accepted is not None:
            reported.append(text.cut.num_tokens - request.num_accepted)
    counted = sum(reported) if len(reported) == len(texts) else None
    place = num_draft_tokens - 1
    num_tokens = sum(text.cut.num_tokens for text in texts)
    likelihood = likelihood_columns(texts)
    health, allowed = drafter_health(
        num_tokens,
        counted,
        expected=sum(text.cut.iterations[place] for text in texts),
        variance=sum(text.cut.variance[place] for text in texts),
        own_texts=abs(likelihood["likelihood_z"] or 0.0) <= MOST_DEVIATIONS
        and likelihood["impossible_share"] <= MOST_IMPOSSIBLE,
    )
    return {
        "health": health,
        "served_tokens_per_iteration": num_tokens / counted if counted else None,
        "weights_tokens_per_iteration": allowed,
    }
