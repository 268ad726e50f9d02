"""Turns tokens into text while they are generated; a character that is split between tokens waits for the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from harness.engines.tokenizer import Tokenizer

# The most tokens that wait for a character to become whole. A character has at most four bytes, and so lies in at most
# four tokens. The fourth may begin another character, which needs up to three more. A text that is still broken after
# seven tokens will never be whole.
_LONGEST_WAIT = 7
# How much of the preceding text is decoded with each new token: at first tokens of the prompt, then parts, of which
# each has one to seven tokens. It is enough for a new token to get its leading space, even after a few special tokens.
# More would cost time, because all of them are decoded again with every new token.
_CONTEXT = 8
# The character in which the context begins may have begun up to three tokens earlier.
_REST_OF_CHARACTER = 3
# The character that decoders write for bytes that are not a whole character.
BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text that follows a prompt, as it grows.

    Each token is decoded together with a few tokens before it, because a tokenizer may write a token differently at the
    start of a text. These begin with a whole character. A tokenizer with byte fallback decodes adjacent bytes together,
    and one broken character would spoil all of them. Special tokens give no text.

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
        # The context before the pending tokens, in parts that begin and end with whole characters.
        self._parts = deque([end_of_prompt], maxlen=_CONTEXT)
        self._pending: list[int] = []

    def add(self, token: int) -> str | None:
        """Return the text that `token` completes, maybe empty; None while a character is incomplete.

        After seven tokens that do not complete a character, their text is returned as it is, with broken characters.
        """
        self._pending.append(token)
        text = self._new_text()
        if text.endswith(BROKEN) and len(self._pending) < _LONGEST_WAIT:
            return None
        self._advance()
        return text

    def flush(self) -> str:
        """Return the text that still waits when the answer ends, with its broken character."""
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
