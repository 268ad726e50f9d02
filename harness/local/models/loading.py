"""Models with a placement, and how they load.

Over several GPUs a tensor is copied once per forward pass, however many layers read it. accelerate puts a hook on every
module, which looks through all of its inputs, and copies mask, positions and rotary tables for every layer. Here only
the modules of the device map have a hook, and later modules use the copies of earlier ones (`cross_once`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from harness.config.amounts import amount
from harness.config.errors import RunError
from harness.config.failures import explained
from harness.config.settings import ModelSettings, Quantization
from harness.local.models.checkpoints import Checkpoint, source_arguments
from harness.local.models.fit import Placement
from harness.local.models.quiet import loading_bar
from harness.local.models.random_weights import random_state
from harness.local.models.sketch import Sketch


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

    def describe(self) -> str:
        """The model's format and devices, in one line."""
        placement = self.placement
        settings = self.sketch.settings
        facts = ["random weights"] if self.checkpoint.random else []
        if self.sketch.quantization != "none":
            facts.append(self.sketch.quantization)
        facts.append(str(self.sketch.dtype).removeprefix("torch."))
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
        devices = placement.devices
        if len(devices) > 1:
            cross_once(model, placement.device_map, devices[0])
        return LoadedModel(
            model.eval(),
            self.checkpoint.settings,
            placement,
            self.sketch.dtype,
            devices,
            devices[0],
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
                checkpoint, self.placement.device_map, self.sketch.dtype
            )
        quantization: Any = bitsandbytes_config(self.sketch.quantization, self.sketch.dtype)
        is_gguf = settings.gguf_file is not None
        if quantization is None and is_gguf and hasattr(transformers, "GgufConfig"):
            # Older transformers always unpack GGUF; newer ones would fetch kernels from the hub to
            # keep it packed.
            quantization = transformers.GgufConfig(dequantize=True)
        if quantization is not None:
            arguments["quantization_config"] = quantization
        arguments["device_map"] = self.placement.device_map
        try:
            model: PreTrainedModel
            with loading_bar(self.sketch.weight_bytes):
                model, report = factory.from_pretrained(
                    repository,
                    config=checkpoint.config,
                    dtype=self.sketch.dtype,
                    output_loading_info=True,
                    **arguments,
                )
        except Exception as exception:
            raise explained(exception, checkpoint.role, settings) from exception
        missing = sorted(report["missing_keys"])
        if missing and not checkpoint.random:
            # transformers fills them with random numbers and goes on.
            absent = f"{len(missing)} weights are not in {settings.repository}"
            reason = f"{absent} (the first: {missing[0]}); it does not hold this model"
            raise RunError(f"{checkpoint.role}: {reason}")
        return model


def bitsandbytes_config(
    quantization: Quantization, dtype: torch.dtype
) -> BitsAndBytesConfig | None:
    """Settings with which transformers quantizes weights as they load; None for `none`.

    8-bit is LLM.int8() (Dettmers et al. 2022, https://arxiv.org/abs/2208.07339), 4-bit is NF4 with
    quantized scales (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), multiplied in
    `dtype`.
    """
    if quantization == "none":
        return None
    return BitsAndBytesConfig(
        load_in_8bit=quantization == "8bit",
        load_in_4bit=quantization == "4bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


class _Copies:
    """Copies of a forward pass's tensors on other devices."""

    def __init__(self) -> None:
        # By identity and device: the original, which must stay alive, and its copy.
        self._copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device, value: Any) -> Any:
        """Copy tensors to a device, those in tuples, lists and dictionaries too; caches stay."""
        if isinstance(value, Tensor) and value.device != device:
            key = id(value), device
            if key not in self._copies:
                self._copies[key] = value, value.to(device)
            _, copy = self._copies[key]
            return copy
        if type(value) in (tuple, list):
            return type(value)(self.on(device, item) for item in value)
        if type(value) is dict:
            return {name: self.on(device, item) for name, item in value.items()}
        return value

    def enter(
        self, device: torch.device, module: nn.Module, inputs: Any, named: dict[str, Any]
    ) -> Any:
        """A hook before a module: its inputs, on its device."""
        return self.on(device, inputs), self.on(device, named)

    def clear(self, *_: Any) -> None:
        """A hook before and after a model, which forgets all copies."""
        self._copies.clear()


def cross_once(model: PreTrainedModel, names: Iterable[str], input_device: torch.device) -> None:
    """Replace accelerate's hooks on a model over several GPUs.

    Args:
        names: keys of its device map, none inside another one.
        input_device: gets the logits.
    """
    copies = _Copies()

    def return_logits(module: nn.Module, inputs: Any, output: Any) -> None:
        copies.clear()
        output.logits = output.logits.to(input_device)

    remove_hook_from_module(model, recurse=True)
    modules = dict(model.named_modules())
    for name in names:
        module = modules.get(name)
        if module is None:  # a parameter of the model itself
            continue
        parameter = next(module.parameters(), None)
        device = input_device if parameter is None else parameter.device
        if parameter is None:
            # Rotary tables, which begin a pass and come last in the map.
            module.to(device)
        module.register_forward_pre_hook(partial(copies.enter, device), with_kwargs=True)
    model.register_forward_pre_hook(copies.clear)
    model.register_forward_hook(return_logits)
