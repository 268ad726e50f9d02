"""A draft model with another tokenizer: it draws from the tokens that both vocabularies have.

Its distribution is then one over the target's vocabulary, and verification is the usual one (Timor et al. 2025,
arXiv:2502.05202). Decided tokens that the draft lacks are spelt in its own, each by itself. So the draft model may see
other tokens than its tokenizer would make of the whole text. That lowers acceptance, but changes no distribution.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from harness.config.errors import SettingError
from harness.config.settings import require
from harness.local.decoding.inference import inference
from harness.local.decoding.protocols import Proposal, Runner, Step, TokenRows
from harness.local.decoding.randomness import are_tokens
from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.model import ModelDrafter, mask_token
from harness.local.models.checkpoints import Checkpoint
from harness.local.models.tokenizers import vocabulary_size

# The character by which SentencePiece marks spaces; ordinary tokens of byte-level tokenizers have none.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

# Byte-level BPE writes each byte of a token as a character that can be printed.
_BYTE_OF_STAND_IN = {character: byte for byte, character in bytes_to_unicode().items()}


@dataclass(frozen=True)
class Translation:
    """A translation between the tokens of a target and of its draft.

    Attributes:
        common: the tokens that both have: the draft's id for each of the target's, ascending.
        prompt_into_draft: turns the target's tokens of a prompt into the draft's, at least one.
        spell: turns one token of the target into the draft's, at least one.
        target_vocabulary_size: the width of the target's logits.
    """

    common: Mapping[int, int]
    prompt_into_draft: Callable[[Sequence[int]], list[int]]
    spell: Callable[[int], Sequence[int]]
    target_vocabulary_size: int

    @cached_property
    def common_pairs(self) -> Tensor:
        """The common tokens, [2, n]: the target's ids, and the draft's."""
        return torch.tensor([list(self.common), list(self.common.values())])

    def into_draft(self, tokens: Sequence[int]) -> list[int]:
        """Turn the target's next tokens into the draft's."""
        return [own for token in tokens for own in self.spell(token)]


class TranslatedDrafter(ModelDrafter):
    """Proposes with a draft model whose cache follows the text in its own tokens.

    Say the target decided `blue`, which the draft's tokenizer writes as `bl` and `ue`. A proposal of
    K = 2 feeds both and draws `sky` and `.`; to draw `.` the runner has read `sky` too. Say the verdict
    accepts `sky`, and `!` follows. The runner then keeps `bl`, `ue` and `sky`, and lacks `!`.

    Args:
        runner: the draft model's, with its own vocabulary.
        translation: between the target's tokens and the draft's.
        warp: the one for the target's logits.
    """

    def __init__(self, runner: Runner, translation: Translation, warp: AnyWarp) -> None:
        super().__init__(runner, warp)
        self._translation = translation

    def add(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        super().add(prompts, first_tokens, step)
        target_ids, self._draft_ids = self._translation.common_pairs.to(self._runner_device)
        self._target_ids = target_ids.to(self._device)
        self._draft_id_of = _table(target_ids, self._draft_ids)
        self._target_id_of = _table(self._draft_ids, target_ids)

    def _own_prompts(self, prompts: TokenRows) -> TokenRows:
        return [self._translation.prompt_into_draft(prompt) for prompt in prompts]

    def _own_tokens(self, decided: Sequence[int]) -> Sequence[int]:
        return self._translation.into_draft(decided)

    @inference
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        uniforms = uniforms.to(self._runner_device)
        if are_tokens(uniforms):
            # The target's. In place of those that the draft lacks any will do, because nothing is
            # accepted from them on.
            uniforms = _looked_up(uniforms, self._draft_id_of)
        draft_ids = self._draft_ids

        def warp(logits: Tensor) -> Tensor:
            """Probabilities over the common tokens alone; all others have none."""
            probabilities = self.warp(logits[..., draft_ids])
            nothing = probabilities.new_zeros(logits.shape)
            return nothing.index_copy_(-1, draft_ids, probabilities)

        drafted, probabilities = self._draw(uniforms, warp)
        # nan yields an arbitrary token; verification rejects it.
        tokens = _looked_up(drafted, self._target_id_of)
        common = probabilities[..., draft_ids].to(self._device)
        shape = (*tokens.shape, self._translation.target_vocabulary_size)
        over_target = common.new_zeros(shape).index_copy_(-1, self._target_ids, common)
        return Proposal(tokens.to(self._device), over_target)


def _table(keys: Tensor, values: Tensor) -> Tensor:
    """Return the table with values[i] at keys[i], and 0 elsewhere."""
    table = values.new_zeros(int(keys.max()) + 1)
    return table.index_copy_(0, keys, values)


def _looked_up(tokens: Tensor, table: Tensor) -> Tensor:
    """Translate tokens [B, K]; those that the table lacks become any token."""
    return table[tokens.clamp(max=len(table) - 1)]


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
        SettingError: if one of two models that agree has no outputs for some of the tokens; if tokenizers that do not
            have no token in common but the one that ends a text, or the draft drafts all tokens in one pass.
    """
    num_outputs = vocabulary_size(target.config)
    num_draft_outputs = vocabulary_size(draft.config)
    if target_tokenizer.get_vocab() != draft_tokenizer.get_vocab():
        rule = "drafts all tokens in one pass, and must have the model's tokenizer"
        require(mask_token(draft.config) is None, "draft", rule, draft.settings.name)
        found = translation(target_tokenizer, draft_tokenizer, num_outputs, num_draft_outputs)
        if len(found.common) <= 1:
            rule = f"has a tokenizer without a token of model={target.settings.name}"
            raise SettingError("draft", rule, draft.settings.name)
        return found
    num_tokens = max(target_tokenizer.get_vocab().values()) + 1
    if num_outputs != num_draft_outputs and min(num_outputs, num_draft_outputs) < num_tokens:
        target_size = f"{num_outputs} of model={target.settings.name}"
        rule = f"has {num_draft_outputs} outputs against {target_size}, for {num_tokens} tokens"
        raise SettingError("draft", rule, draft.settings.name)
    return None


