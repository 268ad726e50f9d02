"""Draft models: token by token, or all tokens in one pass.

Early exit is the first layers of the target, with its
norm and head, as a separate model that shares all weights. Nothing is trained for it, as in Draft &
Verify (Zhang et al. 2023, arXiv:2309.08168); LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710)
trains models so that early layers predict well.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from harness.config.errors import SettingError
from harness.config.settings import DraftSettings, ModelSettings
from harness.local.decoding.iteration import filled_up, read
from harness.local.decoding.protocols import Proposal, Runner, Step, TensorDrafter, TokenRows
from harness.local.decoding.randomness import existing_index
from harness.local.decoding.state import RowState
from harness.local.decoding.transfer import to_device
from harness.local.decoding.warp import AnyWarp
from harness.local.models.checkpoints import Checkpoint
from harness.local.models.sketch import Block, Sketch, sketch_model
from harness.local.runners.base import gather_rows
from harness.local.runners.compiled import Part

# Where a configuration names the mask of a parallel draft, in the order in which vLLM looks for it.
_MASK_KEYS = ("pard_token", "ptd_token_id")

# Fields of configurations (Gemma 3n, Gemma 4) that fix the number of layers: the last ones take keys and values of
# earlier ones, and each layer has its part of an input that is computed for all.
_DEPTH_FIELDS = ("num_kv_shared_layers", "hidden_size_per_layer_input")


class ModelDrafter(TensorDrafter):
    """Proposes by running a draft model, token by token.

    The runner's cache lacks the last two tokens of each row, its tail, with which every proposal begins. Say the text
    ends with `a x`, and b, c and d are drawn: `a x` and b and c were fed, but never d itself. Whatever is accepted,
    the cache then keeps one token more than that, and lacks the last two again:

        accepted b, then y         the cache has `a x`, and lacks `b y`
        accepted b, c, d, then y   the cache has `a x b c`, and lacks `d y`

    Args:
        runner: of the draft model.
        warp: also applied to the target's logits.
    """

    layers = ()

    def __init__(self, runner: Runner, warp: AnyWarp) -> None:
        self.runner = runner
        self.warp = warp
        self.draw = Part(functools.partial(draw_token, warp), lambda: warp.kind)
        self._has_rows = False

    def clear(self) -> None:
        self._has_rows = False

    def zero_nan(self) -> None:
        self.runner.zero_nan()

    def add(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        read_prompts = self.runner.add if self._has_rows else self.runner.start
        self._device = read_prompts([prompt[:-1] for prompt in prompts]).logits.device
        self._has_rows = True

    def draft(self, rows: RowState, uniforms: Tensor) -> Proposal:
        tokens = rows.tail.to(self._device)
        offset = -1
        drawn: list[Tensor] = []
        distributions: list[Tensor] = []
        for numbers in uniforms.to(self._device).split(1, dim=1):
            step = read(self.runner, rows, tokens, offset)
            offset += tokens.shape[1]
            tokens, probabilities = self.draw(step.logits, numbers)
            drawn.append(tokens)
            distributions.append(probabilities)
        device = rows.tail.device
        # Proposals are returned on the target's device.
        return Proposal(torch.cat(drawn, 1).to(device), torch.stack(distributions, 1).to(device))

    def keep(self, counts: Sequence[int]) -> None:
        self.runner.keep(counts)

    def select(self, rows: Sequence[int]) -> None:
        self.runner.select(rows)


def draw_token(warp: AnyWarp, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token [B, 1] after the last of logits [B, n, V], with uniforms [B, 1]; and the distribution [B, V]."""
    probabilities = warp(logits[:, -1])
    return existing_index(probabilities, uniforms), probabilities


