"""Tokenizers: how they load, and how they differ between target and draft."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.errors import SettingError
from harness.config.failures import explained, first_line
from harness.config.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from harness.local.models.checkpoints import Checkpoint

# One family pads its embeddings to different numbers of rows; a larger share than this is another
# vocabulary.
PADDING = 0.02

# One of them is in every directory with a tokenizer.
_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*")
# Names of the class that reads any `tokenizer.json`, before transformers 5 and since.
_GENERAL_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Names that configurations have for the longest sequence.
_CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)


def load_tokenizer(settings: ModelSettings, role: str = "model") -> PreTrainedTokenizerBase:
    """The tokenizer in the weights' repository, or the one `settings.tokenizer` names.

    Raises SettingError or RunError if it is absent, gated or out of reach.
    """
    place = settings
    naming_setting = role
    if settings.tokenizer is not None:
        # Another repository has other revisions and files.
        place = dataclasses.replace(
            settings, repository=settings.tokenizer, revision=None, gguf_file=None
        )
        naming_setting = f"{role}.tokenizer"
    tokenizer = _general_tokenizer(place)
    if tokenizer is not None:
        return tokenizer
    from transformers import AutoTokenizer

    from harness.local.models.checkpoints import source_arguments

    try:
        return AutoTokenizer.from_pretrained(place.repository, **source_arguments(place))
    except Exception as exception:
        is_directory = Path(place.repository).is_dir() and place.gguf_file is None
        if not is_directory:
            raise explained(exception, naming_setting, place) from exception
        if "trust_remote_code" in str(exception):
            # The setting to blame is `model.trust_remote_code`, also for a tokenizer elsewhere.
            raise explained(exception, role, place) from exception
        # A directory may hold weights without a tokenizer: naming one elsewhere helps.
        rule = "must name a directory or a repository with a tokenizer"
        cause = f"{place.repository} holds none"
        directory = Path(place.repository)
        if any(file for pattern in _TOKENIZER_FILES for file in directory.glob(pattern)):
            cause += f" that loads ({first_line(exception)})"
        raise SettingError(f"{role}.tokenizer", f"{rule}; {cause}") from exception


def _general_tokenizer(place: ModelSettings) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a Llama that declares transformers' general class, as Llama 3 does.

    `AutoTokenizer` would take the same class, after importing torch and every configuration. None
    where another class may be right, a repository was never fetched, or something fails, which
    `AutoTokenizer` explains.
    """
    from huggingface_hub import try_to_load_from_cache
    from transformers import PreTrainedTokenizerFast

    if place.gguf_file is not None:
        return None
    declared: dict[str, Any] = {}
    try:
        for name in ("config.json", "tokenizer_config.json"):
            file: Any = Path(place.repository, name)
            if not Path(place.repository).is_dir():
                file = try_to_load_from_cache(place.repository, name, revision=place.revision)
            declared |= json.loads(Path(file).read_text(encoding="utf-8"))
        is_general = declared.get("tokenizer_class") in _GENERAL_CLASSES
        if not is_general or declared.get("model_type") != "llama" or "auto_map" in declared:
            return None
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
            place.repository, revision=place.revision or "main"
        )
    except Exception:
        return None
    return tokenizer


def check_sizes(target: Checkpoint, draft: Checkpoint) -> None:
    """Raise a SettingError if the vocabularies differ by more than one family's padding."""
    size = vocabulary_size(target.config)
    other = vocabulary_size(draft.config)
    if abs(size - other) > PADDING * max(size, other):
        rule = f"must have the vocabulary of model={target.settings.name}"
        sizes = f"{other} outputs against {size}"
        raise SettingError("draft", f"{rule}: {sizes}", draft.settings.name)


def vocabulary_size(config: PreTrainedConfig) -> int:
    """Rows of the embedding and width of the logits, padding included."""
    return int(config.get_text_config(decoder=True).vocab_size)


def max_context(config: PreTrainedConfig) -> int | None:
    """The longest sequence the model was made for, in tokens, prompt included.

    None without a limit: ALiBi (BLOOM, MPT, some Falcon) and configurations that name none.
    """
    text_config = config.get_text_config(decoder=True)
    if _has_alibi(text_config):
        return None
    for name in _CONTEXT_NAMES:
        limit = getattr(text_config, name, None)
        if isinstance(limit, int) and limit > 0:
            return int(limit)
    return None


def _has_alibi(config: PreTrainedConfig) -> bool:
    # MPT has it inside its attention settings; BLOOM has nothing else and does not say so.
    attention: Any = getattr(config, "attn_config", None)
    if isinstance(attention, dict) and attention.get("alibi"):
        return True
    if getattr(attention, "alibi", False) or getattr(config, "alibi", False):
        return True
    return bool(config.model_type == "bloom")
