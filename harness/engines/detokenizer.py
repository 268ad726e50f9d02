"""Turns tokens into text while they are generated. If a character is split between tokens, its text is held back until
the character is whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from harness.engines.tokenizer import Tokenizer

# The largest number of tokens whose text is held back until a character is whole. A character has at most four bytes,
# and so is in at most four tokens. The fourth token may begin another character, which needs up to three more tokens. A
# text that is still broken after seven tokens will never be whole.
_LONGEST_WAIT = 7
# How much of the preceding text is decoded together with each new token: at first this many tokens of the prompt, later
# this many parts of the answer, each with one to seven tokens. This is enough for a new token to get its leading space,
# even after a few special tokens. More context would take more time, because it is decoded again with every new token.
_CONTEXT = 8
# The first character of the context may have begun up to three tokens earlier.
_REST_OF_CHARACTER = 3
# The character that decoders write for bytes that are not a whole character.
BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The growing text after a prompt.

    Each token is decoded together with a few tokens before it (the context), because a tokenizer may write a token
    differently at the beginning of a text. The context begins with a whole character: a tokenizer with byte fallback
    decodes adjacent bytes together, and one broken character would spoil all of them. Special tokens have no text.

    Args:
        prompt: the token ids of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        end_of_prompt = list(prompt[-_CONTEXT:])
        for size in range(_CONTEXT, _CONTEXT + _REST_OF_CHARACTER + 1):
            tokens = list(prompt[-size:])
            if not self._decode(tokens).startswith(BROKEN):
                end_of_prompt = tokens
                break
        # The context before the pending tokens, in parts that begin and end with whole characters.
        self._parts = deque([end_of_prompt], maxlen=_CONTEXT)
        self._pending: list[int] = []

    def add(self, token: int) -> str | None:
        """Return the text that `token` completes, which may be empty; None while a character is incomplete.

        After seven tokens without a complete character, their text is returned with its broken characters.
        """
        self._pending.append(token)
        text = self._new_text()
        if text.endswith(BROKEN) and len(self._pending) < _LONGEST_WAIT:
            return None
        self._advance()
        return text

    def flush(self) -> str:
        """Return the text that is still held back when the answer ends, with its broken character; "" without one."""
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        """Return the text that the pending tokens add to the text of the context."""
        context = [token for part in self._parts for token in part]
        before = self._decode(context)
        return self._decode([*context, *self._pending])[len(before) :]

    def _advance(self) -> None:
        """Let the pending tokens become the last part of the context."""
        self._parts.append(self._pending)
        self._pending = []

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
