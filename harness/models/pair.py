"""From settings to a pair of models that run: everything that can be checked is checked before any weights load."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from harness.config.amounts import amount
from harness.config.errors import RunError
from harness.config.machine import cpu_name
from harness.config.run import Weights
from harness.config.settings import DraftSettings, Dtype, ModelSettings, PlacementSettings
from harness.drafting.translated import Translation
from harness.models.checkpoints import Checkpoint, read_checkpoint, source, source_arguments
from harness.models.devices import free_memory, visible_gpus
from harness.models.early_exit import exit_sketch, with_layers
from harness.models.failures import explain
from harness.models.fit import Case, Demand, Placement, effective_placement
from harness.models.heads import AnyHead, HeadCheckpoint, read_head
from harness.models.meta import sketch_model
from harness.models.new_heads import new_head
from harness.models.quantization import bitsandbytes_config, check_quantization, check_quantizer
from harness.models.quiet import quiet_libraries
from harness.models.random_weights import random_checkpoint, random_state, random_tokenizer
from harness.models.ranks import join, split_arguments
from harness.models.remedies import fit_or_explain
from harness.models.sketch import Sketch, device_name, offloads
from harness.models.tokenizers import check_context, how_to_translate, load_tokenizer, max_context

_SAID = {
    "intersection": "it draws from the tokens that the model has too",
    "text": "its text is read again as the model's tokens",
}


@dataclass(frozen=True)
class LoadedModel:
    """A model that runs, in evaluation mode. Split over devices it moves its inputs itself.

    Attributes:
        dtype: of what is not quantized.
        num_parameters: of the architecture, quantized or not; shared tensors once.
        input_device: where input ids are expected, and logits returned.
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
    """A target, its draft if there is one, and their tokenizer. Shared weights are the same `model` in both.

    Attributes:
        head: a draft that is a head on the target's hidden states.
        drafting: the settings of the draft, whatever kind it is.
        translation: of a draft with another tokenizer.
    """

    target: LoadedModel
    draft: LoadedModel | None
    tokenizer: PreTrainedTokenizerBase
    head: AnyHead | None = None
    drafting: ModelSettings | None = None
    translation: Translation | None = None

    @property
    def devices(self) -> list[torch.device]:
        """Every device with a layer of either, the target's first."""
        return list(dict.fromkeys([*self.target.devices, *(self.draft.devices if self.draft else [])]))

    def stop_tokens(self) -> frozenset[int]:
        """The token ids at which the target ends a text by itself."""
        generation = self.target.model.generation_config
        configured = generation.eos_token_id if generation else None
        ids = configured if isinstance(configured, list) else [configured, self.tokenizer.eos_token_id]
        return frozenset(int(token) for token in ids if token is not None)


@dataclass(frozen=True)
class PlacedModel:
    """A model of which everything is known but the weights."""

    checkpoint: Checkpoint
    sketch: Sketch
    placement: Placement

    @property
    def dtype(self) -> torch.dtype:
        """Of what is not quantized."""
        return self.sketch.dtype

    def describe(self) -> str:
        """How it is held and where, in one line."""
        placement, sketch = self.placement, self.sketch
        kinds = ["random weights"] if self.checkpoint.random else []
        kinds += [] if sketch.quantization == "none" else [sketch.quantization]
        if placement.num_ranks > 1:
            kinds.append(f"{'split over' if placement.split else 'a copy on each of'} {placement.num_ranks} ranks")
        kinds.append(str(self.dtype).removeprefix("torch."))
        places = ", ".join(f"{device} {amount(size)}" for device, size in placement.bytes_per_device.items())
        return f"{sketch.role} {sketch.settings.name}: {', '.join(kinds)} on {places}"

    def load(self) -> LoadedModel:
        """Load the weights. Raises RunError or SettingError if memory, files or a library fail."""
        checkpoint, settings, placement = self.checkpoint, self.checkpoint.settings, self.placement
        factory: Any = AutoModelForCausalLM
        repository: str | None = source(settings)
        arguments = source_arguments(settings)
        if checkpoint.random:
            repository, arguments = None, {}
            factory, arguments["state_dict"] = random_state(checkpoint, placement.device_map, self.dtype)
        if settings.gguf_file is not None and hasattr(transformers, "GgufConfig"):
            # Older transformers always unpack GGUF; newer ones would fetch kernels from the hub to keep it packed.
            arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
        if how := bitsandbytes_config(self.sketch.quantization, self.dtype, offloaded=offloads(placement.device_map)):
            arguments["quantization_config"] = how
        arguments |= split_arguments(placement.num_ranks) if placement.split else {"device_map": placement.device_map}
        if "disk" in placement.device_map.values():
            arguments["offload_folder"] = tempfile.mkdtemp(prefix="harness-offload-")
        try:
            model, report = factory.from_pretrained(
                repository, config=checkpoint.config, dtype=self.dtype, output_loading_info=True, **arguments
            )
        except Exception as exception:
            raise explain(exception, checkpoint.role, settings) or exception from exception
        if "offload_folder" in arguments:
            weakref.finalize(model, shutil.rmtree, arguments["offload_folder"], ignore_errors=True)
        if not checkpoint.random and (missing := sorted(report["missing_keys"])):
            # transformers fills them with random numbers and goes on.
            what = f"{len(missing)} weights are not in {settings.repository} (the first: {missing[0]})"
            raise RunError(f"{checkpoint.role}: {what}; it does not hold this model")
        first = next((device for device in placement.device_map.values() if isinstance(device, int)), "cpu")
        sizes = self.dtype, self.sketch.num_parameters
        return LoadedModel(
            model.eval(), settings, placement, *sizes, placement.devices, torch.device(device_name(first))
        )


