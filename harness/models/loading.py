"""From settings to a pair of models that run: everything that can be checked is checked before any weights load."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from harness.config.commands import Weights
from harness.config.errors import RunError
from harness.config.settings import Dtype, ModelSettings, PlacementSettings
from harness.models.checkpoints import Checkpoint, explain, read_checkpoint
from harness.models.devices import free_memory, visible_gpus
from harness.models.fitting import place_pair
from harness.models.memory import cache_bytes_per_layer
from harness.models.placement import Candidate, Placement, applied_quantization, effective_placement
from harness.models.quantization import bitsandbytes_config, check_quantization, check_quantizer
from harness.models.quiet import quiet_libraries
from harness.models.random_weights import random_checkpoint, random_state, random_tokenizer
from harness.models.sizes import count_parameters
from harness.models.tensor_parallel import join, split_arguments
from harness.models.tokenizers import check_compatible, load_tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model that runs.

    Attributes:
        model: in evaluation mode. Split over devices it moves its inputs itself and returns its logits where the
            input ids lay.
        settings: as the user gave them.
        placement: where its layers lie, and how many bytes of weights each device holds.
        dtype: of what is not quantized.
        num_parameters: of the architecture, quantized or not; shared tensors once.
        devices: all that hold layers; for a model on disk, where it computes.
        input_device: where input ids are expected.
    """

    model: PreTrainedModel
    settings: ModelSettings
    placement: Placement
    dtype: torch.dtype
    num_parameters: int
    devices: list[torch.device]
    input_device: torch.device


@dataclass(frozen=True)
class Pair:
    """A target, its draft if there is one, and the tokenizer they share.

    Where target and draft are the same weights, both hold the same `model`.
    """

    target: LoadedModel
    draft: LoadedModel | None
    tokenizer: PreTrainedTokenizerBase

    @property
    def devices(self) -> list[torch.device]:
        """Every device that a layer of either lies on, the target's first."""
        drafts = [] if self.draft is None else self.draft.devices
        return list(dict.fromkeys([*self.target.devices, *drafts]))


@dataclass(frozen=True, eq=False)
class PlannedPair:
    """A pair of which everything is known but the weights.

    Attributes:
        checkpoints: the target's, then the draft's where it has weights of its own.
        dtypes: of what is not quantized, and
        placements: where the layers go; parallel to `checkpoints`.
        shared_draft: settings of a draft that shares the target's weights.
    """

    tokenizer: PreTrainedTokenizerBase
    checkpoints: list[Checkpoint]
    dtypes: list[torch.dtype]
    placements: list[Placement]
    shared_draft: ModelSettings | None

    @property
    def devices(self) -> list[torch.device]:
        """Every device that a layer of either will lie on, the target's first."""
        return list(dict.fromkeys(device for placement in self.placements for device in placement.devices))

    def describe(self) -> str:
        """What was decided, for the user: one line a model."""
        lines = []
        for checkpoint, dtype, placement in zip(self.checkpoints, self.dtypes, self.placements, strict=True):
            quantization = applied_quantization(checkpoint)
            kind = "random weights, " if checkpoint.random else ""
            kind += "" if quantization == "none" else f"{quantization}, "
            if placement.num_ranks > 1:
                how = "split over" if placement.split else "a copy on each of"
                kind += f"{how} {placement.num_ranks} ranks, "
            places = ", ".join(f"{device} {size / 1e9:.2f} GB" for device, size in placement.bytes_per_device.items())
            lines.append(
                f"{checkpoint.role} {checkpoint.settings.name}: {kind}{str(dtype).removeprefix('torch.')} on {places}"
            )
        if self.shared_draft is not None:
            lines.append(f"draft {self.shared_draft.name}: shares the model's weights")
        if any(checkpoint.random for checkpoint in self.checkpoints):
            lines.append("random weights: text is read byte by byte, in some 4 times the tokens of a trained tokenizer")
        return "\n".join(lines)

    def load(self) -> Pair:
        """Load the weights.

        Raises:
            RunError: memory, files or a library failed.
        """
        split = next((placement for placement in self.placements if placement.split), None)
        if split is not None:
            join(split.devices[0], split.num_ranks)
        loaded = [
            _load(checkpoint, placement, dtype)
            for checkpoint, dtype, placement in zip(self.checkpoints, self.dtypes, self.placements, strict=True)
        ]
        if self.shared_draft is not None:
            loaded.append(dataclasses.replace(loaded[0], settings=self.shared_draft))
        return Pair(loaded[0], loaded[1] if len(loaded) > 1 else None, self.tokenizer)


