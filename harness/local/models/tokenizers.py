"""Tokenizers, how they load, and what a configuration says of texts: the size of the vocabulary, the longest one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.errors import SettingError
from harness.config.failures import explained, first_line
from harness.config.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from harness.local.models.checkpoints import Checkpoint

# A family pads its embeddings to different numbers of rows; sizes farther apart than this share are of other
# vocabularies.
_MOST_PADDING = 0.02
# Every directory with a tokenizer has one of these.
_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*")
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
    source = settings
    blamed_setting = role
    if settings.tokenizer is not None:
        # Another repository has other revisions and files.
        source = dataclasses.replace(
            settings, repository=settings.tokenizer, revision=None, gguf_file=None
        )
        blamed_setting = f"{role}.tokenizer"
    from transformers import AutoTokenizer

    from harness.local.models.checkpoints import source_arguments

    try:
        return AutoTokenizer.from_pretrained(source.repository, **source_arguments(source))
    except Exception as exception:
        has_own_files = Path(source.repository).is_dir() and source.gguf_file is None
        if not has_own_files:
            raise explained(exception, blamed_setting, source) from exception
        if "trust_remote_code" in str(exception):
            # The setting to blame is `model.trust_remote_code`, also for a tokenizer elsewhere.
            raise explained(exception, role, source) from exception
        # A directory may hold weights without a tokenizer: naming one elsewhere helps.
        rule = "must name a directory or a repository with a tokenizer"
        cause = f"{source.repository} holds none"
        directory = Path(source.repository)
        if any(file for pattern in _TOKENIZER_FILES for file in directory.glob(pattern)):
            cause += f" that loads ({first_line(exception)})"
        raise SettingError(f"{role}.tokenizer", f"{rule}; {cause}") from exception


def check_vocabularies(target: Checkpoint, draft: Checkpoint) -> None:
    """Raise a SettingError if the vocabularies differ by more than one family's padding."""
    size = vocabulary_size(target.config)
    other = vocabulary_size(draft.config)
    if abs(size - other) > _MOST_PADDING * max(size, other):
        rule = f"must have the vocabulary of model={target.settings.name}"
        sizes = f"{other} outputs against {size}; engine=huggingface drafts with two tokenizers"
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
    # MPT has it inside its attention settings. BLOOM always has it, and no field that says so.
    attention: Any = getattr(config, "attn_config", None)
    if isinstance(attention, dict) and attention.get("alibi"):
        return True
    if getattr(attention, "alibi", False) or getattr(config, "alibi", False):
        return True
    return bool(config.model_type == "bloom")
