"""Exact logits of a loaded pair, which `recovery` and `latency` check an engine's texts against."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.config.errors import RunError
from harness.config.settings import DecodingSettings
from harness.engines.door.reference import Margin
from harness.engines.record import Preparation
from harness.local.decoding.transfer import padded
from harness.local.engine.pair import Pair
from harness.local.engine.pair_runners import PairRunners, open_runners
from harness.local.engine.rounding import largest_rounding, recompute
from harness.local.engine.rules import warp_of
from harness.results.statistics.arrays import Floats

# Tokens of each row whose logits are on the device at once: 8 rows of 128,000 outputs take 0.3 GB in float32.
_PIECE = 64


class ModelReference:
    """A `Reference` over runners of a loaded pair. Each call begins a new batch on them.

    Args:
        never_drawn: tokens that the engine under test never draws: their logits are minus infinity.
    """

    def __init__(self, runners: PairRunners, never_drawn: Collection[int] = ()) -> None:
        self._pair = runners.pair
        self._runners = runners
        self._never_drawn = sorted(never_drawn)

    @property
    def vocabulary_size(self) -> int:
        return self._pair.vocabulary_size

    def margin(self, token_ids: Sequence[int], wanted: int, other: int) -> Margin:
        target = self._pair.target

        # [R, P, V] by R routes, position 0 after the whole text.
        logits = recompute(self.logits, target.model, token_ids)
        epsilon = torch.finfo(target.dtype).eps
        differences = logits[:, 0, wanted] - logits[:, 0, other]
        explained = largest_rounding(logits, (wanted, other), epsilon)
        return Margin(float(differences.mean()), explained)

    def logits(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Logits [B, V] after prompts, or after continuations of equal lengths, which are read behind their cache."""
        logits = self._runners.target.start(prompts).logits
        if continuations is not None and continuations[0]:
            tokens = torch.tensor(continuations, device=logits.device)
            logits = self._runners.target.extend(tokens).logits[:, -1]
        finite = logits.amax(-1).isfinite()
        if not finite.all():
            self._runners.clear()
            row = finite.tolist().index(False)
            length = len(prompts[row]) + (0 if continuations is None else len(continuations[row]))
            raise not_finite(self._pair, "model", f"token {length} of prompt and text")
        return self._allowed(logits)

    def _allowed(self, logits: Tensor) -> Tensor:
        """Logits [..., V] in float32, without the tokens that are never drawn."""
        if not self._never_drawn:
            return logits.float()
        known = torch.tensor(self._never_drawn, device=logits.device)
        return logits.float().index_fill(-1, known, float("-inf"))

    def logits_along(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Floats:
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        indices = [distinct.index(tuple(prompt)) for prompt in prompts]
        first = self.logits(distinct)[indices]
        self._runners.target.select(indices)
        pieces = [first.unsqueeze(1).cpu()]
        longest = max(map(len, texts))
        tokens = torch.tensor(padded(texts, longest), device=first.device)[:, :-1]
        for piece in tokens.split(_PIECE, dim=1):
            if piece.shape[1]:
                following = self._runners.target.extend(piece).logits
                pieces.append(self._allowed(following).cpu())
                self._runners.target.keep([piece.shape[1]] * len(texts))
        logits = torch.cat(pieces, dim=1)
        finite = logits.amax(-1).isfinite().tolist()
        for are_finite, prompt, text in zip(finite, prompts, texts, strict=True):
            # What follows a shorter text only fills its row up.
            if not all(are_finite[: len(text)]):
                self._runners.clear()
                length = len(prompt) + are_finite.index(False)
                raise not_finite(self._pair, "model", f"token {length} of prompt and text")
        return logits.numpy()

    def logits_again(self, prompt: Sequence[int], text: Sequence[int]) -> Floats | None:
        # In a batch of one, with a prompt one token shorter.
        *shorter, last = prompt
        return self.logits_along([shorter], [[last, *text]])[0, 1:] if shorter else None

    def first_proposals(
        self,
        prompts: Sequence[Sequence[int]],
        first_tokens: Sequence[int],
        decoding: DecodingSettings,
    ) -> tuple[Floats, Floats] | None:
        make = self._runners.make_drafter
        if make is None:
            return None
        with torch.inference_mode():
            drafter = make(warp_of(decoding))
            drafter.start(prompts, first_tokens, self._runners.target.start(prompts))
            uniforms = torch.zeros(len(prompts), 1, device=self._pair.target.input_device)
            probabilities = drafter.propose(1, uniforms).probabilities
            if probabilities is None:
                return None
            tokens = torch.tensor(first_tokens, device=uniforms.device).unsqueeze(1)
            logits = self._allowed(self._runners.target.extend(tokens).logits[:, -1])
        return logits.cpu().numpy(), probabilities[:, 0].float().cpu().numpy()

    def close(self) -> None:
        """Give back the memory of the runners."""
        self._runners.close()


def open_reference(
    pair: Pair, preparation: Preparation, never_drawn: Collection[int] = ()
) -> ModelReference:
    """A reference over a loaded pair, with eager runners beside those of the engine that is prepared."""
    preparation = replace(preparation, runner="eager", share_prefix=False)
    return ModelReference(open_runners(pair, preparation), never_drawn)


def not_finite(pair: Pair, role: str, place: str) -> RunError:
    """The error for logits that are no numbers.

    Args:
        role: `model` or `draft`.
        place: of the token before them, `new token 12`.
    """
    is_draft = role == "draft"
    loaded = pair.draft if is_draft and pair.draft is not None else pair.target
    name = loaded.settings.name
    if is_draft and pair.draft_settings is not None:
        name = pair.draft_settings.name
    held = str(loaded.dtype).removeprefix("torch.")
    what = f"{role}: {name} gives logits that are nan or infinite in {held}, at {place}"
    # bfloat16 has the range of float32; a draft that is no model computes in the target's format.
    wider = {"float16": "bfloat16 or float32", "bfloat16": "float32"}.get(held)
    if wider is None:
        return RunError(f"{what}; check its weights")
    setting = "model.dtype" if loaded is pair.target else "draft.dtype"
    return RunError(f"{what}; its numbers overflow: try {setting}={wider}, or check its weights")
