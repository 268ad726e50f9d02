"""8-bit and 4-bit weights by bitsandbytes, and repositories whose weights are quantized already."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from harness.config.errors import RunError, SettingError
from harness.config.failures import first_line
from harness.config.settings import Dtype, Quantization
from harness.local.models.checkpoints import Checkpoint


def bitsandbytes_config(
    quantization: Quantization, dtype: torch.dtype, *, offloaded: bool = False
) -> BitsAndBytesConfig | None:
    """Settings with which transformers quantizes weights as they load; None for `none`.

    8-bit is LLM.int8() (Dettmers et al. 2022, https://arxiv.org/abs/2208.07339), 4-bit is NF4 with
    quantized scales (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), multiplied in
    `dtype`. Offloaded layers stay in `dtype`.
    """
    if quantization == "none":
        return None
    return BitsAndBytesConfig(
        load_in_8bit=quantization == "8bit",
        load_in_4bit=quantization == "4bit",
        llm_int8_enable_fp32_cpu_offload=offloaded,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def eight_bit_layers(model: nn.Module) -> list[nn.Module]:
    """Layers that bitsandbytes multiplies in 8 bits."""
    return [module for module in model.modules() if type(module).__name__ == "Linear8bitLt"]


def stored_quantization(config: PreTrainedConfig) -> str | None:
    """Quantization of the stored weights: `8bit`, `4bit`, another method's name, or None."""
    stored = _quantization_config(config)
    if stored is None:
        return None
    fields = stored if isinstance(stored, dict) else stored.to_dict()
    for name in ("8bit", "4bit"):
        if fields.get(f"load_in_{name}"):
            return name
    method = fields.get("quant_method")
    return str(getattr(method, "value", method))


def _quantization_config(config: PreTrainedConfig) -> Any:
    """`quantization_config` of a model, or of its language part; None without one."""
    of_text = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    return getattr(config, "quantization_config", None) or of_text


def resolve_dtype(dtype: Dtype, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The number format for a checkpoint on this kind of device."""
    config = checkpoint.config
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cpu":
        return torch.float32
    # `plan` pretends GPUs as the meta device: they count as recent.
    is_old = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    # LLM.int8() multiplies in float16, and would convert to it and back in every layer.
    in_8bit = "8bit" in (stored_quantization(config), checkpoint.settings.quantization)
    if is_old or in_8bit or config.dtype in (torch.float16, "float16"):
        return torch.float16
    return torch.bfloat16


def refuse_second_quantization(checkpoint: Checkpoint) -> None:
    """Raise a SettingError for weights that are stored quantized and are to be quantized otherwise."""
    settings = checkpoint.settings
    stored = "GGUF" if settings.gguf_file else stored_quantization(checkpoint.config)
    if settings.quantization != "none" and stored not in (None, settings.quantization):
        already = f"the weights of {settings.repository} are quantized already ({stored})"
        rule = f"{already}: leave this setting out"
        raise SettingError(f"{checkpoint.role}.quantization", rule, settings.quantization)


def check_quantizer(checkpoint: Checkpoint, device: torch.device) -> None:
    """Raise a RunError if the library for quantized weights is missing or fails on `device`."""
    role = checkpoint.role
    settings = checkpoint.settings
    config = checkpoint.config
    stored = stored_quantization(config)
    quantization = stored or settings.quantization
    if quantization in ("8bit", "4bit"):
        _try_bitsandbytes(role, quantization, device)
        return
    if stored is None:
        return
    try:
        stored_config = _quantization_config(config)
        quantizer: Any = AutoHfQuantizer.from_config(stored_config, pre_quantized=True)
        quantizer.validate_environment(device_map={"": str(device)})
    except (ImportError, RuntimeError, ValueError) as exception:
        reason = f"{settings.repository} is quantized with {stored}, which does not load here"
        raise RunError(f"{role}: {reason}: {first_line(exception)}") from exception


def _try_bitsandbytes(role: str, quantization: str, device: torch.device) -> None:
    """Quantize a small tensor on `device`."""
    try:
        import bitsandbytes
    except Exception as exception:  # a broken native library raises more than ImportError
        reason = f"{quantization} needs bitsandbytes, which cannot be imported"
        advice = "install it with `pip install bitsandbytes`"
        raise RunError(f"{role}: {reason} ({first_line(exception)})\n{advice}") from exception
    try:
        sample = torch.ones(64, 64, dtype=torch.float16, device=device)
        if quantization == "8bit":
            bitsandbytes.functional.int8_vectorwise_quant(sample)
        else:
            bitsandbytes.functional.quantize_4bit(sample, quant_type="nf4")
    except Exception as exception:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        version = f"bitsandbytes {bitsandbytes.__version__}"
        reason = f"{version} cannot quantize to {quantization} on {name}"
        raise RunError(f"{role}: {reason}: {first_line(exception)}") from exception
