"""8-bit and 4-bit weights by bitsandbytes, and repositories whose weights are quantized already."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from harness.config.errors import RunError, SettingError
from harness.config.settings import ModelSettings, Quantization


def bitsandbytes_config(
    quantization: Quantization, dtype: torch.dtype, *, offloaded: bool = False
) -> BitsAndBytesConfig | None:
    """What bitsandbytes is asked for; None where nothing is to be quantized.

    8-bit is LLM.int8() (Dettmers et al. 2022, https://arxiv.org/abs/2208.07339), 4-bit is NF4 with quantized scales
    (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314).

    Args:
        quantization: `none`, `8bit` or `4bit`.
        dtype: what 4-bit weights are multiplied in.
        offloaded: some layers lie outside the GPUs; those stay in `dtype`.
    """
    if quantization == "8bit":
        options: dict[str, Any] = {"load_in_8bit": True}
    elif quantization == "4bit":
        options = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": dtype,
        }
    else:
        return None
    return BitsAndBytesConfig(llm_int8_enable_fp32_cpu_offload=offloaded, **options)


def stored_quantization(config: PreTrainedConfig) -> str | None:
    """How the repository's own weights are quantized: `8bit`, `4bit`, another method's name, or None."""
    stored: Any = getattr(config, "quantization_config", None)
    if stored is None:
        stored = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if stored is None:
        return None
    fields = stored if isinstance(stored, dict) else stored.to_dict()
    if fields.get("load_in_8bit"):
        return "8bit"
    if fields.get("load_in_4bit"):
        return "4bit"
    return str(getattr(fields.get("quant_method"), "value", fields.get("quant_method")))


def check_quantization(role: str, settings: ModelSettings, config: PreTrainedConfig) -> None:
    """Raise a SettingError if weights that are quantized already should be quantized in another way."""
    if settings.quantization == "none":
        return
    stored = "GGUF" if settings.gguf_file else stored_quantization(config)
    if stored is not None and stored != settings.quantization:
        rule = f"the weights of {settings.repository} are quantized already ({stored}): leave this setting out"
        raise SettingError(f"{role}.quantization", rule, settings.quantization)


def check_quantizer(role: str, settings: ModelSettings, config: PreTrainedConfig, device: torch.device) -> None:
    """Raise a RunError if the library that holds quantized weights is missing or fails on `device`."""
    stored = stored_quantization(config)
    quantization = settings.quantization if stored is None else stored
    if quantization in ("8bit", "4bit"):
        _try_bitsandbytes(role, quantization, device)
    elif stored is not None:
        try:
            quantizer: Any = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
            quantizer.validate_environment(device_map={"": str(device)})
        except (ImportError, RuntimeError, ValueError) as exception:
            what = f"{settings.repository} is quantized with {stored}, which does not load here"
            raise RunError(f"{role}: {what}: {_first_line(exception)}") from exception


def _try_bitsandbytes(role: str, quantization: str, device: torch.device) -> None:
    """Quantize a small tensor on `device`."""
    try:
        import bitsandbytes
    except Exception as exception:  # a broken native library raises more than ImportError
        raise RunError(
            f"{role}: {quantization} needs bitsandbytes, which cannot be imported ({_first_line(exception)})\n"
            "install it with `pip install bitsandbytes`"
        ) from exception
    try:
        sample = torch.ones(64, 64, dtype=torch.float16, device=device)
        if quantization == "8bit":
            bitsandbytes.functional.int8_vectorwise_quant(sample)
        else:
            bitsandbytes.functional.quantize_4bit(sample, quant_type="nf4")
    except Exception as exception:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        raise RunError(
            f"{role}: bitsandbytes {bitsandbytes.__version__} cannot quantize to {quantization} on {name}: "
            f"{_first_line(exception)}"
        ) from exception


def _first_line(exception: BaseException) -> str:
    lines = str(exception).strip().splitlines()
    return lines[0] if lines else type(exception).__name__