def translation(
    target: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase,
    target_vocabulary_size: int,
    draft_vocabulary_size: int,
) -> Translation:
    """Return the translation between a target's tokenizer and a draft's.

    Args:
        target_vocabulary_size, draft_vocabulary_size: the widths of their logits.
    """
    target_tokens = _tokens_by_bytes(target, target_vocabulary_size)
    draft_tokens = _tokens_by_bytes(draft, draft_vocabulary_size)
    common: dict[int, int] = {}
    for text, token in target_tokens.items():
        if text in draft_tokens:
            common[token] = draft_tokens[text]
    # A token that begins or ends texts, where there is one.
    marks = [draft.bos_token_id, draft.eos_token_id]
    marked = [int(mark) for mark in marks if mark is not None]
    mark = marked[0] if marked else 0
    text_of = {token: text for text, token in target_tokens.items()}

    @functools.cache
    def spell(token: int) -> Sequence[int]:
        if token in common:
            return [common[token]]
        # What the draft has no bytes for, such as special tokens, is a mark.
        return _spelt(text_of.get(token, b""), draft_tokens) or [mark]

    def prompt_into_draft(tokens: Sequence[int]) -> list[int]:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        text = target.decode(list(tokens), **options)
        return list(draft(text)["input_ids"]) or [mark]

    return Translation(
        common=dict(sorted(common.items())),
        prompt_into_draft=prompt_into_draft,
        spell=spell,
        target_vocabulary_size=target_vocabulary_size,
    )


def _spelt(text: bytes, tokens: Mapping[bytes, int]) -> list[int]:
    """Return the tokens that write a text, each the longest that goes on with it; none where they cannot."""
    spelt: list[int] = []
    while text:
        lengths = range(len(text), 0, -1)
        length = next((length for length in lengths if text[:length] in tokens), None)
        if length is None:
            return []
        spelt.append(tokens[text[:length]])
        text = text[length:]
    return spelt


def _tokens_by_bytes(tokenizer: PreTrainedTokenizerBase, num_outputs: int) -> dict[bytes, int]:
    """Return the id of each token by its bytes.

    The empty `b""` is the token that ends a text. Other special tokens are left out, and those without an output.
    """
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    # Added tokens may have SentencePiece's sign in a vocabulary that is byte-level, as DeepSeek's have.
    added = tokenizer.get_added_vocab()
    is_byte_level = not any(_SPACE in token for token in vocabulary.keys() - added.keys())
    tokens: dict[bytes, int] = {}
    for token, number in vocabulary.items():
        if number in special or number >= num_outputs:
            continue
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # `<0xC3>`
            text = bytes.fromhex(token[3:5])
        elif not is_byte_level:
            text = token.replace(_SPACE, " ").encode()
        elif all(character in _BYTE_OF_STAND_IN for character in token):
            text = bytes(_BYTE_OF_STAND_IN[character] for character in token)
        else:
            text = token.encode()
        # A character may have two tokens, one for it and one for its byte: take the smaller id.
        tokens[text] = min(number, tokens.get(text, number))
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id < num_outputs:
        tokens[b""] = int(tokenizer.eos_token_id)
    return tokens
