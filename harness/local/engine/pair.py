"""Turns settings into a target and a draft that run. Everything that can be checked is checked before weights load.

A pair is first planned (`PlannedPair`: configurations and sizes and, if it is to run, tokenizers), then placed
(`PlacedPair`: the device of every layer), and then loaded (`Pair`).
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
        checkpoints: the checkpoint of the target, and of the draft if it is a draft model.
        sketches: the sizes of these models and, after them, of a draft head.
        placement: the run's placement settings.
        draft_settings: the settings of any kind of draft; None without a draft.
        head: the checkpoint of a draft head; None if the draft is no head.
        shares_tokenizer: whether a draft model has the target's tokenizer.
        tokenizer: the target's tokenizer; None for a pair that is only planned (`sketch_pair`).
        gpus: the GPUs on which it may be placed, by torch's indices; empty for the CPU, and for a pair that is only
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
        """Return the problem of placing this pair on devices with these free bytes."""
        return PlacementProblem(tuple(self.sketches), self.placement, free, demand)

    def room(self, new_tokens: int) -> int | None:
        """Return the most tokens that a prompt can have if `new_tokens` follow it; None if nothing bounds them."""
        contexts = [max_context(checkpoint.config) for checkpoint in self.checkpoints]
        limits = [context for context in contexts if context is not None]
        return min(limits) - new_tokens if limits else None

    def excess(self, longest: int, new_tokens: int, answers: str | None = None) -> str | None:
        """Return the rule for an error if a prompt and its new tokens exceed a model's context: `with
        decoding.max_new_tokens=64 that is 1088 tokens, and draft=tiny takes 1024`. None if they fit.

        Args:
            longest: the number of tokens of the longest prompt.
            answers: how the error names the new tokens; None for `decoding.max_new_tokens=…`.
        """
        answers = answers or f"decoding.max_new_tokens={new_tokens}"
        for checkpoint in self.checkpoints:
            limit = max_context(checkpoint.config)
            if limit is not None and longest + new_tokens > limit:
                total = f"with {answers} that is {longest + new_tokens} tokens"
                model = f"{checkpoint.role}={checkpoint.settings.name}"
                return f"{total}, and {model} takes {limit}"
        return None

    def check_vocabulary(self, token_ids: TokenRows) -> None:
        """Raise a SettingError for a token for which a model has no embedding.

        Such a tokenizer was extended after the model's training.
        """
        largest = max(map(max, token_ids), default=0)
        # A draft with another tokenizer never reads these tokens.
        for checkpoint in self.checkpoints if self.shares_tokenizer else self.checkpoints[:1]:
            size = vocabulary_size(checkpoint.config)
            if largest >= size:
                token = f"{largest} ({self.tokenizer.convert_ids_to_tokens(largest)})"
                model = f"{checkpoint.role}={checkpoint.settings.name}"
                rule = (
                    f"has token {token}, and {model} has {size} (resize_token_embeddings adds more)"
                )
                raise SettingError("model.tokenizer", rule)

    def place(self, demand: Demand, *, force: bool = False) -> PlacedPair:
        """Choose a device for every layer, according to the memory that is free now.

        Args:
            force: whether a pair that does not seem to fit is placed too.

        Raises:
            RunError: the pair does not fit. The message states what would.
        """
        free = free_memory(self.gpus)
        placements = fit_or_explain(self.problem(free, demand), force=force)
        return PlacedPair(**vars(self), placements=placements, free=free)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacedPair(PlannedPair):
    """A pair that is ready to load.

    Attributes:
        placements: the placement of each sketch.
        free: the free memory for which the devices were chosen.
    """

    placements: Sequence[Placement]
    free: Memory

    def suits(self, demand: Demand, *, force: bool = False) -> bool:
        """Whether another demand would put every layer on the same device."""
        try:
            placements = fit_or_explain(self.problem(self.free, demand), force=force)
        except RunError:
            return False
        maps = [placement.device_map for placement in placements]
        return maps == [placement.device_map for placement in self.placements]

    @property
    def models(self) -> list[PlacedModel]:
        """The target, and then the draft if it is a draft model."""
        models = zip(self.checkpoints, self.sketches, self.placements, strict=False)
        return [PlacedModel(*model) for model in models]

    @property
    def devices(self) -> list[torch.device]:
        """Every device that will hold a layer of the target or the draft, the target's first."""
        devices = [device for placement in self.placements for device in placement.devices]
        return list(dict.fromkeys(devices))

    def device_names(self) -> list[str]:
        """Return the product names of the devices, `NVIDIA A100-SXM4-40GB` or the CPU's model."""
        cpu = cpu_name() or "unknown CPU"
        return [torch.cuda.get_device_name(d) if d.type == "cuda" else cpu for d in self.devices]

    def describe(self) -> str:
        """Return lines for the user about the placement, one for each model, and further remarks."""
        lines: list[str | None] = [model.describe() for model in self.models]
        draft_settings = self.draft_settings
        if draft_settings is not None and len(self.models) == 1:
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
        """Return the columns of a row about the models' dtypes and bytes."""
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
        """Load the weights. Raises RunError or SettingError if memory, files or a library fail.

        In this process every pass then computes attention with other kernels than cuDNN's. On Hopper and Blackwell
        torch prefers cuDNN, which makes a plan for each new size: this time would count as decoding.
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
    """Plan a pair that is to run, and check everything that can be checked before weights load: configurations,
    tokenizers, vocabularies, quantization.

    Args:
        target: the settings of the model whose output is wanted.
        draft: the draft's settings; None for the target alone.
        placement: the run's placement settings. A model's own `gpus` overrides them.
        dtype: the run's dtype. A model's own dtype overrides it.
        weights: `random` needs no stored weights and no tokenizer, because text is read byte by byte.

    Raises:
        SettingError: a setting is impossible for these models.
        RunError: a repository is out of reach, or a library is missing or fails.
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
    """Raise a SettingError if two models share a tokenizer, but one of them lacks outputs for some of its tokens.

    Embeddings may differ in size although the tokenizer is the same, because models of one family pad them differently
    (Qwen2 0.5B has 151,936 rows and 7B 152,064, for 151,646 tokens). Logits beyond `Pair.vocabulary_size` belong to no
    token, and must be cut off before logits are compared.
    """
    num_outputs, num_draft_outputs = map(vocabulary_size, (target.config, draft.config))
    num_tokens = max(tokenizer.get_vocab().values()) + 1
    if num_outputs != num_draft_outputs and min(num_outputs, num_draft_outputs) < num_tokens:
        target_size = f"{num_outputs} of model={target.settings.name}"
        rule = f"has {num_draft_outputs} outputs against {target_size}, and the tokenizer {num_tokens} tokens"
        raise SettingError("draft", rule, draft.settings.name)


def sketch_pair(
    target: ModelSettings,
    draft: DraftSettings | None,
    placement: PlacementSettings,
    dtype: Dtype,
    device: torch.device,
    weights: WeightsSource | None = None,
) -> PlannedPair:
    """Read the configurations of a pair and check them. Returns the pair's plan without tokenizers and GPUs.

    Args:
        target, draft, placement: as for `plan_pair`.
        dtype: the run's dtype. `auto` is float32 on the CPU, and the checkpoint's own half type on a GPU
            (bfloat16 if the checkpoint is in float32, and float16 with 8-bit weights).
        device: a device of the kind on which the models will be; `meta` for a GPU that this machine need not have.
        weights: the run's `weights`; None for a pair that will not be loaded.

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
