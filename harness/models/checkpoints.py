"""What is known of a model before its weights load: its configuration, and whether it can be used at all."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import transformers
from huggingface_hub import errors as hub
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, PreTrainedConfig

from harness.config.errors import HarnessError, RunError, SettingError
from harness.config.settings import ModelSettings
from harness.models.devices import as_run_error

# Layers that keep keys and values by position (and those that keep nothing): forgetting the last tokens means cutting
# the cache. Any other kind of layer, known or to come, folds tokens into a state that cannot give them back.
_TAKEN_BACK = {"full_attention", "sliding_attention", "chunked_attention", "attention", "dense", "sparse", "moe", "mlp"}
# The last resort, for models that bring their own code and declare nothing.
_RECURRENT_NAMES = ("mamba", "rwkv", "ssm", "recurrent", "retnet", "lstm", "hyena", "jamba", "griffin")


@dataclass(frozen=True)
class Checkpoint:
    """A model before its weights load.

    Attributes:
        role: `model` or `draft`; how errors call it.
        settings: as the user gave them.
        config: of the repository.
        random: whether its weights are to be random numbers; see `random_weights`.
    """

    role: str
    settings: ModelSettings
    config: PreTrainedConfig
    random: bool = False

    @property
    def source(self) -> str:
        """The directory or the hub repository, as transformers wants it."""
        return source(self.settings)

    @property
    def arguments(self) -> dict[str, Any]:
        """What every `from_pretrained` of this repository needs besides its name."""
        return source_arguments(self.settings)


def source(settings: ModelSettings) -> str:
    """The directory or the hub repository, as transformers wants it."""
    return str(Path(settings.repository).expanduser()) if settings.repository.startswith("~") else settings.repository


def source_arguments(settings: ModelSettings) -> dict[str, Any]:
    """What every `from_pretrained` of this repository needs besides its name."""
    # False, not None: None asks on the terminal.
    arguments: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    if settings.revision is not None:
        arguments["revision"] = settings.revision
    if settings.gguf_file is not None:
        arguments["gguf_file"] = settings.gguf_file
    return arguments


def read_checkpoint(role: str, settings: ModelSettings, *, weights: bool = True) -> Checkpoint:
    """Read the configuration and check what can be checked on it alone.

    Args:
        weights: whether a directory must hold weights as well.

    Raises:
        SettingError: a directory that is not there or holds no model; a model that is not a causal language model, or
            whose state cannot be taken back.
        RunError: a repository that is absent, gated or out of reach; GGUF without the `gguf` package.
    """
    if settings.gguf_file is not None and importlib.util.find_spec("gguf") is None:
        raise RunError(f"{role}: reading {settings.gguf_file} needs the gguf package: pip install harness[gguf]")
    _check_directory(role, settings, weights)
    try:
        _ask_hub(settings)
        config = AutoConfig.from_pretrained(source(settings), **source_arguments(settings))
    except Exception as exception:
        raise explain(exception, role, settings) or exception from exception
    check_rollback(role, settings, config)
    return Checkpoint(role, settings, config)


def sketch_checkpoint(role: str, settings: ModelSettings) -> Checkpoint:
    """As `read_checkpoint`, for planning: a preset's own architecture is enough, and weights need not be there.

    Raises:
        SettingError, RunError: as `read_checkpoint`, but for absent weights.
    """
    if settings.architecture is None:
        return read_checkpoint(role, settings, weights=False)
    config = AutoConfig.for_model(**settings.architecture)
    check_rollback(role, settings, config)
    return Checkpoint(role, settings, config)


def check_rollback(role: str, settings: ModelSettings, config: PreTrainedConfig) -> None:
    """Raise a SettingError unless this is a decoder whose cache can forget tokens.

    Speculative decoding takes rejected tokens back; a recurrent state (Mamba, RWKV, linear attention, convolutions)
    has no way to. Decided by what the configuration and the model class declare, by name only as the last resort.
    """
    if config.is_encoder_decoder:
        raise SettingError(role, "must be a decoder-only model; this is an encoder-decoder", settings.name)
    # BERT and its kin have a causal class too, but no cache unless they were made decoders. (GPT-NeoX is a decoder and
    # says it is none.)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", True):
        raise SettingError(role, "must be a decoder-only model; this is an encoder", settings.name)
    local = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if local is None and "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
        raise SettingError(role, f"must be a causal language model, not {config.model_type}", settings.name)
    kind = _recurrent_kind(config, local)
    if kind is not None:
        rule = f"cannot be used: its state ({kind}) cannot take back rejected tokens; choose a transformer"
        raise SettingError(role, rule, settings.name)


def _recurrent_kind(config: PreTrainedConfig, model_class: Any) -> str | None:
    text = config.get_text_config(decoder=True)
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _TAKEN_BACK)
    if others:
        return f"{config.model_type}: {', '.join(others)}"
    # transformers' own mark, by which `generate` refuses assistants for these models.
    if getattr(model_class, "_is_stateful", False):
        return config.model_type
    by_name = any(name in config.model_type.lower() for name in _RECURRENT_NAMES)
    return config.model_type if by_name else None


def explain(exception: BaseException, role: str, settings: ModelSettings) -> HarnessError | None:
    """Why a repository cannot be read, in one or two lines; None where the failure is not one that is known."""
    repository, chain = settings.repository, list(_chain(exception))
    if (known := next(filter(None, map(as_run_error, chain)), None)) is not None:
        return known

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    login = "log in with `hf auth login` (formerly `huggingface-cli login`) or set HF_TOKEN"
    if caused_by(hub.GatedRepoError):
        return RunError(
            f"{role}: {repository} is gated: ask for access at https://huggingface.co/{repository}, then {login}"
        )
    if caused_by(hub.RepositoryNotFoundError):
        return RunError(f"{role}: {repository} is not on the hub, or is private: check the name, or {login}")
    if caused_by(hub.RevisionNotFoundError):
        rule = f"must be a branch, a tag or a commit of {repository}"
        return SettingError(f"{role}.revision", rule, settings.revision)
    if caused_by(hub.HFValidationError):
        return SettingError(role, "must be a preset, a directory or a hub repository (owner/name)", repository)
    if caused_by(hub.OfflineModeIsEnabled) or huggingface_hub.constants.HF_HUB_OFFLINE:
        return RunError(f"{role}: {repository} is not among the downloaded models, and HF_HUB_OFFLINE forbids fetching")
    if caused_by(hub.LocalEntryNotFoundError, ConnectionError, TimeoutError) or _no_connection(chain):
        return RunError(
            f"{role}: {repository} cannot be fetched, the hub is out of reach: check the network\n"
            "(a model that was downloaded before loads with HF_HUB_OFFLINE=1; a directory needs no network)"
        )
    if caused_by(hub.HfHubHTTPError):
        return RunError(f"{role}: the hub refuses {repository}: {_first_line(exception)}")
    if "trust_remote_code" in str(exception):
        rule = f"must be true to run the code that {repository} brings; read it first"
        return SettingError(f"{role}.trust_remote_code", rule, settings.trust_remote_code)
    if "does not recognize this architecture" in str(exception):
        message = f"{role}: transformers {transformers.__version__} does not know the architecture of {repository}"
        return RunError(f"{message}: pip install --upgrade transformers")
    if caused_by(SafetensorError):
        return RunError(f"{role}: a weights file of {repository} is damaged ({_first_line(exception)}): fetch it again")
    if "ignore_mismatched_sizes" in str(exception):
        return RunError(f"{role}: the weights of {repository} have other shapes than its configuration says")
    if isinstance(exception, OSError | ValueError | ImportError | RuntimeError):
        return RunError(f"{role}: {repository} cannot be loaded: {_first_line(exception)}")
    return None


def _check_directory(role: str, settings: ModelSettings, weights: bool) -> None:
    """Hub repositories pass; a directory must be there and hold a configuration, and weights if `weights`."""
    directory = Path(source(settings))
    if not directory.is_dir():
        # A hub name has at most one slash and does not start as a path does.
        if directory.is_absolute() or settings.repository.startswith((".", "~")) or settings.repository.count("/") > 1:
            raise SettingError(role, "no such directory", settings.repository)
        return
    if settings.gguf_file is not None:
        if not (directory / settings.gguf_file).is_file():
            raise SettingError(f"{role}.gguf_file", f"no such file in {directory}", settings.gguf_file)
        return
    if not (directory / "config.json").is_file():
        hint = " (for a GGUF file set gguf_file)" if any(directory.glob("*.gguf")) else ""
        raise SettingError(role, f"the directory holds no config.json{hint}", settings.repository)
    if weights and not any(any(directory.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
        rule = "the directory holds no weights (model.safetensors or pytorch_model.bin)"
        raise SettingError(role, rule, settings.repository)


def _ask_hub(settings: ModelSettings) -> None:
    """Raise what the hub says about a repository that was never downloaded.

    Without a network transformers finds out too, after half a minute of tries for each file.
    """
    name, revision = source(settings), settings.revision
    if Path(name).is_dir() or huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    cached = huggingface_hub.try_to_load_from_cache(name, settings.gguf_file or "config.json", revision=revision)
    if not isinstance(cached, str):
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=10)


def _chain(exception: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:
        seen.add(id(exception))
        yield exception
        exception = exception.__cause__ or exception.__context__


def _no_connection(chain: list[BaseException]) -> bool:
    # What the hub's client raises is no ConnectionError, and which client it is (httpx or its successor) depends on the
    # version.
    return any(parent.__name__ == "TransportError" for link in chain for parent in type(link).__mro__)


def _first_line(exception: BaseException) -> str:
    lines = [line.strip() for line in str(exception).splitlines() if line.strip()]
    return lines[0] if lines else type(exception).__name__
