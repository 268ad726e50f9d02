"""A model whose place is known, and how it loads."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.config.amounts import amount
from harness.config.errors import RunError
from harness.config.settings import ModelSettings
from harness.models.boundaries import cross_once
from harness.models.case import Placement
from harness.models.checkpoints import Checkpoint, source, source_arguments
from harness.models.failures import explain
from harness.models.quantization import bitsandbytes_config
from harness.models.random_weights import random_state
from harness.models.ranks import compute_on_plain_parts, split_arguments
from harness.models.sketch import Sketch, device_name, offloads


@dataclass(frozen=True)
class LoadedModel:
    """A model that runs, in evaluation mode. Split over devices it moves its inputs itself.

    Attributes:
        dtype: of what is not quantized.
        input_device: where input ids are expected, and logits returned.
    """

    model: PreTrainedModel
    settings: ModelSettings
    placement: Placement
    dtype: torch.dtype
    devices: list[torch.device]
    input_device: torch.device


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
            kinds.append(
                f"{'split over' if placement.split else 'a copy on each of'} {placement.num_ranks} ranks"
            )
        kinds.append(str(self.dtype).removeprefix("torch."))
        places = ", ".join(
            f"{device} {amount(size)}" for device, size in placement.bytes_per_device.items()
        )
        # A driver that does not work would otherwise be noticed late.
        in_vain = (
            sketch.settings.gpus and placement.num_ranks == 1 and not torch.cuda.is_available()
        )
        missing = (
            f", because no GPU is visible (asked for: {sketch.settings.gpus})" if in_vain else ""
        )
        return f"{sketch.role} {sketch.settings.name}: {', '.join(kinds)} on {places}{missing}"

    def load(self) -> LoadedModel:
        """Load the weights. Raises RunError or SettingError if memory, files or a library fail."""
        checkpoint, settings, placement = self.checkpoint, self.checkpoint.settings, self.placement
        factory: Any = AutoModelForCausalLM
        repository: str | None = source(settings)
        arguments = source_arguments(settings)
        if checkpoint.random:
            repository, arguments = None, {}
            factory, arguments["state_dict"] = random_state(
                checkpoint, placement.device_map, self.dtype
            )
        if settings.gguf_file is not None and hasattr(transformers, "GgufConfig"):
            # Older transformers always unpack GGUF; newer ones would fetch kernels from the hub to
            # keep it packed.
            arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
        if how := bitsandbytes_config(
            self.sketch.quantization, self.dtype, offloaded=offloads(placement.device_map)
        ):
            arguments["quantization_config"] = how
        arguments |= (
            split_arguments(placement.num_ranks)
            if placement.split
            else {"device_map": placement.device_map}
        )
        if "disk" in placement.device_map.values():
            arguments["offload_folder"] = tempfile.mkdtemp(prefix="harness-offload-")
        try:
            model, report = factory.from_pretrained(
                repository,
                config=checkpoint.config,
                dtype=self.dtype,
                output_loading_info=True,
                **arguments,
            )
        except Exception as exception:
            raise explain(exception, checkpoint.role, settings) or exception from exception
        if "offload_folder" in arguments:
            weakref.finalize(model, shutil.rmtree, arguments["offload_folder"], ignore_errors=True)
        if not checkpoint.random and (missing := sorted(report["missing_keys"])):
            # transformers fills them with random numbers and goes on.
            what = (
                f"{len(missing)} weights are not in {settings.repository} (the first: {missing[0]})"
            )
            raise RunError(f"{checkpoint.role}: {what}; it does not hold this model")
        if placement.split:
            compute_on_plain_parts(model)
        places = dict.fromkeys(placement.device_map.values())
        first = torch.device(
            device_name(next((place for place in places if isinstance(place, int)), "cpu"))
        )
        if len(places) > 1 and not {"cpu", "disk"} & places.keys():
            cross_once(model, placement.device_map, first)
        return LoadedModel(model.eval(), settings, placement, self.dtype, placement.devices, first)