@dataclass(frozen=True)
class PlacedPair:
    """A pair that is ready to load.

    Attributes:
        models: the target, then the draft if it is a model with its own weights.
        shared_draft: settings of a draft that shares the target's weights.
        head: a draft that is a head.
        drafting: the settings of the draft, whatever kind it is.
        translation: of a draft with another tokenizer.
    """

    models: list[PlacedModel]
    tokenizer: PreTrainedTokenizerBase
    shared_draft: ModelSettings | None
    head: HeadCheckpoint | None = None
    drafting: ModelSettings | None = None
    translation: Translation | None = None

    @property
    def devices(self) -> list[torch.device]:
        """Every device that will have a layer of either, the target's first."""
        return list(dict.fromkeys(device for model in self.models for device in model.placement.devices))

    def device_names(self) -> list[str]:
        """What the devices are sold as: `NVIDIA A100-SXM4-40GB`, or the CPU's model name."""
        cpu = cpu_name() or "unknown CPU"
        return [torch.cuda.get_device_name(d) if d.type == "cuda" else cpu for d in self.devices]

    def describe(self) -> str:
        """What was decided, for the user: one line per model."""
        lines = [model.describe() for model in self.models]
        if self.shared_draft is not None:
            lines.append(f"draft {self.shared_draft.name}: shares the model's weights")
        if self.translation is not None:
            draft = self.models[1].checkpoint.settings.name
            lines.append(f"draft {draft}: another tokenizer; {_SAID[self.translation.name]}")
        if self.head is not None:
            size = amount(self.head.sketch(self.models[0].dtype).weight_bytes)
            lines.append(f"draft {self.head.settings.name}: {self.head.kind} head, {size}")
        if isinstance(self.drafting, DraftSettings) and self.drafting.method in ("lookup", "suffix", "early_exit"):
            layers = f"the first {self.drafting.layers[0]} layers of the model" if self.drafting.layers else None
            lines.append(f"draft {self.drafting.name}: {layers or 'no weights'}")
        if any(model.checkpoint.random for model in self.models):
            lines.append("random weights: text is read byte by byte, about 4 times the tokens of a trained tokenizer")
        return "\n".join(lines)

    def load(self) -> Pair:
        """Load the weights. Raises RunError or SettingError if memory, files or a library fail."""
        if split := [model.placement for model in self.models if model.placement.split]:
            join(split[0].devices[0], split[0].num_ranks)
        loaded = [model.load() for model in self.models]
        if self.shared_draft is not None:
            loaded.append(dataclasses.replace(loaded[0], settings=self.shared_draft))
        head = None if self.head is None else self.head.load(loaded[0].input_device, loaded[0].dtype)
        draft = loaded[1] if len(loaded) > 1 else None
        return Pair(loaded[0], draft, self.tokenizer, head, self.drafting, self.translation)


