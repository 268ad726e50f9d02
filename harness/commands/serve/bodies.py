"""The parameters of requests, with the names of OpenAI and vLLM. Any other parameter is refused with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

# Parameters of these APIs that never change an answer. `return_spec_tokens_details` asks for acceptance, which this
# service reports with every answer.
_IRRELEVANT = frozenset(
    "metadata priority prompt_cache_key request_id safety_identifier service_tier user "
    "return_spec_tokens_details".split()
)
# Parameters that this service does not support (`tools` and `tool_calls`: outside of chats). They are accepted if they
# are off (0, false or empty), because they then change nothing.
_OFF = frozenset(
    "annotations early_stopping echo frequency_penalty functions include_obfuscation logit_bias min_p min_tokens"
    " presence_penalty return_tokens_as_token_ids store suffix tool_calls tools top_logprobs use_beam_search".split()
)
# Further parameters that are not supported, each with the value at which it changes nothing.
_NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "length_penalty": 1,
    "logprobs": False,
    "modalities": ["text"],
    "n": 1,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}


def _changes_nothing(name: str, value: Any) -> bool:
    """Whether this value of a parameter may be ignored. Always true for null and for parameters that never change an
    answer; false for any other value of an unknown parameter.
    """
    if value is None or name in _IRRELEVANT or (name in _OFF and not value):
        return True
    if name in ("function_call", "tool_choice"):
        return value in ("auto", "none")
    neutral = _NEUTRAL.get(name)
    # Python's 1 equals true and 0 equals false, but `logprobs: 0` asks for the log-probability of the chosen token.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _encodable(text: str) -> str:
    """Return the text, or raise a ValueError, which pydantic reports as the reason for a refusal."""
    # JSON can contain one half of a surrogate pair, which UTF-8 cannot encode.
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("must be text, without half characters")
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]
# OpenAI's API also allows a single text in place of a list.
_LISTED = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
TokenId = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=10**9)]


class Body(BaseModel):
    """A JSON object.

    A member that this service does not support is refused, unless its value changes nothing. A value with the wrong
    type, such as a number in quotes, is refused, too.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_changes_nothing(cls, body: Any) -> Any:
        """Called by pydantic before it checks the members."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if not _changes_nothing(name, value)}


class StreamOptions(Body):
    """Options of a stream: whether the last chunk, or every chunk, has the usage so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """The fields that completions and chats share.

    If `temperature`, `top_p`, `top_k` or both names of the length are left out, the service's own setting is used (a
    shorter length if the context has less room). Without `ignore_eos`, the model's end tokens end an answer, whatever
    the service's setting is. Without `seed`, the seed is drawn at random. `max_completion_tokens`
    counts before `max_tokens`, its old name.
    """

    model: Annotated[Text, Field(max_length=500)] | None = None
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=10**9, description="0 and -1 keep all")
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1000)] = []
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stop: Annotated[list[Stop], Field(max_length=16), _LISTED] = []
    # They change nothing without a stream.
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False


class Completion(GenerationBody):
    """The body of `/v1/completions`: one prompt or several, as text or as token ids."""

    prompt: Text | list[Text] | list[TokenId] | list[list[TokenId]]

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts in a list: `"a"` and `[1, 2]` are one prompt; `["a", "b"]` and `[[1, 2], [3]]` are two. An empty
        list is one prompt without tokens, which is refused later.
        """
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            return prompt
        return [prompt]


class Prediction(Body):
    """The body of `/predict`, an endpoint of LLMSpeculativeSampling's server: only a prompt."""

    prompt: Text


class ContentPart(Body):
    """A part of a message. Only texts are supported, no images."""

    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    """A message of a chat, with the members that chat templates read."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[ContentPart] | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: Text | None = None


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`: messages, and tools for a chat template that supports them.

    Calls of tools are part of the answer's text. If the model has no chat template, the messages become paragraphs of
    one text.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[dict[str, Any]] = []
