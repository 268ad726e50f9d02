"""Sampling settings of requests, and the exact distribution of the tokens that each of them asks for.

The code differs from `decoding.warp` on purpose: target and draft share that one, so a mistake there would not look
like a loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from harness.commands.recovery.record import SamplingName
from harness.config.settings import DecodingSettings
from harness.results.statistics.arrays import Floats


@dataclass(frozen=True)
class Sampling:
    """How a request asks for its tokens to be drawn.

    Attributes:
        name: for reports.
        parameters: of a server's API, with OpenAI's and vLLM's names: `min_p`, `presence_penalty`,
            `frequency_penalty`, `repetition_penalty`, `logit_bias`.
        penalises_prompts: whether presence and frequency penalties count the prompt's tokens too.
    """

    name: str
    decoding: DecodingSettings
    parameters: Mapping[str, Any] = field(default_factory=dict)
    penalises_prompts: bool = False

    def probabilities_along(
        self, logits: Floats, prompt: Sequence[int], text: Sequence[int]
    ) -> Floats:
        """The distribution [n, V] that each token of a text was to be drawn from.

        Args:
            logits: [n, V], the model's own before each token.
        """
        values = logits.astype(np.float64)
        for token, bias in self.parameters.get("logit_bias", {}).items():
            values[:, int(token)] += bias
        if self.parameters:
            values = self._penalised(values, prompt, text)
        probabilities = exact_probabilities(values, self.decoding)
        # A reference gives tokens that it does not know the same logit, the lowest one. What
        # truncation leaves of their mass is theirs together.
        lowest = np.where(np.isinf(values), np.inf, values).min(-1, keepdims=True)
        alike = values == lowest
        mass = (probabilities * alike).sum(-1, keepdims=True)
        probabilities = np.where(alike, mass / alike.sum(-1, keepdims=True), probabilities)
        least = self.parameters.get("min_p", 0.0) * probabilities.max(-1, keepdims=True)
        probabilities = probabilities * (probabilities >= least)
        return np.asarray(probabilities / probabilities.sum(-1, keepdims=True))

    def explained_by_rounding(
        self,
        logits: Floats,
        prompt: Sequence[int],
        text: Sequence[int],
        places: Sequence[int],
        tolerances: Floats,
    ) -> list[int]:
        """Those of the places of a text whose tokens cannot be drawn, but could if all likelier ones had a logit that
        is lower by what rounding explains: ties at the edge of top-k, top-p or min-p.

        Args:
            logits: [n, V], the model's own before each token.
            places: of tokens that cannot be drawn.
            tolerances: [n].
        """
        if not places:
            return []
        moved = logits.copy()
        for place in places:
            row = logits[place]
            moved[place] = np.where(row > row[text[place]], row - tolerances[place], row)
        probabilities = self.probabilities_along(moved, prompt, text)
        return [place for place in places if probabilities[place, text[place]] > 0]

    def is_known_by(self, num_top: int) -> bool:
        """Whether the log-probabilities of this many likeliest tokens determine the distribution; -1 for all.

        A repetition penalty depends on the sign of logits. What others do to tokens that are not
        shown is unknown.
        """
        if "repetition_penalty" in self.parameters:
            return False
        if num_top < 0:
            return True
        changed = {"presence_penalty", "frequency_penalty", "logit_bias"}
        return changed.isdisjoint(self.parameters) and self.decoding.top_k <= num_top

    def _penalised(self, logits: Floats, prompt: Sequence[int], text: Sequence[int]) -> Floats:
        """Logits [n, V] with the penalties for tokens that came before.

        The repetition penalty counts prompt and text, as in transformers; the others count the text
        alone, or both.
        """
        # [n, V]: how often each token came in the text before, and [V] in the prompt.
        counts = np.zeros(logits.shape)
        for index, token in enumerate(text):
            counts[index + 1 :, token] += 1
        in_prompt = np.bincount(prompt, minlength=logits.shape[-1])
        repetition = self.parameters.get("repetition_penalty", 1.0)
        if repetition != 1:
            lowered = np.where(logits > 0, logits / repetition, logits * repetition)
            logits = np.where(counts + in_prompt > 0, lowered, logits)
        if self.penalises_prompts:
            counts += in_prompt
        frequency = self.parameters.get("frequency_penalty", 0.0)
        presence = self.parameters.get("presence_penalty", 0.0)
        return np.asarray(logits - frequency * counts - presence * (counts > 0))


def samplings(
    decoding: DecodingSettings,
    biased: Sequence[int],
    penalises_prompts: bool = False,
    names: Sequence[SamplingName] = get_args(SamplingName),
) -> list[Sampling]:
    """The sampling settings to try: the run's own, and others one at a time.

    These are tried at another temperature than the run's, without its top-k and top-p.

    Args:
        biased: tokens whose logits `logit_bias` raises.
        penalises_prompts: whether presence and frequency penalties count the prompt's tokens too.
        names: of those that are wanted.
    """
    other = 1.0 if decoding.temperature != 1 else 0.7
    plain = dataclasses.replace(decoding, temperature=other, top_k=0, top_p=1.0)
    known: dict[SamplingName, Sampling] = {
        "as_asked": Sampling("as asked", decoding),
        "temperature": Sampling(f"temperature={other:g}", plain),
        "top_k": Sampling("top_k=5", dataclasses.replace(plain, top_k=5)),
        "top_p": Sampling("top_p=0.8", dataclasses.replace(plain, top_p=0.8)),
    }
    extras: dict[SamplingName, Any] = {
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {str(token): 1.0 for token in biased},
    }
    known["logprobs"] = Sampling("log-probabilities", decoding, {"logprobs": 1})
    known["logprobs_whole"] = Sampling(
        "log-probabilities, no stream", plain, {"logprobs": 1, "stream": False}
    )
    for name, value in extras.items():
        shown = name if name == "logit_bias" else f"{name}={value:g}"
        known[name] = Sampling(shown, plain, {name: value}, penalises_prompts)
    return [known[name] for name in names]


def exact_probabilities(logits: Floats, decoding: DecodingSettings) -> Floats:
    """Logits [..., V] -> probabilities [..., V] in float64, with the settings' temperature, top-k and top-p."""
    values = np.asarray(logits, dtype=np.float64)
    if decoding.temperature == 0:
        return np.asarray(np.eye(values.shape[-1])[values.argmax(-1)])
    values = values / decoding.temperature
    if 0 < decoding.top_k < values.shape[-1]:
        least = np.partition(values, -decoding.top_k)[..., [-decoding.top_k]]
        values = np.where(values < least, -np.inf, values)
    probabilities = np.exp(values - values.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    if decoding.top_p < 1:
        # Of equally likely tokens only as many are kept as are needed, the first ones, as the loop keeps them.
        order = np.argsort(-probabilities, kind="stable")
        descending = np.take_along_axis(probabilities, order, -1)
        likelier_mass = descending.cumsum(-1) - descending
        kept = np.where(likelier_mass < decoding.top_p, descending, 0.0)
        np.put_along_axis(probabilities, order, kept, -1)
        probabilities /= probabilities.sum(-1, keepdims=True)
    return probabilities
