"""Reads models' configurations before weights load, chooses dtypes, and checks whether a model can be used."""

from __future__ import annotations

import importlib.util
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from harness.config.errors import RunError, SettingError
from harness.config.failures import explain_configuration, first_line
from harness.config.installation import install_command
from harness.config.repositories import check_place
from harness.config.settings import Dtype, ModelSettings
from harness.local.models.cache_names import CACHE

# Types of layers that store keys and values by position, or store nothing. So the last tokens can be removed by cutting
# the cache. All other types of layers fold tokens into a state, from which tokens cannot be removed.
_NOT_RECURRENT = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "dense",
    "sparse",
    "moe",
    "mlp",
}
# Index files. They state in which file each tensor is stored.
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# A model with more layers is refused. No published model has as many.
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class Checkpoint:
    """A model whose weights are not loaded yet.

    Attributes:
        role: `model` or `draft`.
        settings: the model's settings.
        config: the model's configuration.
        random: whether the weights are random numbers instead of stored weights.
    """

    role: str
    settings: ModelSettings
    config: PreTrainedConfig
    random: bool = False


def source_arguments(settings: ModelSettings) -> dict[str, Any]:
    """Return the arguments that every `from_pretrained` of the model's repository needs."""
    # `trust_remote_code` is always given, because without it transformers asks the user on the terminal.
    arguments: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    if settings.revision is not None:
        arguments["revision"] = settings.revision
    if settings.gguf_file is not None:
        arguments["gguf_file"] = settings.gguf_file
    return arguments


def read_checkpoint(
    role: str, settings: ModelSettings, *, needs_weights: bool = True
) -> Checkpoint:
    """Read a model's configuration, and check everything that can be checked with it.

    Args:
        role: `model` or `draft`, for errors.
        needs_weights: whether the stored weights will be needed. If not, the architecture that a preset states is
            enough, and a directory may hold only a configuration.

    Raises:
        SettingError: the directory does not exist or holds no model; a setting such as the revision is wrong; or the
            model is not a causal language model, or has no cache.
        RunError: the repository is missing, gated or cannot be reached; the configuration cannot be used; or the model
            is a GGUF file, and the package `gguf` is missing.
    """
    if not needs_weights and settings.architecture is not None:
        config = AutoConfig.for_model(**settings.architecture)
    else:
        if settings.gguf_file is not None and importlib.util.find_spec("gguf") is None:
            reading = f"{role}: reading {settings.gguf_file}"
            raise RunError(f"{reading} needs the gguf package: {install_command('gguf')}")
        _check_directory(role, settings, needs_weights)
        try:
            check_model_access(settings)
            config = AutoConfig.from_pretrained(settings.repository, **source_arguments(settings))
        except Exception as exception:
            raise explain_configuration(exception, role, settings) from exception
    check_decoder(role, settings, config)
    return Checkpoint(role, settings, config)


def check_decoder(role: str, settings: ModelSettings, config: PreTrainedConfig) -> None:
    """Raise a SettingError unless the configuration is that of a decoder with a KV cache or a recurrent state."""
    rule = _broken_rule(role, config)
    if rule is not None:
        raise SettingError(role, rule, settings.name)


def _broken_rule(role: str, config: PreTrainedConfig) -> str | None:
    """Return the rule that a configuration (or the class of its model) breaks; None if the model can be used. The order
    of the checks matters.
    """
    num_layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 1)
    if not 0 < num_layers <= _MOST_LAYERS:
        # This is checked first, because planning builds all layers of a model.
        return f"has num_hidden_layers: {num_layers}, and 1 to {_MOST_LAYERS} are possible"
    if config.is_encoder_decoder:
        return "must be a decoder-only model; this is an encoder-decoder"
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", True):
        # BERT and similar models have a causal class too, but they have a cache only if `is_decoder` is set. That field
        # alone is not enough to recognise them: GPT-NeoX is a decoder, but does not set it.
        return "must be a decoder-only model; this is an encoder"
    # A repository may contain the code of its model. That code is not loaded yet, so nothing more is known about it.
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote:
        return f"must be a causal language model, not {config.model_type}"
    if remote or is_recurrent(config):
        return None
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    inputs = inspect.signature(model_class.forward).parameters
    # XLM has an argument of this name too, but it is another kind of cache, a dictionary.
    if CACHE in inputs and "dict[" not in str(inputs[CACHE].annotation):
        return None
    if "shared_kv_states" not in inputs:
        reason = "keeps no KV cache; choose a newer transformer"
    elif role == "draft":
        return None  # engine=huggingface can use such a draft; `Local.check_pair` refuses it for engine=local
    else:
        reason = "reads its target's KV cache, and can only be a draft"
    return f"cannot be used: {config.model_type} {reason}"


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Whether a model has layers that fold tokens into a state; False if it has only a KV cache."""
    text_config = config.get_text_config(decoder=True)
    layer_types = getattr(text_config, "layer_types", None) or ()
    # transformers marks such models with `_is_stateful`; its `generate` refuses draft models for them.
    stateful = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_is_stateful", False)
    return stateful or not _NOT_RECURRENT.issuperset(layer_types)


def _check_directory(role: str, settings: ModelSettings, needs_weights: bool) -> None:
    """Raise a SettingError unless the model's directory exists, and holds a configuration and, if they are needed,
    weights. If the model is not a directory but a repository on the hub, only its name is checked.
    """
    repository = settings.repository
    check_place(role, repository)
    directory = Path(repository)
    if not directory.is_dir():
        return
    if settings.gguf_file is not None:
        if not (directory / settings.gguf_file).is_file():
            rule = f"no such file in {directory}"
            raise SettingError(f"{role}.gguf_file", rule, settings.gguf_file)
        return
    if not (directory / "config.json").is_file():
        hint = ""
        if any(directory.glob("*.gguf")):
            hint = f" (for a GGUF file set {role}.gguf_file)"
        elif (directory / "adapter_config.json").is_file():
            hint = " (it is an adapter, which must be merged into its base model first)"
        raise SettingError(role, f"the directory holds no config.json{hint}", repository)
    has_weights = any(directory.glob("*.safetensors")) or any(directory.glob("*.bin"))
    if needs_weights and not has_weights:
        rule = "the directory holds no weights (model.safetensors or pytorch_model.bin)"
        raise SettingError(role, rule, repository)
    for index in map(directory.joinpath, INDICES):
        try:
            # This raises an exception if the index is damaged, or names files outside the directory.
            weight_map(index)
        except Exception as error:
            raise SettingError(role, f"{index.name}: {first_line(error)}", repository) from error


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor according to an index file; {} if the index file does not exist.

    Raises:
        ValueError: the file is not JSON, names no tensors, or names a file outside its directory. (A repository must
            not be able to make this program open other files.)
        KeyError, TypeError, AttributeError: the file has another structure than an index.
    """
    if not index.exists():
        return {}
    files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    if not files:
        raise ValueError("names no tensors")
    for file in set(files.values()):
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(f"names {file}, which is outside its directory")
    return files


