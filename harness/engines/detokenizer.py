"""From tokens to text while it is generated: half a character waits for the other half."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from harness.engines.tokenizer import Tokenizer

# A character has at most four bytes, so at most four tokens hold it. The fourth may begin another
# character, which needs up to three more. What is still broken then will never be whole.
_LONGEST_WAIT = 7
# Enough that a new token gets its leading space, even behind a few special tokens; few, because all
# of them are decoded with each new token.
_CONTEXT = 8
# More tokens of the prompt that may belong to the character in which its last ones begin.
_REST_OF_CHARACTER = 3
# What decoding gives for bytes that are not a whole character.
BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text that follows a prompt, as it grows.

    Each token is decoded behind a few of its predecessors, because a tokenizer may write a token
    differently at the start of a text. These begin with a whole character: a tokenizer with byte
    fallback decodes adjacent bytes together, and all of them are broken if one character is. Special
    tokens give no text.

    Args:
        prompt: token ids of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        end_of_prompt = list(prompt[-_CONTEXT:])
        for size in range(_CONTEXT, _CONTEXT + _REST_OF_CHARACTER + 1):
            tokens = list(prompt[-size:])
            if not self._decode(tokens).startswith(BROKEN):
                end_of_prompt = tokens
                break
        # What stands before the pending tokens: parts that begin and end with whole characters.
        self._parts = deque([end_of_prompt], maxlen=_CONTEXT)
        self._pending: list[int] = []

    def add(self, token: int) -> str | None:
        """The text that `token` completes, maybe empty; None while a character is incomplete."""
        self._pending.append(token)
        text = self._new_text()
        if text.endswith(BROKEN) and len(self._pending) < _LONGEST_WAIT:
            return None
        self._advance()
        return text

    def flush(self) -> str:
        """Return the rest when the text ends, with its broken character."""
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        context = [token for part in self._parts for token in part]
        before = self._decode(context)
        return self._decode([*context, *self._pending])[len(before) :]

    def _advance(self) -> None:
        self._parts.append(self._pending)
        self._pending = []

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