@dataclass(frozen=True, eq=False)
class PlannedPair:
    """A pair whose settings hold; see `PlacedPair`. The placement chooses among `gpus`."""

    checkpoints: list[Checkpoint]
    sketches: list[Sketch]
    tokenizer: PreTrainedTokenizerBase
    shared_draft: ModelSettings | None
    placement: PlacementSettings
    gpus: list[int]
    head: HeadCheckpoint | None = None
    drafting: ModelSettings | None = None
    translation: Translation | None = None

    def room(self, new_tokens: int) -> int | None:
        """The most tokens that a prompt may have before `new_tokens` more; None for any number."""
        limits = [limit for one in self.checkpoints if (limit := max_context(one.config)) is not None]
        return min(limits) - new_tokens if limits else None

    def check_context(
        self,
        token_ids: Sequence[Sequence[int]],
        new_tokens: int,
        setting: str = "prompts",
        said: str = "it",
        advice: str = "",
    ) -> None:
        """Raise a SettingError if the longest prompt, which comes from `setting`, is too long for a model's context.

        Args:
            said: what is too long, before its length, and
            advice: what the error ends with.
        """
        length = max(map(len, token_ids))
        for checkpoint in self.checkpoints:
            own, new = length, new_tokens
            if checkpoint.role == "draft" and self.translation is not None:
                own = max(len(self.translation.read_prompt(tokens)) for tokens in token_ids)
                new = -(-new_tokens * own // length)  # as many for each token as in the prompt
            check_context(checkpoint, own, new, setting, f"{said} has {own} tokens; ", advice=advice)

    def place(self, demand: Demand, *, force: bool = False) -> PlacedPair:
        """Decide where the layers go, on what is free now; see `fit_or_explain`."""
        dtype, drafting, sketches = self.sketches[0].dtype, self.drafting, list(self.sketches)
        if self.head is not None:
            sketches.append(self.head.sketch(dtype))
        elif isinstance(drafting, DraftSettings) and drafting.method == "early_exit":
            sketches.append(exit_sketch(self.checkpoints[0], drafting, dtype))
        case = Case(
            tuple(sketches), self.placement, free_memory(self.gpus), demand, shared=self.shared_draft is not None
        )
        places = fit_or_explain(case, force=force)
        found = [PlacedModel(*parts) for parts in zip(self.checkpoints, self.sketches, places, strict=False)]
        return PlacedPair(found, self.tokenizer, self.shared_draft, self.head, self.drafting, self.translation)


def plan_pair(
    target: ModelSettings,
    draft: ModelSettings | None,
    placement: PlacementSettings,
    dtype: Dtype = "auto",
    *,
    weights: Weights = "stored",
) -> PlannedPair:
    """Check everything that can be checked before weights load: configurations, tokenizers, vocabularies, quantization.

    Args:
        target: the model whose output is wanted.
        draft: None for the target alone. With the target's own settings it shares its weights; a method without
            weights needs none.
        placement: the run's; overridden by the models' own settings.
        dtype: likewise. `auto` is float32 on the CPU and the checkpoint's own half type on a GPU (bfloat16 where the
            checkpoint is in float32).
        weights: random ones need no weights, and no tokenizer: text is then read byte by byte.

    Raises:
        SettingError: a setting that cannot hold for these models.
        RunError: a repository out of reach, a library that is missing or fails.
    """
    quiet_libraries()
    read = random_checkpoint if weights == "random" else read_checkpoint
    checkpoints, drafting = [read("model", target)], draft
    head: HeadCheckpoint | None = None
    if isinstance(draft, DraftSettings) and draft.method == "new_head":
        head, draft = new_head(draft, checkpoints[0]), None
    if isinstance(draft, DraftSettings) and draft.method != "model":
        if draft.method == "early_exit":
            drafting = with_layers(draft, checkpoints[0].config)
        draft = None
    shared = draft if draft is not None and shares_weights(target, draft) else None
    if draft is not None and shared is None:
        layers = draft.layers if isinstance(draft, DraftSettings) else None
        head = read_head(draft, checkpoints[0], layers=layers, weights=weights == "stored")
        if head is None:
            checkpoints.append(read("draft", draft))
    translation: Translation | None = None
    if weights == "random":
        tokenizer = random_tokenizer(*checkpoints)
    else:
        tokenizer = load_tokenizer(target)
        for checkpoint in checkpoints[1:]:
            other = load_tokenizer(checkpoint.settings, "draft")
            translation = how_to_translate(checkpoints[0], checkpoint, tokenizer, other)
    sketches: list[Sketch] = []
    gpus: set[int] = set()
    for checkpoint in checkpoints:
        check_quantization(checkpoint)
        own = checkpoint.settings
        how = effective_placement(checkpoint.role, own, placement)
        pool = visible_gpus(how, f"{checkpoint.role}.gpus" if own.gpus else "placement.gpus")
        if own.gpus:
            # That says how many, not which.
            pool = visible_gpus(dataclasses.replace(how, gpus=None))
        device = torch.device("cuda", pool[0]) if pool else torch.device("cpu")
        check_quantizer(checkpoint, device)
        sketches.append(sketch_model(checkpoint, resolve_dtype(own.dtype or dtype, checkpoint.config, device)))
        gpus.update(pool)
    return PlannedPair(checkpoints, sketches, tokenizer, shared, placement, sorted(gpus), head, drafting, translation)


def plan_tokenizer(target: ModelSettings) -> PlannedPair:
    """The tokenizer alone, for whatever has the weights elsewhere. Raises SettingError or RunError without one."""
    quiet_libraries()
    return PlannedPair([], [], load_tokenizer(target), None, PlacementSettings(), [])


def shares_weights(target: ModelSettings, draft: ModelSettings) -> bool:
    """Whether a draft has the target's own settings; names may differ."""
    names = [field.name for field in dataclasses.fields(ModelSettings) if field.name != "name"]
    return all(getattr(draft, name) == getattr(target, name) for name in names)


def resolve_dtype(dtype: Dtype, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """What `dtype` means for this checkpoint on this kind of device."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cpu":
        return torch.float32
    # A pretended GPU, which is no device of this machine, is taken for a recent one.
    old = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if old or config.dtype in (torch.float16, "float16") else torch.bfloat16
