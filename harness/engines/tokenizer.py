"""The interface of tokenizers that the instrument uses (`Tokenizer`), functions that turn prompts into the text that
servers get, and the text of tokens while they are generated (`Detokenizer`).

The tokenizers of transformers have this interface. `TextTokenizer` has it too: it is used if only the server has the
real tokenizer. A `ServedPair` is the pair of an engine in another process, of which only a tokenizer is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from harness.engines.requests import RequestRecord

if TYPE_CHECKING:
    from harness.local.engine.pair import PlannedPair

# How many bytes of text one id of `TextTokenizer` contains: about as many as a real token, so that prompts have about
# the right number of tokens.
_BYTES = 4
# This byte comes before the bytes of text in an id, so that leading zeros are kept.
_MARK = b"\1"


class Tokenizer(Protocol):
    """Turns text into token ids, and token ids into text. `options` are those of transformers.

    Attributes:
        bos_token_id, eos_token_id: the tokens that begin and end a text; None without such a token.
        chat_template: the template for conversations; None without one.
    """

    bos_token_id: Any
    eos_token_id: Any
    chat_template: Any

    def encode(self, text: Any, **options: Any) -> list[int]:
        """Return the token ids of a text."""
        ...

    @property
    def decode(self) -> Callable[..., Any]:
        """A function that returns the text of a list of token ids."""

    @property
    def convert_ids_to_tokens(self) -> Callable[..., Any]:
        """A function that returns a token as it is written in the vocabulary, given its id."""

    def __len__(self) -> int:
        """The number of tokens in the vocabulary."""
        ...


class TextTokenizer:
    """Represents text as token ids for code that expects token ids. Each id contains four bytes of text, the last one
    up to four: `abcdef` becomes two ids, with `abcd` and `ef`. Such ids are never sent to a server.
    """

    bos_token_id = None
    eos_token_id = None
    chat_template = None

    def encode(self, text: str, **options: Any) -> list[int]:
        data = text.encode()
        parts = [data[start : start + _BYTES] for start in range(0, len(data), _BYTES)]
        return [int.from_bytes(_MARK + part) for part in parts]

    def __len__(self) -> int:
        # The mark adds one bit to the bits of the text.
        return 2 << 8 * _BYTES

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        parts = [number.to_bytes(_BYTES + 1).lstrip(b"\0") for number in ids]
        return b"".join(part.removeprefix(_MARK) for part in parts).decode(errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.decode([token])


@dataclass(frozen=True)
class ServedPair:
    """The pair of an engine in another process. Only its tokenizer is known here, so that no limits are checked."""

    tokenizer: Tokenizer

    # These methods of `PlannedPair` check limits.

    def room(self, new_tokens: int) -> None:
        return None

    def excess(self, longest: int, new_tokens: int, answers: str | None = None) -> None:
        return None

    def check_vocabulary(self, token_ids: Sequence[Sequence[int]]) -> None:
        pass


# A pair whose tokenizer encodes prompts: one that was planned in this process, or one in another process.
AnyPair: TypeAlias = "PlannedPair | ServedPair"


def text_of(request: RequestRecord, tokenizer: Tokenizer, **options: Any) -> str:
    """Return the text of an answer, decoded from its token ids. `options` are passed to the tokenizer's `decode`. With
    a `TextTokenizer`, it is the text that the server sent.
    """
    if isinstance(tokenizer, TextTokenizer):
        return request.text
    return str(tokenizer.decode(request.token_ids, **options))


def prompt_text(
    tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = False
) -> str:
    """Return a prompt as text for a server. A first token that the tokenizer puts before every text is left out,
    because the server's tokenizer adds it.
    """
    ids = prompt[1:] if [prompt[0]] == tokenizer.encode("")[:1] else prompt
    text = tokenizer.decode(
        list(ids),
        skip_special_tokens=skip_special_tokens,
        # With this option, some tokenizers, such as Llama 3's, would remove spaces.
        clean_up_tokenization_spaces=False,
    )
    return str(text)


def tokens_as_served(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Return the tokens that a server reads if the prompt is sent to it as text."""
    return tokenizer.encode(prompt_text(tokenizer, prompt))


def tokens_behind(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text that continues another text.

    The text is encoded after a line break, because some tokenizers add a space before a text that is encoded alone.
    """
    line_break = tokenizer.encode("\n", add_special_tokens=False)
    token_ids = tokenizer.encode("\n" + text, add_special_tokens=False)
    if token_ids[: len(line_break)] == line_break:
        return token_ids[len(line_break) :]
    # A single token contains the line break and the beginning of the text, so that they cannot be separated. The text
    # is encoded alone.
    return tokenizer.encode(text, add_special_tokens=False)


# The largest number of tokens whose text is held back until a character is whole. A character has at most four bytes,
# and so is in at most four tokens. If the fourth token also begins another character, that needs up to three more
# tokens. A text that is still broken after seven tokens will never be whole.
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
    """The growing text after a prompt. If a character is split between tokens, its text is held back until it is whole.

    Each token is decoded together with a few tokens before it (the context), because a tokenizer may write a token
    differently at the beginning of a text. The context begins with a whole character: a tokenizer with byte fallback
    decodes adjacent bytes together, and one broken character would spoil all of them. Special tokens have no text.

    Args:
        prompt: the token ids of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        end_of_prompt = list(prompt[-_CONTEXT:])
        # Lengthen the context until it begins with a whole character. If none does, it stays as it is.
        for size in range(_CONTEXT, _CONTEXT + _REST_OF_CHARACTER + 1):
            tokens = list(prompt[-size:])
            if not self._decode(tokens).startswith(BROKEN):
                end_of_prompt = tokens
                break
        # The context before the pending tokens, in parts that normally begin and end with whole characters.
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