def check_model_access(settings: ModelSettings) -> None:
    """Raise the error of the hub's client if the hub refuses a model or cannot be reached. The hub is not asked about a
    model in a directory, and otherwise as `check_hub_access` says.
    """
    name = settings.repository
    if not Path(name).is_dir():
        check_hub_access(name, settings.gguf_file or "config.json", settings.revision)


def check_hub_access(
    repository: str, file: str, revision: str | None, kind: Literal["model", "dataset"] = "model"
) -> None:
    """Ask the hub once for a repository, unless `file` has been downloaded before, or the user has set
    `HF_HUB_OFFLINE`. Raises the error of the hub's client if the hub refuses or cannot be reached.

    This gives up after 10 s. Without this check, the hub's client would try each file for half a minute if there is no
    network.
    """
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    cached = huggingface_hub.try_to_load_from_cache(
        repository, file, revision=revision, repo_type=kind
    )
    if not isinstance(cached, str):
        huggingface_hub.HfApi().repo_info(repository, revision=revision, repo_type=kind, timeout=10)


def stored_quantization(config: PreTrainedConfig) -> str | None:
    """Return the quantization of the stored weights: `8bit` or `4bit` (bitsandbytes), or the name of another method
    (the text "None" if the configuration does not name it). None if they are not quantized.
    """
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
    """Return the `quantization_config` of a model, or of the language model in it; None if neither has one."""
    text_config = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    return getattr(config, "quantization_config", None) or text_config


def resolve_dtype(dtype: Dtype, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Return the dtype of a checkpoint's weights on this kind of device.

    Args:
        dtype: the setting. `auto` means float32 on a CPU. On a GPU it means float16 if the checkpoint is stored in
            float16, if its weights are in 8 bits, or if the GPU does not support bfloat16; otherwise bfloat16.
        device: `meta` stands for a hypothetical GPU.
    """
    config = checkpoint.config
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cpu":
        return torch.float32
    # Hypothetical GPUs (the meta device) are assumed to support bfloat16.
    is_old = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    # LLM.int8() multiplies in float16. With bfloat16 it would convert to float16 and back in every layer.
    in_8bit = "8bit" in (stored_quantization(config), checkpoint.settings.quantization)
    if is_old or in_8bit or config.dtype in (torch.float16, "float16"):
        return torch.float16
    return torch.bfloat16


def refuse_second_quantization(checkpoint: Checkpoint) -> None:
    """Raise a SettingError if stored weights are quantized already, and the settings require another quantization."""
    settings = checkpoint.settings
    stored = "GGUF" if settings.gguf_file else stored_quantization(checkpoint.config)
    if settings.quantization != "none" and stored not in (None, settings.quantization):
        already = f"the weights of {settings.name} are quantized already ({stored})"
        rule = f"{already}: leave this setting out"
        raise SettingError(f"{checkpoint.role}.quantization", rule, settings.quantization)


def check_quantizer(checkpoint: Checkpoint, device: torch.device) -> None:
    """Raise a RunError if the library for a checkpoint's quantization is missing, or does not work on `device`. Weights
    that are not quantized need no library.
    """
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
    # This import takes a second, so it is done only for quantized weights.
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        stored_config = _quantization_config(config)
        quantizer: Any = AutoHfQuantizer.from_config(stored_config, pre_quantized=True)
        quantizer.validate_environment(device_map={"": str(device)})
        # Without kernels for this device, transformers would unpack the weights, which takes several times the memory.
        if getattr(quantizer.quantization_config, "dequantize", False):
            raise RuntimeError("this device has no kernels for it")
    except (ImportError, RuntimeError, ValueError) as exception:
        reason = f"{settings.repository} is quantized with {stored}, which does not load here"
        raise RunError(f"{role}: {reason}: {first_line(exception)}") from exception


def _try_bitsandbytes(role: str, quantization: str, device: torch.device) -> None:
    """Quantize a small tensor on `device`, to test bitsandbytes. Raises RunError if this fails."""
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
