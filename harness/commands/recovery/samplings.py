"""Sampling settings of requests, and the exact distribution of each token that they ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from harness.commands.recovery.prefix_distribution import exact_probabilities
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
        self, logits: Tensor, prompt: Sequence[int], text: Sequence[int]
    ) -> Floats:
        """The distribution [n, V] that each token of a text was to be drawn from.

        Args:
            logits: [n, V], the model's own before each token.
        """
        values = logits.double().cpu()
        for token, bias in self.parameters.get("logit_bias", {}).items():
            values[:, int(token)] += bias
        values = self._penalised(values, prompt, text)
        probabilities = exact_probabilities(values, self.decoding)
        least = self.parameters.get("min_p", 0.0) * probabilities.max(-1, keepdims=True)
        probabilities = probabilities * (probabilities >= least)
        return probabilities / probabilities.sum(-1, keepdims=True)

    def _penalised(self, logits: Tensor, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
        """Logits [n, V] with the penalties for tokens that came before.

        The repetition penalty counts prompt and text, as in transformers; the others count the text
        alone, or both.
        """
        if not self.parameters:
            return logits
        size = logits.shape[-1]
        tokens = torch.tensor(text)
        # [n, V]: how often each token came in the text before, and [V] in the prompt.
        counts = one_hot(tokens, size).cumsum(0) - one_hot(tokens, size)
        in_prompt = one_hot(torch.tensor(prompt), size).sum(0)
        repetition = self.parameters.get("repetition_penalty", 1.0)
        if repetition != 1:
            seen = counts + in_prompt > 0
            lowered = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(seen, lowered, logits)
        if self.penalises_prompts:
            counts = counts + in_prompt
        frequency = self.parameters.get("frequency_penalty", 0.0)
        presence = self.parameters.get("presence_penalty", 0.0)
        return logits - frequency * counts - presence * (counts > 0)


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
    for name, value in extras.items():
        shown = name if name == "logit_bias" else f"{name}={value:g}"
        known[name] = Sampling(shown, plain, {name: value}, penalises_prompts)
    return [known[name] for name in names]
