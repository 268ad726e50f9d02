"""Turns settings into a target and a draft that run. Everything that can be checked is checked before weights load.

This has three steps:

    planned    `PlannedPair`: configurations, sizes and, if the pair is to run, tokenizers
    placed     `PlacedPair`: also the device of every layer
    loaded     `Pair`: the models
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.backends.cuda import enable_cudnn_sdp
from transformers import PreTrainedTokenizerBase

from harness.config.amounts import amount
from harness.config.demand import Demand
from harness.config.errors import RunError, SettingError
from harness.config.machine import cpu_name
from harness.config.methods import METHODS
from harness.config.run import WeightsSource
from harness.config.settings import DraftSettings, Dtype, ModelSettings, PlacementSettings
from harness.local.decoding.protocols import TokenRows
from harness.local.drafting.checked import blaming_method, method_of
from harness.local.drafting.heads.checkpoint import HeadCheckpoint
from harness.local.drafting.method import DraftPlan, Pair
from harness.local.models.checkpoints import (
    Checkpoint,
    check_quantizer,
    refuse_second_quantization,
    resolve_dtype,
)
from harness.local.models.devices import (
    choose_num_threads,
    free_memory,
    limit_num_threads,
    usable_gpus,
)
from harness.local.models.fit import Memory, Placement, PlacementProblem, fit_or_explain
from harness.local.models.loading import PlacedModel
from harness.local.models.quiet import quiet_libraries
from harness.local.models.random_weights import checkpoint_for, random_tokenizer
from harness.local.models.sketch import Sketch, sketch_model
from harness.local.models.tokenizers import load_tokenizer, max_context, vocabulary_size


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedPair:
    """A pair whose settings and configurations have been checked.

    Attributes:
        checkpoints: the checkpoint of the target and, if the draft is a draft model, the checkpoint of the draft.
        sketches: the sizes of these models and, after them, the sizes of a draft head.
        placement: the run's placement settings.
        draft_settings: the draft's settings, whatever its kind; None without a draft.
        head: the checkpoint of a draft head; None if the draft is no head.
        shares_tokenizer: whether a draft model has the target's tokenizer; True without a draft model.
        tokenizer: the target's tokenizer; None if the pair is only planned (`sketch_pair`).
        gpus: the GPUs on which the pair may be placed, by torch's indices; empty for the CPU, and if the pair is only
            planned.
    """

    checkpoints: Sequence[Checkpoint]
    sketches: Sequence[Sketch]
    placement: PlacementSettings
    draft_settings: DraftSettings | None = None
    head: HeadCheckpoint | None = None
    shares_tokenizer: bool = True
    tokenizer: Any = None
    gpus: Sequence[int] = ()

    def problem(self, free: Memory, demand: Demand) -> PlacementProblem:
        """Return the problem of placing this pair on devices that have this much free memory."""
        return PlacementProblem(tuple(self.sketches), self.placement, free, demand)

    def room(self, new_tokens: int) -> int | None:
        """Return the largest number of tokens that a prompt can have if `new_tokens` tokens follow it.

        The smallest context of the models decides. The result is 0 or negative if no prompt fits, and None if no model
        states its context.
        """
        contexts = [max_context(checkpoint.config) for checkpoint in self.checkpoints]
        limits = [context for context in contexts if context is not None]
        return min(limits) - new_tokens if limits else None

    def excess(self, longest: int, new_tokens: int, answers: str | None = None) -> str | None:
        """Return the text of an error if a prompt and its new tokens together are longer than a model's context: `the
        longest prompt and decoding.max_new_tokens=64 are 1088 tokens together, but the context of draft=tiny has room
        for 1024`. None if they fit into every model's context.

        Args:
            longest: the number of tokens of the longest prompt.
            answers: how the error names the new tokens; None for `decoding.max_new_tokens=…`.
        """
        answers = answers or f"decoding.max_new_tokens={new_tokens}"
        for checkpoint in self.checkpoints:
            limit = max_context(checkpoint.config)
            if limit is not None and longest + new_tokens > limit:
                total = (
                    f"the longest prompt and {answers} are {longest + new_tokens} tokens together"
                )
                model = f"{checkpoint.role}={checkpoint.settings.name}"
                return f"{total}, but the context of {model} has room for {limit}"
        return None

    def check_vocabulary(self, token_ids: TokenRows) -> None:
        """Raise a SettingError if the texts contain a token for which a model has no embedding.

        This happens if the tokenizer was extended after the model was trained.
        """
        largest = max(map(max, token_ids), default=0)
        # A draft with another tokenizer never reads these token ids.
        for checkpoint in self.checkpoints if self.shares_tokenizer else self.checkpoints[:1]:
            size = vocabulary_size(checkpoint.config)
            if largest >= size:
                token = f"{largest} ({self.tokenizer.convert_ids_to_tokens(largest)})"
                model = f"{checkpoint.role}={checkpoint.settings.name}"
                has_only = f"but {model} has embeddings for only {size} tokens"
                rule = f"has token {token}, {has_only} (resize_token_embeddings adds more)"
                raise SettingError("model.tokenizer", rule)

    def place(self, demand: Demand, *, force: bool = False) -> PlacedPair:
        """Choose a device for every layer, according to the memory that is free now.

        Args:
            force: whether to place the pair even if it does not seem to fit.

        Raises:
            RunError: the pair does not fit. The message says which settings would fit.
        """
        free = free_memory(self.gpus)
        placements = fit_or_explain(self.problem(free, demand), force=force)
        # A `PlacedPair` has all fields of this object, and these two.
        return PlacedPair(**vars(self), placements=placements, free=free)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacedPair(PlannedPair):
    """A pair that is ready to load.

    Attributes:
        placements: the placement of each sketch, in the same order.
        free: the free memory according to which the devices were chosen.
    """

    placements: Sequence[Placement]
    free: Memory

    def suits(self, demand: Demand, *, force: bool = False) -> bool:
        """Whether the pair would be placed on the same devices for another demand, with the same free memory. False if
        the pair would not fit.
        """
        try:
            placements = fit_or_explain(self.problem(self.free, demand), force=force)
        except RunError:
            return False
        maps = [placement.device_map for placement in placements]
        return maps == [placement.device_map for placement in self.placements]

    @property
    def models(self) -> list[PlacedModel]:
        """The target and, if the draft is a draft model, the draft after it."""
        # A head comes last, with a sketch and a placement, but no checkpoint: it is left out.
        models = zip(self.checkpoints, self.sketches, self.placements, strict=False)
        return [PlacedModel(*model) for model in models]

    @property
    def devices(self) -> list[torch.device]:
        """All devices that will hold a layer of the target or of the draft, without repetitions; the target's come
        first.
        """
        devices = [device for placement in self.placements for device in placement.devices]
        return list(dict.fromkeys(devices))

    def device_names(self) -> list[str]:
        """Return the product name of each device: for example `NVIDIA A100-SXM4-40GB`, or the model of the CPU."""
        cpu = cpu_name() or "unknown CPU"
        return [torch.cuda.get_device_name(d) if d.type == "cuda" else cpu for d in self.devices]

    def describe(self) -> str:
        """Return lines for the user: one about the placement of each model, and further remarks."""
        lines: list[str | None] = [model.describe() for model in self.models]
        draft_settings = self.draft_settings
        if draft_settings is not None and len(self.models) == 1:
            # The draft is no draft model, so it has no line yet.
            how = "no weights of its own"
            if not METHODS.is_built_in(draft_settings.method):
                how = "a class of your own"
            if self.head is not None:
                how = f"{self.head.kind.title} head, {amount(self.sketches[-1].weight_bytes)}"
            lines.append(f"draft {draft_settings.name}: {how}")
        lines += [sketch.about_cache for sketch in self.sketches]
        if any(checkpoint.random for checkpoint in self.checkpoints):
            lines.append(
                "random weights: text is read byte by byte, about 4 times the tokens of a trained tokenizer"
            )
        return "\n".join(filter(None, lines))

    def columns(self) -> dict[str, Any]:
        """Return the columns of a row that describe the target's dtype, and the bytes of both models' weights."""
        target = self.models[0]
        columns: dict[str, Any] = {
            "dtype": str(target.sketch.dtype).removeprefix("torch."),
            "weight_bytes": target.placement.bytes_per_device,
        }
        draft = self.sketches[-1]
        if draft.role == "draft":
            columns["draft_weight_bytes"] = self.placements[-1].bytes_per_device
        return columns

    def load(self) -> Pair:
        """Load the weights.

        From then on, attention is not computed with cuDNN in this process. On Hopper and Blackwell GPUs torch prefers
        cuDNN, which makes a plan for each new size of its inputs. The time for these plans would count as decoding.

        Raises:
            SettingError, RunError: memory is exhausted, a file cannot be read, or a library is missing or fails.
        """
        limit_num_threads()
        enable_cudnn_sdp(False)
        target, *others = [model.load() for model in self.models]
        if all(device.type == "cpu" for device in self.devices):
            choose_num_threads(target.model)
        draft = others[0] if others else None
        head = None
        if self.head is not None:
            device = self.placements[-1].devices[0]
            head = self.head.load(device, target.dtype, target.model)
        return Pair(target, draft, self.tokenizer, head, self.draft_settings)


def plan_pair(
    target: ModelSettings,
    draft: DraftSettings | None,
    placement: PlacementSettings,
    dtype: Dtype = "auto",
    *,
    weights: WeightsSource = "stored",
) -> PlannedPair:
    """Plan a pair that is to run. Everything that can be checked before weights load is checked here: configurations,
    tokenizers, vocabularies and quantization.

    Args:
        target: the settings of the model whose output is wanted.
        draft: the draft's settings; None for the target alone.
        placement: the run's placement settings. A model's own `gpus` overrides them.
        dtype: the run's dtype. A model's own dtype overrides it.
        weights: with `random`, neither stored weights nor a tokenizer are needed: text is split into bytes.

    Raises:
        SettingError: a setting is impossible for these models or this machine.
        RunError: a repository cannot be reached or read, a library is missing or fails, or CUDA does not start.
    """
    quiet_libraries()
    models = {"model": target}
    if isinstance(draft, ModelSettings):
        models["draft"] = draft
    gpus = usable_gpus(placement, models)
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    pair = sketch_pair(target, draft, placement, dtype, device, weights)
    shares_tokenizer = True
    if weights == "random":
        tokenizer = random_tokenizer(*pair.checkpoints)
    else:
        tokenizer = load_tokenizer(target)
        for checkpoint in pair.checkpoints[1:]:
            other = load_tokenizer(checkpoint.settings, "draft")
            shares_tokenizer = tokenizer.get_vocab() == other.get_vocab()
            if shares_tokenizer:
                check_outputs(pair.checkpoints[0], checkpoint, tokenizer)
    return dataclasses.replace(
        pair, shares_tokenizer=shares_tokenizer, tokenizer=tokenizer, gpus=gpus
    )


def check_outputs(
    target: Checkpoint, draft: Checkpoint, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise a SettingError if the two models have different numbers of outputs, and one of them has fewer outputs than
    their common tokenizer has tokens.

    Models with the same tokenizer may have different numbers of outputs, because models of one family are padded
    differently. For example, the tokenizer of Qwen2 has 151,646 tokens; Qwen2 0.5B has 151,936 outputs, and 7B has
    152,064. Logits beyond `Pair.vocabulary_size` belong to no token. They are cut off before the two models' logits are
    compared.
    """
    num_outputs, num_draft_outputs = map(vocabulary_size, (target.config, draft.config))
    num_tokens = max(tokenizer.get_vocab().values()) + 1
    if num_outputs != num_draft_outputs and min(num_outputs, num_draft_outputs) < num_tokens:
        target_size = f"model={target.settings.name} has {num_outputs}"
        rule = f"has {num_draft_outputs} outputs, {target_size}, and their tokenizer has {num_tokens} tokens"
        raise SettingError("draft", rule, draft.settings.name)


def sketch_pair(
    target: ModelSettings,
    draft: DraftSettings | None,
    placement: PlacementSettings,
    dtype: Dtype,
    device: torch.device,
    weights: WeightsSource | None = None,
) -> PlannedPair:
    """Read and check the configurations of a pair. Returns the pair's plan, without tokenizer and GPUs.

    Args:
        target, draft, placement: as for `plan_pair`.
        dtype: the run's dtype; `auto` as for `resolve_dtype`.
        device: a device of the same type as those on which the models will be; `meta` for a hypothetical GPU.
        weights: the run's setting `weights`; None if the pair will not be loaded.

    Raises:
        SettingError, RunError: as from `plan_pair`.
    """
    target_checkpoint = checkpoint_for("model", target, weights)
    checkpoints = [target_checkpoint]
    plan = DraftPlan(None)
    if draft is not None:
        with blaming_method(draft):
            plan = method_of(draft).plan(draft, target_checkpoint, weights)
    if plan.checkpoint is not None:
        checkpoints.append(plan.checkpoint)
    sketches: list[Sketch] = []
    for checkpoint in checkpoints:
        refuse_second_quantization(checkpoint)
        if weights is not None:
            check_quantizer(checkpoint, device)
        model_dtype = resolve_dtype(checkpoint.settings.dtype or dtype, checkpoint, device)
        sketches.append(sketch_model(checkpoint, model_dtype))
    if plan.head is not None:
        sketches.append(plan.head.sketch(sketches[0].dtype))
    return PlannedPair(
        checkpoints=checkpoints,
        sketches=sketches,
        placement=placement,
        draft_settings=plan.settings,
        head=plan.head,
    )
