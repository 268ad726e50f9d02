"""Loads models onto the devices of their placement. If a model is split over several GPUs, hooks of accelerate move the
inputs of each module to the module's device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GgufConfig, PreTrainedModel

from harness.config.amounts import amount
from harness.config.errors import RunError
from harness.config.failures import explained
from harness.config.settings import ModelSettings, Quantization
from harness.local.models.checkpoints import Checkpoint, source_arguments
from harness.local.models.fit import Placement
from harness.local.models.quiet import loading_bar
from harness.local.models.random_weights import random_state
from harness.local.models.sketch import Sketch

# Loading fails if stored quantized weights take more than this multiple of their planned bytes. Then the repository
# holds weights that are not quantized as its configuration says.
_MOST_HELD = 1.2


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model in evaluation mode. A model that is split over several devices moves its inputs itself.

    Attributes:
        dtype: the dtype of all weights that are not quantized.
        devices: all devices that hold a layer, in the order of the layers.
        input_device: the device on which the model reads token ids and returns logits.
    """

    model: PreTrainedModel
    settings: ModelSettings
    placement: Placement
    dtype: torch.dtype
    devices: list[torch.device]
    input_device: torch.device


@dataclass(frozen=True)
class PlacedModel:
    """A model whose devices are chosen, and whose weights are not loaded yet."""

    checkpoint: Checkpoint
    sketch: Sketch
    placement: Placement

    def describe(self) -> str:
        """Return a line for the user about the model's dtype and devices."""
        settings = self.sketch.settings
        facts = ["random weights"] if self.checkpoint.random else []
        if self.sketch.quantization != "none":
            facts.append(self.sketch.quantization)
        facts.append(str(self.sketch.dtype).removeprefix("torch."))
        sizes = [
            f"{device} {amount(size)}" for device, size in self.placement.bytes_per_device.items()
        ]
        text = f"{self.sketch.role} {settings.name}: {', '.join(facts)} on {', '.join(sizes)}"
        if settings.gpus and not torch.cuda.is_available():
            # Without this remark, the user might notice only late that the driver does not work.
            text += f", because no GPU is visible (asked for: {settings.gpus})"
        return text

    def load(self) -> LoadedModel:
        """Load the weights.

        Raises:
            SettingError: a setting is wrong, such as the revision.
            RunError: memory is exhausted, a file cannot be read, weights are missing, or the stored weights are not
                quantized as the configuration says. Unknown exceptions of libraries pass unchanged.
            KeyboardInterrupt: Ctrl-C interrupted a library, which raised another exception.
        """
        model = self._from_pretrained().eval()
        devices = self.placement.devices
        settings = self.checkpoint.settings
        return LoadedModel(model, settings, self.placement, self.sketch.dtype, devices, devices[0])

    def _from_pretrained(self) -> PreTrainedModel:
        """Load the model with transformers' `from_pretrained`, and check what was loaded. Raises as `load` does."""
        checkpoint = self.checkpoint
        settings = checkpoint.settings
        factory: Any = AutoModelForCausalLM
        repository: str | None = settings.repository
        arguments = source_arguments(settings)
        if checkpoint.random:
            repository = None
            factory, state = random_state(checkpoint, self.placement.device_map, self.sketch.dtype)
            arguments = {"state_dict": state}
        quantization: Any = bitsandbytes_config(self.sketch.quantization, self.sketch.dtype)
        if settings.gguf_file is not None:
            # Without this, transformers would keep the weights packed, and would fetch kernels for that from the hub.
            quantization = GgufConfig(dequantize=True)
        if quantization is not None:
            arguments["quantization_config"] = quantization
        arguments["device_map"] = self.placement.device_map
        model: PreTrainedModel
        try:
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
            # Without this error, missing weights would be random: transformers fills them in.
            absent = f"{len(missing)} weights are not in {settings.repository}"
            reason = f"{absent} (the first: {missing[0]}); it does not hold this model"
            raise RunError(f"{checkpoint.role}: {reason}")
        held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
        if self.sketch.stored is not None and held > _MOST_HELD * self.sketch.weight_bytes:
            described = f"its configuration describes weights in {self.sketch.stored}"
            sizes = f"{amount(held)} in place of {amount(self.sketch.weight_bytes)}"
            raise RunError(
                f"{checkpoint.role}: {described}, and {settings.repository} has others: {sizes}"
            )
        return model


def bitsandbytes_config(
    quantization: Quantization, dtype: torch.dtype
) -> BitsAndBytesConfig | None:
    """Return the settings with which transformers quantizes weights while they load; None for `none`.

    `8bit` means LLM.int8() (Dettmers et al. 2022, https://arxiv.org/abs/2208.07339). `4bit` means NF4 with quantized
    scales (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), with multiplications in `dtype`.
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
