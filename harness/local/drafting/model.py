"""Draft models: token by token, or all tokens in one pass.

Early exit is the first layers of the target, with its
norm and head, as a separate model that shares all weights. Nothing is trained for it, as in Draft &
Verify (Zhang et al. 2023, arXiv:2309.08168); LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710)
trains models so that early layers predict well.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from harness.config.errors import SettingError
from harness.config.settings import DraftSettings, ModelSettings
from harness.local.decoding.protocols import Drafter, Proposal, Runner, Step, TokenRows
from harness.local.decoding.randomness import draw, existing_index
from harness.local.decoding.transfer import padded, to_device
from harness.local.decoding.warp import AnyWarp
from harness.local.models.checkpoints import Checkpoint
from harness.local.models.sketch import Block, Sketch, sketch_model
from harness.local.runners.base import gather_rows

# Where a configuration names the mask of a parallel draft, in the order in which vLLM looks for it.
_MASK_KEYS = ("pard_token", "ptd_token_id")

# Fields of configurations (Gemma 3n, Gemma 4) that fix the number of layers: the last ones take keys and values of
# earlier ones, and each layer has its part of an input that is computed for all.
_DEPTH_FIELDS = ("num_kv_shared_layers", "hidden_size_per_layer_input")


class ModelDrafter(Drafter):
    """Proposes by running a draft model, token by token.

    The runner's cache lacks the last tokens of each row's text, `_unread`, with which the next proposal
    begins; its verdict decides which tokens the cache lacks then. Say it was fed `a`, and drew b, c and d.
    To draw d it was fed b and c, but never d itself:

        accepted b, then x         the cache keeps `a b`, and lacks `x`
        accepted b, c, d, then x   the cache keeps `a b c`, and lacks `d x`

    To keep the batch rectangular, all rows lack two tokens as soon as one does. The other rows give a
    cached token back: the first row above then keeps `a`, and lacks `b x`. Tokens that were decided
    without a proposal are unread, too.

    Args:
        runner: of the draft model.
        warp: also applied to the target's logits.
    """

    layers = ()

    def __init__(self, runner: Runner, warp: AnyWarp) -> None:
        self.runner = runner
        self.warp = warp
        self._unread: list[Sequence[int]] = []
        # From a proposal to its verdict: how many unread tokens of each row were fed, and how many
        # draft tokens behind them.
        self._num_fed = 0
        self._num_drafted_fed = 0

    def clear(self) -> None:
        self._unread = []
        self._num_fed = 0

    def zero_nan(self) -> None:
        self.runner.zero_nan()

    def add(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        # Proposals are returned on the target's device.
        self._device = step.logits.device
        read = self.runner.add if self._unread else self.runner.start
        self._runner_device = read(prompts).logits.device
        self._unread += [[token] for token in first_tokens]

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        tokens, probabilities = self._draw(uniforms.to(self._runner_device))
        return Proposal(tokens.to(self._device), probabilities.to(self._device))

    def _draw(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Feed the unread tokens, and draw tokens [B, K] from distributions [B, K, V].

        Only the last one or two of each row are fed as drawing begins, because runners compile passes
        of these widths (`widths`); those before are fed in a separate pass.
        """
        num_last = min([2, *map(len, self._unread)])
        num_before = [len(tokens) - num_last for tokens in self._unread]
        if any(num_before):
            before = [tokens[:-num_last] for tokens in self._unread]
            self.runner.extend(to_device(padded(before), self._runner_device))
            self.runner.keep(num_before)
        self._unread = [tokens[-num_last:] for tokens in self._unread]
        # Column by column, because a column of one row costs half of a copied table.
        columns = [
            to_device(column, self._runner_device) for column in zip(*self._unread, strict=True)
        ]
        last = torch.stack(columns, dim=1)
        self._num_fed = num_last
        self._num_drafted_fed = uniforms.shape[1] - 1
        return draw(lambda tokens: self.runner.extend(tokens).logits, last, uniforms, self.warp)

    def observe(self, num_accepted: Sequence[int], decided: TokenRows, step: Step) -> None:
        rows = zip(self._unread, decided, strict=True)
        texts: list[Sequence[int]] = [[*unread, *tokens] for unread, tokens in rows]
        if self._num_fed:
            # How many of these tokens the cache keeps. All rows give tokens back until they lack as many as
            # the one that lacks most; more than two would not be fed together (`_draw`).
            counts = [self._num_fed + min(count, self._num_drafted_fed) for count in num_accepted]
            pairs = list(zip(texts, counts, strict=True))
            least_unread = min(2, max(len(text) - count for text, count in pairs))
            counts = [min(count, len(text) - least_unread) for text, count in pairs]
            self.runner.keep(counts)
            texts = [text[count:] for text, count in zip(texts, counts, strict=True)]
            self._num_fed = 0
        self._unread = texts

    def select(self, rows: Sequence[int]) -> None:
        self.runner.select(rows)
        self._unread = [self._unread[row] for row in rows]


class ParallelDrafter(ModelDrafter):
    """Proposes by one pass of a parallel draft model (PARD, An et al. 2025, arXiv:2504.18583).

    It was trained with a mask token in place of tokens that are not known yet. For K = 3 it reads the
    text `a b` and two masks, and predicts the next three tokens after b, after the first mask and
    after the second. Each is drawn without knowing the others.

    The masks are dropped from the cache at once, so that nothing has to be taken back after a verdict.

    Args:
        mask: stands for a token that is not known yet.
    """

    def __init__(self, runner: Runner, warp: AnyWarp, mask: int) -> None:
        super().__init__(runner, warp)
        self._mask = mask

    def _draw(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        counts = list(map(len, self._unread))
        num_draft_tokens = uniforms.shape[1]
        width = max(counts) + num_draft_tokens - 1
        masked = [[*row, *[self._mask] * (width - len(row))] for row in self._unread]
        logits = self.runner.extend(to_device(masked, self._runner_device)).logits
        self.runner.keep(counts)
        self._unread = [[] for _ in counts]
        last_unread = to_device(counts, logits.device).unsqueeze(1) - 1
        index = last_unread + torch.arange(num_draft_tokens, device=logits.device)
        probabilities = self.warp(gather_rows(logits, index))
        return existing_index(probabilities, uniforms), probabilities


def widths(config: PreTrainedConfig, num_draft_tokens: int) -> list[int]:
    """Return the widths of the passes, in tokens, for which a draft model's runner is compiled.

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
        # An early exit is no model of its own.
        is_target=isinstance(draft, ModelSettings),
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