class ParallelDrafter(ModelDrafter):
    """Proposes by one pass of a parallel draft model (PARD, An et al. 2025, arXiv:2504.18583).

    It was trained with a mask token in place of tokens that are not known yet. For K = 3 it reads the
    text `a b` and two masks, and predicts the next three tokens after b, after the first mask and
    after the second. Each is drawn without knowing the others.

    The cache lacks the tokens that the last verdict decided. They are read with the masks, which the next tokens
    overwrite.

    Args:
        mask: stands for a token that is not known yet.
    """

    def __init__(self, runner: Runner, warp: AnyWarp, mask: int) -> None:
        super().__init__(runner, warp)
        self._mask = mask
        # [B, n], of which the first `_counts` [B] of each row are unread; the same counts on the host.
        self._unread = torch.zeros(0, 1, dtype=torch.long)
        self._counts = torch.ones(0, dtype=torch.long)
        self._prepared = (self._unread, self._counts)
        self._num_unread: list[int] = []

    def prepare(
        self, num_rows: int, num_draft_tokens: int, num_slots: int, device: torch.device
    ) -> None:
        self._device = device
        self._make_room(num_rows, num_draft_tokens + 1)
        self._prepared = (self._unread, self._counts)

    def clear(self) -> None:
        super().clear()
        self._unread, self._counts = self._prepared
        self._num_unread = []

    def add(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        read_prompts = self.runner.add if self._has_rows else self.runner.start
        self._device = read_prompts(prompts).logits.device
        self._has_rows = True
        first = len(self._num_unread)
        self._num_unread += [1] * len(prompts)
        self._make_room(len(self._num_unread), 1)
        self._unread[first : len(self._num_unread), 0] = to_device(first_tokens, self._device)
        self._counts[first : len(self._num_unread)] = 1

    def draft(self, rows: RowState, uniforms: Tensor) -> Proposal:
        uniforms = uniforms.to(self._device)
        num_rows, num_draft_tokens = uniforms.shape
        width = self._unread.shape[1] if rows.is_fixed else max(self._num_unread)
        counts = self._counts[:num_rows].unsqueeze(1)
        masks = counts.new_full((num_rows, num_draft_tokens - 1), self._mask)
        tokens = torch.cat([self._unread[:num_rows, :width], masks], 1)
        places = torch.arange(tokens.shape[1], device=self._device)
        tokens = tokens.where(places < counts, self._mask)
        logits = read(self.runner, rows, tokens, 1 - self._counts[:num_rows]).logits
        ahead = torch.arange(num_draft_tokens, device=self._device)
        probabilities = self.warp(gather_rows(logits, counts - 1 + ahead))
        drawn = existing_index(probabilities, uniforms)
        device = rows.tail.device
        return Proposal(drawn.to(device), probabilities.to(device))

    def learn(
        self, rows: RowState, num_accepted: Tensor, decided: Tensor, hidden: Tensor | None
    ) -> None:
        num_rows, width = decided.shape
        self._make_room(num_rows, width)
        self._unread[:num_rows, :width] = decided
        # A row that only fills the batch up reads a token, too.
        self._counts[:num_rows] = ((num_accepted + 1) * rows.running).clamp(min=1)

    def keep(self, counts: Sequence[int]) -> None:
        self.runner.keep(self._num_unread)
        self._num_unread = list(counts)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._num_unread = [self._num_unread[row] for row in rows]
        index = to_device(rows, self._device)
        for tensor in (self._unread, self._counts):
            tensor[: len(rows)] = tensor[index]

    def _make_room(self, num_rows: int, width: int) -> None:
        present_rows, present_width = self._unread.shape
        if num_rows > present_rows or width > present_width:
            num_rows, width = max(num_rows, present_rows), max(width, present_width)
            self._unread = filled_up(self._unread.to(self._device), num_rows, width)
            self._counts = filled_up(self._counts.to(self._device), num_rows)


def widths(config: PreTrainedConfig, num_draft_tokens: int) -> list[int]:
    """Return the widths of a draft model's passes, in tokens, over fixed rows.

    A parallel draft reads up to K + 1 decided tokens with K - 1 masks.
    """
    return [1, 2] if mask_token(config) is None else [max(1, 2 * num_draft_tokens)]


def mask_token(config: PreTrainedConfig) -> int | None:
    """Return the mask that a draft model was trained with; None if it drafts token by token."""
    for key in _MASK_KEYS:
        token = getattr(config, key, None)
        if token is not None:
            return token
    return None


# Early exit ------------------------------------------------------------------------------------------


def truncated_config(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """Return the configuration of the first `num_layers` layers.

    Raises:
        SettingError: if the model has no more layers than that, or cannot be shortened.
    """
    text_config = config.get_text_config(decoder=True)
    total = text_config.num_hidden_layers
    if not 1 <= num_layers < total:
        rule = f"must be at least 1 and below the target's number of layers, {total}"
        raise SettingError("draft.layers", rule, num_layers)
    for name in _DEPTH_FIELDS:
        if getattr(text_config, name, None):
            rule = f"early_exit cannot shorten {config.model_type}, whose later layers depend on their number ({name})"
            raise SettingError("draft", rule)
    kinds = getattr(text_config, "layer_types", None)
    shorter = copy.deepcopy(config)
    shorter_text: Any = shorter.get_text_config(decoder=True)  # `shorter`, or a part of it
    try:
        shorter_text.num_hidden_layers = num_layers
        # Some configurations compute this list from other fields: it may be right already.
        if kinds is not None and list(shorter_text.layer_types) != list(kinds[:num_layers]):
            shorter_text.layer_types = kinds[:num_layers]
    except AttributeError as error:
        rule = f"early_exit cannot shorten the configuration of {config.model_type}"
        raise SettingError("draft", rule) from error
    return shorter


def shared_sketch(checkpoint: Checkpoint, draft: DraftSettings, dtype: torch.dtype) -> Sketch:
    """Return the sizes of a draft that shares the target's weights.

    It holds only its caches, and reads the weights of the target (`borrowed_tensors`).

    Args:
        checkpoint: the target, or its first layers.
    """
    whole = sketch_model(checkpoint, dtype)
    caches = tuple(cache for block in whole.blocks for cache in block.caches)
    # "" is the whole model: its caches are one piece, on one device.
    cache_block = Block(modules=("",), tensors=(), caches=caches)
    return dataclasses.replace(
        whole,
        role="draft",
        settings=ModelSettings(name=draft.name, repository=checkpoint.settings.repository),
        blocks=(cache_block,),
        num_parameters=0,
        borrowed_tensors=tuple(whole.tensors),
    )


def truncated(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Return a model of the first `num_layers` layers of another, with its norm and its head.

    The two share their modules, and the original stays as it is. Only one of them may return hidden
    states: transformers' hooks for these are on the shared layers, and each model would add its own.

    Raises:
        SettingError: the model's list of layers is not found.
    """
    config = truncated_config(model.config, num_layers)
    *attributes, name = _path_to_layers(model)
    shorter = parent = _copied(model, config)
    for attribute in attributes:
        child = _copied(parent.get_submodule(attribute), config)
        setattr(parent, attribute, child)
        parent = child
    layers = parent.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    setattr(parent, name, layers[:num_layers])
    return shorter


def _path_to_layers(model: PreTrainedModel) -> list[str]:
    """Return the attribute names that lead to the list of decoder layers: ["model", "layers"].

    It is the only module list with one entry per layer. Lists inside such a list do not count.
    """
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    paths: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in paths)
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and not inside:
            paths.append(name)
    if len(paths) != 1:
        name = type(model).__name__
        rule = f"early_exit needs a model with one list of layers; {name} has {len(paths)}"
        raise SettingError("draft", rule)
    return paths[0].split(".")


def _copied(module: Any, config: PreTrainedConfig) -> Any:
    """Copy a module so that replacing a child or the configuration leaves the original as it is.

    Args:
        config: of the whole model. A module that handles text alone gets its part for text.
    """
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    text_config = config.get_text_config(decoder=True)
    handles_text = type(getattr(module, "config", None)) is type(text_config)
    twin.config = text_config if handles_text else config
    hook = twin.__dict__.pop("_hf_hook", None)
    if hook is not None:
        # accelerate has replaced `forward` by a method of the original.
        from accelerate.hooks import add_hook_to_module

        del twin.__dict__["forward"], twin.__dict__["_old_forward"]
        add_hook_to_module(twin, hook)
    return twin
