"""The training loop of `distill`: a head or a draft model learns from texts that its target wrote.

All that is random in a step follows from the seed and the step's number, so a run that was killed
goes on from its checkpoint as it would have.
"""

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

from harness.drafting.heads.blocks import Head
from harness.drafting.heads.training_batch import TrainingBatch
from harness.drafting.losses import loss_of, training_batch


class DamagedStateError(RuntimeError):
    """A file from which training cannot go on."""


# Host memory for the target's outputs over batches: a batch that is kept is not read again by the
# target in later epochs.
KEPT_BYTES = 2 << 30

# Steps and epochs draw from generators whose seeds are this far apart for neighbouring seeds.
_SEED_DISTANCE = 1_000_003


@dataclass(frozen=True)
class TrainingText:
    """A prompt with the target's answer. The target's distributions over the answer are learned.

    Attributes:
        tokens: of the prompt and the answer.
        prompt_length: how many of them are the prompt's.
    """

    tokens: Sequence[int]
    prompt_length: int


@dataclass(frozen=True)
class Course:
    """How a draft is trained.

    Attributes:
        epochs: how often each text is learned.
        batch_size: texts of a step.
        learning_rate: the highest; see `rate`.
        chain: how many tokens ahead a head is trained to draft.
        seed: of the orders, and of all that a step draws.

    Texts are put into batches once. Each epoch takes all batches in an order of its own: with 10
    texts and batches of 4 an epoch has 3 steps, and step 4 is the second of the second epoch.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    chain: int
    seed: int

    def num_batches(self, num_texts: int) -> int:
        """Return the batches of an epoch."""
        return math.ceil(num_texts / self.batch_size)

    def num_steps(self, num_texts: int) -> int:
        """Return the steps of all epochs, one for each batch."""
        return self.epochs * self.num_batches(num_texts)

    def batch(self, texts: Sequence[TrainingText], number: int) -> list[TrainingText]:
        """Return the texts of the batch with this number, the same in every epoch."""
        order = self._order(len(texts), stream=0)
        first = number * self.batch_size
        return [texts[index] for index in order[first : first + self.batch_size]]

    def number(self, num_texts: int, step: int) -> int:
        """Return the number of the batch that a step takes."""
        num_batches = self.num_batches(num_texts)
        epoch, place = divmod(step, num_batches)
        return self._order(num_batches, stream=epoch + 1)[place]

    def rate(self, step: int, num_steps: int) -> float:
        """Return the learning rate of a step: it rises over the first 3 % of the steps, and falls
        to a tenth as a cosine.
        """
        warm_up = max(1, num_steps * 3 // 100)
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / num_steps)
        return self.learning_rate * min((step + 1) / warm_up, cosine)

    def _order(self, size: int, stream: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * _SEED_DISTANCE + stream)
        return torch.randperm(size, generator=generator).tolist()


def train(
    module: Any,
    target: PreTrainedModel,
    texts: Sequence[TrainingText],
    course: Course,
    checkpoint: Path,
    *,
    vocabulary_size: int,
    save_every: int = 100,
    advance: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """Train a head or a draft model, in float32 and in place, and return the loss of each step.

    Args:
        checkpoint: file for the state, written every `save_every` steps. If it exists, training
            goes on from it.
        vocabulary_size: number of tokens that both models share; the target's distributions are
            cut to it.
        advance: called with the loss of each step, first of those that the checkpoint has.

    Raises:
        DamagedStateError: a checkpoint from which training cannot go on.
    """
    embedding: Any = target.get_input_embeddings()
    device: torch.device = embedding.weight.device
    layers = module.config.layers if isinstance(module, Head) else ()
    cast(module.train().requires_grad_(True), torch.float32)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.01)
    losses = _restore(checkpoint, module, optimizer, device)
    for past_loss in losses:
        advance(past_loss)
    loss_function = loss_of(module, target, course.chain)
    kept: dict[int, TrainingBatch] = {}  # batches on the host, by number
    room = KEPT_BYTES
    num_steps = course.num_steps(len(texts))
    for step in range(len(losses), num_steps):
        torch.manual_seed(course.seed * _SEED_DISTANCE + step)
        for group in optimizer.param_groups:
            group["lr"] = course.rate(step, num_steps)
        number = course.number(len(texts), step)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            batch = kept.get(number)
            if batch is None:
                tokens, is_learned = _padded(course.batch(texts, number), device)
                batch = training_batch(target, tokens, is_learned, layers, vocabulary_size)
                room -= batch.num_bytes
                if room >= 0:
                    kept[number] = batch.to("cpu")
            loss = loss_function(batch.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        advance(losses[-1])
        if (step + 1) % save_every == 0 or step + 1 == num_steps:
            state = {
                "losses": losses,
                "module": module.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            save_whole(state, checkpoint)
    module.eval().requires_grad_(False)
    return losses


def _restore(
    checkpoint: Path, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> list[float]:
    """Load a saved state if there is one, and return the losses of its steps. Raises
    DamagedStateError.
    """
    if not checkpoint.exists():
        return []
    try:
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        return [float(loss) for loss in state["losses"]]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a file may be damaged in any way
        raise DamagedStateError(str(checkpoint)) from error


def cast(module: nn.Module, *dtypes: torch.dtype) -> None:
    """Convert the parameters to a format, or to several in turn: bfloat16 and then float32 are the
    rounded numbers in float32. Buffers stay as they are.
    """
    for parameter in module.parameters():
        for dtype in dtypes:
            parameter.data = parameter.data.to(dtype)


def save_whole(state: object, path: Path) -> None:
    """Save as `torch.save` does, whole or not at all, whatever kills or full disks do.

    Raises:
        OSError: when the file cannot be written; an old one is then unharmed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
        os.replace(partial, path)
    except RuntimeError as error:
        # torch reports where its writer stopped, but not why.
        cause = error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def _padded(texts: Sequence[TrainingText], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens [B, n], and whether the target's distribution after each is learned [B, n].

    A prompt of 3 tokens with an answer of 2 learns what follows its tokens 2 and 3, counted from 0:
    the answer's two tokens.
    """
    width = max(len(text.tokens) for text in texts)
    tokens = torch.zeros(len(texts), width, dtype=torch.long)
    is_learned = torch.zeros(len(texts), width, dtype=torch.bool)
    for row, text in enumerate(texts):
        length = len(text.tokens)
        tokens[row, :length] = torch.tensor(text.tokens)
        is_learned[row, text.prompt_length - 1 : length - 1] = True
    return tokens.to(device), is_learned.to(device)
