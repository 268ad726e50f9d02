"""Translations between two tokenizers: their common tokens, and the text of one as the other's
tokens.

A draft model whose tokenizer differs from the target's drafts through a `Translation`
(`translated`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from harness.config.errors import SettingError
from harness.drafting.translated import Translation
from harness.models.checkpoints import Checkpoint
from harness.models.detokenizer import BROKEN
from harness.models.tokenizers import load_tokenizer, vocabulary_size

# The share of the draft's tokens that the target's vocabulary must have. With fewer, the draft does
# not draw from the common tokens: its text is translated.
_LEAST_SHARE_IN_COMMON = 0.5

# The character by which SentencePiece marks spaces; byte-level tokenizers have none.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

# Byte-level BPE writes each byte of a token as a character that can be printed.
_BYTE_OF_STAND_IN = {character: byte for byte, character in bytes_to_unicode().items()}


def how_to_translate(
    target: Checkpoint,
    draft: Checkpoint,
    target_tokenizer: PreTrainedTokenizerBase,
    draft_tokenizer: PreTrainedTokenizerBase,
) -> Translation | None:
    """Return the translation of a draft with another tokenizer, None if the tokenizers agree.

    Tokenizers may agree although the embeddings differ in size: models of one family pad them
    differently (Qwen2 0.5B has 151,936 rows and 7B 152,064, for 151,646 tokens). Logits beyond
    `Pair.vocabulary_size` stand for no token, and must be cut off before logits are compared.

    Raises:
        SettingError: if one of two models that agree has no outputs for some of the tokens.
    """
    if target_tokenizer.get_vocab() != draft_tokenizer.get_vocab():
        return translation(target_tokenizer, draft_tokenizer, vocabulary_size(target.config))
    num_outputs = vocabulary_size(target.config)
    num_draft_outputs = vocabulary_size(draft.config)
    num_tokens = max(target_tokenizer.get_vocab().values()) + 1
    if num_outputs != num_draft_outputs and min(num_outputs, num_draft_outputs) < num_tokens:
        of_target = f"{num_outputs} of model={target.settings.name}"
        rule = f"has {num_draft_outputs} outputs against {of_target}, for {num_tokens} tokens"
        raise SettingError("draft", rule, draft.settings.name)
    return None


def check_if_local(target: Checkpoint, draft: Checkpoint) -> None:
    """Call `how_to_translate` for its errors alone, for a plan, which loads no weights.

    Only if both tokenizers are in directories, so that nothing is downloaded.
    """
    for checkpoint in (target, draft):
        if not any(Path(checkpoint.settings.repository).glob("tokenizer*")):
            return
    target_tokenizer = load_tokenizer(target.settings)
    draft_tokenizer = load_tokenizer(draft.settings, "draft")
    how_to_translate(target, draft, target_tokenizer, draft_tokenizer)


def translation(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_vocabulary_size: int
) -> Translation:
    """Return the translation between a target's tokenizer and a draft's.

    Args:
        target_vocabulary_size: the width of the target's logits.
    """
    draft_tokens = _tokens_by_bytes(draft)
    common: dict[int, int] = {}
    for text, token in _tokens_by_bytes(target).items():
        if text in draft_tokens and token < target_vocabulary_size:
            common[token] = draft_tokens[text]

    def into_draft(tokens: Sequence[int]) -> list[int]:
        # Common tokens are translated one by one, what is between them by its text.
        translated: list[int] = []
        unknown: list[int] = []
        for token in tokens:
            if token not in common:
                unknown.append(token)
                continue
            translated += [*_reread(draft, target, unknown), common[token]]
            unknown = []
        if _text(target, unknown).endswith(BROKEN):
            # A character has at most four bytes, and each may be a token of its own. So it can
            # still be completed if it began with one of the last three tokens.
            for number in (1, 2, 3):
                if not _text(target, unknown[:-number]).endswith(BROKEN):
                    # The caller asks again with all these tokens and the next.
                    return []
        return translated + _reread(draft, target, unknown)

    def prompt_into_draft(tokens: Sequence[int]) -> list[int]:
        text = target.decode(list(tokens), skip_special_tokens=True)
        translated = list(draft(text)["input_ids"])
        if not translated:
            # A token that begins or ends texts, where there is one.
            marks = [draft.bos_token_id, draft.eos_token_id]
            known = [int(token) for token in marks if token is not None]
            translated = [known[0] if known else 0]
        return translated

    def into_target(tokens: Sequence[int]) -> list[int]:
        return _reread(target, draft, tokens)

    has_enough = len(common) >= _LEAST_SHARE_IN_COMMON * len(draft.get_vocab())
    method: Literal["intersection", "text"] = "intersection" if has_enough else "text"
    return Translation(
        common=dict(sorted(common.items())),
        prompt_into_draft=prompt_into_draft,
        into_draft=into_draft,
        into_target=into_target,
        target_vocabulary_size=target_vocabulary_size,
        method=method,
    )


def _reread(
    reader: PreTrainedTokenizerBase, writer: PreTrainedTokenizerBase, tokens: Sequence[int]
) -> list[int]:
    """Return the reader's tokens for the text of the writer's tokens, whole characters only."""
    text = _text(writer, tokens).rstrip(BROKEN)
    if not text:
        return []
    return list(reader(text, add_special_tokens=False)["input_ids"])


def _text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Return the text of tokens from the middle of a text."""
    if not tokens:
        return ""
    # Some tokenizers drop the space before the first token of a text. So the first token is put in
    # front once more, and its own text is cut off again.
    first = list(tokens[:1])
    whole = _decoded(tokenizer, [*first, *tokens])
    return whole[len(_decoded(tokenizer, first)) :]


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)


def _tokens_by_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, int]:
    """Return the id of each token by its bytes.

    The empty `b""` is the token that ends a text. Other special tokens are left out.
    """
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    is_byte_level = not any(_SPACE in token for token in vocabulary)
    tokens: dict[bytes, int] = {}
    for token, number in vocabulary.items():
        if number in special:
            continue
        if is_byte_level and all(character in _BYTE_OF_STAND_IN for character in token):
            text = bytes(_BYTE_OF_STAND_IN[character] for character in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # `<0xC3>`
            text = bytes.fromhex(token[3:5])
        else:
            text = token.replace(_SPACE, " ").encode()
        # A character may have two tokens, one for it and one for its byte: take the smaller id.
        tokens[text] = min(number, tokens.get(text, number))
    if tokenizer.eos_token_id is not None:
        tokens[b""] = int(tokenizer.eos_token_id)
    return tokens
