"""Loads tokenizers, and reads the size of the vocabulary and the longest context from a model's configuration."""

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

# Models of one family pad their embeddings to different numbers of rows. If two sizes differ by more than this share,
# they are taken for different vocabularies. The share is a choice; Qwen2's sizes, for example, differ by 0.1 %.
_MOST_PADDING = 0.02
# The names that configurations use for the length of the longest sequence. If a configuration has several of these
# fields, the first counts.
_CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)


def load_tokenizer(settings: ModelSettings, role: str = "model") -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model: the tokenizer in the model's repository or, if `settings.tokenizer` names another
    place, the tokenizer there.

    Args:
        role: `model` or `draft`, for errors.

    Raises:
        SettingError: a directory holds no tokenizer that loads, for whatever reason; a setting such as the revision is
            wrong; or the tokenizer needs `trust_remote_code`.
        RunError: the tokenizer's repository is missing, gated or cannot be reached, or the tokenizer cannot be loaded.
        KeyboardInterrupt: Ctrl-C was the cause of an exception, unless the tokenizer is in a directory.

    For repositories and GGUF files, an exception that `failures.explain` does not know, such as a KeyError of
    transformers, passes unchanged.
    """
    source = settings
    blamed_setting = role
    if settings.tokenizer is not None:
        # The model's `revision` and `gguf_file` do not apply to another repository.
        source = dataclasses.replace(
            settings, repository=settings.tokenizer, revision=None, gguf_file=None
        )
        blamed_setting = f"{role}.tokenizer"
    from transformers import AutoTokenizer

    from harness.local.models.checkpoints import source_arguments

    try:
        return AutoTokenizer.from_pretrained(source.repository, **source_arguments(source))
    except Exception as exception:
        # `model.trust_remote_code` is also the setting for a tokenizer in another repository.
        needs_trust = "trust_remote_code" in str(exception)
        # A GGUF file always contains a tokenizer, so the advice below does not apply to it.
        is_directory = Path(source.repository).is_dir() and source.gguf_file is None
        if needs_trust or not is_directory:
            blamed = role if needs_trust else blamed_setting
            raise explained(exception, blamed, source) from exception
        # A directory may hold weights without a tokenizer. Then the user can name another place for the tokenizer.
        rule = "must name a directory or a repository with a tokenizer"
        cause = f"{source.repository} holds none that loads ({first_line(exception)})"
        raise SettingError(f"{role}.tokenizer", f"{rule}; {cause}") from exception


def check_vocabularies(target: Checkpoint, draft: Checkpoint) -> None:
    """Raise a SettingError if the sizes of two models' vocabularies differ by more than padding explains."""
    size = vocabulary_size(target.config)
    other = vocabulary_size(draft.config)
    if abs(size - other) > _MOST_PADDING * max(size, other):
        rule = f"must have the vocabulary of model={target.settings.name}"
        sizes = f"{other} outputs against {size}; engine=huggingface drafts with two tokenizers"
        raise SettingError("draft", f"{rule}: {sizes}", draft.settings.name)


def vocabulary_size(config: PreTrainedConfig) -> int:
    """Return the number of rows of the embedding, padding included. This is also the width of the logits."""
    return int(config.get_text_config(decoder=True).vocab_size)


def max_context(config: PreTrainedConfig) -> int | None:
    """Return the length of the longest sequence for which the model was made, in tokens, prompt included.

    None if there is no such limit: for models with ALiBi (BLOOM, MPT, some Falcon models), and if the configuration
    does not state a limit.
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
    # MPT states this in its attention settings. BLOOM always uses ALiBi, and has no field for it.
    attention: Any = getattr(config, "attn_config", None)
    if isinstance(attention, dict) and attention.get("alibi"):
        return True
    is_set = getattr(attention, "alibi", False) or getattr(config, "alibi", False)
    return bool(is_set or config.model_type == "bloom")
