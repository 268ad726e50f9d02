"""Computes the logits of a loaded pair along texts, and how much rounding changes these logits. `recovery` and
`latency` check an engine's texts with them.

A text that our own loop decoded is read by passes of the same kind as those that verified it. Other kernels would round
differently, and the difference would look like a fault of the loop. A text of another engine is read by plain passes.

The deviation of another engine's kernels is estimated: the text is read again with embeddings that are changed by about
the epsilon of their dtype or less. After this change, later operations round differently.

If two greedy texts diverge, `margin` computes the deviation in both ways, and uses the larger one. (The first way shows
no deviation if one row is decoded alone and the compared tokens fit into half a pass.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.config.errors import RunError
from harness.engines.divergence import margin_deviation
from harness.engines.door.reading import KernelDeviations, Margin
from harness.engines.protocol import Weights
from harness.engines.record import Preparation
from harness.local.decoding.protocols import Runner, Step, TokenRows
from harness.local.decoding.transfer import padded
from harness.local.drafting.method import Pair
from harness.local.engine.runners import PairRunners, open_runners
from harness.local.models import devices
from harness.local.runners.base import Options
from harness.local.runners.checks import plain_outputs
from harness.results.statistics import Floats

# If another engine decodes, or a draft reads, one pass reads at most this many tokens of each row. The limit saves
# memory: with 8 rows and a vocabulary of 128,000, the logits of such a pass take 0.3 GB in float32.
_WIDEST = 64

# The rounding that a margin allows for is measured at this many positions at the end of a text, and at the position
# after the text.
NUM_POSITIONS = 4
# The tolerance for rounding, in standard deviations. It must hold at the worst of thousands of tokens in a run. If
# errors are normally distributed, one in two million is larger than 5 standard deviations.
_NUM_DEVIATIONS = 5.0


class ModelReference:
    """A `Reference` that reads texts with the runners of a loaded pair. `engines.door.reading.Reference` describes its
    methods. Each call begins a new batch on these runners.

    Args:
        verification_width: the number of tokens of each row that a verifying pass reads, if these runners decode the
            texts; None if another engine decodes them.
        num_rows: the number of rows of a verifying pass.
        never_drawn: tokens that the engine under test never draws. Their logits are set to minus infinity.
    """

    def __init__(
        self,
        runners: PairRunners,
        verification_width: int | None = None,
        num_rows: int = 1,
        never_drawn: Collection[int] = (),
    ) -> None:
        self._pair = runners.pair
        self._runners = runners
        self._verification_width = verification_width
        self._num_rows = num_rows
        self._never_drawn = sorted(never_drawn)

    @property
    def vocabulary_size(self) -> int:
        return self._pair.vocabulary_size

    def margin(self, token_ids: Sequence[int], wanted: int, other: int) -> Margin:
        # Logits are compared at the last positions of the text, and at the position after the text.
        num_read = min(NUM_POSITIONS, len(token_ids) - 1)
        prompt = token_ids[: len(token_ids) - num_read]
        text = [*token_ids[len(prompt) :], wanted]
        [logits] = self.logits_along([prompt], [text])
        other_route = self.logits_by_another_route(prompt, text)
        eager = self._eager_logits(prompt, text)
        rounded = self._eager_logits(prompt, text, is_changed=True)
        deviation = max(margin_deviation(logits, other_route), margin_deviation(eager, rounded))
        # The logits before `wanted`, which are those after the given text.
        compared = logits[-1, [wanted, other]]
        tolerance = self.tolerance(np.abs(compared).max(), deviation)
        return Margin(float(compared[0] - compared[1]), float(tolerance))

    def _mask_never_drawn(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] in float32, with minus infinity for tokens that are never drawn."""
        never_drawn = torch.tensor(self._never_drawn, dtype=torch.long, device=logits.device)
        return logits.float().index_fill(-1, never_drawn, float("-inf"))

    def logits_along(self, prompts: TokenRows, texts: TokenRows) -> Floats:
        return self._logits_along(prompts, texts, self._verification_width or _WIDEST)

    @torch.inference_mode()
    def draft_logits_along(self, prompts: TokenRows, texts: TokenRows) -> Floats | None:
        settings = self._pair.draft_settings
        if self._runners.draft is None or settings is None or self._pair.head is not None:
            return None
        pieces = []
        for step, _ in steps_along(self._runners.draft, prompts, padded(texts), _WIDEST):
            logits = self._mask_never_drawn(step.logits)
            if settings.sampling == "greedy":
                # The draft never proposes any other token.
                is_likeliest = logits == logits.amax(-1, keepdim=True)
                logits = logits.masked_fill(~is_likeliest, float("-inf"))
            pieces.append(logits.cpu())
        return torch.cat(pieces, dim=1).numpy()

    def logits_by_another_route(self, prompt: Sequence[int], text: Sequence[int]) -> Floats:
        width = self._verification_width
        if width is None:
            return self._eager_logits(prompt, text, is_changed=True)
        # The text is read as the last row of a batch whose other rows have other tokens, which are the same text in
        # reverse. Of the first pass only half is kept, so that each later token is at another place in its pass than
        # before.
        texts = [text[::-1]] * (self._num_rows - 1) + [text]
        prompts = [prompt] * self._num_rows
        return self._logits_along(prompts, texts, width, first_kept=(width + 1) // 2)[-1]

    def kernel_deviations(
        self, prompt: Sequence[int], text: Sequence[int], logits: Floats
    ) -> KernelDeviations | None:
        # With 8-bit weights, the other rows of a pass decide which columns are not quantized (the outliers). So there
        # is no single result to compare with.
        is_in_8bit = getattr(self._pair.target.model, "is_loaded_in_8bit", False)
        if self._verification_width is None or is_in_8bit:
            return None
        eager = self._eager_logits(prompt, text)
        rounded = self._eager_logits(prompt, text, is_changed=True)
        return KernelDeviations(margin_deviation(eager, logits), margin_deviation(eager, rounded))

    def tolerance(self, likeliest: Floats, deviation: float) -> Floats:
        epsilon = torch.finfo(self._pair.target.dtype).eps
        return np.maximum(_NUM_DEVIATIONS * deviation, 2 * rounding_unit(likeliest, epsilon))

    def _eager_logits(
        self, prompt: Sequence[int], text: Sequence[int], is_changed: bool = False
    ) -> Floats:
        """Return the logits [n, V] before each token of a text, from one pass of the eager model without a cache.

        Args:
            is_changed: whether the embeddings are changed by as little as rounding (`changed_embeddings`).
        """
        model = self._pair.target.model
        options: Options = {"vocabulary_size": self._pair.vocabulary_size}
        with changed_embeddings(model) if is_changed else nullcontext():
            [logits] = plain_outputs(model, options, [*prompt, *text[:-1]], len(text))
        return self._mask_never_drawn(logits).cpu().numpy()

    @torch.inference_mode()
    def _logits_along(
        self, prompts: TokenRows, texts: TokenRows, width: int, first_kept: int | None = None
    ) -> Floats:
        """Return logits [B, n, V] before each token of the texts, where n is the length of the longest text. The other
        arguments are those of `steps_along`. Raises RunError if a text's logits are not finite.
        """
        pieces = []
        for step, _ in steps_along(self._runners.target, prompts, padded(texts), width, first_kept):
            pieces.append(self._mask_never_drawn(step.logits).cpu())
        logits = torch.cat(pieces, dim=1)
        finite = logits.amax(-1).isfinite().tolist()
        for are_finite, prompt, text in zip(finite, prompts, texts, strict=True):
            # Only a text's own tokens are checked, because a shorter text is followed by padding.
            if not all(are_finite[: len(text)]):
                # The caches may contain nan now, which a mask does not hide from later batches.
                self._runners.close()
                token = f"token {len(prompt) + are_finite.index(False)} of prompt and text"
                raise not_finite(self._pair, "model", token)
        return logits.numpy()

    def close(self) -> None:
        """Free the memory of the runners."""
        self._runners.close()


def steps_along(
    runner: Runner,
    prompts: TokenRows,
    rows: TokenRows,
    width: int,
    first_kept: int | None = None,
) -> Iterator[tuple[Step, Tensor]]:
    """Read texts in a new batch: first their prompts, and then the tokens after the prompts, except the last token of
    each text.

    Yields the step of each pass, with logits [B, n, V], together with the tokens [B, n] that follow the n positions.
    The step of the prompts has n = 1. Each later step has n = `width`, and the last one has the remaining number of
    positions. With rows of 6 tokens and width 4, the steps have 1, 4 and 1 positions.

    Args:
        prompts: B prompts. A `StaticRunner` reads equal prompts only once.
        rows: B rows of tokens after the prompts, all of the same length, at least 1.
        width: the number of tokens of each row that a pass reads.
        first_kept: the number of positions that are yielded of the first pass after the prompts, if it is less than
            `width`. The next pass reads the remaining positions again, so that each later token is at another place in
            its pass than it would be otherwise. None to yield all positions.
    """
    num_slots = max(map(len, prompts)) + len(rows[0]) + width
    # Each prompt is read alone if the runner can, because its numbers would be rounded differently in a batch with
    # other prompts.
    begun = runner.start(prompts, num_slots, alone=True)
    logits = begun.logits.unsqueeze(1)
    upcoming = torch.tensor(rows, dtype=torch.long, device=logits.device)
    yield Step(logits, begun.hidden), upcoming[:, :1]
    num_read = 0
    lengths = list(map(len, prompts))
    while num_read < upcoming.shape[1] - 1:
        tokens = upcoming[:, num_read:-1][:, :width]
        num_kept = tokens.shape[1]
        if num_read == 0 and first_kept is not None:
            num_kept = min(num_kept, first_kept)
        step = runner.extend(tokens, [length + num_read for length in lengths])
        hidden = None if step.hidden is None else step.hidden[:, :num_kept]
        following = upcoming[:, num_read + 1 :][:, :num_kept]
        yield Step(step.logits[:, :num_kept], hidden), following
        num_read += num_kept


def open_reference(
    pair: Pair, preparation: Preparation, never_drawn: Collection[int] = ()
) -> ModelReference:
    """Return a reference for texts of another engine. It uses only the target of the loaded pair."""
    preparation = replace(preparation, runner="static")
    target_alone = replace(pair, draft=None, head=None, draft_settings=None)
    return ModelReference(open_runners(target_alone, preparation), never_drawn=never_drawn)


def loaded_weights(pair: Pair, reference: ModelReference) -> Weights:
    """Return the `Weights` of an engine that decodes with a loaded pair."""
    used = pair.devices
    return Weights(
        reference,
        devices.gpu_uuids(used),
        synchronize=partial(devices.synchronize, used),
        reset_peak_memory=partial(devices.reset_peak_memory, used),
        peak_memory_bytes=partial(devices.peak_memory_bytes, used),
    )


def not_finite(pair: Pair, role: str, token: str) -> RunError:
    """Return the error for logits that are nan or infinite.

    Args:
        role: the model that gave the logits, `model` or `draft`.
        token: the token that the logits are for, such as `new token 12`.
    """
    is_draft = role == "draft"
    loaded = pair.draft if is_draft and pair.draft is not None else pair.target
    name = loaded.settings.name
    if is_draft and pair.draft_settings is not None:
        name = pair.draft_settings.name
    held = str(loaded.dtype).removeprefix("torch.")
    what = f"{role}: {name} gives logits that are nan or infinite in {held}, at {token}"
    # float16 overflows first. bfloat16 has the range of float32, but rounds more. A draft that is not a model computes
    # in the target's dtype, so that the advice is about `model.dtype`.
    wider = {"float16": "bfloat16 or float32", "bfloat16": "float32"}.get(held)
    if wider is None:
        return RunError(f"{what}; check its weights")
    setting = "model.dtype" if loaded is pair.target else "draft.dtype"
    return RunError(f"{what}; try {setting}={wider}, or check its weights")


def rounding_unit(logits: Floats, epsilon: float) -> Floats:
    """Return the distance from each logit's absolute value to the next larger number of a dtype with this epsilon."""
    _, exponents = np.frexp(np.abs(logits))
    return np.asarray(epsilon * 2.0 ** (exponents - 1))


@contextmanager
def changed_embeddings(model: Any) -> Iterator[None]:
    """While the block is executed, change the model's embeddings at random. The relative change is at most the epsilon
    of their dtype, before the result is rounded to this dtype. Blocks with the same passes make the same changes.
    """
    generator = torch.Generator().manual_seed(0)

    def change(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=generator).to(output.device)
        epsilon = torch.finfo(output.dtype).eps
        changed = output.float() * (1 + epsilon * (2 * noise - 1))
        return changed.to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()
