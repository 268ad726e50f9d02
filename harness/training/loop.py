"""The training loop. All of a step follows from its number, so a run that was killed goes on as it would have."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.drafting.lesson import Lesson
from harness.training.losses import lesson, loss_of


class DamagedStateError(RuntimeError):
    """A file that training cannot go on from."""


# Of lessons, in host memory: each saves the target a pass in every later epoch.
KEPT_BYTES = 2 << 30


@dataclass(frozen=True)
class Text:
    """A prompt with the target's answer; the target's distributions over the answer are what is learned."""

    tokens: Sequence[int]
    prompt_length: int


@dataclass(frozen=True)
class Course:
    """How a draft is trained; see `DistillSettings`."""

    epochs: int
    batch_size: int
    learning_rate: float
    chain: int
    seed: int

    def num_steps(self, num_texts: int) -> int:
        """Batches in all epochs."""
        return self.epochs * math.ceil(num_texts / self.batch_size)

    def batch(self, texts: Sequence[Text], number: int) -> list[Text]:
        """The texts of batch `number`, drawn once."""
        order = self._order(len(texts), 0)
        return [texts[index] for index in order[number * self.batch_size :][: self.batch_size]]

    def number(self, num_texts: int, step: int) -> int:
        """Which batch a step learns; each epoch has its own order."""
        epoch, place = divmod(step, per_epoch := math.ceil(num_texts / self.batch_size))
        return self._order(per_epoch, epoch + 1)[place]

    def _order(self, size: int, stream: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + stream)
        return torch.randperm(size, generator=generator).tolist()

    def rate(self, step: int, num_steps: int) -> float:
        """Warms up over 3 % of the steps and falls to a tenth as a cosine."""
        warm_up = max(1, num_steps * 3 // 100)
        fallen = 0.55 + 0.45 * math.cos(math.pi * step / num_steps)
        return self.learning_rate * min((step + 1) / warm_up, fallen)


def train(
    module: Any,
    target: PreTrainedModel,
    texts: Sequence[Text],
    course: Course,
    checkpoint: Path,
    *,
    vocabulary_size: int,
    save_every: int = 100,
    advance: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """Train a head or a draft model, in float32 and in place; gives the loss of each step.

    Args:
        checkpoint: a file that holds the state every `save_every` steps; where it exists, training goes on from it.
            Raises DamagedStateError where it cannot.
        vocabulary_size: that both models share.
        advance: called with the loss after each step, and once for each step that the checkpoint has already.
    """
    embedding: Any = target.get_input_embeddings()
    device: torch.device = embedding.weight.device
    layers = module.config.layers if hasattr(module, "drafter") else ()
    cast(module.train().requires_grad_(True), torch.float32)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.01)
    loss_function = loss_of(module, target, course.chain)
    num_steps, first = course.num_steps(len(texts)), 0
    losses: list[float] = []
    if checkpoint.exists():
        first, losses = _restored(checkpoint, module, optimizer, device)
        for earlier in losses:
            advance(earlier)
    kept: dict[int, Lesson] = {}
    room = KEPT_BYTES
    for step in range(first, num_steps):
        torch.manual_seed(course.seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = course.rate(step, num_steps)
        number = course.number(len(texts), step)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            if (given := kept.get(number)) is None:
                tokens, counts = _padded(course.batch(texts, number), device)
                given = lesson(target, tokens, counts, layers, vocabulary_size)
                if (room := room - given.num_bytes) >= 0:
                    kept[number] = given.to("cpu")
            loss = loss_function(given.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        advance(losses[-1])
        if (step + 1) % save_every == 0 or step + 1 == num_steps:
            state = {"step": step + 1, "losses": losses}
            state |= {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
            save_whole(state, checkpoint)
    module.eval().requires_grad_(False)
    return losses


def _restored(
    checkpoint: Path, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[int, list[float]]:
    """Put a saved state in place -> the steps done, and their losses. Raises DamagedStateError."""
    try:
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"]), [float(loss) for loss in state["losses"]]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a file may be damaged in any way
        raise DamagedStateError(str(checkpoint)) from error


def cast(module: nn.Module, *dtypes: torch.dtype) -> None:
    """Convert the weights, through each of the formats in turn; tables of positions and the like stay as they are."""
    for parameter in module.parameters():
        for dtype in dtypes:
            parameter.data = parameter.data.to(dtype)


def save_whole(state: object, path: Path) -> None:
    """`torch.save` that a kill cannot leave half done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def _padded(texts: Sequence[Text], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [B, n] and where the target's distributions count [B, n]."""
    width = max(len(text.tokens) for text in texts)
    tokens = [[*text.tokens, *[0] * (width - len(text.tokens))] for text in texts]
    index = torch.arange(width)
    counts = [(index >= text.prompt_length - 1) & (index < len(text.tokens) - 1) for text in texts]
    return torch.tensor(tokens, device=device), torch.stack(counts).to(device)