def plan_pair(
    target: ModelSettings,
    draft: ModelSettings | None,
    placement: PlacementSettings,
    dtype: Dtype = "auto",
    *,
    force: bool = False,
    weights: Weights = "stored",
) -> PlannedPair:
    """Everything that can be decided and checked before any weights load.

    In this order: both configurations, tokenizers, vocabularies, quantization, and whether everything fits. A draft
    with the target's own settings shares its weights.

    Args:
        target: the model whose output is wanted.
        draft: None for the target alone.
        placement: the run's; overridden by the models' own settings.
        dtype: likewise. `auto` is float32 on the CPU and the checkpoint's own half type on a GPU (bfloat16 where the
            checkpoint is in float32).
        force: plan also what does not fit.
        weights: random ones need no weights, and no tokenizer: text is then read byte by byte.

    Raises:
        SettingError: a setting that cannot hold for these models.
        RunError: a repository out of reach, a pair that does not fit, a library that is missing or fails.
    """
    quiet_libraries()
    read = random_checkpoint if weights == "random" else read_checkpoint
    target_checkpoint = read("model", target)
    shared = draft is not None and dataclasses.replace(draft, name=target.name) == target
    draft_checkpoint = None if draft is None or shared else read("draft", draft)
    if weights == "random":
        tokenizer = random_tokenizer(target_checkpoint, draft_checkpoint)
    else:
        tokenizer = load_tokenizer(target, "model")
    if draft_checkpoint is not None and weights == "stored":
        draft_tokenizer = load_tokenizer(draft_checkpoint.settings, "draft")
        check_compatible(target_checkpoint, draft_checkpoint, tokenizer, draft_tokenizer)

    planned: list[Candidate] = []
    gpus: set[int] = set()
    for checkpoint in filter(None, (target_checkpoint, draft_checkpoint)):
        check_quantization(checkpoint.role, checkpoint.settings, checkpoint.config)
        pool = _gpu_pool(checkpoint, placement)
        device = torch.device("cuda", pool[0]) if pool else torch.device("cpu")
        check_quantizer(checkpoint.role, checkpoint.settings, checkpoint.config, device)
        planned.append(
            Candidate(checkpoint, resolve_dtype(checkpoint.settings.dtype or dtype, checkpoint.config, device))
        )
        gpus.update(pool)
    placements = _place(planned, placement, sorted(gpus), force)
    checkpoints, dtypes = [candidate.checkpoint for candidate in planned], [candidate.dtype for candidate in planned]
    return PlannedPair(tokenizer, checkpoints, dtypes, placements, draft if shared else None)


def make_room(
    planned: PlannedPair, placement: PlacementSettings, batch_size: int, num_tokens: int, *, force: bool = False
) -> PlannedPair:
    """The same pair, placed so that its KV caches fit too where they outgrow the reserve.

    Args:
        placement: as in `plan_pair`.
        batch_size: rows that are decoded at once.
        num_tokens: of the longest row: its prompt, what is generated, and what is drafted beyond it.
        force: as in `plan_pair`.

    Raises:
        RunError: weights fit, but not with the caches.
    """
    candidates = [
        Candidate(checkpoint, dtype, cache_bytes_per_layer(checkpoint, dtype, batch_size, num_tokens))
        for checkpoint, dtype in zip(planned.checkpoints, planned.dtypes, strict=True)
    ]
    if planned.shared_draft is not None:
        # The weights are shared, the cache is not.
        candidates = [dataclasses.replace(candidates[0], cache=[2 * n for n in candidates[0].cache])]
    gpus = sorted({gpu for checkpoint in planned.checkpoints for gpu in _gpu_pool(checkpoint, placement)})
    return dataclasses.replace(planned, placements=_place(candidates, placement, gpus, force))


