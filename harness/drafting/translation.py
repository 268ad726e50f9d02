"""Between two tokenizers: which tokens they have in common, and how the text of one is read by the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from harness.config.errors import SettingError
from harness.drafting.translated import Translation
from harness.models.checkpoints import Checkpoint, source
from harness.models.tokenizers import load_tokenizer, vocabulary_size

# With fewer of the draft's tokens in the target's vocabulary the draft tells its text instead of drawing from these.
_FEWEST_IN_COMMON = 0.5

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def how_to_translate(
    target: Checkpoint,
    draft: Checkpoint,
    target_tokenizer: PreTrainedTokenizerBase,
    draft_tokenizer: PreTrainedTokenizerBase,
) -> Translation | None:
    """How a draft with another tokenizer is understood; None where both models mean the same token by every id.

    Raises a SettingError if a model has no outputs for some of its tokens.

    The embeddings may differ in size as long as the tokenizers agree: models of one family pad them differently
    (Qwen2 0.5B has 151,936 rows and 7B 152,064, for 151,646 tokens). Cut logits to `Pair.vocabulary_size` before
    comparing them; the rest stands for no token.
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


def check_local(target: Checkpoint, draft: Checkpoint) -> None:
    """`how_to_translate` where both tokenizers are in directories, where nothing is downloaded."""
    if not (_has_tokenizer(target) and _has_tokenizer(draft)):
        return
    target_tokenizer = load_tokenizer(target.settings)
    draft_tokenizer = load_tokenizer(draft.settings, "draft")
    how_to_translate(target, draft, target_tokenizer, draft_tokenizer)


def _has_tokenizer(checkpoint: Checkpoint) -> bool:
    return any(Path(source(checkpoint.settings)).glob("tokenizer*"))


def translation(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, num_tokens: int
) -> Translation:
    """Between a target's tokenizer and a draft's; `num_tokens` is the width of the target's logits."""
    draft_tokens = _texts(draft)
    common: dict[int, int] = {}
    for text, token in _texts(target).items():
        if text in draft_tokens and token < num_tokens:
            common[token] = draft_tokens[text]

    def into_draft(tokens: Sequence[int]) -> list[int]:
        read: list[int] = []
        unknown: list[int] = []
        for token in tokens:
            if token not in common:
                unknown.append(token)
                continue
            read += [*_read(draft, target, unknown), common[token]]
            unknown = []
        # A character has at most four bytes, and each may be a token.
        may_be_incomplete = 0 < len(unknown) < 4
        if may_be_incomplete and _text(target, unknown).endswith(_BROKEN):
            return []
        return read + _read(draft, target, unknown)

    def read_prompt(tokens: Sequence[int]) -> list[int]:
        text = target.decode(list(tokens), skip_special_tokens=True)
        return list(draft(text)["input_ids"]) or [_any_token(draft)]

    def into_target(tokens: Sequence[int]) -> list[int]:
        return _read(target, draft, tokens)

    has_enough = len(common) >= _FEWEST_IN_COMMON * len(draft.get_vocab())
    name: Literal["intersection", "text"] = "intersection" if has_enough else "text"
    pairs = sorted(common.items())
    return Translation(pairs, read_prompt, into_draft, into_target, num_tokens, name)


def _read(
    reader: PreTrainedTokenizerBase, writer: PreTrainedTokenizerBase, tokens: Sequence[int]
) -> list[int]:
    """Tokens of one tokenizer as another's, whole characters only."""
    text = _text(writer, tokens).rstrip(_BROKEN)
    if not text:
        return []
    return list(reader(text, add_special_tokens=False)["input_ids"])


def _text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    # Behind another token, because some write a token at the beginning of a text without its space.
    first = list(tokens[:1])
    whole = _decoded(tokenizer, [*first, *tokens])
    return whole[len(_decoded(tokenizer, first)) :]


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)


def _texts(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, int]:
    """The bytes that each token stands for, the end of a text as none at all; other special tokens are left out."""
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    by_bytes = not any("\N{LOWER ONE EIGHTH BLOCK}" in token for token in vocabulary)
    texts: dict[bytes, int] = {}
    for token, number in vocabulary.items():
        if number in special:
            continue
        if by_bytes and all(character in _BYTES for character in token):
            text = bytes(_BYTES[character] for character in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            text = bytes.fromhex(token[3:5])
        else:
            text = token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        # Bytes may have a token as well as the character.
        texts[text] = min(number, texts.get(text, number))
    if tokenizer.eos_token_id is not None:
        texts[b""] = int(tokenizer.eos_token_id)
    return texts


def _any_token(tokenizer: PreTrainedTokenizerBase) -> int:
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
