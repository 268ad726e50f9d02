"""Models with a placement, and how they load."""

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
from harness.config.failures import explained
from harness.config.settings import ModelSettings
from harness.local.models.boundaries import cross_once
from harness.local.models.case import Placement
from harness.local.models.checkpoints import Checkpoint, source_arguments
from harness.local.models.quantization import bitsandbytes_config
from harness.local.models.quiet import loading_bar
from harness.local.models.random_weights import random_state
from harness.local.models.sketch import Sketch, device_name, offloads


@dataclass(frozen=True)
class LoadedModel:
    """A model that runs, in evaluation mode. Split over devices it moves its inputs itself.

    Attributes:
        dtype: format of everything that is not quantized.
        input_device: for input ids and logits.
    """

    model: PreTrainedModel
    settings: ModelSettings
    placement: Placement
    dtype: torch.dtype
    devices: list[torch.device]
    input_device: torch.device


@dataclass(frozen=True)
class PlacedModel:
    """A model that is ready to load."""

    checkpoint: Checkpoint
    sketch: Sketch
    placement: Placement

    @property
    def dtype(self) -> torch.dtype:
        """Format of everything that is not quantized."""
        return self.sketch.dtype

    def describe(self) -> str:
        """The model's format and devices, in one line."""
        placement = self.placement
        settings = self.sketch.settings
        facts = ["random weights"] if self.checkpoint.random else []
        if self.sketch.quantization != "none":
            facts.append(self.sketch.quantization)
        facts.append(str(self.dtype).removeprefix("torch."))
        sizes = [f"{device} {amount(size)}" for device, size in placement.bytes_per_device.items()]
        text = f"{self.sketch.role} {settings.name}: {', '.join(facts)} on {', '.join(sizes)}"
        if settings.gpus and not torch.cuda.is_available():
            # A driver that does not work would otherwise be noticed late.
            text += f", because no GPU is visible (asked for: {settings.gpus})"
        return text

    def load(self) -> LoadedModel:
        """Load the weights. Raises RunError or SettingError if memory, files or a library fail."""
        placement = self.placement
        model = self._from_pretrained()
        devices = list(dict.fromkeys(placement.device_map.values()))
        gpus = [device for device in devices if isinstance(device, int)]
        input_device = torch.device(device_name(gpus[0] if gpus else "cpu"))
        nothing_is_outside = gpus == devices
        if len(gpus) > 1 and nothing_is_outside:
            cross_once(model, placement.device_map, input_device)
        return LoadedModel(
            model.eval(),
            self.checkpoint.settings,
            placement,
            self.dtype,
            placement.devices,
            input_device,
        )

    def _from_pretrained(self) -> PreTrainedModel:
        checkpoint = self.checkpoint
        settings = self.checkpoint.settings
        factory: Any = AutoModelForCausalLM
        repository: str | None = settings.repository
        arguments = source_arguments(settings)
        if checkpoint.random:
            repository = None
            arguments = {}
            factory, arguments["state_dict"] = random_state(
                checkpoint, self.placement.device_map, self.dtype
            )
        quantization: Any = bitsandbytes_config(
            self.sketch.quantization, self.dtype, offloaded=offloads(self.placement.device_map)
        )
        is_gguf = settings.gguf_file is not None
        if quantization is None and is_gguf and hasattr(transformers, "GgufConfig"):
            # Older transformers always unpack GGUF; newer ones would fetch kernels from the hub to
            # keep it packed.
            quantization = transformers.GgufConfig(dequantize=True)
        if quantization is not None:
            arguments["quantization_config"] = quantization
        arguments["device_map"] = self.placement.device_map
        if "disk" in self.placement.device_map.values():
            arguments["offload_folder"] = tempfile.mkdtemp(prefix="harness-offload-")
        try:
            model: PreTrainedModel
            with loading_bar(self.sketch.weight_bytes):
                model, report = factory.from_pretrained(
                    repository,
                    config=checkpoint.config,
                    dtype=self.dtype,
                    output_loading_info=True,
                    **arguments,
                )
        except Exception as exception:
            raise explained(exception, checkpoint.role, settings) from exception
        if "offload_folder" in arguments:
            # Its files are read as long as the model lives.
            weakref.finalize(model, shutil.rmtree, arguments["offload_folder"], ignore_errors=True)
        missing = sorted(report["missing_keys"])
        if missing and not checkpoint.random:
            # transformers fills them with random numbers and goes on.
            absent = f"{len(missing)} weights are not in {settings.repository}"
            reason = f"{absent} (the first: {missing[0]}); it does not hold this model"
            raise RunError(f"{checkpoint.role}: {reason}")
        return model