def load_pair(
    target: ModelSettings, draft: ModelSettings | None, placement: PlacementSettings, dtype: Dtype = "auto"
) -> Pair:
    """Plan and load in one step; see `plan_pair`."""
    return plan_pair(target, draft, placement, dtype).load()


def resolve_dtype(dtype: Dtype, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """What `dtype` means for this checkpoint on this kind of device."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cpu":
        return torch.float32
    # A pretended GPU, which is no device of this machine, is taken for a recent one.
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.float16 if config.dtype in (torch.float16, "float16") else torch.bfloat16


def _place(candidates: list[Candidate], placement: PlacementSettings, gpus: list[int], force: bool) -> list[Placement]:
    """On this machine's `gpus`; parallel to `candidates`."""
    draft = candidates[1] if len(candidates) > 1 else None
    placed = place_pair(candidates[0], draft, placement, free_memory(gpus), force=force)
    return [p for p in placed if p is not None]


def _gpu_pool(checkpoint: Checkpoint, placement: PlacementSettings) -> list[int]:
    """The GPUs among which the placement chooses for this model; empty where it goes to the CPU."""
    effective = effective_placement(checkpoint, placement)
    own = checkpoint.settings.gpus
    usable = visible_gpus(effective, "placement.gpus" if own is None else f"{checkpoint.role}.gpus")
    # A model's own count says how many, not which.
    return usable if own is None else visible_gpus(dataclasses.replace(effective, gpus=None))


def _load(checkpoint: Checkpoint, placement: Placement, dtype: torch.dtype) -> LoadedModel:
    factory: Any = AutoModelForCausalLM
    source: str | None = checkpoint.source
    arguments: dict[str, Any] = dict(checkpoint.arguments)
    if checkpoint.random:
        source, arguments = None, {}
        factory, arguments["state_dict"] = random_state(checkpoint, placement, dtype)
    if checkpoint.settings.gguf_file is not None and hasattr(transformers, "GgufConfig"):
        # Older transformers always unpack GGUF; newer ones would fetch kernels from the hub to keep it packed.
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    asked = bitsandbytes_config(applied_quantization(checkpoint), dtype, offloaded=placement.offloaded)
    if asked is not None:
        arguments["quantization_config"] = asked
    if placement.split:
        arguments |= split_arguments(placement.num_ranks)
    offload_folder = tempfile.mkdtemp(prefix="harness-offload-") if "disk" in placement.device_map.values() else None
    try:
        model, report = factory.from_pretrained(
            source,
            config=checkpoint.config,
            dtype=dtype,
            device_map=None if placement.split else placement.device_map,
            offload_folder=offload_folder,
            output_loading_info=True,
            **arguments,
        )
    except Exception as exception:
        raise explain(exception, checkpoint.role, checkpoint.settings) or exception from exception
    if offload_folder is not None:
        weakref.finalize(model, shutil.rmtree, offload_folder, ignore_errors=True)
    if not checkpoint.random and (missing := sorted(report["missing_keys"])):
        # transformers fills them with random numbers and goes on.
        what = f"{len(missing)} weights are not in {checkpoint.settings.repository} (the first: {missing[0]})"
        raise RunError(f"{checkpoint.role}: {what}; it does not hold this model")
    gpus = [device for device in placement.device_map.values() if isinstance(device, int)]
    return LoadedModel(
        model=model.eval(),
        settings=checkpoint.settings,
        placement=placement,
        dtype=dtype,
        num_parameters=count_parameters(checkpoint),
        devices=placement.devices,
        input_device=torch.device("cuda", gpus[0]) if gpus else torch.device("cpu"),
    )
