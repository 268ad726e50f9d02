"""Tokenizers: loading them, holding the draft's against the target's, and turning prompts into token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from harness.config.commands import ChatTemplate
from harness.config.errors import SettingError
from harness.config.settings import ModelSettings
from harness.models.checkpoints import Checkpoint, explain, source, source_arguments

if TYPE_CHECKING:
    from harness.models.loading import Pair

# Messages with `role` and `content`.
Chat = Sequence[Mapping[str, str]]

# What architectures call the longest sequence they were made for.
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


def load_tokenizer(settings: ModelSettings, role: str = "model") -> PreTrainedTokenizerBase:
    """The tokenizer that lies with the weights, or the one `settings.tokenizer` names.

    Raises:
        SettingError, RunError: it is absent, gated or out of reach.
    """
    setting, place = role, settings
    if settings.tokenizer is not None:
        # Another repository, whose revisions and files are its own.
        setting = f"{role}.tokenizer"
        place = dataclasses.replace(settings, repository=settings.tokenizer, revision=None, gguf_file=None)
    try:
        return AutoTokenizer.from_pretrained(source(place), **source_arguments(place))
    except Exception as exception:
        if Path(source(place)).is_dir() and place.gguf_file is None:
            rule = f"must name a directory or a repository with a tokenizer; {place.repository} holds none that loads"
            raise SettingError(f"{role}.tokenizer", rule) from exception
        raise explain(exception, setting, place) or exception from exception


def check_compatible(
    target: Checkpoint,
    draft: Checkpoint,
    target_tokenizer: PreTrainedTokenizerBase,
    draft_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Raise a SettingError unless both models mean the same token by every id.

    The embeddings may differ in size as long as the tokenizers agree: models of one family pad them differently
    (Qwen2 0.5B has 151,936 rows and 7B 152,064, for 151,646 tokens). Their logits then differ in width, and whoever
    compares them cuts both to `shared_vocabulary_size`; what is cut off stands for no token.
    """
    target_tokens, draft_tokens = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if target_tokens != draft_tokens:
        differs = _first_difference(target_tokens, draft_tokens)
        rule = (
            f"must have the vocabulary of model={target.settings.name}: "
            f"{len(draft_tokens)} tokens against {len(target_tokens)}, {differs}"
        )
        raise SettingError("draft", rule, draft.settings.name)
    widths = vocabulary_size(target.config), vocabulary_size(draft.config)
    tokens = max(target_tokens.values()) + 1
    if widths[0] != widths[1] and min(widths) < tokens:
        rule = f"has {widths[1]} outputs against {widths[0]} of model={target.settings.name}, for {tokens} tokens"
        raise SettingError("draft", rule, draft.settings.name)


def shared_vocabulary_size(pair: Pair) -> int:
    """The width that both models' logits have in common; cut both to it before comparing them."""
    models = [pair.target] if pair.draft is None else [pair.target, pair.draft]
    return min(vocabulary_size(loaded.model.config) for loaded in models)


def vocabulary_size(config: PreTrainedConfig) -> int:
    """Rows of the embedding and width of the logits, padding included."""
    return int(config.get_text_config(decoder=True).vocab_size)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], chat_template: ChatTemplate
) -> list[list[int]]:
    """Token ids of each prompt.

    Args:
        tokenizer: the pair's.
        chats: messages with `role` and `content`, the user's last word at the end; a plain prompt is one message.
        chat_template: `auto` uses the tokenizer's template where it has one; without, the last message alone is
            encoded, with the special tokens that the tokenizer adds by itself.

    Raises:
        SettingError: `always` and there is no template; a prompt of no tokens.
    """
    if chat_template == "always" and not tokenizer.chat_template:
        raise SettingError("chat_template", "this model's tokenizer has none; use auto or never", chat_template)
    if chat_template != "never" and tokenizer.chat_template:
        encoded = [
            tokenizer.apply_chat_template(list(map(dict, chat)), add_generation_prompt=True, return_dict=False)
            for chat in chats
        ]
    else:
        encoded = [tokenizer(chat[-1]["content"])["input_ids"] for chat in chats]
    for index, (chat, tokens) in enumerate(zip(chats, encoded, strict=True)):
        if not tokens:
            raise SettingError("prompts", f"prompt {index} ({chat[-1]['content']!r}) has no tokens")
    return [list(map(int, tokens)) for tokens in encoded]


def max_context(config: PreTrainedConfig) -> int | None:
    """The longest sequence the model was made for, in tokens, prompt included.

    None where positions have no end: ALiBi (BLOOM, MPT, some Falcon) and configurations that name no limit.
    """
    text = config.get_text_config(decoder=True)
    if _uses_alibi(text):
        return None
    limits = (getattr(text, name, None) for name in _CONTEXT_NAMES)
    return next((int(limit) for limit in limits if isinstance(limit, int) and limit > 0), None)


def _uses_alibi(config: PreTrainedConfig) -> bool:
    attention: Any = getattr(config, "attn_config", None)
    inside = attention.get("alibi") if isinstance(attention, dict) else getattr(attention, "alibi", False)
    # MPT says it inside its attention settings; BLOOM knows nothing else and does not say it.
    return bool(getattr(config, "alibi", False) or inside or config.model_type == "bloom")


def _first_difference(target: dict[str, int], draft: dict[str, int]) -> str:
    """The token with the smallest id that the two vocabularies disagree on, in words."""

    def place(tokens: dict[str, int], token: str) -> str:
        return f"is {tokens[token]}" if token in tokens else "is missing"

    def smallest_id(token: str) -> tuple[int, str]:
        return min(tokens[token] for tokens in (target, draft) if token in tokens), token

    token = min((t for t in target.keys() | draft.keys() if target.get(t) != draft.get(t)), key=smallest_id)
    return f"{token!r} {place(draft, token)} in the draft and {place(target, token)} in the model"
