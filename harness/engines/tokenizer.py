"""The interface of tokenizers that the instrument uses (`Tokenizer`), and functions that turn prompts into the text
that servers get.

The tokenizers of transformers have this interface. `TextTokenizer` has it too: it is used if only the server has the
real tokenizer. A `ServedPair` is the pair of an engine in another process, of which only a tokenizer is known.
"""

from __future__ import annotations

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

    def __call__(self, text: Any, **options: Any) -> Any:
        """Return the token ids of a text or, for a list of texts, of each text, under the key `input_ids`."""

    def encode(self, text: Any, **options: Any) -> list[int]:
        """Return the token ids of a text."""
        ...

    @property
    def decode(self) -> Callable[..., Any]:
        """A function that returns the text of a list of token ids, or of a single id."""

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

    def __call__(self, text: str | Sequence[str], **options: Any) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": self.encode(text)}
        return {"input_ids": [self.encode(part) for part in text]}

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
    """Return a prompt as text for a server. A token at its beginning that begins a text is left out, because the
    server's tokenizer adds it.
    """
    ids = prompt[1:] if prompt[0] == tokenizer.bos_token_id else prompt
    options = {
        "skip_special_tokens": skip_special_tokens,
        # With this option, some tokenizers, such as Llama 3's, would remove spaces.
        "clean_up_tokenization_spaces": False,
    }
    return str(tokenizer.decode(list(ids), **options))


def tokens_as_served(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Return the tokens that a server reads if the prompt is sent to it as text."""
    return list(tokenizer(prompt_text(tokenizer, prompt))["input_ids"])


def tokens_behind(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text that continues another text.

    The text is encoded after a line break, because some tokenizers add a space before a text that is encoded alone.
    """
    line_break = list(tokenizer("\n", add_special_tokens=False)["input_ids"])
    token_ids = list(tokenizer("\n" + text, add_special_tokens=False)["input_ids"])
    if token_ids[: len(line_break)] == line_break:
        return token_ids[len(line_break) :]
    # A single token contains the line break and the beginning of the text, so that they cannot be separated. The text
    # is encoded alone.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
