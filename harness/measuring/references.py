"""The probabilities that a run's answers are checked against: the model's own, or those that a regular server reports
for given texts.

A server reports the log-probabilities of only the n likeliest tokens at each position. All other tokens are assumed to
be equally likely, so shifts among them cannot be detected. At temperature 1, their total mass is exact. At any other
temperature it depends on how it is assumed to be spread: `logits_along` spreads it evenly, and
`logits_by_another_route` over as few other tokens as possible, each as likely as the n-th. The difference between the
two counts as rounding.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import numpy as np

from harness.config.demand import Demand
from harness.config.errors import HarnessError, SettingError
from harness.config.installation import require_local
from harness.config.model_names import SERVED
from harness.config.run import RunSettings
from harness.engines.divergence import Divergence, check_known, text_divergence
from harness.engines.door import local
from harness.engines.door.reading import WeightsReference
from harness.engines.protocol import Arm, Engine, Likeliest
from harness.engines.record import Preparation, engine_of
from harness.engines.tokenizer import AnyPair, ServedPair, tokens_as_served
from harness.measuring.progress import say
from harness.results.statistics import Floats

# A difference of log-probabilities up to this size always counts as rounding.
_LEAST_ROUNDING = 0.001
# How many texts are scored twice, to measure the rounding.
_NUM_TWICE = 16


class ReportedReference:
    """The log-probabilities that a regular arm reports for texts, as the logits of an `engines.door.reading.Reference`.

    Args:
        arm: the regular arm, which scores texts.
        prompt: any prompt; a text after it is scored once, to find out whether the arm can score texts.
        num_tokens: size of the tokenizer's vocabulary.
        num_top: how many of the likeliest tokens the arm is asked for at each position; -1 for all.
        num_in_flight: how many texts are scored at the same time.

    Attributes:
        rounding: the largest difference between two log-probabilities that counts as rounding.

    Raises (each method that scores texts, and the constructor):
        RunError: if the arm does not report log-probabilities of texts, or reports tokens beyond the vocabulary.
    """

    def __init__(
        self,
        arm: Arm,
        prompt: Sequence[int],
        num_tokens: int,
        num_top: int,
        num_in_flight: int,
    ) -> None:
        assert arm.scores is not None
        self.arm = arm
        # Called with texts, the number of likeliest tokens, and the number of requests in flight. It returns, for each
        # text and each of its positions, {token id: log-probability}.
        self._scores = arm.scores
        # A text of one token, so there is one position.
        [[likeliest]] = self._scores([(prompt, prompt[:1])], num_top, 1)
        # Some models have a larger vocabulary than their tokenizer.
        self.vocabulary_size = max(num_tokens, 1 + max(likeliest))
        self.rounding = _LEAST_ROUNDING
        self._num_top = num_top
        self._num_in_flight = num_in_flight

    def learn_rounding(
        self, texts: Sequence[tuple[Sequence[int], Sequence[int]]], as_drawn: float
    ) -> None:
        """Set `rounding`, by scoring the same texts once by themselves and once while other texts are scored.

        Args:
            texts: pairs of a prompt and the arm's text after it. Only the first `_NUM_TWICE` pairs are scored.
            as_drawn: an estimate of the largest difference between the arm's scores of tokens, and the
                log-probabilities that it reported when it drew them.
        """
        twice = texts[:_NUM_TWICE]
        together = self._scores(twice, self._num_top, self._num_in_flight)
        differences = [as_drawn]
        for text, first in zip(twice, together, strict=True):
            [second] = self._scores([text], self._num_top, 1)
            for first_scores, second_scores in zip(first, second, strict=True):
                best = max(first_scores, key=lambda token: first_scores[token])
                # If the token is not reported the second time, it is less likely than every reported token. The
                # difference is then at least this large.
                again = second_scores.get(best, min(second_scores.values()))
                differences.append(abs(first_scores[best] - again))
        # Twice the largest difference that was seen, because other texts may differ more.
        self.rounding = max(_LEAST_ROUNDING, 2 * max(differences))

    def draft_logits_along(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> None:
        """Return None, because servers do not report the probabilities of a draft."""

    def kernel_deviations(self, prompt: Sequence[int], text: Sequence[int], logits: Floats) -> None:
        """Return None, because servers do not report the results of another kernel."""

    def tolerance(self, likeliest: Floats, deviation: float) -> Floats:
        """Return `rounding` for each position, whatever the logits and their deviation, because it was measured on what
        the server reports.
        """
        return np.full(likeliest.shape, self.rounding)

    def logits_along(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Floats:
        pairs = list(zip(prompts, texts, strict=True))
        scored = self._scores(pairs, self._num_top, self._num_in_flight)
        logits = np.zeros((len(texts), max(map(len, texts)), self.vocabulary_size))
        for row, text_scores in enumerate(scored):
            logits[row, : len(text_scores)] = self._logits(text_scores, is_even=True)
        return logits

    def logits_by_another_route(self, prompt: Sequence[int], text: Sequence[int]) -> Floats:
        """The logits from another request, with the mass of the unreported tokens assumed to be on as few of them as
        possible.
        """
        [scored] = self._scores([(prompt, text)], self._num_top, 1)
        return self._logits(scored, is_even=False)

    def _logits(self, scored: Sequence[Likeliest], is_even: bool) -> Floats:
        """Logits [n, V] from the log-probabilities that are reported at n positions.

        For example, V is 6, and probabilities of 0.4 and 0.2 are reported for tokens 3 and 1. A mass of 0.4 is left.
        The probabilities are then:

            token          0     1     2     3     4     5
            is_even        0.1   0.2   0.1   0.4   0.1   0.1
            not is_even    0.2   0.2   0.2   0.4   0     0

        Args:
            is_even: whether the remaining mass is spread evenly over all other tokens. If not, it is put on as few of
                them as possible, each as likely as the least likely reported token.
        """
        logits = np.full((len(scored), self.vocabulary_size), -math.inf)
        for row, likeliest in zip(logits, scored, strict=True):
            shown = sorted(likeliest.items(), key=operator.itemgetter(1), reverse=True)
            if self._num_top > 0:
                # An arm may report the text's own token in addition to the likeliest tokens. The logits must not depend
                # on the text.
                shown = shown[: self._num_top]
            tokens, logprobs = map(list, zip(*shown, strict=True))
            check_known(tokens, self.vocabulary_size)
            row[tokens] = logprobs
            mass_left = 1 - sum(map(math.exp, logprobs))
            # The tokens that were not reported, and can be drawn.
            is_left = np.isinf(row)
            is_left[sorted(self.arm.traits.never_drawn)] = False
            left = np.flatnonzero(is_left)
            if len(left) and mass_left > 0:
                num_alike = len(left)
                # Servers also report tokens that cannot be drawn, with a log-probability of -9999. `least` is then 0,
                # and the mass is spread evenly.
                least = math.exp(logprobs[-1])
                if not is_even and least > 0:
                    num_alike = max(1, min(num_alike, round(mass_left / least)))
                row[left[:num_alike]] = math.log(mass_left / num_alike)
        logits[:, sorted(self.arm.traits.never_drawn)] = -math.inf
        return logits


# For an engine without weights in this process, the weights are loaded only for checks. Caches are then planned for
# this many rows of a batch, and this many tokens of a row.
REFERENCE_BATCH = 64
REFERENCE_TOKENS = 128


class References:
    """Provides the reference for a run: the open engine's own, or the run's target, loaded into this process once.

    There is no reference in four cases:

    - `model=` only stands for whatever the server serves (`SERVED`);
    - the server applies the chat template itself, and so reads different tokens than the model would here;
    - a grammar or a penalty changes the server's answers (this and the previous case are `beyond_model`);
    - the server's model cannot be loaded here.

    Raises (each method):
        HarnessError: if the target is loaded for an engine that computes in this process, and cannot be planned or
            does not fit. For any other engine, a message says so, and there is no reference.
    """

    def __init__(self, settings: RunSettings, planned: AnyPair, engine: Engine) -> None:
        self._settings = settings
        self._planned = planned
        self._engine = engine

    def for_texts(self) -> WeightsReference | None:
        """The reference for texts, whose token ids need not be known; None if there is no reference. (For token ids, an
        arm must also report the tokens that it drew, `Traits.reports_token_ids`.)
        """
        if self._settings.engine.beyond_model is not None:
            return None
        weights = self._engine.weights
        return self._loaded if weights is None else weights.reference

    def text_divergence(
        self, prompt: Sequence[int], text: str, num_tokens: int
    ) -> Divergence | None:
        """Return where a greedy text of the speculative arm, or of the only arm, diverges from the model's own text;
        None if it does not.

        `for_texts` must return a reference.

        Args:
            num_tokens: the most tokens that the text can have.
        """
        reference = self.for_texts()
        assert reference is not None
        tokenizer = self._planned.tokenizer
        # An arm that gets the prompt as text may split it into other tokens; the reference then reads these.
        if not self._engine.arms[-1].traits.takes_token_ids:
            prompt = tokens_as_served(tokenizer, prompt)
        return text_divergence(reference, tokenizer, prompt, text, num_tokens)

    @functools.cached_property
    def _loaded(self) -> WeightsReference | None:
        """The target, loaded here. None if its weights are unknown or cannot be loaded, and a message then says so."""
        settings = self._settings
        if settings.model.repository == SERVED:
            say(
                "no exact distribution: the weights that are served are not known here; model= names them"
            )
            return None
        try:
            require_local("model", settings.model.name)
        except SettingError as error:
            say(f"no exact distribution: {error}")
            return None
        demand = Demand(
            batch_size=REFERENCE_BATCH,
            prompt_tokens=REFERENCE_TOKENS,
            new_tokens=0,
            num_draft_tokens=0,
            runner="eager",
        )
        try:
            planned = self._planned
            if isinstance(planned, ServedPair):
                planned = local("engine.pair").plan_pair(
                    settings.model, None, settings.placement, settings.dtype
                )
            pair = planned.place(demand, force=settings.force).load()
            never_drawn = set().union(*(arm.traits.never_drawn for arm in self._engine.arms))
            preparation = Preparation(decoding=settings.decoding)
            return local("engine.reference").open_reference(pair, preparation, never_drawn)
        except HarnessError as error:
            if engine_of(settings).in_process:
                raise
            say(f"model={settings.model.name} cannot be loaded here: {error}")
            return None
