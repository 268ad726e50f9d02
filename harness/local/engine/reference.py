"""Exact logits of a loaded pair, which `recovery` and `latency` check an engine's texts against, and how far equal
computations of them are apart on the model at hand.

Texts that our own loop decoded are read by the passes that verified them: other kernels round differently, which would
look like a loss. Those of another engine are read by eager passes, and how far its kernels may be apart is seen with
embeddings that are changed by at most the epsilon of their format, after which every later operation rounds
differently.

Where two greedy texts part, `margin` computes the last positions by further routes that would be equal without
rounding: alone and in a batch, with and without a cache, one token at a time and several.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from harness.config.errors import RunError
from harness.config.settings import DecodingSettings
from harness.engines.divergence import margin_deviation
from harness.engines.door.reference import KernelDeviations, Margin
from harness.engines.protocol import Weights, in_batches
from harness.engines.record import Preparation
from harness.local.decoding.protocols import Runner, Step, TokenRows
from harness.local.decoding.transfer import padded
from harness.local.drafting.method import Pair
from harness.local.drafting.on_host import on_host
from harness.local.engine.runners import PairRunners, open_runners, warp_of
from harness.local.models import devices
from harness.local.runners.base import Options
from harness.local.runners.checks import plain_outputs
from harness.results.statistics.arrays import Floats

# Tokens of each row that are read at once where another engine decodes: the logits of 8 rows of 128,000 outputs take
# 0.3 GB in float32.
_WIDEST = 64

# Positions at the end of a text, and rows of a batch of them: few, because contexts may be long.
NUM_POSITIONS = 4
_NUM_ROWS = 2
# Tokens behind the cache: one, as regular decoding has, and several, as a verification has.
_CACHED = (1, 5)
# Margins between the likeliest token and each of the next ones.
_NUM_LIKELY = 8
# Standard deviations. Texts part where rounding is largest among all their tokens, thousands in a
# run; of normal errors one of two million is larger.
_NUM_DEVIATIONS = 5.0

# `ModelReference.logits`: (prompts, continuations=None) -> [B, V].
Logits = Callable[..., Tensor]


class ModelReference:
    """A `Reference` over runners of a loaded pair. Each call begins a new batch on them.

    Args:
        verification_width: the tokens of each row in a pass that verifies, where these runners decode the texts; None
            where another engine does.
        num_rows: of such a pass.
        never_drawn: tokens that the engine under test never draws: their logits are minus infinity.
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
        target = self._pair.target

        # [R, P, V] by R routes, position 0 after the whole text.
        logits = recompute(self.logits, target.model, token_ids)
        epsilon = torch.finfo(target.dtype).eps
        differences = logits[:, 0, wanted] - logits[:, 0, other]
        tolerance = largest_rounding(logits, (wanted, other), epsilon)
        return Margin(float(differences.mean()), tolerance)

    def logits(self, prompts: TokenRows, continuations: TokenRows | None = None) -> Tensor:
        """Logits [B, V] after prompts, or after continuations of equal lengths, which are read behind their cache."""
        rows = continuations or [[] for _ in prompts]
        # Any token ends each text: what comes before it is wanted.
        along = self.logits_along(prompts, [[*row, 0] for row in rows])
        return torch.from_numpy(along[:, -1])

    def _mask_never_drawn(self, logits: Tensor) -> Tensor:
        """Logits [..., V] in float32, without the tokens that are never drawn."""
        never_drawn = torch.tensor(self._never_drawn, dtype=torch.long, device=logits.device)
        return logits.float().index_fill(-1, never_drawn, float("-inf"))

    def logits_along(self, prompts: TokenRows, texts: TokenRows) -> Floats:
        return self._logits_along(prompts, texts, self._verification_width or _WIDEST)

    def logits_by_another_route(self, prompt: Sequence[int], text: Sequence[int]) -> Floats:
        width = self._verification_width
        if width is None:
            return self._eager_logits(prompt, text, is_changed=True)
        # Beside other texts, and with another place of each token in its pass.
        texts = [text[::-1]] * (self._num_rows - 1) + [text]
        prompts = [prompt] * self._num_rows
        return self._logits_along(prompts, texts, width, first_kept=(width + 1) // 2)[-1]

    def kernel_deviations(
        self, prompt: Sequence[int], text: Sequence[int], logits: Floats
    ) -> KernelDeviations | None:
        # In 8 bits the columns that are not quantized, the outliers, depend on the other rows of a pass.
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
        """The model's own logits [n, V] before each token of a text, from one pass without a cache."""
        model = self._pair.target.model
        options: Options = {"vocabulary_size": self._pair.vocabulary_size}
        with _changed_embeddings(model) if is_changed else nullcontext():
            [logits] = plain_outputs(model, options, [*prompt, *text[:-1]], len(text))
        return self._mask_never_drawn(logits).cpu().numpy()

    @torch.inference_mode()
    def _logits_along(
        self, prompts: TokenRows, texts: TokenRows, width: int, first_kept: int | None = None
    ) -> Floats:
        """Logits [B, n, V] before each token of the longest text, as `steps_along` reads them."""
        target = self._runners.target
        pieces = []
        for step, _ in steps_along(target, prompts, padded(texts), width, first_kept):
            pieces.append(self._mask_never_drawn(step.logits).cpu())
        logits = torch.cat(pieces, dim=1)
        finite = logits.amax(-1).isfinite().tolist()
        for are_finite, prompt, text in zip(finite, prompts, texts, strict=True):
            # What follows a shorter text only fills its row up.
            if not all(are_finite[: len(text)]):
                target.zero_nan()  # the next batch takes these slots over
                place = f"token {len(prompt) + are_finite.index(False)} of prompt and text"
                raise not_finite(self._pair, "model", place)
        return logits.numpy()

    def first_proposals(
        self,
        prompts: TokenRows,
        first_tokens: Sequence[int],
        decoding: DecodingSettings,
    ) -> tuple[Floats, Floats] | None:
        if self._pair.draft_settings is None:
            return None
        with torch.inference_mode():
            drafter = on_host(self._runners.drafter(warp_of(decoding)))
            drafter.start(prompts, first_tokens, self._runners.target.start(prompts))
            uniforms = torch.zeros(len(prompts), 1, device=self._pair.target.input_device)
            probabilities = drafter.propose(1, uniforms).probabilities
            if probabilities is None:
                return None
            tokens = torch.tensor(first_tokens, device=uniforms.device).unsqueeze(1)
            logits = self._mask_never_drawn(self._runners.target.extend(tokens).logits[:, -1])
        return logits.cpu().numpy(), probabilities[:, 0].float().cpu().numpy()

    def close(self) -> None:
        """Give back the memory of the runners."""
        self._runners.close()


def steps_along(
    runner: Runner,
    prompts: TokenRows,
    rows: TokenRows,
    width: int,
    first_kept: int | None = None,
) -> Iterator[tuple[Step, Tensor]]:
    """Read texts in a new batch: prompts, of which equal ones are read once, and rows of one length
    behind them, but the last token of each.

    Yields steps with logits [B, n, V], and the tokens [B, n] that follow each of their n positions: n=1
    behind the prompts, then `width`, and what is left.

    Args:
        first_kept: tokens of the first pass that are kept, fewer than its width; the others are read again.
    """
    distinct = list(dict.fromkeys(map(tuple, prompts)))
    # Each is read alone: beside others its numbers would be rounded otherwise.
    read = [runner.start(distinct[:1]), *[runner.add([prompt]) for prompt in distinct[1:]]]
    indices = [distinct.index(tuple(prompt)) for prompt in prompts]
    runner.select(indices)
    logits = torch.cat([step.logits for step in read])[indices].unsqueeze(1)
    states = [step.hidden[0] for step in read if step.hidden is not None]
    hidden = None
    if states:
        hidden = pad_sequence(states, batch_first=True, padding_side="left")[indices]
    upcoming = torch.tensor(rows, dtype=torch.long, device=logits.device)
    yield Step(logits, hidden), upcoming[:, :1]
    num_read = 0
    while num_read < upcoming.shape[1] - 1:
        tokens = upcoming[:, num_read:-1][:, :width]
        num_kept = tokens.shape[1]
        if num_read == 0 and first_kept is not None:
            num_kept = min(num_kept, first_kept)
        step = runner.extend(tokens)
        hidden = None if step.hidden is None else step.hidden[:, :num_kept]
        following = upcoming[:, num_read + 1 :][:, :num_kept]
        yield Step(step.logits[:, :num_kept], hidden), following
        runner.keep([num_kept] * len(rows))
        num_read += num_kept


def open_reference(
    pair: Pair, preparation: Preparation, never_drawn: Collection[int] = ()
) -> ModelReference:
    """A reference over the target of a loaded pair, with an eager runner: a draft of another engine needs none."""
    preparation = replace(preparation, runner="eager")
    target_alone = replace(pair, draft=None, head=None, draft_settings=None)
    return ModelReference(open_runners(target_alone, preparation), never_drawn=never_drawn)


def loaded_weights(pair: Pair, reference: ModelReference) -> Weights:
    """The weights of an engine over a loaded pair."""
    used = pair.devices
    return Weights(
        reference,
        devices.gpu_uuids(used),
        synchronize=partial(devices.synchronize, used),
        reset_peak_memory=partial(devices.reset_peak_memory, used),
        peak_memory_bytes=partial(devices.peak_memory_bytes, used),
    )


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
    # float16 overflows first; bfloat16 has float32's range, but rounds more. A draft that is no model computes in the
    # target's format.
    wider = {"float16": "bfloat16 or float32", "bfloat16": "float32"}.get(held)
    if wider is None:
        return RunError(f"{what}; check its weights")
    setting = "model.dtype" if loaded is pair.target else "draft.dtype"
    return RunError(f"{what}; try {setting}={wider}, or check its weights")


def recompute(logits: Logits, model: nn.Module, token_ids: Sequence[int]) -> Tensor:
    """Logits [R, P, V] after the last P positions of a text, the last one first, by R routes.

    Args:
        logits: `ModelReference.logits` of the model.
    """
    length = len(token_ids)
    has_cached_routes = length > max(_CACHED)
    # A cached route needs a token for the cache before its continuation.
    shortest = max(_CACHED) + 1 if has_cached_routes else 1
    num_positions = min(NUM_POSITIONS, length - shortest + 1)
    texts = [token_ids[: length - index] for index in range(num_positions)]
    alone = torch.cat([logits([text]) for text in texts])
    routes = [alone, _batched(logits, texts)]
    if has_cached_routes:
        for number in _CACHED:
            # The last tokens of each text are read behind the cached others.
            outputs = []
            for batch in in_batches(texts, _NUM_ROWS):
                beginnings = [text[:-number] for text in batch]
                ends = [text[-number:] for text in batch]
                outputs.append(logits(beginnings, ends))
            routes.append(torch.cat(outputs))
    with _changed_embeddings(model):
        routes.append(_batched(logits, texts))
    return torch.stack(routes)


def largest_rounding(logits: Tensor, tokens: Sequence[int], epsilon: float) -> float:
    """The largest margin between two tokens that rounding explains after the whole text.

    Args:
        logits: [R, P, V] as `recompute` returns them; position 0 is after the whole text.
        tokens: those two.
        epsilon: of the format that the logits were computed in.
    """
    num_routes, _, vocabulary_size = logits.shape
    num_likely = min(_NUM_LIKELY, vocabulary_size)
    likely = logits.mean(0).topk(num_likely, -1).indices
    values = logits.gather(-1, likely.expand(num_routes, -1, -1))
    margins = values[..., :1] - values[..., 1:]
    deviation = float(margins.var(0).mean().sqrt())
    # Even exact logits are rounded: two logits in two texts, by half a unit each.
    largest = logits[:, 0, list(tokens)].abs().max().float().numpy()
    return max(_NUM_DEVIATIONS * deviation, 2 * float(rounding_unit(largest, epsilon)))


def rounding_unit(logits: Floats, epsilon: float) -> Floats:
    """The distance of each logit from the next number of its format."""
    _, exponents = np.frexp(np.abs(logits))
    return np.asarray(epsilon * 2.0 ** (exponents - 1))


def _batched(logits: Logits, texts: TokenRows) -> Tensor:
    return torch.cat([logits(batch) for batch in in_batches(texts, _NUM_ROWS)])


@contextmanager
def _changed_embeddings(model: Any) -> Iterator[None]:
    """Change what the model reads at random, by at most the epsilon of its format, relatively."""
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
